"""Compares the host's network with the network as it was found, and decides what a node left. Pure.

Only what was not there before counts. Interfaces and rules of other programs may have been added since, so an interface
must also be virtual and have a name that CNI plugins or kube-proxy use; other new ones are only reported.
"""

import re
from dataclasses import dataclass

from agent.model.network import Link, Network, Route, Rule

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

    remove: tuple[Link | Route | Rule, ...]
    """What a node made, in the order of removal: rules first, interfaces last."""
    keep: tuple[Link | Route | Rule, ...]
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
    kept: list[Link | Route | Rule] = [each for new in foreign for each in new]
    kept += [each for each in rules if each not in unused]
    return Leftovers((*unused, *made, *ours), tuple(kept))
