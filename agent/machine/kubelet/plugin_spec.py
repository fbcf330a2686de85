"""Checks whether a device plugin's own CDI specification is still right. The agent never edits that file.

If the plugin is configured with a CDI strategy, pods get the devices of its specification, not of the agent's.
"""

import json

from agent.machine.devices.nodes import live_numbers
from agent.model.conditions import Condition, Status, false
from agent.model.handoff import Request
from agent.model.reasons import Reason
from agent.model.text import first_of
from agent.system.files import System
from agent.vendors.machine_vendor import MachineVendor

SHOWN = 3
"""How many problems a message names. After a driver upgrade, there is one problem for each of the driver's files."""


def with_plugin_spec(system: System, vendor: MachineVendor, request: Request, advertised: Condition) -> Condition:
    """Return the condition GPUsAdvertised, adjusted to the plugin's own specification.

    `advertised` is GPUsAdvertised before that. If its status is True, and the plugin's own specification is out of
    date, the condition becomes False. If its status is not True, it is returned unchanged. Raises OSError.
    """
    if advertised.status is not Status.TRUE or not vendor.plugin_spec or not request.gpus:
        return advertised
    try:
        # Links are not followed: pods of device plugins may write in this directory, and may put a link there.
        content = system.read_untrusted(vendor.plugin_spec)[0]
    except FileNotFoundError:
        return advertised
    problems = _problems(system, vendor, request, content)
    if not problems:
        return advertised._replace(message=f"{advertised.message}; the plugin's own {vendor.plugin_spec} is in order")
    message = (
        f"the device plugin's own CDI specification {vendor.plugin_spec} is out of date: "
        f"{first_of(problems, SHOWN, '; ')}; restart its pod, which writes the file again; or remove the file if the "
        "plugin no longer uses a CDI strategy"
    )
    return false(advertised.type, Reason.PLUGIN_SPEC_OUTDATED, message)


def _problems(system: System, vendor: MachineVendor, request: Request, content: bytes) -> tuple[str, ...]:
    try:
        spec = json.loads(content)
    except (ValueError, RecursionError) as error:
        return (f"it is not JSON: {error}",)
    try:
        own = json.loads(system.read_untrusted(vendor.spec_path)[0])
    except (OSError, ValueError, RecursionError):
        own = None
    live = live_numbers(system, request.devices)
    return vendor.plugin_spec_problems(spec, own, request, live, system.leads_to_something)
