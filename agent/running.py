"""Changes the devices of a running machine: neither it nor anything in it is restarted."""

from dataclasses import replace

from agent.actions import ChangeDevices
from agent.errors import ApplyError, CommandError
from agent.live import LiveSettings, render_live
from agent.paths import live_file, machine_unit
from agent.system.files import System


def change_devices(action: ChangeDevices, system: System) -> None:
    """Permit, then bind; what succeeded is noted whatever else fails. Raises ApplyError, or OSError for the note."""
    live, failures = action.before, []
    if live.allow != action.allow:
        try:
            _permit(action, system)
            live = replace(live, allow=action.allow)
        except CommandError as error:
            failures.append(str(error))
    # What is not granted any more is not noted any more: the machine half removes the node by itself.
    nodes = {path: number for path, number in live.nodes.items() if action.nodes.get(path) == number}
    for path, number in action.nodes.items():
        if path in nodes:
            continue
        try:
            # One bad node does not hold up the others.
            system.run("machinectl", "--mkdir", "bind", action.machine, path)
            nodes[path] = number
        except CommandError as error:
            failures.append(str(error))
    system.write(live_file(action.machine), render_live(LiveSettings(live.fixed, live.allow, nodes)))
    if failures:
        raise ApplyError("; ".join(failures), f"`machinectl reboot {action.machine}` makes all changes at once")


def _permit(action: ChangeDevices, system: System) -> None:
    """Replace the unit's whole list: a list that is only set adds to it, so that an empty one comes first.

    Both in one call, which systemd applies as one (SetUnitProperties): there is no moment without permissions. A
    drop-in with daemon-reload alone changes nothing for a running unit (systemd 257). What set-property writes to
    /run/systemd/system.control is outranked by our own drop-in when the machine starts next.
    """
    entries = (f"DeviceAllow={entry}" for entry in (*action.allow, *action.others))
    system.run("systemctl", "set-property", "--runtime", machine_unit(action.machine), "DeviceAllow=", *entries)
