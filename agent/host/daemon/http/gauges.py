"""Makes Prometheus gauges of the last observation: machines, host, configuration and event sources."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from platform import python_version

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent.host.daemon.wakeups.poller import Tally
from agent.host.outcome import MachineOutcome, Outcome
from agent.model.conditions import ConditionType, Status
from agent.model.device import DeviceKind
from agent.model.facts import DeviceNode, Driver, Facts, Gpu, VendorFacts

PREFIX = "unbounded_agent"


@dataclass(frozen=True, slots=True)
class View:
    """The values that the gauges show."""

    version: str
    machines: tuple[MachineOutcome, ...]
    outcome: Outcome | None = None
    """The last outcome; None if it is not fresh. The metrics that are computed from it are then omitted."""
    observed: float = 0.0
    """When the host was last observed, in seconds since the epoch; 0 if it has not been observed yet."""
    config_good: bool = True
    config_loaded: float = 0.0
    """When the configuration in force was read, in seconds since the epoch."""
    wakeups: tuple[Tally, ...] = ()
    discarded: Mapping[str, int] = field(default_factory=dict)
    """How often the agent discarded a file of its own state, by file name."""
    stuck: int = 0
    """Number of reads and commands that missed their deadline and still hang."""


def families(view: View) -> Iterator[Metric]:
    """Yield the metrics of one view."""
    build = _gauge(
        "build_info", "Constant 1, with the versions of the agent and of Python.", "version", "python_version"
    )
    build.add_metric([view.version, python_version()], 1)
    yield build
    yield from _machine_families(view.machines)
    if view.outcome is not None:
        yield from _counts(view.outcome)
        yield from _host_families(view.outcome.facts, view.outcome.machines)
    if view.observed:
        yield _value(
            "observation_last_success_timestamp_seconds", "When the whole host was last observed.", view.observed
        )
    yield _value(
        "stuck_operations",
        "Reads of drivers' files, and commands, that missed their deadline and still hang.",
        view.stuck,
    )
    discarded = CounterMetricFamily(
        f"{PREFIX}_state_discarded",
        "How often a file of the agent's own state was discarded, by file.",
        labels=["file"],
    )
    for file, times in view.discarded.items():
        discarded.add_metric([file], times)
    yield discarded
    yield _value(
        "config_last_reload_successful", "Whether the last attempt to read the configuration worked.", view.config_good
    )
    yield _value(
        "config_last_reload_success_timestamp_seconds", "When the configuration in force was read.", view.config_loaded
    )
    yield from _wakeup_families(view.wakeups)


def _machine_families(machines: Iterable[MachineOutcome]) -> Iterator[Metric]:
    ready = _gauge("machine_ready", "1 if the machine can run GPU workloads, on fresh evidence.", "machine")
    states = _gauge("machine_condition", "State set: 1 for the condition's status.", "machine", "condition", "status")
    changed = _gauge(
        "machine_condition_last_transition_timestamp_seconds",
        "When the condition's status last changed.",
        "machine",
        "condition",
    )
    for machine in machines:
        ready.add_metric([machine.name], machine.ready.status is Status.TRUE)
        for kind in ConditionType:
            found = machine.condition(kind)
            for status in Status:
                states.add_metric([machine.name, kind, status], found.status is status)
            if found.last_transition:
                changed.add_metric([machine.name, kind], found.last_transition)
    yield from (ready, states, changed)


def _counts(outcome: Outcome) -> Iterator[Metric]:
    gpus = _gauge("machine_gpus", "GPUs granted to the machine.", "machine")
    stopped = _gauge("machine_stopped", "1 if the machine ran since the host's boot and was stopped.", "machine")
    lost = _gauge(
        "machine_gpus_lost",
        "GPUs that the machine was granted and that left the PCI bus without gpus detach.",
        "machine",
    )
    text = "Changes in the machine that the machine half undid since the machine's boot."
    repairs = CounterMetricFamily(f"{PREFIX}_machine_repairs", text, labels=["machine", "what"])
    # A machine whose unit failed does not count as stopped: no user stopped it.
    ended = {each.name for each in outcome.facts.machines if each.has_run and each.unit_state == "inactive"}
    for machine in outcome.machines:
        gpus.add_metric([machine.name], len(machine.gpus))
        stopped.add_metric([machine.name], machine.name in ended)
        lost.add_metric([machine.name], len(machine.lost))
        for what, count in machine.repairs.items():
            repairs.add_metric([machine.name, what], count)
    yield from (gpus, stopped, lost, repairs)


def _host_families(facts: Facts, machines: Iterable[MachineOutcome]) -> Iterator[Metric]:
    yield _value(
        "host_pci_gpus",
        "GPUs on the PCI bus, with or without a driver.",
        sum(len(vendor.gpus) for vendor in facts.vendors),
    )
    devices = _gauge("host_devices", "Devices of the host by kind and status.", "kind", "status")
    for (kind, status), count in _device_counts(facts.vendors, machines).items():
        devices.add_metric([kind, status], count)
    info = _gauge(
        "driver_info",
        "Constant 1, with the versions of a driver's module and libraries.",
        "vendor",
        "kernel_version",
        "library_version",
    )
    mismatch = _gauge(
        "driver_version_mismatch",
        "1 if the loaded module and the libraries have different versions: reload or reboot needed.",
        "vendor",
    )
    for vendor in facts.vendors:
        if vendor.driver is not None:
            module, library = _versions(vendor.driver)
            info.add_metric([vendor.vendor, module, library], 1)
            mismatch.add_metric([vendor.vendor], bool(module and library and module != library))
    yield from (devices, info, mismatch)


def _versions(driver: Driver) -> tuple[str, str]:
    """Return the versions of the module and the libraries. A version that is missing or was not observed is empty."""
    seen = (driver.module_version, driver.user_space.version)
    module, library = (version if isinstance(version, str) else "" for version in seen)
    return module, library


def _device_counts(vendors: Iterable[VendorFacts], machines: Iterable[MachineOutcome]) -> dict[tuple[str, str], int]:
    """Return the number of devices by kind and status. The counts of GPUs add up to host_pci_gpus.

    Of other kinds, usable nodes are counted as `ok`; nothing else is known about them.
    """
    gpu_statuses = ("ok", "missing", "unbound", "lost", "detached", "unused", "unknown")
    granted = {address for machine in machines for address in machine.gpus}
    counts = {(str(DeviceKind.GPU), status): 0 for status in gpu_statuses}
    counts |= {(str(kind), "ok"): 0 for kind in DeviceKind if kind is not DeviceKind.GPU}
    for vendor in vendors:
        nodes = vendor.devices if isinstance(vendor.devices, tuple) else None
        for gpu in vendor.gpus:
            status = _gpu_status(gpu, nodes)
            # It is no fault if a GPU that no machine has is bound to vfio-pci, or is integrated and has no driver.
            unused = status not in ("ok", "detached") and gpu.pci_address not in granted
            counts[DeviceKind.GPU, "unused" if unused else status] += 1
        for node in nodes or ():
            if node.kind is not DeviceKind.GPU:
                counts[node.kind, "ok"] += 1
    return counts


def _gpu_status(gpu: Gpu, nodes: tuple[DeviceNode, ...] | None) -> str:
    """Return a GPU's status: the first of these that applies.

    `detached`, `unbound` (no kernel driver), `lost` (the kernel log says that the GPU no longer answers), `unknown`
    (nodes cannot be listed), `ok` (a usable node), `missing` (no usable node).
    """
    if gpu.detached:
        return "detached"
    if not gpu.driver:
        return "unbound"
    if gpu.lost:
        return "lost"
    if nodes is None:
        return "unknown"
    # A GPU has a minor number only if its driver makes GPU nodes of its own. Other GPUs have DRM's render nodes.
    wanted = DeviceKind.DRI_RENDER if gpu.minor is None else DeviceKind.GPU
    return "ok" if any(node.kind is wanted and node.pci_address == gpu.pci_address for node in nodes) else "missing"


def _wakeup_families(tallies: Iterable[Tally]) -> Iterator[Metric]:
    caused, lost = (
        CounterMetricFamily(f"{PREFIX}_{name}", text, labels=["source"])
        for name, text in (
            ("wakeups", "Passes that events caused, by source."),
            ("wakeup_source_losses", "How often a source of events broke, or could not be opened at the start."),
        )
    )
    watching = _gauge("wakeup_source_watching", "1 while the source reports events.", "source")
    for tally in tallies:
        caused.add_metric([tally.name], tally.wakeups)
        lost.add_metric([tally.name], tally.losses)
        watching.add_metric([tally.name], tally.watching)
    yield from (caused, lost, watching)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def _value(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


class Gauges(Collector):
    """The gauges of one view, for a registry."""

    def __init__(self, view: View) -> None:
        self.view = view

    def collect(self) -> Iterator[Metric]:
        return families(self.view)
