"""Changes the devices of a running machine, without restarting the machine or anything in it.

The calls go to systemd and systemd-machined over D-Bus: starting systemctl or machinectl would take ten times as long.
"""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from agent.model.actions import ChangeDevices
from agent.model.device_allow import DeviceAllow
from agent.model.errors import ApplyError, BusAnswerError, BusError
from agent.model.live import READ_ONLY, LiveSettings, render_live
from agent.model.paths import live_file, machine_unit
from agent.model.text import restart_command
from agent.system import machined, systemd
from agent.system.damage import write_record
from agent.system.files import System

DRM = "/dev/dri/"


def change_devices(action: ChangeDevices, system: System, report_progress: Callable[[], None] = lambda: None) -> None:
    """Change permissions, bind nodes, and record what succeeded.

    Raises AgentError, or OSError if the record cannot be written.

    The intended permissions are recorded first, so that the record has every permission in force even if the agent is
    killed before the end. If the record cannot be written, devices that are no longer granted are forbidden all the
    same, but nothing is permitted or bound: without a record of that, each later pass would do it again.
    """
    before, after = action.before, action.after
    # Keep the nodes that are still granted with the same device number. The machine half removes nodes that are no
    # longer granted. Nodes whose number has changed are bound again below.
    kept = {path: number for path, number in before.nodes.items() if after.nodes.get(path) == number}
    live, failures = replace(after, allow=before.allow, nodes=kept, unsure=before.unsure), []
    change_permissions = before.unsure or set(before.allow) != set(after.allow)
    added = tuple(entry for entry in after.allow if entry not in before.allow)
    intended = replace(live, allow=(*before.allow, *added), unsure=True) if change_permissions else live
    try:
        _record(action.machine, intended, system)
    except OSError:
        if set(before.allow) - set(after.allow):
            still_allowed = (entry for entry in after.allow if entry in before.allow)
            _permit(action.machine, (*still_allowed, *action.foreign), system)
        raise
    if change_permissions:
        try:
            _permit(action.machine, (*after.allow, *action.foreign), system)
            live = replace(live, allow=after.allow, unsure=False)
        except BusError as error:
            failures.append(str(error))
            # If PID 1 did not answer, it may have carried out the call all the same: record the intended permissions.
            live = live if isinstance(error, BusAnswerError) else intended
    live, unbound = _bind_all(action, live, system, report_progress)
    _record(action.machine, live, system)
    if failures := [*failures, *unbound]:
        raise ApplyError("; ".join(failures), f"{restart_command(action.machine)} applies all changes")


def _bind_all(
    action: ChangeDevices, live: LiveSettings, system: System, report_progress: Callable[[], None]
) -> tuple[LiveSettings, list[str]]:
    """Bind the nodes that the machine lacks. Return `live` with the nodes that could be bound, and the failures."""
    failures = []
    # The vendors' own nodes come before those of DRM: few pods need DRM's, and each bind takes machined milliseconds.
    for path, number in sorted(action.after.nodes.items(), key=lambda node: node[0].startswith(DRM)):
        if path in live.nodes:
            continue
        try:
            read_only = number.startswith(READ_ONLY) or path in action.read_only
            machined.bind_mount(action.machine, path, read_only=read_only, system=system)
            live = replace(live, nodes={**live.nodes, path: number})
        except BusError as error:
            # Go on with the other nodes, unless the machine hangs: then each of these nodes would take as long to fail.
            failures.append(f"{path} cannot be bound: {error}")
            if isinstance(error.__cause__, TimeoutError):
                break
        report_progress()
    return live, failures


def _record(machine: str, live: LiveSettings, system: System) -> None:
    write_record(system, live_file(machine), render_live(live))


def _permit(machine: str, allow: Iterable[DeviceAllow], system: System) -> None:
    # systemd writes the list to /run/systemd/system.control. At the machine's next start, the agent's drop-in takes
    # precedence.
    systemd.set_device_allow(machine_unit(machine), allow, system)
