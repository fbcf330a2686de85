"""Makes the driver's libraries and programs usable in this machine, by links into the driver root and ldconfig."""

import hashlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

from agent.machine.context import Context
from agent.machine.libraries.plan import (
    FOREIGN,
    TRIPLET_32,
    TRIPLETS,
    LinkPlan,
    Places,
    needed_sonames,
    places,
    plan_links,
    wanted_links,
)
from agent.machine.notes import Notes
from agent.machine.repairs import repaired
from agent.model.conditions import Condition, ConditionType, false, not_applicable, true
from agent.model.handoff import Repair, Request
from agent.model.paths import STATE
from agent.model.reasons import Reason
from agent.system.files import System

LOADER_CACHE = "/etc/ld.so.cache"
CONFIGURED = "/etc/ld.so.conf.d"
ENTRY = re.compile(r"\t(?P<name>\S+) \((?P<abi>[^\s)]+?)(?:, [^)]*)?\) => (?P<path>.*)")
"""A line of `ldconfig -p` (print_entry in glibc's elf/cache.c). `hwcap:` and `OS ABI:` may follow the ABI."""
LDCONFIG_PENDING = f"{STATE}/ldconfig-owed"
"""This file exists from before a change of links until ldconfig has run. Like the links, it is on disk."""
KIND = ConditionType.LIBRARIES_LINKED


@dataclass(frozen=True, slots=True)
class Cached:
    """The faults of the loader cache."""

    missing: frozenset[str] = frozenset()
    """Paths of links that are not in the cache."""
    shadowed: Mapping[str, str] = field(default_factory=dict)
    """Paths that programs load instead of our links, by the path of the link."""


def link_libraries(context: Context, request: Request, data: tuple[str, ...] = ()) -> Condition:
    """Make the links and run ldconfig if needed, and return LibrariesLinked. `data` is as in Places."""
    system = context.system
    where = _places(system, context.handoff.architecture, data)
    if request.driver_root and not _staged(system, request.driver_root):
        # Old links stay: removing them does not help, and their driver root may soon be back.
        return false(
            KIND,
            Reason.NOT_STAGED,
            f"{request.driver_root} is missing or empty in this machine: see DriverRootStaged on the host, and the "
            f"bind of its parent directory in the machine's .nspawn file",
        )
    wanted = wanted_links(request, where)
    plan = plan_links(wanted, _listing(system, where))
    ldconfig_pending = _change(system, plan)
    _log_repair(context.notes, request, wanted, plan)
    if not request.driver_root and not ldconfig_pending:
        return not_applicable(KIND, "no driver files are granted to this machine")
    cached = _refresh_loader_cache(context, request, where, ldconfig_pending=ldconfig_pending, conflicts=plan.conflicts)
    if plan.conflicts:
        found = ", ".join(_describe(system, path) for path in plan.conflicts)
        return false(
            KIND,
            Reason.CONFLICT,
            f"in the way of the driver's files, but not made by the agent: {found}; "
            f"remove it, or the package that contains it (`dpkg -S {plan.conflicts[0]}`)",
        )
    if cached.missing:
        directories = sorted({posixpath.dirname(path) for path in cached.missing})
        listed = ", ".join(sorted(cached.missing))
        return false(
            KIND,
            Reason.NOT_IN_LOADER_CACHE,
            f"ldconfig does not list {listed}: name {', '.join(directories)} in {CONFIGURED}",
        )
    if cached.shadowed:
        taken = ", ".join(f"{other} instead of {path}" for path, other in sorted(cached.shadowed.items()))
        return false(
            KIND,
            Reason.SHADOWED,
            f"programs in this machine load {taken} (see `ldconfig -p`), a stub or another driver's library; remove "
            f"it, or remove its directory from {CONFIGURED}, then run ldconfig",
        )
    return true(KIND, Reason.LINKED, f"{len(wanted)} links into {request.driver_root or 'no driver root'}")


def _log_repair(notes: Notes, request: Request, wanted: Mapping[str, str], plan: LinkPlan) -> None:
    """Log a repair if links are wrong now, although an earlier run made all links that are wanted now."""
    name = f"links-{request.vendor}"
    links = sorted(item for item in wanted.items() if item[0] not in plan.conflicts)
    made = {"digest": hashlib.sha256(repr(links).encode()).hexdigest()}
    changed = (*plan.remove, *plan.make)
    if changed and notes.load(name) == made:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        repaired(notes, Repair.LINKS, f"somebody changed {changed[0]}{more}")
    notes.save(name, made)


def _places(system: System, architecture: str, data: tuple[str, ...]) -> Places:
    candidates = (f"/usr/lib/{TRIPLETS.get(architecture, architecture)}", f"/usr/lib/{TRIPLET_32}", "/usr/lib64")
    return places(architecture, {each for each in candidates if system.is_directory(each)}, data)


def _staged(system: System, driver_root: str) -> bool:
    # If the driver root is a symbolic link, nvidia-ctk omits all libraries and exits with 0. If it is empty, the host
    # has not mounted it yet.
    plain = system.is_directory(driver_root) and system.read_link(driver_root) is None
    return plain and bool(system.entries(driver_root))


def _listing(system: System, where: Places) -> dict[str, str]:
    """Return, by path, the text of each link in the directories of our links, and FOREIGN for each other entry."""
    found = {}
    for directory in where.directories():
        if system.is_directory(directory):
            for name in system.entries(directory):
                path = f"{directory}/{name}"
                found[path] = system.read_link(path) or FOREIGN
    return found


def _describe(system: System, path: str) -> str:
    target = system.read_link(path)
    if target is not None:
        return f"{path} (a link to {target})"
    return f"{path} (a {'directory' if system.is_directory(path) else 'file'})"


def _change(system: System, plan: LinkPlan) -> bool:
    """Change the links. Return whether ldconfig must run, because of this or an earlier change."""
    ldconfig_pending = system.exists(LDCONFIG_PENDING)
    if not (plan.remove or plan.make):
        return ldconfig_pending
    if not ldconfig_pending:
        system.write(LDCONFIG_PENDING, b"")
    for path in plan.remove:
        system.remove(path)
    for path, text in plan.make.items():
        system.link(path, text)
    return True


def _refresh_loader_cache(
    context: Context, request: Request, where: Places, *, ldconfig_pending: bool, conflicts: tuple[str, ...]
) -> Cached:
    """Run ldconfig if needed; return the remaining faults of the loader cache.

    ldconfig deletes dangling links, so it must run after the links are made, and while the driver root exists.
    """
    system, notes = context.system, context.notes
    # Conflicting files are left out: they may not be libraries, and would never be in the cache.
    needed = needed_sonames(request, where) - frozenset(conflicts)
    name = f"loader-cache-{request.vendor}"
    noted = {"cache": _identity(system), "needed": sorted(needed)}
    if not ldconfig_pending and noted["cache"] and notes.load(name) == noted:
        return Cached()
    cached = Cached(needed) if ldconfig_pending else _cached(system, needed)
    if ldconfig_pending or cached.missing:
        # Without -X, ldconfig would change conflicting links to lead to the newest library with that SONAME.
        system.run("ldconfig", *(["-X"] if conflicts else []), timeout=60)
        cached = _cached(system, needed)
    system.remove(LDCONFIG_PENDING)
    if cached == Cached():
        notes.save(name, {"cache": _identity(system), "needed": sorted(needed)})
    return cached


def _identity(system: System) -> list[int]:
    try:
        return [int(each) for each in astuple(system.identity(LOADER_CACHE))]
    except FileNotFoundError:
        return []


def _cached(system: System, needed: frozenset[str]) -> Cached:
    """Return the faults of the loader cache, according to `ldconfig -p`.

    Of several entries with the same name and ABI, the loader takes the first (search_cache in dl-cache.c).
    """
    if not needed or not system.exists(LOADER_CACHE):
        return Cached(needed)
    first: dict[tuple[str, str], str] = {}
    listed: dict[str, tuple[str, str]] = {}
    for match in map(ENTRY.fullmatch, system.run("ldconfig", "-p").splitlines()):
        if match:
            first.setdefault((match["name"], match["abi"]), match["path"])
            listed.setdefault(match["path"], (match["name"], match["abi"]))
    keys = {path: listed.get(path) or listed.get(path.removeprefix("/usr")) for path in needed}
    taken = {path: first[key] for path, key in keys.items() if key}
    shadowed = {path: other for path, other in taken.items() if not _is_harmless(system, path, other)}
    return Cached(frozenset(path for path, key in keys.items() if not key), shadowed)


def _is_harmless(system: System, path: str, other: str) -> bool:
    """Return whether `other` does not shadow `path`: it leads to the same file, or is gone.

    On Debian, /lib/<triplet> and /usr/lib/<triplet> lead to the same files.
    """
    if other in (path, path.removeprefix("/usr")):
        return True
    try:
        return system.real_path(path) == system.real_path(other)
    except OSError:
        # One of the two was removed after the cache was written. If it is `other`, the loader skips it.
        return not system.exists(other)
