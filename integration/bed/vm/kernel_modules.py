"""Build the stand-in NVIDIA kernel modules (a simulation) for the kernel that the simulated host boots."""

import lzma
import shutil
from pathlib import Path
from typing import NamedTuple

from integration.bed import debian, ubuntu
from integration.bed.architecture import CHOSEN
from integration.bed.cache import REPOSITORY, cached
from integration.bed.process import run

SIMULATION = REPOSITORY / "integration/simulation"
SOURCES = SIMULATION / "kernel"
DRIVER_VERSION = "550.163.01"
IDENTITY_MODULE = "gpu_identity.ko"

TOOLS = "base-files bash binutils busybox-static coreutils cpio findutils grep kmod libc6-dev make mawk perl-base sed"


class Kernel(NamedTuple):
    """A distribution's kernel, what builds modules for it, and its modules that reach the root file system."""

    packages: str
    compiler: str
    boot_modules: tuple[str, ...] = ()
    """Each comes after those that it depends on."""


KERNELS = {
    # linux-headers-ARCHITECTURE depends on linux-image-ARCHITECTURE, so both have the same version.
    debian.SUITE: Kernel(
        f"{TOOLS} gcc-14 linux-headers-{CHOSEN.debian}",
        "gcc-14",
        (
            "kernel/drivers/block/virtio_blk.ko",
            "kernel/lib/crc16.ko",
            "kernel/crypto/crc32c_generic.ko",
            "kernel/fs/mbcache.ko",
            "kernel/fs/jbd2/jbd2.ko",
            "kernel/fs/ext4/ext4.ko",
        ),
    ),
    # The kernel of Ubuntu's cloud images. ext4 and virtio_blk are built in.
    ubuntu.UBUNTU: Kernel(f"{TOOLS} gcc-13 linux-headers-virtual linux-image-virtual", "gcc-13"),
}
# gpu_identity comes first, because no driver and not even udev may see the PCI devices before it has changed their ids.
INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in {modules}; do /bin/busybox insmod /modules/$module || echo "initramfs: cannot load $module"; done
/bin/busybox mount -t ext4 -o ro /dev/vda /root || exec /bin/busybox sh
exec /bin/busybox switch_root /root /sbin/init
"""


def kernel_suite(suite: str) -> str:
    """Return the suite whose kernel a host of `suite` boots: Debian's hosts all boot Debian 13's, Ubuntu's its own."""
    return suite if suite in KERNELS else debian.SUITE


def toolchain(suite: str = debian.SUITE) -> Path:
    """Return a cached chroot with gcc, make, kernel headers and the kernel itself (/boot, /lib/modules)."""
    suite = kernel_suite(suite)
    packages = KERNELS[suite].packages

    def build(target: Path) -> None:
        root = target / "root"
        if suite == ubuntu.UBUNTU:
            ubuntu.ubuntu_tree(root, packages.split(), "extract")
        else:
            debian.debian_tree(root, "extract", packages.split())
        # The packages are only unpacked, so the links that their scripts would make are missing.
        for link, name in (("sh", "bash"), ("awk", "mawk")):
            (root / "usr/bin" / link).unlink(missing_ok=True)
            (root / "usr/bin" / link).symlink_to(name)

    return cached(f"toolchain-{suite}", [packages, Path(debian.__file__), Path(ubuntu.__file__)], build) / "root"


def kernel_release(suite: str = debian.SUITE) -> str:
    """Return the release of the kernel in the toolchain, as `uname -r` shows it on the host."""
    (release,) = (path.name for path in (toolchain(suite) / "usr/lib/modules").iterdir())
    return release


def kernel_modules(version: str = DRIVER_VERSION, suite: str = debian.SUITE) -> Path:
    """Return a cached directory with gpu_identity.ko and the stand-in nvidia*.ko of that driver version."""

    def build(target: Path) -> None:
        for module in _build_modules(SOURCES, f"kernel-{version}", f"NVIDIA_VERSION={version}", suite=suite):
            shutil.copy2(module, target)

    name = f"kernel-modules-{kernel_suite(suite)}-{version}"
    return cached(name, [str(toolchain(suite)), version, SOURCES], build)


def simulated_module(directory: str) -> Path:
    """Return the cached stand-in module `simulated_DIRECTORY.ko` of integration/simulation/DIRECTORY."""
    sources = SIMULATION / directory
    name = f"simulated_{directory}.ko"

    def build(target: Path) -> None:
        (module,) = _build_modules(sources, f"simulated-{directory}")
        shutil.copy2(module, target)

    return cached(f"simulated-{directory}", [str(toolchain()), sources], build) / name


def _build_modules(sources: Path, name: str, *variables: str, suite: str = debian.SUITE) -> list[Path]:
    """Copy `sources`, a directory with a Kbuild file, into the toolchain, build its modules there, and return them."""
    work = toolchain(suite) / "build" / name
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(sources, work)
    headers = f"/usr/lib/modules/{kernel_release(suite)}/build"
    arguments = [f"M=/build/{name}", *variables, f"CC={KERNELS[kernel_suite(suite)].compiler}", "modules"]
    run(["chroot", toolchain(suite), "make", "-s", "-j2", "-C", headers, *arguments])
    return sorted(work.glob("*.ko"))


def boot_files(suite: str = debian.SUITE) -> Path:
    """Return a cached directory with `vmlinuz` and our `initrd`, which boots seconds faster than the distribution's."""
    suite = kernel_suite(suite)
    needed = KERNELS[suite].boot_modules

    def build(target: Path) -> None:
        root = toolchain(suite)
        tree = root / "build/initramfs"
        shutil.rmtree(tree, ignore_errors=True)
        for directory in ("bin", "dev", "root", "modules"):
            (tree / directory).mkdir(parents=True)
        shutil.copy2(root / "usr/bin/busybox", tree / "bin")
        shutil.copy2(kernel_modules(suite=suite) / IDENTITY_MODULE, tree / "modules")
        for name in needed:
            packed = root / "usr/lib/modules" / kernel_release(suite) / f"{name}.xz"
            (tree / "modules" / Path(name).name).write_bytes(lzma.decompress(packed.read_bytes()))
        modules = " ".join([IDENTITY_MODULE, *(Path(name).name for name in needed)])
        (tree / "init").write_text(INIT.format(modules=modules))
        (tree / "init").chmod(0o755)
        run(["chroot", root, "sh", "-c", "cd /build/initramfs && find . | cpio --quiet -o -H newc > ../initrd"])
        shutil.move(root / "build/initrd", target / "initrd")
        shutil.copy2(root / "boot" / f"vmlinuz-{kernel_release(suite)}", target / "vmlinuz")
        shutil.rmtree(tree)

    return cached(f"boot-files-{suite}", [str(kernel_modules(suite=suite)), *needed, INIT], build)
