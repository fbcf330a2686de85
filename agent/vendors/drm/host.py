"""The host half of a vendor whose GPUs need only device nodes."""

from agent.config.settings import MachineSettings
from agent.model.conditions import Condition, ConditionType
from agent.model.device import DeviceKind
from agent.model.facts import DeviceNode, Gpu, VendorFacts
from agent.model.goal import DriverRoots, Grant
from agent.model.reasons import Reason
from agent.system.sysfs import DRI
from agent.vendors.drm.conditions import drm_conditions
from agent.vendors.drm.description import Description
from agent.vendors.drm.observe import observe_drm
from agent.vendors.host_vendor import FabricReport, HostVendor, Sources

NO_NODES = "`vainfo`, `clinfo` or `rocminfo` in pods: no device; `ls /dev/dri` there: no such file"
SYMPTOMS = {
    (ConditionType.DRIVER_LOADED, Reason.MODULE_NOT_LOADED): NO_NODES,
    (ConditionType.DEVICES_PRESENT, ""): NO_NODES,
}


class DrmHost(HostVendor):
    """A vendor that a Description describes completely. Pods bring their own user space: Mesa, oneAPI or ROCm.

    HostVendor's defaults are right for the rest: a GPU with another driver is no fault (radeon, for example, is for
    older GPUs), no program of the vendor keeps a GPU open, and the drivers write no numbered errors into the kernel
    log.
    """

    own_nodes = frozenset({DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER})
    node_directories = (DRI,)
    symptoms = SYMPTOMS

    def __init__(self, description: Description) -> None:
        self.description = description
        self.name = description.name
        self.drivers = description.drivers
        self.module_names = description.drivers
        shared = (each.path.removeprefix("/dev/") for each in description.shared)
        self.node_names = (DRI.removeprefix("/dev/"), *shared)

    def observe(self, sources: Sources) -> VendorFacts:
        return observe_drm(self.description, sources)

    def grant(
        self, facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]
    ) -> Grant:
        """Grant the nodes of each GPU, and the shared nodes if the machine gets a GPU."""
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

    def conditions(self, facts: VendorFacts, grant: Grant, fabric: FabricReport) -> tuple[Condition, ...]:
        return drm_conditions(self.description, facts, grant)
