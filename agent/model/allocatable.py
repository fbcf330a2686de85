"""The allocatable devices: those that pods may be given by Dynamic Resource Allocation.

The machine half writes this document after it has published a verified CDI specification, and takes the devices' names
from that specification. agent.dra offers only devices in the document, and prepares no claim for any other.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, NamedTuple

from agent.model.errors import DocumentError
from agent.model.gpu_states import Address
from agent.model.json_document import Form, parse_document, render_document
from agent.model.paths import ALLOCATABLE_NAME

VERSION = 1
SIZE_LIMIT = 1 << 20
"""Bytes of the largest document that is read. A device takes some 200 bytes."""
QUALIFIED = re.compile(r"(?=.{1,512}\Z)[A-Za-z][A-Za-z0-9_.-]*/[A-Za-z0-9_-]+=[A-Za-z0-9][A-Za-z0-9_.:-]*")
"""A qualified name `vendor.com/class=name` (pkg/parser/parser.go of container-device-interface)."""
VENDOR = re.compile(r"[a-z][a-z0-9-]{0,62}")
ALL_DEVICES = "all"
"""The CDI name that stands for all devices at once. It is not allocatable, because a claim gets single devices."""
DeviceName = Annotated[
    str,
    Form(
        "the name of a single device, `vendor.com/class=name`",
        lambda name: QUALIFIED.fullmatch(name) and not name.endswith(f"={ALL_DEVICES}"),
    ),
]
PartitionNumber = Annotated[int, Form("a number below 65536", lambda number: 0 <= number < 1 << 16)]


class AllocatableDevice(NamedTuple):
    """A GPU, or a partition of one (a MIG device), that can be given to a pod."""

    pci_address: Address
    """The GPU's address, as sysfs writes it. A partition has the address of the GPU that it belongs to."""
    cdi_names: Annotated[tuple[DeviceName, ...], Form("a list of names", bool)]
    """The qualified CDI names that a container needs to use the device: with UUIDs or PCI addresses, not indices."""
    partition: Annotated[
        tuple[PartitionNumber, ...], Form("a list of up to 4 numbers", lambda found: len(found) <= 4)
    ] = ()
    """The numbers that identify a partition in its GPU: GPU instance and compute instance. Empty for a whole GPU.

    NVIDIA's partitions have two numbers. More are accepted, because another vendor's may be nested deeper."""


class AllocatableVendor(NamedTuple):
    """One vendor's devices."""

    vendor: Annotated[str, Form("a vendor's name", VENDOR.fullmatch)]
    devices: tuple[AllocatableDevice, ...] = ()
    problem: str = ""
    """A sentence on why not all granted devices of this vendor are allocatable; empty if all are."""
    driver_version: str = ""
    """The driver's version, from the handoff; empty if unknown."""


class _Document(NamedTuple):
    vendors: tuple[AllocatableVendor, ...]


def render_allocatable(vendors: Iterable[AllocatableVendor]) -> bytes:
    """Return the document; the same devices give the same bytes."""
    return render_document(VERSION, _Document(tuple(vendors)))


def parse_allocatable(data: bytes) -> tuple[AllocatableVendor, ...]:
    """Return the devices by vendor. Raises DocumentError, which names the key.

    A vendor, a device or a CDI name that is listed twice is an error too: otherwise, two claims might get one device.
    """
    vendors = parse_document(ALLOCATABLE_NAME, data, _Document, VERSION).vendors
    devices = [each for vendor in vendors for each in vendor.devices]
    names = [name for each in devices for name in each.cdi_names]
    _refuse_duplicates("vendor", [each.vendor for each in vendors])
    _refuse_duplicates("device", [(each.pci_address, each.partition) for each in devices])
    _refuse_duplicates("CDI name", names)
    return vendors


def _refuse_duplicates(what: str, items: Iterable[object]) -> None:
    duplicate = next((item for item, count in Counter(items).items() if count > 1), None)
    if duplicate is not None:
        raise DocumentError(
            f"{ALLOCATABLE_NAME}: {what} {duplicate} is listed twice", "the machine half writes the document again"
        )
