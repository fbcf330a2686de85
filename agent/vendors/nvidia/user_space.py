"""Observes the driver's user space: finds the place where this host keeps it, and its files in that place.

The search for libraries begins with the loader cache. The cache may list links, and the real files may be in other
directories (on Debian, behind absolute links of the alternatives system), next to further files that the cache does not
list.
"""

import errno
import json
import os.path
import posixpath
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from agent.model.errors import AgentError, DocumentError
from agent.model.facts import Absent, Broken, CacheEntry, Library, Seen, Unseen, UserSpace, VendorFacts
from agent.model.json_document import parse_json
from agent.model.text import whole_number
from agent.system.deadlines import call_device
from agent.system.files import NOT_FOUND, UNUSABLE, System
from agent.system.trust import PathTrust, classify_error, entries_if_present, file_fault, untrusted_component
from agent.vendors.host_vendor import DriverForPods, Sources
from agent.vendors.nvidia.file_groups import (
    BINARIES,
    BINARY_DIRECTORIES,
    DRIVER_VERSION,
    FIRMWARE_DIRECTORIES,
    FIRMWARE_PATH,
    GBM_LIBRARY,
    GBM_LINK,
    GROUPS,
    LIBRARY,
    PLATFORM,
    RELEASE,
    Group,
)
from agent.vendors.nvidia.places import PLACES, Place, configured_place, with_prefix

SEARCH_LIMIT = 15.0
"""Seconds to search one place. A busy host needs one second to read the headers of all libraries."""
TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu", "i686": "i386-linux-gnu"}
"""Debian's multiarch names. Every driver root has this layout, whatever the host's is."""
SETS = {"x86_64": ("x86_64", "i686"), "aarch64": ("aarch64",)}
"""Architectures of the libraries in a driver's package, by native architecture: the native one first, then 32-bit."""
MAIN = ("libcuda", "libnvidia-ml")
"""Libraries that every driver has. CUDA's compatibility packages have libcuda, but not libnvidia-ml."""
STUBS = "stubs"
"""Name of the directories with stub libraries for linking, in CUDA's toolkit and the Video Codec SDK."""


def _stem(name: str) -> str:
    match = LIBRARY.fullmatch(name)
    return match["stem"] if match else ""


def _version(name: str) -> str:
    """Return the driver's version in a file's name; empty for a soname, or if the number is not a driver's version."""
    match = LIBRARY.fullmatch(name)
    version = (match and match["version"]) or ""
    return version if DRIVER_VERSION.fullmatch(version) else ""


class _Libraries(Struct):
    """The libraries of one architecture, in all versions, that a loader cache leads to."""

    system: System
    architecture: str
    root_owned: bool
    """Whether files that users other than root control are left out."""
    problems: dict[str, None]
    """Shared by all architectures of a place, so that each problem is named once."""
    files: dict[str, list[str]] = field(default_factory=dict)
    """The real paths of files by name, in the loader's order."""
    links: set[str] = field(default_factory=set)
    """Names under which programs look for libraries: sonames and development links."""
    directories: dict[str, None] = field(default_factory=dict)
    """The real paths of the libraries' directories, in the loader's order."""

    def search(self, cache: tuple[CacheEntry, ...], searched: Set[str]) -> None:
        """Find the libraries that the cache leads to, except in the directories `searched`. Raises OSError."""
        system = self.system
        # libcuda's directory comes first: it has the complete set.
        for entry in sorted(cache, key=lambda each: _stem(each.soname) != "libcuda"):
            if entry.architecture != self.architecture:
                continue
            try:
                real = system.real_path(entry.path)
            except OSError as error:
                if isinstance(classify_error(entry.path, error), Unseen):
                    raise
                why = "points to no file; reinstall the driver's libraries and run ldconfig"
                self.problems[f"{entry.path}: {why}"] = None
                continue
            directory = os.path.dirname(real)
            if not real.isprintable():
                self.problems[f"{real!a}: unexpected characters in a library's path"] = None
            elif directory not in searched and STUBS not in directory.split("/"):
                self.links.add(entry.soname)
                self._add(real)
                self.directories[directory] = None
        for directory in self.directories:
            self._scan(directory)
            # VDPAU's directory is not in the cache.
            vdpau = f"{directory}/vdpau"
            if not system.exists(vdpau):
                continue
            if self.root_owned and (why := untrusted_component(system, vdpau)):
                self.problems[f"{vdpau}: left out, because {why}"] = None
            else:
                self._scan(vdpau)

    def _scan(self, directory: str) -> None:
        for name in entries_if_present(self.system, directory):
            if not name.isprintable() and name.startswith(("libnvidia-", "libcuda")):
                self.problems[f"{directory}: unexpected characters in the library name {name!a}"] = None
            elif not LIBRARY.fullmatch(name):
                continue
            elif self.system.read_link(f"{directory}/{name}") is not None:
                self.links |= set() if _version(name) else {name}
            elif _version(name):
                self._add(f"{directory}/{name}")

    def _add(self, real: str) -> None:
        name = os.path.basename(real)
        if LIBRARY.fullmatch(name) and real not in self.files.get(name, ()) and self.system.is_file(real):
            if fault := file_fault(self.system, real, root_owned=self.root_owned):
                self.problems[f"{real}: left out, because {fault}"] = None
            else:
                self.files.setdefault(name, []).append(real)

    def choose(self, module: str) -> Seen[str]:
        """Return a version that has both main libraries, preferably the module's; Broken or Absent if there is none."""
        installed = {
            stem: [version for name in self.files if _stem(name) == stem and (version := _version(name))]
            for stem in MAIN
        }
        complete = [version for version in installed["libcuda"] if version in installed["libnvidia-ml"]]
        if complete:
            return module if module in complete else complete[0]
        if any(installed.values()):
            found = " and ".join(f"{stem} {', '.join(versions) or '(none)'}" for stem, versions in installed.items())
            return Broken(f"no driver version has both libcuda and libnvidia-ml: found {found}")
        if self.links:
            return Broken(
                "found libraries of NVIDIA's driver, but no usable libcuda or libnvidia-ml; `unbounded-agent doctor` "
                "lists files that were left out"
            )
        return Absent("found no library of NVIDIA's driver")

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

        def rank(path: str) -> tuple[bool, bool]:
            # CUDA's compatibility packages have only libcuda.
            directory = os.path.dirname(path)
            main = (f"{stem}.so.{version}" for stem in MAIN)
            both = all(f"{directory}/{name}" in self.files.get(name, ()) for name in main)
            return not both, version not in by_directory[directory]

        fitting = {name: [path for path in paths if belongs(name, path)] for name, paths in self.files.items()}
        return {name: min(paths, key=rank) for name, paths in fitting.items() if paths}

    def own_directories(self, version: str) -> list[str]:
        """Return the directories of the files that have the version in their names; libcuda's directory comes first."""
        chosen = {name: path for name, path in self.for_version(version).items() if _version(name)}
        ordered = sorted(chosen, key=lambda name: (_stem(name) != MAIN[0], name))
        return list(dict.fromkeys(os.path.dirname(chosen[name]) for name in ordered))

    def in_driver_root(self, version: str) -> list[Library]:
        """Return, for a driver root, the files that belong to the version, and the links to these files."""

        def target(name: str) -> str:
            # libvdpau looks for its drivers in their own directory, wherever the host keeps the real file.
            directory = "vdpau/" if name.startswith("libvdpau_") else ""
            return f"usr/lib/{TRIPLETS[self.architecture]}/{directory}{name}"

        chosen = self.for_version(version)
        found = {target(name): _copied(self.system, target(name), real) for name, real in sorted(chosen.items())}
        # Links are matched by stem: on a host with two versions, a link may lead to the other version's file.
        by_stem = {_stem(name): name for name in sorted(chosen)}
        links = {target(link): by_stem.get(_stem(link)) for link in sorted(self.links) if not _version(link)}
        if backend := by_stem.get(GBM_LIBRARY):
            links[target(GBM_LINK)] = f"../{backend}"
        for link, file in links.items():
            if file:
                found.setdefault(link, Library(link, "", file, 0, 0, executable=False, text=""))
        return list(found.values())


def _copied(system: System, target: str, real: str) -> Library:
    """Return the entry of a driver root for a file of the host. `real` is the file's real path."""
    identity = system.identity(real)
    return Library(target, real, "", identity.size, identity.mtime_ns, executable=identity.executable, text="")


# Directories that are in no loader cache: the architecture is in the libraries' ELF headers (elf(5)).

HEADER = struct.Struct("<4sBB10xHH")
"""An ELF file begins with magic, class (1: 32 bits, 2: 64), byte order (1: little-endian), type and machine (elf.h)."""
LITTLE_ENDIAN = 1
ARCHITECTURES = {(1, 3): "i686", (2, 62): "x86_64", (2, 183): "aarch64"}
"""Architectures by class and machine: EM_386, EM_X86_64 (of class 2; class 1 is x32), EM_AARCH64."""


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


# The places, and the choice between them.


class _Candidate(Struct, frozen=True):
    """The content of one place."""

    place: Place
    version: Seen[str]
    system: System
    """The file system with the place's root as its root."""
    root: str = ""
    """The real path of the place's root on the host; empty for the host's root."""
    found: tuple[_Libraries, ...] = ()
    """The driver's libraries, one entry for each architecture, the native one first."""
    problems: tuple[str, ...] = ()
    skipped_directories: tuple[str, ...] = ()
    """Directories of the place that were not searched, with the reason, in words."""


def observe_user_space(sources: Sources, module: str) -> UserSpace:
    """Return the driver's files, preferably those of `module`, the loaded module's version (empty if unknown)."""
    if sources.architecture not in SETS:
        none = Absent(f"NVIDIA has no driver for {sources.architecture}")
        return UserSpace(none, none)
    configured = configured_place(sources.driver)
    candidates: list[_Candidate] = []
    searched: set[str] = set()
    for place in (configured,) if configured else PLACES:
        candidate = _search(sources, place, module, searched)
        candidates.append(candidate)
        if not candidate.root and isinstance(candidate.version, str):
            searched.update(directory for each in candidate.found for directory in each.directories)
    # The first place with a driver of the module's version, or of any if that is unknown. An earlier place that could
    # not be observed may be the right one. Then come drivers of other versions and broken ones.
    right = [
        each
        for each in candidates
        if isinstance(each.version, Unseen)
        or (isinstance(each.version, str) and each.version == (module or each.version))
    ]
    usable = [each for each in candidates if not isinstance(each.version, Absent)]
    chosen = next(iter((*right, *usable, *candidates)))
    user_space = replace(_assemble(sources, chosen), place_name=chosen.place.name)
    if configured:
        return replace(user_space, place_key=configured.name)
    drivers = [each for each in candidates if isinstance(each.version, str)]
    others = [each for each in candidates if not isinstance(each.version, str)]
    return replace(
        user_space,
        refused_places=tuple(each.place.name for each in others if each.skipped_directories),
        other_places=tuple(f"driver {each.version} in {each.place}" for each in drivers if each is not chosen),
        skipped_directories=tuple(skipped for each in candidates for skipped in each.skipped_directories),
    )


def _search(sources: Sources, place: Place, module: str, searched: Set[str]) -> _Candidate:
    """Return the content of a place. `searched` has directories of the host's root that are not searched again."""

    def search() -> _Candidate:
        return _search_now(sources, place, module, searched)

    try:
        # Without a time limit for the loader cache: these are the libraries that the host's own programs load. /home
        # and /opt may be network file systems.
        return search() if place.in_loader_cache else call_device(f"the driver's place {place}", search, SEARCH_LIMIT)
    except OSError as error:
        return _Candidate(place, Unseen(classify_error(error.filename or str(place), error).why), sources.system)


def _search_now(sources: Sources, place: Place, module: str, searched: Set[str]) -> _Candidate:
    system, root = sources.system, ""
    # The host's loader cache and configured places are trusted.
    checked = not (place.configured or place.in_loader_cache)
    trust = PathTrust(system, checked=checked)
    if place.root != "/":
        try:
            if not trust.permits(place.root):
                none = Absent(f"users other than root can change {place.root}")
                return _Candidate(place, none, system, skipped_directories=_skipped(place, trust))
            system, root = system.below(place.root), system.real_path(place.root).rstrip("/")
        except OSError as error:
            return _Candidate(place, classify_error(place.root, error), sources.system)
        trust = PathTrust(system, checked=checked)
        # In this place's root, the same paths lead to other directories.
        searched = frozenset()
    entries = _entries(sources, place, system, trust)
    if not isinstance(entries, tuple):
        return _Candidate(place, entries, system, root)
    problems: dict[str, None] = {}
    architectures = SETS[sources.architecture]
    found = tuple(_Libraries(system, each, not place.configured, problems) for each in architectures)
    for each in found:
        each.search(entries, searched)
    said, skipped = tuple(_within(root, problems)), _skipped(place, trust, root)
    return _Candidate(place, found[0].choose(module), system, root, found, said, skipped)


def _within(root: str, problems: Iterable[str]) -> Iterator[str]:
    return (f"{root}: {each}" if root else each for each in problems)


def _skipped(place: Place, trust: PathTrust, root: str = "") -> tuple[str, ...]:
    where = f"{root}: " if root else ""
    return tuple(
        f"{where}{', '.join(each)} ({place.name}), because {where}{why}" for why, each in trust.refused.items()
    )


def _entries(sources: Sources, place: Place, system: System, trust: PathTrust) -> Seen[tuple[CacheEntry, ...]]:
    """Return the driver's libraries in a place as a loader cache lists them. Raises OSError.

    Only those whose paths `trust` permits: only root may decide what pods load. Directories that it refuses are not
    even read, because their owner could put a million names into them.
    """
    listed: Iterable[CacheEntry]
    if place.libraries:
        listed = (
            CacheEntry(name, "", f"{directory}/{name}")
            for directory in dict.fromkeys(place.libraries)
            if trust.permits(directory)
            for name in entries_if_present(system, directory)
        )
    else:
        cache = sources.loader_cache(place.root)
        if not isinstance(cache, tuple):
            return cache
        listed = cache
    # Libraries only for newer processors (glibc-hwcaps) are left out: a driver root has one directory for all
    # processors.
    drivers = (each for each in listed if LIBRARY.fullmatch(each.soname) and "/glibc-hwcaps/" not in each.path)
    permitted = (each for each in drivers if trust.permits(posixpath.dirname(each.path), each.path))
    if not place.libraries:
        return tuple(permitted)
    native = sources.architecture
    return tuple(replace(each, architecture=_architecture(system, each.path, native)) for each in permitted)


def _assemble(sources: Sources, candidate: _Candidate) -> UserSpace:
    place, system, root, version = candidate.place, candidate.system, candidate.root, candidate.version
    if not isinstance(version, str):
        return UserSpace(version, version, candidate.problems, place=str(place))
    companions = _Companions(system, version, TRIPLETS[sources.architecture], place)
    # The directories of programs and data are checked even if the libraries were found by the loader cache.
    trust = PathTrust(system, checked=not place.configured)
    try:
        libraries = [file for each in candidate.found for file in each.in_driver_root(version)]
        directories = candidate.found[0].own_directories(version)
        if not place.libraries:
            place = with_prefix(place, directories[0])
        binaries = (*filter(trust.permits, place.binaries), *BINARY_DIRECTORIES)
        companions.on_host = {
            "libraries": tuple(directories),
            "firmware": _firmware_directories(sources.system, place, root),
            DATA: tuple(filter(trust.permits, place.data)),
        }
        companions.search(binaries)
        companions.rewrite_paths(libraries)
    except OSError as error:
        unseen = Unseen(classify_error(error.filename or "the driver's files", error).why)
        return UserSpace(unseen, unseen, candidate.problems, place=str(place))
    skipped = (*candidate.skipped_directories, *_skipped(place, trust, root))
    problems = (
        *candidate.problems,
        *_within(root, companions.problems),
        *(f"not searched: {each}" for each in skipped),
    )
    all_files = (*libraries, *companions.files.values())
    on_host = tuple(replace(each, source=f"{root}{each.source}") if each.source else each for each in all_files)
    return UserSpace(
        version, on_host, problems, tuple(companions.not_installed), tuple(companions.other_version), str(place)
    )


def _firmware_directories(system: System, place: Place, root: str) -> tuple[str, ...]:
    """Return where the kernel looks for firmware, as paths below the place's root. `root` is this root's real path."""

    def line(path: str) -> str:
        try:
            return system.read_text(path).strip()
        except FileNotFoundError:
            return ""

    release, first = line(RELEASE), line(FIRMWARE_PATH)
    standard = (each.format(release=release) for each in FIRMWARE_DIRECTORIES if release or "{release}" not in each)
    # A driver container makes the kernel search a directory of the container (nvidia-driver:
    # /run/nvidia/driver/lib/firmware).
    roots = (root, place.root.rstrip("/"))
    own = dict.fromkeys(first.removeprefix(each) for each in roots if first.startswith(f"{each}/"))
    return (*own, *standard)


# The driver's files that are not libraries, by the names in `file_groups`.

VERSION = "{version}"
DATA = "data"
SCRIPT = b"#!"
"""How an executable script begins (execve(2))."""
STANDARD_DATA = ("/etc/", "/usr/local/share/", "/usr/share/")
"""Where loaders look for data. A place's own data directories have the same subdirectories."""

KEY = "library_path"
"""The key with the library in manifests of Vulkan (LoaderDriverInterface.md), and of libglvnd's and NVIDIA's EGL."""
MANIFESTS = ("/icd.d/", "/implicit_layer.d/", "/explicit_layer.d/", "/egl_vendor.d/", "/egl_external_platform.d/")
VENDORS = "/OpenCL/vendors/"
"""Directory of OpenCL's files, which contain only the library's path (cl_khr_icd)."""
SIZE_LIMIT = 1 << 16


class _Companions(Struct):
    """Files of one version of the driver that are not libraries, in one place. `system` has the place's root."""

    system: System
    version: str
    triplet: str
    place: Place
    on_host: Mapping[str, tuple[str, ...]] = {}
    """The directories that replace `{libraries}` (libcuda's first) and `{firmware}`, and under DATA the place's own."""
    files: dict[str, Library] = field(default_factory=dict)
    not_installed: list[str] = field(default_factory=list)
    """What every recent driver has, but this host does not have: names of groups of files, and nvidia-smi."""
    other_version: list[str] = field(default_factory=list)
    """For groups that have no file of this version: the paths of their files of other versions."""
    problems: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def search(self, binaries: Sequence[str]) -> None:
        """Find the files, and the programs in the directories `binaries`. Raises OSError if an observation failed."""
        groups: set[str] = set()
        for group in GROUPS:
            if group.needs and group.needs not in groups:
                continue
            target = group.target.format(version=self.version, triplet=self.triplet)
            found: set[str] = set()
            for path in self._matching(group, self.version):
                name = posixpath.basename(path)
                if name not in found and self.system.is_file(path) and self._permits(path):
                    found.add(name)
                    copy = _copied(self.system, f"{target}/{name}", self.system.real_path(path))
                    self.files.setdefault(copy.target, copy)
            if found:
                groups.add(group.name)
                continue
            others = dict.fromkeys(self._matching(group, ""))
            # These also have the refused files of this version. Those are not files of another version.
            self.other_version += [path for path in others if path not in self.refused]
            if group.in_every_driver and not others:
                self.not_installed.append(group.name)
        self._find_programs(binaries)

    def _permits(self, path: str) -> bool:
        """Return whether a file may be in a driver root, which all users in machines may read."""
        system, root_owned = self.system, not self.place.configured
        why = (root_owned and untrusted_component(system, path)) or file_fault(
            system, system.real_path(path), root_owned=root_owned
        )
        if why and path not in self.refused:
            self.refused.add(path)
            self.problems.append(f"{path}: left out, because {why}")
        return not why

    def _matching(self, group: Group, version: str) -> Iterator[str]:
        """Yield the paths of the group's files of a version, in the order of the search.

        For an empty version, yield the files that have any version in their own name or in their directory's.
        """
        patterns = [pattern.replace(VERSION, version or "[0-9]*") for pattern in group.names]
        versioned = any(VERSION in pattern for pattern in group.names)
        for directory in self._directories(group):
            parent, separator, _ = directory.partition(f"/{VERSION}")
            if version:
                places = [directory.replace(VERSION, version)]
            elif separator:
                places = [f"{parent}/{name}" for name in self._names(parent) if name[:1].isdecimal()]
            else:
                places = [directory] if versioned else []
            for place in places:
                for name in self._names(place):
                    if any(fnmatchcase(name, pattern) for pattern in patterns):
                        yield f"{place}/{name}"

    def _directories(self, group: Group) -> Iterator[str]:
        """Yield where the group's files may be on this host. The place's own data directories come first."""
        relative = [
            each.removeprefix(base) for each in group.directories for base in STANDARD_DATA if each.startswith(base)
        ]
        yield from (f"{base}/{each}" for base in self.on_host[DATA] for each in dict.fromkeys(relative))
        for directory in group.directories:
            key, brace, rest = directory.removeprefix("{").partition("}")
            if brace and key in self.on_host:
                yield from (f"{each}{rest}" for each in self.on_host[key])
            else:
                yield directory

    def _names(self, directory: str) -> tuple[str, ...]:
        """Return the printable names in a directory; none if it is missing or unusable."""
        try:
            return tuple(name for name in self.system.entries(directory) if name.isprintable())
        except OSError as error:
            if error.errno in NOT_FOUND | UNUSABLE:
                return ()
            raise

    def _find_programs(self, directories: Sequence[str]) -> None:
        """Add, for each name in BINARIES, the first permitted program; if a name has none, name its scripts.

        NVIDIA's programs are ELF files. A script with such a name is not from NVIDIA, and runs a program that is
        elsewhere. The names contain no version, so files of several versions cannot be told apart.
        """
        system, all_scripts = self.system, dict[str, None]()
        for name in BINARIES:
            # Scripts are collected by real path, so that each is listed once: /bin is usually a link to /usr/bin.
            scripts: dict[str, None] = {}
            for path in (f"{directory}/{name}" for directory in directories):
                if not (system.is_file(path) and system.identity(path).executable and self._permits(path)):
                    continue
                real = system.real_path(path)
                if system.head(path, len(SCRIPT)) != SCRIPT:
                    self.files[f"usr/bin/{name}"] = _copied(system, f"usr/bin/{name}", real)
                    break
                scripts[real] = None
            else:
                all_scripts |= scripts
        self.problems += [f"{path}: left out, because it is a script, and not NVIDIA's program" for path in all_scripts]
        if f"usr/bin/{BINARIES[0]}" not in self.files:
            self.not_installed.append(BINARIES[0])

    # Library paths in the files that loaders of Vulkan, EGL and OpenCL read: the host's paths are wrong in pods.
    # NVIDIA's files name libraries without directories. RPM packages put /usr/lib64 before the names (negativo17,
    # nvidia-driver.spec; RPM Fusion), and NixOS puts a directory in /nix/store before them. Each such path becomes the
    # library's path in pods. It does not become a bare name, because a 64-bit program also reads the manifest of the
    # 32-bit libraries. If that manifest had a bare name, the program would find the 64-bit library under this name, and
    # would load the driver twice.

    def rewrite_paths(self, libraries: Sequence[Library]) -> None:
        """Give the files in which paths have to change their new text. Raises OSError if an observation failed."""
        by_source = {each.source: each.target for each in libraries if each.source}
        targets = {each.target for each in libraries}
        for target, file in self.files.items():

            def pod_path(value: str, file: Library = file) -> str:
                """Return a library's path in pods; a bare name, or the path of another library, as it is.

                The path ends in the name that the manifest uses, if the driver root has a file or link of that name;
                otherwise it ends in the real file's name.
                """
                path = posixpath.join(posixpath.dirname(file.source), value)
                if "/" not in value:
                    return value
                try:
                    # JSON can contain a null character or half a surrogate pair. System calls raise ValueError.
                    library = by_source.get(self.system.real_path(path), "") if path.isprintable() else ""
                except OSError as error:
                    if error.errno not in NOT_FOUND | UNUSABLE:
                        raise
                    library = ""
                if not library:
                    self.problems.append(f"{file.source}: names {value!a}, which is not a library of this driver")
                    return value
                named = posixpath.join(posixpath.dirname(library), posixpath.basename(path))
                return f"/{named if named in targets else library}"

            self.files[target] = replace(file, text=self._rewritten(file, pod_path))

    def _rewritten(self, file: Library, pod_path: Callable[[str], str]) -> str:
        """Return the new text of a loader's file; empty for any other, and one without a path that has to change."""
        manifest = file.target.endswith(".json") and any(each in f"/{file.target}" for each in MANIFESTS)
        if not manifest and VENDORS not in f"/{file.target}":
            return ""

        def with_pod_paths(part: dict[str, Any]) -> dict[str, Any]:
            return part | {KEY: pod_path(part[KEY])} if isinstance(part.get(KEY), str) else part

        try:
            with self.system.open_public(file.source) as reading:
                content = reading.read(SIZE_LIMIT + 1)
            if len(content) > SIZE_LIMIT:
                return ""
            text = content.decode()
            if not manifest:
                name = text.strip()
                return f"{new}\n" if (new := pod_path(name)) != name else ""
            document, changed = parse_json(text), json.loads(text, object_hook=with_pod_paths)
            return json.dumps(changed, indent=4) + "\n" if changed != document else ""
        except OSError as error:
            if error.errno in NOT_FOUND | UNUSABLE:
                return ""
            raise
        except ValueError:
            return ""


# Finds the CUDA version that the driver's libcuda supports. Images for a newer major version of CUDA do not run.

TIME_LIMIT = 15.0
"""Seconds to load libcuda and read its version."""
READ_VERSION = """\
import ctypes, os, sys
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
number = ctypes.c_int()
error = ctypes.CDLL(sys.argv[1]).cuDriverGetVersion(ctypes.byref(number))
sys.exit(f"cuDriverGetVersion: error {error}") if error else print(number.value)
"""
"""The program that reads the version. It runs as the user nobody, because it needs no root rights."""


def driver_for_pods(facts: VendorFacts, system: System) -> DriverForPods | None:
    """Return the driver that pods get; None if no driver is installed, or if the driver could not be observed.

    The driver's version is the loaded module's or, if that is unknown, the version of the host's libraries. The CUDA
    version is read from the host's libcuda, if libcuda has the driver's version.
    """
    driver = facts.driver
    if driver is None or not isinstance(driver.user_space.version, str):
        return None
    version = driver.module_version if isinstance(driver.module_version, str) else driver.user_space.version
    # Never load the copy in a driver root: root in a machine may have changed it, and loading a library runs its code.
    files = driver.user_space.files if isinstance(driver.user_space.files, tuple) else ()
    # Of the host's own architecture, and not a link.
    real = [file for file in files if not file.link and "i386" not in file.target]
    library = next((file.source for file in real if posixpath.basename(file.target) == f"libcuda.so.{version}"), "")
    if not library:
        return DriverForPods(facts.vendor, version, unknown=f"this host has no libcuda {version}: see LibrariesPresent")
    try:
        if why := untrusted_component(system, library) or file_fault(system, library, root_owned=True):
            return DriverForPods(facts.vendor, version, unknown=f"{library} was not loaded: {why}")
        answer = system.run(sys.executable, "-I", "-c", READ_VERSION, library, timeout=TIME_LIMIT)
        return DriverForPods(facts.vendor, version, {"CUDA": cuda_version(library, answer.strip())})
    except OSError as error:
        return DriverForPods(facts.vendor, version, unknown=classify_error(library, error).why)
    except AgentError as error:
        return DriverForPods(facts.vendor, version, unknown=str(error))


def cuda_version(library: str, answer: str) -> str:
    """Return the version in the answer of cuDriverGetVersion, such as 12.4. Raises DocumentError."""
    number = whole_number(answer)
    if number is None:
        raise DocumentError(f"{library}: cuDriverGetVersion returned {answer[:40]!r}")
    # CUDA_VERSION of cuda.h: 1000 * major + 10 * minor.
    return f"{number // 1000}.{number % 1000 // 10}"
