"""Sockets of the driver's daemons on the host, each given to a machine and its pods only where it is configured. Pure.

Machines get the directory: a socket that a restarted daemon makes anew is seen through that, not through a bind of the
old one. Pods get what nvidia-ctk gives them (internal/discover/ipc.go) where it finds it, which below a driver root it
does not. Plain mappings, since each start of the machine half loads this.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

MOUNT_OPTIONS = ("nosuid", "nodev", "rbind", "rprivate", "noexec")
"""As nvidia-ctk has them from 1.19 on. Not read-only, though connect(2) on Linux would not mind."""

DIRECTORIES: Mapping[str, str] = {
    "persistenced": "/run/nvidia-persistenced",
    "fabricmanager": "/run/nvidia-fabricmanager",
    # CUDA_MPS_PIPE_DIRECTORY must name it: the default, /tmp/nvidia-mps, any user of the host could make first.
    "mps": "/run/nvidia-mps",
}
"""By the name that the configuration has for the daemon, on the host and in machines. In /run, where root alone makes
entries: a link elsewhere could lead anywhere."""
WRITABLE: Set[str] = frozenset({"mps"})
"""Whose clients lock files in the directory; the others only connect."""
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
    """Of all that these daemons may have."""
    return {source: target for name in names for source, target in MOUNTS.get(name, {}).items()}


def mounts(names: Iterable[str], present: Set[str]) -> Iterator[dict[str, Any]]:
    """Of a CDI spec: for what there is in the machine."""
    for source, target in mount_points(names).items():
        if source in present:
            yield {"hostPath": source, "containerPath": target, "options": list(MOUNT_OPTIONS)}


def lacking(names: Iterable[str], present: Set[str]) -> tuple[str, ...]:
    """Daemons that have none of their sockets in the machine."""
    return tuple(name for name in names if not MOUNTS.get(name, {}).keys() & present)
