"""systemd's answers, and the installed unit template (tests/data/units has those of Debian 12 and 13)."""

import os

import pytest
from msgspec.structs import replace

from agent.host.observe.machine import (
    observe_template,
    observe_units,
    observe_version,
    parse_device_allow,
    with_properties,
)
from agent.model.errors import BusAnswerError, BusError
from agent.model.facts import Absent, Broken, DeviceAllow, Unit, Unseen
from agent.system.files import System
from agent.system.systemd import SYSTEMD, queue_job
from tests.fakes.host import Host

TEMPLATE = "/usr/lib/systemd/system/systemd-nspawn@.service"
OWN_TEMPLATE = "/etc/systemd/system/systemd-nspawn@.service"


def test_states(host: Host) -> None:
    host.bus.unit("a.service")
    host.bus.unit("b.service", "inactive", "not-found")
    host.bus.unit("c.service", "inactive", "masked")
    host.bus.unit("d.service", "active", "not-found")
    host.bus.unit("alias-of-e.service", "failed")
    host.bus.units["e.service"] = host.bus.units["alias-of-e.service"]
    units = observe_units(("a.service", "b.service", "c.service", "d.service", "e.service"), host)
    assert {name: unit.unit_state for name, unit in units.items()} == {
        "a.service": "active",
        "b.service": Absent("b.service is not installed"),
        "c.service": Broken("c.service is masked; run `systemctl unmask c.service`"),
        "d.service": "active",
        "e.service": "failed",
    }
    assert host.runner.calls == []


def properties(host: Host, name: str) -> Unit:
    return replace(with_properties("m", observe_units((name,), host)[name], host), path="")


def test_one_unit_with_its_properties(host: Host) -> None:
    host.bus.unit("a.service", reload=True, device_allow=[("/dev/char/195:1", "rw"), ("char-pts", "rw")])
    host.bus.unit("b.service", "failed", stopped_at=4711)
    host.bus.unit("c.service", "inactive", "not-found")
    host.bus.unit("d.service", stopped_at=4711)
    allowed = (DeviceAllow("/dev/char/195:1", "rw"), DeviceAllow("char-pts", "rw"))
    assert properties(host, "a.service") == Unit("active", unit_needs_reload=True, device_allow=allowed)
    assert properties(host, "b.service") == Unit("failed", has_run=True)
    assert properties(host, "c.service") == Unit(Absent("c.service is not installed"))
    assert properties(host, "d.service") == Unit("active")


def test_masked_units(host: Host) -> None:
    """Of those that were loaded before, systemd always wants a reload: each pass, and each command, made one."""
    host.bus.unit("a.service", "active", "masked", reload=True)
    host.bus.unit("b.service", "failed", "masked", reload=True, stopped_at=4711)
    host.bus.unit("c.service", "inactive", "masked")
    assert properties(host, "a.service") == Unit("active", masked=True)
    for ended in ("b.service", "c.service"):
        assert properties(host, ended) == Unit("inactive", masked=True, has_run=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Unit.NeedDaemonReload", ("s", "no")),
        ("Unit.ActiveState", ("u", 1)),
        ("Service.DeviceAllow", ("as", ["xy"])),
        ("Service.DeviceAllow", ("a(uu)", [(1, 2)])),
    ],
)
def test_a_property_of_another_type_leaves_the_unit_unseen(host: Host, name: str, value: tuple[str, object]) -> None:
    host.bus.unit("a.service")
    interface, _, member = name.partition(".")
    host.bus.properties[host.bus.units["a.service"], f"{SYSTEMD}.{interface}", member] = value
    unseen = properties(host, "a.service").unit_state
    assert isinstance(unseen, Unseen)
    assert "unexpected" in unseen.why


@pytest.mark.parametrize("answer", [(), (4711,), ("/job/1", "/job/2")])
def test_an_unexpected_answer_about_a_job_is_an_error(host: Host, answer: tuple[object, ...]) -> None:
    with pytest.raises(BusAnswerError, match=r"StartUnit machine\.service: unexpected answer"):
        queue_job("StartUnit", "machine.service", System(host.runner, host.root, lambda *_: answer))


def test_a_bus_that_does_not_answer_in_a_known_format_leaves_all_unseen(host: Host) -> None:
    answer: tuple[object, ...]
    for answer in ((), ([],), ("text",), ([("a",)] * 2,)):
        odd = System(host.runner, host.root, lambda *_, answer=answer: answer)
        assert isinstance(observe_units(("a.service",), odd)["a.service"].unit_state, Unseen)
    host.bus.failing = BusError("the bus is away")
    away = Unit(Unseen("the bus is away"))
    assert observe_units(("a.service", "b.service"), host) == {"a.service": away, "b.service": away}
    assert with_properties("m", Unit("active", "/a"), host) == away
    assert isinstance(observe_version(host), Unseen)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("252.39-1~deb12u2", 252),
        ("v257.13", 257),
        ("258~rc2", 258),
        ("unknown", Broken("the version of systemd: no number in 'unknown'")),
    ],
)
def test_version(host: Host, text: str, version: int | Broken) -> None:
    host.bus.version(text)
    assert observe_version(host) == version


def test_the_administrators_template_comes_first_even_a_masked_one(host: Host) -> None:
    template = observe_template(host)
    assert isinstance(template, Absent)
    assert "install the package systemd-container" in template.why
    host.file(TEMPLATE, "[Service]\nDeviceAllow=char-pts rw\n")
    host.file(OWN_TEMPLATE, "[Service]\nDeviceAllow=/dev/fuse rw\n")
    assert observe_template(host) == (DeviceAllow("/dev/fuse", "rw"),)
    host.remove(OWN_TEMPLATE)
    # Like /dev/null, to which `systemctl mask` makes a link, no regular file.
    os.mkfifo(host.full_path(OWN_TEMPLATE))
    template = observe_template(host)
    assert isinstance(template, Broken)
    assert template.why.startswith(f"{OWN_TEMPLATE}: ")
    assert "systemctl unmask systemd-nspawn@.service" in template.why


def test_device_allow_syntax() -> None:
    text = """
[Unit]
DeviceAllow=/dev/never rw
[Service]
DeviceAllow=/dev/a rw
DeviceAllow=
 DeviceAllow = /dev/b rwm
; DeviceAllow=/dev/c rw
# DeviceAllow=/dev/d rw \\
DeviceAllow=/dev/e \\
# between
   rw
DeviceAllow=/dev/f
DevicePolicy=closed
[X-Other]
DeviceAllow=/dev/never rw
"""
    assert parse_device_allow(text) == (
        DeviceAllow("/dev/b", "rwm"),
        DeviceAllow("/dev/e", "rw"),
        DeviceAllow("/dev/f"),
    )


@pytest.mark.parametrize(
    ("value", "entry"),
    [
        ("/dev/fuse \t  rw", DeviceAllow("/dev/fuse", "rw")),
        ('"block-loop" rwm', DeviceAllow("block-loop", "rwm")),
        ("'/dev/loop-control'\trw", DeviceAllow("/dev/loop-control", "rw")),
        (r"/dev/\fuse r", DeviceAllow("/dev/fuse", "r")),
        ("//dev/./mapper//control/ rw", DeviceAllow("/dev/mapper/control", "rw")),
        ("/run/systemd/inaccessible/chr", DeviceAllow("/run/systemd/inaccessible/chr")),
        ("/dev/char/10:%i rw", DeviceAllow("/dev/char/10:%i", "rw")),
    ],
)
def test_entries_are_read_as_systemd_reads_them(value: str, entry: DeviceAllow) -> None:
    """Otherwise a machine would get what no machine gets (NOT_FOR_MACHINES), or foreign entries for its own."""
    assert parse_device_allow(f"[Service]\nDeviceAllow={value}\n") == (entry,)


@pytest.mark.parametrize(
    "value",
    ['"/dev/a rw', "/dev/a rx", "/dev/a r w", '/dev/a "rw"', "/dev/../dev/a rw", "/etc/a", "/dev/\udce9 rw", "/dev"],
)
def test_entries_that_systemd_ignores(value: str) -> None:
    assert parse_device_allow(f"[Service]\nDeviceAllow=/dev/b r\nDeviceAllow={value}\n") == (
        DeviceAllow("/dev/b", "r"),
    )
