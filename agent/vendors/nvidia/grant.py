"""Chooses the NVIDIA nodes and files that a machine gets. Pure."""

from collections.abc import Set

from agent.config.settings import MachineSettings
from agent.model.device import DeviceKind
from agent.model.facts import UNSTAGED, DeviceNode, Driver, Gpu, StagedRoot, UserSpace, VendorFacts
from agent.model.goal import DriverRoots, Grant
from agent.model.handoff import Variable
from agent.vendors.nvidia.contract import DIRECTORIES, SHARED
from agent.vendors.nvidia.devices import KERNEL_DRIVER
from agent.vendors.nvidia.driver import fabric_cause
from agent.vendors.nvidia.places import HOST_CACHE, PLACES

PER_GPU = frozenset({DeviceKind.GPU, DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER, DeviceKind.CAPABILITY})
"""Kinds of nodes that belong to one GPU. Of the capabilities, only those of MIG instances belong to one."""
STAND_INS = ("pci-stub", "pciback")
"""Drivers that reserve a device for a virtual machine: the first for KVM, the second for Xen. VFIO's drivers reserve
devices too. They are not listed here, because `misbound_gpus` recognises them by `vfio` in their names."""
FABRIC = frozenset({DeviceKind.NVSWITCH, DeviceKind.NVLINK})
"""Kinds of nodes that reach all GPUs of the host. Only a machine with all GPUs gets them."""


def grant_nvidia(facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]) -> Grant:
    """Grant the wanted GPUs except detached ones, with the existing nodes and the driver root for the loaded module."""
    gpus = [gpu for gpu in wanted if not gpu.detached]
    nodes: tuple[DeviceNode, ...] = ()
    if isinstance(facts.devices, tuple) and gpus:
        addresses = {gpu.pci_address for gpu in gpus}
        # A detached GPU counts as one of the host's GPUs, because it is still on the fabric, and another machine may
        # get it later. So a machine has the whole host only if the detached GPUs are meant for this machine too.
        usable = {gpu.pci_address for gpu in facts.gpus if not gpu.excluded}
        whole_host = usable == {gpu.pci_address for gpu in wanted}
        nodes = tuple(sorted(node for node in facts.devices if _granted(node, addresses, settings, whole_host)))
    serving, waiting = _driver_roots(facts.driver, roots) if gpus else (None, None)
    variables = sorted(settings.pod_environment.get("nvidia", {}).items())
    return Grant(
        vendor=facts.vendor,
        gpus=tuple(sorted(gpu.pci_address for gpu in gpus)),
        nodes=nodes,
        driver_root=serving,
        waiting_root=waiting,
        detached=tuple(sorted(gpu.pci_address for gpu in wanted if gpu.detached)),
        services=tuple(name for name in DIRECTORIES if gpus and name in settings.sockets),
        directories=tuple(sorted(each for each in facts.services if gpus and each.service in settings.sockets)),
        cdi_modes=tuple(settings.cdi_modes),
        cdi_hooks=tuple(sorted(settings.cdi_hooks)) if gpus else (),
        environment=tuple(Variable(*item) for item in variables if gpus),
        fabric_cause=fabric_cause(facts.driver) if facts.driver and gpus else "",
    )


def misbound_gpus(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return the GPUs with a wrong driver, such as nouveau. A driver that reserves a GPU for a VM is not wrong."""
    right = ("", KERNEL_DRIVER, *STAND_INS)
    return tuple(sorted(gpu for gpu in gpus if gpu.driver not in right and "vfio" not in gpu.driver))


def modules_to_blacklist(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Return the kernel modules of wrong drivers. If a module's name is unknown, it is taken to be the driver's."""
    wrong = misbound_gpus(gpus)
    modules = ((gpu.driver.replace("-", "_"),) if gpu.modules is None else gpu.modules for gpu in wrong)
    return tuple(dict.fromkeys(sorted(name for names in modules for name in names)))


def built_in(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Return the PCI addresses of GPUs with a wrong driver that is built into the kernel."""
    return tuple(gpu.pci_address for gpu in misbound_gpus(gpus) if gpu.modules == ())


def _granted(node: DeviceNode, addresses: Set[str], settings: MachineSettings, whole_host: bool) -> bool:
    match node.kind:
        case DeviceKind.CAPABILITY if not node.pci_address:
            by_capability = {
                "mig/config": settings.mig_config,
                "mig/monitor": settings.mig_monitor,
                "fabric-imex-mgmt": settings.imex_channels,
            }
            return by_capability.get(node.capability, False)
        case kind if kind in PER_GPU:
            return node.pci_address in addresses
        case DeviceKind.IMEX_CHANNEL:
            return settings.imex_channels
        case kind if kind in FABRIC:
            return whole_host
        case kind:
            return kind in SHARED


def _stays_in_use(kept: StagedRoot, new: StagedRoot, user_space: UserSpace) -> bool:
    """Return whether the machine keeps the root `kept`, although the search has now found other files, `new`.

    The machine keeps it if the search found the same version in another place than before. For example, while an
    upgrade has removed the packages' files, the search falls back to the files of an old runfile installation.

    The machine gets `new` in each of these cases: the versions differ; the configuration or the host's loader cache
    names the files of `new`; both roots are from the same place; the place of `kept` is no longer trusted.
    """
    if kept.version != new.version or user_space.place_key or user_space.place_name in ("", HOST_CACHE):
        return False
    trusted = {place.name for place in PLACES}.difference(user_space.refused_places)
    return kept.place in trusted and kept.place != user_space.place_name


def _driver_roots(driver: Driver | None, roots: DriverRoots) -> tuple[StagedRoot | None, StagedRoot | None]:
    """Return the root to use now, and the root that waits until the module of its version is loaded. Each may be None.

    The waiting root has the host's current files.
    """
    if driver is None:
        return None, None
    staged = sorted(root for root in roots.staged if root.vendor == "nvidia")
    kept = [root for root in staged if root.index == roots.current]
    new: StagedRoot | None = None
    user_space = driver.user_space
    if isinstance(user_space.files, tuple) and isinstance(user_space.version, str):
        files, version = tuple(sorted(user_space.files)), user_space.version
        same = [root for root in staged if root.version == version and root.files == files]
        new = same[-1] if same else StagedRoot(UNSTAGED, "nvidia", version, files, user_space.place_name)
    serving: StagedRoot | None
    if new and driver.module_version == new.version:
        if stays := next((root for root in kept if _stays_in_use(root, new, user_space)), None):
            return stays, None
        serving = new
    elif isinstance(driver.module_version, str):
        fitting = [root for root in staged if root.version == driver.module_version]
        serving = next((root for root in (*kept, *reversed(fitting)) if root in fitting), None)
        # If no root has the module's version, the machine keeps its root until there is a root of that version.
        serving = serving or (kept[0] if kept else None)
    else:
        # The module's version is unknown: the module is not loaded (during a reload, just after boot), or could not be
        # observed.
        serving = next(iter((*kept, *reversed(staged))), new)
    return serving, new if new != serving else None
