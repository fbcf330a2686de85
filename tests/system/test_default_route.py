"""The host's address on the default route, in network namespaces of the real kernel."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from agent.model.errors import AgentError
from agent.system.network import default_address, has_address

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
LINK = "ip link add eth0 type bridge; ip link set eth0 up; "
DIRECT = "ip route add default dev eth0"
IN, GATE = "ip addr add 10.1.2.3/24 dev eth0; ", "ip route add default via 10.1.2.1 "
ETH1 = "ip link add eth1 type bridge; ip link set eth1 up; "
GATE6 = "ip route add default via fd00::1; "
LOOPBACK = "ip link set lo up; ip addr add 10.5.5.5/32 dev lo; ip addr add fe80::2/64 dev eth0 nodad; "
NO_ROUTE = "the host has no default route with an address"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root, and ip(8)"),
]


def found(script: str, look: Callable[[], T]) -> T:
    """Set up a new network namespace, which only one thread is in, and return what `look` finds there."""

    def inside() -> T:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
        subprocess.run(["sh", "-ec", LINK + script], check=True, capture_output=True)
        return look()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(inside).result()


@pytest.mark.parametrize(
    ("script", "address"),
    [
        (IN + GATE, "10.1.2.3"),
        (f"{IN}ip addr add 10.1.2.4/24 dev eth0; {GATE}", "10.1.2.3"),
        (f"{IN}ip addr add 10.9.9.9/32 dev eth0; {GATE} src 10.9.9.9", "10.9.9.9"),
        (f"{IN[:-2]} scope link; ip addr add 10.1.3.3/24 dev eth0; {DIRECT}", "10.1.3.3"),
        (f"ip addr add 10.1.2.3 peer 10.1.2.9 dev eth0; {DIRECT}", "10.1.2.3"),
        (
            f"{ETH1}{IN}ip addr add 10.4.4.4/24 dev eth1; {GATE} metric 200; "
            "ip route add default via 10.4.4.1 metric 100",
            "10.4.4.4",
        ),
        (f"{IN}ip route add default nexthop via 10.1.2.1 weight 1 nexthop via 10.1.2.2 weight 1", "10.1.2.3"),
        (f"ip addr add fd00::3/64 dev eth0 nodad; {GATE6}", "fd00::3"),
        (
            "ip addr add fd00::2/64 dev eth0 nodad preferred_lft 0; ip addr add fd00::3/64 dev eth0 nodad; "
            f"ip addr add fd00::4/64 dev eth0 nodad preferred_lft 0; {GATE6}",
            "fd00::3",
        ),
        # A host whose address is announced by BGP, with one and with two neighbours.
        (f"{LOOPBACK}ip -4 route add default via inet6 fe80::1 dev eth0", "10.5.5.5"),
        (
            f"{LOOPBACK}{ETH1}ip -4 route add default "
            "nexthop via inet6 fe80::1 dev eth0 nexthop via inet6 fe80::1 dev eth1",
            "10.5.5.5",
        ),
        (
            "ip link set lo up; ip addr add fd00::5/128 dev lo nodad; ip addr add fe80::2/64 dev eth0 nodad; "
            "ip route add default via fe80::1 dev eth0",
            "fd00::5",
        ),
        (f"ip addr add fd00::3/64 dev eth0 nodad; {GATE6}{IN}{GATE}", "10.1.2.3"),
    ],
)
def test_the_address_with_which_packets_leave(script: str, address: str) -> None:
    assert found(script, default_address) == address


@pytest.mark.parametrize(
    "script",
    [
        IN,
        f"{IN}{GATE} table 7",
        f"{IN}ip route add unreachable default metric 9",
        # No address that other hosts can reach.
        "ip link set lo up; ip addr add fe80::2/64 dev eth0 nodad; ip route add default via fe80::1 dev eth0",
        "ip link set lo up; ip addr add 169.254.3.4/16 dev eth0 scope link; ip route add default dev eth0",
        # In IPv6, such a route leads to the loopback interface.
        "ip link set lo up; ip addr add fd00::9/128 dev lo nodad; ip -6 route add unreachable default metric 9",
    ],
)
def test_without_a_route_to_others_there_is_no_address(script: str) -> None:
    with pytest.raises(AgentError, match=NO_ROUTE):
        found(script, default_address)


def test_whether_the_host_has_an_address() -> None:
    script = "ip addr add 10.1.2.3/24 dev eth0; ip addr add fd00::3/64 dev eth0 nodad"
    addresses = ("10.1.2.3", "10.1.2.4", "fd00::3", "fd00::4")
    assert found(script, lambda: [*map(has_address, addresses)]) == [True, False, True, False]
