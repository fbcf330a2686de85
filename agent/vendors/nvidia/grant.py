"""Which of the host's NVIDIA GPUs, nodes and files a machine gets. Pure."""

from agent.config import MachineSettings
from agent.facts import UNSTAGED, DeviceNode, Driver, Gpu, StagedRoot, VendorFacts
from agent.goal import Grant, Share
from agent.identity import DeviceKind

KERNEL_DRIVER = "nvidia"
SHARED = frozenset({DeviceKind.CONTROL, DeviceKind.MODESET, DeviceKind.UVM, DeviceKind.UVM_TOOLS})
"""Nodes that every user of any GPU needs; they give access to no GPU by themselves."""
PER_GPU = frozenset({DeviceKind.GPU, DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER})
FABRIC = frozenset({DeviceKind.NVSWITCH, DeviceKind.NVLINK})
"""They reach all GPUs of the host, so only a machine that has all of them gets these nodes."""


def grant_nvidia(facts: VendorFacts, settings: MachineSettings, staged: tuple[StagedRoot, ...], share: Share) -> Grant:
    """GPUs by the machine's settings, their nodes by what the driver made, and the driver root that fits the module."""
    gpus, problems = _select(facts.gpus, settings.gpus, share)
    problems += tuple(
        f"{gpu.pci_address} has kernel driver {gpu.driver}, not {KERNEL_DRIVER}" for gpu in wrong_driver(facts.gpus)
    )
    nodes: tuple[DeviceNode, ...] = ()
    if isinstance(facts.devices, tuple) and gpus:
        whole_host = {gpu.pci_address for gpu in facts.gpus} == {gpu.pci_address for gpu in gpus}
        nodes = tuple(sorted(node for node in facts.devices if _granted(node, gpus, settings, whole_host)))
    return Grant(
        vendor=facts.vendor,
        gpus=tuple(sorted(gpu.pci_address for gpu in gpus)),
        nodes=nodes,
        driver_root=_driver_root(facts.driver, staged) if gpus else None,
        problems=problems,
    )


def wrong_driver(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """GPUs that nouveau, say, took first. vfio-pci is no mistake: somebody gave that GPU to a virtual machine."""
    return tuple(sorted(gpu for gpu in gpus if gpu.driver not in ("", KERNEL_DRIVER) and "vfio" not in gpu.driver))


def _select(present: tuple[Gpu, ...], wanted: str | list[str], share: Share) -> tuple[list[Gpu], tuple[str, ...]]:
    usable = sorted(gpu for gpu in present if gpu.driver in ("", KERNEL_DRIVER))
    if wanted == "all":
        return usable, ()
    if isinstance(wanted, str):
        count = int(wanted.removeprefix("count="))
        free = [gpu for gpu in usable if gpu.pci_address not in share.taken]
        # A GPU that is plugged in at a lower address must not push out one that pods use.
        chosen = sorted(free, key=lambda gpu: (gpu.pci_address not in share.has, gpu.pci_address))[:count]
        others = f", and {len(usable) - len(free)} for other machines" if len(free) < len(usable) else ""
        short = f"{count} GPUs are wanted and the host has {len(free)}{others}"
        return chosen, () if len(chosen) == count else (short,)
    chosen, problems = [], []
    for name in wanted:
        found = [gpu for gpu in usable if name in (gpu.pci_address, gpu.uuid)]
        chosen += [gpu for gpu in found if gpu not in chosen]
        if not found:
            problems.append(f"GPU {name} is not on this host, or has another driver than {KERNEL_DRIVER}")
    return chosen, tuple(problems)


def _granted(node: DeviceNode, gpus: list[Gpu], settings: MachineSettings, whole_host: bool) -> bool:
    match node.kind:
        case kind if kind in PER_GPU:
            return any(gpu.pci_address == node.pci_address for gpu in gpus)
        case DeviceKind.CAPABILITY:
            return _capability_granted(node.capability, gpus, settings)
        case DeviceKind.IMEX_CHANNEL:
            return settings.imex_channels
        case kind if kind in FABRIC:
            return whole_host
        case kind:
            return kind in SHARED


def _capability_granted(capability: str, gpus: list[Gpu], settings: MachineSettings) -> bool:
    """By its path below /proc/driver/nvidia/capabilities, where gpuN counts device minors."""
    if capability == "mig/config":
        return settings.mig_config
    if capability == "mig/monitor":
        return settings.mig_monitor
    if capability == "fabric-imex-mgmt":
        return settings.imex_channels
    return any(gpu.minor is not None and capability.startswith(f"gpu{gpu.minor}/mig/") for gpu in gpus)


def _driver_root(driver: Driver | None, staged: tuple[StagedRoot, ...]) -> StagedRoot | None:
    """The host's files if they fit the loaded module; else what is staged for that module; else the newest staged."""
    if driver is None:
        return None
    ours = sorted(root for root in staged if root.vendor == "nvidia")
    if isinstance(driver.files, tuple) and driver.library_version == driver.module_version:
        files, version = tuple(sorted(driver.files)), str(driver.library_version)
        same = [root for root in ours if root.version == version and root.files == files]
        return same[-1] if same else StagedRoot(UNSTAGED, "nvidia", version, files)
    fitting = [root for root in ours if root.version == driver.module_version] or ours
    return fitting[-1] if fitting else None
