"""The identity of files and device nodes: the facts that the machine half needs too.

The other facts are in agent.model.facts. The machine half cannot import that module, because the module needs msgspec,
which machines do not have.
"""

from enum import StrEnum
from typing import NamedTuple


class FileIdentity(NamedTuple):
    """A value that differs if the file's content may have changed."""

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
    """The node of the kernel fusion driver (drivers/gpu/drm/amd/amdkfd), one for all GPUs that compute through it."""
    KVM = "kvm"
    TUN = "tun"
    VHOST = "vhost"
    INFINIBAND = "infiniband"
    GDRCOPY = "gdrcopy"
    NVIDIA_FS = "nvidia-fs"
    ACCEL = "accel"
    """Devices of the kernel's drivers/accel, such as NPUs, which are not GPUs."""
    EXTRA = "extra"
    """A node that a machine's settings name by its path."""


DRI_LINKS = {DeviceKind.DRI_CARD: "card", DeviceKind.DRI_RENDER: "render"}


def dri_link(kind: str, pci_address: str) -> str:
    """Return udev's link to a GPU's DRM node, named by PCI address (60-drm.rules of systemd); empty for other nodes."""
    suffix = next((text for each, text in DRI_LINKS.items() if each == kind), "")
    return f"/dev/dri/by-path/pci-{pci_address}-{suffix}" if suffix and pci_address else ""


class DeviceNumber(NamedTuple):
    """A character device's major and minor number, with the node's permission bits and owner."""

    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
