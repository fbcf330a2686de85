"""A vendor on the host whose GPUs need their DRM nodes alone."""

from collections.abc import Mapping, Sequence

from agent.conditions import Condition, ConditionType
from agent.config import DriverSettings, MachineSettings
from agent.facts import DeviceNode, Gpu, GpuError, StagedRoot, VendorFacts
from agent.goal import DriverRoots, Grant
from agent.identity import DeviceKind
from agent.system.files import System
from agent.vendors.drm.conditions import drm_conditions
from agent.vendors.drm.description import Description
from agent.vendors.drm.observe import observe_drm
from agent.vendors.protocols import Sources

DRI = "/dev/dri"
NO_NODES = "`vainfo`, `clinfo` or `rocminfo` in pods: no device; `ls /dev/dri` there: no such file"
SYMPTOMS = {
    (ConditionType.DRIVER_LOADED, "ModuleNotLoaded"): NO_NODES,
    (ConditionType.DEVICES_PRESENT, ""): NO_NODES,
}


class DrmHost:
    """A HostVendor."""

    always_handed = False
    own_nodes = frozenset({DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER})
    services: tuple[str, ...] = ()
    node_directories: tuple[str, ...] = (DRI,)
    library_names: tuple[str, ...] = ()
    image = "agent-ubuntu2404"
    symptoms: Mapping[tuple[ConditionType, str], str] = SYMPTOMS

    def __init__(self, description: Description) -> None:
        self.description = description
        self.name = description.name
        self.drivers = description.drivers
        self.module_names = description.drivers
        shared = (each.path.removeprefix("/dev/") for each in description.shared)
        self.node_names: tuple[str, ...] = (DRI.removeprefix("/dev/"), *shared)

    def library_directories(self, driver: DriverSettings) -> tuple[str, ...]:
        """Pods bring their user space along: Mesa, oneAPI or ROCm."""
        return ()

    def observe(self, sources: Sources) -> VendorFacts:
        return observe_drm(self.description, sources)

    def grant(
        self, facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]
    ) -> Grant:
        """Of each GPU its own nodes; those that all share where it has one at all."""
        gpus = tuple(sorted(gpu.pci_address for gpu in wanted if not gpu.detached))
        nodes: tuple[DeviceNode, ...] = ()
        if isinstance(facts.devices, tuple) and gpus:
            nodes = tuple(sorted(node for node in facts.devices if node.pci_address in ("", *gpus)))
        return Grant(
            vendor=facts.vendor,
            gpus=gpus,
            nodes=nodes,
            driver_files=False,
            detached=tuple(sorted(gpu.pci_address for gpu in wanted if gpu.detached)),
        )

    def wrong_driver(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """None: other drivers in the kernel, such as radeon, are for GPUs that these do not know."""
        return ()

    def conditions(self, facts: VendorFacts, grant: Grant) -> tuple[Condition, ...]:
        return drm_conditions(self.description, facts, grant)

    def driver_for_pods(self, facts: VendorFacts, staged: Sequence[StagedRoot], system: System) -> None:
        return None

    def letting_go(self, command: str, pci_address: str, *, in_machine: bool) -> str:
        """No program of these vendors keeps a GPU open by itself."""
        return ""

    def kernel_message(self, text: str) -> GpuError | None:
        """These drivers have no numbered errors in the kernel's log."""
        return None
