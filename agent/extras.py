"""What machines get beside GPUs, by their settings: devices by switch, and further ones and mounts by path. Pure.

nspawn's own `Bind=` and `BindReadOnly=` take anything; what is refused here would stop a machine, or undo what the
agent does in it.
"""

import posixpath
import re
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict

from agent.paths import CDI_DIRECTORIES, CONFIG_FILE, MACHINE_HOST_NVIDIA, MACHINE_ROOTS, RUNTIME, STATE

DeviceSwitch = Literal["kvm", "tun", "vhost", "infiniband", "gdrcopy", "nvidia-fs", "accel"]

CdiMode = Literal["gds", "mofed", "gdrcopy", "imex", "nvswitch", "management"]

OF_GPUS = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
OF_NSPAWN = (
    *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx")),
    *(f"/dev/{name}" for name in ("pts", "shm", "mqueue", "char", "block", "fd", "stdin", "stdout", "stderr", "core")),
)
"""What is made anew in each machine (src/nspawn/nspawn.c: copy_devnodes, setup_pts, setup_dev_console), and links."""
KMSG = "/dev/kmsg"
PLAIN = re.compile(r"(?! )[^\\\x00-\x1f\x7f]*(?<! )")
"""What a Bind= line takes as it is: outer blanks are stripped, a backslash escapes."""
PATH_LIMIT, NAME_LIMIT = 4095, 255
"""Bytes (PATH_MAX and NAME_MAX of limits.h): a look at anything longer would fail for ever."""

NO_SOURCE = {
    "each machine has its own": ("/proc", "/sys"),
    "`devices` and `extra_devices` give nodes": ("/dev",),
    "the service does not see it as the machine's start does": (
        "/root", "/run/user", "/tmp", "/var/tmp", "/lib/modules", "/usr/lib/modules",
    ),
}  # fmt: skip
SECRET = (
    *(STATE, RUNTIME, posixpath.dirname(CONFIG_FILE), MACHINE_ROOTS),
    # systemd's settings of all machines, and what only root may talk to, which root in a machine is as well:
    # systemd's private socket, and udevd's control socket.
    *("/etc/systemd", "/run/systemd", "/run/udev/control"),
)
"""What decides over all machines and the host: no source lies there or holds one of these."""
NO_TARGET = {
    "each machine has its own": ("/proc", "/sys", "/dev"),
    "the machine's systemd-tmpfiles removes what is old there": ("/tmp", "/var/tmp"),
    "the machine's systemd has its own there": ("/etc/systemd", "/lib/systemd", "/usr/lib/systemd", "/run/systemd"),
    "systemd-nspawn has something there": ("/run/host",),
    "the agent has something there": (
        MACHINE_HOST_NVIDIA, RUNTIME, STATE, *CDI_DIRECTORIES, "/run/cdi", "/lib/modules", "/usr/lib/modules",
        "/usr/lib/unbounded-agent", "/etc/containerd", "/etc/nvidia-container-runtime",
    ),
    "it is a link in the machine": ("/var/run", "/bin", "/sbin", "/lib", "/lib64"),
}  # fmt: skip
LINKED = ("/usr/bin", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib/i386-linux-gnu")
"""Directories in which the machine half makes links: single files may be mounted there, but not over all of it."""


def _absolute(value: str) -> str:
    if not value.startswith("/") or not value.isprintable() or {".", ".."} & set(value.split("/")):
        raise ValueError(f"{value!r} is not an absolute path without `..`, such as /opt/driver/lib")
    return "/" + "/".join(part for part in value.split("/") if part)


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
"""Normalised: no slash at its end, and none doubled."""


def plain(value: str) -> str:
    """A path that a line of settings can hold; raises ValueError."""
    if not PLAIN.fullmatch(value) or not value.isprintable():
        raise ValueError(f"{value!r} has a backslash, a control character, or a blank at its end")
    if len(value.encode()) > PATH_LIMIT or any(len(part.encode()) > NAME_LIMIT for part in value.split("/")):
        raise ValueError(f"{value[:40]!r}... is longer than a path can be")
    return value


def _device(value: str) -> str:
    if not value.startswith("/dev/"):
        raise ValueError(f"{value!r} is not below /dev")
    if is_below(value, OF_GPUS):
        raise ValueError(f"{value} belongs to GPUs or their driver: `gpus` and `devices` give those")
    if is_below(value, OF_NSPAWN):
        raise ValueError(f"{value}: each machine has its own")
    if value == KMSG:
        raise ValueError(f"{value} is given by `nspawn.kmsg`")
    return value


def mountable(value: str, secret: Collection[str] = SECRET) -> str:
    """A source; raises ValueError for one that no machine may have."""
    for why, places in NO_SOURCE.items():
        if is_below(value, places):
            raise ValueError(f"{value} cannot be mounted into a machine: {why}")
    if is_below(value, secret) or _holds(value, secret):
        raise ValueError(f"{value} has what rules over the host or other machines in it: name something further below")
    return value


def _source(value: str) -> str:
    return mountable(value)


def _target(value: str) -> str:
    for why, places in NO_TARGET.items():
        if is_below(value, places):
            raise ValueError(f"nothing can be mounted at {value}: {why}")
    covered = (*(place for places in NO_TARGET.values() for place in places), *LINKED)
    if value in LINKED or _holds(value, covered):
        raise ValueError(f"a mount at {value} would hide what is below it and the machine needs: name a place there")
    return value


def _holds(path: str, places: Iterable[str]) -> bool:
    """Whether one of these places lies below it."""
    return any(place.startswith(f"{path.rstrip('/')}/") for place in places)


def is_below(path: str, places: Iterable[str]) -> bool:
    """Whether it is one of these places (patterns of fnmatch) or lies below one."""
    return any(fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}/*") for pattern in places)


class ExtraDevice(BaseModel):
    """One character device of the host, at the same path in the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: Annotated[str, AfterValidator(_absolute), AfterValidator(plain), AfterValidator(_device)]
    mode: Literal["r", "rw", "rwm"] = "rw"
    """What the machine's cgroup permits: reading, writing, mknod."""


class ExtraMount(BaseModel):
    """A directory or file of the host, with what is mounted below it, at a path of the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    source: Annotated[str, AfterValidator(_absolute), AfterValidator(plain), AfterValidator(_source)]
    target: Annotated[str, AfterValidator(_absolute), AfterValidator(plain), AfterValidator(_target)]
    read_only: bool = True


CDI_MODES = {
    "gds": ("devices", "nvidia-fs"),
    "mofed": ("devices", "infiniband"),
    "gdrcopy": ("devices", "gdrcopy"),
    "imex": ("imex_channels", ""),
    "nvswitch": ("", ""),
    "management": ("", ""),
}
"""The key that gives the nodes that a mode is about, where one has to be set, and what has to be in it."""


T = TypeVar("T")


def _once(kind: str, key: Callable[[T], str]) -> AfterValidator:
    """For a list; its validator raises ValueError for what is there twice."""

    def check(values: list[T]) -> list[T]:
        keys = [key(value) for value in values]
        if twice := next((each for each in keys if keys.count(each) > 1), ""):
            raise ValueError(f"{kind} {twice} is there twice")
        return values

    return AfterValidator(check)


CdiModes = Annotated[list[CdiMode], _once("mode", str)]
Switches = Annotated[list[DeviceSwitch], _once("device", str)]
ExtraDevices = Annotated[list[ExtraDevice], _once("device", attrgetter("path"))]
ExtraMounts = Annotated[list[ExtraMount], _once("a mount at", attrgetter("target"))]
