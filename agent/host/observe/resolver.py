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
LIMIT = 1 << 16
"""Bytes of the largest file that is read."""


def uses_stub_resolver(system: System) -> bool:
    """Return whether programs send DNS queries to systemd-resolved on the host's loopback interface."""
    target = read_seen(system.read_link, RESOLV_CONF)
    # Most distributions make the link relative to /etc.
    return isinstance(target, str) and target.removeprefix("..") == STUB


def dns_servers(path: str, system: System) -> tuple[list[str], list[str]]:
    """Return all DNS servers in a file and, as a second list, those of them that are not on the loopback interface.

    The file has the format of resolv.conf(5). If it cannot be read, both lists are empty.
    """
    found = read_seen(lambda each: system.read(each, LIMIT), path)
    lines = found.decode(errors="replace").splitlines() if isinstance(found, bytes) else []
    words = [line.split() for line in lines]
    servers = [each[1] for each in words if len(each) > 1 and each[0] == "nameserver"]
    return servers, [each for each in servers if not _is_loopback(each)]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
