"""A node with a network of its own gets an address in it."""

import pytest

from agent.host.provision.preflight import NETWORKD, check_network
from agent.model.node import Check
from tests.fakes.host import Host
from tests.fakes.node_settings import config


def checked(host: Host, **nspawn: object) -> list[Check]:
    return check_network("gpu", config(gpu={"nspawn": nspawn}).machines["gpu"], host)


def test_the_hosts_network_needs_nothing(host: Host) -> None:
    assert checked(host) == []


@pytest.mark.parametrize(("state", "passed"), [("active", True), ("inactive", False), ("failed", False)])
def test_somebody_must_give_addresses(host: Host, state: str, passed: bool) -> None:
    host.bus.unit(NETWORKD, state)
    (check,) = checked(host, virtual_ethernet=True)
    assert (check.passed, check.required) == (passed, passed)
    assert passed or "systemctl enable --now systemd-networkd" in check.advice


@pytest.mark.parametrize("network", [{"Bridge": "br0"}, {"MACVLAN": "eth0"}])
def test_a_named_network_has_addresses_of_its_own(host: Host, network: dict[str, str]) -> None:
    assert checked(host, extra={"Network": network}) == []
