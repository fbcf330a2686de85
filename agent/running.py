"""Changes the devices of a running machine: neither it nor anything in it is restarted.

By calls on the system bus, as systemctl and machinectl make them: each of these takes ten times as long to start.
"""

from collections.abc import Callable
from dataclasses import replace

from agent.actions import ChangeDevices
from agent.errors import ApplyError, BusAnswerError, BusError
from agent.live import READ_ONLY, LiveSettings, render_live
from agent.paths import live_file, machine_unit
from agent.system.files import System
from agent.system.services import (
    MACHINED,
    MACHINED_MANAGER,
    MACHINED_OBJECT,
    SYSTEMD,
    SYSTEMD_MANAGER,
    SYSTEMD_OBJECT,
)

CHANGE_LIMIT = 30.0
"""Seconds. PID 1 answers nobody while it reloads its units."""


def change_devices(action: ChangeDevices, system: System, going_on: Callable[[], None] = lambda: None) -> None:
    """Permit, then bind; what succeeded is noted whatever else fails. Raises ApplyError, or OSError for the note."""
    before, after = action.before, action.after
    # What is not granted any more is not noted any more: the machine half removes the node by itself.
    kept = {path: number for path, number in before.nodes.items() if after.nodes.get(path) == number}
    live, failures = replace(after, allow=before.allow, nodes=kept, unsure=before.unsure), []
    if before.unsure or set(before.allow) != set(after.allow):
        more = tuple(entry for entry in after.allow if entry not in before.allow)
        unsure = replace(live, allow=(*before.allow, *more), unsure=True)
        # Noted before it is done: who is killed in between must not leave a permission that nobody knows of.
        _note(action.machine, unsure, system)
        try:
            _permit(action, system)
            live = replace(live, allow=after.allow, unsure=False)
        except BusError as error:
            failures.append(str(error))
            # A question without an answer may have been heard.
            live = live if isinstance(error, BusAnswerError) else unsure
    for path, number in after.nodes.items():
        if path in kept:
            continue
        try:
            # One bad node does not hold up the others.
            _bind(action.machine, path, read_only=number.startswith(READ_ONLY), system=system)
            live = replace(live, nodes={**live.nodes, path: number})
        except BusError as error:
            failures.append(f"{path} cannot be bound: {error}")
            if isinstance(error.__cause__, TimeoutError):
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
    drop-in with daemon-reload alone changes nothing for a running unit (systemd 257). What it writes to
    /run/systemd/system.control is outranked by our own drop-in when the machine starts next.
    """
    entries = [_device_allow(entry) for entry in (*action.after.allow, *action.others)]
    properties = [("DeviceAllow", ("a(ss)", [])), ("DeviceAllow", ("a(ss)", entries))]
    method = f"{SYSTEMD_MANAGER}.SetUnitProperties"
    unit, runtime = machine_unit(action.machine), True
    system.call(SYSTEMD, SYSTEMD_OBJECT, method, unit, runtime, properties, signature="sba(sv)", timeout=CHANGE_LIMIT)


def _device_allow(entry: str) -> tuple[str, str]:
    """Node and permissions, which are all of them where none are named (systemd.resource-control(5))."""
    node, _, permissions = entry.partition(" ")
    return node, permissions or "rwm"


def _bind(machine: str, path: str, *, read_only: bool, system: System) -> None:
    """To the same place in the machine, as machinectl(1) does it; twice would lie over another."""
    make_directories = True
    arguments = (machine, path, path, read_only, make_directories)
    method = f"{MACHINED_MANAGER}.BindMountMachine"
    system.call(MACHINED, MACHINED_OBJECT, method, *arguments, signature="sssbb", timeout=CHANGE_LIMIT)
