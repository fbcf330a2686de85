"""Trees that are only observed, never booted: another architecture, and two drivers and architectures in one tree."""

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from integration.bed import debian
from integration.bed.cache import cached
from integration.bed.drivers.host_roots import COMPONENTS, DRIVER_PACKAGES
from integration.bed.process import CommandError, run
from integration.bed.vm.kernel_modules import toolchain

SOURCE = "nvidia-graphics-drivers"
"""Debian's source package. That of an older branch has a suffix, such as -tesla-535."""
NOT_FOR_ARM64 = ("libnvidia-ngx1", "libnvidia-pkcs11-openssl3", "nvidia-modprobe", "nvidia-persistenced")
FOR_I386 = (
    "libcuda1 libegl-nvidia0 libgles-nvidia1 libgles-nvidia2 libglx-nvidia0 libnvcuvid1 libnvidia-allocator1"
    " libnvidia-egl-gbm1 libnvidia-encode1 libnvidia-fbc1 libnvidia-glvkspirv libnvidia-ml1 libnvidia-opticalflow1"
    " libnvidia-ptxjitcompiler1 nvidia-opencl-icd nvidia-vdpau-driver nvidia-vulkan-icd"
)
# Parts that the bed's hosts do without: the X server's modules, tools, firmware and application profiles.
FURTHER = "firmware-nvidia-gsp libnvidia-egl-gbm1 nvidia-cuda-mps nvidia-driver-bin xserver-xorg-video-nvidia"
OLDER = "libnvidia-tesla-535-cuda1 libnvidia-tesla-535-ml1 libnvidia-tesla-535-nvcuvid1 libglx-nvidia-tesla-535-0"
# ldconfig's messages are translated with these.
TRANSLATIONS = "libc-l10n locales"
# When triggered, this package's script makes the links of the alternatives system.
ALTERNATIVE = "nvidia-alternative"
# Relative to the tree's root; exists while the scripts run.
WORK = "run/alternatives"
STAND_INS = {
    "update-alternatives": f"""#!/{WORK}/busybox sh\necho "$*" >> /{WORK}/calls\n""",
    "dpkg-trigger": f"#!/{WORK}/busybox true\n",
    "dpkg-maintscript-helper": f"#!/{WORK}/busybox true\n",
}


def arm64_root() -> Path:
    """Return Debian 13 for arm64 with the driver: the packages' files and alternatives, without a loader cache."""
    packages = [name for name in DRIVER_PACKAGES.split() if name not in NOT_FOR_ARM64]
    packages += ["base-files", "libc-bin", "systemd-container"]

    def build(target: Path) -> None:
        root = target / "root"
        # No arm64 program can run here. So packages are only unpacked, and dpkg's records are made from the archives.
        _tree(root, "extract", "arm64", packages, "--skip=cleanup/apt/cache")
        archives = sorted((root / "var/cache/apt/archives").glob("*.deb"))
        for archive in archives:
            _record(root, archive)
        (alternative,) = (each for each in archives if each.name.startswith(f"{ALTERNATIVE}_"))
        _make_alternatives(root, alternative)
        shutil.rmtree(root / "var/cache/apt/archives")
        for pattern in debian.UNWANTED_FILES:
            for path in root.glob(pattern.lstrip("/").replace("x86_64", "aarch64")):
                run(["rm", "-rf", path])

    inputs: list[Path | str] = [*packages, COMPONENTS, Path(debian.__file__), Path(__file__), str(toolchain())]
    return cached("host-root-arm64", inputs, build) / "root"


def crowded_root() -> Path:
    """Return Debian 13 with the whole driver in 64 and 32 bits, an older branch next to it, and a German locale."""
    packages = [*DRIVER_PACKAGES.split(), *(f"{name}:i386" for name in FOR_I386.split()), *OLDER.split()]
    packages += [*FURTHER.split(), *TRANSLATIONS.split(), "systemd-container"]

    def build(target: Path) -> None:
        root = target / "root"
        unwanted = [f"--dpkgopt=path-exclude={pattern}" for pattern in debian.UNWANTED_FILES if "locale" not in pattern]
        _tree(root, "essential", "amd64,i386", packages, *unwanted, "--dpkgopt=force-unsafe-io")
        run(["chroot", root, "localedef", "-i", "de_DE", "-f", "UTF-8", "de_DE.UTF-8"])

    inputs: list[Path | str] = [*packages, COMPONENTS, Path(debian.__file__), Path(__file__)]
    return cached("host-root-crowded", inputs, build) / "root"


def _tree(target: Path, variant: str, architectures: str, packages: Sequence[str], *options: str) -> None:
    # Only the release: updates and security fixes of two architectures may differ for a while, and libraries that
    # are installed for both must have one version.
    source = "deb http://deb.debian.org/debian {} " + COMPONENTS
    options = (f"--architectures={architectures}", *options)
    try:
        debian.mmdebstrap(target, variant, packages, options, debian.SUITE, source.format(debian.SUITE))
    except CommandError:
        # While a mirror takes over a point release, which may last days, the index of one architecture may be older
        # than the Release file says. Under the suite's other name, `stable`, the mirror may still have the state before
        # the point release.
        shutil.rmtree(target, ignore_errors=True)
        debian.mmdebstrap(target, variant, packages, options, debian.SUITE, source.format("stable"))
        if f"VERSION_CODENAME={debian.SUITE}\n" not in (target / "usr/lib/os-release").read_text():
            raise


def _record(root: Path, archive: Path) -> None:
    """Record a package of the driver as dpkg does: its control stanza, and its files' digests (deb-md5sums(5))."""
    control = run(["dpkg-deb", "--field", archive])
    if not re.search(rf"^Source: {SOURCE}", control, re.MULTILINE):
        return
    name, architecture = run(["dpkg-deb", "--showformat=${Package} ${Architecture}", "--show", archive]).split()
    with (root / "var/lib/dpkg/status").open("a") as status:
        status.write(f"{control}\n\n")
    with tempfile.TemporaryDirectory() as directory:
        run(["dpkg-deb", "--control", archive, f"{directory}/control"])
        shutil.copy(f"{directory}/control/md5sums", root / f"var/lib/dpkg/info/{name}:{architecture}.md5sums")


def _make_alternatives(root: Path, archive: Path) -> None:
    """Run the package's script with this computer's busybox, and apply its calls of update-alternatives to the tree."""
    work = root / WORK
    (work / "applets").mkdir(parents=True)
    run(["dpkg-deb", "--control", archive, work / "control"])
    shutil.copy2(toolchain() / "usr/bin/busybox", work)
    for name, script in STAND_INS.items():
        (work / name).write_text(script)
        (work / name).chmod(0o755)
    busybox: list[str | Path] = ["chroot", root, f"/{WORK}/busybox"]
    run([*busybox, "--install", "-s", f"/{WORK}/applets"])
    path = f"PATH=/{WORK}:/{WORK}/applets"
    run([*busybox, "env", path, f"/{WORK}/busybox", "sh", f"/{WORK}/control/postinst", "triggered"])
    for call in (work / "calls").read_text().splitlines():
        run(["update-alternatives", "--root", root, *call.split()])
    shutil.rmtree(work)
