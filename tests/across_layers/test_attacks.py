"""Files that root in a machine, a pod or a user puts where the agent reads: nobody but themselves is harmed."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.host.observe.machine import observe_machine
from agent.model.facts import Broken, Unit, Unseen
from agent.model.paths import REPORT_NAME, report_directory
from agent.system.files import System
from agent.system.journal import Ages
from tests.fakes.no_process import no_process

NAME = "gpu-node"
AT_ONCE = 2.0
"""Seconds. The kernel blocks an open of a leased file for up to 45 (/proc/sys/fs/lease-break-time)."""

HOLD = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
descriptor = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(no_process, str(tmp_path))


@contextlib.contextmanager
def leased(place: Path) -> Iterator[None]:
    """Let another process hold a write lease on the file without releasing it (fcntl(2), F_SETLEASE)."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(place)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


READS: tuple[Callable[[System, str], object], ...] = (
    lambda system, path: system.read(path),
    lambda system, path: system.read_text(path),
    lambda system, path: system.head(path, 4),
    lambda system, path: system.read_untrusted(path),
    lambda system, path: list(system.lines(path)),
    lambda system, path: system.open_public(path).close(),
)


def test_attack_a_lease_on_a_file_stops_no_reader(system: System, tmp_path: Path) -> None:
    """An open would wait for 45 s. The file could not be observed, which is different from absent."""
    system.write("/etc/cdi/spec.json", b"{}")
    for read in READS:
        read(system, "/etc/cdi/spec.json")
    with leased(tmp_path / "etc/cdi/spec.json"):
        for read in READS:
            started = time.monotonic()
            with pytest.raises(BlockingIOError, match="another process holds a lease on it"):
                read(system, "/etc/cdi/spec.json")
            assert time.monotonic() - started < AT_ONCE


def test_attack_a_lease_on_a_report_makes_that_report_unseen(system: System, tmp_path: Path) -> None:
    for machine in ("bad", NAME):
        system.write(f"{report_directory(machine)}/{REPORT_NAME}", b"{}")
    with leased(Path(f"{tmp_path}{report_directory('bad')}/{REPORT_NAME}")):
        started = time.monotonic()
        bad, good = (observe_machine(machine, Unit("active"), system, Ages()) for machine in ("bad", NAME))
        assert time.monotonic() - started < AT_ONCE
    assert isinstance(bad.report, Unseen)
    assert "lease" in bad.report.why
    assert isinstance(good.report, Broken), "it was read"
