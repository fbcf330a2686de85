"""The image of a pod that renders: Debian's OpenGL, EGL, GBM and Vulkan loaders, Mesa, Xvfb and tools to query them.

Like an application's image, it has the loaders and a software renderer, but not the GPU's driver. The renderer's large
libraries are next to the image: importing them takes an emulated node two minutes, so pods mount them from its disk.
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
RENDERER = ("libLLVM*", "libgallium*", "libz3*")
RENDERER_PATH = "/usr/local/lib/x86_64-linux-gnu"
"""Where pods need RENDERER; Debian's loader looks there too."""
UNNEEDED = (
    *("dev", "var", "etc/apt", "usr/lib/x86_64-linux-gnu/gconv"),
    *(f"usr/share/{name}" for name in ("bug", "doc", "info", "lintian", "locale", "man")),
)


def graphics_image() -> Path:
    """Return a directory with graphics-test.tar, for `ctr --namespace k8s.io images import`, and renderer/."""

    def build(output: Path) -> None:
        write_image(output, "graphics-test", GRAPHICS_TEST, "[]", _fill)

    inputs: list[Path | str] = [PACKAGES, Path(__file__), Path(debian.__file__), Path(pod_images.__file__), SOURCES]
    return cached("graphics-image", inputs, build)


def _fill(root: Path) -> None:
    # Not with debian_tree: it leaves out LLVM, without which Mesa does not load.
    debian.mmdebstrap(root, "extract", PACKAGES.split(), (), debian.SUITE)
    (root.parent / "renderer").mkdir()
    for pattern in RENDERER:
        for library in (root / "usr/lib/x86_64-linux-gnu").glob(pattern):
            library.rename(root.parent / "renderer" / library.name)
    finish_root(root, UNNEEDED)
    compile_program("gbm-probe", root / "usr" / "bin" / "gbm-probe")
