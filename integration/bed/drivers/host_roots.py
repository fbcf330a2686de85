"""Root file systems for simulated hosts: Debian with NVIDIA's own user-space packages, as packaged or rearranged."""

import os
import shutil
from pathlib import Path
from typing import Literal

from integration.bed import debian, ubuntu
from integration.bed.architecture import CHOSEN
from integration.bed.cache import cached
from integration.bed.process import run
from integration.bed.tools import chosen, versioned

Layout = Literal["split", "flat"]
"""`split` is Debian's: two directories, and absolute links of the alternatives system. `flat` is Ubuntu's."""

PYTHON = {"trixie": "3.13", "bookworm": "3.11", "noble": "3.12"}
"""The version of Python in each suite that a host can have."""

# mount: since systemd 262, Debian's systemd no longer depends on it.
SYSTEM_PACKAGES = (
    "systemd systemd-sysv systemd-container dbus udev kmod mount iproute2 procps e2fsprogs python3 python3-venv"
    " qemu-guest-agent prometheus skopeo umoci"
)
# NVIDIA's driver from Debian's non-free component, without the kernel module.
DRIVER_PACKAGES = (
    "libcuda1 libcudadebugger1 libegl-nvidia0 libgles-nvidia1 libgles-nvidia2 libglx-nvidia0 libnvcuvid1"
    " libnvidia-allocator1 libnvidia-api1 libnvidia-cfg1 libnvidia-encode1 libnvidia-fbc1 libnvidia-glvkspirv"
    " libnvidia-ml1 libnvidia-ngx1 libnvidia-nvvm4 libnvidia-opticalflow1 libnvidia-pkcs11-openssl3"
    " libnvidia-ptxjitcompiler1 libnvidia-rtcore libnvoptix1 nvidia-egl-icd nvidia-modprobe nvidia-opencl-icd"
    " nvidia-persistenced nvidia-smi nvidia-vdpau-driver nvidia-vulkan-icd"
)
NOT_ON_ARM64 = (
    # Debian has these for amd64 alone.
    *("libnvidia-ngx1", "libnvidia-pkcs11-openssl3"),
    # The tests there do without these, which take minutes to unpack under emulation.
    *("prometheus", "python3-venv", "skopeo", "umoci"),
)
COMPONENTS = "main contrib non-free non-free-firmware"
# What Ubuntu's server has besides: AppArmor's profiles and the resolver.
UBUNTU_SYSTEM_PACKAGES = f"{SYSTEM_PACKAGES} apparmor systemd-resolved nvidia-modprobe"
UBUNTU_DRIVER_PACKAGES = (
    "libnvidia-cfg1 libnvidia-compute libnvidia-decode libnvidia-encode libnvidia-extra libnvidia-fbc1 libnvidia-gl"
    " nvidia-compute-utils nvidia-utils"
)
"""Without the driver's branch, with which their names end."""
UBUNTU_COMPONENTS = "main universe restricted multiverse"

LIBRARIES = Path(CHOSEN.libraries)
SPLIT_LIBRARIES = LIBRARIES / "nvidia/current"
"""Debian keeps most of the driver's real files here."""
ALTERNATIVES = ("/etc/alternatives/nvidia", "/etc/alternatives/glx")


def host_root(layout: Layout = "split", suite: str = debian.SUITE) -> Path:
    """Return a cached tree: copy it before you change it.

    Ubuntu has its own packages. On Debian, Ubuntu's layout is made from Debian's.
    """
    if suite == ubuntu.UBUNTU:
        return _ubuntu_root()
    wanted = f"{SYSTEM_PACKAGES} {DRIVER_PACKAGES}".split()
    if CHOSEN.is_foreign:
        wanted = [name for name in wanted if name not in NOT_ON_ARM64]
    named, suffix = versioned(suite, wanted)
    packages = " ".join(named)

    def build(target: Path) -> None:
        debian.debian_tree(target / "root", "essential", named, COMPONENTS, suite=suite)

    def build_flat(target: Path) -> None:
        # Hard links suffice: files are moved but never written.
        run(["cp", "-al", split, target / "root"])
        flatten(target / "root")

    # Each kind has its own name: otherwise, building one could remove the others from the cache.
    inputs: list[Path | str] = [packages, COMPONENTS, suite, Path(debian.__file__)]
    split = cached(f"host-root-{suite}{suffix}", inputs, build) / "root"
    if layout == "split":
        return split
    return cached(f"host-root-{suite}-flat{suffix}", [str(split), Path(__file__)], build_flat) / "root"


def _ubuntu_root() -> Path:
    branch = chosen("UBUNTU_DRIVER") or "580"
    driver = (f"{name}-{branch}" for name in UBUNTU_DRIVER_PACKAGES.split())
    named, suffix = versioned(ubuntu.UBUNTU, [*UBUNTU_SYSTEM_PACKAGES.split(), *driver])
    packages = " ".join(named)

    def build(target: Path) -> None:
        ubuntu.ubuntu_tree(target / "root", named, "essential", UBUNTU_COMPONENTS)

    inputs: list[Path | str] = [packages, UBUNTU_COMPONENTS, Path(debian.__file__), Path(ubuntu.__file__)]
    return cached(f"host-root-noble{suffix}", inputs, build) / "root"


def driver_version(root: Path) -> str:
    """Return the version in the name of the one real libcuda; security updates change it."""
    found = {path.name.removeprefix("libcuda.so.") for path in (root / LIBRARIES).rglob("libcuda.so.*.*")}
    if len(found) != 1:
        raise ValueError(f"{root / LIBRARIES} has libcuda in the versions {sorted(found)}, not in one")
    return found.pop()


def flatten(root: Path) -> None:
    """Rearrange Debian's driver as Ubuntu packages it: every real file with its soname link in one directory.

    Placement follows the file lists of Ubuntu 24.04's libnvidia-compute, -gl, -decode and nvidia-utils. Versions, file
    contents and the set of files stay Debian's.
    """
    for directory in ("usr/bin", "usr/lib", "usr/share"):
        for link in _links(root / directory):
            if os.readlink(link).startswith(ALTERNATIVES):
                link.unlink()
    for link in (root / "etc/alternatives").iterdir():
        if f"/etc/alternatives/{link.name}".startswith(ALTERNATIVES):
            link.unlink()
    split, flat = root / SPLIT_LIBRARIES, root / LIBRARIES
    (split / "nvidia-drm_gbm.so").unlink()
    (flat / "gbm/nvidia-drm_gbm.so").symlink_to("../libnvidia-allocator.so.1")
    (split / "nvoptix.bin").rename(root / "usr/share/nvidia/nvoptix.bin")
    # DLLs for Wine.
    (split / "nvidia/wine").rename(flat / "nvidia/wine")
    (split / "nvidia").rmdir()
    for path in sorted(split.iterdir()):
        path.rename(flat / ("vdpau" if path.name.startswith("libvdpau_") else "") / path.name)
    split.rmdir()
    (root / "usr/lib/nvidia/current/nvidia-smi").rename(root / "usr/bin/nvidia-smi")
    shutil.rmtree(root / "usr/lib/nvidia")


def _links(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_symlink()]
