"""By what files and device nodes are told apart: the words of facts that the machine half needs too.

Apart from the others, since the machine half starts each minute, and to make a data class takes longer than to read
a small file.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Changes whenever a file's content may have."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    executable: bool


class DeviceKind(StrEnum):
    """What a device node is for; the names follow NVIDIA's documentation and the kernel's."""

    GPU = "gpu"
    CONTROL = "control"
    MODESET = "modeset"
    UVM = "uvm"
    UVM_TOOLS = "uvm-tools"
    CAPABILITY = "capability"
    IMEX_CHANNEL = "imex-channel"
    NVSWITCH = "nvswitch"
    NVLINK = "nvlink"
    DRI_CARD = "dri-card"
    DRI_RENDER = "dri-render"
    KFD = "kfd"
    """The kernel fusion driver's node (drivers/gpu/drm/amd/amdkfd), one for all GPUs that compute by it."""
    KVM = "kvm"
    TUN = "tun"
    VHOST = "vhost"
    INFINIBAND = "infiniband"
    GDRCOPY = "gdrcopy"
    NVIDIA_FS = "nvidia-fs"
    ACCEL = "accel"
    """drivers/accel: NPUs and the like, which are no GPUs."""
    EXTRA = "extra"
    """Named by a machine's settings."""


DRI_LINKS = {DeviceKind.DRI_CARD: "card", DeviceKind.DRI_RENDER: "render"}


def dri_link(kind: str, pci_address: str) -> str:
    """How udev calls a GPU's DRM node by its address (60-drm.rules of systemd); empty for any other node."""
    suffix = next((text for each, text in DRI_LINKS.items() if each == kind), "")
    return f"/dev/dri/by-path/pci-{pci_address}-{suffix}" if suffix and pci_address else ""


@dataclass(frozen=True, slots=True, order=True)
class DeviceNumber:
    """A character device's major and minor number, with the node's permission bits and owner."""

    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
