"""The host half of a vendor whose GPUs need only device nodes."""

import re
from functools import partial

from msgspec import Struct

from agent.config.settings import MachineSettings
from agent.model.conditions import Condition, ConditionType, Reason, false, not_applicable, true, unknown, worst
from agent.model.device import PCI_ADDRESS, DeviceKind
from agent.model.facts import DISPLAY, Absent, DeviceNode, Gpu, Seen, Unseen, VendorFacts, Verdict
from agent.model.goal import DriverRoots, Grant
from agent.model.paths import PCI_DEVICES
from agent.model.text import counted
from agent.system.deadlines import read_device_texts
from agent.system.devices import DRI
from agent.system.trust import classify_error, read_seen
from agent.vendors.host_vendor import (
    PROC_DEVICES,
    REBIND,
    REBOOT,
    WEDGED,
    FabricReport,
    GpuError,
    HostVendor,
    KernelLine,
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
    lines: tuple[KernelLine, ...] = ()
    """Further lines than LINES, without PCI address and TAGS: `xe load failed`. Of those that fit, the first counts."""
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
            why_unbound=sources.why_unbound(each),
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
        parts.append(f"detached or being reset: {', '.join(grant.detached)}")
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


# The tables of lines name the function of Linux 6.12 that writes each, or else the first version that does.

STOPPED = (
    Verdict.NEEDS_REBOOT,
    "the driver could not start the GPU; see `dmesg`, such as for missing firmware; then reboot the host",
)
HUNG = "a program stopped the GPU, or a part of it, and the driver resets that"
LINES = (
    # call_driver_probe (drivers/base/dd.c), which also had another form before 6.9.
    KernelLine(r"\w+ (?:probe with driver \w+ )?failed with error -", "NotStarted", *STOPPED, refused=True),
    # drm_dev_wedged_event since 6.15, after which comes the uevent.
    KernelLine(r"\w+ device wedged, needs recovery", "Wedged", *WEDGED["rebind"]),
    KernelLine(r"\w+ device wedged, but recovered", "Wedged", *WEDGED["none"], from_application=True),
)
"""The lines of all drivers of GPUs."""
TAGS = r"(?:amdgpu: |\[drm(?::[\w.]+ \[\w+\])?\] |\*ERROR\* |Tile[0-9]+: |GT[0-9]+: |G[uU]C: |\{[0-9]+\})*"
"""What the drivers put before their messages: dev_fmt (amdgpu.h), drm_err (drm_print.h), xe_gt_err (xe_gt_printk.h),
guc_err (intel_guc_print.h), and the number of an event (amdgpu_ras_event_log_print)."""
HEAD = re.compile(rf"(?P<driver>\w+)(?:: probe of)? (?P<address>{PCI_ADDRESS.pattern}):? {TAGS}")
"""What comes first in a line about one device (dev_printk). It must be the beginning of the line: elsewhere, the same
text could be part of a USB device's name, which anyone can choose."""


def parse_line(vendor: Description, text: str) -> GpuError | None:
    """Return the error that a line of the kernel log reports; None for any other line."""
    head = HEAD.match(text)
    if head is None or head["driver"] not in vendor.drivers:
        return None
    message, address = f"{head['driver']} {text[head.end() :]}", head["address"]
    return next((each.error(address) for each in (*vendor.lines, *LINES) if re.match(each.pattern, message)), None)


def drm_host(vendor: Description) -> HostVendor:
    """Return a vendor that a Description describes completely. Pods bring their own user space: Mesa, oneAPI or ROCm.

    HostVendor's defaults are right for the rest: a GPU with another driver is no fault (radeon, for example, is for
    older GPUs).
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
        parse_kernel_message=partial(parse_line, vendor),
        reset_by_hand=vendor.reset_by_hand,
    )


NOT_RESET = "the driver could not reset the GPU"
BAD_PAGES = "the GPU has as many bad memory pages as AMD allows"
AMD_LINES = (
    # amdgpu_device_health_check.
    KernelLine(
        r"amdgpu device lost from bus",
        "LostFromBus",
        Verdict.NEEDS_REBOOT,
        "the GPU has fallen off the bus; drain the node and reboot the host; if this recurs, check power and seating",
        lost=True,
    ),
    # amdgpu_device_gpu_recover, amdgpu_job_timedout. The second and third may also speak of a GPU that is linked to
    # this one. Users report that only a reboot helps.
    KernelLine(
        r"amdgpu (?:GPU reset\([0-9]+\) failed|GPU reset end with ret = -|GPU Recovery Failed: -)",
        "ResetFailed",
        Verdict.NEEDS_REBOOT,
        f"{NOT_RESET}, or one that is linked to it; {REBOOT}",
    ),
    # amdgpu_device_gpu_recover, after all parts of the GPU were initialised again.
    KernelLine(
        r"amdgpu GPU reset\([0-9]+\) succeeded!",
        "ResetSucceeded",
        Verdict.HEALTHY,
        "the driver has reset the GPU",
        recovered=True,
    ),
    # amdgpu_device_should_recover_gpu, with the module's parameter gpu_recovery=0.
    KernelLine(
        r"amdgpu GPU recovery disabled",
        "NotReset",
        Verdict.NEEDS_RESET,
        f"the GPU hangs, and the driver must not reset it (gpu_recovery of the module amdgpu); to reset it, {REBIND}",
    ),
    # amdgpu_ras_global_ras_isr, which also starts a reset. Its success is one of the lines above.
    KernelLine(
        r"amdgpu uncorrectable hardware error\(ERREVENT_ATHUB_INTERRUPT\)",
        "RASFatal",
        Verdict.NEEDS_RESET,
        f"an uncorrectable hardware error, after which the driver resets the GPU; if it does not, {REBIND}",
    ),
    # amdgpu_ras_error_generate_report, amdgpu_bad_page_notifier. The driver retires the page, ends the program that
    # used it, and resets the GPU only where that is needed.
    KernelLine(
        r"amdgpu (?:(?:\w+: ?[0-9]+,? )*[1-9][0-9]* (?:new )?uncorrectable hardware errors detected in (?!total)"
        r"|Uncorrectable error detected in UMC)",
        "RASUncorrectable",
        Verdict.DEGRADED,
        "uncorrectable memory errors, which the driver has contained; if they recur, have AMD check the GPU",
    ),
    # amdgpu_ras_eeprom_check, amdgpu_ras_eeprom_update_header.
    KernelLine(
        r"amdgpu RAS records:[0-9]+ exceed threshold:[0-9]+, ?GPU will not be initialized",
        "BadPages",
        Verdict.BROKEN,
        f"{BAD_PAGES}, so the driver does not start it; replace the GPU",
        refused=True,
    ),
    KernelLine(
        r"amdgpu (?:RAS records:[0-9]+ exceed threshold:|Saved bad pages [0-9]+ reaches threshold)",
        "BadPages",
        Verdict.DEGRADED,
        f"{BAD_PAGES}; plan to replace the GPU",
    ),
    # amdgpu_driver_load_kms; amdgpu_device_ip_hw_init_phase2, as for psp and smu, which names the device after 6.12.
    KernelLine(
        r"amdgpu (?:Fatal error during GPU init|hw_init of IP block <\w+> failed)",
        "NotStarted",
        *STOPPED,
        refused=True,
    ),
    # amdgpu_job_timedout. Older kernels do not name the device.
    KernelLine(
        r"amdgpu ring \S+ timeout, (?:signaled|but soft recovered)",
        "Hang",
        Verdict.HEALTHY,
        HUNG,
        from_application=True,
    ),
)
INTEL_LINES = (
    # xe_device_declare_wedged.
    KernelLine(r"xe CRITICAL: Xe has declared device \S+ as wedged", "Wedged", *WEDGED["rebind"]),
    # intel_gt_resume, i915_gem_init, i915_gem_resume.
    KernelLine(
        r"i915 Failed to (?:re-)?initialize GPU(?:\[[0-9]+\])?, declaring it wedged", "Wedged", *WEDGED["rebind"]
    ),
    # intel_gt_reset, after which i915 is wedged; gt_reset and xe_gt_resume.
    KernelLine(
        r"i915 (?:Failed to reset chip|Failed to initialise HW following reset|GPU reset not supported)"
        r"|xe (?:reset|resume) failed \(-",
        "ResetFailed",
        Verdict.NEEDS_RESET,
        f"{NOT_RESET}; to bind the driver again, {REBIND}",
    ),
    # __uc_init_hw, after which i915 is wedged; guc_wait_ucode and xe_guc_init. xe has no other way to use the GPU.
    KernelLine(
        r"i915 GuC initialization failed|xe load failed: status = |xe GuC init failed",
        "FirmwareNotLoaded",
        Verdict.NEEDS_RESET,
        "the GPU's microcontroller (GuC) did not start; see `dmesg`, such as for its firmware; reboot the host, or "
        f"{REBIND}",
        refused=True,
    ),
    # xe_survivability_mode.c, since 6.14.
    KernelLine(r"xe (?:In|Runtime) Survivability [Mm]ode", "FirmwareDamaged", *WEDGED["vendor-specific"]),
    # i915_error_state (error_msg); guc_exec_queue_timedout_job; xe_guc_exec_queue_reset_handler.
    KernelLine(
        r"i915 GPU HANG: ecode |xe Timedout job: |xe Engine reset: ",
        "Hang",
        Verdict.HEALTHY,
        HUNG,
        from_application=True,
    ),
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
        lines=AMD_LINES,
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
        lines=INTEL_LINES,
        # As for a wedged device (Documentation/gpu/drm-uapi.rst of Linux 6.15, recovery method `rebind`).
        reset_by_hand=(
            "`echo {address} > /sys/bus/pci/drivers/DRIVER/unbind`, then `echo {address} > "
            "/sys/bus/pci/drivers/DRIVER/bind`, with xe or i915 for DRIVER"
        ),
    )
)
