"""What the service keeps when it reads its configuration again."""

import time

import pytest

from agent.cli.wiring import make_reconcilers
from agent.config.load import Loaded
from agent.config.settings import Config
from agent.model.paths import REPORT_NAME, report_directory
from tests.fakes.gpu_host import MACHINE
from tests.fakes.host import Host


def test_after_a_clock_jump_a_reload_makes_no_report_older(gpu_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    make, loaded = make_reconcilers(gpu_host), Loaded(Config.validated({"machines": {MACHINE: {}}}))
    gpu_host.write(f"{report_directory(MACHINE)}/{REPORT_NAME}", b"{}")

    def age_after_reload() -> float:
        facts, *_ = make(loaded, lambda _: None).preview()
        return facts.machines[0].report_age

    assert age_after_reload() < 60
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    assert age_after_reload() < 60
