"""Finds the files that `up` put into this machine and that have changed since."""

import time
from typing import Any

from agent.machine.containerd.formats import MAIN
from agent.machine.context import Context
from agent.model.errors import DocumentError
from agent.model.handoff import SIZE_LIMIT
from agent.model.node_files import parse_node_files
from agent.model.paths import NODE_FILES
from agent.system.files import System

NOTE = "node-files"
DELAY = 45.0
"""Seconds between the first run after a boot and the first comparison. The kubelet's start waits for the first runs,
and computing the digests of Kubernetes' programs takes a third of a second. DELAY is less than the minute between two
runs of the timer, so the timer's next run compares."""


def changed_files(context: Context) -> tuple[str, ...]:
    """Return the paths of changed files, sorted. The list itself counts as changed if it cannot be used.

    Nothing is compared in the first DELAY seconds after a boot. A file is read again only if its identity has changed.
    Raises OSError.
    """
    system, notes = context.system, context.notes
    first_run, before = time.monotonic(), dict[str, Any]()
    match notes.load(NOTE):
        case {"first_run": float(first_run), "compared": dict(before)}:
            pass
        case _:
            # This is the first run after the boot.
            notes.save(NOTE, {"first_run": first_run, "compared": before})
    if time.monotonic() - first_run < DELAY:
        return ()
    try:
        listed = parse_node_files(NODE_FILES, system.read(NODE_FILES, SIZE_LIMIT))
    except (DocumentError, OSError):
        return (NODE_FILES,)
    # The agent itself may have added its import to this file, or may add it later.
    listed.pop(MAIN, None)
    compared = {path: _compared(path, *original, before.get(path), system) for path, original in listed.items()}
    notes.save(NOTE, {"first_run": first_run, "compared": compared})
    return tuple(sorted(path for path, result in compared.items() if not result or not result[-1]))


def _compared(path: str, digest: str, size: int, before: object, system: System) -> list[Any]:
    """Return the file's identity, and as last element whether its content is the original; [] if it cannot be read."""
    try:
        identity = system.identity(path)
        if isinstance(before, list) and before[:-1] == list(identity):
            return before
        # A file of another size is not read: it may be very large.
        return [*identity, identity.size == size and system.digest(path) == digest]
    except OSError:
        return []
