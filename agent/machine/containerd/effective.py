"""Notes what other steps need of containerd's effective configuration, so that they need not read it back."""

import contextlib

from agent.machine.containerd.nested import Table, at
from agent.machine.containerd.tables import cri_of
from agent.machine.notes import Notes

NOTE = "containerd-effective"
LIMIT = 32
"""The largest number of directories that are noted."""


def note_effective(notes: Notes, effective: Table) -> None:
    """Note the directories of CDI specifications and the socket. An error does not matter: they are read back again."""
    listed = cri_of(effective).get("cdi_spec_dirs")
    # Version 4 of the format has the socket in a table of its own (serviceMigrate in containerd's config.go).
    server = at(effective, "plugins", "io.containerd.server.v1.grpc") or at(effective, "grpc")
    with contextlib.suppress(OSError):
        notes.save(
            NOTE,
            {
                "directories": [str(each) for each in listed[:LIMIT]] if isinstance(listed, list) else [],
                "address": str(server.get("address", "")),
            },
        )


def effective_is_noted(notes: Notes) -> bool:
    return bool(notes.load(NOTE))


def noted_directories(notes: Notes) -> tuple[str, ...]:
    """Return the directories in containerd's order, in which later ones take precedence; none if they are unknown."""
    return tuple(notes.load(NOTE).get("directories", ()))


def noted_address(notes: Notes) -> str:
    """Return the path of containerd's socket; empty if it is unknown."""
    return str(notes.load(NOTE).get("address", ""))
