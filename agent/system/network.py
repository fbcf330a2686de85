"""Lists and removes links, routes and rules of the host's network, by netlink. Raises OSError."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from agent.model.errors import AgentError
from agent.model.node import Link, Network, Route, Rule

if TYPE_CHECKING:
    # At run time, pyroute2 is imported where it is used: importing it takes more processor time than all else that a
    # command imports (0.16 s against 0.13 s), and only the first `up` on a host, and `reset`, need it.
    from pyroute2 import IPRoute
    from pyroute2.netlink import nlmsg

LOCAL_TABLE = 255
KERNEL = 2
"""RTPROT_KERNEL of rtnetlink(7): the kernel adds and removes these routes together with addresses."""
FAMILIES = (socket.AF_INET, socket.AF_INET6)
GONE = (errno.ENODEV, errno.ENOENT, errno.ESRCH)
"""Errors when something that no longer exists is removed."""


class NetworkSource(Protocol):
    """Observes and changes the host's network."""

    def observe(self) -> Network: ...

    def remove(self, leftover: Link | Route | Rule) -> None: ...


class HostNetwork:
    """The network namespace of this process."""

    def observe(self) -> Network:
        """Return the links, rules and routes, except the kernel's own routes.

        iptables lists the chains, so `chains` stays empty here.
        """
        with connected() as netlink:
            messages = [*netlink.get_links()]
            names = {each["index"]: str(each.get("ifname")) for each in messages}
            links = [
                Link(
                    name=names[each["index"]],
                    kind=str(each.get_nested("linkinfo", "kind") or ""),
                    bridge=names.get(each.get("master") or 0, ""),
                )
                for each in messages
            ]
            return Network(
                tuple(sorted(links)), tuple(sorted(_routes(netlink, names))), tuple(sorted({*_rules(netlink)}))
            )

    def remove(self, leftover: Link | Route | Rule) -> None:
        """Remove a link, route or rule, unless it no longer exists."""
        try:
            with connected() as netlink:
                _remove(netlink, leftover)
        except OSError as error:
            if error.errno not in GONE:
                raise


@contextmanager
def connected() -> Iterator[IPRoute]:
    """Yield a netlink connection. The library's own exceptions become OSError."""
    from pyroute2 import IPRoute, NetlinkError

    try:
        with IPRoute() as connection:
            yield connection
    except NetlinkError as error:
        raise OSError(error.code, str(error.args[-1])) from error


def _routes(netlink: IPRoute, names: dict[int, str]) -> Iterator[Route]:
    for message in netlink.get_routes():
        table = message.get("table") or 0
        if message["proto"] == KERNEL or table == LOCAL_TABLE or message["family"] not in FAMILIES:
            continue
        destination = message.get("dst")
        yield Route(
            family=message["family"],
            table=table,
            type=message["type"],
            destination=f"{destination}/{message['dst_len']}" if destination else "",
            gateway=message.get("gateway") or "",
            device=names.get(message.get("oif") or 0, ""),
            protocol=message["proto"],
            priority=message.get("priority") or 0,
        )


def _rules(netlink: IPRoute) -> Iterator[Rule]:
    for family in FAMILIES:
        for message in netlink.get_rules(family=family):
            yield Rule(
                family=message["family"],
                priority=message.get("priority") or 0,
                action=message["action"],
                table=message.get("table") or 0,
                source=_prefix(message, "src"),
                destination=_prefix(message, "dst"),
                mark=message.get("fwmark") or 0,
                mask=message.get("fwmask") or 0,
                incoming=message.get("iifname") or "",
                outgoing=message.get("oifname") or "",
            )


def _prefix(message: nlmsg, name: str) -> str:
    address = message.get(name)
    return f"{address}/{message[f'{name}_len']}" if address else ""


def _remove(netlink: IPRoute, leftover: Link | Route | Rule) -> None:
    match leftover:
        case Link(name):
            if indices := netlink.link_lookup(ifname=name):
                netlink.link("del", index=indices[0])
        case Route() as route:
            indices = netlink.link_lookup(ifname=route.device) if route.device else ()
            if route.device and not indices:
                # The kernel has removed the route with its link. Without `oif`, the route of another link might be
                # removed.
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), route.device)
            values = {"gateway": route.gateway, "oif": indices[0] if indices else 0, "priority": route.priority}
            netlink.route(
                "del",
                family=route.family,
                table=route.table,
                type=route.type,
                dst=route.destination or "default",
                proto=route.protocol,
                **{name: value for name, value in values.items() if value},
            )
        case Rule() as rule:
            values = {
                "src": rule.source,
                "dst": rule.destination,
                "fwmark": rule.mark,
                "fwmask": rule.mask if rule.mark else 0,
                "iifname": rule.incoming,
                "oifname": rule.outgoing,
            }
            netlink.rule(
                "del",
                family=rule.family,
                priority=rule.priority,
                action=rule.action,
                table=rule.table,
                **{name: value for name, value in values.items() if value},
            )


# Finds the host's address on its default route, by netlink. Raises OSError.

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

    Raises AgentError if there is no such address.
    """
    with connected() as netlink:
        for family in (socket.AF_INET, socket.AF_INET6):
            # The library's own filter by table lets routes of other tables pass (pyroute2 0.9.7).
            routes = [
                each
                for each in netlink.get_default_routes(family=family)
                if each.get("table") == MAIN_TABLE and each["type"] == UNICAST
            ]
            for route in sorted(routes, key=lambda each: each.get("priority") or 0):
                if address := _source(netlink, route, family) or _chosen(family):
                    return address
    raise AgentError(
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


def _source(netlink: IPRoute, route: nlmsg, family: int) -> str:
    if preferred := route.get("prefsrc"):
        return str(preferred)
    index = route.get("oif") or next((hop["oif"] for hop in route.get("multipath") or ()), 0)
    for address in netlink.get_addr(family=family, index=index) if index else ():
        if address["scope"] == UNIVERSE and not (address.get("flags") or address["flags"]) & UNUSABLE:
            # On a point-to-point link, `address` is the other side's.
            return str(address.get("local") or address.get("address"))
    return ""
