"""Plans which links into a driver root the machine needs, and which of ours it no longer needs. Pure.

The links are relative: programs that see the machine's file system below another root (a device plugin at
/driver-root) would follow absolute ones out of it.
"""

import posixpath
from collections.abc import Mapping, Set
from dataclasses import dataclass

from agent.model.handoff import Request
from agent.model.paths import MACHINE_HOST_NVIDIA

TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
"""Debian's multiarch directory below /usr/lib, by machine architecture; driver roots use this layout."""
TRIPLET_32 = "i386-linux-gnu"
BINARIES = "/usr/bin"
SUBDIRECTORIES = ("", "vdpau", "gbm")
"""Directories below the library directory from which drivers load plugins by path."""

FOREIGN = ""
"""In a listing: a file, directory or device node instead of a link's text."""


@dataclass(frozen=True, slots=True)
class Places:
    """The machine's directories for links, by the driver root's directory that each stands for."""

    by_root_directory: Mapping[str, str]
    data: tuple[str, ...] = ()
    """Directories with configuration for loaders, at the same path in driver root and machine."""

    def directories(self) -> tuple[str, ...]:
        """Return every directory in which a link of ours may be."""
        libraries = sorted(set(self.by_root_directory.values()) - {BINARIES})
        return (
            *(posixpath.join(each, sub).rstrip("/") for each in libraries for sub in SUBDIRECTORIES),
            BINARIES,
            *(f"/{each}" for each in self.data),
        )

    def target(self, file: str) -> str | None:
        """Return where a file of the driver root is linked; None if only containers need it, such as firmware."""
        for root_directory, directory in self.by_root_directory.items():
            rest = file.removeprefix(f"{root_directory}/")
            if rest != file and posixpath.dirname(rest) in SUBDIRECTORIES:
                return f"{directory}/{rest}"
        return f"/{file}" if posixpath.dirname(file) in self.data else None


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """What to change; conflicts are paths where another file or link is."""

    remove: tuple[str, ...]
    make: Mapping[str, str]
    """Link text by path."""
    conflicts: tuple[str, ...]


def places(architecture: str, directories: Set[str], data: tuple[str, ...] = ()) -> Places:
    """Choose from those of /usr/lib/<triplet> and /usr/lib64 that the machine has."""
    triplet = TRIPLETS.get(architecture, f"{architecture}-linux-gnu")
    multiarch = f"/usr/lib/{triplet}"
    found = {f"usr/lib/{triplet}": multiarch if multiarch in directories else "/usr/lib64", "usr/bin": BINARIES}
    # A machine without a directory for 32-bit libraries has no 32-bit loader that could use them.
    if f"/usr/lib/{TRIPLET_32}" in directories:
        found[f"usr/lib/{TRIPLET_32}"] = f"/usr/lib/{TRIPLET_32}"
    return Places(found, data)


def wanted_links(request: Request, where: Places) -> dict[str, str]:
    """Return link text by path, for every file of the driver root that the machine itself uses."""
    links = {}
    for file in request.files:
        path = where.target(file.target)
        if path is not None:
            links[path] = posixpath.relpath(f"{request.driver_root}/{file.target}", posixpath.dirname(path))
    return links


def plan_links(wanted: Mapping[str, str], present: Mapping[str, str]) -> LinkPlan:
    """Compare; `present` has the text of every link (FOREIGN for other files) in the directories of `Places`."""
    own = {path for path, text in present.items() if _points_into_driver_root(path, text)}
    # ldconfig adds links between ours: libcuda.so.1 to libcuda.so.550.163.01. It also removes those that dangle, so
    # only ours are removed here.
    replaceable = own | {path for path, text in present.items() if text and _resolve(path, text) in own | set(wanted)}
    conflicts = tuple(path for path in sorted(wanted) if path in present and path not in replaceable)
    make = {path: text for path, text in sorted(wanted.items()) if path not in conflicts and present.get(path) != text}
    return LinkPlan(tuple(sorted(own - set(wanted))), make, conflicts)


def needed_sonames(request: Request, where: Places) -> frozenset[str]:
    """Return the paths of links that the loader cache must name, such as `libcuda.so.1`: SONAMEs of driver files."""
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
