"""Finds the host's address on its default route, by netlink. Raises OSError."""

import errno
import ipaddress
import socket
from typing import TYPE_CHECKING

from agent.model.errors import ObservationError
from agent.system.network import connected

if TYPE_CHECKING:
    from pyroute2 import IPRoute
    from pyroute2.netlink import nlmsg

MAIN_TABLE = 254
UNICAST = 1
"""RTN_UNICAST of rtnetlink(7): a route that forwards packets. Other types block destinations, for example."""
UNIVERSE = 0
"""RT_SCOPE_UNIVERSE of rtnetlink(7): the scope of an address that other hosts can reach."""
FAR: dict[int, str] = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that no host has (RFC 5737, RFC 3849). Packets to them take the default route."""
IPV6_ADDR_PREFERENCES, IPV6_PREFER_SRC_PUBLIC = 72, 2
"""linux/in6.h: choose no temporary address."""
UNUSABLE = 0x01 | 0x08 | 0x20 | 0x40
"""Flags of addresses that cannot be a node's address (linux/if_addr.h): IFA_F_SECONDARY, which temporary addresses have
too, IFA_F_DADFAILED, IFA_F_DEPRECATED and IFA_F_TENTATIVE."""


def default_address() -> str:
    """Return the source address of packets that take the default route. IPv4 is preferred to IPv6.

    Raises ObservationError if there is no such address.
    """
    with connected() as netlink:
        for family in (socket.AF_INET, socket.AF_INET6):
            # The library's own filter by table lets routes of other tables pass (pyroute2 0.9.7).
            routes = (each for each in netlink.get_default_routes(family=family) if _is_main(each))
            for route in sorted(routes, key=lambda each: each.get("priority") or 0):
                if address := _source(netlink, route, family) or _chosen(family):
                    return address
    raise ObservationError(
        "the host has no default route with an address, so the node's address is unknown",
        "set node.kubelet.node_ip, or configure the host's network",
    )


def _chosen(family: int) -> str:
    """Return the address that the kernel itself chooses; empty if other hosts cannot reach it.

    If the interface of the default route has none, as on hosts whose address is on `lo` and is announced by BGP, the
    kernel takes one of another interface.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as found:
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, IPV6_ADDR_PREFERENCES, IPV6_PREFER_SRC_PUBLIC)
        try:
            # This sends nothing.
            found.connect((FAR[family], 9))
        except OSError:
            return ""
        address = ipaddress.ip_address(found.getsockname()[0].partition("%")[0])
    return "" if address.is_link_local or address.is_loopback else str(address)


def has_address(address: str) -> bool:
    """Return whether an address is one of this host's, without the netlink library, which takes long to load.

    With net.ipv4.ip_nonlocal_bind = 1, every address counts as the host's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as found:
        try:
            found.bind((address, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return False
            raise
    return True


def _is_main(route: "nlmsg") -> bool:
    return bool(route.get("table") == MAIN_TABLE and route["type"] == UNICAST)


def _source(netlink: "IPRoute", route: "nlmsg", family: int) -> str:
    """Return the source address of packets on a route; empty if there is none."""
    if preferred := route.get("prefsrc"):
        return str(preferred)
    index = route.get("oif") or next((hop["oif"] for hop in route.get("multipath") or ()), 0)
    for address in netlink.get_addr(family=family, index=index) if index else ():
        if address["scope"] == UNIVERSE and not (address.get("flags") or address["flags"]) & UNUSABLE:
            # On a point-to-point link, `address` is the other side's.
            return str(address.get("local") or address.get("address"))
    return ""
