"""Makes the metrics of machines. The number of values that a label takes from machines' reports is limited.

Root in a machine can report any value, and each new value of a label begins a new series, which Prometheus keeps for
weeks.
"""

import re
from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from agent.host.daemon.http.families import counter, gauge
from agent.host.outcome import MachineOutcome, Outcome
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.facts import MachineFacts, Unseen
from agent.model.reasons import Reason

REASONS = frozenset(Reason)
OTHER = "other"
"""The label's value in place of a reported value that is not shown."""
VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}([-+.~]?[a-z0-9]{1,12}){0,2}")
VERSIONS = 16
"""How many versions of machine halves the metrics show until the service restarts. Further versions are `other`."""


class Versions:
    """The versions of machine halves that the metrics have shown."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def label(self, version: str) -> str:
        """Return the version; OTHER if it is malformed, or if VERSIONS other versions have already been shown."""
        if version not in self._shown and (len(self._shown) >= VERSIONS or not VERSION.fullmatch(version)):
            return OTHER
        self._shown.add(version)
        return version


class Stops:
    """The machines that somebody stopped, as was last known.

    While systemd does not answer, the state of no unit is known, and a page about a machine that was stopped on purpose
    would wake a person.
    """

    def __init__(self) -> None:
        self._stopped: dict[str, bool] = {}

    def stopped(self, machine: MachineFacts) -> bool:
        """Return whether somebody stopped the machine since the host booted; False if that was never known."""
        if not isinstance(machine.unit_state, Unseen):
            # A machine whose unit failed does not count as stopped: no user stopped it.
            self._stopped[machine.name] = machine.has_run and machine.unit_state == "inactive"
        return self._stopped.get(machine.name, False)


def condition_families(machines: Iterable[MachineOutcome]) -> Iterator[Metric]:
    """Yield the metrics that are shown even without fresh evidence.

    Without fresh evidence, all conditions are Unknown, also Ready.
    """
    ready = gauge("machine_ready", "1 if the machine can run GPU workloads, on fresh evidence.", "machine")
    states = gauge(
        "machine_condition",
        "Constant 1, with the condition's current status (True, False, Unknown) and its reason.",
        "machine",
        "condition",
        "status",
        "reason",
    )
    changed = gauge(
        "machine_ready_last_transition_timestamp_seconds",
        "When the status of the machine's condition Ready last changed. Not shown without fresh evidence.",
        "machine",
    )
    losses = gauge(
        "machine_recent_ready_losses",
        "How often the machine ceased to be ready in the last 10 minutes. After 4 losses, Ready stays False "
        "(Settling) until 60 s pass without a fault.",
        "machine",
    )
    for machine in machines:
        ready.add_metric([machine.name], machine.ready.status is Status.TRUE)
        losses.add_metric([machine.name], len(machine.ready.losses))
        for kind in ConditionType:
            condition = machine.condition(kind)
            states.add_metric([machine.name, kind, condition.status, _reason(condition)], 1)
        if machine.ready.last_transition:
            changed.add_metric([machine.name], machine.ready.last_transition)
    yield from (ready, states, changed, losses)


def _reason(condition: Condition) -> str:
    return condition.reason if condition.reason in REASONS else OTHER


def machine_families(outcome: Outcome, versions: Versions, stops: Stops) -> Iterator[Metric]:
    """Yield the metrics that need a fresh outcome."""
    yield from _gpu_counts(outcome.machines)
    stopped = gauge(
        "machine_stopped",
        "1 if somebody stopped the machine since the host booted: its unit is inactive, not failed. While systemd does "
        "not answer: what was last known.",
        "machine",
    )
    ended = {each.name for each in outcome.facts.machines if stops.stopped(each)}
    reported = gauge(
        "machine_report_timestamp_seconds", "When the machine half last reported. It does so each minute.", "machine"
    )
    agents = gauge(
        "machine_agent_info", "Constant 1, with the version of the machine half, from its report.", "machine", "version"
    )
    repairs = counter(
        "machine_repairs",
        "Changes by other programs that the machine half undid since the machine's boot, by what was changed.",
        "machine",
        "what",
    )
    for machine in outcome.machines:
        stopped.add_metric([machine.name], machine.name in ended)
        if machine.reported:
            reported.add_metric([machine.name], machine.reported)
        if machine.agent_version:
            agents.add_metric([machine.name, versions.label(machine.agent_version)], 1)
        for what, count in machine.repairs.items():
            repairs.add_metric([machine.name, what], count)
    yield from (stopped, reported, agents, repairs)


def _gpu_counts(machines: Iterable[MachineOutcome]) -> Iterator[Metric]:
    granted = gauge("machine_gpus", "GPUs granted to the machine.", "machine")
    expected = gauge(
        "machine_gpus_expected",
        'GPUs that the machine\'s settings ask for. With `gpus = "all"`: granted and lost GPUs.',
        "machine",
    )
    advertised = gauge(
        "machine_gpus_advertised",
        "Granted GPUs that the node offers to pods, from the machine's report. Not shown if that is unknown.",
        "machine",
    )
    lost = gauge(
        "machine_gpus_lost",
        "GPUs that the machine was granted and that left the PCI bus without gpus detach. They count until they are "
        "back, or gpus forget acknowledges the loss.",
        "machine",
    )
    for machine in machines:
        granted.add_metric([machine.name], len(machine.gpus))
        expected.add_metric([machine.name], machine.expected)
        lost.add_metric([machine.name], len(machine.lost))
        if machine.advertised is not None:
            advertised.add_metric([machine.name], machine.advertised)
    yield from (granted, expected, advertised, lost)
