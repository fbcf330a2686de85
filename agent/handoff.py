"""The contract between the two halves: versioned JSON, read and written with the standard library alone.

The host half publishes a Handoff, the machine half answers with a report: a JSON object of the keys `version`,
`generation`, `boot_id`, `agent_version`, `conditions` (objects of `type`, `status`, `reason`, `message`) and
`cdi_devices` (names).
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from agent.conditions import Condition
from agent.errors import DocumentError
from agent.paths import HANDOFF_NAME

VERSION = 1
ACCEPTED_VERSIONS = (1,)
"""N and N-1, once there is an N-1."""
SIZE_LIMIT = 1 << 20
"""Bytes; both documents stay far below it."""

MESSAGE_LIMIT = 2000
"""Characters of a condition's message."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True, order=True)
class GrantedDevice:
    """A node that the machine has, with the numbers that it must have there."""

    path: str
    kind: str
    major: int
    minor: int
    pci_address: str = ""


@dataclass(frozen=True, slots=True, order=True)
class GrantedFile:
    """A file of the driver root: its path below that root, and where it points if it is a link."""

    target: str
    link: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What one vendor's part of the machine half is to set up."""

    vendor: str
    gpus: tuple[str, ...]
    devices: tuple[GrantedDevice, ...]
    driver_version: str = ""
    driver_root: str = ""
    """Absolute path in the machine, such as `/run/host-nvidia/0`; empty without user-space files."""
    files: tuple[GrantedFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Handoff:
    """Everything that the machine half acts on."""

    machine: str
    architecture: str
    requests: tuple[Request, ...]
    default_runtime: bool = False
    """Whether containerd's default runtime is to be the vendor's."""

    @property
    def generation(self) -> str:
        """A digest of the content, so that equal content is never a new generation."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def render_handoff(handoff: Handoff) -> bytes:
    """The document; the same handoff gives the same bytes."""
    document = {"version": VERSION, "generation": handoff.generation, **asdict(handoff)}
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def parse_handoff(data: bytes) -> Handoff:
    """Raises DocumentError, which names the key that is missing, unknown or of another type."""
    where = HANDOFF_NAME
    document = _object(where, _json(where, data))
    version = _get(where, document, "version", int)
    if version not in ACCEPTED_VERSIONS:
        raise DocumentError(
            f"{where}: version {version} is not understood (this half knows {', '.join(map(str, ACCEPTED_VERSIONS))})",
            "bring the agent in the image and the one on the host to the same release",
        )
    handoff = Handoff(
        machine=_get(where, document, "machine", str),
        architecture=_get(where, document, "architecture", str),
        requests=_tuple(where, document, "requests", _request),
        default_runtime=_get(where, document, "default_runtime", bool),
    )
    if _get(where, document, "generation", str) != handoff.generation:
        raise DocumentError(f"{where}: key generation does not fit the content", "the host half will publish it anew")
    return handoff


def render_report(
    generation: str, conditions: tuple[Condition, ...], cdi_devices: tuple[str, ...], boot_id: str, agent_version: str
) -> bytes:
    """The machine half's answer to the handoff of that generation."""
    document = {
        "version": VERSION,
        "generation": generation,
        "boot_id": boot_id,
        "agent_version": agent_version,
        "conditions": [
            {"type": each.type, "status": each.status, "reason": each.reason, "message": one_line(each.message)}
            for each in conditions
        ],
        "cdi_devices": list(cdi_devices),
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def one_line(text: str) -> str:
    """What a condition's message may hold: the words of a tool's output without line breaks and control characters."""
    return "".join(each if each.isprintable() else " " for each in " ".join(text.split()))[:MESSAGE_LIMIT]


def _request(where: str, document: dict[str, Any]) -> Request:
    return Request(
        vendor=_get(where, document, "vendor", str),
        gpus=_strings(where, document, "gpus"),
        devices=_tuple(where, document, "devices", _device),
        driver_version=_get(where, document, "driver_version", str),
        driver_root=_get(where, document, "driver_root", str),
        files=_tuple(where, document, "files", _file),
    )


def _device(where: str, document: dict[str, Any]) -> GrantedDevice:
    return GrantedDevice(
        path=_get(where, document, "path", str),
        kind=_get(where, document, "kind", str),
        major=_get(where, document, "major", int),
        minor=_get(where, document, "minor", int),
        pci_address=_get(where, document, "pci_address", str),
    )


def _file(where: str, document: dict[str, Any]) -> GrantedFile:
    return GrantedFile(target=_get(where, document, "target", str), link=_get(where, document, "link", str))


def _json(where: str, data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where}: not JSON: {error}") from error


def _object(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DocumentError(f"{where}: an object is needed, not {type(value).__name__}")
    return value


def _get(where: str, document: dict[str, Any], key: str, kind: type[V]) -> V:
    if key not in document:
        raise DocumentError(f"{where}: key {key} is missing")
    value = document[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DocumentError(f"{where}: key {key} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _tuple(where: str, document: dict[str, Any], key: str, parse: Callable[[str, dict[str, Any]], V]) -> tuple[V, ...]:
    items = _get(where, document, key, list)
    return tuple(
        parse(f"{where}: {key}[{index}]", _object(f"{where}: {key}[{index}]", item)) for index, item in enumerate(items)
    )


def _strings(where: str, document: dict[str, Any], key: str) -> tuple[str, ...]:
    items = _get(where, document, key, list)
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise DocumentError(f"{where}: key {key}[{index}] must be str, not {type(item).__name__}")
    return tuple(items)
