"""The part of the host's network that programs change at run time: links, routes, rules and chains."""

from dataclasses import dataclass, field
from typing import TypeAlias

from agent.model.text import first_of

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
