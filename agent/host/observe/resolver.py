"""Observes which DNS servers programs on this host use."""

import ipaddress

from agent.system.files import System
from agent.system.seen import read_seen

SETTINGS = "/etc/resolv.conf"
STUB = "/run/systemd/resolve/stub-resolv.conf"
"""Names systemd-resolved at 127.0.0.53. The link to it lasts over boots, also while systemd-resolved does not run."""
UPLINK = "/run/systemd/resolve/resolv.conf"
"""Names the DNS servers that systemd-resolved asks (systemd-resolved.service(8))."""
LIMIT = 1 << 16


def uses_stub_resolver(system: System) -> bool:
    """Return whether programs ask systemd-resolved on the host's loopback interface."""
    link = read_seen(system.read_link, SETTINGS)
    return isinstance(link, str) and link.removeprefix("..") == STUB


def remote_servers(path: str, system: System) -> tuple[list[str], list[str]]:
    """Return the DNS servers in a file of resolv.conf(5), and those of them that are not on the host's loopback."""
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
