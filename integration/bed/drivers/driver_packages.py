"""Made-up packages of the driver, in four versions, for `driver upgrade`: with the stand-in modules and NVML, and apt.

Their scripts do what those of real packages do: run ldconfig and depmod, restart a daemon, fail. The daemon ends with
a module of another version than its own, as the Fabric Manager does. The modules are also in a package whose scripts,
dkms.conf and modprobe.d are those of Debian's nvidia-kernel-dkms and nvidia-kernel-support: real DKMS builds them.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

from integration.bed.architecture import CHOSEN
from integration.bed.cache import cached
from integration.bed.debian import SUITE, debian_tree
from integration.bed.drivers.driver_upgrade import older_version
from integration.bed.drivers.foreign_trees import crowded_root
from integration.bed.drivers.host_roots import LIBRARIES, SPLIT_LIBRARIES, driver_version, host_root
from integration.bed.drivers.nvml import library_name, nvml
from integration.bed.process import run
from integration.bed.vm.guest import Guest
from integration.bed.vm.kernel_modules import IDENTITY_MODULE, SOURCES, kernel_modules, kernel_release, toolchain
from integration.bed.vm.transfer import send_files

UNLOADABLE, FAILING = "560.28.03", "565.57.01"
"""Versions whose module does not load, and whose package's script fails. They are newer than all others."""
DAEMON = "nvidia-fabricmanager.service"
REPOSITORY_DIRECTORY = "/root/packages"
APT = ("apt", "debian-archive-keyring", "libapt-pkg7.0", "liblz4-1", "libxxhash0", "sqv")
"""apt, and those of its dependencies that the host does not have."""
DKMS = ("dkms", "gcc", "make", "pahole")
"""What builds modules, apart from kernel headers."""
HEADERS = "made-up-headers"
CONTROL = """\
Package: {name}
Version: {version}-9
Source: made-up-driver
Architecture: {architecture}
Maintainer: nobody <nobody@example.com>
Depends: {depends}
Replaces: libcuda1, libnvidia-ml1
Description: made up for tests, simulates a part of NVIDIA's driver
"""
RUN = """\
#!/bin/sh
exec 3</dev/nvidiactl || exit 1
[ "$(cat /sys/module/nvidia/version)" = {version} ] || exit 1
exec sleep infinity
"""
UNIT = "[Service]\nExecStart=/usr/libexec/made-up-daemon\n"
LINK = f"ldconfig -n /{SPLIT_LIBRARIES}\nldconfig"
DEPMOD = "depmod {release}"
DKMS_CONF = """\
PACKAGE_NAME="nvidia-current"
PACKAGE_VERSION="{version}"
AUTOINSTALL=yes
MAKE[0]="make -C $kernel_source_dir M=$dkms_tree/nvidia-current/{version}/build NVIDIA_VERSION={version} modules"
CLEAN="true"
"""
DKMS_POSTINST = """\
case "$1" in
    configure) /usr/lib/dkms/common.postinst nvidia-current {version} /usr/share/nvidia-current-dkms "" $2 ;;
esac
"""
DKMS_PRERM = """\
case "$1" in
    remove|upgrade|deconfigure)
        if [ "$(dkms status -m nvidia-current -v {version})" ]; then
            dkms remove -m nvidia-current -v {version} --all
        fi ;;
esac
"""
MODPROBE = """\
install nvidia modprobe -i nvidia-current $CMDLINE_OPTS
install nvidia-modeset modprobe nvidia ; modprobe -i nvidia-current-modeset $CMDLINE_OPTS
install nvidia-drm modprobe nvidia-modeset ; modprobe -i nvidia-current-drm $CMDLINE_OPTS
install nvidia-uvm modprobe nvidia ; modprobe -i nvidia-current-uvm $CMDLINE_OPTS
"""
RESTART = f"systemctl daemon-reload\nsystemctl restart {DAEMON} || true"


class Versions(NamedTuple):
    """The versions that load."""

    installed: str
    other: str


def versions() -> Versions:
    return Versions(driver_version(host_root()), older_version(crowded_root()))


def driver_packages() -> Path:
    """Return a cached directory with the packages of all versions and their list, which apt reads as a source."""
    both = versions()

    def build(target: Path) -> None:
        for version in (*both, UNLOADABLE, FAILING):
            _build(version, target)
        (target / "Packages").write_text(run(["dpkg-scanpackages", "--multiversion", "."], cwd=target))

    inputs: list[Path | str] = [Path(__file__), SOURCES, *both, *(str(kernel_modules(each)) for each in both)]
    return cached("driver-packages", inputs, build)


def _build(version: str, target: Path) -> None:
    installed, other = versions()
    # Also the versions that never load have real libraries, of the other version.
    real, directory = other, crowded_root() / LIBRARIES / "nvidia" / f"tesla-{other.split('.')[0]}"
    if version == installed:
        real, directory = installed, host_root() / SPLIT_LIBRARIES
    files: dict[str, dict[str, Path | str]] = {
        "made-up-libraries": {
            f"{SPLIT_LIBRARIES}/libcuda.so.{version}": directory / f"libcuda.so.{real}",
            f"{SPLIT_LIBRARIES}/{library_name(version)}": nvml(directory / library_name(real), version),
        },
        "made-up-modules": _modules(version),
        "nvidia-fabricmanager-made-up": {
            "usr/libexec/made-up-daemon": RUN.format(version=version),
            f"usr/lib/systemd/system/{DAEMON}": UNIT,
        },
    }
    fails = "echo the module cannot be built >&2\nexit 7" if version == FAILING else ""
    scripts = (LINK, f"{DEPMOD.format(release=kernel_release())}\n{fails}", RESTART)
    for (name, content), script in zip(files.items(), scripts, strict=True):
        depends = "" if name == "made-up-libraries" else f"made-up-libraries (= {version}-9)"
        _pack(target, name, version, depends, content, {"postinst": script})
    if version != UNLOADABLE:
        scripts_of_dkms = {"postinst": DKMS_POSTINST, "prerm": DKMS_PRERM}
        filled = {name: script.format(version=version) for name, script in scripts_of_dkms.items()}
        _pack(target, "nvidia-kernel-dkms", version, "dkms (>= 3.0.11)", _sources(version), filled)


def _pack(
    target: Path, name: str, version: str, depends: str, content: dict[str, Path | str], scripts: dict[str, str]
) -> None:
    tree = target / "tree"
    for path, source in content.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, Path):
            shutil.copy2(source, tree / path, follow_symlinks=False)
        else:
            (tree / path).write_text(source)
            (tree / path).chmod(0o755)
    (tree / "DEBIAN").mkdir()
    control = CONTROL.format(name=name, version=version, architecture=CHOSEN.debian, depends=depends)
    (tree / "DEBIAN/control").write_text(control.replace("Depends: \n", ""))
    for script, text in scripts.items():
        (tree / "DEBIAN" / script).write_text(f"#!/bin/sh\nset -e\n{text}\n")
        (tree / "DEBIAN" / script).chmod(0o755)
    run(["dpkg-deb", "-Zgzip", "--root-owner-group", "--build", tree, target])
    shutil.rmtree(tree)


def _sources(version: str) -> dict[str, Path | str]:
    """Return the content of the package that DKMS builds; in the version FAILING, it cannot be built."""
    directory, modules = f"usr/src/nvidia-current-{version}", ("", "-modeset", "-drm", "-uvm")
    lines = [
        f'BUILT_MODULE_NAME[{at}]="nvidia{name}"\nDEST_MODULE_NAME[{at}]="$PACKAGE_NAME{name}"\n'
        f'DEST_MODULE_LOCATION[{at}]="/updates/dkms"\n'
        for at, name in enumerate(modules)
    ]
    files: dict[str, Path | str] = {f"{directory}/{path.name}": path for path in SOURCES.iterdir()}
    del files[f"{directory}/{IDENTITY_MODULE.replace('.ko', '.c')}"]
    files[f"{directory}/Kbuild"] = (SOURCES / "Kbuild").read_text().replace(IDENTITY_MODULE.replace(".ko", ".o"), "")
    files[f"{directory}/dkms.conf"] = DKMS_CONF.format(version=version) + "".join(lines)
    files["etc/modprobe.d/nvidia.conf"] = MODPROBE
    if version == FAILING:
        files[f"{directory}/uvm.c"] = "#error made up: the kernel is too new\n"
    return files


def _modules(version: str) -> dict[str, Path | str]:
    directory = f"usr/lib/modules/{kernel_release()}/updates"
    loads = version in versions()
    built = kernel_modules(version if loads else versions().installed)
    modules = [each for each in built.glob("*.ko") if each.name != IDENTITY_MODULE]
    return {f"{directory}/{each.name}": each if loads else "no module\n" for each in modules}


def apt_packages() -> Path:
    """Return a cached directory with the packages of apt, which the host does not have."""

    def build(target: Path) -> None:
        root = target / "root"
        debian_tree(root, "apt", ["apt"])
        run(["chroot", root, "sh", "-ec", f"cd /tmp && apt-get update && apt-get download {' '.join(APT)}"])
        for path in (root / "tmp").glob("*.deb"):
            shutil.move(path, target)
        shutil.rmtree(root)

    return cached(f"apt-{SUITE}", [*APT, Path(__file__)], build)


def dkms_packages() -> Path:
    """Return a cached directory with DKMS, a compiler and kernel headers, with what they need and the host lacks."""
    status = host_root() / "var/lib/dpkg/status"

    def build(target: Path) -> None:
        root = target / "root"
        debian_tree(root, "apt", ["apt"])
        shutil.copy(status, root / "tmp/status")
        get = "apt-get --option=Dir::State::status=/tmp/status --yes --no-install-recommends --download-only install"
        run(["chroot", root, "sh", "-ec", f"apt-get update && {get} {' '.join(DKMS)}"])
        for path in (root / "var/cache/apt/archives").glob("*.deb"):
            shutil.move(path, target)
        shutil.rmtree(root)
        # The kernel's own, of whatever version: the archive may have a newer one by now.
        tools, release = toolchain(), kernel_release()
        trees = [*(tools / "usr/src").iterdir(), *(tools / "usr/lib").glob("linux-kbuild-*")]
        trees = [tree for tree in trees if not tree.is_symlink()]
        paths = [path for tree in trees for path in tree.rglob("*") if path.is_symlink() or path.is_file()]
        paths += [path for path in (tools / "usr/src").iterdir() if path.is_symlink()]
        paths += [tools / "usr/lib/modules" / release / name for name in ("build", "source")]
        _pack(target, HEADERS, "1", "", {str(path.relative_to(tools)): path for path in paths}, {})

    return cached(f"dkms-{SUITE}", [*DKMS, str(toolchain()), status, Path(__file__)], build)


def install_packages(guest: Guest) -> None:
    """Install apt and the driver's made-up packages in the guest, in the version whose modules it has loaded."""
    _make_source(guest)
    _install(guest, "made-up-libraries", "made-up-modules", "nvidia-fabricmanager-made-up")


def install_dkms_packages(guest: Guest) -> None:
    """The same with DKMS, which builds the modules now, in place of those that came with the guest."""
    _make_source(guest)
    guest.run(["mkdir", "-p", "/root/dkms"])
    send_files(guest, {each.name: each for each in dkms_packages().glob("*.deb")}, "/root/dkms")
    script = f"dpkg --force-unsafe-io --install /root/dkms/*.deb && rm /lib/modules/{kernel_release()}/updates/*.ko"
    guest.run(["sh", "-ec", script], timeout=900)
    _install(guest, "made-up-libraries", "nvidia-kernel-dkms", "nvidia-fabricmanager-made-up")


def _make_source(guest: Guest) -> None:
    guest.run(["mkdir", "-p", REPOSITORY_DIRECTORY, "/root/apt"])
    send_files(guest, {each.name: each for each in apt_packages().glob("*.deb")}, "/root/apt")
    send_files(guest, {each.name: each for each in driver_packages().iterdir()}, REPOSITORY_DIRECTORY)
    guest.run(["sh", "-ec", "dpkg --force-depends --install /root/apt/*.deb"], timeout=240)
    guest.write("/etc/apt/sources.list", f"deb [trusted=yes] file:{REPOSITORY_DIRECTORY} ./\n".encode())
    guest.run(["apt-get", "update"], timeout=240)


def _install(guest: Guest, *names: str) -> None:
    version = versions().installed
    exact = " ".join(f"{name}={version}-9" for name in names)
    script = f"apt-get --yes install {exact} && systemctl is-active {DAEMON}"
    guest.run(["sh", "-ec", script], timeout=900)
