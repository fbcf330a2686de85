"""`apply` waits only for machines that can report."""

import os

from agent.config.settings import Config
from agent.host.reconcile import Reconciler
from agent.host.state.locks import machine_locks
from agent.model.paths import machine_unit
from tests.fakes.clock import Clock
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, UNITS, reconciler, units
from tests.fakes.host import Host


def test_a_machine_that_has_ended_is_not_waited_for(gpu_host: Host, clock: Clock, capsys: Capture) -> None:
    """It cannot report. `apply` waited for five minutes."""
    clock.least = 100.0
    assert command(reconciler(gpu_host), "apply") == 1
    assert f"machine {MACHINE} started and then stopped: see `journalctl -e -u {UNITS[0]}`" in capsys.readouterr().err
    assert len(clock.slept) == 1


def test_a_machine_that_another_command_stopped_is_not_started(gpu_host: Host, clock: Clock, capsys: Capture) -> None:
    """`apply` started the machine that `reset` or `up --rebuild` had stopped in order to remove its root directory."""
    start = ("systemctl", "start", "--no-block", UNITS[0])
    units(gpu_host, "inactive", stopped_at=4711)
    with machine_locks(gpu_host, (MACHINE,), "reset"):
        assert command(reconciler(gpu_host), "apply") == 1
    assert start not in gpu_host.runner.calls
    said = f"machine {MACHINE} was not started: another command is working on machine {MACHINE}: "
    assert f"{said}`unbounded-agent reset` (process {os.getpid()})" in " ".join(capsys.readouterr().err.split())
    assert clock.passed < 10, "it did not wait for the machine's report"


def test_a_command_that_works_on_all_machines_delays_apply_only_once(gpu_host: Host, clock: Clock) -> None:
    """`up` may work on every node of the host, for minutes."""
    names = ("a", "b", "c", MACHINE)
    for name in names:
        gpu_host.bus.unit(machine_unit(name), "inactive", stopped_at=4711)
    agent = Reconciler(Config.validated({"machines": {name: {} for name in names}}), gpu_host, gpu_host)
    with machine_locks(gpu_host, names, "up"):
        assert command(agent, "apply") == 1
    assert clock.passed < 10


def test_a_masked_machine_is_not_waited_for(gpu_host: Host, clock: Clock, capsys: Capture) -> None:
    """Neither the agent nor systemd would start it. Other commands may work on a machine that `apply` waits for."""

    def stop() -> None:
        with machine_locks(gpu_host, (MACHINE,), "stop"):
            units(gpu_host, "inactive", stopped_at=4711)

    clock.meanwhile = stop
    assert command(reconciler(gpu_host), "apply") == 1
    waited = len(clock.slept)
    gpu_host.bus.unit(UNITS[0], "inactive", "masked")
    assert command(reconciler(gpu_host), "apply") == 1
    assert f"`systemctl unmask {UNITS[0]}`" in " ".join(capsys.readouterr().out.split())
    assert len(clock.slept) == waited, "waited for a machine that cannot start"
