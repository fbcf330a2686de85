"""The documents next to the handoff and the report: JSON with a version, which both halves or agent.dra exchange.

They are not parts of the handoff, because a change of them gives the machine half nothing to set up, and so must not
start a new generation.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import partial
from typing import Annotated, NamedTuple, TypeVar

from agent.model.conditions import Condition, ConditionType, Status
from agent.model.device import PCI_ADDRESS
from agent.model.errors import DocumentError
from agent.model.json_document import HOST, IMAGE, TIME, Form, Seconds, parse_document, render_document
from agent.model.paths import (
    ALLOCATABLE_NAME,
    CONDITIONS_NAME,
    DRA_STATUS_NAME,
    GPU_STATES_NAME,
    GPU_TEST_NAME,
    GPU_TESTS_NAME,
    HEALTH_NAME,
    LEAVE_NAME,
    LEAVING_NAME,
)
from agent.model.text import one_line

VERSION = 1
"""The version of each of these documents."""

# The host status: what the host half has evaluated for a machine's Node object: the Ready condition, and fenced GPUs.

SILENT_AFTER = 300.0
"""Age in seconds at which a host status is stale, because the host half has missed several passes by then."""


V = TypeVar("V")


def document(
    where: str, kind: type[V], writer: str = IMAGE, reader: str = IMAGE
) -> tuple[Callable[[V], bytes], Callable[[bytes], V]]:
    """Return two functions: one renders a document of this name and these contents, a named tuple, and one parses it.

    The second one raises DocumentError, which names the wrong key.
    """
    return partial(render_document, VERSION), lambda data: parse_document(where, data, kind, VERSION, writer, reader)


Address = Annotated[str, Form("a PCI address", PCI_ADDRESS.fullmatch)]
Id = Annotated[str, Form("a word", re.compile(r"[0-9a-f]{1,64}").fullmatch)]
Text = Annotated[str, Form("a text of up to 1000 characters", lambda text: len(text) <= 1000)]
Count = Annotated[int, Form("a count", lambda number: 0 <= number < 1 << 60)]
REASON = re.compile(r"([A-Za-z][A-Za-z0-9]{0,62})?")
"""A reason becomes the value of a taint, which must have the form of a label's value."""
OneWord = Annotated[str, Form("one word", REASON.fullmatch)]


class FencedGpu(NamedTuple):
    """A GPU that no new pod should get, and why, in one word such as `Xid79`."""

    pci_address: Address
    reason: OneWord


class OtherStatus(NamedTuple):
    """Another condition of the machine."""

    type: ConditionType
    status: Status
    reason: str
    message: str
    last_transition: Seconds


class HostStatus(NamedTuple):
    """A machine's Ready condition after one pass, other conditions, and what the machine should do to its Node."""

    status: Status
    reason: str
    message: str
    last_transition: Seconds
    evaluated: Seconds
    others: tuple[OtherStatus, ...] = ()
    node_condition: bool = True
    """Whether the Node should have these conditions."""
    fenced: tuple[FencedGpu, ...] = ()
    """GPUs for which the machine should cordon its Node, if a device plugin offers them."""

    @property
    def ready(self) -> Condition:
        return Condition(ConditionType.READY, self.status, self.reason, self.message, self.last_transition)


def render_host_status(
    ready: Condition,
    now: float,
    others: Iterable[Condition] = (),
    *,
    node_condition: bool = True,
    fenced: Iterable[FencedGpu] = (),
) -> bytes:
    """Return the document with this Ready condition, and others, evaluated at `now`."""
    said = tuple(OtherStatus(*each[:3], one_line(each.message), each.last_transition) for each in others)
    known = (ready.status, ready.reason, one_line(ready.message), ready.last_transition, now, said)
    return render_document(VERSION, HostStatus(*known, node_condition, tuple(sorted(fenced))))


parse_host_status = document(CONDITIONS_NAME, HostStatus, HOST)[1]


# The GPU states: what the host half tells agent.dra about the health and the place of the granted GPUs. Only machines
# that use Dynamic Resource Allocation get this document.

PCIE_ROOT = re.compile(r"(pci[0-9a-f]{4,8}:[0-9a-f]{2})?")
"""A root complex as sysfs names it (pci_create_root_bus in the kernel)."""
DRIVER = re.compile(r"[A-Za-z0-9_-]{0,63}")
MESSAGE_LIMIT = 500
"""Characters of a message: kubelet and API server cut or refuse longer ones in a pod's status."""


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
    """One granted GPU. Of a healthy one, reason, message, effect and since are empty."""

    pci_address: Address
    vendor: str
    state: GpuState
    reason: OneWord = ""
    """Such as `Xid79` or `Detaching`."""
    message: str = ""
    """What happened and what it means, in a sentence."""
    effect: Effect = Effect.NONE
    since: Annotated[int, TIME] = 0
    """When the GPU got into this state; 0 if the time is unknown."""
    kernel_driver: Annotated[str, Form("a driver's name", DRIVER.fullmatch)] = ""
    numa_node: int = -1
    """-1 if the platform does not say."""
    pcie_root: Annotated[str, Form("a root complex such as pci0000:00", PCIE_ROOT.fullmatch)] = ""
    shared: bool = False
    """Whether several claims may share the GPU, each with a part of its memory."""


class _GpuStates(NamedTuple):
    gpus: tuple[GpuStatus, ...]


def render_gpu_states(gpus: Iterable[GpuStatus]) -> bytes:
    """Return the document; the same states give the same bytes."""
    return render_document(VERSION, _GpuStates(tuple(map(_short, sorted(gpus)))))


def parse_gpu_states(data: bytes) -> dict[str, GpuStatus]:
    """Return the states by PCI address. Raises DocumentError, which names the wrong key."""
    gpus = parse_document(GPU_STATES_NAME, data, _GpuStates, VERSION, HOST).gpus
    return {gpu.pci_address: _short(gpu) for gpu in gpus}


def _short(gpu: GpuStatus) -> GpuStatus:
    return gpu._replace(message=one_line(gpu.message)[:MESSAGE_LIMIT])


# The questions of health: whether, how often and which GPUs the machine half asks for their health. It is a document of
# its own, because not only machines with Dynamic Resource Allocation ask, and because nothing happens when it changes.


class HealthQuestions(NamedTuple):
    """What the host half wants to know of the granted GPUs' health."""

    interval: Seconds
    """Seconds between two questions."""
    withheld: tuple[Address, ...] = ()
    """GPUs that must not be opened now, because somebody takes them out of use, or because they are lost."""


def render_health_questions(questions: HealthQuestions) -> bytes:
    """Return the document; the same questions give the same bytes."""
    return render_document(VERSION, questions._replace(withheld=tuple(sorted(questions.withheld))))


parse_health_questions = document(HEALTH_NAME, HealthQuestions, HOST)[1]


# The test of GPUs: which GPUs the machine is to test now, and what came of it. Only `gpus test` asks for it.

TEST_LIMIT = 3600.0
"""The most seconds for which a caller may let one GPU compute."""
FIRST_CONTEXT = 120.0
"""Seconds that a test may take in addition: on a host with many GPUs, the driver takes long to initialise the first."""


class GpuToTest(NamedTuple):
    """A GPU, and its link as it is now: transfer rate (GT/s) and lanes, 0 if that is not known."""

    pci_address: Address
    link_speed: float = 0.0
    link_width: int = 0


class GpuTestRequest(NamedTuple):
    """What the host half wants tested, one GPU after the other. Each request has another `id`."""

    id: Id
    seconds: Annotated[float, Form("seconds", lambda value: 0 <= value <= TEST_LIMIT)]
    """For how long each GPU computes at least."""
    gpus: tuple[GpuToTest, ...]
    force: bool = False
    """Whether to test also GPUs that pods have."""
    locked: bool = False
    """Whether the document is locked as long as the host half waits."""


class GpuTestEnd(StrEnum):
    """How the test of a device ended, from the best to the worst."""

    PASSED = "passed"
    NOT_RUN = "not-run"
    FAILED = "failed"
    HUNG = "hung"

    @property
    def is_bad(self) -> bool:
        return self in (GpuTestEnd.FAILED, GpuTestEnd.HUNG)


FIGURE = re.compile(r"[a-z][a-z_]{0,31}")
FIGURES = 32
"""The most figures of one device."""


def _are_figures(found: Mapping[str, float]) -> bool:
    bounded = all(FIGURE.fullmatch(name) and 0 <= number < 2**60 for name, number in found.items())
    return bounded and len(found) <= FIGURES


NUMBERS = Form(f"up to {FIGURES} numbers by name", _are_figures)
FigureName = Annotated[str, Form("a figure's name", FIGURE.fullmatch)]


class GpuTestResult(NamedTuple):
    """The result of one device: a GPU or, if `uuid` is that of a MIG device, a part of it."""

    gpu: Address
    uuid: Annotated[str, Form("a UUID", re.compile(r"[A-Za-z0-9/-]{0,80}").fullmatch)]
    """Empty if no device of the GPU could be tested."""
    result: GpuTestEnd
    step: Annotated[str, Form("a few words", re.compile(r"[a-z ]{0,32}").fullmatch)] = ""
    """What failed, or could not run; empty if nothing did."""
    message: Text = ""
    figures: Annotated[Mapping[str, float], NUMBERS] = {}
    """What was measured: bytes, bytes per second, seconds."""
    floors: Annotated[Mapping[str, float], NUMBERS] = {}
    """The least that a sound GPU reaches, by figure, if that is known."""
    slow: Annotated[tuple[FigureName, ...], Form("a short list", lambda found: len(found) <= FIGURES)] = ()
    """The figures below their floors. If there are any, nothing else is wrong."""
    finished: Seconds = 0.0
    peer: Annotated[str, Form("a PCI address", re.compile(r"[0-9a-f:.]{0,16}").fullmatch)] = ""
    """The other GPU's PCI address if this is the test of the way to it."""

    @property
    def counts(self) -> bool:
        """Whether it says something about the GPU: two GPUs that cannot reach each other are no fault."""
        return not self.peer or self.result is not GpuTestEnd.NOT_RUN


class GpuTestResults(NamedTuple):
    """The results so far of the request with this `id`."""

    id: Id
    done: bool
    results: Annotated[tuple[GpuTestResult, ...], Form("a short list", lambda found: len(found) <= 256)] = ()


render_test_request, parse_test_request = document(GPU_TEST_NAME, GpuTestRequest, HOST)
render_test_results, parse_test_results = document(GPU_TESTS_NAME, GpuTestResults, IMAGE, HOST)


# The leave: what a machine does before it stops or another root takes its place, and after it has started again.

LEAVE_LIMIT = 86400.0
"""The most seconds for which a machine may be asked to drain its node."""
NAMED = 20
"""The most pods that an answer names."""
LOST_LIMIT = 64
"""The most places that an answer names."""


class LeaveTask(StrEnum):
    """What the host half asks for."""

    DRAIN = "drain"
    UNCORDON = "uncordon"
    LOOK = "look"
    """Look for what another root of the machine would not have."""
    EVICT = "evict"
    """Evict the pods that were given some GPUs."""
    GIVE_IMAGES = "give images"
    """Write the images of the machine's containers into the pipe."""
    TAKE_IMAGES = "take images"
    """Take the images that come out of the pipe."""
    TRY_PROGRAMS = "try programs"
    """Run the programs of a node, which a candidate has not run, without an effect."""


class LeaveRequest(NamedTuple):
    """Each request has another `id`."""

    id: Id
    task: LeaveTask
    seconds: Annotated[float, Form("seconds", lambda value: 0 <= value <= LEAVE_LIMIT)]
    """After these, the machine gives up."""
    gpus: tuple[Address, ...] = ()
    """Only to evict: the GPUs that no pod should have."""

    @property
    def locked(self) -> bool:
        """The document is locked as long as the host half waits."""
        return True


class LeaveEnd(StrEnum):
    """How far the machine is."""

    WORKING = "working"
    DONE = "done"
    FAILED = "failed"
    UNABLE = "unable"
    """It has changed nothing, and would not the next time."""


class Lost(NamedTuple):
    """Files that another root of the machine would not have."""

    path: Annotated[str, Form("an absolute path", re.compile(r"/[^\x00\ud800-\udfff]{0,8191}").fullmatch)]
    """A directory in the machine. The files are in it, or below it."""
    files: Count
    size: Count
    """In bytes."""
    volume: Text = ""
    """Whose volume the directory is, if it is one."""


class LeaveAnswer(NamedTuple):
    """How far the request with this `id` is."""

    id: Id
    end: LeaveEnd
    seconds: Seconds
    """For how long the machine has worked. The answer is written again while it works."""
    message: Text = ""
    pods: Count = 0
    """How many pods still have to leave."""
    waiting: Annotated[tuple[Text, ...], Form("a short list", lambda found: len(found) <= NAMED)] = ()
    """Some of them, each with the reason why it has not left."""
    lost: Annotated[tuple[Lost, ...], Form("a short list", lambda found: len(found) <= LOST_LIMIT)] = ()


render_leave_request, parse_leave_request = document(LEAVE_NAME, LeaveRequest, HOST)
render_leave_answer, parse_leave_answer = document(LEAVING_NAME, LeaveAnswer, IMAGE, HOST)


# The allocatable devices: those that pods may be given by Dynamic Resource Allocation.
#
# The machine half writes this document after it has published a verified CDI specification, and takes the devices'
# names from that specification. agent.dra offers only devices in the document, and prepares no claim for any other.

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
    """Of a partition, that of its GPU."""
    cdi_names: Annotated[tuple[DeviceName, ...], Form("a list of names", bool)]
    """The qualified CDI names that a container needs to use the device: with UUIDs or PCI addresses, not indices."""
    partition: Annotated[
        tuple[PartitionNumber, ...], Form("a list of up to 4 numbers", lambda found: len(found) <= 4)
    ] = ()
    """The numbers of a partition in its GPU; empty for a whole GPU. NVIDIA's have two: GPU and compute instance."""


PARTITION_INFIX = "-mig-"
"""Separates a GPU's name from the numbers of its partition."""


def slice_name(pci_address: str, partition: Iterable[int] = ()) -> str:
    """Return the device's name in ResourceSlices: a label of RFC 1123, unique on the node."""
    numbers = "-".join(map(str, partition))
    return f"gpu-{re.sub('[:.]', '-', pci_address)}" + (f"{PARTITION_INFIX}{numbers}" if numbers else "")


class AllocatableVendor(NamedTuple):
    """One vendor's devices, its driver's version if known, and a sentence on why devices are missing if some are."""

    vendor: Annotated[str, Form("a vendor's name", VENDOR.fullmatch)]
    devices: tuple[AllocatableDevice, ...] = ()
    problem: str = ""
    driver_version: str = ""


class _Allocatable(NamedTuple):
    vendors: tuple[AllocatableVendor, ...]


def render_allocatable(vendors: Iterable[AllocatableVendor]) -> bytes:
    """Return the document; the same devices give the same bytes."""
    return render_document(VERSION, _Allocatable(tuple(vendors)))


def parse_allocatable(data: bytes) -> tuple[AllocatableVendor, ...]:
    """Return the devices by vendor. Raises DocumentError, which names the key.

    A vendor, a device or a CDI name that is listed twice is an error too: otherwise, two claims might get one device.
    """
    vendors = parse_document(ALLOCATABLE_NAME, data, _Allocatable, VERSION).vendors
    devices = [each for vendor in vendors for each in vendor.devices]
    for what, items in (
        ("vendor", [each.vendor for each in vendors]),
        ("device", [(each.pci_address, each.partition) for each in devices]),
        ("CDI name", [name for each in devices for name in each.cdi_names]),
    ):
        if twice := [item for item, count in Counter(items).items() if count > 1]:
            advice = "the machine half writes the document again"
            raise DocumentError(f"{ALLOCATABLE_NAME}: {what} {twice[0]} is listed twice", advice)
    return vendors


# The status of agent.dra: what it offers to the cluster, or why it offers nothing.
#
# The machine half reads this document for the condition GPUsAdvertised.

DRA_STATUS_SILENT_AFTER = 120.0
"""Age in seconds at which a status is stale, because agent.dra writes it again every RENEWED_AFTER seconds."""
RENEWED_AFTER = 30.0


class VendorOffer(NamedTuple):
    """One vendor's devices that the cluster's API server knows. A reason says why the offer is not as it should be."""

    vendor: str
    gpus: tuple[str, ...] = ()
    """PCI addresses of the GPUs that are offered, whole or in partitions, tainted or not."""
    devices: tuple[str, ...] = ()
    """Names of the devices in the node's ResourceSlices."""
    tainted: tuple[str, ...] = ()
    """Names of those devices that are tainted. New pods do not get them."""
    reason: str = ""
    message: str = ""


class DraStatus(NamedTuple):
    """What agent.dra offers now. A reason such as NoKubeconfig says why nothing can be offered at all."""

    at: Seconds
    """When the status was written."""
    node: str = ""
    """The name of the Node object; empty if unknown."""
    registered: bool = False
    """Whether the kubelet has accepted the driver. Without that, no pod can start with a GPU."""
    offers: tuple[VendorOffer, ...] = ()
    reason: str = ""
    message: str = ""


def render_dra_status(status: DraStatus) -> bytes:
    offers = tuple(each._replace(message=one_line(each.message)) for each in status.offers)
    return render_document(VERSION, status._replace(offers=offers, message=one_line(status.message)))


parse_dra_status = document(DRA_STATUS_NAME, DraStatus)[1]


# The list of the files that `up` put into a machine. With it, the machine half notices changed files.

PATH = re.compile(r"/[!#%()*+,\-./0-9:=?@A-Z\[\]^_a-z{}~]{1,254}")
"""The form of a path that may be listed. Other paths could read like commands, and an administrator sees a changed
file's path next to the agent's advice."""


class Original(NamedTuple):
    """A file as `up` wrote it."""

    sha256: str
    size: int


class _NodeFiles(NamedTuple):
    files: dict[str, Original]


def render_node_files(files: Mapping[str, tuple[str, int]]) -> bytes:
    """Return the document for files with digest and size by path, without those whose paths may not be listed."""
    listed = {path: Original(*files[path]) for path in sorted(files) if PATH.fullmatch(path)}
    return render_document(VERSION, _NodeFiles(listed))


def parse_node_files(where: str, data: bytes) -> dict[str, Original]:
    """Return the files by path in the machine. Raises DocumentError."""
    files = parse_document(where, data, _NodeFiles, VERSION, HOST).files
    for path in files:
        if not PATH.fullmatch(path):
            raise DocumentError(f"{where}: key files has a path that may not be listed: {path[:100]!a}")
    return files
