"""Makes and removes validation markers: files that tell the vendor's pods what works in this machine."""

from agent.machine.context import Context
from agent.machine.devices.former_grants import may_have_content
from agent.machine.steps import attempt
from agent.model.conditions import Condition, ConditionType, Status, false, not_applicable, true, unknown
from agent.model.handoff import Request
from agent.model.reasons import Reason
from agent.system.errnos import UNUSABLE
from agent.system.files import System
from agent.vendors.machine_vendor import MachineVendor, Marker

KIND = ConditionType.VALIDATION_MARKERS_SET
NOTE = "validation-markers"
"""Name of the note that has content if there may be markers of the agent."""
FIRST_LINE = "# Written by unbounded-agent, which removes this file if it is no longer true.\n"
"""By this line the agent recognises its own markers. A shell that reads a marker takes the line for a comment."""
LIMIT = 4096
"""Bytes of the largest marker that is read. A larger one is not the agent's."""


def settle_markers(
    context: Context, vendor: MachineVendor, request: Request, conditions: tuple[Condition, ...]
) -> tuple[Condition, ...]:
    """Make the vendor's markers that the conditions prove, remove refuted ones, and return ValidationMarkersSet.

    A marker is refuted if a condition that it needs is False; a fault of only some GPUs refutes nothing, because the
    markers are about all. If none of these conditions is False, but one is Unknown, the marker stays as it is. If
    markers are not configured, those that the agent made before are removed, and an empty
    tuple is returned. If the vendor has no markers, an empty tuple is returned too.
    """
    configured = context.handoff.validation_markers
    if not (configured or may_have_content(context.notes, NOTE)) or not vendor.markers:
        return ()
    condition = attempt(KIND, lambda: _settle(context, vendor, request, conditions))
    return (condition,) if configured else ()


def _settle(context: Context, vendor: MachineVendor, request: Request, conditions: tuple[Condition, ...]) -> Condition:
    system, wanted = context.system, context.handoff.validation_markers and bool(request.gpus)
    if wanted:
        # Noted before the first write, so that a marker of a killed run is removed later.
        context.notes.save(NOTE, {"made": True})
    foreign = [each.path for each in vendor.markers if not _may_write(system, each.path)]
    doubts: dict[ConditionType, Condition] = {}
    for marker in vendor.markers:
        needed = (each for each in conditions if each.type in marker.proof and not _spares_some(each, request))
        doubtful = {each.type: each for each in needed if each.status != Status.TRUE}
        doubts |= doubtful
        if marker.path not in foreign:
            if not wanted or any(each.status is Status.FALSE for each in doubtful.values()):
                system.remove(marker.path)
            elif not doubtful:
                _write_marker(system, marker)
    if not wanted:
        # If markers are not configured, settle_markers drops this condition.
        context.notes.save(NOTE, {})
        return not_applicable(KIND, "no GPU is granted to this machine")
    return _condition(vendor.markers, foreign, tuple(doubts.values()))


def _spares_some(condition: Condition, request: Request) -> bool:
    """Return whether the condition's fault concerns only some of the GPUs."""
    return bool(condition.gpus) and set(condition.gpus) < set(request.gpus)


def _write_marker(system: System, marker: Marker) -> None:
    content = (FIRST_LINE + marker.content).encode()
    if _content(system, marker.path) != content:
        system.write(marker.path, content)


def _may_write(system: System, path: str) -> bool:
    """Return whether the agent may write this file: True if no file is there, or if the agent wrote the file."""
    content = _content(system, path)
    return content is None or content.startswith(FIRST_LINE.encode())


def _content(system: System, path: str) -> bytes | None:
    """Return the content; None if there is no file. Raises OSError.

    The content is empty for what cannot be the agent's: a directory, a link, a file larger than LIMIT.
    """
    try:
        return system.read_untrusted(path, LIMIT)[0]
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in UNUSABLE:
            return b""
        raise


def _condition(markers: tuple[Marker, ...], foreign: list[str], doubts: tuple[Condition, ...]) -> Condition:
    names = " and ".join(each.path for each in markers)
    if foreign:
        advice = (
            "if that is the GPU Operator's validator, unset validation_markers on the host; otherwise remove the file"
        )
        return false(KIND, Reason.FOREIGN_FILE, f"{' and '.join(foreign)}: made by another program; {advice}")
    if refuted := [each.type for each in doubts if each.status is Status.FALSE]:
        return false(
            KIND,
            Reason.NOT_PROVEN,
            f"a file is missing while a condition that it stands for is False: {', '.join(refuted)}",
        )
    if doubts:
        return unknown(KIND, Reason.NOT_PROVEN, f"waiting for {', '.join(each.type for each in doubts)}")
    return true(KIND, Reason.SET, f"{names} exist")
