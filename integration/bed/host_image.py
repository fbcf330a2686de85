"""The disk image of the simulated GPU host: Debian 13 with NVIDIA's own user-space packages and our stand-in driver."""

import shutil
from pathlib import Path

from integration.bed import debian
from integration.bed.cache import REPOSITORY, cached, step
from integration.bed.kernel_modules import DRIVER_VERSION, IDENTITY_MODULE, kernel_modules, kernel_release, toolchain
from integration.bed.nvml import DRIVER_LIBRARIES, library_name, nvml
from integration.bed.process import run

FILES = REPOSITORY / "integration/simulation/host"
DISK_SIZE = "12G"
AGENT_ENVIRONMENT = Path("/opt/unbounded-agent")

SYSTEM_PACKAGES = (
    "systemd systemd-sysv systemd-container dbus udev kmod iproute2 procps e2fsprogs python3 python3-venv"
    " qemu-guest-agent prometheus"
)
# NVIDIA's driver of Debian's non-free component, everything but the kernel module: the split layout of Debian.
DRIVER_PACKAGES = (
    "libcuda1 libcudadebugger1 libegl-nvidia0 libgles-nvidia1 libgles-nvidia2 libglx-nvidia0 libnvcuvid1"
    " libnvidia-allocator1 libnvidia-api1 libnvidia-cfg1 libnvidia-encode1 libnvidia-fbc1 libnvidia-glvkspirv"
    " libnvidia-ml1 libnvidia-ngx1 libnvidia-nvvm4 libnvidia-opticalflow1 libnvidia-pkcs11-openssl3"
    " libnvidia-ptxjitcompiler1 libnvidia-rtcore libnvoptix1 nvidia-egl-icd nvidia-modprobe nvidia-opencl-icd"
    " nvidia-persistenced nvidia-smi nvidia-vdpau-driver nvidia-vulkan-icd"
)
COMPONENTS = "main contrib non-free non-free-firmware"

ENABLED_UNITS = ("emulated-network.service", "simulated-driver.service")
# Installed for the tests to start. nvidia-persistenced would talk to a real driver.
DISABLED_UNITS = ("nvidia-persistenced.service", "prometheus.service")
# Not needed here; under emulation every process at boot costs about 0.2 s.
MASKED_UNITS = (
    "dev-hugepages.mount",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@tty1.service",
    "modprobe@efi_pstore.service",
    "modprobe@fuse.service",
    "proc-sys-fs-binfmt_misc.automount",
    # Its getty would take the serial console, which the bed records.
    "serial-getty@ttyS0.service",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-networkd.service",
    "systemd-pstore.service",
)
# Of systemd's generators, which run at boot and at every daemon-reload, only this one has something to do here.
KEPT_GENERATOR = "systemd-fstab-generator"


def host_image(wheels: Path | None = None) -> Path:
    """A raw ext4 image, to be used only as the backing file of an overlay.

    `wheels` is a directory with the agent's locked dependencies, put into the environment AGENT_ENVIRONMENT.
    """

    def build(target: Path) -> None:
        root = target / "root"
        run(["cp", "-a", "--reflink=auto", base, root])
        run(["cp", "-a", "--no-preserve=ownership", f"{FILES}/.", root])
        shutil.copy2(library, root / original.relative_to(base))
        _install_modules(root)
        _set_units(root)
        run(["chroot", root, "systemd-machine-id-setup"])
        # Else the first boot of every overlay rebuilds the loader cache and more (ConditionNeedsUpdate, 10 s).
        run(["chroot", root, "ldconfig"])
        for directory in ("etc", "var"):
            (root / directory / ".updated").touch()
        if wheels is not None:
            _install_wheels(root, wheels)
        with step("write the host's file system"):
            run(["truncate", "--size", DISK_SIZE, target / "host.ext4"])
            run(["mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=1", "-d", root, target / "host.ext4"])
        shutil.rmtree(root)

    base, modules = _debian_root(), kernel_modules()
    original = base / DRIVER_LIBRARIES / library_name(DRIVER_VERSION)
    library = nvml(original)
    inputs: list[Path | str] = [Path(__file__), FILES, str(base), str(library), str(modules)]
    if wheels is not None:
        inputs.append(wheels)
    # Two names, since the cache keeps only the newest result of a name.
    return cached("host-image" if wheels else "host-image-bare", inputs, build) / "host.ext4"


def _debian_root() -> Path:
    packages = f"{SYSTEM_PACKAGES} {DRIVER_PACKAGES}"

    def build(target: Path) -> None:
        debian.debian_tree(target / "root", "essential", packages.split(), COMPONENTS)

    return cached("host-root", [packages, COMPONENTS, Path(debian.__file__)], build) / "root"


def _install_modules(root: Path) -> None:
    release = kernel_release()
    modules = root / "usr/lib/modules" / release
    shutil.copytree(
        toolchain() / "usr/lib/modules" / release,
        modules,
        symlinks=True,
        ignore=shutil.ignore_patterns("build", "source"),
    )
    updates = modules / "updates"
    updates.mkdir()
    for module in kernel_modules().glob("*.ko"):
        if module.name != IDENTITY_MODULE:
            shutil.copy2(module, updates)
    run(["chroot", root, "depmod", release])


def _set_units(root: Path) -> None:
    for verb, units in (("enable", ENABLED_UNITS), ("disable", DISABLED_UNITS), ("mask", MASKED_UNITS)):
        run(["chroot", root, "systemctl", verb, *units])
    masks = root / "etc/systemd/system-generators"
    masks.mkdir(parents=True)
    for generator in (root / "usr/lib/systemd/system-generators").iterdir():
        if generator.name != KEPT_GENERATOR:
            (masks / generator.name).symlink_to("/dev/null")


def _install_wheels(root: Path, wheels: Path) -> None:
    inside = root / "tmp/wheels"
    shutil.copytree(wheels, inside)
    run(["chroot", root, "python3", "-m", "venv", AGENT_ENVIRONMENT])
    names = sorted(f"/tmp/wheels/{path.name}" for path in inside.glob("*.whl"))
    pip = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--compile"]
    run(["chroot", root, AGENT_ENVIRONMENT / "bin/python", *pip, *names])
    shutil.rmtree(inside)
