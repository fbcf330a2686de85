"""Observes a vendor's GPUs and their DRM nodes. Other DRM devices, such as simpledrm, are ignored."""

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import Absent, DeviceNode, DrmDevice, Gpu, Seen, Unseen, VendorFacts
from agent.model.paths import PCI_DEVICES
from agent.system.deadlines import read_device_texts
from agent.system.files import System
from agent.system.seen import classify_error, read_seen
from agent.vendors.drm.description import Description, SharedNode
from agent.vendors.host_vendor import Sources
from agent.vendors.proc_devices import PROC_DEVICES, parse_majors

ROOT_BUS = "00:"
"""The bus without a port above it, on which Intel's integrated GPUs are. Those of AMD are behind an internal port."""
REGISTERED = "drm"
"""The name in /proc/devices under which all drivers register their DRM nodes."""


def observe_drm(vendor: Description, sources: Sources) -> VendorFacts:
    """Return the facts about a vendor. What cannot be observed is Unseen.

    `problems` in the facts name the nodes that must not be used, and the GPUs of which only a part is granted.
    """
    pci = sources.pci
    if not isinstance(pci, tuple):
        # The devices are Unseen, because an empty list would withdraw every GPU.
        return VendorFacts(vendor.name, devices=Unseen(pci.why))
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
        for each in pci
        if vendor.is_gpu(each)
    )
    if not gpus:
        return VendorFacts(vendor.name)
    problems: list[str] = []
    return VendorFacts(
        vendor.name,
        gpus,
        _nodes(vendor, sources, gpus, problems),
        problems=tuple(problems),
        # udev loads the driver of a GPU. If none of the vendor's modules is loaded, the driver is not installed or not
        # wanted. So no driver is expected.
        driver_expected=any(
            read_seen(sources.system.exists, f"/sys/module/{name}") is not False for name in vendor.drivers
        ),
    )


def _nodes(
    vendor: Description, sources: Sources, gpus: tuple[Gpu, ...], problems: list[str]
) -> Seen[tuple[DeviceNode, ...]]:
    """Return the usable nodes; Unseen if any node could not be observed.

    `problems` gets a sentence for each node that must not be used, and for each GPU of which only a part is granted.
    """
    if isinstance(sources.drm, Absent):
        return ()
    if not isinstance(sources.drm, tuple):
        return Unseen(sources.drm.why)
    driven = {gpu.pci_address for gpu in gpus if gpu.driver in vendor.drivers}
    try:
        majors = parse_majors(sources.system.read_text(PROC_DEVICES))
        nodes = [_node(sources.system, each, majors, problems) for each in sources.drm if each.pci_address in driven]
        if driven:
            nodes += [_shared(sources.system, each, majors, problems) for each in vendor.shared]
    except OSError as error:
        return Unseen(classify_error(error.filename or PROC_DEVICES, error).why)
    # A divided GPU has nodes that belong to no PCI device. If there are no such nodes, no GPU is divided, so sysfs need
    # not be read.
    if any(not each.pci_address for each in sources.drm):
        problems += _divided(vendor, sources.system, sorted(driven))
    return tuple(sorted(node for node in nodes if node))


def _divided(vendor: Description, system: System, gpus: list[str]) -> list[str]:
    """Return a sentence for each divided GPU. Of such a GPU, only the first partition is granted.

    The existence of nodes for partitions does not prove that a GPU is divided: amdgpu makes nodes for eight partitions
    in every mode (amdgpu_xcp_dev_register). So the attribute in sysfs is read.
    """
    if not vendor.partition_mode:
        return []
    paths = [f"{PCI_DEVICES}/{gpu}/{vendor.partition_mode}" for gpu in gpus]
    found = [text.strip() if isinstance(text, str) else "" for text in read_device_texts(system, paths)]
    return [
        f"GPU {gpu} is divided ({vendor.partition_mode} is {mode!a}): only its first partition is granted, because the "
        "nodes of the others belong to no PCI device"
        for gpu, mode in zip(gpus, found, strict=True)
        if mode not in ("", "UNKNOWN", vendor.whole)
    ]


def _node(system: System, device: DrmDevice, majors: dict[str, int], problems: list[str]) -> DeviceNode | None:
    kind = DeviceKind.DRI_RENDER if "/renderD" in device.path else DeviceKind.DRI_CARD
    number = _number(system, device.path, majors.get(REGISTERED), problems)
    return DeviceNode(device.path, kind, number, device.pci_address) if number else None


def _shared(system: System, node: SharedNode, majors: dict[str, int], problems: list[str]) -> DeviceNode | None:
    number = _number(system, node.path, majors.get(node.registered), problems)
    return DeviceNode(node.path, node.kind, number) if number else None


def _number(system: System, path: str, major: int | None, problems: list[str]) -> DeviceNumber | None:
    """Return the node's number; None if the node does not exist or must not be used.

    `problems` gets the reason why a node must not be used.
    """
    try:
        number = system.device(path)
    except FileNotFoundError:
        # The kernel has not made the node yet, or the driver has no such node.
        return None
    if number is None:
        problems.append(f"{path}: not a character device")
    elif number.major != major:
        registered = f"major {major}" if major is not None else "no major"
        problems.append(f"{path}: is {number.major}:{number.minor}, but its driver has {registered} in {PROC_DEVICES}")
        return None
    return number
