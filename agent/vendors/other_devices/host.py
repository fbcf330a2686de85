"""Non-GPU devices on the host, treated as a vendor without GPUs. Machines' settings name the devices or their nodes."""

from agent.config.settings import MachineSettings
from agent.model.facts import DeviceNode, Gpu, Unseen, VendorFacts
from agent.model.goal import DriverRoots, Grant
from agent.model.handoff import OTHER_DEVICES
from agent.system.seen import classify_error
from agent.vendors.host_vendor import HostVendor, Sources
from agent.vendors.other_devices.nodes import NODE_DIRECTORIES, NODE_NAMES, NodeChecker, device_class, missing_devices
from agent.vendors.proc_devices import PROC_DEVICES


class OtherDevices(HostVendor):
    """The vendor of non-GPU devices. It has no conditions; agent.host.verify.readiness mentions missing devices."""

    name = OTHER_DEVICES
    in_every_handoff = True
    node_names = NODE_NAMES
    node_directories = NODE_DIRECTORIES

    def observe(self, sources: Sources) -> VendorFacts:
        """Return the facts about the devices that machines request. If no machine requests any, nothing is read."""
        classes = sorted({name for each in sources.machines.values() for name in each.devices})
        paths = sorted({device.path for each in sources.machines.values() for device in each.extra_devices})
        if not classes and not paths:
            return VendorFacts(self.name)
        try:
            checker = NodeChecker(sources.system)
            nodes = {node.path: node for name in classes for node in checker.class_nodes(device_class(name))}
            named = [node for path in paths if path not in nodes and (node := checker.named_node(path))]
        except OSError as error:
            return VendorFacts(self.name, devices=Unseen(classify_error(error.filename or PROC_DEVICES, error).why))
        devices = tuple(sorted((*nodes.values(), *named)))
        return VendorFacts(self.name, devices=devices, problems=tuple(dict.fromkeys(checker.problems)))

    def grant(
        self, facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]
    ) -> Grant:
        """Grant the nodes that this machine's settings request, and list the missing ones."""
        paths = tuple(each.path for each in settings.extra_devices)
        nodes: tuple[DeviceNode, ...] = ()
        if isinstance(facts.devices, tuple):
            nodes = tuple(node for node in facts.devices if node.kind in settings.devices or node.path in paths)
        kinds = {node.path: node.kind for node in nodes}
        return Grant(
            vendor=facts.vendor,
            nodes=tuple(sorted(nodes)),
            driver_files=False,
            missing=missing_devices(settings.devices, paths, kinds, facts.problems),
        )


OTHER = OtherDevices()
