"""The text of the drop-in for systemd-nspawn@NAME.service, systemd.unit(5)."""

from agent.config import MachineSettings
from agent.facts import DeviceNode
from agent.plan.nspawn import HEADER


def render_drop_in(
    machine: str, settings: MachineSettings, template: tuple[str, ...], nodes: tuple[DeviceNode, ...]
) -> bytes:
    """The whole file. `template` is the DeviceAllow list of the installed template unit."""
    allowed = list(template)
    if settings.nspawn.kmsg:
        # Bound, but not allowed by DevicePolicy=closed: open() would fail with EPERM (systemd 257).
        allowed.append("/dev/kmsg rw")
    # By number: systemd would look at a path when it applies the policy, and skip a node that is not there yet.
    allowed += [f"/dev/char/{node.number.major}:{node.number.minor} {settings.device_mode}" for node in nodes]
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
        *(f"DeviceAllow={entry}" for entry in allowed),
    ]
    return (HEADER + "\n" + "".join(f"{line}\n" for line in lines)).encode()


def quote(value: str) -> str:
    """For a setting that splits words: quoted, with specifiers and variables taken literally (systemd.syntax(7))."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
