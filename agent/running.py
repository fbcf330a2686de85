"""Changes the devices of a running machine: neither it nor anything in it is restarted."""

from collections.abc import Callable
from dataclasses import replace

from agent.actions import ChangeDevices
from agent.errors import ApplyError, CommandError
from agent.live import READ_ONLY, LiveSettings, render_live
from agent.paths import live_file, machine_unit
from agent.system.commands import TimeLimitError
from agent.system.files import System


def change_devices(action: ChangeDevices, system: System, going_on: Callable[[], None] = lambda: None) -> None:
    """Permit, then bind; what succeeded is noted whatever else fails. Raises ApplyError, or OSError for the note."""
    before, after = action.before, action.after
    # What is not granted any more is not noted any more: the machine half removes the node by itself.
    kept = {path: number for path, number in before.nodes.items() if after.nodes.get(path) == number}
    live, failures = replace(after, allow=before.allow, nodes=kept), []
    if set(before.allow) != set(after.allow):
        # Noted before it is done: who is killed in between must not leave a permission that nobody knows of.
        more = tuple(entry for entry in after.allow if entry not in before.allow)
        _note(action.machine, replace(live, allow=(*before.allow, *more)), system)
        try:
            _permit(action, system)
            live = replace(live, allow=after.allow)
        except CommandError as error:
            failures.append(str(error))
    for path, number in after.nodes.items():
        if path in kept:
            continue
        try:
            # One bad node does not hold up the others.
            options = ("--mkdir", "--read-only") if number.startswith(READ_ONLY) else ("--mkdir",)
            system.run("machinectl", *options, "bind", action.machine, path)
            live = replace(live, nodes={**live.nodes, path: number})
        except CommandError as error:
            failures.append(str(error))
            if isinstance(error.__cause__, TimeLimitError):
                # The machine hangs, and would for each of them.
                break
        going_on()
    _note(action.machine, live, system)
    if failures:
        raise ApplyError("; ".join(failures), f"`machinectl reboot {action.machine}` makes all changes at once")


def _note(machine: str, live: LiveSettings, system: System) -> None:
    system.write(live_file(machine), render_live(live))


def _permit(action: ChangeDevices, system: System) -> None:
    """Replace the unit's whole list: a list that is only set adds to it, so that an empty one comes first.

    Both in one call, which systemd applies as one (SetUnitProperties): there is no moment without permissions. A
    drop-in with daemon-reload alone changes nothing for a running unit (systemd 257). What set-property writes to
    /run/systemd/system.control is outranked by our own drop-in when the machine starts next.
    """
    entries = (f"DeviceAllow={entry}" for entry in (*action.after.allow, *action.others))
    system.run("systemctl", "set-property", "--runtime", machine_unit(action.machine), "DeviceAllow=", *entries)
