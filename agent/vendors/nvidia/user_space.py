"""Observes the driver's user space: finds the place where this host keeps it, and its files in that place."""

import posixpath
import sys
from collections.abc import Sequence, Set

from msgspec import Struct
from msgspec.structs import replace

from agent.model.errors import AgentError, DocumentError
from agent.model.facts import Absent, CacheEntry, Library, Seen, Unseen, UserSpace, VendorFacts
from agent.model.paths import LOADER_CACHE
from agent.model.text import whole_number
from agent.system.deadlines import call_device
from agent.system.files import System
from agent.system.trust import PathTrust, classify_error, file_fault, read_seen, untrusted_component
from agent.vendors.host_vendor import DriverForPods, Sources
from agent.vendors.nvidia import libraries
from agent.vendors.nvidia.companion_files import (
    firmware_directories,
    kernel_firmware,
    observe_companions,
    with_pod_paths,
)
from agent.vendors.nvidia.libraries import SETS, TRIPLETS, FoundLibraries, list_libraries
from agent.vendors.nvidia.places import PLACES, Place, configured_place, with_prefix

SEARCH_LIMIT = 15.0
"""Seconds to search one place. A busy host needs one second to read the headers of all libraries."""


class _Candidate(Struct, frozen=True):
    """The content of one place."""

    place: Place
    version: Seen[str]
    system: System
    """The file system with the place's root as its root."""
    root: str = ""
    """The real path of the place's root on the host; empty for the host's root."""
    found: tuple[FoundLibraries, ...] = ()
    """The driver's libraries, one entry for each architecture, the native one first."""
    problems: tuple[str, ...] = ()
    skipped_directories: tuple[str, ...] = ()
    """Directories of the place that were not searched, with the reason, in words."""

    @property
    def directories(self) -> frozenset[str]:
        """The directories of the driver that was found in the host's root; none if no driver was found there.

        The searches of other places leave these directories out.
        """
        if self.root or not isinstance(self.version, str):
            return frozenset()
        return frozenset(directory for each in self.found for directory in each.directories)


def observe_user_space(sources: Sources, module: str) -> UserSpace:
    """Return the driver's files, preferably those of `module`, the loaded module's version (empty if unknown)."""
    if sources.architecture not in SETS:
        none = Absent(f"NVIDIA has no driver for {sources.architecture}")
        return UserSpace(none, none)
    try:
        kernel = kernel_firmware(sources.system)
    except OSError as error:
        unseen = Unseen(classify_error(error.filename or "the kernel's settings for firmware", error).why)
        return UserSpace(unseen, unseen)
    return _search_places(sources, module, kernel)


def _search_places(sources: Sources, module: str, kernel: tuple[str, str]) -> UserSpace:
    configured = configured_place(sources.driver)
    candidates: list[_Candidate] = []
    for place in (configured,) if configured else PLACES:
        searched = frozenset[str]().union(*(each.directories for each in candidates))
        candidates.append(_search_in_time(sources, place, module, searched))
    chosen = _choose(candidates, module)
    user_space = replace(_assemble(sources, chosen, kernel), place_name=chosen.place.name)
    if configured:
        return replace(user_space, place_key=configured.name)
    others = [each for each in candidates if each is not chosen]
    return replace(
        user_space,
        refused_places=tuple(
            each.place.name for each in candidates if each.skipped_directories and not isinstance(each.version, str)
        ),
        other_places=tuple(
            f"driver {each.version} in {each.place}" for each in others if isinstance(each.version, str)
        ),
        skipped_directories=tuple(skipped for each in candidates for skipped in each.skipped_directories),
    )


def _choose(candidates: Sequence[_Candidate], module: str) -> _Candidate:
    """Return the first place with a driver of the module's version, or of any version if `module` is empty.

    If an earlier place could not be observed, return the unobserved place, because it may be the right one. If there is
    neither such a driver nor an unobserved place, return the first place that has a driver of another version or a
    broken driver. If all places are empty, return the first place.
    """
    with_content = []
    for each in candidates:
        if isinstance(each.version, Unseen):
            return each
        if isinstance(each.version, str) and each.version == (module or each.version):
            return each
        if not isinstance(each.version, Absent):
            with_content.append(each)
    return with_content[0] if with_content else candidates[0]


def _search_in_time(sources: Sources, place: Place, module: str, searched: Set[str] = frozenset()) -> _Candidate:
    """Return the content of a place. `searched` has directories of the host's root that are not searched again."""
    if place.in_loader_cache:
        # Without a time limit: these are the libraries that the host's own programs load.
        return _search(sources, place, module, searched)
    try:
        # /home and /opt may be network file systems.
        return call_device(
            f"the driver's place {place}", lambda: _search(sources, place, module, searched), SEARCH_LIMIT
        )
    except OSError as error:
        return _Candidate(place, Unseen(classify_error(str(place), error).why), sources.system)


def _search(sources: Sources, place: Place, module: str, searched: Set[str]) -> _Candidate:
    system, root = sources.system, ""
    trust = PathTrust(system, checked=_owners_checked(place))
    if place.root != "/":
        try:
            if not trust.permits(place.root):
                none = Absent(f"users other than root can change {place.root}")
                return _Candidate(place, none, system, skipped_directories=_skipped_directories(place, trust))
            system, root = system.below(place.root), system.real_path(place.root).rstrip("/")
        except OSError as error:
            return _Candidate(place, classify_error(place.root, error), sources.system)
        trust = PathTrust(system, checked=_owners_checked(place))
    problems: list[str] = []
    try:
        entries = _entries(sources, place, system, trust)
        if not isinstance(entries, tuple):
            return _Candidate(place, entries, system, root)
        architectures = SETS[sources.architecture]
        if root:
            # The directories in `searched` are in the host's root. In this place's root, the same paths lead to other
            # directories.
            searched = frozenset()
        found = tuple(
            libraries.search(system, entries, FoundLibraries(each, root_owned=not place.configured), problems, searched)
            for each in architectures
        )
    except OSError as error:
        unseen = Unseen(classify_error(error.filename or str(place), error).why)
        return _Candidate(place, unseen, system, root)
    problem_sentences = tuple(f"{root}: {each}" if root else each for each in problems)
    version = libraries.choose(found[0], module)
    return _Candidate(place, version, system, root, found, problem_sentences, _skipped_directories(place, trust, root))


def _owners_checked(place: Place) -> bool:
    """Return whether the owners of files in a place are checked. The loader cache and configured places are trusted."""
    return not (place.configured or place.in_loader_cache)


def _skipped_directories(place: Place, trust: PathTrust, root: str = "") -> tuple[str, ...]:
    where = f"{root}: " if root else ""
    return tuple(
        f"{where}{', '.join(each)} ({place.name}), because {where}{why}" for why, each in trust.refused.items()
    )


def _entries(sources: Sources, place: Place, system: System, trust: PathTrust) -> Seen[tuple[CacheEntry, ...]]:
    """Return a place's libraries whose paths `trust` permits: only root may decide what pods load. Raises OSError."""
    if place.libraries:
        return list_libraries(system, place.libraries, sources.architecture, trust)
    # The result is not used. This read only makes `system` note that the observation depends on the loader cache: the
    # listing below does not access the cache through `system`.
    read_seen(system.identity, LOADER_CACHE)
    listed = sources.loader_cache(place.root)
    if not isinstance(listed, tuple):
        return listed
    drivers = (each for each in listed if libraries.lists_driver_library(each))
    return tuple(each for each in drivers if trust.permits(posixpath.dirname(each.path), each.path))


def _assemble(sources: Sources, candidate: _Candidate, kernel: tuple[str, str]) -> UserSpace:
    """Return all files of the candidate's version, or why there are none."""
    place, system, root, version = candidate.place, candidate.system, candidate.root, candidate.version
    if not isinstance(version, str):
        return UserSpace(version, version, candidate.problems, place=str(place))
    try:
        files = [file for each in candidate.found for file in libraries.libraries(system, each, version)]
        directories = libraries.own_directories(candidate.found[0], version)
        if not place.libraries:
            place = with_prefix(place, directories[0])
        triplet = TRIPLETS[sources.architecture]
        # The directories of programs and data are checked even if the libraries were found by the loader cache.
        trust = PathTrust(system, checked=not place.configured)
        trusted = replace(
            place,
            binaries=tuple(filter(trust.permits, place.binaries)),
            data=tuple(filter(trust.permits, place.data)),
        )
        companion_files = observe_companions(
            system, version, triplet, directories, trusted, firmware_directories(*kernel, place, root)
        )
        companions, path_problems = with_pod_paths(system, companion_files.files, files)
    except OSError as error:
        unseen = Unseen(classify_error(error.filename or "the driver's files", error).why)
        return UserSpace(unseen, unseen, candidate.problems, place=str(place))
    file_problems = (*companion_files.problems, *path_problems)
    problems = (
        *candidate.problems,
        *(f"{root}: {each}" if root else each for each in file_problems),
        *(
            f"not searched: {each}"
            for each in (*candidate.skipped_directories, *_skipped_directories(place, trust, root))
        ),
    )
    all_files = (*files, *companions)
    on_host = tuple(replace(each, source=f"{root}{each.source}") if each.source else each for each in all_files)
    return UserSpace(
        version, on_host, problems, companion_files.not_installed, companion_files.other_version, str(place)
    )


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
    library = next((file.source for file in files if _is_libcuda(file, version)), "")
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


def _is_libcuda(file: Library, version: str) -> bool:
    """Return whether the file is libcuda of this version and of the host's own architecture, and not a link."""
    return not file.link and posixpath.basename(file.target) == f"libcuda.so.{version}" and "i386" not in file.target


def cuda_version(library: str, answer: str) -> str:
    """Return the version in the answer of cuDriverGetVersion, such as 12.4. Raises DocumentError."""
    number = whole_number(answer)
    if number is None:
        raise DocumentError(f"{library}: cuDriverGetVersion returned {answer[:40]!r}")
    # CUDA_VERSION of cuda.h: 1000 * major + 10 * minor.
    return f"{number // 1000}.{number % 1000 // 10}"
