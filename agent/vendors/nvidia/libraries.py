"""Finds the libraries of one driver version, and their paths in a driver root.

The search begins with the loader cache. The cache may list links, and the real files may be in other directories (on
Debian, behind absolute links of the alternatives system), next to further files that the cache does not list.
"""

import errno
import os.path
import struct
from collections.abc import Iterable, Set

from msgspec import Struct, field

from agent.model.facts import Absent, Broken, CacheEntry, Library, Seen, Unseen
from agent.system.files import NOT_FOUND, UNUSABLE, System
from agent.system.trust import PathTrust, classify_error, entries_if_present, file_fault, untrusted_component
from agent.vendors.nvidia.companion_files import library
from agent.vendors.nvidia.file_groups import DRIVER_VERSION, GBM_LIBRARY, GBM_LINK, LIBRARY, PLATFORM

TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu", "i686": "i386-linux-gnu"}
"""Debian's multiarch names. Every driver root has this layout, whatever the host's is."""
SETS = {"x86_64": ("x86_64", "i686"), "aarch64": ("aarch64",)}
"""Architectures of the libraries in a driver's package, by native architecture: the native one first, then 32-bit."""

MAIN = ("libcuda", "libnvidia-ml")
"""Libraries that every driver has. CUDA's compatibility packages have libcuda, but not libnvidia-ml."""
STUBS = "stubs"
"""Name of the directories with stub libraries for linking, in CUDA's toolkit and the Video Codec SDK."""


class FoundLibraries(Struct):
    """The libraries that a loader cache leads to: those of one architecture, in all versions."""

    architecture: str
    files: dict[str, list[str]] = field(default_factory=dict)
    """The real paths of files by name, in the loader's order."""
    links: set[str] = field(default_factory=set)
    """Names under which programs look for libraries: sonames and development links."""
    directories: dict[str, None] = field(default_factory=dict)
    """The real paths of the libraries' directories, in the loader's order."""
    root_owned: bool = True
    """Whether files that users other than root control are left out."""

    def versions(self, stem: str) -> list[str]:
        """Return the versions of one library, in the loader's order."""
        return [_version(name) for name in self.files if _stem(name) == stem and _version(name)]

    def for_version(self, version: str) -> dict[str, str]:
        """Return the best real path, by name, of each file that belongs to the version.

        A file whose name has no driver version, such as libnvidia-egl-wayland.so.1.1.18, is judged by its directory.
        """
        by_directory: dict[str, set[str]] = {}
        for name, paths in self.files.items():
            for path in paths:
                by_directory.setdefault(os.path.dirname(path), set()).add(_version(name))
        stems = {_stem(name) for name in self.files if _version(name) == version}

        def belongs(name: str, path: str) -> bool:
            if _version(name):
                return _version(name) == version
            # A real file is left out in two cases, because it may be a stub of CUDA's toolkit: its name is that of a
            # development link (libcuda.so); or its name is a soname (libcuda.so.1), while another file of the same
            # library has the version in its name.
            if name.endswith(".so") or _stem(name) in stems:
                return False
            # A file without a version in its name belongs to each version that other files in its directory have in
            # their names. If no file in its directory has a version in its name, the file belongs to no version. But
            # EGL's platforms then belong to every version: distributions package the platforms separately, so they may
            # be in a directory without other libraries of the driver.
            directory_versions = by_directory[os.path.dirname(path)]
            return version in directory_versions or (name.startswith(PLATFORM) and directory_versions == {""})

        def rank(path: str) -> int:
            """Return a path's rank; the lowest rank is the best.

            Directories with both main libraries of this version come first: CUDA's compatibility packages have only
            libcuda. Next come directories with any library of this version.
            """
            directory = os.path.dirname(path)
            both = all(
                f"{directory}/{stem}.so.{version}" in self.files.get(f"{stem}.so.{version}", ()) for stem in MAIN
            )
            return 0 if both else 1 if version in by_directory[directory] else 2

        chosen = {}
        for name, paths in self.files.items():
            if fitting := [path for path in paths if belongs(name, path)]:
                chosen[name] = min(fitting, key=rank)
        return chosen


def own_directories(found: FoundLibraries, version: str) -> list[str]:
    """Return the directories of the files that have the version in their names; libcuda's directory comes first."""
    chosen = {name: path for name, path in found.for_version(version).items() if _version(name)}
    ordered = sorted(chosen, key=lambda name: (_stem(name) != MAIN[0], name))
    return list(dict.fromkeys(os.path.dirname(chosen[name]) for name in ordered))


def choose(found: FoundLibraries, module: str) -> Seen[str]:
    """Return a version that has both main libraries, preferably the module's; Broken or Absent if there is none."""
    installed = {stem: found.versions(stem) for stem in MAIN}
    complete = [version for version in installed["libcuda"] if version in installed["libnvidia-ml"]]
    if complete:
        return module if module in complete else complete[0]
    if any(installed.values()):
        found_versions = " and ".join(
            f"{stem} {', '.join(versions) or '(none)'}" for stem, versions in installed.items()
        )
        return Broken(f"no driver version has both libcuda and libnvidia-ml: found {found_versions}")
    if found.links:
        return Broken(
            "found libraries of NVIDIA's driver, but no usable libcuda or libnvidia-ml; `unbounded-agent doctor` lists "
            "files that were left out"
        )
    return Absent("found no library of NVIDIA's driver")


def search(
    system: System,
    cache: tuple[CacheEntry, ...],
    found: FoundLibraries,
    problems: list[str],
    searched: Set[str] = frozenset(),
) -> FoundLibraries:
    """Add to `found` the libraries that the cache leads to. Return `found`. Raises OSError if an observation failed.

    Libraries in the directories in `searched` are left out, because an earlier search has found them.
    """
    # libcuda's directory comes first: it has the complete set.
    entries = sorted(
        (each for each in cache if each.architecture == found.architecture and lists_driver_library(each)),
        key=lambda each: _stem(each.soname) != "libcuda",
    )
    for entry in entries:
        try:
            real = system.real_path(entry.path)
        except OSError as error:
            if isinstance(classify_error(entry.path, error), Unseen):
                raise
            problems.append(f"{entry.path}: points to no file; reinstall the driver's libraries and run ldconfig")
            continue
        if not real.isprintable():
            problems.append(f"{real!a}: unexpected characters in a library's path")
            continue
        directory = os.path.dirname(real)
        if directory in searched or STUBS in directory.split("/"):
            continue
        found.links.add(entry.soname)
        _add(system, found, real, problems)
        found.directories[directory] = None
    for directory in found.directories:
        _scan(system, found, directory, problems)
        _scan_vdpau(system, found, f"{directory}/vdpau", problems)
    return found


def lists_driver_library(entry: CacheEntry) -> bool:
    """Return whether an entry of a loader cache is a library of the driver."""
    # Libraries only for newer processors (glibc-hwcaps) are left out: a driver root has one directory for all
    # processors.
    return bool(LIBRARY.fullmatch(entry.soname)) and "/glibc-hwcaps/" not in entry.path


def _scan(system: System, found: FoundLibraries, directory: str, problems: list[str]) -> None:
    for name in entries_if_present(system, directory):
        if not name.isprintable() and name.startswith(("libnvidia-", "libcuda")):
            problems.append(f"{directory}: unexpected characters in the library name {name!a}")
        elif not LIBRARY.fullmatch(name):
            continue
        elif system.read_link(f"{directory}/{name}") is None:
            if _version(name):
                _add(system, found, f"{directory}/{name}", problems)
        elif not _version(name):
            found.links.add(name)


def _scan_vdpau(system: System, found: FoundLibraries, directory: str, problems: list[str]) -> None:
    """Add the driver's files and links in VDPAU's directory, which is not in the cache."""
    if not system.exists(directory):
        return
    if found.root_owned and (why := untrusted_component(system, directory)):
        _add_once(problems, f"{directory}: left out, because {why}")
        return
    _scan(system, found, directory, problems)


def _add_once(problems: list[str], problem: str) -> None:
    """Add a problem, unless another architecture's search has added it."""
    if problem not in problems:
        problems.append(problem)


def _add(system: System, found: FoundLibraries, real: str, problems: list[str]) -> None:
    name = os.path.basename(real)
    if not LIBRARY.fullmatch(name) or real in found.files.get(name, ()) or not system.is_file(real):
        return
    if fault := file_fault(system, real, root_owned=found.root_owned):
        _add_once(problems, f"{real}: left out, because {fault}")
        return
    found.files.setdefault(name, []).append(real)


def libraries(system: System, found: FoundLibraries, version: str) -> list[Library]:
    """Return, for a driver root, the files that belong to the version, and the links to these files."""
    by_target: dict[str, Library] = {}
    chosen = found.for_version(version)
    for name, real in sorted(chosen.items()):
        target = _target(found.architecture, name)
        by_target[target] = library(system, target, real)
    # Links are matched by stem: on a host with two versions, a link may lead to the other version's file.
    by_stem = {_stem(name): name for name in sorted(chosen)}
    for link in sorted(found.links):
        file = by_stem.get(_stem(link))
        if file and not _version(link):
            target = _target(found.architecture, link)
            by_target.setdefault(target, Library(target, "", link=file))
    if backend := by_stem.get(GBM_LIBRARY):
        target = _target(found.architecture, GBM_LINK)
        by_target[target] = Library(target, "", link=f"../{backend}")
    return list(by_target.values())


def _target(architecture: str, name: str) -> str:
    # libvdpau looks for its drivers in their own directory, wherever the host keeps the real file.
    directory = "vdpau/" if name.startswith("libvdpau_") else ""
    return f"usr/lib/{TRIPLETS[architecture]}/{directory}{name}"


def _stem(name: str) -> str:
    match = LIBRARY.fullmatch(name)
    return match["stem"] if match else ""


def _version(name: str) -> str:
    """Return the driver's version in a file's name; empty for a soname, or if the number is not a driver's version."""
    match = LIBRARY.fullmatch(name)
    version = (match and match["version"]) or ""
    return version if DRIVER_VERSION.fullmatch(version) else ""


# Directories that are in no loader cache: the architecture is in the libraries' ELF headers (elf(5)).

HEADER = struct.Struct("<4sBB10xHH")
"""An ELF file begins with magic, class (1: 32 bits, 2: 64), byte order (1: little-endian), type and machine (elf.h)."""
LITTLE_ENDIAN = 1
ARCHITECTURES = {(1, 3): "i686", (2, 62): "x86_64", (2, 183): "aarch64"}
"""Architectures by class and machine: EM_386, EM_X86_64 (of class 2; class 1 is x32), EM_AARCH64."""


def list_libraries(system: System, directories: Iterable[str], native: str, trust: PathTrust) -> tuple[CacheEntry, ...]:
    """Return NVIDIA's libraries as a loader cache would list them. Raises OSError if an observation failed.

    Directories that `trust` refuses are not read, because their owner could put a million names into them.
    """
    found = []
    for directory in filter(trust.permits, dict.fromkeys(directories)):
        for name in entries_if_present(system, directory):
            path = f"{directory}/{name}"
            if LIBRARY.fullmatch(name) and trust.permits(directory, path):
                found.append(CacheEntry(name, _architecture(system, path, native), path))
    return tuple(found)


def _architecture(system: System, path: str, native: str) -> str:
    """Return a library's architecture; empty if unknown. A dangling link gets `native`, so that a fault is reported."""
    try:
        header = system.head(path, HEADER.size)
    except OSError as error:
        if error.errno in NOT_FOUND | {errno.ELOOP}:
            return native
        if error.errno in UNUSABLE:
            return ""
        raise
    if len(header) < HEADER.size:
        return ""
    magic, bits, order, _, machine = HEADER.unpack(header)
    return ARCHITECTURES.get((bits, machine), "") if magic == b"\x7fELF" and order == LITTLE_ENDIAN else ""
