"""The contract between the two halves: versioned JSON, read and written with the standard library alone.

The host half publishes a Handoff. The machine half answers with a Report.
"""

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import DocumentError
from agent.model.json_document import HOST, IMAGE, accept_version, decode, get, parse_object, plain
from agent.model.paths import HANDOFF_NAME, HANDOFF_VERSION
from agent.model.text import MESSAGE_LIMIT, json_digest, one_line, printable

REPORT_VERSION = 1
SIZE_LIMIT = 1 << 20
"""Bytes of the largest handoff or report that is read. Real ones are far smaller."""
UNCOUNTED = ("withdrawn",)
"""Keys that do not count for the generation: a change of them alone grants nothing else."""
OTHER_DEVICES = "other-devices"
"""The name that stands for a vendor in a request for non-GPU devices."""
DRA = "dra"
"""The value of `allocation` for a node that offers its GPUs itself, by Dynamic Resource Allocation."""
RENDERED_LIMIT = 32
"""Rendered documents that are kept in memory: one for each machine of a large host."""
REMARK_LIMIT = MESSAGE_LIMIT // 2
"""Characters of a condition's message that a remark may take up."""
CHANGED_FILES_LIMIT = 100
"""The largest number of changed files that a report lists."""


class Publication(NamedTuple):
    """A handoff's file as stat(2) shows it: the same on the host and in the machine, where its directory is mounted.

    Each publication makes a new file, even if the handoff, and so its generation, is the same. The ctime is left out,
    because a backup that makes hard links or changes permissions changes it too.
    """

    inode: int
    mtime_ns: int
    """In nanoseconds since the epoch. The number has more than 53 bits, so some programs that read JSON round it."""


class Repair(StrEnum):
    """Parts of the machine half's work that other programs may change. Each run checks and repairs them."""

    LINKS = "links"
    SPEC = "spec"
    CONTAINERD = "containerd"
    RUNTIME = "runtime"
    """The configuration of the program that containerd's runtime handler names."""


class FabricAnswer(NamedTuple):
    """What a GPU says of its registration with the NVLink fabric, and of persistence mode, in its driver's words."""

    gpu: str
    state: str
    """Empty if the driver cannot be asked for it."""
    status: str
    persistence: str = ""
    """Whether the GPU stays initialised while nobody uses it; empty if it was not asked."""


class Silence(StrEnum):
    """Why a GPU has said nothing new of its health."""

    NOT_IN_USE = "NotInUse"
    """It is not in persistence mode and no pod has it open: to ask it would initialise it."""
    WITHHELD = "Withheld"
    """The host says that nobody may open it now."""
    NO_ANSWER = "NoAnswer"
    PROGRAM_HANGS = "ProgramHangs"
    """The last program that asked waits in the kernel, and cannot be killed. Until it has ended, no GPU is asked."""


class HealthAnswer(NamedTuple):
    """What a GPU said of its own health when it answered last, in the words of its driver's tool."""

    gpu: str
    said: Mapping[str, str] = {}
    """Words by the tool's fields. A field that the driver lacks is missing, and so is what the GPU never answered."""
    since: float = 0.0
    """Since when it says the same, in seconds since the epoch."""
    asked: float = 0.0
    """When it answered last; 0 if it has not answered since the machine's boot or the binding of its driver."""
    silence: str = ""
    """A Silence if it was not asked since, or did not answer; otherwise empty."""


class GrantedDevice(NamedTuple):
    """A device node that the machine has, with the numbers that the node must have there."""

    path: str
    kind: str
    major: int
    minor: int
    pci_address: str = ""
    capability: str = ""
    """The driver's name for the right that the node gives; empty for other nodes."""


class GrantedFile(NamedTuple):
    """A file of the driver root. `target` is its path below that root, and `link` what it points to if it is a link."""

    target: str
    link: str = ""


class Variable(NamedTuple):
    """An environment variable for pods with any of the vendor's devices."""

    name: str
    value: str


class Request(NamedTuple):
    """What the machine half has to set up for one vendor."""

    vendor: str
    gpus: tuple[str, ...]
    devices: tuple[GrantedDevice, ...]
    driver_version: str = ""
    driver_root: str = ""
    """Absolute path in the machine, such as `/run/host-nvidia/0`; empty without user-space files."""
    files: tuple[GrantedFile, ...] = ()
    sockets: tuple[str, ...] = ()
    """Names of daemons on the host whose sockets pods may use."""
    environment: tuple[Variable, ...] = ()
    cdi_modes: tuple[str, ...] = ()
    """Modes in which the vendor's generator makes further CDI specifications."""
    cdi_hooks: tuple[str, ...] = ()
    """Hooks that the CDI specification has in addition to those that every GPU needs."""


class Handoff(NamedTuple):
    """Everything that the machine half acts on."""

    machine: str
    architecture: str
    requests: tuple[Request, ...]
    default_runtime: bool = False
    """Whether the runtime handler `nvidia` is to be containerd's default."""
    restart_device_plugin: bool = False
    containerd_drop_in: str = ""
    """Path of the agent's part of containerd's configuration; empty for the usual path."""
    validation_markers: bool = False
    """Whether to make the files that tell other programs that driver and toolkit work."""
    withdrawn: tuple[str, ...] = ()
    """Paths of nodes that the host bound into the running machine, and that are no longer granted. Without this list,
    the machine half might not know all of them, because it may never have seen a handoff that grants them."""
    allocation: str = ""
    """Who offers the GPUs to pods: DRA, or empty for the vendors' device plugins."""

    @property
    def generation(self) -> str:
        """Return a digest of the content except the UNCOUNTED keys: equal content is never a new generation."""
        return _rendered(self)[0]


def render_handoff(handoff: Handoff) -> bytes:
    """Return the document; the same handoff gives the same bytes."""
    return _rendered(handoff)[1]


# Each pass of the host half asks for the documents of all machines, and they hardly ever change. With MIG instances, a
# machine's document has thousands of values.
@lru_cache(RENDERED_LIMIT)
def _rendered(handoff: Handoff) -> tuple[str, bytes]:
    content = plain(handoff)
    generation = json_digest({key: value for key, value in content.items() if key not in UNCOUNTED})[:16]
    document = {"version": HANDOFF_VERSION, "generation": generation, **content}
    return generation, json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def parse_handoff(data: bytes) -> Handoff:
    """Return the handoff in a document. Raises DocumentError, which names the key that is missing or wrong."""
    where = HANDOFF_NAME
    document = parse_object(where, data)
    accept_version(where, document, HANDOFF_VERSION, HOST, IMAGE)
    handoff = decode(where, document, Handoff)
    if get(where, document, "generation", str) != handoff.generation:
        raise DocumentError(f"{where}: key generation does not match the content", "the host half publishes it again")
    return handoff


class Report(NamedTuple):
    """The machine half's answer to one generation of the handoff, and to one publication of it."""

    generation: str
    """Empty if the machine half cannot use the handoff at all."""
    conditions: tuple[Condition, ...]
    """Of each, the document has type, status, reason, message and, if it concerns only some GPUs, these."""
    cdi_devices: tuple[str, ...] = ()
    """Names of the CDI devices that pods can request. The host reads neither these nor the boot's ID."""
    boot_id: str = ""
    agent_version: str = ""
    repairs: Mapping[str, int] = {}
    """Counts by Repair since the machine's boot."""
    advertised_gpus: int | None = None
    """How many granted GPUs the node offers to pods; None if that is unknown."""
    changed_files: tuple[str, ...] = ()
    """Paths of files that differ from what `up` put into the machine."""
    publication: Publication | None = None
    fabric: tuple[FabricAnswer, ...] = ()
    health: tuple[HealthAnswer, ...] = ()
    refused: str = ""
    """Why the machine half cannot use the handoff."""
    cordon: str = ""
    """Whether the Node is cordoned for fenced GPUs, and why, as a clause; empty if the host has named none."""
    unknown_conditions: tuple[str, ...] = ()
    """Only on the host: conditions that this release does not know, such as `NewCheck=False (Failed)`."""


def render_report(report: Report) -> bytes:
    conditions = [
        {"type": each.type, "status": each.status, "reason": each.reason, "message": one_line(each.message)}
        | ({"gpus": each.gpus} if each.gpus else {})
        | ({"remarks": each.remarks} if each.remarks else {})
        | ({"vendors": each.vendors} if each.vendors and each.status is not Status.TRUE else {})
        for each in report.conditions
    ]
    content = plain(report._replace(changed_files=report.changed_files[:CHANGED_FILES_LIMIT]))
    # The publication is a list, not an object.
    content |= {"conditions": conditions, "publication": report.publication}
    del content["unknown_conditions"]
    content |= {key: one_line(getattr(report, key))[:MESSAGE_LIMIT] for key in ("refused", "cordon")}
    return json.dumps({"version": REPORT_VERSION, **content}, indent=1).encode() + b"\n"


def with_remark(
    conditions: Iterable[Condition], kind: ConditionType, remark: str, words: Iterable[str] = ()
) -> tuple[Condition, ...]:
    """Append a remark, with its words, to the message of the condition `kind`, and return all conditions.

    No separator is added. A remark longer than REMARK_LIMIT is truncated, and the message is shortened so that both fit
    into MESSAGE_LIMIT.
    """
    text = printable(remark)
    if len(text) > REMARK_LIMIT:
        text = f"{text[: REMARK_LIMIT - 1]}…"
    return tuple(
        each._replace(message=each.message[: MESSAGE_LIMIT - len(text)] + text, remarks=(*each.remarks, *words))
        if each.type is kind
        else each
        for each in conditions
    )
