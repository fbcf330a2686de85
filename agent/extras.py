"""What machines get beside GPUs, by their settings: devices by switch, and further ones and mounts by path. Pure.

nspawn's own `Bind=` and `BindReadOnly=` take anything; what is refused here would stop a machine, or undo what the
agent does in it.
"""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

DeviceSwitch = Literal["kvm", "tun", "vhost", "infiniband", "gdrcopy", "nvidia-fs", "accel"]

OF_GPUS = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
OF_NSPAWN = (
    *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx")),
    *(f"/dev/{name}" for name in ("pts", "shm", "mqueue", "char", "block", "fd", "stdin", "stdout", "stderr", "core")),
)
"""What is made anew in each machine (src/nspawn/nspawn.c: copy_devnodes, setup_pts, setup_dev_console), and links."""
KMSG = "/dev/kmsg"
PLAIN = re.compile(r"(?! )[^\\\x00-\x1f\x7f]*(?<! )")
"""What a Bind= line takes as it is: outer blanks are stripped, a backslash escapes."""


def _absolute(value: str) -> str:
    if not value.startswith("/") or not value.isprintable() or {".", ".."} & set(value.split("/")):
        raise ValueError(f"{value!r} is not an absolute path without `..`, such as /opt/driver/lib")
    return "/" + "/".join(part for part in value.split("/") if part)


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
"""Normalised: no slash at its end, and none doubled."""


def _plain(value: str) -> str:
    if not PLAIN.fullmatch(value):
        raise ValueError(f"{value!r} has a backslash, or a blank at its end")
    return value


def _device(value: str) -> str:
    if not value.startswith("/dev/"):
        raise ValueError(f"{value!r} is not below /dev")
    if _is_below(value, OF_GPUS):
        raise ValueError(f"{value} belongs to GPUs or their driver: `gpus` and `devices` give those")
    if _is_below(value, OF_NSPAWN):
        raise ValueError(f"{value}: each machine has its own")
    if value == KMSG:
        raise ValueError(f"{value} is given by `nspawn.kmsg`")
    return value


def _is_below(path: str, places: Iterable[str]) -> bool:
    """Whether it is one of these places (patterns of fnmatch) or lies below one."""
    return any(fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}/*") for pattern in places)


class ExtraDevice(BaseModel):
    """One character device of the host, at the same path in the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: Annotated[str, AfterValidator(_absolute), AfterValidator(_plain), AfterValidator(_device)]
    mode: Literal["r", "rw", "rwm"] = "rw"
    """What the machine's cgroup permits: reading, writing, mknod."""


def once(kind: str, values: Iterable[str]) -> None:
    """Raises ValueError for what is there twice."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{kind} {value} is there twice")
        seen.add(value)


def devices_once(devices: list[ExtraDevice]) -> list[ExtraDevice]:
    once("device", (device.path for device in devices))
    return devices


def switches_once(names: list[DeviceSwitch]) -> list[DeviceSwitch]:
    once("device", names)
    return names


Switches = Annotated[list[DeviceSwitch], AfterValidator(switches_once)]
ExtraDevices = Annotated[list[ExtraDevice], AfterValidator(devices_once)]
