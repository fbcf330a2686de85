"""Fixtures that several test modules share."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.fakes.gpu_host import set_up
from tests.fakes.host import Host

# Hypothesis's time limit for one example fails on a busy machine, and says nothing about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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
