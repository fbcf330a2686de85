"""Devices that are no GPUs, on the host: a vendor without GPUs, whose nodes settings ask for by name."""

from collections.abc import Mapping, Sequence

from agent.conditions import Condition, ConditionType
from agent.config import DriverSettings, MachineSettings
from agent.facts import DeviceNode, Gpu, GpuError, StagedRoot, Unseen, VendorFacts
from agent.goal import DriverRoots, Grant
from agent.identity import DeviceKind
from agent.system.files import System
from agent.system.looking import why_not
from agent.vendors.machine import OTHER_DEVICES
from agent.vendors.other.nodes import NODE_DIRECTORIES, NODE_NAMES, Looker, lacking, switch
from agent.vendors.proc_devices import PROC_DEVICES
from agent.vendors.protocols import Sources


class Other:
    """A HostVendor."""

    name = OTHER_DEVICES
    always_handed = True
    drivers: tuple[str, ...] = ()
    own_nodes: frozenset[DeviceKind] = frozenset()
    services: tuple[str, ...] = ()
    module_names: tuple[str, ...] = ()
    node_names = NODE_NAMES
    node_directories = NODE_DIRECTORIES
    image = "agent-ubuntu2404"
    symptoms: Mapping[tuple[ConditionType, str], str] = {}
    library_names: tuple[str, ...] = ()

    def library_directories(self, driver: DriverSettings) -> tuple[str, ...]:
        return ()

    def observe(self, sources: Sources) -> VendorFacts:
        """What any machine asks for; nothing is looked at while none does."""
        switches = sorted({name for each in sources.machines.values() for name in each.devices})
        paths = sorted({device.path for each in sources.machines.values() for device in each.extra_devices})
        if not switches and not paths:
            return VendorFacts(self.name)
        try:
            looker = Looker(sources.system)
            nodes = {node.path: node for name in switches for node in looker.of_switch(switch(name))}
            named = [node for path in paths if path not in nodes and (node := looker.named(path))]
        except OSError as error:
            return VendorFacts(self.name, devices=Unseen(why_not(error.filename or PROC_DEVICES, error).why))
        devices = tuple(sorted((*nodes.values(), *named)))
        return VendorFacts(self.name, devices=devices, problems=tuple(dict.fromkeys(looker.problems)))

    def grant(
        self, facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]
    ) -> Grant:
        """The nodes that this machine asks for, and what of it is not there."""
        paths = tuple(each.path for each in settings.extra_devices)
        nodes: tuple[DeviceNode, ...] = ()
        if isinstance(facts.devices, tuple):
            nodes = tuple(node for node in facts.devices if node.kind in settings.devices or node.path in paths)
        kinds = {node.path: node.kind for node in nodes}
        return Grant(
            vendor=facts.vendor,
            nodes=tuple(sorted(nodes)),
            driver_files=False,
            lacking=lacking(settings.devices, paths, kinds, facts.problems),
        )

    def wrong_driver(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        return ()

    def conditions(self, facts: VendorFacts, grant: Grant) -> tuple[Condition, ...]:
        """None: conditions are about GPUs. What lacks is added to a message, see agent.readiness."""
        return ()

    def driver_for_pods(self, facts: VendorFacts, staged: Sequence[StagedRoot], system: System) -> None:
        return None

    def letting_go(self, command: str, pci_address: str, *, in_machine: bool) -> str:
        return ""

    def kernel_message(self, text: str) -> GpuError | None:
        return None


OTHER = Other()
