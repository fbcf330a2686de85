"""Processes that have a node open which was withdrawn: descriptors outlive both node and permission.

The host half's service may not look at them, and of a GPU that went by itself nobody asks on the host.
"""

from collections.abc import Iterable, Mapping
from functools import partial

from agent.conditions import Condition, ConditionType
from agent.handoff import GrantedDevice, with_remark
from agent.holders import Held, Number, find_holders
from agent.inside.devices import WITHDRAWN
from agent.inside.notes import Notes
from agent.system.deadlines import bounded
from agent.system.files import System

SHOWN = 10
"""Processes in the message, which has an end; the others are counted."""
LOOK_LIMIT = 10.0
"""Seconds for all processes together: the report, which waits for this, is the machine's sign of life."""
LOOKS = "left-open"
"""The note of how many looks in a row have failed."""
FAILED_LOOKS = 5
"""Then no more is looked: each look costs every run time, and there is one a minute."""


def name_left_open(
    conditions: tuple[Condition, ...],
    system: System,
    notes: Notes,
    granted: Iterable[GrantedDevice],
    limit: float = LOOK_LIMIT,
) -> tuple[Condition, ...]:
    """The conditions, with the processes added to DevicesAllowed's message; what nobody has open is forgotten.

    Raises what a look raises, TimeoutError after `limit` seconds: such looks are tried FAILED_LOOKS times.
    """
    noted = notes.load(WITHDRAWN)
    by_now = {(device.major, device.minor) for device in granted}
    # A number that was granted again is another GPU's: who has that open may.
    wanted = {number: path for number, path in _by_number(noted).items() if number not in by_now}
    failed = notes.load(LOOKS).get("failed")
    failed = failed if isinstance(failed, int) else 0
    # Before the look, which may end this run too.
    notes.save(LOOKS, {"failed": failed + 1})
    look = bool(wanted) and failed < FAILED_LOOKS
    held = bounded("/proc", partial(find_holders, system, wanted), limit) if look else Held()
    open_paths = {path for holder in held.holders for path in holder.paths}
    # Whom the kernel hides is no reason to look for ever: that may be any process, and never changes.
    notes.save(WITHDRAWN, {path: number for path, number in noted.items() if path in open_paths})
    notes.save(LOOKS, {"failed": 0})
    return with_remark(conditions, ConditionType.DEVICES_ALLOWED, _remark(held, notes.load("containers")))


def _remark(held: Held, containers: Mapping[str, object]) -> str:
    """Empty where nothing is to be said."""
    unseen = f"{len(held.unseen)} processes could not be looked at" if held.unseen else ""
    if not held.holders:
        return f"; {unseen}, and may have open what is not granted any more" if unseen else ""
    shown = [each.describe(pod=_pod(containers, each.container)) for each in held.holders[:SHOWN]]
    more = f" and {len(held.holders) - SHOWN} more" if len(held.holders) > SHOWN else ""
    what = f"; LeftOpen (not granted any more, and still open by this machine's PIDs): {'; '.join(shown)}{more}"
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
    """By what agent.inside.outdated_pods noted of containers with devices; empty for any other."""
    known = containers.get(container)
    return str(known.get("pod", "")) if isinstance(known, dict) else ""
