"""Health probes and `systemctl status` show the state of machines."""

from http import HTTPStatus

from agent.host.daemon.http.health import machine_pages, status_line
from agent.host.outcome import MachineOutcome

NOT_YET = MachineOutcome("gpu-node", ())


def test_before_its_first_pass_a_machine_is_not_evaluated() -> None:
    assert status_line([NOT_YET]) == "gpu-node: not evaluated"
    # Many machines still fit in after a long path.
    assert len(status_line([NOT_YET], ["x" * 1000])) < 400
    path = "/readyz/machines/gpu-node"
    page = machine_pages(path, NOT_YET)[path]
    assert page.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert page.body == b"[-]Ready not evaluated\nreadyz/machines/gpu-node check failed\n"
