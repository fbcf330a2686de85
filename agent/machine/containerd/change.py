"""Writes our part of containerd's configuration, reads it back, and undoes what containerd did not accept."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agent.machine.containerd import files, tables
from agent.machine.containerd.active import CHANGED, note_change, unfinished
from agent.machine.containerd.tables import MAIN, Table
from agent.machine.context import Context
from agent.model.errors import AgentError, DocumentError, ExitCodeError
from agent.vendors.machine_vendor import MachineVendor


@dataclass(frozen=True, slots=True)
class Wanted:
    """Texts of the two files (None: leave as it is), and what containerd loads with them."""

    main: bytes | None
    drop_in: bytes | None
    baseline: Table
    """The dump of the main file without the drop-in."""
    behind: tuple[str, ...]
    """Files that containerd loads after the drop-in."""
    document: Table
    """What the drop-in must contain."""
    version: tuple[int, ...]
    """Version of the containerd that reads it."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where our part of containerd's configuration goes."""

    drop_in: str
    former: tuple[str, ...]
    """Its earlier paths, where it is removed."""


def write_and_read_back(
    context: Context, vendor: MachineVendor, places: Places, wanted: Wanted, before: dict[str, bytes | None]
) -> str:
    """Write what differs. Return what is wrong with the result, after restoring the files, or "".

    Raises AgentError or OSError, after restoring too, if the result is unknown: a full disk, a time limit.
    """
    notes, drop_in = context.notes, places.drop_in
    written = {path: text for path, text in ((drop_in, wanted.drop_in), (MAIN, wanted.main)) if text is not None}
    # Remove the old file last, so that a containerd that starts meanwhile has the handler.
    changes: dict[str, bytes | None] = {**written, **{path: None for path in places.former if before[path] is not None}}
    noted, effective = notes.load(CHANGED), ""
    try:
        if changes:
            context.owned.claim(drop_in)
            # Before the first write, so that a run killed in between leaves no files that containerd never loads.
            note_change(notes)
        files.put(context.system, changes)
        with_ours = files.effective(context.system, MAIN, wanted.version)
        # Without the list of files, which containerd 1.7 prints in a different order each time (a map of Go's).
        effective = digest(json.dumps(with_ours | {"imports": []}, sort_keys=True, default=str).encode())
        default = context.handoff.default_runtime
        found = tables.problems(wanted.baseline, with_ours, wanted.document, vendor.handler, default=default)
        faults = "; ".join(found)
        if faults and wanted.behind:
            faults += f"; loaded after {drop_in}, and may override it: {', '.join(wanted.behind)}"
    except (ExitCodeError, DocumentError) as error:
        faults = str(error)
    except (AgentError, OSError):
        _put_back(context, changes, before, noted)
        raise
    if faults:
        _put_back(context, changes, before, noted)
        return f"the drop-in has no effect: {faults}" + (f"; restored {', '.join(changes)}" if changes else "")
    if changes:
        # Check again: a containerd that started since may have read the first file without the second.
        note_change(notes, effective)
    elif unfinished(notes):
        # A containerd that already runs with the same configuration needs no restart.
        notes.save(CHANGED, {**noted, "effective": effective})
    for path in places.former:
        context.owned.remove(path)
    return ""


def _put_back(context: Context, changes: Iterable[str], before: dict[str, bytes | None], noted: dict[str, Any]) -> None:
    files.put(context.system, {path: before[path] for path in reversed(tuple(changes))})
    context.notes.save(CHANGED, noted)


def digest(content: bytes | None) -> str:
    """Return a digest of the content; empty if there is no file."""
    return "" if content is None else hashlib.sha256(content).hexdigest()
