"""The driver of Debian's packages, moved to where other distributions and systems keep it: simulated layouts.

File contents, versions and the set of files stay Debian's; where each one goes is after the sources that are named.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from agent.model.facts import Library
from integration.bed.drivers.host_roots import LIBRARIES
from integration.bed.process import run

LIBRARIES_32 = Path("usr/lib/i386-linux-gnu")
Places = Callable[[str], str]
"""From a path below a driver root, as it is planned for Debian's layout, to one below the host's; empty: left out."""

TALOS = "usr/local/glibc/usr/lib"
CONTAINER = "run/nvidia/driver"


def talos(target: str) -> str:
    """siderolabs/extensions, nvidia-gpu: no 32-bit set, no X server, no OpenCL file, no DLLs."""
    if target.startswith((str(LIBRARIES_32), "usr/lib/xorg", "usr/share/X11", "etc/OpenCL", f"{LIBRARIES}/nvidia")):
        return ""
    for start, place in (
        (f"{LIBRARIES}/", f"{TALOS}/"),
        ("usr/bin/", "usr/local/bin/"),
        ("usr/share/vulkan/", "etc/vulkan/"),
        ("usr/share/nvidia/nvoptix.bin", "usr/local/share/nvidia/nvoptix.bin"),
    ):
        if target.startswith(start):
            return place + target.removeprefix(start)
    return target


def fedora(target: str) -> str:
    """nvidia-driver.spec of NVIDIA's and negativo17's RPM packages; `_libdir` is /usr/lib64, and /usr/lib for i686."""
    for start, place in (
        (f"{LIBRARIES}/", "usr/lib64/"),
        (f"{LIBRARIES_32}/", "usr/lib/"),
        ("usr/lib/xorg/", "usr/lib64/xorg/"),
    ):
        if target.startswith(start):
            return place + target.removeprefix(start)
    return target


def driver_container(target: str) -> str:
    """gpu-driver-container's Ubuntu images: what is Ubuntu's layout, below a root of its own."""
    return f"{CONTAINER}/{target}"


def move_driver(root: Path, files: Iterable[Library], place: Places) -> None:
    """All of it; a driver of another version that lies beside it goes."""
    moved = root / "moved"
    files = list(files)
    for file in files:
        if not (new := place(file.target)):
            continue
        (moved / new).parent.mkdir(parents=True, exist_ok=True)
        if file.link:
            (moved / new).symlink_to(file.link)
        else:
            (moved / new).hardlink_to(root / file.source.lstrip("/"))
    for source in {file.source for file in files if file.source}:
        (root / source.lstrip("/")).unlink()
    for directory in (LIBRARIES, LIBRARIES_32):
        shutil.rmtree(root / directory / "nvidia", ignore_errors=True)
        for pattern in ("libcuda*.so*", "libnv*.so*", "lib*_nvidia.so*"):
            for path in (root / directory).rglob(pattern):
                path.unlink()
    shutil.rmtree(root / "usr/lib/nvidia", ignore_errors=True)
    # What led to it, above all the links of the alternatives system.
    run(["find", root / "usr", root / "etc", "-xtype", "l", "-delete"])
    for path in moved.rglob("*"):
        if path.is_symlink() or path.is_file():
            # /lib is a link, which is followed.
            (there := root / path.relative_to(moved)).parent.mkdir(parents=True, exist_ok=True)
            path.rename(there)
    shutil.rmtree(moved)


def as_rpm_packages_have_it(root: Path, version: str) -> None:
    """What nvidia-driver.spec changes: paths in Vulkan's files, one for each architecture, and libGLX_nvidia's name."""
    # Fedora's glibc looks there without being told.
    (root / "etc/ld.so.conf.d/lib64.conf").write_text("/usr/lib64\n")
    icd = root / "usr/share/vulkan/icd.d/nvidia_icd.json"
    document = json.loads(icd.read_text())
    icd.unlink()
    for processor, directory in (("x86_64", "/usr/lib64"), ("i686", "/usr/lib")):
        document["ICD"]["library_path"] = f"{directory}/libGLX_nvidia.so.0"
        icd.with_name(f"nvidia_icd.{processor}.json").write_text(json.dumps(document))
        library, soname = (root / f"{directory[1:]}/libGLX_nvidia.so.{each}" for each in (version, "0"))
        soname.unlink(missing_ok=True)
        library.rename(soname)
        library.symlink_to(soname.name)
