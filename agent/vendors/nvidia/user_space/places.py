"""Where hosts keep NVIDIA's user space, in the order of the search. Pure data, with its descriptions.

Each layout names its source. Files have the same target in a driver root, whatever the place.
"""

from dataclasses import dataclass

from agent.config.settings import DriverSettings


@dataclass(frozen=True, slots=True)
class Place:
    """One place. All its directories are below its root."""

    name: str
    """The owner of the layout; for a configured place the key."""
    root: str = "/"
    libraries: tuple[str, ...] = ()
    """In a loader's order, of any architecture; if empty, the root's loader cache lists the libraries."""
    binaries: tuple[str, ...] = ()
    """Searched before the usual directories."""
    data: tuple[str, ...] = ()
    """Directories with `vulkan`, `glvnd`, `egl` and so on; searched before /etc, /usr/local/share and /usr/share."""
    configured: bool = False
    """An administrator named it, and is responsible for the owners of its files."""
    local: bool = True
    """It is never on a network file system, where inotify_add_watch(2) could hang."""

    def __str__(self) -> str:
        within = f" in {self.root}" if self.root != "/" else ""
        if self.libraries:
            return f"{', '.join(self.libraries)}{within} ({self.name})"
        return f"{self.root} ({self.name})" if within else self.name

    @property
    def of_the_loader(self) -> bool:
        """Whether the host's own loader cache lists its files."""
        return self.root == "/" and not self.libraries

    @property
    def watched(self) -> tuple[str, ...]:
        """Directories of the host in which a change may mean another driver."""
        root = "" if self.root == "/" else self.root
        # ldconfig replaces its cache, and a watch on the file would stay with the old one.
        return tuple(f"{root}{each}" for each in self.libraries or ("/etc",))


def _prefix(name: str, *prefixes: str) -> Place:
    """Return a place with a directory of its own, as installers of nodes' drivers lay it out."""
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
    # nvidia-installer, files.c: used if no loader cache is better. Newer Talos extensions give it /usr/local.
    Place("a runfile's", libraries=("/usr/lib64", "/usr/lib", "/usr/lib32", "/usr/local/lib64", "/usr/local/lib")),
)
"""Only the first place with a driver that fits the loaded module is used."""


def configured_place(settings: DriverSettings) -> Place | None:
    """Return the place that the configuration names."""
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
"""Patterns of names in `Place.watched` whose change may mean another driver: each driver has the first two."""


def watched_directories(driver: DriverSettings) -> tuple[str, ...]:
    """Return those of the configured place, else of all places, if local: passes search the others."""
    configured = configured_place(driver)
    places = (configured,) if configured else PLACES
    return tuple(dict.fromkeys(directory for place in places if place.local for directory in place.watched))
