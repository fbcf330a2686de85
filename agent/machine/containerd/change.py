"""Writes the agent's part of containerd's configuration, reads it back, and undoes the change if it is wrong."""

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from agent.machine.containerd import files, tables
from agent.machine.containerd.active import (
    CHANGED,
    change_was_interrupted,
    note_change,
    note_result,
    writing_was_interrupted,
)
from agent.machine.containerd.effective import note_effective
from agent.machine.containerd.formats import MAIN
from agent.machine.containerd.nested import Table
from agent.machine.context import Context
from agent.model.digest import sha256
from agent.model.errors import AgentError, DocumentError, ExitCodeError
from agent.vendors.machine_vendor import MachineVendor

RESTORED = "restored"
"""Stands for the digest of the effective configuration in the note about the change of a killed run, after a later run
has restored the files that it found."""


class PlannedChange(NamedTuple):
    """The new contents of the main file and the drop-in, and what the result is compared with."""

    main: bytes | None
    """The new main file; None if it stays as it is."""
    drop_in: bytes | None
    """The new drop-in; None if it stays as it is."""
    baseline: Table
    """containerd's effective configuration without the drop-in."""
    loaded_later: tuple[str, ...]
    """Files that containerd loads after the drop-in."""
    document: Table
    """The content of the drop-in."""
    version: tuple[int, ...]
    """The version of the containerd that reads the files."""
    pattern: str
    """The main file's import that covers the drop-in."""
    mixture: str
    """Why containerd does not read its files as they are written; empty if it does."""


class DropInPaths(NamedTuple):
    """Paths of the agent's part of containerd's configuration."""

    drop_in: str
    former: tuple[str, ...]
    """Earlier paths of the drop-in, where it must be removed."""


def write_and_read_back(
    context: Context,
    vendor: MachineVendor,
    paths: DropInPaths,
    planned: PlannedChange,
    before: dict[str, bytes | None],
    digest_inputs: Callable[[], str],
) -> tuple[str, str]:
    """Write the files that differ, and read back the result.

    Return what is wrong with the result (empty if it is right), and the digest of what the result depends on.
    `digest_inputs` computes this digest. It is called before the result is read back, so that the next run notices if
    somebody changes the files after the call.

    `before` has the contents of MAIN, the drop-in and its former paths; None for a file that does not exist. If the
    result is wrong or unknown, the files are restored. If the result is wrong and restoring cannot help, because the
    drop-in that this run found is faulty too, it is emptied if containerd may not even start with it. Raises AgentError
    or OSError if the result is unknown, for example because of a full disk or a time limit.
    """
    notes, drop_in = context.notes, paths.drop_in
    written = {
        path: content for path, content in ((drop_in, planned.drop_in), (MAIN, planned.main)) if content is not None
    }
    # Former drop-ins are removed last, so that a containerd that starts meanwhile has the handler from one of the
    # files.
    changes: dict[str, bytes | None] = {**written, **{path: None for path in paths.former if before[path] is not None}}
    noted, unchecked = notes.load(CHANGED), change_was_interrupted(notes)
    try:
        result = _attempt(context, vendor, drop_in, planned, changes, digest_inputs)
    except (AgentError, OSError):
        _restore(context, changes, before, noted)
        raise
    if result.faults:
        _restore(context, changes, before, noted)
        done = [f"restored {', '.join(changes)}"] if changes else []
        suspect = before[drop_in] is not None and (unchecked or result.refused)
        if suspect and (not written or _is_refused(context, planned.version)):
            # The faulty drop-in was there before this run: either an earlier run was killed before it had checked its
            # change, or containerd has changed since that check. containerd works without the drop-in (`baseline`), but
            # may not even start with it. The drop-in is emptied, not removed, because containerd does not start if a
            # file that is imported by its path is missing.
            files.put(context.system, {drop_in: files.HEADER.encode()})
            notes.save(CHANGED, {})
            done.append(f"emptied {drop_in}")
        elif unchecked:
            # Otherwise, each later run would try again.
            note_result(notes, RESTORED)
        return "; ".join([f"the drop-in does not work: {result.faults}", *done]), result.inputs
    if change_was_interrupted(notes):
        # The noted change is this run's, or that of an earlier run that was killed before it knew the result.
        note_result(notes, result.effective)
    for path in paths.former:
        context.owned.remove(path)
    return "", result.inputs


class _Result(NamedTuple):
    """What came of a change."""

    inputs: str
    """The digest of what the result depends on; empty if it is unknown."""
    faults: str
    """What is wrong with the result; empty if it is right."""
    refused: bool = False
    """containerd refused its configuration."""
    effective: str = ""
    """The digest of the effective configuration; empty if containerd printed none."""


def _attempt(
    context: Context,
    vendor: MachineVendor,
    drop_in: str,
    planned: PlannedChange,
    changes: dict[str, bytes | None],
    digest_inputs: Callable[[], str],
) -> _Result:
    """Make the changes, and read back the result. Raises AgentError or OSError if the result is unknown."""
    inputs = ""
    try:
        if changes or writing_was_interrupted(context.notes):
            context.owned.claim(drop_in)
            # Noted before the first write: if this run is killed, later runs know that containerd must load the files.
            note_change(context.notes, written=False)
            files.put(context.system, changes)
            # Noted again, with the present time: a containerd that started before the last write may have read only
            # some of the new files.
            note_change(context.notes, written=True)
        inputs = digest_inputs()
        resulting = files.effective_config(context.system, MAIN, planned.version)
    except (ExitCodeError, DocumentError) as error:
        return _Result(inputs, str(error), refused=isinstance(error, ExitCodeError))
    note_effective(context.notes, resulting)
    default = context.handoff.default_runtime
    faults = "; ".join(tables.problems(planned.baseline, resulting, planned.document, vendor.handler, default=default))
    if faults and planned.loaded_later:
        faults += f"; loaded after {drop_in}, and may override it: {', '.join(planned.loaded_later)}"
    if faults and planned.mixture:
        faults += f"; {planned.mixture}"
    # This digest leaves out the list of imports, which containerd 1.7 prints in a random order (a map in Go).
    effective = digest(json.dumps(resulting | {"imports": []}, sort_keys=True, default=str).encode())
    return _Result(inputs, faults, effective=effective)


def _restore(context: Context, changes: Iterable[str], before: dict[str, bytes | None], noted: dict[str, Any]) -> None:
    """Undo the changes in reverse order, and restore the note about the last change."""
    files.put(context.system, {path: before[path] for path in reversed(tuple(changes))})
    context.notes.save(CHANGED, noted)


def _is_refused(context: Context, version: tuple[int, ...]) -> bool:
    """Return whether containerd refuses its configuration as it is now. Raises CommandError."""
    try:
        files.effective_config(context.system, MAIN, version)
    except ExitCodeError:
        return True
    except DocumentError:
        pass
    return False


def digest(content: bytes | None) -> str:
    """Return a digest of the content; empty if there is no file."""
    return "" if content is None else sha256(content)
