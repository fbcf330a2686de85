"""A Kubernetes node in a machine, as frozen data: what it is made from, and what its host needs. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from msgspec import Struct

from agent.model.text import first_of
from agent.model.typed_json import Base64

Archive: TypeAlias = Literal["", "program", "programs"]


@dataclass(frozen=True, slots=True)
class NodeImage:
    """The image of a root file system, as its registry or archive has it now."""

    name: str
    """The name with its transport (containers-transports(5)). A name in a registry is pinned: it ends in
    `@sha256:...`."""
    digest: str
    """The digest of the manifest for this host's architecture: `sha256:` and 64 hexadecimal digits."""
    architecture: str
    """The architecture's name in Go: amd64, arm64."""
    size: int
    """Bytes of the layers, compressed."""


@dataclass(frozen=True, slots=True)
class NodeBinary:
    """A program, or an archive of some, that is put into the root file system before the machine's first start."""

    name: str
    source: str
    """A URL, or an absolute path in an offline bundle."""
    sha256: str
    path: str
    """The program's path in the machine. For an archive of several programs, their directory."""
    archive: Archive = ""
    """Empty if the file is the program itself. Otherwise, the file is a tar archive compressed by gzip: with `program`,
    it has the program `name`; with `programs`, it has several programs."""


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A file that is put into the root file system before the machine's first start. Parents get mode 0755."""

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a node needs on its host."""

    sysctls: Mapping[str, str]
    modules: tuple[str, ...]
    swap_off: bool
    files: tuple[NodeFile, ...]
    """Files on the host that make the settings above survive a reboot, and one that configures needrestart."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of the host as it was observed."""

    content: Base64
    """In base64, because records are JSON and the content need not be text."""
    mode: int


@dataclass(frozen=True, slots=True)
class Swap:
    """A file or device that is in use as swap."""

    path: str
    priority: int
    """swapon(8); -1 if the kernel chose it."""


@dataclass(frozen=True, slots=True)
class HostState:
    """The values of what HostSettings would change: the current ones or, in AsFound, those before the first change."""

    sysctls: Mapping[str, str | None]
    """None for a parameter that the kernel does not have, perhaps because its module is not loaded."""
    modules: Mapping[str, bool] = field(compare=False)
    """Whether a module is loaded, or built in, by its name. `==` ignores modules, because `reset` cannot unload a
    module that somebody else uses."""
    swaps: tuple[Swap, ...]
    files: Mapping[str, FoundFile | None]
    """None for a file that does not exist."""
    absent_directories: tuple[str, ...] = ()
    """Missing directories that the files need, parents first."""


class Check(Struct, frozen=True):
    """The result of one check before a node is made or removed."""

    name: str
    """What was checked, such as "server"."""
    message: str
    advice: str = ""
    """What to do; empty if all is well."""
    machine: str = ""
    """Empty if the check is about the host."""
    required: bool = True
    """Whether the check must pass before a node can be made."""
    late: bool = False
    """Whether a check that failed may soon pass by itself, because the API server may not have started yet."""

    @property
    def passed(self) -> bool:
        return not self.advice


# The part of the host's network that programs change at run time: links, routes, rules and chains.


NFT = "nft"
"""The program that lists tables of nftables."""


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """A network interface. Addresses and routes of an interface disappear with it."""

    name: str
    kind: str
    """The kernel's name for a virtual interface, such as `bridge`; empty for hardware."""
    bridge: str = field(default="", compare=False)
    """Name of the interface of which this one is a port; empty if it is not a port."""

    def describe(self) -> str:
        return f"interface {self.name} ({self.kind or 'hardware'})"


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """A route, except those that the kernel adds and removes together with addresses."""

    family: int
    """AF_INET or AF_INET6."""
    table: int
    type: int
    """A route type of rtnetlink(7), such as RTN_UNICAST."""
    destination: str
    """An address with its prefix length; empty for a default route."""
    gateway: str
    device: str
    """Name of the interface; empty for a route without one."""
    protocol: int
    """Which program made the route (rtm_protocol in rtnetlink(7))."""
    priority: int

    def describe(self) -> str:
        via = "".join(f" {word} {value}" for word, value in (("via", self.gateway), ("on", self.device)) if value)
        return f"route to {self.destination or 'default'}{via} (table {self.table})"


@dataclass(frozen=True, slots=True, order=True)
class Rule:
    """A rule that chooses a routing table."""

    family: int
    priority: int
    action: int
    table: int
    source: str = ""
    destination: str = ""
    mark: int = 0
    mask: int = 0
    incoming: str = ""
    outgoing: str = ""

    def describe(self) -> str:
        mark = f"{self.mark:#x}" if self.mark else ""
        ends = (("from", self.source), ("to", self.destination), ("mark", mark))
        words = (*ends, ("iif", self.incoming), ("oif", self.outgoing))
        what = " ".join(f"{word} {value}" for word, value in words if value)
        return f"rule {self.priority} {what or 'for all'} (table {self.table})"


@dataclass(frozen=True, slots=True, order=True)
class Chains:
    """Chains that Kubernetes' programs make in one table of the packet filter."""

    program: str
    """The variant of iptables that lists them, such as `iptables-nft`; NFT for a whole table of nftables."""
    table: str
    """Empty if the program could not list the chains. For a table of nftables, its family and its name."""
    names: tuple[str, ...]
    """Empty for a table of nftables."""

    def describe(self) -> str:
        if self.program == NFT:
            return f"table {self.table} ({NFT})"
        return f"chain {first_of(self.names, 1)} ({self.program}, table {self.table})"


Leftover: TypeAlias = Link | Route | Rule | Chains


@dataclass(frozen=True, slots=True)
class Network:
    """The network of the host's own namespace."""

    links: tuple[Link, ...] = ()
    routes: tuple[Route, ...] = ()
    rules: tuple[Rule, ...] = ()
    chains: tuple[Chains, ...] = ()
    tables: bool = False
    """Whether tables of nftables were looked for: only if the host has nft."""


# The host as it was before `up` first changed it, as frozen data. `reset` restores that state. Pure.


@dataclass(frozen=True, slots=True)
class AsFound:
    """The record of that state."""

    host: HostState
    units: Mapping[str, bool]
    """Whether each unit that the agent enables was enabled already, by the unit's name."""
    network: Network
    recorded: float
    """When the record was first made, in seconds since the epoch."""

    def extended(self, host: HostState, units: Mapping[str, bool]) -> "AsFound":
        """Return the record with values added: the current values of what `up` will change to make one more node.

        If the record already has a value for the same thing, that value stays, because it is the original one.
        """
        earlier = self.host
        state = HostState(
            sysctls={**host.sysctls, **earlier.sysctls},
            modules={**host.modules, **earlier.modules},
            swaps=(
                *earlier.swaps,
                *(each for each in host.swaps if each.path not in {old.path for old in earlier.swaps}),
            ),
            files={**host.files, **earlier.files},
            absent_directories=tuple(dict.fromkeys((*earlier.absent_directories, *host.absent_directories))),
        )
        return replace(self, host=state, units={**units, **self.units})
