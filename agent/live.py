"""What a running machine was given of its settings: what it started with, and what has changed in it since.

Kept in /run by the host half. A start of the machine makes it anew; without it nothing is known of the machine.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from agent.documents import accept_version, get, mapping, parse_object, strings
from agent.paths import LIVE_NAME

VERSION = 1
READ_ONLY, READ_WRITE = "ro:", "rw:"


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """As a goal, what the machine should have; as a fact, what it has."""

    fixed: str
    """Digest of the settings that only a restart of the machine changes."""
    allow: tuple[str, ...]
    """The whole DeviceAllow= list of its unit, in its order."""
    nodes: Mapping[str, str]
    """What is bound, by path: `major:minor`; of a directory READ_ONLY or READ_WRITE, and its inode number.

    Mode and owner are the very inode's, and change with the host's node.
    """
    rebound: str = ""
    """The generation of the handoff for which all nodes were bound anew, as the machine said that it lacked some."""
    unsure: bool = False
    """The last change of `allow` may not have been made, so that it has to be made again; `allow` has what may be."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """By device of `allow`, what had its number then: a GPU's PCI address, or the path of a node of no GPU alone."""
    mounts: tuple[str, ...] = ()
    """Where what its settings mount is: what was not there when it started is not."""


def render_live(live: LiveSettings) -> bytes:
    """The document."""
    return json.dumps({"version": VERSION, **asdict(live)}, indent=1).encode() + b"\n"


def parse_live(data: bytes) -> LiveSettings:
    """Raises DocumentError, which names the key."""
    document = parse_object(LIVE_NAME, data)
    accept_version(LIVE_NAME, document, (VERSION,))
    return LiveSettings(
        fixed=get(LIVE_NAME, document, "fixed", str),
        allow=strings(LIVE_NAME, document, "allow"),
        nodes=mapping(LIVE_NAME, document, "nodes", str),
        rebound=get(LIVE_NAME, document, "rebound", str),
        # Not there in what an older version noted of a machine that still runs.
        unsure=get(LIVE_NAME, {"unsure": False} | document, "unsure", bool),
        owners=mapping(LIVE_NAME, {"owners": {}} | document, "owners", str),
        mounts=strings(LIVE_NAME, {"mounts": []} | document, "mounts"),
    )
