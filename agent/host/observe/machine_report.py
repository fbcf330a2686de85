"""Parses a machine's report. The machine is not trusted: everything is bounded, and all texts are printable."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec.structs import astuple

from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import DocumentError
from agent.model.facts import Absent, Broken, MachineFacts, Unseen
from agent.model.handoff import CHANGED_FILES_LIMIT, SIZE_LIMIT, FabricAnswer, Publication, Repair
from agent.model.json_document import HOST, IMAGE, accept_version
from agent.model.node_files import PATH
from agent.model.paths import REPORT_NAME
from agent.model.pci_address import PCI_ADDRESS
from agent.model.text import printable
from agent.model.typed_json import decode, to_builtins
from agent.model.versions import REPORT_VERSION

TYPES = frozenset(ConditionType)
CONDITIONS_LIMIT = 64
"""The largest number of conditions in a report: a newer machine half may report more than this release knows."""


GPUS_LIMIT = 256
"""The largest number of GPUs that a condition may name."""


class Report(Struct, frozen=True):
    """What the host half needs of the machine half's report on one generation of the handoff."""

    generation: str
    agent_version: str
    conditions: tuple[Condition, ...]
    """At most one condition of each type. Those of unknown types are in `unknown_conditions`."""
    repairs: Mapping[Repair, int] = field(default_factory=dict)
    """How often each repair was made since the machine's boot."""
    advertised_gpus: int | None = None
    """How many of the granted GPUs the node offers to pods; None if that is unknown."""
    changed_files: tuple[str, ...] = ()
    """Files that differ from what `up` put into the machine."""
    publication: Publication | None = None
    """The publication of the handoff that the report answers; None if that is unknown."""
    fabric: tuple[FabricAnswer, ...] = ()
    """What GPUs say of their registration with the fabric."""
    refused: str = ""
    """Why the machine half cannot use the handoff; empty if it can."""
    unknown_conditions: tuple[str, ...] = ()
    """Conditions that this release does not know, such as `NewCheck=False (Failed)`: a newer machine half's."""


# msgspec accepts a text if the pattern matches anywhere in it. So each pattern begins with \A, and ends with \Z. (With
# `$` instead of \Z, a text with a final newline would be accepted too.)
Word = Annotated[str, Meta(pattern=r"\A[A-Za-z][A-Za-z0-9]{0,63}\Z")]
Name = Annotated[str, Meta(max_length=255)]
Address = Annotated[str, Meta(pattern=rf"\A{PCI_ADDRESS.pattern}\Z")]
FabricWord = Annotated[str, Meta(pattern=r"\A(\[?N/A\]?|[A-Za-z0-9 \[\]]{0,64})\Z")]
"""A word of the driver, which conditions show without `machine says`: no command can be made of it."""
Count = Annotated[int, Meta(ge=0, lt=2**31)]


class _Condition(Struct, frozen=True):
    """One condition. Unknown keys are ignored, as in the whole report."""

    type: Word
    status: Status
    reason: Word
    message: Annotated[str, Meta(max_length=2000)]
    gpus: Annotated[tuple[Address, ...], Meta(max_length=GPUS_LIMIT)] = ()


class _Fabric(Struct, frozen=True):
    """What a GPU says of its fabric and of persistence mode."""

    gpu: Annotated[str, Meta(pattern=rf"\A{PCI_ADDRESS.pattern}\Z")]
    state: FabricWord
    status: FabricWord
    persistence: FabricWord = ""


class _Repairs(Struct, frozen=True):
    """How often each Repair was made.

    This is not a dict, because msgspec's errors do not name the keys of a dict.
    """

    links: Count = 0
    spec: Count = 0
    containerd: Count = 0
    runtime: Count = 0


class _Version(Struct, frozen=True):
    """The version of a report. Everything else is ignored."""

    version: int


class _Document(_Version, frozen=True):
    """The whole report. Unknown keys are ignored."""

    generation: Annotated[str, Meta(pattern=r"\A[0-9a-f]{0,64}\Z")]
    boot_id: Annotated[str, Meta(pattern=r"\A[0-9a-f-]{0,36}\Z")]
    agent_version: Annotated[str, Meta(max_length=64)]
    conditions: Annotated[tuple[_Condition, ...], Meta(max_length=CONDITIONS_LIMIT)]
    cdi_devices: Annotated[tuple[Name, ...], Meta(max_length=4096)]
    repairs: _Repairs
    advertised_gpus: Count | None
    changed_files: Annotated[tuple[str, ...], Meta(max_length=CHANGED_FILES_LIMIT)]
    publication: Publication | None
    fabric: Annotated[tuple[_Fabric, ...], Meta(max_length=1024)]
    refused: Annotated[str, Meta(max_length=2000)]


def parse_report(data: bytes) -> Report:
    """Parse a report. Raises DocumentError, which names the wrong key if there is one."""
    if len(data) > SIZE_LIMIT:
        raise DocumentError(f"{REPORT_NAME}: larger than {SIZE_LIMIT} bytes")
    try:
        # First, because the keys of another version may have other types.
        accept_version(
            REPORT_NAME, {"version": decode(REPORT_NAME, data, _Version).version}, REPORT_VERSION, IMAGE, HOST
        )
        document = decode(REPORT_NAME, data, _Document)
        _check(document)
    except DocumentError as error:
        raise DocumentError(error.message, error.hint or "the machine half writes it again") from error
    known = [each for each in document.conditions if each.type in TYPES]
    return Report(
        document.generation,
        printable(document.agent_version),
        tuple(map(_condition, known)),
        {Repair(name): count for name, count in to_builtins(document.repairs).items()},
        document.advertised_gpus,
        document.changed_files,
        document.publication,
        tuple(FabricAnswer(*astuple(each)) for each in document.fabric),
        printable(document.refused),
        tuple(f"{each.type}={each.status} ({each.reason})" for each in document.conditions if each not in known),
    )


def _condition(found: _Condition) -> Condition:
    # Only a fault can concern some GPUs.
    gpus = found.gpus if found.status is Status.FALSE else ()
    return Condition(ConditionType(found.type), found.status, found.reason, printable(found.message), gpus=gpus)


def _check(document: _Document) -> None:
    """Check what the types above cannot express. Raises DocumentError."""
    texts = {
        "agent_version": document.agent_version,
        "refused": document.refused,
        **{f"conditions[{index}].message": each.message for index, each in enumerate(document.conditions)},
        **{f"cdi_devices[{index}]": name for index, name in enumerate(document.cdi_devices)},
    }
    for key, text in texts.items():
        # `isprintable` refuses Unicode's format characters too, which can make one text look like another.
        if not text.isprintable():
            raise DocumentError(f"{REPORT_NAME}: key {key} has unprintable characters: {text[:80]!a}")
    for index, path in enumerate(document.changed_files):
        if not PATH.fullmatch(path):
            raise DocumentError(
                f"{REPORT_NAME}: key changed_files[{index}] has a path that may not be listed: {path[:80]!a}"
            )
    lists = {
        "conditions: a type": [each.type for each in document.conditions],
        "cdi_devices: a name": document.cdi_devices,
        "changed_files: a path": document.changed_files,
        "fabric: a GPU": [each.gpu for each in document.fabric],
    }
    for what, items in lists.items():
        if len(set(items)) != len(items):
            raise DocumentError(f"{REPORT_NAME}: key {what} appears twice")
    # The type cannot have these limits, because msgspec's limits have at most 63 bits.
    if document.publication and not all(0 <= each < 2**64 for each in document.publication):
        raise DocumentError(f"{REPORT_NAME}: key publication must be two whole numbers from 0 to {2**64 - 1}")


def read_report(machine: MachineFacts) -> Report | Absent | Broken | Unseen:
    """Return the machine's report, parsed; Broken if it is malformed."""
    if isinstance(machine.report, Absent | Broken | Unseen):
        return machine.report
    try:
        return parse_report(machine.report)
    except DocumentError as error:
        return Broken(str(error))
