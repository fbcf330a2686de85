"""Where hosts keep NVIDIA's user space, in the order in which it is looked for. Pure data, and its words.

Each layout names its source. Whatever the place, files have the same target in a driver root.
"""

from dataclasses import dataclass

from agent.config import DriverSettings


@dataclass(frozen=True, slots=True)
class Place:
    """One place. All its directories are below its root."""

    name: str
    """Whose layout it is; for a configured one the key."""
    root: str = "/"
    libraries: tuple[str, ...] = ()
    """In a loader's order, of any architecture; where there are none, the root's loader cache tells."""
    binaries: tuple[str, ...] = ()
    """Searched before the usual directories."""
    data: tuple[str, ...] = ()
    """What has `vulkan`, `glvnd`, `egl` and the like in it; searched before /etc, /usr/local/share and /usr/share."""
    configured: bool = False
    """An administrator named it, who answers for the owners of what is there."""
    local: bool = True
    """No host has a network's file system there: inotify_add_watch(2) would wait for one that hangs."""

    def __str__(self) -> str:
        within = f" in {self.root}" if self.root != "/" else ""
        if self.libraries:
            return f"{', '.join(self.libraries)}{within} ({self.name})"
        return f"{self.root} ({self.name})" if within else self.name

    @property
    def of_the_loader(self) -> bool:
        """Whether the host's own loader cache tells what is there."""
        return self.root == "/" and not self.libraries

    @property
    def watched(self) -> tuple[str, ...]:
        """Directories of the host in which a change tells of another driver."""
        root = "" if self.root == "/" else self.root
        # ldconfig replaces its cache, and a watch on the file would stay with the old one.
        return tuple(f"{root}{each}" for each in self.libraries or ("/etc",))


def _prefix(name: str, *prefixes: str) -> Place:
    """A directory of the driver's own, as installers of nodes' drivers lay it out."""
    return Place(
        name,
        libraries=tuple(f"{prefix}/{each}" for prefix in prefixes for each in ("lib64", "lib")),
        binaries=tuple(f"{prefix}/bin" for prefix in prefixes),
        data=tuple(f"{prefix}{each}" for prefix in prefixes for each in ("", "/share", "/etc")),
        local=False,
    )


HOST_CACHE = "the host's loader cache"
PLACES = (
    Place(HOST_CACHE),
    # gpu-operator, assets/state-driver: the container's root, with a loader cache of its own.
    Place("GPU Operator's driver container", root="/run/nvidia/driver"),
    # siderolabs/extensions, nvidia-gpu: a glibc apart from Talos's musl; its Vulkan files are in /etc.
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
    # nvidia-installer, files.c: where no loader cache tells it better. Newer Talos extensions give it /usr/local.
    Place("a runfile's", libraries=("/usr/lib64", "/usr/lib", "/usr/lib32", "/usr/local/lib64", "/usr/local/lib")),
)
"""Only the first one that holds a driver which fits the loaded module is used."""


def configured_place(settings: DriverSettings) -> Place | None:
    """The place that the configuration names."""
    if not settings.configured:
        return None
    return Place(
        settings.configured,
        settings.root,
        tuple(settings.library_directories),
        tuple(settings.binary_directories),
        tuple(settings.data_directories),
        configured=True,
        local=settings.root == "/" and not settings.library_directories,
    )


LIBRARY_NAMES: tuple[str, ...] = ("libcuda.so*", "libnvidia-ml.so*", "ld.so.cache")
"""Patterns of what tells of another driver in `Place.watched`: each driver has the first two."""


def watched_directories(settings: DriverSettings) -> tuple[str, ...]:
    """Of the configured place, or of those that are looked at, as far as they are local: passes look at the others."""
    configured = configured_place(settings)
    places = (configured,) if configured else PLACES
    return tuple(dict.fromkeys(directory for place in places if place.local for directory in place.watched))
