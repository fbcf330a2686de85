"""How steps are performed: each by its type, after a failure, and at the same time."""

import threading
from pathlib import Path
from typing import get_args

import pytest

from agent.host.apply.steps import PERFORMERS, Progress, apply
from agent.host.provision.apply import performers
from agent.host.provision.plan import FetchBinaries, NodeStep, RemoveTree
from agent.model.errors import AgentError
from agent.model.goal import Action, RemoveFile
from agent.model.node import NodeBinary
from agent.system.files import System
from agent.system.network import HostNetwork
from tests.fakes.host import ScriptedRunner

FIRST, SECOND = (FetchBinaries((NodeBinary(name, "/", "", "/"),)) for name in ("first", "second"))
LATER = RemoveTree("/later")


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(ScriptedRunner(), str(tmp_path))


def test_each_step_has_a_performer() -> None:
    assert set(get_args(Action)) == set(PERFORMERS)
    assert set(NodeStep.__subclasses__()) == set(performers(HostNetwork()))


def test_ctrl_c_does_not_wait_for_the_other_steps(system: System) -> None:
    """Python raises KeyboardInterrupt in the main thread, which performs the first step."""
    end, ended = threading.Event(), threading.Event()

    def fetch(step: FetchBinaries, _: System, __: Progress) -> None:
        if step == FIRST:
            raise KeyboardInterrupt
        end.wait(30)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        apply((FIRST, SECOND), system, performers={FetchBinaries: fetch})
    assert not ended.is_set()
    end.set()


def test_an_error_while_a_step_is_told_is_none_of_the_step(system: System) -> None:
    """For example, nobody reads the command's output any longer."""

    def progress(sentence: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        apply((RemoveFile("/a"), RemoveFile("/b")), system, progress)


@pytest.mark.parametrize("error", [AgentError("it failed", "try again"), OSError(5, "it failed"), KeyError("a bug")])
def test_a_failed_step_of_up_waits_for_those_beside_it_and_ends_all_others(system: System, error: Exception) -> None:
    done: list[object] = []

    def fetch(step: FetchBinaries, _: System, __: Progress) -> None:
        if step == FIRST:
            raise error
        threading.Event().wait(0.1)
        done.append(step)

    with pytest.raises(KeyError if isinstance(error, KeyError) else AgentError, match=r"cannot fetch first: it|a bug"):
        apply((FIRST, SECOND, LATER), system, performers={FetchBinaries: fetch, RemoveTree: fetch})
    assert done == [SECOND]
