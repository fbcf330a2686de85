"""Renders the drop-in for systemd-nspawn@NAME.service, systemd.unit(5). Pure."""

from agent.config.settings import MachineSettings
from agent.host.plan.before_start import before_start
from agent.host.plan.nspawn import HEADER
from agent.host.vendors import HOST_VENDORS
from agent.model.device import DeviceNumber
from agent.model.device_allow import DeviceAllow
from agent.model.facts import DeviceNode
from agent.model.paths import DRIVER_ROOTS_TARGET

NOT_FOR_MACHINES = ("block-", "/dev/loop-control", "/dev/mapper/control")
"""Prefixes of DeviceAllow= entries in systemd's template unit that no machine gets.

The template has these entries for `systemd-nspawn --image=`. With them, root in a machine could open the host's disks:
it can mount a devtmpfs, which has a node for each disk of the host. If a loop device is mounted read-only, root could
also replace the file behind the device (LOOP_CHANGE_FD, drivers/block/loop.c).
"""


def device_allow(
    settings: MachineSettings, template: tuple[DeviceAllow, ...], nodes: tuple[DeviceNode, ...]
) -> tuple[DeviceAllow, ...]:
    """Return the machine's DeviceAllow= list. `template` is the list of the installed template unit."""
    # DevicePolicy=closed does not allow /dev/kmsg: without this entry, open() fails with EPERM (systemd 257).
    kmsg = (DeviceAllow("/dev/kmsg", "rw"),) if settings.nspawn.kmsg else ()
    modes = {device.path: device.mode for device in settings.extra_devices}
    granted = (DeviceAllow(node_by_number(node.number), modes.get(node.path, settings.device_mode)) for node in nodes)
    return (*from_template(template), *kmsg, *granted)


def from_template(template: tuple[DeviceAllow, ...]) -> tuple[DeviceAllow, ...]:
    """Return the template's entries that a machine gets."""
    return tuple(entry for entry in template if not entry.node.startswith(NOT_FOR_MACHINES))


def node_by_number(number: DeviceNumber) -> str:
    """Return the name of a device in a DeviceAllow= entry: by number, because systemd skips paths that are missing."""
    return f"/dev/char/{number.major}:{number.minor}"


def render_drop_in(
    machine: str, settings: MachineSettings, allow: tuple[DeviceAllow, ...], *, whole: bool = True
) -> bytes:
    """Return the drop-in with the DeviceAllow= list `allow`.

    If not `whole`, omit the commands before each start, and the lines that concern only the machine's stop: if a
    machine was started without these lines, it needs no restart.
    """
    lines = [
        "[Unit]",
        f"Wants=unbounded-agent-prepare@{machine}.service",
        f"After=unbounded-agent-prepare@{machine}.service",
        *(stop_order() if whole else ()),
        "# A machine whose start fails, for want of a node that is bound, is tried again until it works.",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        *(before_start(machine) if whole else ()),
        *(f"Environment={quote(f'{name}={value}')}" for name, value in sorted(settings.nspawn.environment.items())),
        "# The template's 16384 would cap the processes of the whole node.",
        "TasksMax=infinity",
        "# NCCL and RDMA pin memory.",
        "LimitMEMLOCK=infinity",
        "Restart=on-failure",
        "RestartSec=2",
        *(stop_limit() if whole else ()),
        "# An empty assignment first, then the template's list without loop devices and device mapper: otherwise what",
        "# systemctl set-property once wrote into 50-DeviceAllow.conf would stay allowed. Further devices: a drop-in",
        "# that sorts behind this one.",
        "DeviceAllow=",
        *(f"DeviceAllow={entry}" for entry in allow),
    ]
    return (HEADER + "\n" + "".join(f"{line}\n" for line in lines)).encode()


def stop_order() -> list[str]:
    """Return the lines that let the machine stop before the host stops or unmounts what its pods use.

    At the start, prepare@ waits for the same units. If the agent was removed, these lines make the machine wait.
    """
    services = (service for vendor in HOST_VENDORS for service in vendor.services)
    return [
        "# At the host's shutdown, the machine stops before these. The order through prepare@ does not count then,",
        "# because systemd orders only what it starts or stops, and prepare@ is not active.",
        f"After={' '.join(('remote-fs.target', DRIVER_ROOTS_TARGET, *services))}",
    ]


def stop_limit() -> list[str]:
    """Return the lines that let the machine shut down before systemd kills it."""
    return [
        "# In the machine, systemd kills after 90 s what ignores SIGTERM, such as a pod's `sleep infinity`. With the",
        "# same limit here, the default, the whole machine would be killed in the middle of its shutdown.",
        "TimeoutStopSec=120",
    ]


def quote(value: str) -> str:
    """Return the value in quotes, for a setting that systemd splits into words (systemd.syntax(7)).

    systemd also expands specifiers in such a setting, so `%` is escaped.
    """
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
