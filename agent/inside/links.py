"""Which links the machine needs into a driver root, and which of ours it no longer needs. Pure.

The links are relative: consumers that see the machine's file system below another root (a device plugin at
/driver-root) would follow absolute ones out of it.
"""

import posixpath
from collections.abc import Mapping, Set
from dataclasses import dataclass

from agent.handoff import Request
from agent.paths import MACHINE_HOST_NVIDIA

TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
"""Debian's multiarch directory below /usr/lib, by machine architecture; driver roots are laid out with them."""
TRIPLET_32 = "i386-linux-gnu"
BINARIES = "/usr/bin"
SUBDIRECTORIES = ("", "vdpau", "gbm")
"""Below the library directory: where drivers put plug-ins that are loaded by path."""

FOREIGN = ""
"""In a listing: a file, directory or device node instead of a link's text."""


@dataclass(frozen=True, slots=True)
class Places:
    """Directories of the machine that take links, by the driver root's directory that they stand for."""

    by_root_directory: Mapping[str, str]
    data: tuple[str, ...] = ()
    """Directories with configuration for loaders, which have the same place in the driver root as in the machine."""

    def directories(self) -> tuple[str, ...]:
        """Every directory in which a link of ours may be."""
        libraries = sorted(set(self.by_root_directory.values()) - {BINARIES})
        return (
            *(posixpath.join(each, sub).rstrip("/") for each in libraries for sub in SUBDIRECTORIES),
            BINARIES,
            *(f"/{each}" for each in self.data),
        )

    def target(self, file: str) -> str | None:
        """Where a file of the driver root is linked; None for what containers alone need, such as firmware."""
        for root_directory, directory in self.by_root_directory.items():
            rest = file.removeprefix(f"{root_directory}/")
            if rest != file and posixpath.dirname(rest) in SUBDIRECTORIES:
                return f"{directory}/{rest}"
        return f"/{file}" if posixpath.dirname(file) in self.data else None


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """What to do; conflicts are paths that somebody else's file or link occupies."""

    remove: tuple[str, ...]
    make: Mapping[str, str]
    """Text by path."""
    conflicts: tuple[str, ...]


def places(architecture: str, directories: Set[str], data: tuple[str, ...] = ()) -> Places:
    """From those of /usr/lib/<triplet> and /usr/lib64 that the machine has."""
    triplet = TRIPLETS.get(architecture, f"{architecture}-linux-gnu")
    multiarch = f"/usr/lib/{triplet}"
    found = {f"usr/lib/{triplet}": multiarch if multiarch in directories else "/usr/lib64", "usr/bin": BINARIES}
    # A machine without a directory for 32-bit libraries has no 32-bit loader that could use them.
    if f"/usr/lib/{TRIPLET_32}" in directories:
        found[f"usr/lib/{TRIPLET_32}"] = f"/usr/lib/{TRIPLET_32}"
    return Places(found, data)


def wanted_links(request: Request, where: Places) -> dict[str, str]:
    """Link text by path, for every file of the driver root that the machine itself uses."""
    links = {}
    for file in request.files:
        path = where.target(file.target)
        if path is not None:
            links[path] = posixpath.relpath(f"{request.driver_root}/{file.target}", posixpath.dirname(path))
    return links


def plan_links(wanted: Mapping[str, str], present: Mapping[str, str]) -> LinkPlan:
    """The difference; `present` has the text of every link (FOREIGN for other files) in the directories of `Places`."""
    own = {path for path, text in present.items() if _points_into_driver_root(path, text)}
    # ldconfig makes links of its own between our links: libcuda.so.1 to libcuda.so.550.163.01. It also removes those
    # that dangle, so that only ours are removed here.
    replaceable = own | {path for path, text in present.items() if text and _resolve(path, text) in own | set(wanted)}
    conflicts = tuple(path for path in sorted(wanted) if path in present and path not in replaceable)
    make = {path: text for path, text in sorted(wanted.items()) if path not in conflicts and present.get(path) != text}
    return LinkPlan(tuple(sorted(own - set(wanted))), make, conflicts)


def needed_sonames(request: Request, where: Places) -> frozenset[str]:
    """Paths of the links that the loader cache must name: `libcuda.so.1`, which a file of the driver root bears."""
    found = set()
    for file in request.files:
        path = where.target(file.target)
        name = posixpath.basename(file.target)
        if path and file.link and name.partition(".so.")[2].isdecimal() and posixpath.dirname(path) in set(
            where.by_root_directory.values()
        ):  # fmt: skip
            found.add(path)
    return frozenset(found)


def _points_into_driver_root(path: str, text: str) -> bool:
    return bool(text) and _resolve(path, text).startswith(f"{MACHINE_HOST_NVIDIA}/")


def _resolve(path: str, text: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), text))
