"""The image of a pod that renders: Debian's OpenGL, EGL, GBM and Vulkan loaders, Mesa, Xvfb and tools to query them.

Like an application's image, it has the loaders and a software renderer, but not the GPU's driver.
"""

from pathlib import Path

from integration.bed import debian
from integration.bed.cache import cached
from integration.bed.machine import pod_images
from integration.bed.machine.pod_images import SOURCES, compile_program, finish_root, write_image

GRAPHICS_TEST = "registry.invalid/graphics-test:local"
PACKAGES = (
    "base-files libc6 libc-bin busybox-static libegl1 libgbm1 libgl1 libgles2 libglx-mesa0 libegl-mesa0 libgl1-mesa-dri"
    " libvulkan1 mesa-utils vulkan-tools xvfb"
)
UNNEEDED = (
    *("dev", "var", "etc/apt", "usr/lib/x86_64-linux-gnu/gconv"),
    *(f"usr/share/{name}" for name in ("bug", "doc", "info", "lintian", "locale", "man")),
)


def graphics_image() -> Path:
    """Return an image archive for `ctr --namespace k8s.io images import`."""

    def build(output: Path) -> None:
        write_image(output, "graphics-test", GRAPHICS_TEST, "[]", _fill)

    inputs: list[Path | str] = [PACKAGES, Path(__file__), Path(debian.__file__), Path(pod_images.__file__), SOURCES]
    return cached("graphics-image", inputs, build) / "graphics-test.tar"


def _fill(root: Path) -> None:
    # Not with debian_tree: it leaves out LLVM, without which Mesa does not load.
    debian.mmdebstrap(root, "extract", PACKAGES.split(), (), debian.SUITE)
    finish_root(root, UNNEEDED)
    compile_program("gbm-probe", root / "usr" / "bin" / "gbm-probe")
