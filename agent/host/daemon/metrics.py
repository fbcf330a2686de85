"""Makes Prometheus metrics from the outcomes of passes: gauges show the last outcome, counters add up all of them."""

import re
import time
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from platform import python_version
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from agent.host.daemon.health import View
from agent.host.daemon.server import Page
from agent.host.daemon.wakeups import Tally
from agent.host.reconcile import MachineOutcome, Outcome, granted_to
from agent.host.verify.gpu_states import listed_gpus
from agent.model.conditions import Condition, ConditionType, Reason, Status, unknown
from agent.model.device import DeviceKind
from agent.model.facts import Broken, DeviceNode, Driver, Facts, Gpu, MachineFacts, StagedRoot, Unseen, VendorFacts
from agent.model.goal import ActionKind

# Makes families of metrics with the agent's prefix.


PREFIX = "unbounded_agent"


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """Return a gauge without samples."""
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def value(name: str, text: str, number: float) -> GaugeMetricFamily:
    """Return a gauge with one sample, which has no labels."""
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=number)


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """Return a counter without samples; `name` is without `_total`."""
    return CounterMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


# Makes the metrics of the host: devices, GPUs, drivers, driver roots and disk space. They need a fresh outcome.


GPU_STATUSES = ("ok", "missing", "unbound", "failed", "detached", "unused", "unknown")


def host_families(outcome: Outcome) -> Iterator[Metric]:
    """Yield all metrics of the host."""
    facts = outcome.facts
    yield value(
        "host_pci_gpus",
        "GPUs on the PCI bus, with or without a driver.",
        sum(len(vendor.gpus) for vendor in facts.vendors),
    )
    devices = gauge("host_devices", "Devices of the host by kind and status.", "kind", "status")
    for (kind, status), count in _device_counts(facts.vendors, outcome.machines).items():
        devices.add_metric([kind, status], count)
    yield devices
    yield from _gpu_families(outcome)
    yield from _driver_families(facts.vendors)
    yield from _storage_families(facts)


def _gpu_families(outcome: Outcome) -> Iterator[Metric]:
    info = gauge(
        "gpu_info",
        "Constant 1, with what is known about a GPU on the PCI bus, or about one that machines have lost.",
        *("gpu", "vendor", "model", "uuid", "machine", "state"),
    )
    for gpu in listed_gpus(outcome.facts, granted_to(outcome.machines)):
        labels = [gpu.pci_address, gpu.vendor, gpu.model, gpu.uuid, ",".join(gpu.machines), gpu.state]
        info.add_metric(labels, 1)
    failed = gauge(
        "gpu_fatal_error_timestamp_seconds",
        "When the agent read an error in the kernel log after which pods cannot rely on the GPU. Shown until the GPU "
        "has recovered.",
        *("gpu", "error"),
    )
    for address, fault in outcome.facts.gpus.faults.items():
        failed.add_metric([address, fault.reason], fault.since)
    yield from (info, failed)


def _driver_families(vendors: Iterable[VendorFacts]) -> Iterator[Metric]:
    info = gauge(
        "driver_info",
        "Constant 1, with the versions of a driver's module and libraries; empty if unknown.",
        *("vendor", "kernel_version", "library_version"),
    )
    mismatch = gauge(
        "driver_version_mismatch",
        "1 if the loaded module and the libraries have different versions: reload or reboot needed.",
        "vendor",
    )
    for vendor in vendors:
        if vendor.driver is not None:
            module, library = _versions(vendor.driver)
            info.add_metric([vendor.vendor, module, library], 1)
            mismatch.add_metric([vendor.vendor], bool(module and library and module != library))
    yield from (info, mismatch)


def _versions(driver: Driver) -> tuple[str, str]:
    """Return the versions of the module and the libraries. A version that is missing or was not observed is empty."""
    seen = (driver.module_version, driver.user_space.version)
    module, library = (version if isinstance(version, str) else "" for version in seen)
    return module, library


def _storage_families(facts: Facts) -> Iterator[Metric]:
    yield value("driver_roots", "Driver roots on disk.", len(facts.staged))
    yield value("driver_root_bytes", "Total size of the files in all driver roots.", sum(map(_size, facts.staged)))
    if isinstance(facts.state_free, int):
        yield value("state_free_bytes", "Free space in the file system of /var/lib/unbounded-agent.", facts.state_free)


def _size(root: StagedRoot) -> int:
    return sum(file.size for file in root.files if not file.link)


def _device_counts(vendors: Iterable[VendorFacts], machines: Iterable[MachineOutcome]) -> dict[tuple[str, str], int]:
    """Return the number of devices by kind and status. The counts of GPUs add up to host_pci_gpus.

    Of devices that are not GPUs, only usable nodes are known. Each such node counts as `ok`.
    """
    granted = {address for machine in machines for address in machine.gpus}
    counts = {(str(DeviceKind.GPU), status): 0 for status in GPU_STATUSES}
    for vendor in vendors:
        nodes = vendor.devices if isinstance(vendor.devices, tuple) else None
        for gpu in vendor.gpus:
            status = _gpu_status(gpu, nodes)
            # A GPU that no machine has may be bound to vfio-pci, or be an integrated GPU without a driver. That is no
            # fault, so such a GPU counts as `unused`.
            unused = status not in ("ok", "detached") and gpu.pci_address not in granted
            counts[DeviceKind.GPU, "unused" if unused else status] += 1
        for node in nodes or ():
            if node.kind is not DeviceKind.GPU:
                counts[node.kind, "ok"] = counts.get((node.kind, "ok"), 0) + 1
    return counts


def _gpu_status(gpu: Gpu, nodes: tuple[DeviceNode, ...] | None) -> str:
    """Return a GPU's status, the first of these that applies:

    `detached`, `unbound` (no kernel driver), `failed` (the kernel log says that the GPU no longer answers), `unknown`
    (nodes cannot be listed), `ok` (a usable node), `missing` (no usable node).
    """
    if gpu.detached:
        return "detached"
    if not gpu.driver:
        return "unbound"
    if gpu.why_lost:
        return "failed"
    if nodes is None:
        return "unknown"
    # A GPU has a minor number only if its driver makes GPU nodes of its own. Other GPUs have DRM's render nodes.
    wanted = DeviceKind.DRI_RENDER if gpu.minor is None else DeviceKind.GPU
    return "ok" if any(node.kind is wanted and node.pci_address == gpu.pci_address for node in nodes) else "missing"


# Makes the metrics of machines. The number of values that a label takes from machines' reports is limited.
#
# Root in a machine can report any value, and each new value of a label begins a new series, which Prometheus keeps for
# weeks.


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


# Makes Prometheus metrics of the last observation, and of the service's own state.


def families(view: View, versions: Versions, stops: Stops) -> Iterator[Metric]:
    """Yield the metrics of one view."""
    build = gauge(
        "build_info", "Constant 1, with the versions of the host half and of Python.", "version", "python_version"
    )
    build.add_metric([view.version, python_version()], 1)
    yield build
    yield from condition_families(view.machines)
    if view.outcome is not None:
        yield from machine_families(view.outcome, versions, stops)
        yield from host_families(view.outcome)
    if view.observed:
        yield value(
            "observation_last_success_timestamp_seconds",
            "When a pass last observed the devices of all vendors.",
            view.observed,
        )
    yield from _service_families(view)
    yield from _wakeup_families(view.wakeups)


def _service_families(view: View) -> Iterator[Metric]:
    yield value(
        "stuck_operations",
        "Reads of drivers' files, and commands, that missed their deadline and still hang.",
        len(view.stuck),
    )
    discarded = counter(
        "state_discarded", "How often a file of the agent's own state was discarded, because it was damaged.", "file"
    )
    for file, times in view.discarded.items():
        discarded.add_metric([file], times)
    yield discarded
    yield value(
        "config_last_reload_successful",
        "0 if the configuration was invalid when it was last read, so that the last good one is in force, or if its "
        "metrics.address could not be bound.",
        view.config_good,
    )
    yield value(
        "config_last_reload_success_timestamp_seconds", "When the configuration in force was read.", view.config_loaded
    )


def _wakeup_families(tallies: Iterable[Tally]) -> Iterator[Metric]:
    caused = counter("wakeups", "Passes that events caused, by source. Several sources may cause one pass.", "source")
    lost = counter(
        "wakeup_source_losses", "How often a source of events broke, or could not be opened at the start.", "source"
    )
    watching = gauge("wakeup_source_watching", "1 while the source reports events.", "source")
    for tally in tallies:
        caused.add_metric([tally.name], tally.wakeups)
        lost.add_metric([tally.name], tally.losses)
        watching.add_metric([tally.name], tally.watching)
    yield from (caused, lost, watching)


class Gauges(Collector):
    """The gauges of one view, for a registry."""

    def __init__(self, view: View, versions: Versions, stops: Stops) -> None:
        self._view, self._versions, self._stops = view, versions, stops

    def collect(self) -> Iterator[Metric]:
        return families(self._view, self._versions, self._stops)


# Measures the time from an event to the end of the pass after which nothing is left to do.


CONVERGENCE_BUCKETS = (0.5, 2, 5, 15, 60, 300)


class Convergence:
    """Measures one convergence at a time, from its first event. Events that come during a measurement belong to it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "unbounded_agent_event_to_converged_seconds",
            "From an event to the end of the pass after which nothing is left to do and no report is pending.",
            registry=registry,
            buckets=CONVERGENCE_BUCKETS,
        )
        self._since: float | None = None

    def begin(self, since: float) -> None:
        """Begin a measurement, unless one is running. `since` is when the event was noticed, by time.monotonic()."""
        if self._since is None:
            self._since = since

    def end(self) -> None:
        """Record that a pass ended without failures or pending machines."""
        if self._since is not None:
            self._seconds.observe(time.monotonic() - self._since)
        self._since = None


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
