"""The settings that a running machine has: those it started with, and later changes.

The host half keeps them in /run. Each start of the machine writes them again; without them nothing is known of it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from agent.model.device_allow import DeviceAllow
from agent.model.json_document import accept_version, get, mapping, parse_object, strings
from agent.model.paths import LIVE_NAME

VERSION = 1
READ_ONLY, READ_WRITE = "ro:", "rw:"


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """As a goal, what the machine should have; as a fact, what it has."""

    fixed: str
    """Digest of the settings that only a restart of the machine changes; empty if they match no goal."""
    allow: tuple[DeviceAllow, ...]
    """The whole DeviceAllow= list of its unit, in order."""
    nodes: Mapping[str, str]
    """What is bound, by path: `major:minor`; for a directory READ_ONLY or READ_WRITE and its inode number.

    The host's node is the same inode, so mode and owner follow it.
    """
    rebound: str = ""
    """The generation of the handoff for which all nodes were bound again, because the machine reported some missing."""
    unsure: bool = False
    """The last change of `allow` may have failed and must be repeated; `allow` has what may be in force."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """By device in `allow`, its owner then: a GPU's PCI address, or the node's path if it belongs to no single GPU."""
    mounts: tuple[str, ...] = ()
    """Where its settings' mounts are: those whose source was missing at its start are not included."""


def render_live(live: LiveSettings) -> bytes:
    """Return the document."""
    document = {"version": VERSION, **asdict(live), "allow": [str(entry) for entry in live.allow]}
    return json.dumps(document, indent=1).encode() + b"\n"


def parse_live(data: bytes) -> LiveSettings:
    """Read the document. Raises DocumentError, which names the key."""
    document = parse_object(LIVE_NAME, data)
    accept_version(LIVE_NAME, document, (VERSION,))
    return LiveSettings(
        fixed=get(LIVE_NAME, document, "fixed", str),
        allow=tuple(map(DeviceAllow.parse, strings(LIVE_NAME, document, "allow"))),
        nodes=mapping(LIVE_NAME, document, "nodes", str),
        rebound=get(LIVE_NAME, document, "rebound", str),
        # Missing in the record that an older version wrote of a machine that still runs.
        unsure=get(LIVE_NAME, {"unsure": False} | document, "unsure", bool),
        owners=mapping(LIVE_NAME, {"owners": {}} | document, "owners", str),
        mounts=strings(LIVE_NAME, {"mounts": []} | document, "mounts"),
    )
