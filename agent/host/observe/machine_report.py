"""Parses a machine's report. The machine is not trusted: everything is bounded, and all texts are printable."""

from collections.abc import Hashable, Mapping
from typing import Annotated, Any, TypeVar

from msgspec import Struct, field
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import DocumentError
from agent.model.handoff import CHANGED_FILES_LIMIT, SIZE_LIMIT, Publication, Repair
from agent.model.node_files import PATH
from agent.model.paths import REPORT_NAME
from agent.model.text import printable

H = TypeVar("H", bound=Hashable)
KEYS = 16
"""Keys that an object inside a report may have: more than any of them has."""


class Report(Struct, frozen=True):
    """What the host half needs of the machine half's report on one generation of the handoff."""

    generation: str
    agent_version: str
    conditions: tuple[Condition, ...]
    """At most one condition of each type."""
    repairs: Mapping[Repair, int] = field(default_factory=dict)
    """How often each repair was made since the machine's boot; empty if the machine half does not count repairs."""
    advertised_gpus: int | None = None
    """How many of the granted GPUs the node offers to pods; None if the machine half does not say."""
    changed_files: tuple[str, ...] = ()
    """Files that differ from what `up` put into the machine."""
    publication: Publication | None = None
    """The publication of the handoff that the report answers; None if the machine half does not say."""


def _printable(text: str) -> str:
    # `isprintable` refuses Unicode's format characters too, which can make one text look like another.
    if not text.isprintable():
        raise ValueError(f"unprintable characters are not allowed: {text[:80]!a}")
    return printable(text)


def _distinct(items: list[H]) -> list[H]:
    if len(set(items)) != len(items):
        raise ValueError("an item appears twice")
    return items


def _with_few_keys(value: object) -> object:
    # Before pydantic looks at the keys: it makes errors of a kilobyte for each wrong one, also for the same one again.
    if isinstance(value, dict) and len(value) > KEYS:
        raise ValueError(f"more than {KEYS} keys")
    return value


Printable = AfterValidator(_printable)
FewKeys = BeforeValidator(_with_few_keys)
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9]{0,63}$")]
Name = Annotated[str, StringConstraints(max_length=255), Printable]
PathInMachine = Annotated[str, StringConstraints(pattern=f"^{PATH.pattern}$")]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Unsigned = Annotated[int, Field(strict=True, ge=0, lt=2**64)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class _Condition(_Model):
    type: ConditionType
    status: Status
    reason: Word
    message: Annotated[str, StringConstraints(max_length=2000), Printable]


class _Document(_Model):
    # Unknown keys, which a newer machine half may write, are ignored. Only the size of the whole report limits them.
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    version: Annotated[int, Field(strict=True, ge=1, le=1)]
    generation: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{0,64}$")]
    boot_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f-]{0,36}$")]
    agent_version: Annotated[str, StringConstraints(max_length=64), Printable]
    conditions: Annotated[list[Annotated[_Condition, FewKeys]], Field(max_length=len(ConditionType))]
    cdi_devices: Annotated[list[Name], Field(max_length=4096), AfterValidator(_distinct)]
    repairs: Annotated[dict[Repair, Count], FewKeys] = Field(default_factory=dict)
    advertised_gpus: Count | None = None
    changed_files: Annotated[list[PathInMachine], Field(max_length=CHANGED_FILES_LIMIT), AfterValidator(_distinct)] = []
    publication: tuple[Unsigned, Unsigned] | None = None


def parse_report(data: bytes) -> Report:
    """Parse a report. Raises DocumentError, which names the key."""
    if len(data) > SIZE_LIMIT:
        raise DocumentError(f"{REPORT_NAME}: larger than {SIZE_LIMIT} bytes")
    try:
        document = _Document.model_validate_json(data)
    except ValidationError as error:
        raise DocumentError(f"{REPORT_NAME}: {_sentence(error)}", "the machine half writes it again") from error
    conditions = tuple(Condition(each.type, each.status, each.reason, each.message) for each in document.conditions)
    if len({each.type for each in conditions}) != len(conditions):
        raise DocumentError(f"{REPORT_NAME}: conditions: a type appears twice", "the machine half writes it again")
    return Report(
        document.generation,
        document.agent_version,
        conditions,
        document.repairs,
        document.advertised_gpus,
        tuple(document.changed_files),
        Publication(*document.publication) if document.publication else None,
    )


def _sentence(error: ValidationError) -> str:
    """Return the first problem as a sentence.

    The sentence may quote a key or text that the machine controls, so it is short and printable ASCII.
    """
    first: Any = error.errors(include_input=False, include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])[:200]
    return f"{ascii(key)[1:-1] or 'the document'}: {ascii(first['msg'][:200])[1:-1]}"
