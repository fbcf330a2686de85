"""Fixtures that several test modules use."""

from pathlib import Path

import pytest

from tests.recorded import Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """An empty x86_64 host."""
    tree = tmp_path / "host"
    tree.mkdir()
    return Host(tree)
