"""Health probes and `systemctl status` show the state of machines."""

from http import HTTPStatus

from agent.host.daemon.http.health import machine_pages, status_line
from agent.host.outcome import MachineOutcome
from agent.model.conditions import ConditionType, false, unknown
from agent.model.reasons import Reason
from tests.fakes.reconciler import conditions

NOT_YET = MachineOutcome("gpu-node", ())


def test_what_is_unknown_is_not_called_not_ready() -> None:
    """`status` and the exit codes of --check tell the two apart."""
    waiting = unknown(ConditionType.DEVICES_ALLOWED, Reason.HANDOFF_PENDING, "")
    stopped = false(ConditionType.MACHINE_RUNNING, Reason.STOPPED, "")
    machines = [MachineOutcome("a", conditions(waiting)), MachineOutcome("b", conditions(waiting, stopped))]
    assert status_line(machines) == "a: unknown: DevicesAllowed HandoffPending; b: not ready: MachineRunning Stopped"


def test_before_its_first_pass_a_machine_is_not_evaluated() -> None:
    assert status_line([NOT_YET]) == "gpu-node: not evaluated"
    # Many machines still fit in after a long path.
    assert len(status_line([NOT_YET], ["x" * 1000])) < 400
    path = "/readyz/machines/gpu-node"
    page = machine_pages(path, NOT_YET)[path]
    assert page.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert page.body == b"[-]Ready not evaluated\nreadyz/machines/gpu-node check failed\n"
