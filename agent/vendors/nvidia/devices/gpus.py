"""Observes GPUs. The PCI bus shows which GPUs exist; /proc/driver/nvidia/gpus has what the driver knows."""

import posixpath
import re
from collections.abc import Mapping, Set
from types import MappingProxyType

from msgspec import Struct

from agent.model.facts import Absent, Broken, Gpu, PciDevice, Seen, Unseen
from agent.model.pci_address import PCI_ADDRESS
from agent.model.pci_classes import BRIDGE_OTHER
from agent.system.deadlines import read_device_texts
from agent.system.files import System
from agent.system.seen import classify_error, entries_if_present, read_seen

VENDOR_ID = 0x10DE
DISPLAY_CLASSES = frozenset({0x0300, 0x0302})
"""PCI classes of VGA controllers and 3D controllers, without the lowest byte, the programming interface."""
KERNEL_DRIVER = "nvidia"
"""The driver's name on the PCI bus. The name is the same on Debian, which renames only the module's file."""

MODEL_LIMIT = 200
"""Characters of the longest model name that messages show. No real name is half as long."""

PCI_DRIVERS = "/sys/bus/pci/drivers"
COMPANIONS = {"nova_core": ("nova_drm",)}
"""Modules that belong to another one, even if they do not show as its users."""

EXCLUDED = ("GPU Excluded", "Blacklisted")
"""The key that says whether the driver lets nobody open a GPU. Older drivers, such as 418, have the second name."""

GPUS = "/proc/driver/nvidia/gpus"


class Information(Struct, frozen=True):
    """The content of one GPU's `information` file (nv-procfs.c)."""

    model: str = ""
    uuid: str = ""
    minor: int | None = None
    excluded: bool = False


def parse_information(text: str) -> Information:
    """Parse an `information` file: lines of `Key: value`.

    Until the GPU is initialised, the file has the UUID `GPU-????...`, and an empty `uuid` is returned.
    """
    values = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        values[key.strip()] = value.strip()
    uuid, minor, model = values.get("GPU UUID", ""), values.get("Device Minor", ""), values.get("Model", "")
    return Information(
        model=model if model.isprintable() and len(model) <= MODEL_LIMIT else "",
        uuid=uuid if re.fullmatch(r"GPU-[0-9a-f-]{36}", uuid) else "",
        minor=int(minor) if re.fullmatch(r"[0-9]{1,4}", minor) else None,
        excluded=any(values.get(name) == "Yes" for name in EXCLUDED),
    )


class GpuList(Struct, frozen=True):
    """NVIDIA's GPUs on a host, with any driver or none."""

    gpus: tuple[Gpu, ...]
    unseen: str = ""
    """Why the list may be incomplete; empty if it is complete. While it may be incomplete, nothing may be withdrawn."""
    problems: tuple[str, ...] = ()


def observe_gpus(
    system: System,
    pci: Seen[tuple[PciDevice, ...]],
    lost: Mapping[str, str] = MappingProxyType({}),
    detached: Set[str] = frozenset(),
) -> GpuList:
    """Return the GPUs on the PCI bus; if the bus could not be listed, the GPUs that the driver lists."""
    known: dict[str, Information] = {}
    unseen, problems = [], []
    names = read_seen(system.entries, GPUS)
    if isinstance(names, Broken | Unseen):
        unseen.append(names.why)
    addresses = []
    for name in names if isinstance(names, tuple) else ():
        if PCI_ADDRESS.fullmatch(name):
            addresses.append(name)
        else:
            problems.append(f"{GPUS}: {name!a} is not a PCI address")
    paths = [f"{GPUS}/{address}/information" for address in addresses]
    for address, path, text in zip(addresses, paths, read_device_texts(system, paths), strict=True):
        found = classify_error(path, text) if isinstance(text, OSError) else text
        if isinstance(found, str):
            known[address] = parse_information(found)
        elif not isinstance(found, Absent):
            unseen.append(found.why)
    if isinstance(pci, tuple):
        devices = {each.address: each for each in pci if _is_gpu(each)}
        if known and not devices:
            # A GPU leaves the driver's list before it leaves the bus, so one of the two lists is wrong.
            unseen.append(f"the PCI bus lists no GPU of this vendor, but the driver lists {', '.join(known)}")
    else:
        devices = {each: PciDevice(each, VENDOR_ID, 0, KERNEL_DRIVER) for each in known}
        unseen.append(pci.why)
    problems += [
        f"GPU {address} is excluded by a parameter of the kernel module nvidia"
        for address, each in sorted(known.items())
        if each.excluded
    ]
    gpus = []
    for address, device in sorted(devices.items()):
        each = known.get(address, Information())
        why_lost, is_detached = lost.get(address, ""), address in detached
        modules = None if device.driver in ("", KERNEL_DRIVER) else _modules(system, device.driver)
        states = (why_lost, is_detached, each.excluded, device.override, device.virtual, device.integrated, modules)
        gpus.append(Gpu(address, "nvidia", device.driver, each.model, each.uuid, each.minor, *states))
    return GpuList(tuple(gpus), "; ".join(unseen), tuple(problems))


def _modules(system: System, driver: str) -> tuple[str, ...] | None:
    """Return Gpu.modules of a driver on the PCI bus. The names may differ: the driver NovaCore is in nova_core."""
    place = f"{PCI_DRIVERS}/{driver}"
    try:
        target = system.read_link(f"{place}/module")
        if target is None:
            return () if system.is_directory(place) else None
        module = posixpath.basename(target)
        # modprobe loads a blacklisted module after all if a module that is not blacklisted needs it.
        holders = entries_if_present(system, f"/sys/module/{module}/holders")
    except OSError:
        return None
    return (module, *dict.fromkeys((*COMPANIONS.get(module, ()), *holders)))


def has_nvswitch(pci: Seen[tuple[PciDevice, ...]]) -> bool:
    """Return whether the PCI bus has an NVSwitch; False if the bus could not be listed."""
    return isinstance(pci, tuple) and any(
        each.vendor_id == VENDOR_ID and each.class_id >> 8 == BRIDGE_OTHER for each in pci
    )


def _is_gpu(device: PciDevice) -> bool:
    return device.vendor_id == VENDOR_ID and device.class_id >> 8 in DISPLAY_CLASSES
