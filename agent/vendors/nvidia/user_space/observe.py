"""Observes the driver's user space: finds the place on the host where it is, and its files there."""

import posixpath
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from agent.model.facts import Absent, CacheEntry, Seen, Unseen, UserSpace
from agent.system.deadlines import ask_device
from agent.system.files import System
from agent.system.path_trust import Ways
from agent.system.seen import why_not
from agent.vendors.host_vendor import Sources
from agent.vendors.nvidia.user_space import libraries
from agent.vendors.nvidia.user_space.companion_files import Surroundings, observe_companions
from agent.vendors.nvidia.user_space.libraries import SETS, TRIPLETS, Found
from agent.vendors.nvidia.user_space.library_directories import list_libraries
from agent.vendors.nvidia.user_space.loader_manifests import with_paths_of_pods
from agent.vendors.nvidia.user_space.places import PLACES, Place, configured_place

LOOK = 15.0
"""Seconds to search one place. A busy host needs one second to read the headers of all libraries."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The content of one place."""

    place: Place
    version: Seen[str]
    system: System
    """The system whose root is the place's."""
    root: str = ""
    """The real path of the place's root on the host; empty for the host's root."""
    found: tuple[Found, ...] = ()
    problems: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    """Directories of the place that were not searched, with the reason, in words."""

    @property
    def directories(self) -> frozenset[str]:
        """The directories of a driver in the host's root. Other places need not search them again."""
        if self.root or not isinstance(self.version, str):
            return frozenset()
        return frozenset(directory for each in self.found for directory in each.directories)


def observe_user_space(sources: Sources, module: str) -> UserSpace:
    """Return the driver's files, of the version `module` if that is installed. `module` may be empty."""
    if sources.architecture not in SETS:
        none = Absent(f"NVIDIA has no driver for {sources.architecture}")
        return UserSpace(none, none)
    place = configured_place(sources.driver)
    if place is not None:
        assembled = _assemble(sources, _look(sources, place, module))
        return replace(assembled, place_name=place.name, configured=place.name)
    candidates: list[_Candidate] = []
    for place in PLACES:
        known = frozenset[str]().union(*(each.directories for each in candidates))
        candidates.append(_look(sources, place, module, known))
    chosen = _choose(candidates, module)
    others = [each for each in candidates if each is not chosen]
    return replace(
        _assemble(sources, chosen),
        place_name=chosen.place.name,
        refused_places=tuple(
            each.place.name for each in candidates if each.passed_over and not isinstance(each.version, str)
        ),
        other_places=tuple(
            f"driver {each.version} in {each.place}" for each in others if isinstance(each.version, str)
        ),
        passed_over=tuple(told for each in candidates for told in each.passed_over),
    )


def _choose(candidates: Sequence[_Candidate], module: str) -> _Candidate:
    """Return the first place with a driver of the module's version, otherwise the first with any content.

    A place that could not be observed is returned too: a later place must not replace it, because it may be the right
    one. If all places are empty, the first one is returned.
    """
    there = []
    for each in candidates:
        if isinstance(each.version, Unseen):
            return each
        if isinstance(each.version, str) and each.version == (module or each.version):
            return each
        if not isinstance(each.version, Absent):
            there.append(each)
    return there[0] if there else candidates[0]


def _look(sources: Sources, place: Place, module: str, known: Set[str] = frozenset()) -> _Candidate:
    """Return the content of a place. `known` directories of the host's root are skipped."""
    if place.of_the_loader:
        return _search(sources, place, module, known)
    try:
        # With a time limit: /home and /opt may be network file systems on hosts that have no driver in them.
        return ask_device(f"the driver's place {place}", lambda: _search(sources, place, module, known), LOOK)
    except OSError as error:
        return _Candidate(place, Unseen(why_not(str(place), error).why), sources.system)


def _search(sources: Sources, place: Place, module: str, known: Set[str]) -> _Candidate:
    system, root = sources.system, ""
    ways = Ways(system, judged=_judged(place))
    if place.root != "/":
        try:
            if not ways.permits(place.root):
                none = Absent(f"users other than root can change {place.root}")
                return _Candidate(place, none, system, passed_over=_passed_over(place, ways))
            system, root = system.below(place.root), system.real_path(place.root).rstrip("/")
        except OSError as error:
            return _Candidate(place, why_not(place.root, error), sources.system)
        ways = Ways(system, judged=_judged(place))
    problems: list[str] = []
    try:
        entries = _entries(sources, place, system, ways)
        if not isinstance(entries, tuple):
            return _Candidate(place, entries, system, root)
        architectures = SETS[sources.architecture]
        skipped = frozenset[str]() if root else known
        found = tuple(
            libraries.search(system, entries, Found(each, of_root=not place.configured), problems, skipped)
            for each in architectures
        )
    except OSError as error:
        unseen = Unseen(why_not(error.filename or str(place), error).why)
        return _Candidate(place, unseen, system, root)
    told = tuple(f"{root}: {each}" if root else each for each in problems)
    version = libraries.choose(found[0], module)
    return _Candidate(place, version, system, root, found, told, _passed_over(place, ways, root))


def _judged(place: Place) -> bool:
    """Return whether owners are checked: not in the host's loader cache, and not in a configured place."""
    return not (place.configured or place.of_the_loader)


def _passed_over(place: Place, ways: Ways, root: str = "") -> tuple[str, ...]:
    where = f"{root}: " if root else ""
    return tuple(f"{where}{', '.join(each)} ({place.name}), because {where}{why}" for why, each in ways.refused.items())


def _entries(sources: Sources, place: Place, system: System, ways: Ways) -> Seen[tuple[CacheEntry, ...]]:
    """Return the libraries on paths that only root controls: others must not decide what pods load. Raises OSError."""
    if place.libraries:
        return list_libraries(system, place.libraries, sources.architecture, ways)
    listed = sources.loader_cache(place.root)
    if not isinstance(listed, tuple):
        return listed
    ours = (each for each in listed if libraries.lists_driver_library(each))
    return tuple(each for each in ours if ways.permits(posixpath.dirname(each.path), each.path))


def _assemble(sources: Sources, candidate: _Candidate) -> UserSpace:
    """Return all files of the candidate's version, or why there are none."""
    place, system, root, version = candidate.place, candidate.system, candidate.root, candidate.version
    if not isinstance(version, str):
        return UserSpace(version, version, candidate.problems, place=str(place))
    try:
        files = [file for each in candidate.found for file in libraries.libraries(system, each, version)]
        directories = libraries.own_directories(candidate.found[0], version)
        triplet = TRIPLETS[sources.architecture]
        ways = Ways(system, judged=_judged(place))
        trusted = replace(
            place,
            binaries=tuple(filter(ways.permits, place.binaries)),
            data=tuple(filter(ways.permits, place.data)),
        )
        beside = observe_companions(system, version, triplet, directories, Surroundings(trusted, root, sources.system))
        companions, astray = with_paths_of_pods(system, beside.files, files)
    except OSError as error:
        unseen = Unseen(why_not(error.filename or "the driver's files", error).why)
        return UserSpace(unseen, unseen, candidate.problems, place=str(place))
    of_files = (*beside.problems, *astray)
    problems = (
        *candidate.problems,
        *(f"{root}: {each}" if root else each for each in of_files),
        *(f"not searched: {each}" for each in (*candidate.passed_over, *_passed_over(place, ways, root))),
    )
    all_files = (*files, *companions)
    on_host = tuple(replace(each, source=f"{root}{each.source}") if each.source else each for each in all_files)
    return UserSpace(version, on_host, problems, beside.not_installed, beside.other_version, str(place))
