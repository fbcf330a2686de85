"""Calls to systemd-machined on the system bus, org.freedesktop.machine1(5). They raise BusError."""

from agent.system.files import System
from agent.system.systemd import CHANGE_LIMIT

MACHINED = "org.freedesktop.machine1"
MACHINED_OBJECT = "/org/freedesktop/machine1"
MACHINED_MANAGER = f"{MACHINED}.Manager"


def bind_mount(machine: str, path: str, *, read_only: bool, system: System) -> None:
    """Bind a node or directory to the same path in the machine, as `machinectl bind` does.

    A second call for the same path would mount over the first bind.
    """
    make_directories = True
    arguments = (machine, path, path, read_only, make_directories)
    method = f"{MACHINED_MANAGER}.BindMountMachine"
    system.call(MACHINED, MACHINED_OBJECT, method, *arguments, signature="sssbb", timeout=CHANGE_LIMIT)
