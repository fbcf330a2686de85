"""Observes which DNS servers programs on this host use."""

import ipaddress

from agent.system.files import System
from agent.system.seen import read_seen

RESOLV_CONF = "/etc/resolv.conf"
STUB = "/run/systemd/resolve/stub-resolv.conf"
"""Names systemd-resolved, at 127.0.0.53, as the DNS server. On most hosts that use systemd-resolved, RESOLV_CONF is a
link to this file, even while systemd-resolved is not running."""
UPLINK = "/run/systemd/resolve/resolv.conf"
"""Names the DNS servers that systemd-resolved itself queries (systemd-resolved.service(8))."""
SERVERS = 3
"""How many servers the C library and the kubelet use of a file (MAXNS in resolv.h)."""
BROADCAST = ipaddress.IPv4Address("255.255.255.255")
LIMIT = 1 << 16
"""Bytes of the largest file that is read."""


def uses_stub_resolver(system: System) -> bool:
    """Return whether programs send DNS queries to systemd-resolved on the host's loopback interface."""
    target = read_seen(system.read_link, RESOLV_CONF)
    # Most distributions make the link relative to /etc.
    return isinstance(target, str) and target.removeprefix("..") == STUB


def dns_servers(path: str, system: System) -> tuple[list[str], list[str]]:
    """Return all DNS servers in a file that are used and, as a second list, those of them that pods can ask.

    The file has the format of resolv.conf(5). If it cannot be read, both lists are empty.
    """
    found = read_seen(lambda each: system.read(each, LIMIT), path)
    lines = found.decode(errors="replace").splitlines() if isinstance(found, bytes) else []
    words = [line.split() for line in lines]
    servers = [each[1] for each in words if len(each) > 1 and each[0] == "nameserver"][:SERVERS]
    return servers, [each for each in servers if _is_same_in_pods(each)]


def _is_same_in_pods(server: str) -> bool:
    """Return whether an address leads to the same server in a pod, which has a network of its own.

    A link-local address of IPv6 does not: it is that of a host on the pod's own link. One of IPv4 does: pods send their
    packets to the node, which forwards them. So the resolvers of clouds can be asked, such as 169.254.169.254.
    """
    try:
        address = ipaddress.ip_address(server.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_link_local:
            return False
        address = address.ipv4_mapped or address
    return not (address.is_loopback or address.is_unspecified or address.is_multicast or address == BROADCAST)
