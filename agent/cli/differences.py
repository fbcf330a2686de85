"""Shows what a step would change in a file, as a unified difference: `unbounded-agent plan --diff`."""

import difflib
from collections.abc import Iterator

from agent.model.actions import Action, RemoveFile, WriteFile
from agent.model.facts import Absent, Broken, Unseen
from agent.model.text import printable
from agent.system.files import System
from agent.system.seen import read_seen

PUBLIC = 0o004
"""The permission bit that lets every user read a file. Content that is written without this bit is not shown:
it may be secret."""
MISSING = "/dev/null"
"""Stands for a file that does not exist, as in the output of diff(1)."""


def difference(action: Action, system: System) -> Iterator[str]:
    """Yield the lines of the difference. If there is none to show, yield one line that says why.

    Yield nothing for a step that neither writes nor removes a file.
    """
    if not isinstance(action, WriteFile | RemoveFile):
        return
    if isinstance(action, WriteFile) and not action.mode & PUBLIC:
        yield f"# {action.path}: not shown, because not every user may read it (mode {action.mode:04o})"
        return
    before = read_seen(system.read, action.path)
    if isinstance(before, Broken | Unseen):
        yield f"# cannot show the difference: {before.why}"
        return
    after = action.content if isinstance(action, WriteFile) else None
    yield from _unified(None if isinstance(before, Absent) else before, after, action.path)


def _unified(before: bytes | None, after: bytes | None, path: str) -> Iterator[str]:
    old, new = MISSING if before is None else path, MISSING if after is None else path
    removed, added = ((each or b"").decode(errors="replace").splitlines() for each in (before, after))
    if before is not None and removed == added:
        yield f"# {path}: the same content, written again"
        return
    yield from map(printable, difflib.unified_diff(removed, added, old, new, lineterm=""))
