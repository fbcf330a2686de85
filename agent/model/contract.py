"""The host status: a machine's Ready condition as the host half evaluated it, for the machine's Node object.

It is not part of the handoff, because a change of Ready gives the machine half nothing to set up, and so must not start
a new generation. The machine half sets the Node condition if this document exists.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, NamedTuple

from agent.model.conditions import Condition, ConditionType, Status
from agent.model.device import PCI_ADDRESS
from agent.model.errors import DocumentError
from agent.model.json_document import HOST, TIME, Form, Seconds, parse_document, render_document
from agent.model.paths import ALLOCATABLE_NAME, CONDITIONS_NAME, DRA_STATUS_NAME, GPU_STATES_NAME
from agent.model.text import one_line

VERSION = 1
SIZE_LIMIT = 1 << 16
"""Bytes of the largest document. A message has up to agent.model.text.MESSAGE_LIMIT characters of up to 12 bytes."""
SILENT_AFTER = 300.0
"""Age in seconds at which a host status is stale, because the host half has missed several passes by then."""


class HostStatus(NamedTuple):
    """A machine's Ready condition after one pass."""

    status: Status
    reason: str
    message: str
    last_transition: Seconds
    """When `status` last changed."""
    evaluated: Seconds
    """When the condition was evaluated."""

    @property
    def ready(self) -> Condition:
        return Condition(ConditionType.READY, self.status, self.reason, self.message, self.last_transition)


def host_status(ready: Condition, now: float) -> HostStatus:
    """Return the host status with this Ready condition, evaluated at `now`."""
    return HostStatus(ready.status, ready.reason, one_line(ready.message), ready.last_transition, now)


def render_host_status(status: HostStatus) -> bytes:
    """Return the document."""
    return render_document(VERSION, status)


def parse_host_status(data: bytes) -> HostStatus:
    """Return the host status in a document. Raises DocumentError, which names the key."""
    return parse_document(CONDITIONS_NAME, data, HostStatus, VERSION, HOST)


# The GPU states: what the host half tells agent.dra about the health and the place of the granted GPUs.
#
# They are not part of the handoff, because a change of a GPU's health gives the machine half nothing to set up, and so
# must not start a new generation. The host half writes this document only for machines that use Dynamic Resource
# Allocation.


GPU_STATES_VERSION = 1
GPU_STATES_SIZE_LIMIT = 1 << 18
"""Bytes of the largest document that is read. A GPU takes up to 3 KiB, nearly all of it the message."""
REASON = re.compile(r"([A-Za-z][A-Za-z0-9]{0,62})?")
"""A reason becomes the value of a taint, which must have the form of a label's value."""
PCIE_ROOT = re.compile(r"(pci[0-9a-f]{4,8}:[0-9a-f]{2})?")
"""A root complex as sysfs names it (pci_create_root_bus in the kernel)."""
DRIVER = re.compile(r"[A-Za-z0-9_-]{0,63}")
MESSAGE_LIMIT = 500
"""Characters of a message: kubelet and API server cut or refuse longer ones in a pod's status."""

Address = Annotated[str, Form("a PCI address", PCI_ADDRESS.fullmatch)]


class GpuState(StrEnum):
    """Whether pods may be given a GPU."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    """The GPU failed or has no kernel driver, and is still on the bus."""
    DRAINING = "draining"
    """The GPU is detached or being detached."""
    LOST = "lost"
    """The GPU is gone from the bus, or no longer answers."""


class Effect(StrEnum):
    """What a GPU's state does to pods: the effect of a device taint (resource.k8s.io)."""

    NONE = ""
    NO_SCHEDULE = "NoSchedule"
    """No new pod gets the GPU."""
    NO_EXECUTE = "NoExecute"
    """No new pod gets the GPU, and pods that have it are evicted."""


class GpuStatus(NamedTuple):
    """One granted GPU."""

    pci_address: Address
    vendor: str
    state: GpuState
    reason: Annotated[str, Form("one word", REASON.fullmatch)] = ""
    """One word such as `Xid79` or `Detaching`; empty if the GPU is healthy."""
    message: str = ""
    """What happened and what it means, in a sentence; empty if the GPU is healthy."""
    effect: Effect = Effect.NONE
    since: Annotated[int, TIME] = 0
    """When the GPU got into this state; 0 if it is healthy or the time is unknown."""
    kernel_driver: Annotated[str, Form("a driver's name", DRIVER.fullmatch)] = ""
    """The name of the bound kernel driver; empty without one."""
    numa_node: int = -1
    """-1 if the platform does not say."""
    pcie_root: Annotated[str, Form("a root complex such as pci0000:00", PCIE_ROOT.fullmatch)] = ""
    """The root complex, such as `pci0000:00`; empty if unknown."""
    shared: bool = False
    """Whether several claims may share the GPU, each with a part of its memory."""


class _Document(NamedTuple):
    gpus: tuple[GpuStatus, ...]


def render_gpu_states(gpus: Iterable[GpuStatus]) -> bytes:
    """Return the document; the same states give the same bytes."""
    return render_document(GPU_STATES_VERSION, _Document(tuple(map(_short, sorted(gpus)))))


def parse_gpu_states(data: bytes) -> dict[str, GpuStatus]:
    """Return the states by PCI address. Raises DocumentError, which names the wrong key or the repeated GPU."""
    where = GPU_STATES_NAME
    states: dict[str, GpuStatus] = {}
    for gpu in parse_document(where, data, _Document, GPU_STATES_VERSION, HOST).gpus:
        if gpu.pci_address in states:
            raise DocumentError(f"{where}: GPU {gpu.pci_address} is listed twice")
        if gpu.effect and gpu.state is GpuState.HEALTHY:
            raise DocumentError(f"{where}: a healthy GPU cannot have the effect {gpu.effect}")
        states[gpu.pci_address] = _short(gpu)
    return states


def _short(gpu: GpuStatus) -> GpuStatus:
    return gpu._replace(message=one_line(gpu.message)[:MESSAGE_LIMIT])


# The allocatable devices: those that pods may be given by Dynamic Resource Allocation.
#
# The machine half writes this document after it has published a verified CDI specification, and takes the devices'
# names from that specification. agent.dra offers only devices in the document, and prepares no claim for any other.


ALLOCATABLE_VERSION = 1
ALLOCATABLE_SIZE_LIMIT = 1 << 20
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


class _AllocatableDocument(NamedTuple):
    vendors: tuple[AllocatableVendor, ...]


def render_allocatable(vendors: Iterable[AllocatableVendor]) -> bytes:
    """Return the document; the same devices give the same bytes."""
    return render_document(ALLOCATABLE_VERSION, _AllocatableDocument(tuple(vendors)))


def parse_allocatable(data: bytes) -> tuple[AllocatableVendor, ...]:
    """Return the devices by vendor. Raises DocumentError, which names the key.

    A vendor, a device or a CDI name that is listed twice is an error too: otherwise, two claims might get one device.
    """
    vendors = parse_document(ALLOCATABLE_NAME, data, _AllocatableDocument, ALLOCATABLE_VERSION).vendors
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


# The status of agent.dra: what it offers to the cluster, or why it offers nothing.
#
# The machine half reads this document for the condition GPUsAdvertised.


DRA_STATUS_VERSION = 1
DRA_STATUS_SIZE_LIMIT = 1 << 18
"""Bytes of the largest document that is read."""
DRA_STATUS_SILENT_AFTER = 120.0
"""Age in seconds at which a status is stale, because agent.dra writes it again every RENEWED_AFTER seconds."""
RENEWED_AFTER = 30.0


class VendorOffer(NamedTuple):
    """One vendor's devices that the cluster's API server knows."""

    vendor: str
    gpus: tuple[str, ...] = ()
    """PCI addresses of the GPUs that are offered, whole or in partitions, tainted or not."""
    devices: tuple[str, ...] = ()
    """Names of the devices in the node's ResourceSlices."""
    tainted: tuple[str, ...] = ()
    """Names of those devices that are tainted. New pods do not get them."""
    reason: str = ""
    """The Reason for which the offer is not as it should be; empty if it is."""
    message: str = ""
    """A sentence on that reason."""


class DraStatus(NamedTuple):
    """What agent.dra offers now, and what prevents it from offering more."""

    at: Seconds
    """When the status was written."""
    node: str = ""
    """The name of the Node object; empty if unknown."""
    registered: bool = False
    """Whether the kubelet has accepted the driver. Without that, no pod can start with a GPU."""
    offers: tuple[VendorOffer, ...] = ()
    reason: str = ""
    """The Reason for which nothing can be offered at all, such as NoKubeconfig; empty if there is none."""
    message: str = ""
    """A sentence on that reason."""


def render_dra_status(status: DraStatus) -> bytes:
    """Return the document."""
    offers = tuple(each._replace(message=one_line(each.message)) for each in status.offers)
    return render_document(DRA_STATUS_VERSION, status._replace(offers=offers, message=one_line(status.message)))


def parse_dra_status(data: bytes) -> DraStatus:
    """Return the status in a document. Raises DocumentError, which names the key."""
    return parse_document(DRA_STATUS_NAME, data, DraStatus, DRA_STATUS_VERSION)


# The list of the files that `up` put into a machine. With it, the machine half notices changed files. Pure.


NODE_FILES_VERSION = 1
PATH = re.compile(r"/[!#%()*+,\-./0-9:=?@A-Z\[\]^_a-z{}~]{1,254}")
"""The form of a path that may be listed. Other paths could read like commands, and an administrator sees a changed
file's path next to the agent's advice."""


class Original(NamedTuple):
    """A file as `up` wrote it."""

    sha256: str
    size: int


class _NodeFilesDocument(NamedTuple):
    files: dict[str, Original]
    """By path in the machine."""


def render_node_files(files: Mapping[str, tuple[str, int]]) -> bytes:
    """Return the document, without files whose paths may not be listed; the same files give the same bytes.

    `files` has digest and size by path.
    """
    listed = {path: Original(*files[path]) for path in sorted(files) if PATH.fullmatch(path)}
    return render_document(NODE_FILES_VERSION, _NodeFilesDocument(listed))


def parse_node_files(where: str, data: bytes) -> dict[str, Original]:
    """Return the files by path. Raises DocumentError."""
    files = parse_document(where, data, _NodeFilesDocument, NODE_FILES_VERSION, HOST).files
    for path in files:
        if not PATH.fullmatch(path):
            raise DocumentError(f"{where}: key files has a path that may not be listed: {path[:100]!a}")
    return files
