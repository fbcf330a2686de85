"""Restarts the container of a vendor's device plugin through the CRI, if `restart_device_plugin` is set.

The container is stopped, and the kubelet starts it again, as it does with every container of a DaemonSet. Other
containers are not affected. The next run sees the result.
"""

import re
import time
from collections.abc import Iterable

from agent.machine.cdi.spec import spec_changed_at
from agent.machine.context import Context
from agent.machine.kubelet.device_plugin import plugin_sockets
from agent.model.conditions import Condition
from agent.model.errors import CommandError
from agent.system.files import System
from agent.vendors.machine_vendor import MachineVendor

ENDPOINT = "unix:///run/containerd/containerd.sock"
GRACE = 10
"""Seconds for the plugin to exit after SIGTERM."""
CONNECT_LIMIT = 10
"""Seconds for the CRI to answer."""
CRICTL_LIMIT = 60
"""Seconds that crictl may run."""
RESTART_INTERVAL = 300.0
"""Minimum seconds between two restarts. The kubelet's own delay before it starts a container again grows up to this."""
UNIT = "unbounded-agent-restart-device-plugin"
SHOWN = 13
"""Characters of a container's id that a message shows, as in crictl's tables."""
CONTAINER = re.compile(r"(?:[a-z-]+-)?([0-9a-f]{64})(?:\.scope)?")
"""The part of a cgroup's path that names a container: `cri-containerd-ID.scope` (systemd) or `ID` (cgroupfs)."""


def restart_plugin(context: Context, vendor: MachineVendor, needed: Condition) -> Condition:
    """Restart the plugin if possible, and return `needed` with the result added. Raises OSError."""
    return needed._replace(message=f"{needed.message}; {_restart(context, vendor)}")


def _restart(context: Context, vendor: MachineVendor) -> str:
    """Restart the plugin if it may be restarted now, and return a sentence about the result.

    The plugin is restarted at most once for each change of the CDI specification: a second restart would not help. The
    time between two restarts is at least RESTART_INTERVAL.
    """
    system, notes = context.system, context.notes
    name = f"device-plugin-restart-{vendor.name}"
    noted = notes.load(name)
    spec, now, number = spec_changed_at(context, vendor), time.monotonic(), int(noted.get("number", 0)) + 1
    if noted.get("spec") == spec:
        return str(noted.get("told"))
    if number > 1 and now - float(noted.get("at", 0)) < RESTART_INTERVAL:
        return (
            f"it was restarted less than {RESTART_INTERVAL:.0f} s ago; a later run restarts it if that is still needed"
        )
    # A socket with several names may be another plugin's: any pod that may write in the directory can make a hard link.
    processes = {
        process
        for path, process in plugin_sockets(system, vendor).items()
        if process is not None and system.link_count(path) == 1
    }
    containers = sorted({found for process in processes if (found := _container(system, process))})
    if not containers:
        return "it is not restarted, because it is not running in a pod's container"
    program = system.find_program("crictl")
    if program is None:
        return "it is not restarted: install crictl in the machine's image, or let `up` do it (binaries.crictl_version)"
    what = f"container {', '.join(each[:SHOWN] for each in containers)} was stopped through the CRI to restart it"
    sentence = (
        f"{what}, restart {number} since the machine's boot: if this lasts, see `journalctl -u {UNIT}` in the machine"
    )
    # Noted before the restart: if it could not be noted afterwards, each run would restart the plugin again.
    notes.save(name, {"spec": spec, "at": now, "number": number, "told": sentence})
    try:
        _stop(system, program, containers)
    except CommandError as error:
        notes.save(name, noted)
        return f"it cannot be restarted: {error}"
    return sentence


def _stop(system: System, program: str, containers: Iterable[str]) -> None:
    """Make a transient unit stop the containers, and do not wait for it: a plugin may take some time to exit."""
    properties = f"--property=RuntimeMaxSec={CRICTL_LIMIT}"
    unit = ("systemd-run", "--quiet", "--no-block", "--collect", f"--unit={UNIT}", properties)
    crictl = (program, f"--runtime-endpoint={ENDPOINT}", f"--timeout={CONNECT_LIMIT}s", "stop", f"--timeout={GRACE}")
    system.run(*unit, *crictl, *containers, timeout=20)


def _container(system: System, process: int) -> str:
    """Return the id of a process's container, by its cgroup; empty outside pods, or if the process has exited."""
    try:
        cgroups = system.read(f"/proc/{process}/cgroup", 1 << 16).decode(errors="replace").splitlines()
    except OSError:
        return ""
    for path in (line.split(":", 2)[-1] for line in cgroups):
        # The cgroups of all pods' containers are below kubepods or kubepods.slice.
        parts = path.partition("kubepods")[2].split("/")
        ids = [match[1] for each in parts if (match := CONTAINER.fullmatch(each))]
        if ids:
            return ids[0]
    return ""
