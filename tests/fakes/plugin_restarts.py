"""Restarts of the kubelet's device plugin."""

import os

from tests.fakes.machine import REQUEST, Machine

CONTAINER = "0123456789abcdef" * 4
CGROUP = f"/proc/{os.getpid()}/cgroup"
BY_SYSTEMD = (
    f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1_2.slice/cri-containerd-{CONTAINER}.scope\n"
)


def allow_restarts(machine: Machine) -> None:
    """Let the handoff ask for restarts, and let this process be a device plugin's container."""
    machine.hand(REQUEST, restart_device_plugin=True)
    machine.put("/usr/local/bin/crictl")
    machine.put(CGROUP, BY_SYSTEMD)
    machine.program("systemd-run", "")


def restarts(machine: Machine) -> list[tuple[str, ...]]:
    """Return the commands that systemd-run was given."""
    commands = [call for call in machine.calls if call[0] == "systemd-run"]
    return [call[next(index for index, each in enumerate(call) if each.endswith("crictl")) :] for call in commands]
