"""Root in a machine replaces paths that the host half reads or writes: only the machine itself is harmed.

A machine shares two directories with its host: the report's, and the handoff's, which it can remount writable.
"""

import hashlib
import os
import shutil
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
from agent.model.paths import (
    REPORT_NAME,
    conditions_file,
    fabric_file,
    gpu_health_file,
    handoff_file,
    report_directory,
)
from agent.system.files import temporary_path
from tests.fakes.dead_links import TARGET, hang
from tests.fakes.driver_generations import RunnerThatClears
from tests.fakes.gpu_host import MACHINE, set_up
from tests.fakes.host import Host

BAD = "bad"
SECRET = "a-secret-of-the-hosts"
AT_ONCE = 10.0
"""Seconds for a pass, which usually takes a hundredth: a FIFO would take forever, a lease 45."""
RACE = 1.0
"""Seconds that the race lasts."""

SENTINEL = "/etc/sentinel/file"
PUBLISHED = (handoff_file(BAD), conditions_file(BAD), fabric_file(BAD), gpu_health_file(BAD))
IN_PLACE = (f"{report_directory(BAD)}/{REPORT_NAME}", *PUBLISHED)
IN_THE_MAKING = (temporary_path(handoff_file(BAD)), temporary_path(conditions_file(BAD)))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with two GPUs, two running machines, and files that no machine may reach.

    It has no driver's files: with them, each of the many passes would take twice as long.
    """
    tree = tmp_path / "host"
    host = set_up(Host(tree, runner=RunnerThatClears(tree)))
    shutil.rmtree(tree / "usr/lib/x86_64-linux-gnu")
    host.loader_cache("0 libs found in cache `/etc/ld.so.cache'\n")
    for machine in (MACHINE, BAD):
        host.make_directory(f"/var/lib/machines/{machine}")
        host.make_directory(report_directory(machine))
        host.bus.unit(f"systemd-nspawn@{machine}.service", "active")
    host.file(SENTINEL, SECRET)
    host.file("/etc/sentinel/directory/file", SECRET)
    os.chmod(host.full_path(SENTINEL), 0o640)
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


Attack = Callable[[Host, Path], object]


def unix_socket(_: Host, place: Path) -> None:
    descriptor = os.open(place.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/fd/{descriptor}/{place.name}")
    os.close(descriptor)


def directory(_: Host, place: Path) -> None:
    (place / "a/b").mkdir(parents=True)
    (place / "a/file").write_bytes(b"x")


def huge(_: Host, place: Path) -> None:
    place.touch()
    os.truncate(place, 1 << 40)


def link(target: Callable[[Host, Path], str]) -> Attack:
    return lambda host, place: place.symlink_to(target(host, place))


ATTACKS: dict[str, Attack] = {
    "FIFO": lambda _, place: os.mkfifo(place),
    "socket": unix_socket,
    "directory": directory,
    "hard link": lambda host, place: place.hardlink_to(host.full_path(SENTINEL)),
    "huge": huge,
    "binary": lambda _, place: place.write_bytes(bytes(range(256)) * 16),
    "deep JSON": lambda _, place: place.write_bytes(b"[" * 500_000),
    "long number": lambda _, place: place.write_bytes(b'{"version": ' + b"1" * 500_000 + b"}"),
    "absolute link": link(lambda host, _: host.full_path(SENTINEL)),
    "link below the root": link(lambda *_: SENTINEL),
    "relative link": link(lambda host, place: os.path.relpath(host.full_path(SENTINEL), place.parent)),
    "link to a directory": link(lambda host, _: host.full_path("/etc/sentinel/directory")),
    "magic link": link(lambda host, _: f"/proc/{os.getpid()}/root{host.full_path(SENTINEL)}"),
    "dangling link": link(lambda host, _: host.full_path("/etc/sentinel/new")),
    "loop": link(lambda _, place: place.name),
    "long link": link(lambda *_: "x" * 300),
    "link to a dead file system": link(lambda *_: TARGET),
}
if os.geteuid() == 0:
    # The device /dev/zero has no end. Only root can make one.
    ATTACKS["device"] = lambda _, place: os.mknod(place, 0o20666, os.makedev(1, 5))


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
    hang(monkeypatch)
    return found


@pytest.mark.parametrize("paths", [IN_PLACE, IN_THE_MAKING], ids=["in place", "in the making"])
def test_attack_on_a_path(host: Host, paths: tuple[str, ...], opened_devices: list[int]) -> None:
    """Each kind at each path, for two passes: during the attack, and after it. Opening a device may start it."""
    reconciler, kinds = agent(host), [*ATTACKS]
    reconciler.reconcile()
    before, well = state(host), reconciler.reconcile()
    assert well.failures == ()
    for number in range(len(kinds)):
        attacks = dict(zip(paths, kinds[number:] + kinds[:number], strict=False))
        subprocess.run(["rm", "-rf", *(host.root + path for path in attacks)], check=True)
        for path, kind in attacks.items():
            ATTACKS[kind](host, Path(host.root + path))
        if paths is IN_THE_MAKING:
            # So that a pass makes them.
            host.remove(handoff_file(BAD))
            host.remove(conditions_file(BAD))
        for after in range(2):
            started = time.monotonic()
            outcome = reconciler.reconcile()
            assert time.monotonic() - started < AT_ONCE, attacks
            assert conditions(outcome, MACHINE) == conditions(well, MACHINE), attacks
            assert state(host) == before, attacks
            assert SECRET not in all_messages(outcome), attacks
            assert "InternalError" not in {reason for _, _, reason in conditions(outcome, BAD)}, attacks
            assert not after or not outcome.failures, attacks
            assert not opened_devices, attacks
        names = {os.path.basename(path) for path in PUBLISHED}
        assert set(host.entries(os.path.dirname(handoff_file(BAD)))) == names, attacks
        for path in (handoff_file(BAD), conditions_file(BAD)):
            assert host.is_file(path), attacks
            assert host.read_link(path) is None, attacks


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
    places = [host.root + path for path in IN_PLACE + IN_THE_MAKING]
    renamer = subprocess.Popen([sys.executable, "-c", RENAMER, host.full_path(SENTINEL), *places])
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
    subprocess.run(["rm", "-rf", *places], check=True)
    reconciler.reconcile()
    assert reconciler.reconcile().failures == ()
    assert host.is_file(handoff_file(BAD))
