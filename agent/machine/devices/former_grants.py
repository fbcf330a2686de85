"""Finds what the machine still has although the handoff no longer names it: nodes, and vendors' files and notes."""

import fnmatch

from agent.machine.context import Context
from agent.machine.devices.nodes import GRANTED, not_withdrawn
from agent.machine.notes import Notes, Owned
from agent.machine.vendors import GPU_NODES, VENDOR_NAMES
from agent.model.conditions import Condition
from agent.model.errors import AgentError
from agent.model.handoff import OTHER_DEVICES, Request
from agent.model.paths import spec_file
from agent.system.files import System


def note_unknown_nodes(context: Context) -> tuple[Condition, ...]:
    """Find mounted nodes that the handoff does not name, and note them like granted ones, so that they are withdrawn.

    Such nodes exist if the host half or nspawn bound the nodes of a device, and the host half withdrew the device
    before a run could note them. Returns a condition if the search fails, or if nodes cannot be noted; otherwise an
    empty tuple.
    """
    requests = context.handoff.requests
    known = {device.path for request in requests for device in request.devices}
    # A DRM node may belong to any vendor, so unknown ones are noted for a vendor that this run settles anyway, if there
    # is one: the vendors of the handoff's requests come first below.
    vendors = [each.vendor for each in requests if each.vendor in GPU_NODES]
    try:
        for vendor in dict.fromkeys((*vendors, *GPU_NODES)):
            unknown = {path for pattern in GPU_NODES[vendor] for path in _bound_nodes(context.system, pattern)} - known
            if unknown:
                _note(context, vendor, unknown)
                known |= unknown
        # The nodes above are recognised as GPUs' nodes by their names. The nodes of other devices have no such names.
        # Only the host knows which of these it has bound and withdrawn, so the handoff lists the withdrawn ones.
        withdrawn = {path for path in context.handoff.withdrawn if _is_bound_node(context.system, path)}
        if withdrawn - known:
            _note(context, OTHER_DEVICES, withdrawn - known)
    except OSError as error:
        return (not_withdrawn(f"cannot tell what is mounted in /dev: {error}"),)
    return ()


def _note(context: Context, vendor: str, paths: set[str]) -> None:
    noted = context.notes.load(f"{GRANTED}{vendor}")
    numbers = {path: context.system.device(path) for path in sorted(paths - noted.keys())}
    unknown = {path: [each.major, each.minor] if each else None for path, each in numbers.items()}
    context.notes.save(f"{GRANTED}{vendor}", {**unknown, **noted})


def _bound_nodes(system: System, pattern: str) -> list[str]:
    """Return the mounted nodes below /dev that match a pattern."""
    directory, _, name = f"/dev/{pattern}".rpartition("/")
    entries = system.entries(directory) if system.is_directory(directory) else ()
    paths = [f"{directory}/{each}" for each in fnmatch.filter(entries, name)]
    return [path for path in paths if _is_bound_node(system, path)]


def _is_bound_node(system: System, path: str) -> bool:
    return system.is_mount(path) and not system.is_directory(path)


def withdrawn_requests(context: Context) -> list[Request]:
    """Return empty requests for vendors that the handoff no longer names, so that their devices are withdrawn."""
    named = {request.vendor for request in context.handoff.requests}
    return [
        Request(name, (), ())
        for name in (*VENDOR_NAMES, OTHER_DEVICES)
        if name not in named
        and (may_have_content(context.notes, f"{GRANTED}{name}") or _may_own(context.owned, spec_file(name)))
    ]


def may_have_content(notes: Notes, name: str) -> bool:
    """Return whether a note has content; True if the note cannot be read, so that a later step reports the error."""
    try:
        return bool(notes.load(name))
    except OSError:
        return True


def _may_own(owned: Owned, path: str) -> bool:
    """Return whether the agent wrote the file at this path; True if that is unknown."""
    try:
        return owned.has(path)
    except AgentError:
        return True
