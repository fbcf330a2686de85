"""The host half of a vendor whose GPUs need only device nodes."""

from functools import partial

from msgspec import Struct

from agent.config.settings import MachineSettings
from agent.model.conditions import Condition, ConditionType, Reason, false, not_applicable, true, unknown, worst
from agent.model.device import DeviceKind
from agent.model.facts import DISPLAY, Absent, DeviceNode, Gpu, Seen, Unseen, VendorFacts
from agent.model.goal import DriverRoots, Grant
from agent.model.paths import PCI_DEVICES
from agent.model.text import counted
from agent.system.deadlines import read_device_texts
from agent.system.devices import DRI
from agent.system.trust import classify_error, read_seen
from agent.vendors.host_vendor import (
    PROC_DEVICES,
    FabricReport,
    HostVendor,
    Sources,
    faulty_gpus,
    parse_majors,
    unusable,
    usable_number,
)


class SharedNode(Struct, frozen=True):
    """A node that all GPUs of the vendor share."""

    path: str
    kind: DeviceKind
    registered: str
    """The name of the node's driver in /proc/devices."""
    use: str
    """What does not work without the node, in words."""


class Description(Struct, frozen=True):
    """How a vendor's GPUs are recognised on the host."""

    name: str
    title: str
    """The vendor's name for people."""
    vendor_id: int
    drivers: tuple[str, ...]
    """Names of the kernel drivers on the PCI bus, which are also the names of their modules."""
    further_classes: tuple[int, ...] = ()
    """PCI classes (base class and subclass) of GPUs that are not display controllers."""
    shared: tuple[SharedNode, ...] = ()
    partition_mode: str = ""
    """The attribute in sysfs that says in which mode a GPU is divided; empty if the vendor's GPUs have none."""
    whole: str = ""
    """The value of the attribute `partition_mode` for a GPU that is not divided."""
    reset_by_hand: str = ""
    """As in HostVendor."""


ROOT_BUS = "00:"
"""The bus without a port above it, on which Intel's integrated GPUs are. Those of AMD are behind an internal port."""
REGISTERED = "drm"
"""The name in /proc/devices under which all drivers register their DRM nodes."""


def observe_drm(vendor: Description, sources: Sources) -> VendorFacts:
    """Return the facts about a vendor. What cannot be observed is Unseen.

    `problems` in the facts name the nodes that must not be used, and the GPUs of which only a part is granted.
    """
    if not isinstance(sources.pci, tuple):
        # The devices are Unseen, because an empty list would withdraw every GPU.
        return VendorFacts(vendor.name, devices=Unseen(sources.pci.why))
    gpus = tuple(
        Gpu(
            each.address,
            vendor.name,
            each.driver,
            why_lost=sources.lost.get(each.address, ""),
            detached=each.address in sources.detached,
            override=each.override,
            virtual=each.virtual,
            integrated=each.integrated or each.address.partition(":")[2].startswith(ROOT_BUS),
        )
        for each in sources.pci
        if each.vendor_id == vendor.vendor_id
        and (each.class_id >> 16 == DISPLAY or each.class_id >> 8 in vendor.further_classes)
    )
    if not gpus:
        return VendorFacts(vendor.name)
    problems: dict[str, str] = {}
    driven = [gpu.pci_address for gpu in gpus if gpu.driver in vendor.drivers]
    nodes = _nodes(vendor, sources, driven, problems)
    return VendorFacts(
        vendor.name,
        gpus,
        nodes,
        node_problems=problems,
        other_problems=_divided(vendor, sources, driven) if isinstance(nodes, tuple) else (),
        # udev loads the driver of a GPU. If none of the vendor's modules is loaded, the driver is not installed or not
        # wanted. So no driver is expected.
        driver_expected=any(
            read_seen(sources.system.exists, f"/sys/module/{name}") is not False for name in vendor.drivers
        ),
    )


def _nodes(
    vendor: Description, sources: Sources, driven: list[str], problems: dict[str, str]
) -> Seen[tuple[DeviceNode, ...]]:
    """Return the usable nodes of these GPUs; Unseen if any node could not be observed.

    `problems` gets a sentence for each node that must not be used.
    """
    if isinstance(sources.drm, Absent):
        return ()
    if not isinstance(sources.drm, tuple):
        return Unseen(sources.drm.why)
    wanted = [
        (
            each.path,
            DeviceKind.DRI_RENDER if "/renderD" in each.path else DeviceKind.DRI_CARD,
            REGISTERED,
            each.pci_address,
        )
        for each in sources.drm
        if each.pci_address in driven
    ]
    if driven:
        wanted += [(each.path, each.kind, each.registered, "") for each in vendor.shared]
    nodes = []
    try:
        majors = parse_majors(sources.system.read_text(PROC_DEVICES))
        for path, kind, registered, address in wanted:
            found = {majors[registered]} if registered in majors else ()
            where = f"{registered} is not in {PROC_DEVICES}"
            # If it is missing, the kernel has not made the node yet, or the driver has no such node.
            if number := usable_number(sources.system, path, found, None, where, problems):
                nodes.append(DeviceNode(path, kind, number, address))
    except OSError as error:
        return Unseen(classify_error(error.filename or PROC_DEVICES, error).why)
    return tuple(sorted(nodes))


def _divided(vendor: Description, sources: Sources, driven: list[str]) -> tuple[str, ...]:
    """Return a sentence for each divided GPU. Of such a GPU, only the first partition is granted.

    A divided GPU has nodes that belong to no PCI device. These alone do not prove that a GPU is divided: amdgpu makes
    nodes for eight partitions in every mode (amdgpu_xcp_dev_register). So the attribute in sysfs is read too.
    """
    nodes = sources.drm if isinstance(sources.drm, tuple) else ()
    if not vendor.partition_mode or all(each.pci_address for each in nodes):
        return ()
    paths = [f"{PCI_DEVICES}/{gpu}/{vendor.partition_mode}" for gpu in sorted(driven)]
    found = [text.strip() if isinstance(text, str) else "" for text in read_device_texts(sources.system, paths)]
    return tuple(
        f"GPU {gpu} is divided ({vendor.partition_mode} is {mode!a}): only its first partition is granted, because the "
        "nodes of the others belong to no PCI device"
        for gpu, mode in zip(sorted(driven), found, strict=True)
        if mode not in ("", "UNKNOWN", vendor.whole)
    )


# Evaluates the host's conditions for GPUs that need only their nodes. Messages say what to do next. Pure.


def drm_conditions(
    vendor: Description, facts: VendorFacts, grant: Grant, fabric: FabricReport
) -> tuple[Condition, ...]:
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
    if drivers:
        parts = [f"{name} for {counted(drivers.count(name), 'GPU')}" for name in dict.fromkeys(drivers)]
        return true(kind, Reason.LOADED, f"kernel driver {', '.join(parts)}")
    if grant.gpus:
        return false(kind, Reason.MODULE_NOT_LOADED, f"no {vendor.title} GPU has a driver; {_load(vendor, grant.gpus)}")
    return not_applicable(kind, f"no {vendor.title} GPU has driver {' or '.join(vendor.drivers)}")


def _load(vendor: Description, gpus: tuple[str, ...]) -> str:
    # All of them: which one drives a GPU depends on its generation, and the others leave it alone.
    load = f"run `modprobe -a {' '.join(vendor.drivers)}`"
    return f"{load}; if that changes nothing, see `dmesg` for {', '.join(gpus)}, such as for missing firmware"


def _devices_present(vendor: Description, facts: VendorFacts, grant: Grant) -> Condition:
    if fault := unusable(facts, grant):
        return fault
    advice = "see `dmesg`; if the GPU has just appeared, run `udevadm settle`"
    faults = faulty_gpus(facts, grant, DeviceKind.DRI_RENDER, "/dev/dri/renderDN", advice, partial(_load, vendor))
    if faults:
        return worst(faults)
    kind, reason = ConditionType.DEVICES_PRESENT, Reason.PRESENT
    parts = [f"{counted(len(grant.nodes), 'node')} for {counted(len(grant.gpus), f'{vendor.title} GPU')}"]
    if grant.detached:
        reason = Reason.GPU_DETACHED
        parts.append(f"detached by an administrator: {', '.join(grant.detached)}")
    found = {node.kind for node in grant.nodes}
    parts += [f"no usable {each.path}, without which {each.use}" for each in vendor.shared if each.kind not in found]
    return true(kind, reason, "; ".join(parts))


NO_NODES = "`vainfo`, `clinfo` or `rocminfo` in pods: no device; `ls /dev/dri` there: no such file"
SYMPTOMS = {
    (ConditionType.DRIVER_LOADED, Reason.MODULE_NOT_LOADED): NO_NODES,
    (ConditionType.DEVICES_PRESENT, ""): NO_NODES,
}


def grant_drm(facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]) -> Grant:
    """Grant the nodes of each GPU, and the shared nodes if the machine gets a GPU."""
    gpus = tuple(sorted(gpu.pci_address for gpu in wanted if not gpu.detached))
    nodes = facts.devices if isinstance(facts.devices, tuple) and gpus else ()
    return Grant(
        vendor=facts.vendor,
        gpus=gpus,
        nodes=tuple(sorted(node for node in nodes if node.pci_address in ("", *gpus))),
        driver_files=False,
        detached=tuple(sorted(gpu.pci_address for gpu in wanted if gpu.detached)),
    )


def drm_host(vendor: Description) -> HostVendor:
    """Return a vendor that a Description describes completely. Pods bring their own user space: Mesa, oneAPI or ROCm.

    HostVendor's defaults are right for the rest: a GPU with another driver is no fault (radeon, for example, is for
    older GPUs), and the drivers write no numbered errors into the kernel log.
    """
    shared = (each.path.removeprefix("/dev/") for each in vendor.shared)
    return HostVendor(
        name=vendor.name,
        observe=partial(observe_drm, vendor),
        grant=grant_drm,
        drivers=vendor.drivers,
        own_nodes=frozenset({DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER}),
        module_names=vendor.drivers,
        node_names=(DRI.removeprefix("/dev/"), *shared),
        node_directories=(DRI,),
        further_classes=vendor.further_classes,
        symptoms=SYMPTOMS,
        conditions=partial(drm_conditions, vendor),
        reset_by_hand=vendor.reset_by_hand,
    )


PROCESSING_ACCELERATOR = 0x1200
"""PCI class by which amdgpu recognises Instinct accelerators from MI200 on (pciidlist in amdgpu_drv.c)."""

AMD = drm_host(
    Description(
        name="amd",
        title="AMD",
        # AMD's GPUs have this id, AMD's processors have 0x1022.
        vendor_id=0x1002,
        # The driver radeon, for GPUs before 2012, is left out, because AMD's tools do not support it.
        drivers=("amdgpu",),
        further_classes=(PROCESSING_ACCELERATOR,),
        shared=(SharedNode("/dev/kfd", DeviceKind.KFD, "kfd", "ROCm cannot compute"),),
        partition_mode="current_compute_partition",
        whole="SPX",
        # `reset` in Documentation/ABI/testing/sysfs-bus-pci of Linux 6.12.
        reset_by_hand="`echo 1 > /sys/bus/pci/devices/{address}/reset`; linked GPUs (XGMI) are reset with it",
    )
)
INTEL = drm_host(
    Description(
        name="intel",
        title="Intel",
        vendor_id=0x8086,
        drivers=("i915", "xe"),
        # As for a wedged device (Documentation/gpu/drm-uapi.rst of Linux 6.15, recovery method `rebind`).
        reset_by_hand=(
            "`echo {address} > /sys/bus/pci/drivers/DRIVER/unbind`, then `echo {address} > "
            "/sys/bus/pci/drivers/DRIVER/bind`, with xe or i915 for DRIVER"
        ),
    )
)
