"""Makes Prometheus metrics from the outcomes of passes: gauges show the last outcome, counters add up all of them."""

from collections.abc import Iterable
from http import HTTPStatus
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from agent.host.daemon.http.convergence import Convergence
from agent.host.daemon.http.families import PREFIX
from agent.host.daemon.http.gauges import Gauges
from agent.host.daemon.http.machine_gauges import Stops, Versions
from agent.host.daemon.http.server import Page
from agent.host.daemon.http.view import View
from agent.host.outcome import MachineOutcome, Outcome
from agent.model.actions import ActionKind
from agent.model.conditions import ConditionType, unknown
from agent.model.facts import Broken, Facts, Unseen
from agent.model.reasons import Reason

BUCKETS = (0.1, 0.5, 2, 10, 60, 300)
RESULTS = ("converged", "changed", "partial", "failed")
"""Results of a pass: there was nothing to do (`converged`), something was done (`changed`), some steps or observations
failed (`partial`), or the pass did not finish (`failed`)."""
ACTIONS = (*get_args(ActionKind), "other")
"""Values of the label `kind` of actions_total. No action has the kind `other` any longer, but dashboards may still use
that series."""
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TEXT = "text/plain; version=0.0.4"


def without_evidence(machine: MachineOutcome, why: str) -> MachineOutcome:
    """Return the machine with all conditions Unknown and no other facts: an old observation proves nothing."""
    conditions = tuple(unknown(kind, Reason.STALE_EVIDENCE, why) for kind in ConditionType)
    return MachineOutcome(machine.name, conditions)


def unseen(facts: Facts) -> str:
    """Return the vendors whose devices could not be observed in this pass, and why; empty if all could be."""
    return "; ".join(
        f"{vendor.vendor} devices: {vendor.devices.why}"
        for vendor in facts.vendors
        if isinstance(vendor.devices, Broken | Unseen)
    )


def result(outcome: Outcome) -> str:
    """Return the result of a pass, one of RESULTS."""
    if outcome.failures or unseen(outcome.facts):
        return "partial"
    return "changed" if outcome.actions else "converged"


class Metrics:
    """Counts passes and their results, and renders the metrics page."""

    def __init__(self) -> None:
        # Without this call, each counter would have a second series, `_created`, which the text format shows as a
        # metric of its own.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._passes = self._counter(
            "reconcile_total",
            "Reconcile passes, by result: converged (nothing to do), changed, partial or failed.",
            "result",
            RESULTS,
        )
        self._actions = self._counter(
            "actions_total", "Changes that the agent made to the host, by kind.", "kind", ACTIONS
        )
        self._failures = self._counter("failures_total", "Steps that failed, in all passes.", "", ())
        self._reloads = self._counter(
            "config_reloads_total", "Attempts to reload the configuration.", "result", ("ok", "failed")
        )
        # This counter's series are created as errors occur: one for every GPU and Xid in advance would be thousands.
        self._gpu_errors = Counter(
            f"{PREFIX}_gpu_xid_errors_total",
            "GPU errors that the driver wrote to the kernel log. A series begins with the first error.",
            ["gpu", "xid"],
            registry=self._registry,
        )
        self._duration = Histogram(
            f"{PREFIX}_reconcile_duration_seconds",
            "How long reconcile passes took.",
            registry=self._registry,
            buckets=BUCKETS,
        )
        self._versions, self._stops = Versions(), Stops()
        self.convergence = Convergence(self._registry)

    def _counter(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        """Return a counter with one series per label value. All begin at 0, so Prometheus sees the first increase."""
        counter = Counter(f"{PREFIX}_{name}", text, [label] if label else [], registry=self._registry)
        for value in values:
            counter.labels(value)
        return counter

    def passed(self, outcome: Outcome) -> None:
        """Count a completed pass."""
        self._passes.labels(result(outcome)).inc()
        self._duration.observe(outcome.duration)
        self._failures.inc(len(outcome.failures))
        for action in outcome.actions:
            self._actions.labels(action.kind).inc()

    def failed(self, duration: float) -> None:
        """Count a pass that did not finish."""
        self._passes.labels("failed").inc()
        self._duration.observe(duration)

    def gpu_error(self, address: str, number: int, times: int) -> None:
        """Count a GPU's errors.

        The number of series is limited, because addresses are those of the host's PCI devices, and error numbers are
        below 1000.
        """
        self._gpu_errors.labels(address, str(number)).inc(times)

    def reloaded(self, good: bool) -> None:
        """Count an attempt to read the configuration again."""
        self._reloads.labels("ok" if good else "failed").inc()

    def page(self, view: View, accept: str) -> Page:
        """Return the metrics page. `accept` is TEXT or OPENMETRICS."""
        gauges = Gauges(view, self._versions, self._stops)
        self._registry.register(gauges)
        try:
            encode, content_type = choose_encoder(accept)
            return Page(HTTPStatus.OK, encode(self._registry), content_type)
        finally:
            self._registry.unregister(gauges)
