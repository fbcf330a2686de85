"""Makes Prometheus metrics from the outcomes of passes: gauges show the last outcome, counters add up all of them."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from platform import python_version
from typing import TypeAlias, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from agent.host.daemon.health import View
from agent.host.daemon.server import Page
from agent.host.reconcile import MachineOutcome, Outcome, granted_to
from agent.host.verify.gpu_states import gpu_state, health, listed_gpus
from agent.model.conditions import ConditionType, Reason, Status, unknown
from agent.model.device import DeviceKind
from agent.model.facts import Broken, Facts, Gpu, Unseen, VendorFacts
from agent.model.goal import ActionKind

PREFIX = "unbounded_agent"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TEXT = "text/plain; version=0.0.4"
GPU_STATUSES = ("ok", "missing", "unbound", "failed", "detached", "unused", "unknown")
RESULTS = ("converged", "changed", "partial", "failed")
"""Results of a pass: there was nothing to do (`converged`), something was done (`changed`), some steps or observations
failed (`partial`), or the pass did not finish (`failed`)."""
BUCKETS = (0.1, 0.5, 2, 10, 60, 300)
CONVERGENCE_BUCKETS = (0.5, 2, 5, 15, 60, 300)

REASONS = frozenset(Reason)
OTHER = "other"
"""The label's value in place of a reported value that is not shown. Root in a machine can report any value, and each
new value of a label begins a new series, which Prometheus keeps for weeks."""
VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}([-+.~]?[a-z0-9]{1,17}){0,3}")
"""As deploy/version makes them; the longest is 0.1.0.dev20261130120000+g12345678.d12345678."""
VERSIONS = 16
"""How many versions of machine halves the metrics show until the service restarts. Further versions are `other`."""

Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""The values of the labels, and the number, of each series."""


TEXTS = {
    # Shown even without fresh evidence. Then all conditions are Unknown, also Ready.
    "build_info": "Constant 1, with the versions of the host half and of Python.",
    "machine_ready": "1 if the machine can run GPU workloads, on fresh evidence.",
    "machine_condition": "Constant 1, with the condition's current status (True, False, Unknown) and its reason.",
    "machine_ready_last_transition_timestamp_seconds": "When the status of the machine's condition Ready last changed. "
    "Not shown without fresh evidence.",
    "machine_recent_ready_losses": "How often the machine ceased to be ready in the last 10 minutes. After 4 losses, "
    "Ready stays False (Settling) until 60 s pass without a fault.",
    "observation_last_success_timestamp_seconds": "When a pass last observed the devices of all vendors.",
    "stuck_operations": "Reads of drivers' files, and commands, that missed their deadline and still hang.",
    "state_discarded": "How often a file of the agent's own state was discarded, because it was damaged.",
    "config_last_reload_successful": "0 if the configuration was invalid when it was last read, so that the last good "
    "one is in force, or if its metrics.address could not be bound.",
    "config_last_reload_success_timestamp_seconds": "When the configuration in force was read.",
    "wakeups": "Passes that events caused, by source. Several sources may cause one pass.",
    "wakeup_source_losses": "How often a source of events broke, or could not be opened at the start.",
    "wakeup_source_watching": "1 while the source reports events.",
    # Shown only with a fresh outcome.
    "machine_gpus": "GPUs granted to the machine.",
    "machine_gpus_expected": 'GPUs that the machine\'s settings ask for. With `gpus = "all"`: granted and lost GPUs.',
    "machine_gpus_advertised": "Granted GPUs that the node offers to pods, from the machine's report. Not shown if "
    "that is unknown.",
    "machine_gpus_lost": "GPUs that the machine was granted and that left the PCI bus without gpus detach. They count "
    "until they are back, or gpus forget acknowledges the loss.",
    "machine_stopped": "1 if somebody stopped the machine since the host booted: its unit is inactive, not failed. "
    "While systemd does not answer: what was last known.",
    "machine_report_timestamp_seconds": "When the machine half last reported. It does so each minute.",
    "machine_agent_info": "Constant 1, with the version of the machine half, from its report.",
    "machine_repairs": "Changes by other programs that the machine half undid since the machine's boot, by what was "
    "changed.",
    "host_pci_gpus": "GPUs on the PCI bus, with or without a driver.",
    "host_devices": "Devices of the host by kind and status.",
    "host_check": "Constant 1, with the status and the reason of one of the administrator's checks.",
    "gpu_info": "Constant 1, with what is known about a GPU on the PCI bus, or about one that machines have lost.",
    "gpu_fatal_error_timestamp_seconds": "When the agent learned of an error after which pods cannot rely on the GPU. "
    "Shown until the GPU has recovered.",
    "gpu_test_timestamp_seconds": "When the last result of gpus test for the GPU was read, by result: passed, failed "
    "or hung. Not shown without a test since the host booted or the GPU was plugged in.",
    "driver_info": "Constant 1, with the versions of a driver's module and libraries; empty if unknown.",
    "driver_version_mismatch": "1 if the loaded module and the libraries have different versions: reload or reboot "
    "needed.",
    "went_back": "1 if the newest release failed, and the former one runs.",
    "driver_roots": "Driver roots on disk.",
    "driver_root_bytes": "Total size of the files in all driver roots.",
    "state_free_bytes": "Free space in the file system of /var/lib/unbounded-agent.",
}
"""What each metric means whose samples are made for each page."""
COUNTERS = frozenset({"state_discarded", "wakeups", "wakeup_source_losses", "machine_repairs"})


def _family(name: str, labels: str, samples: Samples) -> Metric:
    """Return a metric. `labels` are the names of its labels, with spaces between them."""
    make = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
    family = make(f"{PREFIX}_{name}", TEXTS[name], labels=labels.split())
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _one(name: str, number: float | None) -> Metric:
    """Return a metric without labels. It has no sample if there is no number."""
    return _family(name, "", [] if number is None else [((), number)])


def _of_machines(
    name: str, machines: Iterable[MachineOutcome], number: Callable[[MachineOutcome], float | None]
) -> Metric:
    """Return a metric with a sample for each machine that has the number."""
    numbers = ((machine.name, number(machine)) for machine in machines)
    return _family(name, "machine", [((machine,), found) for machine, found in numbers if found is not None])


def _of_view(view: View) -> Iterator[Metric]:
    machines, tallies = view.machines, view.wakeups
    yield _family("build_info", "version python_version", [((view.version, python_version()), 1)])
    yield _of_machines("machine_ready", machines, lambda machine: machine.ready.status is Status.TRUE)
    conditions = [(machine.name, machine.condition(kind)) for machine in machines for kind in ConditionType]
    yield _family(
        "machine_condition",
        "machine condition status reason",
        [((name, *each[:2], each.reason if each.reason in REASONS else OTHER), 1) for name, each in conditions],
    )
    name = "machine_ready_last_transition_timestamp_seconds"
    yield _of_machines(name, machines, lambda machine: machine.ready.last_transition or None)
    yield _of_machines("machine_recent_ready_losses", machines, lambda machine: len(machine.ready.losses))
    yield _one("observation_last_success_timestamp_seconds", view.observed or None)
    yield _one("stuck_operations", len(view.stuck))
    yield _family("state_discarded", "file", [((file,), times) for file, times in view.discarded.items()])
    yield _one("config_last_reload_successful", view.config_good)
    yield _one("config_last_reload_success_timestamp_seconds", view.config_loaded)
    yield _family("wakeups", "source", [((each.name,), each.wakeups) for each in tallies])
    yield _family("wakeup_source_losses", "source", [((each.name,), each.losses) for each in tallies])
    yield _family("wakeup_source_watching", "source", [((each.name,), each.watching) for each in tallies])


def _device_counts(outcome: Outcome) -> Samples:
    """Return the number of devices by kind and status. The counts of GPUs add up to host_pci_gpus.

    Of devices that are not GPUs, only usable nodes are known. Each such node counts as `ok`.
    """
    granted = granted_to(outcome.machines)
    counts = {(str(DeviceKind.GPU), status): 0 for status in GPU_STATUSES}
    for vendor in outcome.facts.vendors:
        for gpu in vendor.gpus:
            status = _gpu_status(gpu, vendor)
            # A GPU that no machine has may be bound to vfio-pci, or be an integrated GPU without a driver. That is no
            # fault, so such a GPU counts as `unused`.
            unused = status not in ("ok", "detached") and gpu.pci_address not in granted
            counts[DeviceKind.GPU, "unused" if unused else status] += 1
        for node in vendor.devices if isinstance(vendor.devices, tuple) else ():
            if node.kind is not DeviceKind.GPU:
                counts[node.kind, "ok"] = counts.get((node.kind, "ok"), 0) + 1
    return counts.items()


def _gpu_status(gpu: Gpu, vendor: VendorFacts) -> str:
    """Return a GPU's status, the first of these that applies:

    `detached`, `failed` (the kernel log says that the GPU no longer answers), `unbound` (no kernel driver), `unknown`
    (nodes cannot be listed), `ok` (a usable node), `missing` (no usable node).
    """
    known = {"detached": "detached", "no-driver": "unbound", "failed": "failed"}
    if status := known.get(gpu_state(gpu, vendor, ())):
        return status
    if not isinstance(vendor.devices, tuple):
        return "unknown"
    # A GPU has a minor number only if its driver makes GPU nodes of its own. Other GPUs have DRM's render nodes.
    wanted = (DeviceKind.DRI_RENDER if gpu.minor is None else DeviceKind.GPU, gpu.pci_address)
    return "ok" if any((node.kind, node.pci_address) == wanted for node in vendor.devices) else "missing"


def _of_outcome(outcome: Outcome) -> Iterator[Metric]:
    machines, facts = outcome.machines, outcome.facts
    yield _of_machines("machine_gpus", machines, lambda machine: len(machine.gpus))
    yield _of_machines("machine_gpus_expected", machines, lambda machine: machine.expected)
    yield _of_machines("machine_gpus_advertised", machines, lambda machine: machine.advertised)
    yield _of_machines("machine_gpus_lost", machines, lambda machine: len(machine.lost))
    yield _of_machines("machine_report_timestamp_seconds", machines, lambda machine: machine.reported or None)
    repairs = [((machine.name, what), count) for machine in machines for what, count in machine.repairs.items()]
    yield _family("machine_repairs", "machine what", repairs)
    yield _one("host_pci_gpus", sum(len(vendor.gpus) for vendor in facts.vendors))
    yield _family("host_devices", "kind status", _device_counts(outcome))
    checks = [((each.type, each.status, each.reason), 1) for each in facts.checks]
    yield _family("host_check", "check status reason", checks)
    gpus = [
        ((gpu.pci_address, gpu.vendor, gpu.model, gpu.uuid, ",".join(gpu.machines), gpu.state, gpu.health), 1)
        for gpu in listed_gpus(facts, granted_to(machines))
    ]
    yield _family("gpu_info", "gpu vendor model uuid machine state health", gpus)
    known = [(gpu.pci_address, health(gpu, facts)) for vendor in facts.vendors for gpu in vendor.gpus]
    faults = [((gpu, each.reason), each.since) for gpu, each in known if each.verdict.fenced and each.since]
    yield _family("gpu_fatal_error_timestamp_seconds", "gpu error", faults)
    tests = [((address, test.result), test.at) for address, test in facts.gpus.tests.items()]
    yield _family("gpu_test_timestamp_seconds", "gpu result", tests)
    drivers = []
    for vendor in facts.vendors:
        if vendor.driver is not None:
            # A version that is missing or was not observed is empty.
            seen = (vendor.driver.module_version, vendor.driver.user_space.version)
            module, library = (version if isinstance(version, str) else "" for version in seen)
            drivers.append((vendor.vendor, module, library))
    yield _family("driver_info", "vendor kernel_version library_version", [(each, 1) for each in drivers])
    mismatches = [((vendor,), bool(module and library and module != library)) for vendor, module, library in drivers]
    yield _family("driver_version_mismatch", "vendor", mismatches)
    yield _one("went_back", bool(facts.went_back))
    yield _one("driver_roots", len(facts.staged))
    yield _one("driver_root_bytes", sum(each.size for root in facts.staged for each in root.files if not each.link))
    yield _one("state_free_bytes", facts.state_free if isinstance(facts.state_free, int) else None)


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


class Metrics(Collector):
    """Counts passes and their results, and renders the metrics page."""

    def __init__(self) -> None:
        # Without this call, each counter would have a second series, `_created`, which the text format shows as a
        # metric of its own.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)
        self._view: View | None = None
        self._versions: set[str] = set()
        """Versions of machine halves that were shown."""
        self._stopped: dict[str, bool] = {}
        """Whether somebody stopped the machine, as was last known, by its name."""
        self._first_event: float | None = None
        self._passes = self._counter(
            "reconcile_total",
            "Reconcile passes, by result: converged (nothing to do), changed, partial or failed.",
            ("result",),
            RESULTS,
        )
        self._actions = self._counter(
            "actions_total", "Changes that the agent made to the host, by kind.", ("kind",), get_args(ActionKind)
        )
        self._failures = self._counter("failures_total", "Steps that failed, in all passes.")
        self._reloads = self._counter(
            "config_reloads_total", "Attempts to reload the configuration.", ("result",), ("ok", "failed")
        )
        # This counter's series are created as errors occur: one for every GPU and Xid in advance would be thousands.
        self._gpu_errors = self._counter(
            "gpu_xid_errors_total",
            "GPU errors that the driver wrote to the kernel log. A series begins with the first error.",
            ("gpu", "xid"),
        )
        self._duration = Histogram(
            f"{PREFIX}_reconcile_duration_seconds",
            "How long reconcile passes took.",
            registry=self._registry,
            buckets=BUCKETS,
        )
        self._convergence = Histogram(
            f"{PREFIX}_event_to_converged_seconds",
            "From an event to the end of the pass after which nothing is left to do and no report is pending. "
            "A report is awaited for two minutes.",
            registry=self._registry,
            buckets=CONVERGENCE_BUCKETS,
        )

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = (), values: Iterable[str] = ()) -> Counter:
        """Return a counter. The series of these values begin at 0, so that Prometheus sees the first increase."""
        counter = Counter(f"{PREFIX}_{name}", text, labels, registry=self._registry)
        for value in values:
            counter.labels(value)
        return counter

    def passed(self, outcome: Outcome | None, seconds: float) -> None:
        """Count a pass. Without an outcome, it did not finish."""
        result = "failed"
        if outcome:
            result = "changed" if outcome.actions else "converged"
            result = "partial" if outcome.failures or unseen(outcome.facts) else result
            self._failures.inc(len(outcome.failures))
            for action in outcome.actions:
                self._actions.labels(action.kind).inc()
        self._passes.labels(result).inc()
        self._duration.observe(seconds)

    def event(self, noticed: float) -> None:
        """Begin to measure the time to convergence, unless that runs. `noticed` is by time.monotonic()."""
        if self._first_event is None:
            self._first_event = noticed

    def converged(self) -> None:
        """Record that a pass ended without failures, and that no machine is waited for."""
        if self._first_event is not None:
            self._convergence.observe(time.monotonic() - self._first_event)
        self._first_event = None

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
        self._view = view
        encode, content_type = choose_encoder(accept)
        return Page(HTTPStatus.OK, encode(self._registry), content_type)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the view; the registry calls this for each page."""
        if self._view:
            yield from _of_view(self._view)
            if outcome := self._view.outcome:
                yield from _of_outcome(outcome)
                yield _family("machine_stopped", "machine", self._stops(outcome))
                yield _family("machine_agent_info", "machine version", self._agents(outcome))

    def _stops(self, outcome: Outcome) -> Samples:
        """While systemd does not answer, the state of no unit is known.

        Without a memory, a page about a machine that was stopped on purpose would then wake a person.
        """
        for seen in outcome.facts.machines:
            if not isinstance(seen.unit_state, Unseen):
                # A machine whose unit failed does not count as stopped: no user stopped it.
                self._stopped[seen.name] = seen.has_run and seen.unit_state == "inactive"
        observed = {seen.name for seen in outcome.facts.machines}
        for machine in outcome.machines:
            yield (machine.name,), machine.name in observed and self._stopped.get(machine.name, False)

    def _agents(self, outcome: Outcome) -> Samples:
        for machine in outcome.machines:
            if version := machine.agent_version:
                known = version in self._versions or (len(self._versions) < VERSIONS and VERSION.fullmatch(version))
                self._versions |= {version} if known else set()
                yield (machine.name, version if known else OTHER), 1
