"""Plans which links into a driver root the machine needs, and which of its links it no longer needs. Pure.

The links are relative, because programs that see the machine's file system in a subdirectory, such as a device plugin
with /driver-root, would follow absolute links out of that subdirectory.
"""

import posixpath
from collections.abc import Mapping, Set
from typing import NamedTuple

from agent.model.handoff import Request
from agent.model.paths import MACHINE_HOST_NVIDIA

TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
"""Debian's multiarch directories below /usr/lib, by architecture. Driver roots have this layout."""
TRIPLET_32 = "i386-linux-gnu"
BINARIES = "/usr/bin"
SUBDIRECTORIES = ("", "vdpau", "gbm")
"""The library directory itself, and its two subdirectories for plugins, which libraries load by path."""

FOREIGN = ""
"""Stands in place of a link's target for an entry that is not a link."""


class LinkDirectories(NamedTuple):
    """The machine's directories that have links into a driver root."""

    by_root_directory: Mapping[str, str]
    """Directories in the machine, by the directory in the driver root to which their links lead."""
    data: tuple[str, ...] = ()
    """Directories with configuration for loaders, relative to `/`. They have the same path in the driver root."""

    def all(self) -> tuple[str, ...]:
        """Return the absolute path of every directory that may have one of the agent's links."""
        libraries = sorted(set(self.by_root_directory.values()) - {BINARIES})
        return (
            *(posixpath.join(each, sub).rstrip("/") for each in libraries for sub in SUBDIRECTORIES),
            BINARIES,
            *(f"/{each}" for each in self.data),
        )

    def link_to(self, file: str) -> str | None:
        """Return the path of the link to a file, which is given by its path below the driver root.

        Return None for a file that only containers need, such as firmware.
        """
        for root_directory, directory in self.by_root_directory.items():
            rest = file.removeprefix(f"{root_directory}/")
            if rest != file and posixpath.dirname(rest) in SUBDIRECTORIES:
                return f"{directory}/{rest}"
        return f"/{file}" if posixpath.dirname(file) in self.data else None


class LinkPlan(NamedTuple):
    """The changes to the links."""

    remove: tuple[str, ...]
    make: Mapping[str, str]
    """The targets of new links, by the link's path."""
    conflicts: tuple[str, ...]
    """Paths of wanted links where another file or link is in the way."""


def link_directories(architecture: str, existing: Set[str], data: tuple[str, ...] = ()) -> LinkDirectories:
    """Return the machine's directories for links.

    `existing` has those of /usr/lib/<triplet>, /usr/lib/TRIPLET_32 and /usr/lib64 that exist; `data` is as in
    LinkDirectories.
    """
    triplet = TRIPLETS.get(architecture, f"{architecture}-linux-gnu")
    multiarch = f"/usr/lib/{triplet}"
    by_root_directory = {
        f"usr/lib/{triplet}": multiarch if multiarch in existing else "/usr/lib64",
        "usr/bin": BINARIES,
    }
    # A machine without a directory for 32-bit libraries has no 32-bit loader that could use them.
    if f"/usr/lib/{TRIPLET_32}" in existing:
        by_root_directory[f"usr/lib/{TRIPLET_32}"] = f"/usr/lib/{TRIPLET_32}"
    return LinkDirectories(by_root_directory, data)


def wanted_links(request: Request, directories: LinkDirectories) -> dict[str, str]:
    """Return the links to all files of the driver root that the machine itself uses: targets by the link's path."""
    links = {}
    for file in request.files:
        path = directories.link_to(file.target)
        if path is not None:
            links[path] = posixpath.relpath(f"{request.driver_root}/{file.target}", posixpath.dirname(path))
    return links


def plan_links(wanted: Mapping[str, str], present: Mapping[str, str]) -> LinkPlan:
    """Return the changes to the links.

    `present` has the entries of all link directories by path: the target of each link, and FOREIGN for other files.
    """
    own = {path for path, target in present.items() if _points_into_driver_root(path, target)}
    # ldconfig makes links of its own that lead to the agent's links, such as libcuda.so.1 to libcuda.so.550.163.01. The
    # agent may replace such a link, but need not remove it, because ldconfig also removes links that dangle.
    replaceable = own | {
        path for path, target in present.items() if target and _resolve(path, target) in own | set(wanted)
    }
    conflicts = tuple(path for path in sorted(wanted) if path in present and path not in replaceable)
    make = {
        path: target for path, target in sorted(wanted.items()) if path not in conflicts and present.get(path) != target
    }
    return LinkPlan(tuple(sorted(own - set(wanted))), make, conflicts)


def soname_links(request: Request, directories: LinkDirectories) -> frozenset[str]:
    """Return the paths of links that must be in the loader cache: those named like a SONAME, such as `libcuda.so.1`."""
    links = set()
    for file in request.files:
        path = directories.link_to(file.target)
        name = posixpath.basename(file.target)
        if path and file.link and name.partition(".so.")[2].isdecimal() and posixpath.dirname(path) in set(
            directories.by_root_directory.values()
        ):  # fmt: skip
            links.add(path)
    return frozenset(links)


def _points_into_driver_root(path: str, target: str) -> bool:
    return bool(target) and _resolve(path, target).startswith(f"{MACHINE_HOST_NVIDIA}/")


def _resolve(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
