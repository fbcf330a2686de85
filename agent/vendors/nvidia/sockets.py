"""Sockets of the driver's daemons on the host. Machines and their pods get them only if settings name the daemon. Pure.

A machine gets a daemon's whole directory, because a daemon that restarts makes a new socket there, and a bind mount of
the old socket would be useless. nvidia-ctk would mount the sockets into pods (internal/discover/ipc.go), but looks for
them below the driver root, where they are not; so the agent adds these mounts. The data are plain mappings, because
these load fast, and each start of the machine half loads them.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

MOUNT_OPTIONS = ("nosuid", "nodev", "rbind", "rprivate", "noexec")
"""Options of the mounts, as in nvidia-ctk since 1.19. Mounts are writable, although connect(2) does not need that."""

DIRECTORIES: Mapping[str, str] = {
    "persistenced": "/run/nvidia-persistenced",
    "fabricmanager": "/run/nvidia-fabricmanager",
    # On the host, CUDA_MPS_PIPE_DIRECTORY must name this directory: any user could create the default, /tmp/nvidia-mps.
    "mps": "/run/nvidia-mps",
}
"""The directory on the host and in machines, by the daemon's name in the configuration. All of them are in /run,
where only root can make links."""
WRITABLE: Set[str] = frozenset({"mps"})
"""Daemons whose clients must be able to lock files in the directory. Clients of the other daemons only connect."""
MOUNTS: Mapping[str, Mapping[str, str]] = {
    "persistenced": {f"{DIRECTORIES['persistenced']}/socket": f"{DIRECTORIES['persistenced']}/socket"},
    # The socket of the Fabric Manager SDK (FM_CMD_UNIX_SOCKET_PATH) and, on newer NVSwitch systems, the socket of the
    # NVLink subnet manager.
    "fabricmanager": {
        f"{DIRECTORIES['fabricmanager']}/{name}": f"{DIRECTORIES['fabricmanager']}/{name}"
        for name in ("socket", "fm_sm_ipc.socket")
    },
    # In pods, the directory is at the default of CUDA_MPS_PIPE_DIRECTORY.
    "mps": {DIRECTORIES["mps"]: "/tmp/nvidia-mps"},
}
"""The paths that pods get for each daemon: paths in pods by path in the machine."""


def mount_points(names: Iterable[str]) -> dict[str, str]:
    """Return what pods get for these daemons: paths in pods by path in the machine. Missing paths are included too."""
    return {source: target for name in names for source, target in MOUNTS.get(name, {}).items()}


def mounts(names: Iterable[str], present: Set[str]) -> Iterator[dict[str, Any]]:
    """Yield the mounts for a CDI specification. `present` has the paths that exist in the machine."""
    for source, target in mount_points(names).items():
        if source in present:
            yield {"hostPath": source, "containerPath": target, "options": list(MOUNT_OPTIONS)}


def missing_daemons(names: Iterable[str], present: Set[str]) -> tuple[str, ...]:
    """Return the daemons that have no path in `present`. (MOUNTS has each daemon's paths.)"""
    return tuple(name for name in names if not MOUNTS.get(name, {}).keys() & present)
