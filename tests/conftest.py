"""Fixtures that several test modules share."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fakes.clock import Clock
from tests.fakes.gpu_host import set_up
from tests.fakes.host import Host

# Hypothesis's time limit for one example fails on a busy machine, and says nothing about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def never_wait_for_the_disk() -> Iterator[None]:
    """A first pass syncs 150 times, and each time the disk writes what virtual machines next to the tests have written.

    What is synced, and when, is checked by tests/host/test_power_loss.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            # Like the real call, this fails for a descriptor that is not open.
            patch.setattr(os, name, os.fstat)
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock, from now on, of whatever waits in this process."""
    clock = Clock()
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """An empty x86_64 host."""
    tree = tmp_path / "host"
    tree.mkdir()
    return Host(tree)


@pytest.fixture
def gpu_host(host: Host) -> Host:
    """A host with two GPUs, Debian's driver and one stopped machine."""
    return set_up(host)
