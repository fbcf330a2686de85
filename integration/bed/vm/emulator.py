"""QEMU of the same Debian release on every computer.

Debian 12's QEMU 7.2 takes three times as long as 10.0 for each process that the guest starts.
"""

from pathlib import Path

from integration.bed import debian
from integration.bed.architecture import AMD64, CHOSEN
from integration.bed.cache import cached

PACKAGES = ("qemu-system-arm" if CHOSEN.is_foreign else "qemu-system-x86", "qemu-utils")
FIRMWARE = ("usr/share/qemu", "usr/share/seabios")


def emulator() -> list[str]:
    """Return the start of a command line for the chosen architecture's qemu-system-..."""
    root = _root()
    firmware = [word for directory in FIRMWARE for word in ("-L", str(root / directory))]
    return [*_program(root, f"qemu-system-{CHOSEN.processor}"), *firmware]


def qemu_img() -> list[str]:
    """Return the start of a command line for qemu-img."""
    return _program(_root(), "qemu-img")


def _program(root: Path, name: str) -> list[str]:
    # The tree's own dynamic linker (ld.so(8)) starts the program, without a chroot: in a chroot, the program would not
    # find the disks and sockets, which are outside the tree.
    linker = root / "usr/lib64/ld-linux-x86-64.so.2"
    return [str(linker), "--library-path", str(root / AMD64.libraries), str(root / "usr/bin" / name)]


def _root() -> Path:
    def build(target: Path) -> None:
        debian.debian_tree(target / "root", "extract", PACKAGES, architecture=AMD64)

    return cached("emulator", [*PACKAGES, Path(debian.__file__)], build) / "root"
