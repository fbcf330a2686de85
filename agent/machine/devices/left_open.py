"""Finds processes that still have a withdrawn node open.

An open descriptor stays usable after the node is removed and the permission is withdrawn. The host half cannot search:
its service may not inspect processes. A command on the host could, but when a GPU is lost, nobody runs one.
"""

from collections.abc import Mapping
from functools import partial

from agent.machine.context import Context
from agent.machine.devices.nodes import WITHDRAWN
from agent.model.conditions import Condition, ConditionType
from agent.model.handoff import with_remark
from agent.model.text import counted, first_of
from agent.system.deadlines import bounded
from agent.system.open_files import Held, Number, find_holders

SHOWN = 10
"""How many processes the message names, because its length is limited; the others are counted."""
SEARCH_LIMIT = 10.0
"""Seconds to search all processes. The report, which is the machine's heartbeat, waits for this."""
SEARCHES = "left-open"
"""Name of the note with the number of consecutive failed searches."""
FAILED_SEARCHES = 5
"""Consecutive failed searches after which the agent gives up: each one delays a run's report, and a run is made every
minute."""


def name_left_open(
    context: Context, conditions: tuple[Condition, ...], limit: float = SEARCH_LIMIT
) -> tuple[Condition, ...]:
    """Add to the message of DevicesAllowed which processes have withdrawn nodes open, and forget nodes that none has.

    Raises any error of the search, and TimeoutError after `limit` seconds. After FAILED_SEARCHES consecutive errors, no
    search is made, and all withdrawn nodes are forgotten.
    """
    notes = context.notes
    noted = notes.load(WITHDRAWN)
    granted_numbers = {
        (device.major, device.minor) for request in context.handoff.requests for device in request.devices
    }
    # Numbers that are granted again are left out: they may now belong to another GPU, which processes may have open.
    wanted = {number: path for number, path in _by_number(noted).items() if number not in granted_numbers}
    noted_failures = notes.load(SEARCHES).get("failed")
    failed = noted_failures if isinstance(noted_failures, int) else 0
    # Counted as failed before the search, because this run may be killed during the search.
    notes.save(SEARCHES, {"failed": failed + 1})
    search = bool(wanted) and failed < FAILED_SEARCHES
    held = bounded("/proc", partial(find_holders, context.system, wanted), limit) if search else Held()
    open_paths = {path for holder in held.holders for path in holder.paths}
    # Nodes are forgotten even if some processes cannot be inspected, because that may never change.
    notes.save(WITHDRAWN, {path: number for path, number in noted.items() if path in open_paths})
    notes.save(SEARCHES, {"failed": 0})
    return with_remark(conditions, ConditionType.DEVICES_ALLOWED, _remark(held, notes.load("containers")))


def _remark(held: Held, containers: Mapping[str, object]) -> str:
    """Return the remark on the processes; empty if there are none."""
    unseen = f"{counted(len(held.unseen), 'process', 'processes')} could not be inspected" if held.unseen else ""
    if not held.holders:
        return f"; {unseen}, and may still have nodes open that are no longer granted" if unseen else ""
    described = [each.describe(pod=_pod(containers, each.container)) for each in held.holders]
    shown = first_of(described, SHOWN, "; ")
    what = f"; LeftOpen (no longer granted, but still open; PIDs are the machine's): {shown}"
    return f"{what}; {unseen}" if unseen else what


def _by_number(noted: Mapping[str, object]) -> dict[Number, str]:
    numbers = {}
    for path, number in noted.items():
        match number:
            case [int(major), int(minor)]:
                numbers[(major, minor)] = path
            case _:
                pass
    return numbers


def _pod(containers: Mapping[str, object], container: str) -> str:
    """Return the pod of a container, as agent.machine.cdi.outdated_pods noted it; empty if unknown."""
    known = containers.get(container)
    return str(known.get("pod", "")) if isinstance(known, dict) else ""
