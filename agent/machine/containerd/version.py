"""Finds containerd's version by one call of its program, and which CDI specifications it takes."""

import posixpath
from dataclasses import astuple

from agent.machine.containerd.active import REPLACED, UNIT, program_identity, show
from agent.machine.containerd.tables import parse_version
from agent.machine.context import Context
from agent.model.errors import DocumentError

NOTE = "containerd-version"
GROUPS_SINCE = (1, 7, 16)
"""The first with version 0.7 of the Container Device Interface's library. An older one skips any specification with
additionalGids entirely, because they came with version 0.7.0."""


def containerd_version(context: Context, program: str) -> tuple[int, ...]:
    """Ask each program file once in a boot. Raises CommandError, DocumentError or OSError."""
    system, notes = context.system, context.notes
    identity, noted = list(astuple(system.identity(program))), notes.load(NOTE)
    if noted.get("program") == identity and isinstance(noted.get("version"), list):
        return tuple(noted["version"])
    version = parse_version(system.run("containerd", "--version", timeout=10))
    notes.save(NOTE, {"program": identity, "version": list(version)})
    return version


def known_version(context: Context, program: str) -> tuple[int, ...]:
    """Return the same; () for a custom build that reports no version."""
    try:
        return containerd_version(context, program)
    except DocumentError:
        return ()


def as_containerd_takes(context: Context, spec: object) -> tuple[object, tuple[str, ...]]:
    """Return a settled CDI specification without what this machine's containerd does not know, and a remark on changes.

    Raises CommandError or OSError.
    """
    # Imported here: agent.machine.containerd.configure needs only the version.
    from agent.vendors.cdi.normalise import without_groups

    groupless = without_groups(spec)
    if groupless == spec or not (version := _without_groups(context)):
        return spec, ()
    return groupless, (
        f"containerd {version} does not know additionalGids ({_text(GROUPS_SINCE)} does), so they are left out: "
        "containers that do not run as root need the nodes' groups as supplementalGroups",
    )


def _without_groups(context: Context) -> str:
    """Return the version of a containerd that does not know additionalGids, else "".

    A specification must suit both the program and a containerd that still runs after its program was replaced.
    """
    program = context.system.find_program("containerd")
    if program is None or not context.system.is_file(program):
        return ""
    try:
        version = containerd_version(context, program)
        if version < GROUPS_SINCE:
            return _text(version)
    except DocumentError:
        # A custom build. RuntimeConfigured says so.
        pass
    return _running_without_groups(context, program)


def _running_without_groups(context: Context, program: str) -> str:
    """Return the same for a running containerd that is not of that file; noted, as its end changes the answer."""
    system = context.system
    process = show(system, "MainPID").get("MainPID", "0")
    # The kernel leads from here to the running file, even if it was removed (proc(5)).
    running = f"/proc/{process}/exe"
    identity = program_identity(system, running)
    if identity is None or identity == program_identity(system, program):
        return ""
    if not posixpath.basename(system.read_link(running) or "").startswith("containerd"):
        # For example a shell that waits for it, which is not to be run.
        return ""
    try:
        version = parse_version(system.run(running, "--version", timeout=10))
    except DocumentError:
        return ""
    if version >= GROUPS_SINCE:
        return ""
    context.notes.save(REPLACED, {"running": running, "identity": identity})
    return f"{_text(version)} (it still runs: restart {UNIT})"


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
