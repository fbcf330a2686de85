"""When units of the host and its machine were started. Tests show with it that a change restarts none of them."""

from integration.bed.machine.node import MACHINE, Node
from integration.bed.vm.guest import Guest

MACHINE_UNIT = f"systemd-nspawn@{MACHINE}.service"
AGENT = "unbounded-agent.service"
CONTAINERD = "containerd.service"
ON_HOST = (AGENT, MACHINE_UNIT)
IN_MACHINE = (CONTAINERD, "kubelet.service", "dbus.service")
SHOW = ("systemctl", "show", "--property=Id,MainPID,NRestarts,ExecMainStartTimestampMonotonic")
"""Prints an empty line between two units (systemctl(1)). A unit that is not installed has start time 0."""


def starts(guest: Guest) -> dict[str, str]:
    """Return by unit: its main process, restarts by systemd itself, and the process's start in microseconds."""
    node = Node(guest)
    text = guest.run((*SHOW, *ON_HOST)).stdout + "\n" + node.run(*SHOW, *IN_MACHINE).stdout
    found = {}
    for block in text.strip().split("\n\n"):
        properties = dict(line.split("=", 1) for line in block.splitlines())
        found[properties.pop("Id")] = " ".join(f"{key}={value}" for key, value in sorted(properties.items()))
    if set(found) != {*ON_HOST, *IN_MACHINE}:
        raise ValueError(f"systemctl show printed other units: {text}")
    return found


def restarted(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """Return the units whose main process after the change is another one than before."""
    return {unit for unit in before if before[unit] != after[unit]}
