"""Compares the host's network with the network as it was found, and decides what a node left. Pure.

Only what is new counts: what the network did not have when it was found. Other programs may have added interfaces since
then, so a new interface counts as a node's only if it is virtual and has a name that CNI plugins or kube-proxy use.
Other new interfaces are only reported.
"""

import re

from msgspec import Struct

from agent.model.network import NFT, Leftover, Network

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


def leftovers(found: Network, now: Network) -> Leftovers:
    """Return what was added after the network was found, divided into what to remove and what to keep."""
    links = [each for each in now.links if each not in found.links]
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
    # its chains then, all its chains stay.
    had_chains = {each.program for each in found.chains}
    chains = [each for each in now.chains if each.table and each not in found.chains]
    kept += [each for each in chains if each.program in had_chains]
    node_chains = [each for each in chains if each.program not in had_chains]
    if not found.tables:
        # There was no nft, so the tables that exist now may have existed when the record was made.
        kept += [each for each in node_chains if each.program == NFT]
        node_chains = [each for each in node_chains if each.program != NFT]
    return Leftovers((*node_chains, *node_rules, *node_routes, *node_links), tuple(kept))
