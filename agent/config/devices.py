"""Settings for devices other than GPUs, and for further CDI specifications and hooks. Pure."""

from operator import attrgetter
from typing import Annotated, Literal

from agent.config.table import Check, Table
from agent.config.values import absolute, is_below, once, plain

DeviceClassName = Literal["kvm", "tun", "vhost", "infiniband", "gdrcopy", "nvidia-fs", "accel"]

CdiMode = Literal["gds", "mofed", "gdrcopy", "imex", "nvswitch", "management"]

CdiHook = Literal[
    "enable-cuda-compat", "disable-device-node-modification", "update-application-profile", "apply-cuda-memory-limits"
]

GPU_PREFIX, GPU_PATHS = "/dev/nvidia", ("/dev/dri", "/dev/kfd")
NSPAWN_PATHS = (
    *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx")),
    *(f"/dev/{name}" for name in ("pts", "shm", "mqueue", "char", "block", "fd", "stdin", "stdout", "stderr", "core")),
)
"""Nodes, directories and links that nspawn creates in each machine (src/nspawn/nspawn.c: copy_devnodes, setup_pts,
setup_dev_console)."""
KMSG = "/dev/kmsg"


def _allowed_path(value: str) -> str:
    if not value.startswith("/dev/"):
        raise ValueError(f"{value!r} is not below /dev")
    if value.startswith(GPU_PREFIX) or is_below(value, GPU_PATHS):
        raise ValueError(f"{value} belongs to GPUs or their driver: use `gpus` or `devices`")
    if is_below(value, NSPAWN_PATHS):
        raise ValueError(f"{value} cannot be given: each machine has its own")
    if value == KMSG:
        raise ValueError(f"{value} cannot be given here: use `nspawn.kmsg`")
    return value


class ExtraDevice(Table, frozen=True, kw_only=True):
    """One character device of the host. It has the same path in the machine."""

    path: Annotated[str, Check(absolute), Check(plain), Check(_allowed_path)]
    """Below `/dev`. A symbolic link is not followed."""
    mode: Literal["r", "rw", "rwm"] = "rw"
    """What the machine's cgroup permits: reading (`r`), writing (`w`), mknod (`m`)."""


CDI_MODES = {
    "gds": ("devices", "nvidia-fs"),
    "mofed": ("devices", "infiniband"),
    "gdrcopy": ("devices", "gdrcopy"),
    "imex": ("imex_channels", ""),
    "nvswitch": ("", ""),
    "management": ("", ""),
}
"""By mode, the setting that grants the mode's device nodes, and the value that this setting's list must contain. If the
setting is not a list, the value is empty. If the mode needs no other setting, both are empty."""


CdiModes = Annotated[list[CdiMode], once("mode", str)]
CdiHooks = Annotated[list[CdiHook], once("hook", str)]
DeviceClasses = Annotated[list[DeviceClassName], once("device", str)]
ExtraDevices = Annotated[list[ExtraDevice], once("device", attrgetter("path"))]
