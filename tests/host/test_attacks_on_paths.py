"""Root in a machine replaces paths that the host half reads or writes: only the machine itself is harmed.

A machine shares two directories with its host: the report's, and the handoff's, which it can remount writable.
"""

import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.config.settings import Config
from agent.host.reconcile import Outcome, Reconciler
from agent.model.conditions import Condition
from agent.model.paths import REPORT_NAME, conditions_file, fabric_file, handoff_file, report_directory
from agent.system.files import temporary_path
from agent.system.process import Completed
from tests.fakes.clearing import clear_below, clears
from tests.fakes.dead_links import TARGET
from tests.fakes.gpu_host import MACHINE, set_up
from tests.fakes.host import Host, ScriptedRunner

BAD = "bad"
SECRET = "a-secret-of-the-hosts"
AT_ONCE = 10.0
"""Seconds for a pass, which usually takes a hundredth: a FIFO would take forever, a lease 45."""
RACE = 3.0
"""Seconds that the race lasts."""

PATHS = {
    "report": f"{report_directory(BAD)}/{REPORT_NAME}",
    "handoff": handoff_file(BAD),
    "verdict": conditions_file(BAD),
    "fabric": fabric_file(BAD),
    "handoff in the making": temporary_path(handoff_file(BAD)),
    "verdict in the making": temporary_path(conditions_file(BAD)),
}


class Clearing(ScriptedRunner):
    """Removes trees below the host's tree, and scripts everything else."""

    tree = ""

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        return clear_below(self.tree, argv) if clears(argv) else super().__call__(argv, timeout)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with two GPUs, two running machines, and files that no machine may reach."""
    runner = Clearing()
    runner.tree = str(tmp_path / "host")
    (tmp_path / "host").mkdir()
    host = set_up(Host(tmp_path / "host", runner=runner))
    for machine in (MACHINE, BAD):
        host.make_directory(f"/var/lib/machines/{machine}")
        host.make_directory(report_directory(machine))
        host.bus.unit(f"systemd-nspawn@{machine}.service", "active")
    host.file("/etc/sentinel/file", SECRET)
    host.file("/etc/sentinel/directory/file", SECRET)
    os.chmod(host.full_path("/etc/sentinel/file"), 0o640)
    return host


def agent(host: Host) -> Reconciler:
    machines = {name: {"node_condition": True} for name in (MACHINE, BAD)}
    return Reconciler(Config.validated({"machines": machines}), host, host)


def state(host: Host) -> dict[str, tuple[int, int, int, str]]:
    """Return the state of the host's files that a machine might have changed."""
    found = {}
    for path in sorted(Path(host.full_path("/etc/sentinel")).rglob("*")):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (status.st_mode, status.st_uid, status.st_mtime_ns, content)
    return found


def conditions(outcome: Outcome, name: str) -> list[tuple[str, str, str]]:
    machine = next(each for each in outcome.machines if each.name == name)
    return [(each.type, each.status, each.reason) for each in machine.conditions]


def all_messages(outcome: Outcome) -> str:
    """Return everything that people, the log and the cluster see."""
    messages: list[Condition] = [each for machine in outcome.machines for each in machine.conditions]
    return " ".join([*(each.message for each in messages), *outcome.failures, *outcome.facts.all_problems()])


Attack = Callable[[Host, Path], None]


def fifo(_: Host, place: Path) -> None:
    os.mkfifo(place)


def unix_socket(_: Host, place: Path) -> None:
    descriptor = os.open(place.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/fd/{descriptor}/{place.name}")
    os.close(descriptor)


def device(_: Host, place: Path) -> None:
    """Make the device /dev/zero, which has no end."""
    os.mknod(place, 0o20666, os.makedev(1, 5))


def absolute_link(host: Host, place: Path) -> None:
    place.symlink_to(host.full_path("/etc/sentinel/file"))


def link_below_the_root(_: Host, place: Path) -> None:
    place.symlink_to("/etc/sentinel/file")


def relative_link(host: Host, place: Path) -> None:
    place.symlink_to(os.path.relpath(host.full_path("/etc/sentinel/file"), place.parent))


def link_to_a_directory(host: Host, place: Path) -> None:
    place.symlink_to(host.full_path("/etc/sentinel/directory"))


def magic_link(host: Host, place: Path) -> None:
    place.symlink_to(f"/proc/{os.getpid()}/root{host.full_path('/etc/sentinel/file')}")


def dangling_link(host: Host, place: Path) -> None:
    place.symlink_to(host.full_path("/etc/sentinel/new"))


def loop(_: Host, place: Path) -> None:
    place.symlink_to(place.name)


def long_link(_: Host, place: Path) -> None:
    place.symlink_to("x" * 300)


def link_to_a_dead_file_system(host: Host, place: Path) -> None:
    place.symlink_to(TARGET)
    host.dead_links = frozenset({str(place).removeprefix(host.root)})


def directory(_: Host, place: Path) -> None:
    (place / "a/b").mkdir(parents=True)
    (place / "a/file").write_bytes(b"x")


def hard_link(host: Host, place: Path) -> None:
    place.hardlink_to(host.full_path("/etc/sentinel/file"))


def huge(_: Host, place: Path) -> None:
    place.touch()
    os.truncate(place, 1 << 40)


def binary(_: Host, place: Path) -> None:
    place.write_bytes(bytes(range(256)) * 16)


def deep_json(_: Host, place: Path) -> None:
    place.write_bytes(b"[" * 500_000)


def long_number(_: Host, place: Path) -> None:
    place.write_bytes(b'{"version": ' + b"1" * 500_000 + b"}")


ATTACKS: tuple[Attack, ...] = (
    *(fifo, unix_socket, directory, hard_link, huge, binary, deep_json, long_number),
    # Only root can make one.
    *((device,) if os.geteuid() == 0 else ()),
    *(
        absolute_link,
        link_below_the_root,
        relative_link,
        link_to_a_directory,
        magic_link,
        dangling_link,
        loop,
        long_link,
        link_to_a_dead_file_system,
    ),
)


@pytest.fixture
def opened_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of each device that is opened for more than a look (O_PATH)."""
    found: list[int] = []
    real = os.open

    def opened(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = real(path, flags, mode, dir_fd=dir_fd)
        status = os.fstat(descriptor)
        if stat.S_ISCHR(status.st_mode) and not flags & os.O_PATH:
            found.append(status.st_rdev)
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    return found


def put(host: Host, path: str, attack: Attack) -> None:
    place = Path(host.root + path)
    subprocess.run(["rm", "-rf", place], check=True)
    host.dead_links = frozenset()
    attack(host, place)


@pytest.mark.parametrize("what", PATHS)
def test_attack_on_a_path(host: Host, what: str, opened_devices: list[int]) -> None:
    """Each kind at each path, for two passes: during the attack, and after it. Opening a device may start it."""
    reconciler = agent(host)
    reconciler.reconcile()
    before, well = state(host), reconciler.reconcile()
    assert well.failures == ()
    for attack in ATTACKS:
        name = attack.__name__
        put(host, PATHS[what], attack)
        if "in the making" in what:
            # So that a pass makes them.
            host.remove(handoff_file(BAD))
            host.remove(conditions_file(BAD))
        for number in range(2):
            started = time.monotonic()
            outcome = reconciler.reconcile()
            assert time.monotonic() - started < AT_ONCE, name
            assert conditions(outcome, MACHINE) == conditions(well, MACHINE), name
            assert state(host) == before, name
            assert SECRET not in all_messages(outcome), name
            assert "InternalError" not in {reason for _, _, reason in conditions(outcome, BAD)}, name
            assert not number or not outcome.failures, name
            assert not opened_devices, name
        names = {os.path.basename(path) for path in (handoff_file(BAD), conditions_file(BAD), fabric_file(BAD))}
        assert set(host.entries(os.path.dirname(handoff_file(BAD)))) == names, name
        for path in (handoff_file(BAD), conditions_file(BAD)):
            assert host.is_file(path), name
            assert host.read_link(path) is None, name


RENAMER = """
import itertools, os, sys
secret, *paths = sys.argv[1:]
for number in itertools.count():
    path = paths[number % len(paths)]
    other = f"{os.path.dirname(path)}/x"
    try:
        match number // len(paths) % 6:
            case 0: os.symlink(secret, other)
            case 1: os.mkfifo(other)
            case 2: os.mkdir(other)
            case 3: os.link(secret, other)
            case 4: os.symlink(os.path.dirname(secret), other)
            case 5: open(other, "w").close()
        os.rename(other, path)
    except OSError:
        for each in (other, path):
            try:
                os.rmdir(each) if os.path.isdir(each) and not os.path.islink(each) else os.unlink(each)
            except OSError:
                pass
"""


def test_attack_by_a_racing_renamer(host: Host) -> None:
    """A path may change between the check, the open and the replacement."""
    reconciler = agent(host)
    reconciler.reconcile()
    before, well = state(host), reconciler.reconcile()
    places = [host.root + path for path in PATHS.values()]
    renamer = subprocess.Popen([sys.executable, "-c", RENAMER, host.full_path("/etc/sentinel/file"), *places])
    try:
        end, passes = time.monotonic() + RACE, 0
        while time.monotonic() < end or passes < 5:
            started = time.monotonic()
            outcome = reconciler.reconcile()
            passes += 1
            assert time.monotonic() - started < AT_ONCE
            assert conditions(outcome, MACHINE) == conditions(well, MACHINE)
            assert state(host) == before
            assert SECRET not in all_messages(outcome)
            assert "InternalError" not in {reason for _, _, reason in conditions(outcome, BAD)}
        assert renamer.poll() is None, "it went on all the time"
    finally:
        renamer.send_signal(signal.SIGKILL)
        renamer.wait()
    for path in places:
        subprocess.run(["rm", "-rf", path], check=True)
    reconciler.reconcile()
    assert reconciler.reconcile().failures == ()
    assert host.is_file(handoff_file(BAD))
