"""Outcomes as Prometheus metrics: gauges are made from the last outcome, counters add up over all of them."""

from collections.abc import Iterable
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from agent.conditions import ConditionType, unknown
from agent.convergence import Convergence
from agent.facts import Broken, Facts, Unseen
from agent.gauges import PREFIX, Gauges, View
from agent.reconcile import MachineOutcome, Outcome
from agent.server import Page

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
RESULTS = ("converged", "changed", "partial", "failed")
"""Nothing to do; something done; something done or tried, and a part failed; no pass was possible."""
ACTIONS = ("write", "remove", "stage", "reload", "change", "other")
"""The verb that each action's sentence begins with."""
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TEXT = "text/plain; version=0.0.4"


def without_evidence(machine: MachineOutcome, why: str) -> MachineOutcome:
    """The machine with each condition Unknown: what was true once is no evidence now."""
    conditions = tuple(unknown(kind, "StaleEvidence", why) for kind in ConditionType)
    return MachineOutcome(machine.name, conditions)


def unseen(facts: Facts) -> str:
    """What could not be looked at in this pass, and why; empty after a full observation."""
    return "; ".join(
        f"{vendor.vendor} devices: {vendor.devices.why}"
        for vendor in facts.vendors
        if isinstance(vendor.devices, Broken | Unseen)
    )


def result(outcome: Outcome) -> str:
    """One of RESULTS."""
    if outcome.failures or unseen(outcome.facts):
        return "partial"
    return "changed" if outcome.actions else "converged"


class Metrics:
    """The counters, and the rendering of everything."""

    def __init__(self) -> None:
        # Their `_created` series would double the counters' number, and the text format shows them as other metrics.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._passes = self._counter("reconcile_total", "Passes by their result.", "result", RESULTS)
        self._actions = self._counter("actions_total", "Changes made to the host, by kind.", "kind", ACTIONS)
        self._failures = self._counter("failures_total", "Steps of passes that failed.", "", ())
        self._reloads = self._counter(
            "config_reloads_total", "Attempts to read the configuration again.", "result", ("ok", "failed")
        )
        # Its values come with the errors: GPUs times their possible numbers would be thousands of series.
        self._gpu_errors = Counter(
            f"{PREFIX}_gpu_xid_errors_total",
            "Errors of GPUs in the kernel's log.",
            ["gpu", "xid"],
            registry=self._registry,
        )
        self._duration = Histogram(
            f"{PREFIX}_reconcile_duration_seconds",
            "How long passes took, by what started them.",
            ["trigger"],
            registry=self._registry,
            buckets=BUCKETS,
        )
        self.convergence = Convergence(self._registry)

    def _counter(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        """With every value of its label at 0 from the start, so that the first increase is seen."""
        counter = Counter(f"{PREFIX}_{name}", text, [label] if label else [], registry=self._registry)
        for value in values:
            counter.labels(value)
        return counter

    def passed(self, trigger: str, outcome: Outcome) -> None:
        """Count a pass that came to an end."""
        self._passes.labels(result(outcome)).inc()
        self._duration.labels(trigger).observe(outcome.duration)
        self._failures.inc(len(outcome.failures))
        for sentence in outcome.actions:
            verb = sentence.partition(" ")[0]
            self._actions.labels(verb if verb in ACTIONS else "other").inc()

    def failed(self, trigger: str, duration: float) -> None:
        """Count a pass that was not possible."""
        self._passes.labels("failed").inc()
        self._duration.labels(trigger).observe(duration)

    def gpu_error(self, address: str, number: int, times: int) -> None:
        """Count errors of a GPU; addresses are those of the host's PCI devices, numbers below 1000."""
        self._gpu_errors.labels(address, str(number)).inc(times)

    def reloaded(self, good: bool) -> None:
        """Count an attempt to read the configuration again."""
        self._reloads.labels("ok" if good else "failed").inc()

    def page(self, view: View, accept: str) -> Page:
        """The exposition; `accept` is TEXT or OPENMETRICS."""
        gauges = Gauges(view)
        self._registry.register(gauges)
        try:
            encode, content_type = choose_encoder(accept)
            return Page(HTTPStatus.OK, encode(self._registry), content_type)
        finally:
            self._registry.unregister(gauges)
