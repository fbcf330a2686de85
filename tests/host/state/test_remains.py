"""Files that killed writers left."""

import pytest

from agent.model.paths import (
    MANIFESTS,
    OWNED,
    REMEMBERED_GPUS,
    conditions_file,
    granted_file,
    live_file,
    nspawn_file,
    unit_drop_in,
)
from agent.system.files import NEW
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host

FORMER = "former-node"


def temporary(path: str) -> str:
    directory, _, name = path.rpartition("/")
    return f"{directory}/.{name}{NEW}"


@pytest.mark.parametrize(
    "path",
    [OWNED, *REMEMBERED_GPUS, f"{MANIFESTS}/7.json", nspawn_file(MACHINE), unit_drop_in(MACHINE),
     live_file(MACHINE), granted_file(FORMER), conditions_file(FORMER)],
)  # fmt: skip
def test_a_pass_removes_what_a_killed_writer_left(gpu_host: Host, path: str) -> None:
    """This includes a machine that is no longer configured."""
    agent = reconciler(gpu_host)
    agent.reconcile()
    gpu_host.file(temporary(path), "half of it")
    assert agent.reconcile().actions == ()
    assert not gpu_host.exists(temporary(path))
