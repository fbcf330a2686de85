"""Steps that run at the same time."""

import threading
from pathlib import Path

import pytest

from agent.host.provision.apply import Tools, run_together
from agent.host.provision.plan import RemoveTree
from agent.model.errors import AgentError
from agent.system.files import System
from agent.system.network import HostNetwork
from tests.fakes.host import ScriptedRunner

STEPS = tuple(RemoveTree(f"/var/lib/machines/{name}") for name in ("first", "second"))


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(System(ScriptedRunner(), str(tmp_path)), HostNetwork())


def test_ctrl_c_does_not_wait_for_the_other_steps(tools: Tools) -> None:
    """Python raises KeyboardInterrupt in the main thread, which performs the first step."""
    end, ended = threading.Event(), threading.Event()

    def progress(step: str) -> None:
        if "first" in step:
            raise KeyboardInterrupt
        end.wait(30)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_together(STEPS, tools, progress)
    assert not ended.is_set()
    end.set()


def test_a_failed_step_waits_for_the_other_steps(tools: Tools) -> None:
    done = threading.Event()

    def progress(step: str) -> None:
        if "first" in step:
            raise AgentError("it failed", "try again")
        done.wait(0.2)
        done.set()

    with pytest.raises(AgentError, match="it failed"):
        run_together(STEPS, tools, progress)
    assert done.is_set()
