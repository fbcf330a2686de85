"""Evaluates the host's conditions for GPUs that need only their nodes. Messages say what to do next. Pure."""

from agent.model.conditions import Condition, ConditionType, false, not_applicable, true, unknown, worst
from agent.model.device import DeviceKind
from agent.model.facts import Unseen, VendorFacts
from agent.model.goal import Grant
from agent.model.reasons import Reason
from agent.model.text import counted
from agent.vendors.devices_present import faulty_gpus, unusable
from agent.vendors.drm.description import Description


def drm_conditions(vendor: Description, facts: VendorFacts, grant: Grant) -> tuple[Condition, ...]:
    """Return DriverLoaded, DevicesPresent, LibrariesPresent, FabricReady and PersistenceMode, in this order."""
    no_files = f"pods bring the libraries for {vendor.title}'s GPUs themselves"
    return (
        _driver_loaded(vendor, facts, grant),
        _devices_present(vendor, facts, grant),
        not_applicable(ConditionType.LIBRARIES_PRESENT, no_files),
        not_applicable(ConditionType.FABRIC_READY, f"{vendor.title}'s GPUs have no fabric manager"),
        not_applicable(ConditionType.PERSISTENCE_MODE, f"{vendor.title}'s GPUs have no persistence daemon"),
    )


def _driver_loaded(vendor: Description, facts: VendorFacts, grant: Grant) -> Condition:
    kind = ConditionType.DRIVER_LOADED
    if isinstance(facts.devices, Unseen):
        return unknown(kind, Reason.OBSERVATION_FAILED, facts.devices.why)
    drivers = [gpu.driver for gpu in facts.gpus if gpu.driver in vendor.drivers]
    names = " or ".join(vendor.drivers)
    if not drivers and grant.gpus:
        return false(kind, Reason.MODULE_NOT_LOADED, f"no {vendor.title} GPU has a driver; {_load(vendor, grant.gpus)}")
    if not drivers:
        return not_applicable(kind, f"no {vendor.title} GPU has driver {names}")
    parts = [f"{name} for {counted(drivers.count(name), 'GPU')}" for name in dict.fromkeys(drivers)]
    return true(kind, Reason.LOADED, f"kernel driver {', '.join(parts)}")


def _load(vendor: Description, gpus: tuple[str, ...]) -> str:
    return (
        f"run `modprobe {vendor.drivers[0]}`; if that changes nothing, see `dmesg` for {', '.join(gpus)}: the firmware "
        f"may be missing ({vendor.firmware}), the kernel may be too old, or its command line may have `nomodeset`; to "
        "keep a GPU from machines, name the others in machines.NAME.gpus"
    )


def _devices_present(vendor: Description, facts: VendorFacts, grant: Grant) -> Condition:
    kind = ConditionType.DEVICES_PRESENT
    if fault := unusable(facts, grant):
        return fault
    advice = "see `dmesg`; if the GPU has just appeared, run `udevadm settle`"
    if faults := faulty_gpus(
        facts, grant, DeviceKind.DRI_RENDER, "/dev/dri/renderDN", advice, lambda unbound: _load(vendor, unbound)
    ):
        return worst(faults)
    present_kinds = {node.kind for node in grant.nodes}
    missing_extras = "".join(
        f"; no usable {each.path}, without which {each.use}" for each in vendor.shared if each.kind not in present_kinds
    )
    present = f"{counted(len(grant.nodes), 'node')} for {counted(len(grant.gpus), f'{vendor.title} GPU')}"
    if grant.detached:
        detached = f"detached by an administrator: {', '.join(grant.detached)}"
        return true(kind, Reason.GPU_DETACHED, f"{present}; {detached}{missing_extras}")
    return true(kind, Reason.PRESENT, f"{present}{missing_extras}")
