"""The disk image of the simulated GPU host: NVIDIA's own user-space packages, and our stand-in driver."""

import shutil
import uuid
from pathlib import Path

from integration.bed import debian, ubuntu
from integration.bed.architecture import CHOSEN
from integration.bed.cache import REPOSITORY, cached, step
from integration.bed.drivers.host_roots import Layout, driver_version, host_root
from integration.bed.drivers.nvml import library_name, nvml
from integration.bed.process import run
from integration.bed.vm.kernel_modules import IDENTITY_MODULE, boot_files, kernel_modules, kernel_release, toolchain

FILES = REPOSITORY / "integration/simulation/host"
DISK_SIZE = "12G"
AGENT_ENVIRONMENT = Path("/opt/unbounded-agent/1")
"""A Python environment with the agent's dependencies, like those that systemd/install makes. The simulated host has no
network, so systemd/install copies the dependencies from this environment there."""

ENABLED_UNITS = ("emulated-network.service", "simulated-driver.service")
# A test starts Prometheus itself, not on arm64. nvidia-persistenced would need a real driver.
DISABLED_UNITS = ("nvidia-persistenced.service", *([] if CHOSEN.is_foreign else ["prometheus.service"]))
# These units are not needed, and under emulation every process at boot costs about 0.2 s.
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
    "serial-getty@ttyAMA0.service",
    "serial-getty@ttyS0.service",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-networkd.service",
    "systemd-pstore.service",
)
# systemd's generators run at boot and at every daemon-reload; only this one has something to do here.
KEPT_GENERATOR = "systemd-fstab-generator"


def host_image(wheels: Path | None = None, *, layout: Layout | None = None, suite: str = debian.SUITE) -> Path:
    """Return a raw ext4 image, to be used only as the backing file of an overlay.

    `vmlinuz` and `initrd` are next to it. `wheels` is a directory with the agent's locked dependencies for the suite's
    Python; they are installed into the environment AGENT_ENVIRONMENT. `layout` is by default the distribution's own.
    """
    layout = layout or ("flat" if suite == ubuntu.UBUNTU else "split")

    def build(target: Path) -> None:
        root = target / "root"
        run(["cp", "-a", "--reflink=auto", base, root])
        run(["cp", "-a", "--no-preserve=ownership", "--remove-destination", f"{FILES}/.", root])
        shutil.copy2(library, root / original.relative_to(base))
        _install_modules(root, modules, suite)
        _set_units(root)
        if suite == ubuntu.UBUNTU:
            # There, a rule of udev starts it as soon as the driver is loaded, although it is disabled.
            run(["chroot", root, "systemctl", "mask", "nvidia-persistenced.service"])
        # Not by systemd-machine-id-setup, which needs /proc in systemd 262.
        (root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
        # Otherwise the first boot of every overlay rebuilds the loader cache and more (ConditionNeedsUpdate, 10 s).
        run(["chroot", root, "ldconfig"])
        for directory in ("etc", "var"):
            (root / directory / ".updated").touch()
        if wheels is not None:
            _install_wheels(root, wheels)
        with step("write the host's file system"):
            run(["truncate", "--size", DISK_SIZE, target / "host.ext4"])
            run(["mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=1", "-d", root, target / "host.ext4"])
        shutil.copytree(boot, target, dirs_exist_ok=True)
        shutil.rmtree(root)

    base = host_root(layout, suite)
    version = driver_version(base)
    modules = kernel_modules(version, suite)
    (original,) = base.glob(f"usr/lib/**/{library_name(version)}")
    library = nvml(original, version)
    boot = boot_files(suite)
    inputs: list[Path | str] = [Path(__file__), FILES, str(base), str(library), str(modules), str(boot)]
    if wheels is not None:
        inputs += [wheels, REPOSITORY / "requirements.lock"]
    # Each kind has its own name: otherwise, building one could remove the others from the cache.
    name = f"host-image-{suite}-{layout}" if wheels else f"host-image-{suite}-{layout}-bare"
    return cached(name, inputs, build) / "host.ext4"


def _install_modules(root: Path, stand_ins: Path, suite: str) -> None:
    release = kernel_release(suite)
    modules = root / "usr/lib/modules" / release
    shutil.copytree(
        toolchain(suite) / "usr/lib/modules" / release,
        modules,
        symlinks=True,
        ignore=shutil.ignore_patterns("build", "source"),
    )
    updates = modules / "updates"
    updates.mkdir()
    for module in stand_ins.glob("*.ko"):
        if module.name != IDENTITY_MODULE:
            shutil.copy2(module, updates)
    run(["chroot", root, "depmod", release])


def _set_units(root: Path) -> None:
    for verb, units in (("enable", ENABLED_UNITS), ("disable", DISABLED_UNITS), ("mask", MASKED_UNITS)):
        run(["chroot", root, "systemctl", verb, *units])
    masks = root / "etc/systemd/system-generators"
    masks.mkdir(parents=True, exist_ok=True)
    for generator in (root / "usr/lib/systemd/system-generators").iterdir():
        if generator.name != KEPT_GENERATOR:
            # Ubuntu's systemd package has such a link itself.
            (masks / generator.name).unlink(missing_ok=True)
            (masks / generator.name).symlink_to("/dev/null")


def _install_wheels(root: Path, wheels: Path) -> None:
    inside = root / "tmp/wheels"
    shutil.copytree(wheels, inside)
    run(["chroot", root, "python3", "-m", "venv", AGENT_ENVIRONMENT])
    names = sorted(f"/tmp/wheels/{path.name}" for path in inside.glob("*.whl"))
    pip = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--compile"]
    run(["chroot", root, AGENT_ENVIRONMENT / "bin/python", *pip, *names])
    shutil.rmtree(inside)
    environment = root / AGENT_ENVIRONMENT.relative_to("/")
    shutil.copy(REPOSITORY / "requirements.lock", environment)
    (environment.parent / "current").symlink_to(environment.name)
