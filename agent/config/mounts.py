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
SETTINGS_PLACES = ("/etc", "/run", "/usr/lib", "/lib", "/usr/local/lib", "/usr/share", "/usr/local/share")
"""Where programs look for the directories in SETTINGS, one place after the other."""
SETTINGS = (
    # systemd's own, and what it and udevd run or set as root.
    *("systemd", "modprobe.d", "modules-load.d", "depmod.d", "tmpfiles.d", "sysctl.d", "sysusers.d", "binfmt.d"),
    *("environment.d", "credstore", "credstore.encrypted", "kernel"),
    # Who may do what, and what runs when.
    *("dbus-1", "polkit-1", "pam.d", "security", "ssh", "sudoers.d", "cron.d", "init.d", "profile.d"),
    # What packages, the initramfs, the network and container runtimes run.
    *("apt", "dpkg", "initramfs-tools", "dracut", "network", "NetworkManager", "networkd-dispatcher"),
    *("containers", "containerd", "docker", "cdi"),
)
"""Directories of settings, by their name in each of SETTINGS_PLACES, that make root's programs run a program, load a
library or change any file."""
CONTROL_PATHS = (
    *(STATE, RUNTIME, posixpath.dirname(CONFIG_FILE), MACHINE_ROOTS),
    *(f"{place}/{name}" for place in SETTINGS_PLACES for name in SETTINGS),
    # udevd's, except /run/udev/data. Its control socket serves any root user, even root in a machine.
    *("/etc/udev", "/usr/lib/udev", "/lib/udev", "/usr/local/lib/udev", "/run/udev/control", "/run/udev/rules.d"),
    # The agent itself, directories with programs, and the kernel. Mounted read-only, they are not protected: root in
    # the machine can remount them writable. Directories of libraries are not here: they may be mounted read-only, and
    # docs/security.md warns of that.
    *("/opt/unbounded-agent", "/usr/lib/unbounded-agent", "/boot", "/efi", "/usr/src", "/var/lib/dkms"),
    *("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/usr/libexec", "/usr/games"),
    # Further files that decide who becomes root, what is mounted, and what root's programs run.
    *(f"/etc/{name}" for name in ("passwd", "shadow", "group", "gshadow", "subuid", "subgid", "sudoers", "sudo.conf")),
    *(
        f"/etc/{name}"
        for name in ("fstab", "crypttab", "inittab", "exports", "nsswitch.conf", "login.defs", "rc.local")
    ),
    *(f"/etc/{name}" for name in ("crontab", "anacrontab", "cron.hourly", "cron.daily", "cron.weekly", "cron.monthly")),
    *(
        f"/etc/{name}"
        for name in ("ld.so.preload", "ld.so.conf", "ld.so.conf.d", "environment", "profile", "bash.bashrc")
    ),
    *(
        f"/etc/{name}"
        for name in ("logrotate.d", "logrotate.conf", "sysctl.conf", "modules", "default", "alternatives")
    ),
    *(f"/etc/{name}" for name in ("apparmor.d", "grub.d", "kubernetes", "nftables.conf", "rc.d", "acpi")),
    *("/var/spool/cron", "/var/spool/anacron", "/var/lib/dpkg", "/var/lib/systemd", "/var/lib/polkit-1"),
    # Sockets through which a program starts containers, and their files.
    *("/run/docker.sock", "/run/crio", "/run/podman", "/var/lib/docker", "/var/lib/containerd", "/var/lib/containers"),
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
