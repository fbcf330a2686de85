"""Writes our part of containerd's configuration, reads it back, and undoes the change if containerd rejects it."""

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
    """The new texts of the main file and the drop-in (None: the file stays), and what the result is compared with."""

    main: bytes | None
    drop_in: bytes | None
    baseline: Table
    """containerd's dump without the drop-in."""
    behind: tuple[str, ...]
    """Files that containerd loads after the drop-in."""
    document: Table
    """The content of the drop-in."""
    version: tuple[int, ...]
    """The version of the containerd that reads the files."""


@dataclass(frozen=True, slots=True)
class Places:
    """Paths of our part of containerd's configuration."""

    drop_in: str
    former: tuple[str, ...]
    """Earlier paths of the drop-in, where it must be removed."""


def write_and_read_back(
    context: Context, vendor: MachineVendor, places: Places, wanted: Wanted, before: dict[str, bytes | None]
) -> str:
    """Write the files that differ. Return what is wrong with the result; empty if it is right.

    Raises AgentError or OSError if the result is unknown, for example because of a full disk or a time limit. If the
    result is wrong or unknown, the files are restored.
    """
    notes, drop_in = context.notes, places.drop_in
    written = {path: text for path, text in ((drop_in, wanted.drop_in), (MAIN, wanted.main)) if text is not None}
    # Old files are removed last, so that a containerd that starts meanwhile has the handler.
    changes: dict[str, bytes | None] = {**written, **{path: None for path in places.former if before[path] is not None}}
    noted, effective = notes.load(CHANGED), ""
    try:
        if changes:
            context.owned.claim(drop_in)
            # Noted before the first write: if this run is killed, later runs know that containerd must load the files.
            note_change(notes)
        files.put(context.system, changes)
        with_ours = files.effective(context.system, MAIN, wanted.version)
        # The digest omits the list of imports, which containerd 1.7 prints in a random order (a map in Go).
        effective = digest(json.dumps(with_ours | {"imports": []}, sort_keys=True, default=str).encode())
        default = context.handoff.default_runtime
        found = tables.problems(wanted.baseline, with_ours, wanted.document, vendor.handler, default=default)
        faults = "; ".join(found)
        if faults and wanted.behind:
            faults += f"; loaded after {drop_in}, and may override it: {', '.join(wanted.behind)}"
    except (ExitCodeError, DocumentError) as error:
        faults = str(error)
    except (AgentError, OSError):
        _restore(context, changes, before, noted)
        raise
    if faults:
        _restore(context, changes, before, noted)
        return f"the drop-in has no effect: {faults}" + (f"; restored {', '.join(changes)}" if changes else "")
    if changes:
        # Noted again: a containerd that started during the change may have read one new file without the other.
        note_change(notes, effective)
    elif unfinished(notes):
        # The killed run's time stays, and the digest is added: a containerd that has this result needs no restart.
        notes.save(CHANGED, {**noted, "effective": effective})
    for path in places.former:
        context.owned.remove(path)
    return ""


def _restore(context: Context, changes: Iterable[str], before: dict[str, bytes | None], noted: dict[str, Any]) -> None:
    files.put(context.system, {path: before[path] for path in reversed(tuple(changes))})
    context.notes.save(CHANGED, noted)


def digest(content: bytes | None) -> str:
    """Return a digest of the content; empty if there is no file."""
    return "" if content is None else hashlib.sha256(content).hexdigest()
