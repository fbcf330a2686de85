"""Runs steps so that a failure affects only the step's own condition: other steps run, and a report is written."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from agent.model.conditions import Condition, ConditionType, false
from agent.model.errors import AgentError
from agent.model.handoff import with_remark
from agent.model.reasons import Reason
from agent.model.text import one_line

T = TypeVar("T")

ERROR_SHOWN = 200
"""The largest number of characters of an error that a condition or a remark shows."""


def attempt(kind: ConditionType, step: Callable[[], Condition]) -> Condition:
    """Run a step and return its condition. An exception becomes a condition of type `kind` that is False."""
    try:
        return step()
    except (AgentError, OSError) as error:
        return false(kind, Reason.FAILED, str(error))
    # Any exception: unexpected content of a file that a pod can write must not keep the report from being written. The
    # condition's message is also logged.
    except Exception as error:
        return false(kind, Reason.FAILED, f"{type(error).__name__}: {one_line(str(error))[:ERROR_SHOWN]}")


class InBackground(Generic[T]):
    """A step that runs in a thread, in parallel with others. A thread suffices: steps mostly wait for programs.

    The step must not raise an exception.
    """

    def __init__(self, step: Callable[[], T]) -> None:
        self._results: list[T] = []
        self._thread: threading.Thread | None = threading.Thread(target=self._run, args=(step,))
        try:
            self._thread.start()
        except RuntimeError:
            # A pod may have used up the machine's processes and threads: run the step here and now.
            self._thread = None
            self._run(step)

    def _run(self, step: Callable[[], T]) -> None:
        self._results.append(step())

    def result(self) -> T:
        """Wait until the step is done, and return its result."""
        if self._thread:
            self._thread.join()
        return self._results[0]


def with_remark_from(
    conditions: tuple[Condition, ...], kind: ConditionType, what: str, step: Callable[[], tuple[Condition, ...]]
) -> tuple[Condition, ...]:
    """Run a step that adds a remark to conditions, and return the conditions.

    If the step raises an exception, the condition `kind` gets the remark "cannot tell `what`". The report must be
    written even if files of pods or processes have unexpected content.
    """
    try:
        return step()
    except Exception as error:
        remark = f"; cannot tell {what}: {one_line(str(error))[:ERROR_SHOWN]}"
        return with_remark(conditions, kind, remark)
