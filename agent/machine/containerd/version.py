"""Finds containerd's version, and adapts CDI specifications to it."""

import posixpath

from agent.machine.containerd.active import REPLACED, UNIT, program_identity, unit_properties
from agent.machine.containerd.tables import parse_version
from agent.machine.context import Context
from agent.model.errors import DocumentError
from agent.model.text import dotted

NOTE = "containerd-version"
GROUPS_SINCE = (1, 7, 16)
"""The first containerd with version 0.7 of CDI's library. An older containerd ignores every specification with the key
additionalGids, which version 0.7.0 of the format added."""


def containerd_version(context: Context, program: str) -> tuple[int, ...]:
    """Return containerd's version.

    The result is noted, so `containerd --version` runs again only after the program has changed or the machine has
    booted, or if no version was found. Raises CommandError, DocumentError or OSError.
    """
    system, notes = context.system, context.notes
    identity, noted = list(system.identity(program)), notes.load(NOTE)
    if noted.get("program") == identity and isinstance(noted.get("version"), list):
        return tuple(noted["version"])
    version = parse_version(system.run("containerd", "--version"))
    notes.save(NOTE, {"program": identity, "version": list(version)})
    return version


def known_version(context: Context, program: str) -> tuple[int, ...]:
    """Return containerd's version; () for a custom build that reports none. Raises CommandError or OSError."""
    try:
        return containerd_version(context, program)
    except DocumentError:
        return ()


def adapt_to_containerd(context: Context, spec: object) -> tuple[object, tuple[str, ...]]:
    """Return a CDI specification in a form that this machine's containerd accepts, and a remark if it was changed.

    Raises CommandError or OSError.
    """
    # Imported here: agent.machine.containerd.configure needs only the version.
    from agent.vendors.cdi.normalise import without_groups

    groupless = without_groups(spec)
    if groupless == spec or not (version := _version_without_groups(context)):
        return spec, ()
    return groupless, (
        f"containerd {version} does not support additionalGids (added in {dotted(GROUPS_SINCE)}), so they are left "
        "out: containers that do not run as root need the groups of their device nodes as supplementalGroups",
    )


def _version_without_groups(context: Context) -> str:
    """Return the version of a containerd in this machine that does not support additionalGids; empty if there is none.

    A specification must suit both the program on disk and a running containerd whose program has been replaced. If the
    version is the running containerd's, advice to restart it follows the version.
    """
    program = context.system.find_program("containerd")
    if program is None or not context.system.is_file(program):
        return ""
    try:
        version = containerd_version(context, program)
        if version < GROUPS_SINCE:
            return dotted(version)
    except DocumentError:
        # A custom build, which RuntimeConfigured reports.
        pass
    return _running_without_groups(context, program)


def _running_without_groups(context: Context, program: str) -> str:
    """Return the version of the running containerd, with advice to restart it, if it does not support additionalGids.

    Otherwise return an empty string, also if the version is unknown. If containerd still runs the program that is on
    disk, return an empty string without a look at the version: the caller has checked that program. If a version is
    returned, the running process is noted, because the result changes when that process exits.
    """
    system = context.system
    process = unit_properties(context).get("MainPID", "0")
    # This link leads to the running program, even if its file was removed (proc(5)).
    running = f"/proc/{process}/exe"
    identity = program_identity(system, running)
    if identity is None or identity == program_identity(system, program):
        return ""
    if not posixpath.basename(system.read_link(running) or "").startswith("containerd"):
        # The process may be another program, such as a shell that waits for containerd. It must not be run.
        return ""
    try:
        version = parse_version(system.run(running, "--version"))
    except DocumentError:
        return ""
    if version >= GROUPS_SINCE:
        return ""
    context.notes.save(REPLACED, {"running": running, "identity": identity})
    return f"{dotted(version)} (it is still running: restart {UNIT})"
