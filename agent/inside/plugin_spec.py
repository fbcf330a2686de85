"""Whether the CDI spec that a device plug-in made for itself still holds. It is reported, and never edited.

Its pods are given the devices of that one, not of ours, under the plug-in's CDI strategies.
"""

import json
from dataclasses import replace

from agent.conditions import Condition, Status, false
from agent.handoff import Request
from agent.inside.devices import live_numbers
from agent.system.files import System
from agent.vendors.machine_protocol import MachineVendor

SHOWN = 3
"""Problems in a message: after an upgrade of the driver each of its files would be one."""


def beside_plugin_spec(system: System, vendor: MachineVendor, request: Request, advertised: Condition) -> Condition:
    """GPUsAdvertised, which is False where all is well but for the spec of a plug-in that runs. Raises OSError."""
    if advertised.status is not Status.TRUE or not vendor.plugin_spec or not request.gpus:
        return advertised
    try:
        # Pods of device plug-ins have this directory, and may put a link there.
        content = system.read_untrusted(vendor.plugin_spec)[0]
    except FileNotFoundError:
        return advertised
    problems = _problems(system, vendor, request, content)
    if not problems:
        return replace(advertised, message=f"{advertised.message}; {vendor.plugin_spec} of the plug-in is in order")
    more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    message = (
        f"the device plug-in's own CDI spec {vendor.plugin_spec} is out of date: {'; '.join(problems[:SHOWN])}{more}; "
        "restart its pod, which writes it anew; remove the file where the plug-in uses no CDI strategy any more"
    )
    return false(advertised.type, "PluginSpecOutdated", message)


def _problems(system: System, vendor: MachineVendor, request: Request, content: bytes) -> tuple[str, ...]:
    try:
        spec = json.loads(content)
    except (ValueError, RecursionError) as error:
        return (f"it is not JSON: {error}",)
    try:
        own = json.loads(system.read(vendor.spec_path))
    except (OSError, ValueError, RecursionError):
        own = None
    return vendor.plugin_spec_problems(spec, own, request, live_numbers(system, request.devices), system.exists)
