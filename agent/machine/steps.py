"""Runs steps whose failure costs only their own condition: the others do their work, and a report is written."""

import threading
from collections.abc import Callable

from agent.model.conditions import Condition, ConditionType, false, unknown
from agent.model.errors import AgentError
from agent.model.handoff import with_remark
from agent.model.reasons import Reason
from agent.model.text import one_line

ERROR_SHOWN = 200
"""Characters of an error in a remark."""


def attempt(kind: ConditionType, step: Callable[[], Condition]) -> Condition:
    """Run a step and turn its failure into its condition, so that the other steps can do their work."""
    try:
        return step()
    except (AgentError, OSError) as error:
        return false(kind, Reason.FAILED, str(error))
    # Any exception: content that others chose, such as a pod's file, must not cost the report. The condition's message
    # also goes to the journal.
    except Exception as error:
        return false(kind, Reason.FAILED, f"{type(error).__name__}: {one_line(str(error))[:ERROR_SHOWN]}")


class Beside:
    """A step in a thread, in parallel to others: all of them do little more than wait for programs."""

    def __init__(self, kind: ConditionType, step: Callable[[], Condition]) -> None:
        self._condition = unknown(kind, Reason.NOT_TRIED, "")
        self._thread = threading.Thread(target=self._take, args=(kind, step))
        self._thread.start()

    def _take(self, kind: ConditionType, step: Callable[[], Condition]) -> None:
        self._condition = attempt(kind, step)

    def condition(self) -> Condition:
        """Return the condition once the step is done."""
        self._thread.join()
        return self._condition


def named(
    conditions: tuple[Condition, ...], kind: ConditionType, what: str, step: Callable[[], tuple[Condition, ...]]
) -> tuple[Condition, ...]:
    """Run a step that adds a remark on processes or pods, whose files may hold anything; the report must not fail."""
    try:
        return step()
    except Exception as error:
        remark = f"; cannot tell {what}: {one_line(str(error))[:ERROR_SHOWN]}"
        return with_remark(conditions, kind, remark)
