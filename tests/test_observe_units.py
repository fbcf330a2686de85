"""systemd's answers and the installed unit template (what Debian 12 and 13 have in theirs is in tests/hosts/units)."""

import pytest

from agent.errors import BusError, ObservationError
from agent.facts import Absent, Broken, Unseen
from agent.observe.units import Unit, observe_template, observe_units, observe_version, parse_device_allow
from agent.system.services import SYSTEMD
from tests.recorded import HOSTS, Host

TEMPLATE = "/usr/lib/systemd/system/systemd-nspawn@.service"


def test_states(host: Host) -> None:
    host.bus.unit("a.service", reload=True)
    host.bus.unit("b.service", "inactive", "not-found")
    host.bus.unit("c.service", "inactive", "masked")
    host.bus.unit("d.service", "active", "not-found")
    host.bus.unit("alias-of-e.service", "failed", stopped_at=4711)
    host.bus.units["e.service"] = host.bus.units["alias-of-e.service"]
    units = observe_units(("a.service", "b.service", "c.service", "d.service", "e.service"), host)
    assert units["a.service"] == Unit("active", needs_reload=True)
    assert units["b.service"] == Unit(Absent("b.service is not installed"))
    assert units["c.service"] == Unit(Broken("c.service cannot be started: LoadState is masked"))
    assert units["d.service"] == Unit("active")
    assert units["e.service"] == Unit("failed", has_run=True)
    assert host.runner.calls == []


def test_one_unit_that_cannot_be_seen_hides_no_other(host: Host) -> None:
    host.bus.unit("a.service")
    host.bus.unit("b.service")
    path = host.bus.units["a.service"]
    host.bus.properties[path, f"{SYSTEMD}.Unit", "ActiveState"] = ("u", 1)
    units = observe_units(("a.service", "b.service"), host)
    assert isinstance(units["a.service"].state, Unseen)
    assert "ActiveState" in units["a.service"].state.why
    assert units["b.service"] == Unit("active")


def test_a_bus_that_does_not_answer_leaves_all_unseen(host: Host) -> None:
    host.bus.failing = BusError("the bus is away")
    units = observe_units(("a.service", "b.service"), host)
    assert units == dict.fromkeys(units, Unit(Unseen("the bus is away")))
    assert list(units) == ["a.service", "b.service"]
    assert isinstance(observe_version(host), Unseen)


@pytest.mark.parametrize(("text", "version"), [("252.39-1~deb12u2", 252), ("v257.13", 257), ("258~rc2", 258)])
def test_version(host: Host, text: str, version: int) -> None:
    host.bus.version(text)
    assert observe_version(host) == version


def test_no_version_is_no_number(host: Host) -> None:
    host.bus.version("unknown")
    assert observe_version(host) == Broken("the version of systemd: no number in 'unknown'")


@pytest.mark.parametrize(("version", "fuse"), [(252, ()), (257, ("/dev/fuse rwm",))], ids=["Debian 12", "Debian 13"])
def test_template_of_debian(host: Host, version: int, fuse: tuple[str, ...]) -> None:
    host.file(TEMPLATE, (HOSTS / "units" / f"systemd-nspawn-{version}.service").read_text())
    assert observe_template(host) == (
        "/dev/net/tun rwm",
        "char-pts rw",
        *fuse,
        "/dev/loop-control rw",
        "block-loop rw",
        "block-blkext rw",
        "/dev/mapper/control rw",
        "block-device-mapper rw",
    )


def test_the_administrator_s_template_comes_first(host: Host) -> None:
    host.file(TEMPLATE, "[Service]\nDeviceAllow=char-pts rw\n")
    host.file("/etc/systemd/system/systemd-nspawn@.service", "[Service]\nDeviceAllow=/dev/fuse rw\n")
    assert observe_template(host) == ("/dev/fuse rw",)


def test_no_template_says_what_to_install(host: Host) -> None:
    with pytest.raises(ObservationError, match="systemd-container"):
        observe_template(host)


def test_a_masked_template_is_an_error(host: Host) -> None:
    host.file("/dev/null-device-stand-in", "x")
    host.symlink("/etc/systemd/system/systemd-nspawn@.service", "systemd-nspawn@.service")
    host.file(TEMPLATE, "[Service]\nDeviceAllow=char-pts rw\n")
    with pytest.raises(ObservationError, match="/etc/systemd/system"):
        observe_template(host)


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
DevicePolicy=closed
[X-Other]
DeviceAllow=/dev/never rw
"""
    assert parse_device_allow(text) == ("/dev/b rwm", "/dev/e rw")


def test_every_entry_of_a_list_is_taken(host: Host) -> None:
    host.bus.unit("a.service", device_allow=[("/dev/char/195:1", "rw"), ("char-pts", "rw")])
    assert observe_units(["a.service"], host)["a.service"].device_allow == ("/dev/char/195:1 rw", "char-pts rw")
