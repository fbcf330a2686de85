"""A Kubernetes node in a machine: what it is made from, and what its host needs. Pure."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from agent.model.text import first_of
from agent.model.typed_json import Base64

Archive: TypeAlias = Literal["", "program", "programs", "images"]
"""What a fetched file is: the program itself, or a tar archive compressed by gzip with the program, or with several; or
an archive of pods' images, which is not unpacked."""


class NodeImage(Struct, frozen=True):
    """The image of a root file system, as its registry or archive has it now."""

    name: str
    """With its transport (containers-transports(5)). A name in a registry is pinned: it ends in `@sha256:...`."""
    digest: str
    """Of the manifest for this host's architecture: `sha256:` and 64 hexadecimal digits."""
    architecture: str
    """The architecture's name in Go: amd64, arm64."""
    size: int
    """Bytes of the layers, compressed."""


class NodeBinary(Struct, frozen=True):
    """A program, or an archive of some, that is put into the root file system before the machine's first start."""

    name: str
    source: str
    """A URL, or an absolute path in an offline bundle."""
    sha256: str
    path: str
    """The program's path in the machine. For an archive of several programs, their directory."""
    archive: Archive = ""


class NodeFile(Struct, frozen=True):
    """A file that is put into the root file system before the machine's first start. Parents get mode 0755."""

    path: str
    content: bytes
    mode: int = 0o644

    def __repr__(self) -> str:
        # Without the content, which may be secret.
        return f"<file {self.path}>"


class HostSettings(Struct, frozen=True):
    """What a node needs on its host. The files make the settings survive a reboot; one configures needrestart."""

    sysctls: Mapping[str, str]
    modules: tuple[str, ...]
    swap_off: bool
    files: tuple[NodeFile, ...]


class FoundFile(Struct, frozen=True):
    """A file of the host as it was observed."""

    content: Base64
    mode: int


class Swap(Struct, frozen=True):
    """A file or device that is in use as swap."""

    path: str
    priority: int
    """swapon(8); -1 if the kernel chose it."""


class HostState(Struct, frozen=True):
    """The values of what HostSettings would change: the current ones or, in AsFound, those before the first change."""

    sysctls: Mapping[str, str | None]
    """None for a parameter that the kernel does not have, perhaps because its module is not loaded."""
    modules: Mapping[str, bool]
    """Whether a module is loaded or built in, by its name."""
    swaps: tuple[Swap, ...]
    files: Mapping[str, FoundFile | None]
    absent_directories: tuple[str, ...] = ()
    """Missing directories that the files need, parents first."""


class Check(Struct, frozen=True):
    """The result of one check before a node is made or removed."""

    name: str
    """What was checked, such as "server"."""
    message: str
    advice: str | None = None
    """What to do; None if all is well."""
    machine: str = ""
    """Empty if the check is about the host."""
    required: bool = True
    """Whether the check must pass before a node can be made."""
    late: bool = False
    """Whether a check that failed may soon pass by itself, because the API server may not have started yet."""

    @property
    def passed(self) -> bool:
        return self.advice is None


# The part of the host's network that programs change at run time: links, routes, rules and chains.

NFT = "nft"
"""The program that lists tables of nftables."""


class Link(Struct, frozen=True, order=True):
    """A network interface. Addresses and routes of an interface disappear with it."""

    name: str
    kind: str
    """The kernel's name for a virtual interface, such as `bridge`; empty for hardware."""
    bridge: str = ""
    """Name of the interface of which this one is a port; empty if it is not a port."""

    def describe(self) -> str:
        return f"interface {self.name} ({self.kind or 'hardware'})"


class Route(Struct, frozen=True, order=True):
    """A route, except those that the kernel adds and removes together with addresses (rtnetlink(7))."""

    family: int
    table: int
    type: int
    destination: str
    """An address with its prefix length; empty for a default route."""
    gateway: str
    device: str
    """Name of the interface; empty for a route without one."""
    protocol: int
    """Which program made the route (rtm_protocol)."""
    priority: int

    def describe(self) -> str:
        via = "".join(f" {word} {value}" for word, value in (("via", self.gateway), ("on", self.device)) if value)
        return f"route to {self.destination or 'default'}{via} (table {self.table})"


class Rule(Struct, frozen=True, order=True):
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


class Chains(Struct, frozen=True, order=True):
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


class Network(Struct, frozen=True):
    """The network of the host's own namespace."""

    links: tuple[Link, ...] = ()
    routes: tuple[Route, ...] = ()
    rules: tuple[Rule, ...] = ()
    chains: tuple[Chains, ...] = ()
    tables: bool = False
    """Whether tables of nftables were looked for: only if the host has nft."""


class AsFound(Struct, frozen=True):
    """The record of the host as it was before `up` first changed it. `reset` restores that state."""

    host: HostState
    units: Mapping[str, bool]
    """Whether each unit that the agent enables was enabled already, by the unit's name."""
    network: Network
    recorded: float
    """When the record was first made, in seconds since the epoch."""

    def extended(self, host: HostState, units: Mapping[str, bool]) -> "AsFound":
        """Add the current values of what `up` will change to make one more node. Recorded values stay as they are."""
        earlier = self.host
        known = {each.path for each in earlier.swaps}
        state = HostState(
            sysctls={**host.sysctls, **earlier.sysctls},
            modules={**host.modules, **earlier.modules},
            swaps=(*earlier.swaps, *(each for each in host.swaps if each.path not in known)),
            files={**host.files, **earlier.files},
            absent_directories=tuple(dict.fromkeys((*earlier.absent_directories, *host.absent_directories))),
        )
        return replace(self, host=state, units={**units, **self.units})
