"""The driver's libraries: which belong into a driver root, and where in it.

The loader's cache says which libraries there are; their real files may lie elsewhere (Debian: behind absolute
links of the alternatives system) and beside others that the cache does not list. One driver version only.
"""

import os.path
from collections.abc import Set
from dataclasses import dataclass, field

from agent.facts import Absent, Broken, CacheEntry, Library, Seen, Unseen
from agent.system.files import System
from agent.system.looking import why_not
from agent.system.owners import files_fault, others_way
from agent.vendors.nvidia.companions import library
from agent.vendors.nvidia.driver_files import DRIVER_VERSION, GBM_LIBRARY, GBM_LINK, LIBRARY

TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu", "i686": "i386-linux-gnu"}
"""Debian's multiarch names; the layout of a driver root is the same whatever the host's is."""
SETS = {"x86_64": ("x86_64", "i686"), "aarch64": ("aarch64",)}
"""The native architecture, then the 32-bit set that its driver package may bring."""

MAIN = ("libcuda", "libnvidia-ml")
"""Without them there is no driver. CUDA's compatibility packages have libcuda, of another version, and no NVML."""


@dataclass(slots=True)
class Found:
    """What one architecture's part of the loader's cache leads to."""

    architecture: str
    files: dict[str, list[str]] = field(default_factory=dict)
    """Real paths by name, in the loader's order."""
    links: set[str] = field(default_factory=set)
    """Names by which libraries are looked for: sonames and development links."""
    directories: dict[str, None] = field(default_factory=dict)
    """Real ones, in the loader's order."""
    of_root: bool = True
    """Files that are others' to write are left out."""

    def versions(self, stem: str) -> list[str]:
        """Driver versions of one library, in the loader's order."""
        return [_version(name) for name in self.files if _stem(name) == stem and _version(name)]

    def of_version(self, version: str) -> dict[str, str]:
        """One real path by name: files of that version, and those with a numbering of their own that go with it."""
        versions: dict[str, set[str]] = {}
        for name, paths in self.files.items():
            for path in paths:
                versions.setdefault(os.path.dirname(path), set()).add(_version(name))

        def distance(path: str) -> int:
            """Where both main libraries are comes first: CUDA's compatibility directory may have the same version."""
            directory = os.path.dirname(path)
            both = all(
                f"{directory}/{stem}.so.{version}" in self.files.get(f"{stem}.so.{version}", ()) for stem in MAIN
            )
            return 0 if both else 1 if version in versions[directory] else 2

        chosen = {}
        for name, paths in self.files.items():
            # What lies beside other versions only, and has no version in its name, belongs to one of them.
            fitting = [path for path in paths if version in (its := versions[os.path.dirname(path)]) or its == {""}]
            if _version(name) in ("", version) and fitting:
                chosen[name] = min(fitting, key=distance)
        return chosen


def own_directories(found: Found, version: str) -> list[str]:
    """Those of the version's own files, libcuda's first."""
    chosen = {name: path for name, path in found.of_version(version).items() if _version(name)}
    ordered = sorted(chosen, key=lambda name: (_stem(name) != MAIN[0], name))
    return list(dict.fromkeys(os.path.dirname(chosen[name]) for name in ordered))


def choose(found: Found, module: str) -> Seen[str]:
    """A version that has both main libraries; that of the module if there are several."""
    installed = {stem: found.versions(stem) for stem in MAIN}
    complete = [version for version in installed["libcuda"] if version in installed["libnvidia-ml"]]
    if complete:
        return module if module in complete else complete[0]
    if any(installed.values()):
        there = " and ".join(f"{stem} {', '.join(versions) or 'in no version'}" for stem, versions in installed.items())
        return Broken(f"no version of the driver has both libraries that it needs: there is {there}")
    if found.links:
        return Broken("there are libraries of NVIDIA's, but libcuda and libnvidia-ml are not among them")
    return Absent("there is no library of NVIDIA's driver")


def search(
    system: System, cache: tuple[CacheEntry, ...], found: Found, problems: list[str], known: Set[str] = frozenset()
) -> Found:
    """Fills `found`, not from directories that are `known`. Raises OSError where looking failed."""
    # libcuda's directory first: it has the complete set.
    entries = sorted(
        (each for each in cache if each.architecture == found.architecture and lists_driver_library(each)),
        key=lambda each: _stem(each.soname) != "libcuda",
    )
    for entry in entries:
        try:
            real = system.real_path(entry.path)
        except OSError as error:
            if isinstance(why_not(entry.path, error), Unseen):
                raise
            problems.append(f"{entry.path}: leads to no file; reinstall the driver's libraries and run ldconfig")
            continue
        if not real.isprintable():
            problems.append(f"{real!a}: the path has characters that no library's path has")
            continue
        directory = os.path.dirname(real)
        if directory in known:
            continue
        found.links.add(entry.soname)
        _add(system, found, real, problems)
        found.directories[directory] = None
    for directory in found.directories:
        _scan(system, found, directory, problems)
        _scan_vdpau(system, found, f"{directory}/vdpau", problems)
    return found


def lists_driver_library(entry: CacheEntry) -> bool:
    """Whether a loader's cache has it for a library of the driver."""
    # A library for newer processors only would be taken for all of them in the driver root.
    return bool(LIBRARY.fullmatch(entry.soname)) and "/glibc-hwcaps/" not in entry.path


def _scan(system: System, found: Found, directory: str, problems: list[str]) -> None:
    """Add what lies beside the libraries that the cache lists."""
    try:
        names = system.entries(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if not name.isprintable() and name.startswith(("libnvidia-", "libcuda")):
            problems.append(f"{directory}: the name {name!a} has characters that no library's name has")
        elif not LIBRARY.fullmatch(name):
            continue
        elif system.read_link(f"{directory}/{name}") is None:
            if _version(name):
                _add(system, found, f"{directory}/{name}", problems)
        elif not _version(name):
            found.links.add(name)


def _scan_vdpau(system: System, found: Found, directory: str, problems: list[str]) -> None:
    """The same for one that nothing led to."""
    if not system.exists(directory):
        return
    if found.of_root and (why := others_way(system, directory)):
        _tell(problems, f"{directory}: left out, as {why}")
        return
    _scan(system, found, directory, problems)


def _tell(problems: list[str], problem: str) -> None:
    """Once for all architectures."""
    if problem not in problems:
        problems.append(problem)


def _add(system: System, found: Found, real: str, problems: list[str]) -> None:
    name = os.path.basename(real)
    if not LIBRARY.fullmatch(name) or real in found.files.get(name, ()) or not system.is_file(real):
        return
    if fault := files_fault(system, real, of_root=found.of_root):
        _tell(problems, f"{real}: left out, as {fault}")
        return
    found.files.setdefault(name, []).append(real)


def libraries(system: System, found: Found, version: str) -> list[Library]:
    """Files of the version, and files that have a numbering of their own, with the links that name them."""
    by_target: dict[str, Library] = {}
    chosen = found.of_version(version)
    for name, real in sorted(chosen.items()):
        target = _target(found.architecture, name)
        by_target[target] = library(system, target, real)
    # By stem: with two versions side by side the links on the host lead to the other one.
    by_stem = {_stem(name): name for name in sorted(chosen)}
    for link in sorted(found.links):
        named = by_stem.get(_stem(link))
        if named and not _version(link):
            target = _target(found.architecture, link)
            by_target.setdefault(target, Library(target, "", link=named))
    if backend := by_stem.get(GBM_LIBRARY):
        target = _target(found.architecture, GBM_LINK)
        by_target[target] = Library(target, "", link=f"../{backend}")
    return list(by_target.values())


def _target(architecture: str, name: str) -> str:
    # libvdpau looks for its drivers in a directory of their own, wherever the host keeps the real file.
    directory = "vdpau/" if name.startswith("libvdpau_") else ""
    return f"usr/lib/{TRIPLETS[architecture]}/{directory}{name}"


def _stem(name: str) -> str:
    match = LIBRARY.fullmatch(name)
    return match["stem"] if match else ""


def _version(name: str) -> str:
    """The driver version in a file's name; empty for a soname, or a numbering of its own."""
    match = LIBRARY.fullmatch(name)
    version = (match and match["version"]) or ""
    return version if DRIVER_VERSION.fullmatch(version) else ""
