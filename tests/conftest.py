"""Fixtures that several test modules use."""

from pathlib import Path

import pytest

from tests.gpu_host import set_up
from tests.recorded import Host


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
