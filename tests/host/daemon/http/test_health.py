"""Health probes and `systemctl status` show the state of machines."""

from http import HTTPStatus

from agent.host.daemon.health import changes, status_line
from agent.host.daemon.pages import check_pages, machine_checks
from agent.host.reconcile import MachineOutcome
from agent.model.conditions import ConditionType, Reason, false, unknown
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
    page = check_pages(path, machine_checks(NOT_YET))[path]
    assert page.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert page.body == b"[-]Ready not evaluated\nreadyz/machines/gpu-node check failed\n"


def test_one_cause_is_one_line_of_the_journal() -> None:
    """A missing machine had 16 lines, one for each condition."""
    why = "/var/lib/machines/gpu-node does not exist"
    unknown_ones = [unknown(kind, Reason.NO_SUCH_MACHINE, why) for kind in ConditionType]
    missing = [
        false(kind, Reason.NO_SUCH_MACHINE, why) for kind in (ConditionType.MACHINE_RUNNING, ConditionType.READY)
    ]
    machine = MachineOutcome("gpu-node", conditions(*unknown_ones, *missing))
    lines = [sentence for _, sentence in changes(machine, {})]
    assert lines[0].startswith("gpu-node: DriverLoaded, ")
    assert lines[0].endswith(f" are Unknown: NoSuchMachine: {why}")
    assert [line.partition(": NoSuch")[0] for line in lines[1:]] == [
        "gpu-node: MachineRunning is False",
        "gpu-node: Ready is False",
    ]
    assert list(changes(machine, {each.type: each for each in machine.conditions})) == []
