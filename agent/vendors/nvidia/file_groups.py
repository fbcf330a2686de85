"""The driver's files that are not libraries: their names, their places on hosts and in a driver root. Pure data.

The names are from three sources, and those of most groups from all of them: the manifest of NVIDIA's .run package, as
nvidia-installer (files.c) and the packaging of Gentoo, Guix and Fedora read it; Debian's packages of
nvidia-graphics-drivers 550; and what NVIDIA Container Toolkit (CTK) looks for (1.18 to 1.20,
internal/discover/graphics.go and pkg/nvcdi/driver-nvml.go).

In paths, `{version}` is the driver's version, `{triplet}` Debian's name of the architecture, `{libraries}` each
directory of the host's driver libraries (libcuda's first), and `{firmware}` each directory in which the kernel
searches for firmware.
"""

import re
from typing import NamedTuple

LIBRARY = re.compile(
    r"(?P<stem>lib(?:cuda|cudadebugger|nvcuvid|nvoptix|nvsdm|vdpau_nvidia|(?:GLX|EGL|GLESv2|GLESv1_CM)_nvidia"
    r"|nvidia-(?!container|gtk)[A-Za-z0-9_-]+))\.so(?:\.(?P<version>[0-9]+(?:\.[0-9]+)*))?"
)
"""Names of the driver's libraries. They are from libnvidia-container's nvc_info.c, except libnvsdm, with which DCGM
monitors NVSwitches since Blackwell. The libraries of libnvidia-container itself, and those of the GTK parts of
nvidia-settings, do not match."""
DRIVER_VERSION = re.compile(r"[1-9][0-9]{2,}(\.[0-9]+){1,2}")
"""A driver's version, such as 550.163.01. The 1 of a soname and the 1.1.18 of an external platform do not match."""
PLATFORM = "libnvidia-egl-"
"""Prefix of EGL's external platforms (gbm, wayland, wayland2, xcb, xlib), which distributions package separately."""

BINARIES = (
    # The last two are from the .run package (newer drivers), the others from CTK. nvidia-modprobe is left out on
    # purpose, because it is setuid and loads modules.
    *("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
    *("nvidia-imex", "nvidia-imex-ctl", "nvidia-ngx-updater", "nvidia-pcc"),
)
BINARY_DIRECTORIES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Where the agent looks for programs, as pkg/lookup of CTK does."""

GBM_LIBRARY, GBM_LINK = "libnvidia-allocator", "gbm/nvidia-drm_gbm.so"
"""A library, and a link to it. Mesa's libgbm loads NVIDIA's backend by this name."""


class Group(NamedTuple):
    """Files that serve one purpose."""

    name: str
    names: tuple[str, ...]
    """Patterns (fnmatch) of the files' names. A pattern with `{version}` matches only files of the driver's version."""
    directories: tuple[str, ...]
    """Where the files are on the host. Of several files with the same name, the first is used."""
    target: str
    """The files' directory below the driver root. If CTK looks for the group, this is where CTK looks."""
    in_every_driver: bool = False
    """Whether every recent driver has the group. If so, the agent reports when the group is missing."""
    needs: str = ""
    """The name of another group. This group is used only if the other group was found: the names of this group's files
    have no version, so only the other group shows that they belong to this driver."""


def _data(path: str) -> tuple[str, ...]:
    """Return where loaders look for configuration: /etc takes precedence (XDG base directories)."""
    return (f"/etc/{path}", f"/usr/local/share/{path}", f"/usr/share/{path}")


def _xorg(kind: str) -> tuple[str, ...]:
    """Return the directories of NVIDIA's modules on Ubuntu and on Debian, and then the X server's own directories."""
    modules = ("xorg/modules", "xorg/modules/updates")
    servers = (f"{base}/{each}/{kind}" for base in ("{libraries}", "/usr/lib", "/usr/lib64") for each in modules)
    return ("{libraries}/nvidia/xorg", "/usr/lib/nvidia/nvidia", *servers)


GROUPS = (
    Group("Vulkan", ("nvidia*.json",), _data("vulkan/icd.d"), "usr/share/vulkan/icd.d", in_every_driver=True),
    *(
        Group("Vulkan layers", ("nvidia*.json",), _data(each), f"usr/share/{each}")
        for each in ("vulkan/implicit_layer.d", "vulkan/explicit_layer.d")
    ),
    # Only in the .run package.
    Group("Vulkan SC", ("nvidia*.json",), _data("vulkansc/icd.d"), "usr/share/vulkansc/icd.d"),
    Group(
        "EGL", ("*nvidia*.json",), _data("glvnd/egl_vendor.d"), "usr/share/glvnd/egl_vendor.d", in_every_driver=True
    ),
    Group(
        "EGL platforms", ("*nvidia*.json",), _data("egl/egl_external_platform.d"),
        "usr/share/egl/egl_external_platform.d",
    ),
    # OpenCL's loader looks only in /etc.
    Group("OpenCL", ("nvidia*.icd",), ("/etc/OpenCL/vendors",), "etc/OpenCL/vendors", in_every_driver=True),
    # Debian has one nvoptix.bin for each installed driver, and a link to the chosen driver's in /usr/share/nvidia.
    Group("OptiX", ("nvoptix.bin",), ("{libraries}", "/usr/share/nvidia"), "usr/share/nvidia"),
    # Not CTK.
    Group(
        "application profiles", ("nvidia-application-profiles-{version}-*",), ("/usr/share/nvidia",), "usr/share/nvidia"
    ),
    # Only in the .run package.
    Group("file list", ("sandboxutils-filelist.json",), _data("nvidia/files.d"), "usr/share/nvidia/files.d"),
    # Not CTK. Proton looks for these files next to libGLX_nvidia.
    Group(
        "NGX for Wine", ("*.dll",), ("{libraries}/nvidia/wine", "/usr/lib/nvidia/wine", "/usr/lib64/nvidia/wine"),
        "usr/lib/{triplet}/nvidia/wine",
    ),
    # The target is where X servers of Debian and Ubuntu, and CTK, look without any configuration.
    Group("Xorg", ("libglxserver_nvidia.so.{version}",), _xorg("extensions"), "usr/lib/xorg/modules/extensions"),
    Group("Xorg driver", ("nvidia_drv.so",), _xorg("drivers"), "usr/lib/xorg/modules/drivers", needs="Xorg"),
    # Not in the .run package. /etc/X11 is not searched: it has the host's own configuration.
    Group(
        "Xorg configuration", ("10-nvidia.conf", "nvidia-drm-outputclass.conf"), ("/usr/share/X11/xorg.conf.d",),
        "usr/share/X11/xorg.conf.d",
    ),
    Group(
        "GSP firmware", ("*.bin",), ("{firmware}/nvidia/{version}",), "lib/firmware/nvidia/{version}",
        in_every_driver=True,
    ),
)  # fmt: skip
DATA_DIRECTORIES = tuple(sorted({each.target for each in GROUPS if each.target.startswith(("etc/", "usr/share/"))}))
"""The targets of files that configure loaders. Machines get links to these files."""
FIRMWARE_DIRECTORIES = (
    "/lib/firmware/updates/{release}",
    "/lib/firmware/updates",
    "/lib/firmware/{release}",
    "/lib/firmware",
)
"""Where the kernel looks for firmware (drivers/base/firmware_loader/main.c). `{release}` is that of uname(2)."""
FIRMWARE_PATH = "/sys/module/firmware_class/parameters/path"
"""A file that may name one more directory, which the kernel searches first. The file is usually empty."""
RELEASE = "/proc/sys/kernel/osrelease"
