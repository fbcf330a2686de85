"""What the host half, the machine half and NVIDIA's own components agree on: names, paths, sockets, words. Pure.

The data are plain mappings, because these load fast, and each start of the machine half loads them.
"""

import re
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from agent.model.conditions import ConditionType
from agent.model.device import DeviceKind
from agent.model.handoff import FabricAnswer
from agent.vendors.machine_vendor import Marker

NVIDIA_CTK = "/usr/bin/nvidia-ctk"
HOOK = "/usr/bin/nvidia-cdi-hook"

SHARED = frozenset({DeviceKind.CONTROL, DeviceKind.MODESET, DeviceKind.UVM, DeviceKind.UVM_TOOLS})
"""Kinds of nodes that every machine with a GPU gets, and that nvidia-ctk gives to every container (common-nvml.go).
Alone, they give access to no GPU."""

# Sockets of the driver's daemons on the host. Machines and their pods get them only if settings name the daemon.
#
# A machine gets a daemon's whole directory, because a daemon that restarts makes a new socket there, and a bind mount
# of the old socket would be useless. nvidia-ctk would mount the sockets into pods (internal/discover/ipc.go), but looks
# for them below the driver root, where they are not; so the agent adds these mounts.

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


# Names that NVIDIA's Kubernetes device plugin, and others for its GPUs, give to sockets, resources and devices.
# The names are from github.com/NVIDIA/k8s-device-plugin: getPluginSocketPath in internal/plugin/server.go, AnnotatedID
# in internal/rm/devices.go. SOCKETS also matches the sockets of Google's plugin, which are called nvidiaGPU-TIME.sock.

RESOURCE_PREFIX = "nvidia.com/"
"""Prefix of the resources `nvidia.com/gpu`, `nvidia.com/gpu.shared`, `nvidia.com/mig-1g.10gb` and so on. The plugin's
settings can change what follows the prefix."""
HARMLESS_RESOURCES = ("nvidia.com/hostdev*",)
"""Network devices, which NVIDIA's Network Operator gives to pods."""
SOCKETS = "nvidia*.sock"
SPEC_KIND = "k8s.device-plugin.nvidia.com/gpu"
SPEC = "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json"
"""The plugin writes this file at its start if its device list strategy is `cdi-...` (CreateSpecFile in
internal/cdi/cdi.go)."""
MONITORS = (
    "nvidia-device-p",
    "dcgm-exporter",
    "nv-hostengine",
    "gpu-feature-dis",
    "nvidia-mig-mana",
    "gpu-kubelet-plu",
)
"""The device plugin, the exporter and DCGM's daemon, GPU Feature Discovery, the MIG manager, and NVIDIA's own driver
for Dynamic Resource Allocation: they open all GPUs. The kernel keeps 15 characters of a name (proc_pid_comm(5))."""
UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
IDENTITY = re.compile(f"((?:GPU|MIG)-{UUID}|MIG-GPU-{UUID}/[0-9]+/[0-9]+)(?:(?:::|-)[0-9]+)?")
"""A UUID as NVML writes it (for MIG before R470: MIG-GPU-UUID/1/0). A number may follow, because several containers can
share a GPU: after `::` with time-slicing and MPS, after `-` with HAMi's plugin."""


def gpu_of(name: str) -> str:
    """Return the UUID in the name of a GPU or MIG device; empty for any other name, such as an index or `all`."""
    match = IDENTITY.fullmatch(name)
    return match[1] if match else ""


# The words in which a GPU describes its registration with the NVLink fabric.
# NVML has four states (nvmlGpuFabricState_t in nvml.h): not supported, not started, in progress and completed.
# nvidia-smi prints the first one as N/A. A status is valid only in the state `Completed`.

NO_FABRIC = frozenset({"", "N/A", "[N/A]", "Not Supported", "[Not Supported]"})
REGISTERED = ("Completed", "Success")
WITH_FABRIC = frozenset({"Not Started", "In Progress", REGISTERED[0]})
NO_ANSWER = ("[", "ERR")
"""How words begin by which nvidia-smi says that it got no answer: [GPU is lost], [Unknown Error], ERR!."""


def is_answer(answer: FabricAnswer) -> bool:
    """Return whether the GPU answered, in words that are known."""
    without_status = answer.state != REGISTERED[0] and answer.status in NO_FABRIC
    known = answer.state in WITH_FABRIC and (without_status or not answer.status.startswith(NO_ANSWER))
    return known or not has_fabric(answer)


def has_fabric(answer: FabricAnswer) -> bool:
    """Return whether the GPU has a fabric. GPUs before Hopper say that they have none, even with NVSwitch."""
    return answer.state not in NO_FABRIC


def is_registered(answer: FabricAnswer) -> bool:
    return (answer.state, answer.status) == REGISTERED


# What a GPU says of its own health, by the fields of `nvidia-smi --query-gpu`.
# `nvidia-smi --help-query-gpu` lists the fields. That of 465.27 lacks remapped_rows, fabric and the recovery action.
# Those of 535.309.01 and 550.163.01 lack the recovery action, say two of its values as reset_status, and lack
# remapped_rows in Debian's builds. That of 580.178.04 has all but reset_status. Later drivers say clocks_event_reasons,
# and list the older name too. No field has the error counters of NVLinks: only `nvidia-smi nvlink -e` shows them.

RECOVERY_ACTION = "gpu_recovery_action"
RESET_REQUIRED = "reset_status.reset_required"
DRAIN_AND_RESET = "reset_status.drain_and_reset_recommended"
PERSISTENCE = "persistence_mode"
UNCORRECTED = "ecc.errors.uncorrected.volatile.total"
"""Errors since the driver initialised the GPU."""
UNCORRECTED_EVER = "ecc.errors.uncorrected.aggregate.total"
"""Errors in the GPU's life, which it keeps. The other counter begins again when nobody has the GPU open any longer."""
PAGES_PENDING = "retired_pages.pending"
"""GPUs before Ampere retire pages; later ones remap rows."""
ROWS_PENDING = "remapped_rows.pending"
ROWS_FAILED = "remapped_rows.failure"
POWER_BRAKE = "clocks_throttle_reasons.hw_power_brake_slowdown"
FABRIC_HEALTH = "fabric.health.summary"
HEALTH_FIELDS = (
    *(PERSISTENCE, RECOVERY_ACTION, RESET_REQUIRED, DRAIN_AND_RESET),
    *(UNCORRECTED, PAGES_PENDING, ROWS_PENDING, ROWS_FAILED, POWER_BRAKE, FABRIC_HEALTH),
)
LINK_ERRORS = "nvlink_errors"
"""Not one of nvidia-smi's fields: what its counters of NVLinks say (link_word)."""
CRC_RATE = 100.0
"""Errors per second."""


def link_word(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> str:
    """Return the worst kind of NVLink errors in these seconds; `None` for none. Pure.

    The parameters are counts by kind. DCGM's health watch (MonitorNVLink in modules/health/DcgmHealthWatch.cpp, read in
    November 2026) fails for one more recovery or replay, and for CRC errors at CRC_RATE; fewer CRC errors only warn.
    """
    # A counter that has begun again has counted since.
    more = {
        kind: count - before.get(kind, 0) if count >= before.get(kind, 0) else count for kind, count in after.items()
    }
    bad = [kind for kind in ("Recovery", "Replay") if more.get(kind)]
    crc = ["CRC"] if more.get("CRC", 0) >= CRC_RATE * max(seconds, 1.0) else []
    return next(iter(bad + crc), "None")


REQUIRES_RESET = "GPU requires reset"
"""What nvidia-smi prints, in brackets, for each field of a GPU that only a reset helps (NVML_ERROR_RESET_REQUIRED)."""


# The files by which the GPU Operator's validator says that driver and toolkit work.
# Names and content are as in the Operator's release 26.7, for a driver on the host (cmd/nvidia-validator). The device
# plugin's container waits for both files, and sources the first one in its shell.

DIRECTORY = "/run/nvidia/validations"
DRIVER = (ConditionType.DEVICES_ALLOWED, ConditionType.LIBRARIES_LINKED, ConditionType.CDI_SPEC_CURRENT)
"""What proves that the driver works. CDISpecCurrent proves that NVML works: nvidia-ctk finds the GPUs through NVML."""
TOOLKIT = (*DRIVER, ConditionType.RUNTIME_CONFIGURED, ConditionType.RUNTIME_ACTIVE)
# The Operator mounts the machine's root on /host.
CONTENT = """\
IS_HOST_DRIVER=true
NVIDIA_DRIVER_ROOT=/
DRIVER_ROOT_CTR_PATH=/host
NVIDIA_DEV_ROOT=/
DEV_ROOT_CTR_PATH=/host
"""
MARKERS = (
    Marker(f"{DIRECTORY}/driver-ready", CONTENT, DRIVER),
    Marker(f"{DIRECTORY}/toolkit-ready", "", TOOLKIT),
)


# The capabilities of MIG instances, and which instances are complete.
# A MIG device is a compute instance in a GPU instance. Each of the two instances has a capability. Users of the MIG
# device need the nodes of both capabilities, and the GPU's node (MIG User Guide, device nodes and capabilities). The
# driver makes the two capabilities' entries in procfs one after the other, and user space makes the nodes later. Until
# both nodes exist, the MIG device is incomplete.

CAPABILITY = re.compile(r"gpu([0-9]{1,9})/mig/gi([0-9]{1,9})(?:/ci([0-9]{1,9}))?/access")


class Instance(NamedTuple):
    """A GPU instance, or a compute instance in it."""

    gpu: int
    """The GPU's device minor."""
    gi: int
    ci: int | None = None
    """The compute instance's number; None for a GPU instance."""

    @property
    def gpu_instance(self) -> "Instance":
        return self._replace(ci=None)

    def __str__(self) -> str:
        return f"gi{self.gi}" if self.ci is None else f"gi{self.gi}/ci{self.ci}"


def parse_instance(capability: str) -> Instance | None:
    """Return the instance that a path below /proc/driver/nvidia/capabilities names; None for any other path."""
    match = CAPABILITY.fullmatch(capability)
    return Instance(int(match[1]), int(match[2]), int(match[3]) if match[3] else None) if match else None
