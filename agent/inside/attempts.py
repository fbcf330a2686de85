"""Steps whose failure costs their own condition alone: the others do their work, and a report is written."""

import threading
from collections.abc import Callable

from agent.conditions import Condition, ConditionType, false, unknown
from agent.errors import AgentError
from agent.handoff import one_line, with_remark

ERROR_SHOWN = 200
"""Characters of an error in a remark."""


def attempt(kind: ConditionType, step: Callable[[], Condition]) -> Condition:
    """One failed step never keeps the others from their work."""
    try:
        return step()
    except (AgentError, OSError) as error:
        return false(kind, "Failed", str(error))
    # Whatever it is: what a file of somebody else holds, such as a pod, must not cost the report. The condition's
    # message goes to the journal too.
    except Exception as error:
        return false(kind, "Failed", f"{type(error).__name__}: {one_line(str(error))[:ERROR_SHOWN]}")


class Beside:
    """A step in a thread: it and those that go on beside it do little more than wait for programs."""

    def __init__(self, kind: ConditionType, step: Callable[[], Condition]) -> None:
        self._condition = unknown(kind, "NotTried", "")
        self._thread = threading.Thread(target=self._take, args=(kind, step))
        self._thread.start()

    def _take(self, kind: ConditionType, step: Callable[[], Condition]) -> None:
        self._condition = attempt(kind, step)

    def condition(self) -> Condition:
        """Once the step is done."""
        self._thread.join()
        return self._condition


def named(
    conditions: tuple[Condition, ...], kind: ConditionType, what: str, step: Callable[[], tuple[Condition, ...]]
) -> tuple[Condition, ...]:
    """The conditions with a remark on processes or pods, whose files may hold anything: it must not cost the report."""
    try:
        return step()
    except Exception as error:
        remark = f"; {what} is not known: {one_line(str(error))[:ERROR_SHOWN]}"
        return with_remark(conditions, kind, remark)
