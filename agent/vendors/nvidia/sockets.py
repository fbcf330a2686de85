"""Sockets of the driver's daemons on the host; a machine and its pods get each only if it is configured. Pure.

Machines get the directory: it shows the new socket of a restarted daemon, which a bind of the old socket would not.
Pods get what nvidia-ctk finds (internal/discover/ipc.go); below a driver root it finds nothing. Plain mappings,
because each start of the machine half loads this.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

MOUNT_OPTIONS = ("nosuid", "nodev", "rbind", "rprivate", "noexec")
"""As in nvidia-ctk since 1.19. Not read-only, although connect(2) on Linux would not mind."""

DIRECTORIES: Mapping[str, str] = {
    "persistenced": "/run/nvidia-persistenced",
    "fabricmanager": "/run/nvidia-fabricmanager",
    # CUDA_MPS_PIPE_DIRECTORY must name it: any user of the host could make the default, /tmp/nvidia-mps, first.
    "mps": "/run/nvidia-mps",
}
"""By the daemon's name in the configuration, the directory on the host and in machines. In /run, where only root makes
entries: a link elsewhere could lead anywhere."""
WRITABLE: Set[str] = frozenset({"mps"})
"""Daemons whose clients lock files in the directory; others' clients only connect."""
MOUNTS: Mapping[str, Mapping[str, str]] = {
    "persistenced": {f"{DIRECTORIES['persistenced']}/socket": f"{DIRECTORIES['persistenced']}/socket"},
    # Of its SDK (FM_CMD_UNIX_SOCKET_PATH), and of the NVLink subnet manager that newer NVSwitch systems have.
    "fabricmanager": {
        f"{DIRECTORIES['fabricmanager']}/{name}": f"{DIRECTORIES['fabricmanager']}/{name}"
        for name in ("socket", "fm_sm_ipc.socket")
    },
    # Where CUDA looks without CUDA_MPS_PIPE_DIRECTORY.
    "mps": {DIRECTORIES["mps"]: "/tmp/nvidia-mps"},
}
"""Path in pods by path in the machine."""


def mount_points(names: Iterable[str]) -> dict[str, str]:
    """Return everything that these daemons may have, path in pods by path in the machine."""
    return {source: target for name in names for source, target in MOUNTS.get(name, {}).items()}


def mounts(names: Iterable[str], present: Set[str]) -> Iterator[dict[str, Any]]:
    """Yield a CDI specification's mounts of those that exist in the machine."""
    for source, target in mount_points(names).items():
        if source in present:
            yield {"hostPath": source, "containerPath": target, "options": list(MOUNT_OPTIONS)}


def lacking(names: Iterable[str], present: Set[str]) -> tuple[str, ...]:
    """Return daemons without any socket in the machine."""
    return tuple(name for name in names if not MOUNTS.get(name, {}).keys() & present)
