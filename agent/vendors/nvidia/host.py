"""NVIDIA on the host: the parts, wired."""

from collections.abc import Sequence

from agent.conditions import Condition
from agent.config import DriverSettings, MachineSettings
from agent.facts import Gpu, GpuError, StagedRoot, VendorFacts
from agent.goal import DriverRoots, Grant
from agent.identity import DeviceKind
from agent.system.files import System
from agent.vendors.nvidia.conditions import nvidia_conditions
from agent.vendors.nvidia.cuda_version import driver_for_pods
from agent.vendors.nvidia.daemons import letting_go
from agent.vendors.nvidia.devices import NODE_DIRECTORIES, NODE_NAMES
from agent.vendors.nvidia.driver import MODULE_NAMES, SERVICES
from agent.vendors.nvidia.driver_places import LIBRARY_NAMES, watched_directories
from agent.vendors.nvidia.grant import KERNEL_DRIVER, grant_nvidia, wrong_driver
from agent.vendors.nvidia.observe import observe_nvidia
from agent.vendors.nvidia.symptoms import SYMPTOMS
from agent.vendors.nvidia.xid import parse_xid
from agent.vendors.protocols import DriverForPods, Sources


class Nvidia:
    """A HostVendor."""

    name = "nvidia"
    always_handed = True
    drivers: tuple[str, ...] = (KERNEL_DRIVER,)
    own_nodes = frozenset({DeviceKind.GPU})
    services = SERVICES
    module_names = MODULE_NAMES
    node_names = NODE_NAMES
    node_directories = NODE_DIRECTORIES
    image = "agent-ubuntu2404-nvidia"
    symptoms = SYMPTOMS
    library_names = LIBRARY_NAMES

    def library_directories(self, driver: DriverSettings) -> tuple[str, ...]:
        return watched_directories(driver)

    def observe(self, sources: Sources) -> VendorFacts:
        return observe_nvidia(sources)

    def grant(
        self, facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]
    ) -> Grant:
        return grant_nvidia(facts, settings, roots, wanted)

    def wrong_driver(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        return wrong_driver(gpus)

    def conditions(self, facts: VendorFacts, grant: Grant) -> tuple[Condition, ...]:
        return nvidia_conditions(facts, grant)

    def driver_for_pods(self, facts: VendorFacts, staged: Sequence[StagedRoot], system: System) -> DriverForPods | None:
        return driver_for_pods(facts, staged, system)

    def letting_go(self, command: str, pci_address: str, *, in_machine: bool) -> str:
        return letting_go(command, pci_address, in_machine=in_machine)

    def kernel_message(self, text: str) -> GpuError | None:
        return parse_xid(text)


NVIDIA = Nvidia()
