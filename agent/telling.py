"""What the log hears of passes: each sentence once, until it is over."""

import logging

from agent import health
from agent.conditions import Condition, ConditionType
from agent.handoff import one_line
from agent.reconcile import Outcome

log = logging.getLogger("agent.daemon")


class Telling:
    """Remembers what was told."""

    def __init__(self) -> None:
        self.failed: tuple[str, ...] = ()
        """Of the last pass."""
        self._problems: tuple[str, ...] = ()
        self._conditions: dict[str, dict[ConditionType, Condition]] = {}

    def outcome(self, outcome: Outcome) -> None:
        """A pass that came to its end."""
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

    def failures(self, failures: tuple[str, ...]) -> None:
        """Of any pass; none is the end of those that were told."""
        for sentence in failures:
            if sentence not in self.failed:
                log.error("%s", one_line(sentence))
        if self.failed and not failures:
            log.info("the failure is over")
        self.failed = failures
