"""systemd's answers and the installed unit template (what Debian 12 and 13 have in theirs is in tests/hosts/units)."""

import pytest

from agent.errors import ObservationError
from agent.facts import Absent, Broken, Unseen
from agent.observe.units import SHOW, Unit, observe_template, observe_units, observe_version, parse_device_allow
from tests.recorded import HOSTS, Host

TEMPLATE = "/usr/lib/systemd/system/systemd-nspawn@.service"


def block(name: str, load: str, active: str, reload: str = "no") -> str:
    return f"Id={name}\nLoadState={load}\nActiveState={active}\nNeedDaemonReload={reload}\n"


def test_states(host: Host) -> None:
    names = ("a.service", "b.service", "c.service", "d.service", "e.service")
    blocks = [
        block("a.service", "loaded", "active", "yes"),
        block("b.service", "not-found", "inactive"),
        block("c.service", "masked", "inactive"),
        block("d.service", "not-found", "active"),
        block("alias-of-e.service", "loaded", "failed"),
    ]
    host.command(*SHOW, *names, stdout="\n".join(blocks))
    units = observe_units(names, host)
    assert units["a.service"] == Unit("active", needs_reload=True)
    assert units["b.service"] == Unit(Absent("b.service is not installed"))
    assert units["c.service"] == Unit(Broken("c.service cannot be started: LoadState is masked"))
    assert units["d.service"] == Unit("active")
    assert units["e.service"] == Unit("failed")
    assert len(host.runner.calls) == 1


@pytest.mark.parametrize(
    ("stdout", "status"),
    [("", 1), (block("a.service", "loaded", "active"), 0), ("Id=a.service\n\nId=b.service\n", 0)],
)
def test_an_answer_that_is_not_whole_is_unseen(host: Host, stdout: str, status: int) -> None:
    host.command(*SHOW, "a.service", "b.service", stdout=stdout, status=status)
    units = observe_units(("a.service", "b.service"), host)
    assert [type(unit.state) for unit in units.values()] == [Unseen, Unseen]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("systemd 252 (252.39-1~deb12u2)\n+PAM +AUDIT\n", 252),
        ("systemd 257 (257.13-1~deb13u1)\n", 257),
        ("systemd 258~rc2 (258~rc2-1)\n", 258),
    ],
)
def test_version(host: Host, text: str, version: int) -> None:
    host.command("systemctl", "--version", stdout=text)
    assert observe_version(host) == version


def test_no_version_is_an_error(host: Host) -> None:
    host.command("systemctl", "--version", stdout="sysvinit\n")
    with pytest.raises(ObservationError, match="sysvinit"):
        observe_version(host)


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
    """systemctl show prints a line for each."""
    block = "LoadState=loaded\nActiveState=active\nDeviceAllow=/dev/char/195:1 rw\nDeviceAllow=char-pts rw\n"
    host.command(*SHOW, "a.service", stdout=block)
    assert observe_units(["a.service"], host)["a.service"].device_allow == ("/dev/char/195:1 rw", "char-pts rw")
