"""Container images of the pods that the bed runs, made here from Debian's packages and small C programs."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from integration.bed import debian
from integration.bed.architecture import CHOSEN
from integration.bed.cache import cached
from integration.bed.machine.buildah import buildah, import_root
from integration.bed.process import run
from integration.bed.tools import device_plugin

SOURCES = Path(__file__).parent / "pods"
# The real nvidia-smi and the driver's libraries need a C library, its loader and a loader cache; scripts need a shell.
CUDA_PACKAGES = ["base-files", "libc6", "libc-bin", "busybox-static"]
UNNEEDED = ("dev", "var", "etc/apt", "usr/share", f"{CHOSEN.libraries}/gconv")

PAUSE = "registry.invalid/pause:local"
CUDA_TEST = "registry.invalid/cuda-test:local"
DEVICE_PLUGIN = "registry.invalid/device-plugin:local"
# The same entry point as in NVIDIA's image.
DEVICE_PLUGIN_ENTRY_POINT = '["nvidia-device-plugin"]'


def pod_images() -> Path:
    """Return a directory with pause.tar and cuda-test.tar, for `ctr --namespace k8s.io images import`."""
    inputs = [SOURCES, Path(__file__), Path(debian.__file__)]
    return cached("pod-images", inputs, _build)


def device_plugin_image() -> Path:
    """Return an image archive of NVIDIA's device plugin on the base of cuda-test; only a cluster needs it."""

    def build(output: Path) -> None:
        write_image(output, "device-plugin", DEVICE_PLUGIN, DEVICE_PLUGIN_ENTRY_POINT, _fill_device_plugin)

    inputs: list[Path | str] = [str(device_plugin()), Path(__file__), Path(debian.__file__)]
    return cached("device-plugin-image", inputs, build) / "device-plugin.tar"


def _build(output: Path) -> None:
    write_image(output, "pause", PAUSE, '["/pause"]', _fill_pause)
    write_image(output, "cuda-test", CUDA_TEST, "[]", _fill_cuda_test)


def write_image(output: Path, name: str, image: str, entry_point: str, fill: Callable[[Path], None]) -> None:
    """Write the archive NAME.tar to `output`, with the root file system that `fill` makes."""
    root = output / name
    fill(root)
    settings = ("--arch", CHOSEN.debian, "--entrypoint", entry_point, "--cmd", "", "--env", "PATH=/usr/bin:/usr/sbin")
    import_root(image, root, *settings)
    shutil.rmtree(root)
    buildah("push", "--quiet", image, f"docker-archive:{output / name}.tar:{image}")


def _fill_pause(root: Path) -> None:
    root.mkdir()
    compile_program("pause", root / "pause", "-static")


def _fill_cuda_test(root: Path) -> None:
    _fill_base(root)
    for name in ("gpu-probe", "cuda-sum"):
        compile_program(name, root / "usr" / "bin" / name)


def _fill_device_plugin(root: Path) -> None:
    _fill_base(root)
    shutil.copy2(device_plugin() / "nvidia-device-plugin", root / "usr/bin")


def _fill_base(root: Path) -> None:
    # Unpacked but not configured: the packages' own scripts would need a complete system.
    debian.debian_tree(root, "extract", CUDA_PACKAGES)
    finish_root(root, UNNEEDED)


def finish_root(root: Path, unneeded: Iterable[str]) -> None:
    """Remove `unneeded` directories; add busybox for programs that the packages lack, and a loader cache."""
    for name in ("hostname", "resolv.conf"):
        (root / "etc" / name).unlink()
    for directory in unneeded:
        shutil.rmtree(root / directory)
    (root / "dev").mkdir()
    for applet in run([root / "usr/bin/busybox", "--list"]).split():
        link = root / "usr" / "bin" / applet
        if not link.exists() and not (root / "usr" / "sbin" / applet).exists():
            link.symlink_to("busybox")
    # CDI's update-ldcache hook updates the loader cache only in a container that has one.
    run(["chroot", root, "ldconfig"])


def compile_program(name: str, program: Path, *options: str) -> None:
    """Compile one of the C programs in SOURCES."""
    run([CHOSEN.compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-s", *options, "-o", program, SOURCES / f"{name}.c"])


if __name__ == "__main__":
    print(pod_images())
