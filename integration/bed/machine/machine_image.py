"""The machine of the simulated GPU host: a root file system from containerfiles/, on its own disk."""

import functools
import shutil
import sys
from pathlib import Path

from integration.bed import debian, ubuntu
from integration.bed.cache import REPOSITORY, cached, digest
from integration.bed.machine import buildah
from integration.bed.machine.pod_images import pod_images
from integration.bed.process import run
from integration.bed.tools import bed_tools, toolkit

CONTAINERFILE = "agent-ubuntu2404-nvidia"
NAME = "gpu-node"
LABEL = "machines"
DISK_SIZE = "4G"
# Files that the bed adds to the image, as an administrator would: settings, and the unit that imports pod images.
MACHINE_FILES = Path(__file__).with_name("machine_files")
POD_IMAGES = "var/lib/unbounded-agent-bed/images"


def machines_disk(suite: str = "") -> Path:
    """Return a sparse raw ext4 image labelled `machines`; mounted at /var/lib/machines, it has the machine NAME.

    `suite` is that of the machine's base image, by default `base_suite`.
    """
    suite = suite or base_suite()
    inputs: list[Path | str] = [
        *(REPOSITORY / directory for directory in ("agent", "containerfiles", "systemd/machine")),
        *(MACHINE_FILES, Path(__file__), Path(buildah.__file__)),
        *(str(path) for path in (toolkit(), bed_tools(), pod_images(), machine_base(suite))),
    ]
    return cached(f"machines-disk-{suite}", inputs, lambda output: _build_disk(output, suite)) / "machines.img"


def empty_disk() -> Path:
    """Return a sparse raw ext4 image labelled `machines` without any machine."""

    def build(output: Path) -> None:
        run(["truncate", "--size", DISK_SIZE, output / "machines.img"])
        run(["mkfs.ext4", "-q", "-L", LABEL, output / "machines.img"])

    return cached("empty-disk", [DISK_SIZE, LABEL], build) / "machines.img"


@functools.cache
def base_suite() -> str:
    """Return the suite of the machines' base image: Ubuntu 24.04, as for users; Debian's if Ubuntu cannot be had."""
    try:
        machine_base(ubuntu.UBUNTU)
    except ubuntu.NoArchiveError as error:
        print(f"==> {error}: the machines are made on Debian {debian.SUITE}", file=sys.stderr, flush=True)
        return debian.SUITE
    return ubuntu.UBUNTU


def machine_base(suite: str) -> Path:
    """Return a minimal root with apt, which stands in for the distribution's image on a registry."""

    def build(output: Path) -> None:
        root = output / "root"
        if suite == ubuntu.UBUNTU:
            # In Ubuntu, apt is not essential.
            ubuntu.ubuntu_tree(root, ["apt", "ca-certificates"])
        else:
            debian.debian_tree(root, "minbase", ["ca-certificates"], suite=suite)
        # This computer's host name and resolver do not belong in the image, and nspawn makes the device nodes.
        for name in ("hostname", "resolv.conf"):
            (root / "etc" / name).unlink()
        shutil.rmtree(root / "dev")
        (root / "dev").mkdir()

    return cached(f"machine-base-{suite}", [Path(debian.__file__), Path(ubuntu.__file__)], build) / "root"


def machine_image(suite: str = "") -> str:
    """Return the name, in buildah's storage, of the image that containerfiles/ makes on this suite's base."""
    return buildah.build(CONTAINERFILE, base_image(suite or base_suite()))


def base_image(suite: str) -> str:
    """Return the name, in buildah's storage, of an image of `machine_base`."""
    root = machine_base(suite)
    base = f"localhost/unbounded-agent-bed/{suite}:{digest([str(root)])}"
    if not buildah.has_image(base):
        buildah.import_root(base, root)
    return base


def _build_disk(output: Path, suite: str) -> None:
    with buildah.working_container(machine_image(suite)) as container:
        root = Path(buildah.buildah("mount", container))
        _add_bed_files(root)
        _make_file_system(root, output / "machines.img")


def _add_bed_files(root: Path) -> None:
    shutil.copytree(MACHINE_FILES, root, dirs_exist_ok=True, symlinks=True)
    for name in ("crictl", "cdi-validate"):
        shutil.copy(bed_tools() / name, root / "usr/local/bin" / name)
    shutil.copytree(pod_images(), root / POD_IMAGES)
    run(["systemctl", f"--root={root}", "enable", "simulated-pod-images.service"])
    # Otherwise the first boot rebuilds the loader cache and more (ConditionNeedsUpdate).
    for directory in ("etc", "var"):
        (root / directory / ".updated").touch()


def _make_file_system(root: Path, image: Path) -> None:
    tree = image.with_name("tree")
    (tree / NAME).mkdir(parents=True)
    image.touch()
    # mke2fs copies one directory tree to the disk. So the root is mounted in that tree, at its place.
    script = 'mount --bind "$1" "$2/$3" && mkfs.ext4 -q -L "$4" -d "$2" "$5" "$6"'
    run(["unshare", "--mount", "sh", "-c", script, "sh", root, tree, NAME, LABEL, image, DISK_SIZE])
    shutil.rmtree(tree)


if __name__ == "__main__":
    print(machines_disk())
