"""Processes that have a node open which was withdrawn: descriptors outlive both node and permission.

The host half's service may not look at them, and of a GPU that went by itself nobody asks on the host.
"""

from collections.abc import Iterable, Mapping

from agent.conditions import Condition, ConditionType
from agent.handoff import GrantedDevice, with_remark
from agent.holders import Number, find_holders
from agent.inside.devices import WITHDRAWN
from agent.inside.notes import Notes
from agent.system.files import System

SHOWN = 10
"""Processes in the message, which has an end; the others are counted."""


def name_left_open(
    conditions: tuple[Condition, ...], system: System, notes: Notes, granted: Iterable[GrantedDevice]
) -> tuple[Condition, ...]:
    """The conditions, with the processes added to DevicesAllowed's message; what nobody has open is forgotten."""
    noted = notes.load(WITHDRAWN)
    by_now = {(device.major, device.minor) for device in granted}
    # A number that was granted again is another GPU's: who has that open may.
    wanted = {number: path for number, path in _by_number(noted).items() if number not in by_now}
    held = find_holders(system, wanted)
    open_paths = {path for holder in held.holders for path in holder.paths}
    notes.save(WITHDRAWN, {path: number for path, number in noted.items() if held.unseen or path in open_paths})
    if not held.holders:
        return conditions
    containers = notes.load("containers")
    shown = [each.describe(pod=_pod(containers, each.container)) for each in held.holders[:SHOWN]]
    more = f" and {len(held.holders) - SHOWN} more" if len(held.holders) > SHOWN else ""
    remark = f"; LeftOpen (not granted any more, and still open by this machine's PIDs): {'; '.join(shown)}{more}"
    return with_remark(conditions, ConditionType.DEVICES_ALLOWED, remark)


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
    """By what agent.inside.outdated_pods noted of containers with devices; empty for any other."""
    known = containers.get(container)
    return str(known.get("pod", "")) if isinstance(known, dict) else ""
