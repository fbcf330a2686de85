"""containerd's version, asked of its program once, and which CDI specs it takes."""

import posixpath
from dataclasses import astuple

from agent.errors import DocumentError
from agent.inside.containerd import parse_version
from agent.inside.notes import Notes
from agent.inside.runtime_active import REPLACED, UNIT, program_identity, show
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


def as_containerd_takes(system: System, notes: Notes, spec: object) -> tuple[object, tuple[str, ...]]:
    """A settled CDI spec without what this machine's containerd does not know, and a remark where that changes it.

    Raises CommandError or OSError.
    """
    # Only here: agent.inside.runtime asks for the version alone.
    from agent.inside.cdi_form import without_groups

    groupless = without_groups(spec)
    if groupless == spec or not (version := _without_groups(system, notes)):
        return spec, ()
    return groupless, (
        f"containerd {version} does not know additionalGids ({_text(GROUPS_SINCE)} does), so that they "
        "are left out: containers that do not run as root need the groups of the nodes as supplementalGroups",
    )


def _without_groups(system: System, notes: Notes) -> str:
    """The version of a containerd that does not know additionalGids, else "".

    What is published has to suit the program, and the containerd that runs on after its program was replaced.
    """
    program = system.find_program("containerd")
    if program is None or not system.is_file(program):
        return ""
    try:
        version = containerd_version(system, notes, program)
        if version < GROUPS_SINCE:
            return _text(version)
    except DocumentError:
        # Somebody's own build. RuntimeConfigured says so.
        pass
    return _running_without_groups(system, notes, program)


def _running_without_groups(system: System, notes: Notes, program: str) -> str:
    """The same of a containerd that runs and is not of that file; noted, as its end changes the answer."""
    process = show(system, "MainPID").get("MainPID", "0")
    # The kernel goes from here to the file that runs, also to one that was removed (proc(5)).
    running = f"/proc/{process}/exe"
    identity = program_identity(system, running)
    if identity is None or identity == program_identity(system, program):
        return ""
    if not posixpath.basename(system.read_link(running) or "").startswith("containerd"):
        # A shell that waits for it, for example, which is not to be asked.
        return ""
    try:
        version = parse_version(system.run(running, "--version", timeout=10))
    except DocumentError:
        return ""
    if version >= GROUPS_SINCE:
        return ""
    notes.save(REPLACED, {"running": running, "identity": identity})
    return f"{_text(version)} (it still runs: restart {UNIT})"


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
