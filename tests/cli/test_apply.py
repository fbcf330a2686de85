"""`apply` waits only for machines that can report."""

import time

import pytest

from agent.cli.apply import apply
from tests.fakes.gpu_host import MACHINE, UNITS, reconciler
from tests.fakes.host import Host


def test_a_masked_machine_is_not_waited_for(
    gpu_host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the agent nor systemd would start it."""

    def sleep(_: float) -> None:
        raise AssertionError("waited for a machine that cannot start")

    monkeypatch.setattr(time, "sleep", sleep)
    gpu_host.bus.unit(UNITS[0], "inactive", "masked")
    assert apply(reconciler(gpu_host)) == 1
    assert f"`systemctl unmask {UNITS[0]}`" in " ".join(capsys.readouterr().out.split())


def test_a_machine_that_has_ended_is_not_waited_for(
    gpu_host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cannot report. `apply` waited for five minutes."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 * len(waited))
    assert apply(reconciler(gpu_host)) == 1
    assert f"machine {MACHINE} started and then stopped: see `journalctl -e -u {UNITS[0]}`" in capsys.readouterr().err
    assert len(waited) == 1
