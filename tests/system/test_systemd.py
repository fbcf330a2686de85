"""Answers of PID 1 that do not have the documented types."""

import pytest

from agent.model.errors import BusAnswerError
from agent.system.files import System
from agent.system.systemd import queue_job
from tests.fakes.host import ScriptedRunner


@pytest.mark.parametrize("answer", [(), (4711,), ("/job/1", "/job/2")])
def test_an_unexpected_answer_about_a_job_is_an_error(answer: tuple[object, ...]) -> None:
    def bus(*_: object) -> tuple[object, ...]:
        return answer

    with pytest.raises(BusAnswerError, match=r"StartUnit machine\.service: unexpected answer"):
        queue_job("StartUnit", "machine.service", System(ScriptedRunner(), bus=bus))
