"""Compares the host's network with the network as it was found, and decides what a node left. Pure.

Only what was not there before counts. Interfaces and rules of other programs may have been added since, so an interface
must also be virtual and have a name that CNI plugins or kube-proxy use; other new ones are only reported.
"""

import re
from dataclasses import dataclass

from agent.model.network import Leftover, Network

NAMES = re.compile(
    r"(cni|cbr|kube-|cali|tunl0|vxlan|flannel|cilium|lxc|weave|vethwe|antrea|gw0|genev_sys|nodelocaldns|dummy-kube|"
    r"ip6tnl0|wireguard\.cali|wg-v6\.cali)|veth[0-9a-f]{8}$"
)
"""Names of interfaces that CNI plugins and kube-proxy make."""
PROTOCOLS = (0, 3, 4, 12)
"""rtnetlink(7): unspecified, boot, static and BIRD: who makes a node's routes. Others belong to the host's own daemons,
such as DHCP clients and routing daemons."""
MAIN_TABLES = {253, 254, 255}
"""The host's own tables: default, main and local. Rules that lead there may be anybody's."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What is new in the host's network."""

    remove: tuple[Leftover, ...]
    """What a node made, in the order of removal: chains and rules first, interfaces last."""
    keep: tuple[Leftover, ...]
    """What may be somebody else's."""


def leftovers(found: Network, now: Network) -> Leftovers:
    """Return what was added since the network was found, by what may be removed."""
    links = [each for each in now.links if each not in found.links]
    ours = [each for each in links if each.kind and NAMES.match(each.name)]
    names = {each.name for each in ours}
    others = {each.name for each in links} - names
    routes = [each for each in now.routes if each not in found.routes]
    # The routes of an interface disappear with it. Those of other new interfaces are not a node's.
    single = [each for each in routes if each.device not in names | others]
    made = [each for each in single if each.destination and each.protocol in PROTOCOLS]
    used = {each.table for each in (*found.routes, *routes) if each.device not in names and each not in made}
    rules = [each for each in now.rules if each not in found.rules]
    unused = [each for each in rules if names & {each.incoming, each.outgoing} or each.table not in used | MAIN_TABLES]
    foreign = [[each for each in new if each not in gone] for new, gone in ((links, ours), (single, made))]
    kept: list[Leftover] = [each for new in foreign for each in new]
    kept += [each for each in rules if each not in unused]
    # Chains of a Kubernetes that was there before, or of an unknown one, stay with all that is in them.
    known = {each.program for each in found.chains}
    chains = [each for each in now.chains if each.table and each not in found.chains]
    kept += [each for each in chains if each.program in known]
    filters = [each for each in chains if each.program not in known]
    return Leftovers((*filters, *unused, *made, *ours), tuple(kept))
