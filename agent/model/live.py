"""The settings that a running machine has: those it started with, and later changes.

The host half keeps this record in /run, and writes it again at each start of the machine. Without the record, the host
half does not know what the machine has.
"""

from collections.abc import Mapping

from msgspec import Struct, field

from agent.model.device_allow import DeviceAllow
from agent.model.paths import LIVE_NAME
from agent.model.typed_json import Format

READ_ONLY, READ_WRITE = "ro:", "rw:"


class LiveSettings(Struct, frozen=True):
    """In a goal, the settings that a machine should have; in facts, the settings that it has."""

    fixed: str
    """Digest of the settings that only a restart can change. It is empty if only one thing is known about these
    settings: that they differ from the goal's."""
    allow: tuple[DeviceAllow, ...]
    """The entries that the agent put into the DeviceAllow= list of the machine's unit, in order."""
    nodes: Mapping[str, str]
    """By path, the nodes and directories that are bound. The value of a node is `major:minor`; that of a directory is
    READ_ONLY or READ_WRITE, followed by the inode number. A bound node is the same inode as on the host, so its mode
    and owner need not be recorded."""
    rebound: str = ""
    """The generation of the handoff for which all nodes were bound again, because the machine reported some missing."""
    unsure: bool = False
    """The last change to `allow` may have failed and must be repeated. `allow` has every entry that may be in force."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """The owner of each device in `allow` when it was permitted: a GPU's PCI address, or the path of a shared node."""
    mounts: tuple[str, ...] = ()
    """Targets of the configured mounts that the machine has: those whose sources existed when the machine started."""
    withdrawn: tuple[str, ...] = ()
    """Nodes that were bound since the machine's start and are no longer granted, sorted. The machine half removes these
    nodes, but they stay in this list, because the host half does not learn that they are gone."""
    kept_since: float = 0.0
    """Since when `allow` has had permissions that are no longer granted, in seconds of CLOCK_MONOTONIC; 0 if it has
    no such permission. If several permissions lost their grant one after another, the time of the first one counts."""


_FORMAT = Format(LiveSettings, 1)


def render_live(live: LiveSettings) -> bytes:
    """Return the record as JSON."""
    return _FORMAT.render(live)


def parse_live(data: bytes) -> LiveSettings:
    """Return the settings in a record. Raises DocumentError, which names the key."""
    return _FORMAT.parse(LIVE_NAME, data)
