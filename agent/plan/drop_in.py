"""The text of the drop-in for systemd-nspawn@NAME.service, systemd.unit(5)."""

from agent.config import MachineSettings
from agent.facts import DeviceNode
from agent.identity import DeviceNumber
from agent.plan.nspawn import HEADER


def device_allow(
    settings: MachineSettings, template: tuple[str, ...], nodes: tuple[DeviceNode, ...]
) -> tuple[str, ...]:
    """The whole DeviceAllow= list. `template` is that of the installed template unit."""
    # Bound, but not allowed by DevicePolicy=closed: open() would fail with EPERM (systemd 257).
    kmsg = ("/dev/kmsg rw",) if settings.nspawn.kmsg else ()
    modes = {device.path: device.mode for device in settings.extra_devices}
    ours = (f"{device_entry(node.number)} {modes.get(node.path, settings.device_mode)}" for node in nodes)
    return (*template, *kmsg, *ours)


def device_entry(number: DeviceNumber) -> str:
    """By number: systemd would look at a path when it applies the policy, and skip a node that is not there yet."""
    return f"/dev/char/{number.major}:{number.minor}"


def render_drop_in(machine: str, settings: MachineSettings, allow: tuple[str, ...]) -> bytes:
    """The whole file, with the list that `device_allow` gives."""
    lines = [
        "[Unit]",
        f"Wants=unbounded-agent-prepare@{machine}.service",
        f"After=unbounded-agent-prepare@{machine}.service",
        "# A machine whose start fails, for want of a node that is bound, is tried again until it works.",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        *(f"Environment={quote(f'{name}={value}')}" for name, value in sorted(settings.nspawn.environment.items())),
        "# The template's 16384 would cap the processes of the whole node.",
        "TasksMax=infinity",
        "# NCCL and RDMA pin memory.",
        "LimitMEMLOCK=infinity",
        "Restart=on-failure",
        "RestartSec=2",
        "# An empty assignment first, then the template's own list: otherwise what systemctl set-property once",
        "# wrote into 50-DeviceAllow.conf would stay allowed. Further devices: a drop-in that sorts behind this one.",
        "DeviceAllow=",
        *(f"DeviceAllow={entry}" for entry in allow),
    ]
    return (HEADER + "\n" + "".join(f"{line}\n" for line in lines)).encode()


def quote(value: str) -> str:
    """For a setting that splits words: quoted, with specifiers and variables taken literally (systemd.syntax(7))."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
