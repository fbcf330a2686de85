"""containerd's version, asked of its program once, and which CDI specs it takes."""

from dataclasses import astuple

from agent.errors import DocumentError
from agent.inside.containerd import parse_version
from agent.inside.notes import Notes
from agent.system.files import System

NOTE = "containerd-version"
GROUPS_SINCE = (1, 7, 16)
"""The first with version 0.7 of the Container Device Interface's library. An older one skips the whole of a spec with
additionalGids, since that is of version 0.7.0."""


def containerd_version(system: System, notes: Notes, program: str) -> tuple[int, ...]:
    """Asked for once for each program file in a boot. Raises CommandError, DocumentError or OSError."""
    identity, noted = list(astuple(system.identity(program))), notes.load(NOTE)
    if noted.get("program") == identity and isinstance(noted.get("version"), list):
        return tuple(noted["version"])
    version = parse_version(system.run("containerd", "--version", timeout=10))
    notes.save(NOTE, {"program": identity, "version": list(version)})
    return version


def containerd_without_groups(system: System, notes: Notes) -> str:
    """The version of a containerd that does not know additionalGids, else "". Raises CommandError or OSError."""
    program = system.find_program("containerd")
    if program is None or not system.is_file(program):
        return ""
    try:
        version = containerd_version(system, notes, program)
    except DocumentError:
        # Somebody's own build. RuntimeConfigured says so.
        return ""
    return "" if version >= GROUPS_SINCE else ".".join(map(str, version))
