"""Lists and removes links, routes and rules of the host's network, by netlink. Raises OSError."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from agent.model.network import Link, Network, Route, Rule

if TYPE_CHECKING:
    # At run time, pyroute2 is imported where it is used: importing it takes as long as all other imports of a command.
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
            return Network(
                links=tuple(sorted(_link(each, names) for each in messages)),
                routes=tuple(sorted(_routes(netlink, names))),
                rules=tuple(sorted(set(_rules(netlink)))),
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
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as connection:
            yield connection
    except NetlinkError as error:
        raise OSError(error.code, str(error.args[-1])) from error


def _link(message: nlmsg, names: dict[int, str]) -> Link:
    return Link(
        name=names[message["index"]],
        kind=str(message.get_nested("linkinfo", "kind") or ""),
        bridge=names.get(message.get("master") or 0, ""),
    )


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
            indices = netlink.link_lookup(ifname=name)
            if indices:
                netlink.link("del", index=indices[0])
        case Route():
            netlink.route("del", **_route_arguments(netlink, leftover))
        case Rule():
            netlink.rule("del", **_rule_arguments(leftover))


def _route_arguments(netlink: IPRoute, route: Route) -> dict[str, object]:
    indices = netlink.link_lookup(ifname=route.device) if route.device else ()
    if route.device and not indices:
        # The kernel has removed the route with its link. Without `oif`, the route of another link might be removed.
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), route.device)
    return {
        "family": route.family,
        "table": route.table,
        "type": route.type,
        "dst": route.destination or "default",
        "proto": route.protocol,
        **({"gateway": route.gateway} if route.gateway else {}),
        **({"oif": indices[0]} if indices else {}),
        **({"priority": route.priority} if route.priority else {}),
    }


def _rule_arguments(rule: Rule) -> dict[str, object]:
    values = {
        "src": rule.source,
        "dst": rule.destination,
        "fwmark": rule.mark,
        "fwmask": rule.mask if rule.mark else 0,
        "iifname": rule.incoming,
        "oifname": rule.outgoing,
    }
    chosen = {name: value for name, value in values.items() if value}
    return {"family": rule.family, "priority": rule.priority, "action": rule.action, "table": rule.table, **chosen}
