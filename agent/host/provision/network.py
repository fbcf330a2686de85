"""Lists and removes the chains of packet filter rules that kube-proxy, the kubelet and network plugins make.

For chains of iptables, this module runs iptables' own programs, because only they can read the rules that they keep in
the kernel's nftables. kube-proxy and network plugins may also use nftables without iptables: the whole tables that they
make there are listed and removed with nft.
"""

import contextlib
import re
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from agent.model.errors import CommandError
from agent.model.node import NFT, Chains, Leftover, Network
from agent.model.paths import CHAINS_REMOVAL
from agent.system.files import System
from agent.system.network import NetworkSource

FAMILIES = ("iptables", "ip6tables")
KINDS = ("nft", "legacy")
"""Variants of iptables. Each has rules of its own, and a host may have both. A variant's programs have the variant in
their names, such as iptables-nft-save. If a host has no such programs, it has only one variant, with programs such as
iptables-save."""
KUBERNETES = re.compile(r"(KUBE|CNI|FLANNEL|ANTREA)-[\w.-]+|(OLD_)?CILIUM_[\w.-]+|WEAVE(-[\w.-]+)?|cali-[\w.-]+", re.A)
"""Names of chains that kube-proxy, the kubelet, CNI plugins and network plugins make."""
INTERFACES = ("-i", "-o", "--physdev-in", "--physdev-out")
"""Options with the name of an interface."""
QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"(?=[ \n]|\Z)', re.DOTALL)
ESCAPED = re.compile(r"\\(.)", re.DOTALL)
WORD_END = re.compile(r"[ \n]|\Z")
TABLE = re.compile(r"table (ip6? (?:kube-proxy|flannel-ipv[46]|calico))")
"""A line of `nft list tables` with a table of kube-proxy, Flannel or Calico."""
LIMIT = 120.0
"""Seconds for one program to list or change all rules."""


def observe_network(network: NetworkSource, system: System) -> Network:
    """Return the host's network, with Kubernetes' chains and tables. Raises OSError."""
    # Without nft, `tables` is False: there may be tables nevertheless, because any program can make them.
    tables = system.find_program(NFT) is not None
    return replace(network.observe(), chains=observe_chains(system), tables=tables)


def observe_chains(system: System) -> tuple[Chains, ...]:
    """Return Kubernetes' chains of iptables, and Kubernetes' whole tables of nftables.

    For a program that cannot list its chains or tables, return one entry whose `table` is empty.
    """
    found: list[Chains] = []
    for family in FAMILIES:
        kinds = [f"{family}-{kind}" for kind in KINDS]
        programs = [program for program in kinds if system.find_program(f"{program}-save")]
        for program in programs or ([family] if system.find_program(f"{family}-save") else []):
            found += _chains(program, system)
    return (*found, *(_tables(system) if system.find_program(NFT) else ()))


def _tables(system: System) -> list[Chains]:
    try:
        listed = system.run(NFT, "list", "tables", timeout=LIMIT)
    except CommandError:
        return [Chains(NFT, "", ())]
    return [Chains(NFT, found[1], ()) for line in listed.splitlines() if (found := TABLE.fullmatch(line.strip()))]


def _chains(program: str, system: System) -> list[Chains]:
    try:
        saved = system.run(f"{program}-save", timeout=LIMIT)
    except CommandError:
        return [Chains(program, "", ())]
    tables: dict[str, list[str]] = {}
    names: list[str] = []
    for words in _lines(saved):
        if len(words) == 1 and words[0].startswith("*"):
            names = tables.setdefault(words[0][1:], [])
        elif name := _chain(words):
            names.append(name)
    return [Chains(program, table, tuple(sorted(names))) for table, names in sorted(tables.items()) if names]


def _lines(saved: str) -> Iterator[list[str]]:
    """Yield the words of each line that iptables-save prints.

    This is no shell syntax. Whole words are quoted, and may then contain line breaks, as comments of rules may. Names
    of interfaces are printed as they are: they may contain quotation marks, but no spaces.
    """
    words: list[str] = []
    at = 0
    while at < len(saved):
        if saved[at] in " \n":
            if saved[at] == "\n":
                yield words
                words = []
            at += 1
        elif found := None if words and words[-1] in INTERFACES else QUOTED.match(saved, at):
            words.append(ESCAPED.sub(r"\1", found[1]))
            at = found.end()
        else:
            words.append(saved[at : (at := WORD_END.search(saved, at).start())])  # type: ignore[union-attr]
    yield words


def _chain(words: list[str]) -> str:
    """Return the name of Kubernetes' chain that a line declares; empty if it declares none."""
    is_chain = len(words) == 3 and words[0].startswith(":") and KUBERNETES.fullmatch(words[0][1:])
    return words[0][1:] if is_chain else ""


def remove_chains(chains: Chains, system: System) -> None:
    """Remove chains, and the rules of other chains that jump to them; for NFT, remove the whole table.

    Raises CommandError or OSError.
    """
    if chains.program == NFT:
        if chains in _tables(system):
            system.run(NFT, "delete", "table", *chains.table.split(), timeout=LIMIT)
        return
    saved = [*_lines(system.run(f"{chains.program}-save", "--table", chains.table, timeout=LIMIT))]
    present = {name for words in saved if (name := _chain(words))}
    names = [name for name in chains.names if name in present]
    for words in saved:
        match words:
            # A rule that leads to a chain ends with its name.
            case ["-A", chain, *_, "-j" | "-g", target] if chain not in names and target in names:
                # The rule's words become arguments: a file for iptables-restore cannot have a line break in a comment.
                with contextlib.suppress(CommandError):
                    system.run(chains.program, "--wait", "--table", chains.table, "-D", *words[1:], timeout=LIMIT)
            case _:
                pass
    # One call, because a cluster with many services has thousands of chains. All or nothing is done.
    emptied, removed = ([f"{flag} {name}" for name in names] for flag in ("-F", "-X"))
    try:
        _restore(chains, [*emptied, *removed], system)
    except CommandError:
        # A rule that leads to one of the chains is still there. `reset` compares the network again, and names what is
        # left.
        _restore(chains, emptied, system)
        for each in removed:
            with contextlib.suppress(CommandError):
                _restore(chains, [each], system)


def _restore(chains: Chains, changes: list[str], system: System) -> None:
    system.write(CHAINS_REMOVAL, "\n".join([f"*{chains.table}", *changes, "COMMIT", ""]).encode(), 0o600)
    try:
        system.run(f"{chains.program}-restore", "--noflush", system.full_path(CHAINS_REMOVAL), timeout=LIMIT)
    finally:
        system.remove(CHAINS_REMOVAL)


# Compares the host's network with the network as it was found, and decides what a node left. Pure.
#
# Only what is new counts: what the network did not have when it was found. Other programs may have added interfaces
# since then, so a new interface counts as a node's only if it is virtual and has a name that CNI plugins or kube-proxy
# use. Other new interfaces are only reported.


NAMES = re.compile(
    r"(kube-|flannel|cilium|weave|vethwe|antrea|(genev|vxlan)_sys_|nodelocaldns|dummy-kube|wireguard\.cali|wg-v6\.cali)|"
    r"((cni|cbr)[0-9]+|tunl0|ip6tnl0|cali[0-9a-f]+|vxlan(-v6)?\.calico|vxlan-6784|"
    r"lxc([0-9a-f]+|_.*))$"
)
"""Names, or beginnings of names, of the interfaces that CNI plugins and kube-proxy make. The bridges of LXC and Podman
(lxcbr0, cni-podman0) do not match, nor do names that administrators choose, such as vxlan100."""
PORTS = re.compile(r"veth[0-9a-f]{8}$")
"""Names that CNI plugins give to pods' interfaces. Incus and LXD give such names to their instances' interfaces.
So `reset` removes such an interface only if it is a port of a node's bridge. Other interfaces of pods need no removal:
the kernel removes them with their pods."""
PROTOCOLS = (0, 3, 12)
"""Origins of a node's routes (rtnetlink(7)): unspecified, boot (Flannel) and BIRD (Calico). Routes of any other origin
are not a node's. Some belong to the host's own daemons, such as DHCP clients and routing daemons. The others are static
routes: systemd-networkd and NetworkManager set these as an administrator configured them."""
MAIN_TABLES = {253, 254, 255}
"""The host's own tables: default, main and local. Rules that lead to them may belong to anybody."""
NO_TABLE = 0
"""The table number of rules that lead to no table, such as `unreachable` and `goto`. These may belong to anybody."""


class Leftovers(Struct, frozen=True):
    """What is new in the host's network."""

    remove: tuple[Leftover, ...]
    """What a node made, in the order of removal: chains and rules first, interfaces last."""
    keep: tuple[Leftover, ...]
    """What may belong to somebody else."""


NO_LEFTOVERS = Leftovers((), ())


def leftovers(found: Network, now: Network) -> Leftovers:
    """Return what was added after the network was found, divided into what to remove and what to keep."""
    # Not by the bridge: an old interface may be a port of another one by now.
    known = {(each.name, each.kind) for each in found.links}
    links = [each for each in now.links if (each.name, each.kind) not in known]
    node_links = [each for each in links if each.kind and NAMES.match(each.name)]
    bridges = {each.name for each in node_links}
    node_links += [each for each in links if each.kind and PORTS.match(each.name) and each.bridge in bridges]
    node_devices = {each.name for each in node_links}
    routes = [each for each in now.routes if each not in found.routes]
    # Leave out routes on new interfaces. Those on a node's interface disappear with the interface, and those on another
    # new interface are not a node's.
    new_names = {each.name for each in links}
    other_routes = [each for each in routes if each.device not in new_names]
    node_routes = [each for each in other_routes if each.destination and each.protocol in PROTOCOLS]
    # A new rule is a node's if it names a node's interface, or leads to a table in which no route stays after `reset`.
    staying = (each for each in (*found.routes, *routes) if each not in node_routes and each.device not in node_devices)
    used = {each.table for each in staying} | MAIN_TABLES | {NO_TABLE}
    rules = [each for each in now.rules if each not in found.rules]
    node_rules = [each for each in rules if node_devices & {each.incoming, each.outgoing} or each.table not in used]
    kept: list[Leftover] = [each for each in links if each not in node_links]
    kept += [each for each in other_routes if each not in node_routes]
    kept += [each for each in rules if each not in node_rules]
    # If a program (a variant of iptables, or nft) had Kubernetes' chains when the network was found, or could not list
    # its chains then, all its chains stay. Without nft, its tables of now may have existed then.
    unknown = {each.program for each in found.chains} | (set() if found.tables else {NFT})
    chains = [each for each in now.chains if each.table and each not in found.chains]
    kept += [each for each in chains if each.program in unknown]
    node_chains = [each for each in chains if each.program not in unknown]
    return Leftovers((*node_chains, *node_rules, *node_routes, *node_links), tuple(kept))
