"""Notes in which directories containerd looks for CDI specifications: its configuration may name further ones."""

import contextlib

from agent.machine.containerd.nested import Table
from agent.machine.containerd.tables import cri_of
from agent.machine.notes import Notes

NOTE = "containerd-cdi-directories"
LIMIT = 32
"""The largest number of directories that are noted."""


def note_directories(notes: Notes, effective: Table) -> None:
    """Note the directories in containerd's effective configuration. An error does not matter: it is read back again."""
    listed = cri_of(effective).get("cdi_spec_dirs")
    with contextlib.suppress(OSError):
        notes.save(NOTE, {"directories": [str(each) for each in listed[:LIMIT]] if isinstance(listed, list) else []})


def directories_are_noted(notes: Notes) -> bool:
    return bool(notes.load(NOTE))


def noted_directories(notes: Notes) -> tuple[str, ...]:
    """Return the directories in containerd's order, in which later ones take precedence; none if they are unknown."""
    listed = notes.load(NOTE).get("directories")
    # Another release may have noted another type since the boot of the machine.
    return tuple(each for each in listed if isinstance(each, str)) if isinstance(listed, list) else ()
