"""Logs each failure, problem and condition change once, and again only if it was gone and has come back."""

import contextlib
import logging
from collections.abc import Iterator

from agent.host.daemon.http import health
from agent.host.outcome import PASS_FAILED, Outcome
from agent.model.conditions import Condition, ConditionType
from agent.model.errors import AgentError
from agent.model.faults import fault, in_words
from agent.model.text import one_line

log = logging.getLogger(__name__)


class EventLog:
    """Logs the results of passes. It remembers what it has logged."""

    def __init__(self) -> None:
        self.last_failures: tuple[str, ...] = ()
        self._problems: tuple[str, ...] = ()
        self._conditions: dict[str, dict[ConditionType, Condition]] = {}
        self._faults: dict[str, str] = {}
        """By piece of work: why the last attempt at it failed. Work whose last attempt succeeded is not listed."""

    def rejected(self, why: str) -> None:
        """Log why the configuration is invalid. If it is valid, `why` is empty, and nothing is logged."""
        for line in why.splitlines():
            log.error("configuration rejected, using the last good one: %s", one_line(line))

    def outcome(self, outcome: Outcome) -> None:
        """Log what is new in the outcome of a pass."""
        self.failures(outcome.failures)
        problems = outcome.facts.all_problems()
        for sentence in problems:
            if sentence not in self._problems:
                log.warning("%s", one_line(sentence))
        self._problems = problems
        for machine in outcome.machines:
            for level, sentence in health.changes(machine, self._conditions.get(machine.name, {})):
                log.log(level, "%s", sentence)
        self._conditions = {
            machine.name: {each.type: each for each in machine.conditions} for machine in outcome.machines
        }

    def unfinished(self, error: Exception) -> str:
        """Log why a pass did not finish, with the traceback if the error is unexpected. Return the reason."""
        expected = isinstance(error, AgentError | OSError)
        why = f"{PASS_FAILED}{error if expected else in_words(error)}"
        self.failures((why,), None if expected else error)
        return why

    def failures(self, failures: tuple[str, ...], cause: Exception | None = None) -> None:
        """Log the failures that the previous pass did not have, with the traceback of `cause`.

        If the previous pass had failures and this one has none, log that.
        """
        for sentence in failures:
            if sentence not in self.last_failures:
                log.error("%s", one_line(sentence), exc_info=cause)
        if self.last_failures and not failures:
            log.info("recovered: the last pass had no failure")
        self.last_failures = failures

    @contextlib.contextmanager
    def guarded(self, work: str) -> Iterator[None]:
        """Log any error of the block with its traceback, and suppress it: other work must go on.

        An error that comes back at each attempt is logged once. `work` completes the sentence "cannot ...".
        """
        try:
            yield
        except Exception as error:
            why = fault(work, error).why
            if self._faults.get(work) != why:
                log.error("%s", why, exc_info=error)
            self._faults[work] = why
        else:
            self._faults.pop(work, None)


def why_not_read(error: Exception) -> str:
    """Return why the configuration could not be read or used."""
    return str(error) if isinstance(error, AgentError) else fault("read the configuration", error).why
