"""Simulated layouts: Debian's packaged driver, moved to where other distributions and systems keep theirs.

Each function says which source it follows, and which files it leaves out. All other files keep Debian's content, unless
`apply_rpm_changes` changes it.
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
"""Maps a file's path in the driver root (as planned from Debian's layout) to its new path in the host's root. An empty
path means that the layout has no such file."""

TALOS = "usr/local/glibc/usr/lib"
CONTAINER = "run/nvidia/driver"


def talos(target: str) -> str:
    """Follow siderolabs/extensions' nvidia-gpu: no 32-bit libraries, X server, OpenCL file or DLLs."""
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
    """Follow nvidia-driver.spec of NVIDIA's and negativo17's RPMs: `_libdir` is /usr/lib64, and /usr/lib for i686."""
    for start, place in (
        (f"{LIBRARIES}/", "usr/lib64/"),
        (f"{LIBRARIES_32}/", "usr/lib/"),
        ("usr/lib/xorg/", "usr/lib64/xorg/"),
    ):
        if target.startswith(start):
            return place + target.removeprefix(start)
    return target


def driver_container(target: str) -> str:
    """Follow gpu-driver-container's Ubuntu images: Ubuntu's layout in a directory of its own."""
    return f"{CONTAINER}/{target}"


def move_driver(root: Path, files: Iterable[Library], place: Places) -> None:
    """Move the whole driver. If the root has a driver of another version too, remove that one."""
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
    # Remove the links that led to the driver's old places, above all those of the alternatives system.
    run(["find", root / "usr", root / "etc", "-xtype", "l", "-delete"])
    for path in moved.rglob("*"):
        if path.is_symlink() or path.is_file():
            # If the path is below lib, mkdir follows the link /lib.
            (target := root / path.relative_to(moved)).parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    shutil.rmtree(moved)


def apply_rpm_changes(root: Path, version: str) -> None:
    """Change the tree as the RPM package does (nvidia-driver.spec).

    Each architecture gets its own Vulkan file, which contains the path of that architecture's libGLX_nvidia. That
    library is renamed to its soname, and its former name, with the version, becomes a link to it.
    """
    # Fedora's glibc searches /usr/lib64 by default. Debian's does so only if the directory is listed.
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
