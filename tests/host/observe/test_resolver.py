"""A node's DNS servers are such that its pods can reach them."""

import pytest
from msgspec.structs import replace

from agent.config.settings import Config
from agent.host.observe.host import RESOLV_CONF, STUB, UPLINK, uses_stub_resolver
from agent.host.plan.goal import plan
from agent.host.provision.preflight import check_dns
from agent.model.node import Check
from tests.fakes.facts import facts
from tests.fakes.host import Host
from tests.fakes.node_settings import config

RESOLVED = "nameserver 127.0.0.53\noptions edns0 trust-ad\nsearch example.com\n"


def with_resolved(host: Host, uplink: str = "nameserver 192.0.2.53\nnameserver fe80::1%eth0\n") -> None:
    host.symlink(RESOLV_CONF, f"..{STUB}")
    host.file(STUB, RESOLVED)
    host.file(UPLINK, uplink)


def checked(host: Host, **settings: object) -> list[Check]:
    wanted = config(gpu=settings).machines["gpu"]
    return check_dns("gpu", wanted, replace(facts(), stub_resolver=uses_stub_resolver(host)), host)


def nspawn_lines(settings: Config, *, stub_resolver: bool) -> list[bytes]:
    (goal,) = plan(settings, replace(facts(machine="gpu"), stub_resolver=stub_resolver)).goal.machines
    return [line for line in goal.nspawn.content.splitlines() if line.startswith(b"ResolvConf")]


@pytest.mark.parametrize("target", [STUB, f"..{STUB}"])
def test_the_link_shows_systemd_resolved_also_before_it_runs(host: Host, target: str) -> None:
    assert not uses_stub_resolver(host)
    host.symlink(RESOLV_CONF, target)
    assert uses_stub_resolver(host)


def test_a_node_asks_the_servers_behind_systemd_resolved() -> None:
    # nspawn itself would choose systemd-resolved, if that listens, whatever /etc/resolv.conf names.
    for own in ({}, {"nspawn": {"virtual_ethernet": True}}):
        for stub, line in ((True, b"ResolvConf=replace-uplink"), (False, b"ResolvConf=replace-host")):
            assert nspawn_lines(config(gpu=own), stub_resolver=stub) == [line]
    assert nspawn_lines(Config.validated({"machines": {"gpu": {}}}), stub_resolver=True) == []


def test_the_users_own_setting_comes_last() -> None:
    """systemd-nspawn uses the last assignment."""
    mine = {"nspawn": {"extra": {"Exec": {"ResolvConf": "bind-static"}}}}
    assert nspawn_lines(config(gpu=mine), stub_resolver=True)[-1] == b"ResolvConf=bind-static"


@pytest.mark.parametrize(
    "server", ["192.0.2.53", "2001:db8::53", "169.254.169.254", "10.0.2.3", "fd00::53", "::ffff:192.0.2.1"]
)
def test_servers_that_pods_can_reach(host: Host, server: str) -> None:
    """Also in a plain file while systemd-resolved runs, as dhclient writes it: the machine gets what is judged."""
    with_resolved(host, f"nameserver fe80::1%eno1\nnameserver {server}\n")
    assert checked(host)[0].message == f"pods can ask {server} ({UPLINK})"
    host.file(UPLINK, "nameserver 127.0.0.1\n")
    host.remove(RESOLV_CONF)
    host.file(RESOLV_CONF, f"# by hand\nnameserver {server}\n")
    assert checked(host)[0].message == f"pods can ask {server} ({RESOLV_CONF})"
    assert nspawn_lines(config(gpu={}), stub_resolver=uses_stub_resolver(host)) == [b"ResolvConf=replace-host"]


@pytest.mark.parametrize(
    "servers",
    [
        *("fe80::1%eno1", "fe80::1", "0.0.0.0", "::", "224.0.0.251", "ff02::fb", "255.255.255.255", "localhost"),
        *("::ffff:127.0.0.1", "127.0.0.1, ::1", ""),
        "::1, 127.0.0.1, fe80::1, 192.0.2.53",  # A resolver reads only the first three.
    ],
)
def test_servers_that_pods_cannot_reach(host: Host, servers: str) -> None:
    """They cost pods their DNS, but not the node."""
    uplink = "# none\n" + "".join(f"nameserver {each}\n" for each in servers.split(", ") if each)
    read = servers.removesuffix(", 192.0.2.53")
    what = f"names only {read}, which pods cannot reach" if read else "names no DNS server"
    with_resolved(host, uplink)
    (check,) = checked(host)
    assert (check.passed, check.required) == (False, False)
    assert what in check.message
    assert "DNS= in /etc/systemd/resolved.conf, and run" in (check.advice or "")
    assert "node.kubelet.configuration.resolvConf" in (check.advice or "")
    host.remove(RESOLV_CONF)
    host.file(RESOLV_CONF, uplink)
    (check,) = checked(host)
    assert what in check.message
    assert (check.advice or "").startswith("name a server that pods can reach there; or ")


def test_chosen_servers_are_not_judged(host: Host) -> None:
    assert checked(host, kubelet={"configuration": {"resolvConf": "/etc/my-resolv.conf"}}) == []
    assert checked(host, nspawn={"extra": {"Exec": {"ResolvConf": "bind-static"}}}) == []
