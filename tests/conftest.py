"""Fixtures that several test modules use."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.fakes.gpu_host import set_up
from tests.fakes.host import Host

# Time limits of single examples fail on a busy machine, and tell nothing of what is tested.
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
    """Two GPUs, Debian's driver, one stopped machine."""
    return set_up(host)
