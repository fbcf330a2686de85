"""Devices that are no GPUs: their nodes and the links to them. They are looked at and never opened.

To open a watchdog starts it, and the host reboots soon after; other devices take to it no better.
"""

from agent.conditions import Condition, ConditionType, false, not_applicable, true
from agent.errors import AgentError
from agent.handoff import Handoff, Request
from agent.inside.char_links import link_nodes
from agent.inside.devices import live_numbers, unmount_removed, withdraw_nodes, wrong_numbers
from agent.inside.notes import Notes
from agent.system.files import System

KIND = ConditionType.DEVICES_ALLOWED


def settle_others(system: System, notes: Notes, request: Request, newest: Handoff | None) -> tuple[Condition, ...]:
    """DevicesAllowed, once or twice. `newest`: the handoff as it is by now, as withdraw_nodes has it."""
    try:
        unmount_removed(system, (device.path for device in request.devices))
        link_nodes(system, notes, request)
        _, withdrawn = withdraw_nodes(system, notes, request, newest)
        return (_present(system, request), *((withdrawn,) if withdrawn else ()))
    except (AgentError, OSError) as error:
        return (false(KIND, "Failed", str(error)),)


def _present(system: System, request: Request) -> Condition:
    if not request.devices:
        return not_applicable(KIND, "no device is granted to this machine")
    wrong = wrong_numbers(system, request.devices, live_numbers(system, request.devices))
    if wrong:
        return false(KIND, "WrongNode", "; ".join(wrong))
    return true(KIND, "NodesPresent", f"nodes of other devices that are here: {len(request.devices)}")
