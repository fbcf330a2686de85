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
    """What a device node is for; the names follow NVIDIA's documentation and the kernel's DRM subsystem."""

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


@dataclass(frozen=True, slots=True, order=True)
class DeviceNumber:
    """A character device's major and minor number, with the node's permission bits and owner."""

    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
