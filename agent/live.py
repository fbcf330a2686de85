"""What a running machine was given of its settings: what it started with, and what has changed in it since.

Kept in /run by the host half. A start of the machine makes it anew; without it nothing is known of the machine.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from agent.documents import accept_version, as_object, get, parse_object, strings
from agent.errors import DocumentError
from agent.identity import DeviceNumber
from agent.paths import LIVE_NAME

VERSION = 1


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """As a goal, what the machine should have; as a fact, what it has."""

    fixed: str
    """Digest of the settings that only a restart of the machine changes."""
    allow: tuple[str, ...]
    """The whole DeviceAllow= list of its unit, in its order."""
    nodes: Mapping[str, DeviceNumber]
    """What is bound, by path."""


def render_live(live: LiveSettings) -> bytes:
    """The document."""
    nodes = {
        path: [number.major, number.minor, number.mode, number.uid, number.gid] for path, number in live.nodes.items()
    }
    document = {"version": VERSION, "fixed": live.fixed, "allow": list(live.allow), "nodes": nodes}
    return json.dumps(document, indent=1).encode() + b"\n"


def parse_live(data: bytes) -> LiveSettings:
    """Raises DocumentError, which names the key."""
    document = parse_object(LIVE_NAME, data)
    accept_version(LIVE_NAME, document, (VERSION,))
    nodes = as_object(f"{LIVE_NAME}: nodes", get(LIVE_NAME, document, "nodes", dict))
    return LiveSettings(
        fixed=get(LIVE_NAME, document, "fixed", str),
        allow=strings(LIVE_NAME, document, "allow"),
        nodes={path: _number(path, numbers) for path, numbers in nodes.items()},
    )


def _number(path: str, numbers: object) -> DeviceNumber:
    match numbers:
        case [int(major), int(minor), int(mode), int(uid), int(gid)]:
            return DeviceNumber(major, minor, mode, uid, gid)
        case _:
            raise DocumentError(f"{LIVE_NAME}: key nodes[{path[:100]!a}] must be five whole numbers")
