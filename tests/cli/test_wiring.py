"""What one process leaves to the next."""

import time

import pytest

from agent.cli.host import make_reconciler
from agent.config.load import Loaded
from agent.config.settings import Config
from agent.model.paths import AGES, REPORT_NAME, report_directory
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host

REPORT = f"{report_directory(MACHINE)}/{REPORT_NAME}"


def age_in_new_process(host: Host) -> float:
    """Return the age of the report that a command, or the service after a reload, sees."""
    facts, *_ = make_reconciler(Loaded(Config.validated({"machines": {MACHINE: {}}})), host).preview()
    return facts.machines[0].report_age


@pytest.mark.parametrize("jump", [-86400.0, 3600.0])
def test_a_clock_jump_makes_no_report_older(gpu_host: Host, jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = reconciler(gpu_host)
    gpu_host.write(REPORT, b"{}")
    agent.reconcile()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert age_in_new_process(gpu_host) < 60
    gpu_host.write(REPORT, b"{ }")
    assert age_in_new_process(gpu_host) < 60, "it is newer than the last pass"


def test_ages_are_written_only_if_a_file_has_changed(gpu_host: Host) -> None:
    agent = reconciler(gpu_host)
    agent.reconcile()
    agent.reconcile()
    before = gpu_host.identity(AGES)
    agent.reconcile()
    assert gpu_host.identity(AGES) == before
    gpu_host.write(REPORT, b"{}")
    agent.reconcile()
    assert gpu_host.identity(AGES) != before
    gpu_host.write(REPORT, b"{}")
    for content in (b"{", b'{"/x": [1]}', b'{"/x": ["1", 2, 3]}', b'{"/x": [1, 2, null]}'):
        gpu_host.write(AGES, content)
        assert age_in_new_process(gpu_host) < 60
