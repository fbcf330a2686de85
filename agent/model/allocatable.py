"""The allocatable devices: those that pods may be given by Dynamic Resource Allocation.

The machine half writes this document after it has published a verified CDI specification, and takes the devices' names
from that specification. agent.dra offers only devices in the document, and prepares no claim for any other.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from agent.model.errors import DocumentError
from agent.model.json_document import accept_version, get, objects, parse_object, strings
from agent.model.paths import ALLOCATABLE_NAME
from agent.model.pci_address import PCI_ADDRESS

VERSION = 1
SIZE_LIMIT = 1 << 20
"""Bytes of the largest document that is read. A device takes some 200 bytes."""
QUALIFIED = re.compile(r"(?=.{1,512}\Z)[A-Za-z][A-Za-z0-9_.-]*/[A-Za-z0-9_-]+=[A-Za-z0-9][A-Za-z0-9_.:-]*")
"""A qualified name `vendor.com/class=name` (pkg/parser/parser.go of container-device-interface)."""
VENDOR = re.compile(r"[a-z][a-z0-9-]{0,62}")
ALL_DEVICES = "all"
"""The CDI name that stands for all devices at once. It is not allocatable, because a claim gets single devices."""


class AllocatableDevice(NamedTuple):
    """A GPU, or a partition of one (a MIG device), that can be given to a pod."""

    pci_address: str
    """The GPU's address, as sysfs writes it. A partition has the address of the GPU that it belongs to."""
    cdi_names: tuple[str, ...]
    """The qualified CDI names that a container needs to use the device: with UUIDs or PCI addresses, not indices."""
    partition: tuple[int, ...] = ()
    """The numbers that identify a partition in its GPU: GPU instance and compute instance. Empty for a whole GPU."""


class AllocatableVendor(NamedTuple):
    """One vendor's devices."""

    vendor: str
    devices: tuple[AllocatableDevice, ...] = ()
    problem: str = ""
    """A sentence on why not all granted devices of this vendor are allocatable; empty if all are."""
    driver_version: str = ""
    """The driver's version, from the handoff; empty if unknown."""


def render_allocatable(vendors: Iterable[AllocatableVendor]) -> bytes:
    """Return the document; the same devices give the same bytes."""
    items = [{**each._asdict(), "devices": [device._asdict() for device in each.devices]} for each in vendors]
    return json.dumps({"version": VERSION, "vendors": items}, indent=1).encode() + b"\n"


def parse_allocatable(data: bytes) -> tuple[AllocatableVendor, ...]:
    """Return the devices by vendor. Raises DocumentError, which names the key.

    A vendor, a device or a CDI name that is listed twice is an error too: otherwise, two claims might get one device.
    """
    where = ALLOCATABLE_NAME
    document = parse_object(where, data)
    accept_version(where, document, (VERSION,))
    vendors = objects(where, document, "vendors", _vendor)
    devices = [each for vendor in vendors for each in vendor.devices]
    names = [name for each in devices for name in each.cdi_names]
    _refuse_duplicates(where, "vendor", [each.vendor for each in vendors])
    _refuse_duplicates(where, "device", [(each.pci_address, each.partition) for each in devices])
    _refuse_duplicates(where, "CDI name", names)
    return vendors


def _refuse_duplicates(where: str, what: str, items: Iterable[object]) -> None:
    duplicate = next((item for item, count in Counter(items).items() if count > 1), None)
    if duplicate is not None:
        raise DocumentError(
            f"{where}: {what} {duplicate} is listed twice", "the machine half writes the document again"
        )


def _vendor(where: str, item: dict[str, Any]) -> AllocatableVendor:
    vendor = get(where, item, "vendor", str)
    if not VENDOR.fullmatch(vendor):
        raise DocumentError(f"{where}: key vendor must be a vendor's name, not {vendor[:40]!a}")
    return AllocatableVendor(
        vendor,
        objects(where, item, "devices", _device),
        get(where, item, "problem", str),
        get(where, item, "driver_version", str),
    )


def _device(where: str, item: dict[str, Any]) -> AllocatableDevice:
    address, names = get(where, item, "pci_address", str), strings(where, item, "cdi_names")
    if not PCI_ADDRESS.fullmatch(address):
        raise DocumentError(f"{where}: key pci_address must be a PCI address, not {address[:40]!a}")
    wrong = [name for name in names if not QUALIFIED.fullmatch(name) or name.endswith(f"={ALL_DEVICES}")]
    if wrong or not names:
        shown = f"{wrong[0][:80]!a}" if wrong else "an empty list"
        raise DocumentError(
            f"{where}: key cdi_names must list names of single devices, `vendor.com/class=name`, not {shown}"
        )
    return AllocatableDevice(address, names, _partition(where, item))


def _partition(where: str, item: dict[str, Any]) -> tuple[int, ...]:
    # NVIDIA's partitions have two numbers. More are accepted, because another vendor's may be nested deeper.
    numbers = get(where, item, "partition", list)
    if not all(type(each) is int and 0 <= each < 1 << 16 for each in numbers) or len(numbers) > 4:
        raise DocumentError(
            f"{where}: key partition must be a list of up to 4 numbers below 65536, not {str(numbers)[:40]!a}"
        )
    return tuple(numbers)
