"""Driver roots of ours on disk: only those that are whole and unchanged since they were published count."""

import re
from dataclasses import dataclass, replace

from agent.errors import DocumentError
from agent.facts import Absent, Broken, StagedRoot, Unseen
from agent.manifest import StagedIdentity, parse_manifest, parse_origin, staged_identity
from agent.paths import HOST_NVIDIA, MANIFESTS, REMOVED, STAGING, origin_file
from agent.system.files import System
from agent.system.looking import why_not

INDEX = re.compile(r"(0|[1-9][0-9]{0,8})\.json")
TRIES = 1000
"""Directories in the way of a new driver root; more than a few are somebody's mischief, and staging then says so."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What is on disk."""

    roots: tuple[StagedRoot, ...]
    next_index: int
    problems: tuple[str, ...]
    spoiled: tuple[int, ...] = ()
    """Changed, half made, or without a manifest."""
    remains: tuple[str, ...] = ()
    """Paths below STAGING and REMOVED."""
    unseen: str = ""
    """Why not all could be looked at; empty when all could."""


def observe_staged(system: System) -> Staged:
    """Every manifest, checked against the copies. A broken root is a problem, never an exception."""
    problems: list[str] = []
    roots, spoiled, unseen = [], [], []
    manifests, trouble = _names(system, MANIFESTS)
    manifests = tuple(name for name in manifests if INDEX.fullmatch(name))
    for name in manifests:
        try:
            root, manifest = _root(system, name)
            roots.append(replace(root, place=_place(system, root.index, manifest, problems)))
        except DocumentError as error:
            problems.append(str(error))
            spoiled.append(_index(name))
        except OSError as error:
            match why_not(f"{MANIFESTS}/{name}: {error.filename}", error):
                case Unseen(why):
                    unseen.append(why)
                case Absent(why) | Broken(why):
                    # Such as a link in a circle, which a machine may have planted.
                    problems.append(why)
                    spoiled.append(_index(name))
    next_index = _next_index(manifests, system)
    if not trouble:
        known = {_index(name) for name in manifests}
        spoiled += [
            index for index in range(next_index) if index not in known and system.exists(f"{HOST_NVIDIA}/{index}")
        ]
    remains = tuple(f"{place}/{name}" for place in (STAGING, REMOVED) for name in _names(system, place)[0])
    why = "; ".join((*trouble, *unseen))
    return Staged(tuple(sorted(roots)), next_index, tuple(problems), tuple(sorted(spoiled)), remains, why)


def _index(manifest: str) -> int:
    return int(manifest.removesuffix(".json"))


def _next_index(manifests: tuple[str, ...], system: System) -> int:
    """Above every manifest, and free. HOST_NVIDIA is never listed: root in a machine can remount it and fill it."""
    first = max(map(_index, manifests), default=-1) + 1
    for index in range(first, first + TRIES):
        if not system.exists(f"{HOST_NVIDIA}/{index}"):
            return index
    return first


def _names(system: System, directory: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The directory's entries; none and a problem when it cannot be listed."""
    try:
        return system.entries(directory), ()
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        return (), (f"{directory}: {error.strerror}",)


def _place(system: System, index: int, manifest: bytes, problems: list[str]) -> str:
    """Empty where none is recorded; a record that cannot be used is a problem and costs nothing else."""
    path = origin_file(index)
    try:
        return parse_origin(path, system.read(path), manifest)
    except FileNotFoundError:
        return ""
    except DocumentError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(why_not(path, error).why)
    return ""


def _root(system: System, name: str) -> tuple[StagedRoot, bytes]:
    """With the manifest's text. Raises DocumentError for what cannot be used, OSError where looking failed."""
    path = f"{MANIFESTS}/{name}"
    manifest = system.read(path)
    root, identities = parse_manifest(path, manifest)
    if name != f"{root.index}.json":
        raise DocumentError(f"{path}: index {root.index} does not fit the file's name", "it is staged anew")
    for file in root.files:
        place = f"{HOST_NVIDIA}/{root.index}/{file.target}"
        changed = system.read_link(place) != file.link if file.link else _now(system, place) != identities[file.target]
        if changed:
            raise DocumentError(f"{place}: missing or changed since it was published", "it is staged anew")
    return root, manifest


def _now(system: System, place: str) -> StagedIdentity | Absent:
    try:
        return staged_identity(system.identity(place))
    except (FileNotFoundError, NotADirectoryError):
        return Absent(place)
