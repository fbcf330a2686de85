"""Settles non-GPU devices: their nodes, and the links to them. Nodes are checked, but never opened.

Opening a watchdog would start it, and the host would reboot soon after. Opening other devices may have side effects
too.
"""

from agent.machine.context import Context
from agent.machine.devices.char_links import link_nodes
from agent.machine.devices.nodes import live_numbers, unmount_removed, withdraw_nodes, wrong_numbers
from agent.model.conditions import Condition, ConditionType, false, not_applicable, true
from agent.model.errors import AgentError
from agent.model.handoff import Handoff, Request
from agent.model.reasons import Reason
from agent.model.text import counted
from agent.system.files import System

KIND = ConditionType.DEVICES_ALLOWED


def settle_others(context: Context, request: Request, newest: Handoff | None) -> tuple[Condition, ...]:
    """Settle the devices. Return DevicesAllowed, and a second DevicesAllowed if nodes could not be withdrawn.

    `newest` is as in `withdraw_nodes`.
    """
    try:
        unmount_removed(context.system, (device.path for device in request.devices))
        link_nodes(context, request)
        _, not_withdrawn = withdraw_nodes(context, request, newest)
        return (_present(context.system, request), *((not_withdrawn,) if not_withdrawn else ()))
    except (AgentError, OSError) as error:
        return (false(KIND, Reason.FAILED, str(error)),)


def _present(system: System, request: Request) -> Condition:
    if not request.devices:
        return not_applicable(KIND, "no device is granted to this machine")
    wrong = wrong_numbers(system, request.devices, live_numbers(system, request.devices))
    if wrong:
        return false(KIND, Reason.WRONG_NODE, "; ".join(wrong.values()))
    return true(KIND, Reason.NODES_PRESENT, f"other devices: {counted(len(request.devices), 'node')}")
