"""Settings for extra bind mounts, and which paths are refused. Pure.

nspawn's own `Bind=` and `BindReadOnly=` accept any path. The paths that are refused here would keep a machine from
starting, hide what the agent and systemd need in it, or let the machine take control of the host.
"""

import posixpath
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Annotated

from agent.config.table import Check, Table
from agent.config.values import absolute, is_below, once, plain
from agent.model.paths import CDI_DIRECTORIES, CONFIG_FILE, MACHINE_HOST_NVIDIA, MACHINE_ROOTS, RUNTIME, STATE

REFUSED_SOURCES = {
    "each machine has its own": ("/proc", "/sys"),
    "for device nodes use `devices` or `extra_devices`": ("/dev",),
    "unbounded-agent.service cannot see the host's files there": (
        "/root", "/run/user", "/tmp", "/var/tmp", "/lib/modules", "/usr/lib/modules",
    ),
}  # fmt: skip
"""By reason, the paths that cannot be a source. No path below them can be a source either."""
CONTROL_PATHS = (
    *(STATE, RUNTIME, posixpath.dirname(CONFIG_FILE), MACHINE_ROOTS),
    # systemd's settings of all machines, and two sockets that serve any root user, even root in a machine:
    # systemd's private socket and udevd's control socket.
    *("/etc/systemd", "/run/systemd", "/run/udev/control"),
    # The agent itself, directories with programs, the kernel, and files that decide who becomes root. Mounting them
    # read-only does not protect them: root in the machine can remount them writable.
    *("/opt/unbounded-agent", "/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/lib/systemd", "/lib/systemd", "/boot"),
    *(f"/etc/{name}" for name in ("passwd", "shadow", "group", "gshadow", "sudoers", "sudoers.d", "pam.d", "ssh")),
    *(f"/etc/{name}" for name in ("crontab", "cron.d", "cron.hourly", "cron.daily", "cron.weekly", "cron.monthly")),
    *("/etc/init.d", "/etc/udev", "/etc/modprobe.d", "/etc/ld.so.preload", "/etc/profile.d", "/var/spool/cron"),
    # Further directories with programs, and files that make root's programs load a library, run a program or change any
    # file. Directories of libraries are not here: they may be mounted read-only, and docs/security.md warns of that.
    *("/usr/local/bin", "/usr/local/sbin", "/usr/libexec", "/usr/lib/unbounded-agent", "/usr/lib/udev", "/lib/udev"),
    *("/usr/lib/tmpfiles.d", "/run/tmpfiles.d", "/run/udev/rules.d", "/usr/lib/modprobe.d"),
    *(f"/etc/{name}" for name in ("tmpfiles.d", "ld.so.conf", "ld.so.conf.d", "environment", "profile", "security")),
    *(f"/etc/{name}" for name in ("apt", "logrotate.d", "dbus-1", "polkit-1", "kernel", "bash.bashrc")),
    *("/etc/sysctl.d", "/etc/sysctl.conf", "/etc/binfmt.d", "/var/lib/dpkg"),
)
"""Paths that control the host and all machines. No source may be one of them, lie below one, or contain one."""
TRUSTED = ("/usr", "/etc", "/lib", "/lib32", "/lib64", "/libx32")
"""Directories with files that the host's root executes or reads. Machines may mount them, but only read-only."""
REFUSED_TARGETS = {
    "each machine has its own": ("/proc", "/sys", "/dev"),
    "the machine's systemd-tmpfiles removes old files there": ("/tmp", "/var/tmp"),
    "systemd in the machine has files there": ("/etc/systemd", "/lib/systemd", "/usr/lib/systemd", "/run/systemd"),
    "systemd-nspawn has files there": ("/run/host",),
    "the agent has files there": (
        MACHINE_HOST_NVIDIA, RUNTIME, STATE, *CDI_DIRECTORIES, "/run/cdi", "/lib/modules", "/usr/lib/modules",
        "/usr/lib/unbounded-agent", "/etc/containerd", "/etc/nvidia-container-runtime",
    ),
    "it is a link in the machine": ("/var/run", "/bin", "/sbin", "/lib", "/lib64"),
}  # fmt: skip
"""By reason, the paths that cannot be a target. No path below them can be a target either."""
LINK_DIRECTORIES = ("/usr/bin", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib/i386-linux-gnu")
"""Directories in which the machine half makes links. They cannot be targets themselves, but paths below them can."""


def mountable(value: str, *, read_only: bool, control_paths: Collection[str] = CONTROL_PATHS) -> str:
    """Return the path. Raises ValueError if it must not be the source of a mount.

    Some of CONTROL_PATHS may be links on the host. A caller that can read the host passes as `control_paths` both
    CONTROL_PATHS and the paths to which they lead.
    """
    for why, paths in REFUSED_SOURCES.items():
        if is_below(value, paths):
            raise ValueError(f"{value} cannot be mounted into a machine: {why}")
    if is_below(value, control_paths) or _is_above(value, control_paths):
        raise ValueError(
            f"{value} is, contains or lies below a path that controls the host or other machines: choose another source"
        )
    if not read_only and is_below(value, TRUSTED):
        raise ValueError(f"{value} is where the host keeps its own programs and settings: set read_only = true")
    return value


def _allowed_target(value: str) -> str:
    for why, paths in REFUSED_TARGETS.items():
        if is_below(value, paths):
            raise ValueError(f"nothing can be mounted at {value}: {why}")
    needed = (*(path for paths in REFUSED_TARGETS.values() for path in paths), *LINK_DIRECTORIES)
    if value in LINK_DIRECTORIES or _is_above(value, needed):
        raise ValueError(
            f"a mount at {value} would hide files that the machine needs: choose a path inside that directory"
        )
    return value


def _is_above(path: str, paths: Iterable[str]) -> bool:
    """Return whether one of `paths` lies below the path."""
    return any(each.startswith(f"{path.rstrip('/')}/") for each in paths)


class ExtraMount(Table, frozen=True, kw_only=True):
    """A directory or file of the host, with everything mounted below it, at a path in the machine."""

    source: Annotated[str, Check(absolute), Check(plain)]
    """Absolute path on the host."""
    target: Annotated[str, Check(absolute), Check(plain), Check(_allowed_target)]
    """Absolute path in the machine."""
    read_only: bool = True
    """Mount it read-only. This guards only against mistakes: root in the machine can remount it writable."""

    def __post_init__(self) -> None:
        mountable(self.source, read_only=self.read_only)


ExtraMounts = Annotated[list[ExtraMount], once("a mount at", attrgetter("target"))]
