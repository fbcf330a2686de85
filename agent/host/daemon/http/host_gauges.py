"""Makes the metrics of the host: devices, GPUs, drivers, driver roots and disk space. They need a fresh outcome."""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from agent.host.daemon.http.families import gauge, value
from agent.host.outcome import MachineOutcome, Outcome, granted_to
from agent.host.verify.gpu_list import listed_gpus
from agent.model.device import DeviceKind
from agent.model.driver_root import StagedRoot
from agent.model.facts import DeviceNode, Driver, Facts, Gpu, VendorFacts

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
