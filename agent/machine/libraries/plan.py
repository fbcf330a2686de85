"""Plans which links into a driver root the machine needs, and which of its links it no longer needs. Pure.

The links are relative: programs that see the machine's file system in a subdirectory, such as a device plugin at
/driver-root, would follow absolute links out of it.
"""

import posixpath
from collections.abc import Mapping, Set
from dataclasses import dataclass

from agent.model.handoff import Request
from agent.model.paths import MACHINE_HOST_NVIDIA

TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
"""Debian's multiarch directories below /usr/lib, by architecture. Driver roots have this layout."""
TRIPLET_32 = "i386-linux-gnu"
BINARIES = "/usr/bin"
SUBDIRECTORIES = ("", "vdpau", "gbm")
"""The library directory and two subdirectories that get links too: from these, libraries load plugins by path."""

FOREIGN = ""
"""Stands for an entry that is not a link, in place of a link's text."""


@dataclass(frozen=True, slots=True)
class Places:
    """The machine's directories for links."""

    by_root_directory: Mapping[str, str]
    """Directories in the machine, by the directory in the driver root to which their links lead."""
    data: tuple[str, ...] = ()
    """Directories with configuration for loaders, which have the same path in the driver root and in the machine."""

    def directories(self) -> tuple[str, ...]:
        """Return every directory that may contain one of our links."""
        libraries = sorted(set(self.by_root_directory.values()) - {BINARIES})
        return (
            *(posixpath.join(each, sub).rstrip("/") for each in libraries for sub in SUBDIRECTORIES),
            BINARIES,
            *(f"/{each}" for each in self.data),
        )

    def target(self, file: str) -> str | None:
        """Return the path of the link to a file of the driver root.

        Return None for a file that only containers need, such as firmware.
        """
        for root_directory, directory in self.by_root_directory.items():
            rest = file.removeprefix(f"{root_directory}/")
            if rest != file and posixpath.dirname(rest) in SUBDIRECTORIES:
                return f"{directory}/{rest}"
        return f"/{file}" if posixpath.dirname(file) in self.data else None


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """The changes to the links."""

    remove: tuple[str, ...]
    make: Mapping[str, str]
    """The texts of new links, by path."""
    conflicts: tuple[str, ...]
    """Paths of wanted links where there is another file or link."""


def places(architecture: str, directories: Set[str], data: tuple[str, ...] = ()) -> Places:
    """Return the machine's directories. `directories` are those of /usr/lib/<triplet> and /usr/lib64 that exist."""
    triplet = TRIPLETS.get(architecture, f"{architecture}-linux-gnu")
    multiarch = f"/usr/lib/{triplet}"
    found = {f"usr/lib/{triplet}": multiarch if multiarch in directories else "/usr/lib64", "usr/bin": BINARIES}
    # A machine without a directory for 32-bit libraries has no 32-bit loader that could use them.
    if f"/usr/lib/{TRIPLET_32}" in directories:
        found[f"usr/lib/{TRIPLET_32}"] = f"/usr/lib/{TRIPLET_32}"
    return Places(found, data)


def wanted_links(request: Request, where: Places) -> dict[str, str]:
    """Return the texts of links, by path, to all files of the driver root that the machine itself uses."""
    links = {}
    for file in request.files:
        path = where.target(file.target)
        if path is not None:
            links[path] = posixpath.relpath(f"{request.driver_root}/{file.target}", posixpath.dirname(path))
    return links


def plan_links(wanted: Mapping[str, str], present: Mapping[str, str]) -> LinkPlan:
    """Return the changes to the links.

    `present` has the texts of all links in the directories of Places, and FOREIGN for other files.
    """
    own = {path for path, text in present.items() if _points_into_driver_root(path, text)}
    # ldconfig adds links between our links, such as from libcuda.so.1 to libcuda.so.550.163.01. It also removes these
    # when they dangle, so only our own links are removed here.
    replaceable = own | {path for path, text in present.items() if text and _resolve(path, text) in own | set(wanted)}
    conflicts = tuple(path for path in sorted(wanted) if path in present and path not in replaceable)
    make = {path: text for path, text in sorted(wanted.items()) if path not in conflicts and present.get(path) != text}
    return LinkPlan(tuple(sorted(own - set(wanted))), make, conflicts)


def needed_sonames(request: Request, where: Places) -> frozenset[str]:
    """Return the paths of links that must be in the loader cache: those named like a SONAME, such as `libcuda.so.1`."""
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
