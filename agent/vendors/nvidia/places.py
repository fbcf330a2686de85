"""Places where hosts keep NVIDIA's user space, in the order of the search. Pure.

Comments name the sources of the layouts. The files' paths in a driver root do not depend on the place.
"""

import posixpath

from msgspec import Struct
from msgspec.structs import replace

from agent.config.settings import DriverSettings
from agent.vendors.nvidia.file_groups import BINARY_DIRECTORIES

LIBRARY_DIRECTORIES = ("lib64", "lib")
"""Names of the library directories in a prefix, in a loader's order."""


class Place(Struct, frozen=True):
    """One place where hosts keep the driver's user space. All its directories are relative to its root."""

    name: str
    """The system or installer that uses the place; for a configured place, the configuration key."""
    root: str = "/"
    libraries: tuple[str, ...] = ()
    """Directories with libraries of any architecture, in a loader's order. If empty, the loader cache is used."""
    binaries: tuple[str, ...] = ()
    """Directories of programs, which are searched before BINARY_DIRECTORIES."""
    data: tuple[str, ...] = ()
    """Directories with `vulkan`, `glvnd`, `egl` and so on; searched before /etc, /usr/local/share and /usr/share."""
    configured: bool = False
    """Whether the configuration names the place. Then the administrator is responsible for the owners of its files."""
    local: bool = True
    """False if the place may be on a network file system, where inotify_add_watch(2) could hang."""

    def __str__(self) -> str:
        within = f" in {self.root}" if self.root != "/" else ""
        if self.libraries:
            return f"{', '.join(self.libraries)}{within} ({self.name})"
        return f"{self.root} ({self.name})" if within else self.name

    @property
    def in_loader_cache(self) -> bool:
        """Whether the host's loader cache lists the libraries of this place."""
        return self.root == "/" and not self.libraries


def _prefix(name: str, *prefixes: str) -> Place:
    """Return a place whose directories are below prefixes, as driver installers for Kubernetes nodes lay it out."""
    return Place(
        name,
        libraries=tuple(f"{prefix}/{each}" for prefix in prefixes for each in LIBRARY_DIRECTORIES),
        binaries=tuple(f"{prefix}/bin" for prefix in prefixes),
        data=tuple(f"{prefix}{each}" for prefix in prefixes for each in ("", "/share", "/etc")),
        local=False,
    )


HOST_CACHE = "the host's loader cache"
PLACES = (
    Place(HOST_CACHE),
    # gpu-operator, assets/state-driver: the container's root, with its own loader cache.
    Place("GPU Operator's driver container", root="/run/nvidia/driver"),
    # siderolabs/extensions, nvidia-gpu: a glibc separate from Talos's musl; its Vulkan files are in /etc.
    Place(
        "Talos",
        libraries=("/usr/local/glibc/usr/lib", "/usr/local/glibc/usr/lib64"),
        binaries=("/usr/local/glibc/usr/bin",),
        data=("/usr/local/glibc/etc", "/usr/local/glibc/usr/share", "/usr/local/share"),
    ),
    _prefix("/usr/local/nvidia", "/usr/local/nvidia"),
    # container-engine-accelerators' installers, and cos-gpu-installer's own default.
    _prefix("Container-Optimized OS", "/home/kubernetes/bin/nvidia", "/var/lib/nvidia"),
    # Flatcar links `current` to one version.
    _prefix("/opt/nvidia", "/opt/nvidia/current", "/opt/nvidia"),
    # nixpkgs, nixos/modules/hardware/graphics.nix: links into /nix/store.
    Place(
        "NixOS",
        libraries=("/run/opengl-driver/lib", "/run/opengl-driver-32/lib"),
        binaries=("/run/current-system/sw/bin",),
        data=("/run/opengl-driver/share", "/run/opengl-driver-32/share"),
    ),
    # nvidia-installer, files.c; needed only if no loader cache lists the files. Newer Talos extensions pass the prefix
    # /usr/local to nvidia-installer.
    Place("a runfile's", libraries=("/usr/lib64", "/usr/lib", "/usr/lib32", "/usr/local/lib64", "/usr/local/lib")),
)
"""All places. The first one with a driver of the loaded module's version is used."""


def with_prefix(place: Place, libraries: str) -> Place:
    """Return the place. If the directory `libraries` is lib64 or lib of a prefix, add the prefix's programs and data.

    A loader cache may lead to a driver in a prefix of its own: some hosts name /usr/local/nvidia/lib64 in ld.so.conf.
    /, /usr and /usr/local do not count as prefixes, because their programs and data are searched in any case.
    """
    prefix, name = posixpath.split(libraries)
    if name not in LIBRARY_DIRECTORIES or posixpath.join(prefix, "bin") in BINARY_DIRECTORIES:
        return place
    found = _prefix(place.name, prefix)
    return replace(place, binaries=(*place.binaries, *found.binaries), data=(*place.data, *found.data))


def configured_place(settings: DriverSettings) -> Place | None:
    """Return the place that the configuration names; None if it names none."""
    if not settings.place_key:
        return None
    return Place(
        settings.place_key,
        settings.root or "/",
        tuple(settings.library_directories),
        tuple(settings.binary_directories),
        tuple(settings.data_directories),
        configured=True,
        local=settings.root == "/" and not settings.library_directories,
    )


LIBRARY_NAMES: tuple[str, ...] = ("libcuda.so*", "libnvidia-ml.so*", "ld.so.cache")
"""Patterns (fnmatch) of names in `watched_directories` whose change may mean that a different driver is installed."""


def watched_directories(driver: DriverSettings) -> tuple[str, ...]:
    """Return the watched directories of the configured place, or of all places if none is configured.

    Only local places are watched. The next pass notices a change in any other place.
    """
    configured = configured_place(driver)
    places = [place for place in ((configured,) if configured else PLACES) if place.local]
    # /etc, because ldconfig replaces /etc/ld.so.cache: a watch on the file would stay on the old one.
    found = (f"{place.root.rstrip('/')}{each}" for place in places for each in place.libraries or ("/etc",))
    return tuple(dict.fromkeys(found))
