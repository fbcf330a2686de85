"""The last grant published to a machine, recorded where no machine can write.

Root in a machine can rewrite its handoff: so the host half publishes the handoff and never reads it to decide anything.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from agent.model.json_document import accept_version, get, mapping, parse_object, strings
from agent.model.paths import GRANTED_NAME

VERSION = 1


@dataclass(frozen=True, slots=True)
class Granted:
    """The grant in one generation of the handoff."""

    generation: str
    gpus: tuple[str, ...]
    """PCI addresses, including detached GPUs that its processes may use until they end."""
    driver_roots: Mapping[str, int]
    """Indices by vendor."""


def render_granted(granted: Granted) -> bytes:
    """Return the document."""
    return json.dumps({"version": VERSION, **asdict(granted)}, indent=1).encode() + b"\n"


def parse_granted(data: bytes) -> Granted:
    """Read the document. Raises DocumentError, which names the key."""
    document = parse_object(GRANTED_NAME, data)
    accept_version(GRANTED_NAME, document, (VERSION,))
    return Granted(
        generation=get(GRANTED_NAME, document, "generation", str),
        gpus=strings(GRANTED_NAME, document, "gpus"),
        driver_roots=mapping(GRANTED_NAME, document, "driver_roots", int),
    )
