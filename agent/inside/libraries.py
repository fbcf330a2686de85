"""Makes the driver's libraries and programs usable in this machine: links into the driver root, and ldconfig."""

import hashlib
import posixpath
from collections.abc import Mapping
from dataclasses import astuple

from agent.conditions import Condition, ConditionType, false, not_applicable, true
from agent.handoff import Repair, Request
from agent.inside.links import (
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
from agent.inside.notes import Notes
from agent.inside.repairs import repaired
from agent.system.files import System

LOADER_CACHE = "/etc/ld.so.cache"
KIND = ConditionType.LIBRARIES_LINKED


def link_libraries(
    system: System, notes: Notes, request: Request, architecture: str, data: tuple[str, ...] = ()
) -> Condition:
    """The LibrariesLinked condition, after making it true where that is possible. `data` as Places has it."""
    where = _places(system, architecture, data)
    if request.driver_root and not _staged(system, request.driver_root):
        # Old links stay: the driver root that they point to may be back in a moment, and removing them helps nobody.
        return false(
            KIND,
            "NotStaged",
            f"{request.driver_root} is not a directory in this machine: the host stages it, see DriverRootStaged and "
            f"the bind of its parent directory in the machine's .nspawn file",
        )
    wanted = wanted_links(request, where)
    plan = plan_links(wanted, _listing(system, where))
    for path in plan.remove:
        system.remove(path)
    for path, text in plan.make.items():
        system.link(path, text)
    changed = bool(plan.remove or plan.make)
    _tell_repair(notes, request, wanted, plan)
    if not request.driver_root and not changed:
        return not_applicable(KIND, "no driver files are granted to this machine")
    missing = _refresh_loader_cache(system, notes, request, where, changed=changed, conflicts=plan.conflicts)
    if plan.conflicts:
        found = ", ".join(_describe(system, path) for path in plan.conflicts)
        return false(
            KIND,
            "Conflict",
            f"not ours, left alone, and in the way of the driver's files: {found}; "
            f"remove it, or the package that has it (`dpkg -S {plan.conflicts[0]}`)",
        )
    if missing:
        directories = sorted({posixpath.dirname(path) for path in missing})
        return false(
            KIND,
            "NotInLoaderCache",
            f"ldconfig does not list {', '.join(sorted(missing))}: name {', '.join(directories)} in /etc/ld.so.conf.d",
        )
    return true(KIND, "Linked", f"{len(wanted)} links into {request.driver_root or 'no driver root'}")


def _tell_repair(notes: Notes, request: Request, wanted: Mapping[str, str], plan: LinkPlan) -> None:
    """Links that were all there after a run before, in which the same ones were wanted."""
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
    # nvidia-ctk given a driver root that is a symbolic link leaves out every library, with exit code 0.
    return system.is_directory(driver_root) and system.read_link(driver_root) is None


def _listing(system: System, where: Places) -> dict[str, str]:
    """Text of every link, FOREIGN for every other entry, in the directories that take links of ours."""
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


def _refresh_loader_cache(
    system: System, notes: Notes, request: Request, where: Places, *, changed: bool, conflicts: tuple[str, ...]
) -> frozenset[str]:
    """Run ldconfig where needed; the links that the loader cache lacks even then.

    ldconfig deletes dangling links, so it runs after the links are made and while the driver root is there.
    """
    # What is in our links' way may be no library at all, which no cache ever lists.
    needed = needed_sonames(request, where) - frozenset(conflicts)
    name = f"loader-cache-{request.vendor}"
    noted = {"cache": _identity(system), "needed": sorted(needed)}
    if not changed and noted["cache"] and notes.load(name) == noted:
        return frozenset()
    # Without -X it would turn somebody's link of a library's name to the newest file that has the name inside.
    ldconfig = ("ldconfig", "-X") if conflicts else ("ldconfig",)
    if changed:
        system.run(*ldconfig, timeout=60)
    missing = _not_cached(system, needed)
    if missing and not changed:
        system.run(*ldconfig, timeout=60)
        missing = _not_cached(system, needed)
    if not missing:
        notes.save(name, {"cache": _identity(system), "needed": sorted(needed)})
    return missing


def _identity(system: System) -> list[int]:
    try:
        return [int(each) for each in astuple(system.identity(LOADER_CACHE))]
    except FileNotFoundError:
        return []


def _not_cached(system: System, needed: frozenset[str]) -> frozenset[str]:
    """By `ldconfig -p`; Debian's lists /lib/<triplet>, which is /usr/lib/<triplet> under another name."""
    if not needed or not system.exists(LOADER_CACHE):
        return needed
    listed = {line.rpartition(" => ")[2].strip() for line in system.run("ldconfig", "-p").splitlines()}
    return frozenset(path for path in needed if not {path, path.removeprefix("/usr")} & listed)
