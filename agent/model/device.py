"""The identity of files and device nodes: the facts that the machine half needs too.

The other facts are in agent.model.facts. The machine half cannot import that module, because the module needs msgspec,
which machines do not have.
"""

import fnmatch
import re
from collections.abc import Sequence
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


# PCI addresses: domain:bus:device.function, as sysfs names devices (PCI_DEVID and pci_setup_device in the kernel).

PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""An address as sysfs writes it."""


def as_in_sysfs(text: str) -> str:
    """Return the address as sysfs writes it; empty if the text is not a PCI address.

    Some tools print upper-case letters and domains of eight digits. lspci leaves out domain 0.
    """
    text = text.lower()
    if text.count(":") == 1:
        text = f"0000:{text}"
    if not PCI_ADDRESS.fullmatch(text):
        return ""
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}"


# Tells which extended resources of a node give pods GPUs, and which counts are zero. Pure.


def gives_gpus(name: str, prefix: str, harmless: Sequence[str]) -> bool:
    """Return whether a resource has a vendor's prefix, and matches none of the patterns (fnmatch) in `harmless`."""
    return name.startswith(prefix) and not any(fnmatch.fnmatchcase(name, each) for each in harmless)


def is_zero(count: str) -> bool:
    """Return whether a quantity such as `0`, `0k` or `8` is zero: whether it has no digit other than 0.

    A thousand is `1k`: the API server writes a quantity with the largest suffix that leaves a whole number.
    """
    return not any(each in "123456789" for each in count)
