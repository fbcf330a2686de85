"""What a machine was granted last, noted where no machine can write.

Root in a machine can rewrite its handoff: it is published, and never read to decide something.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from agent.documents import accept_version, get, mapping, parse_object, strings
from agent.paths import GRANTED_NAME

VERSION = 1


@dataclass(frozen=True, slots=True)
class Granted:
    """By one generation of the handoff."""

    generation: str
    gpus: tuple[str, ...]
    """PCI addresses; also of those that are being drained, which are the machine's until their users have ended."""
    driver_roots: Mapping[str, int]
    """Indices by vendor."""


def render_granted(granted: Granted) -> bytes:
    """The document."""
    return json.dumps({"version": VERSION, **asdict(granted)}, indent=1).encode() + b"\n"


def parse_granted(data: bytes) -> Granted:
    """Raises DocumentError, which names the key."""
    document = parse_object(GRANTED_NAME, data)
    accept_version(GRANTED_NAME, document, (VERSION,))
    return Granted(
        generation=get(GRANTED_NAME, document, "generation", str),
        gpus=strings(GRANTED_NAME, document, "gpus"),
        driver_roots=mapping(GRANTED_NAME, document, "driver_roots", int),
    )
