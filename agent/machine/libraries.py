"""Makes the driver's libraries and programs usable in this machine, by links into the driver root and ldconfig."""

import posixpath
import re
from collections.abc import Mapping, Set
from typing import NamedTuple

from agent.machine.notes import Context, Failure, record_repair
from agent.model.conditions import Condition, ConditionType, Reason, false, not_applicable, true
from agent.model.handoff import Repair, Request
from agent.model.paths import LOADER_CACHE, MACHINE_HOST_NVIDIA, STATE
from agent.model.text import first_of, sha256
from agent.system.files import System

# The links are relative, because programs that see the machine's file system in a subdirectory, such as a device plugin
# with /driver-root, would follow absolute links out of that subdirectory.

KIND = ConditionType.LIBRARIES_LINKED
TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
"""Debian's multiarch directories below /usr/lib, by architecture. Driver roots have this layout."""
LIBRARIES_32 = "/usr/lib/i386-linux-gnu"
SUBDIRECTORIES = ("", "/vdpau", "/gbm")
"""The library directory itself, and its two subdirectories for plugins, which libraries load by path."""
FOREIGN = ""
"""Stands in place of a link's target for an entry that is not a link."""
LOADER_MAIN, LOADER_CONFIGURATION = "/etc/ld.so.conf", "/etc/ld.so.conf.d"
ENTRY = re.compile(r"\t(?P<name>\S+) \((?P<abi>[^\s)]+?)(?:, [^)]*)?\) => (?P<path>.*)")
"""A line of `ldconfig -p` (print_entry in glibc's elf/cache.c). `hwcap:` and `OS ABI:` may follow the ABI."""
LDCONFIG_PENDING = f"{STATE}/ldconfig-owed"
"""This file exists while ldconfig must still run because links were changed. Like the links, it is on disk."""


class LinkPlan(NamedTuple):
    """The changes to the links."""

    remove: tuple[str, ...]
    make: Mapping[str, str]
    """The targets of new links, by the link's path."""
    conflicts: tuple[str, ...]
    """Paths of wanted links where another file or link is in the way."""


def link_directories(architecture: str, existing: Set[str], data: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the machine's directories for links, by the directory in the driver root to which their links lead.

    `existing` has those of the possible ones that exist. `data` has directories with configuration for loaders,
    relative to `/`. They have the same path in the driver root.
    """
    multiarch = f"/usr/lib/{TRIPLETS.get(architecture, f'{architecture}-linux-gnu')}"
    libraries = {multiarch: multiarch if multiarch in existing else "/usr/lib64"}
    # A machine without a directory for 32-bit libraries has no 32-bit loader that could use them.
    libraries |= {LIBRARIES_32: LIBRARIES_32} if LIBRARIES_32 in existing else {}
    places = {f"{root}{sub}": f"{place}{sub}" for root, place in libraries.items() for sub in SUBDIRECTORIES}
    return {root[1:]: place for root, place in places.items()} | {each: f"/{each}" for each in ("usr/bin", *data)}


def link_to(file: str, directories: Mapping[str, str]) -> str | None:
    """Return the path of the link to a file, which is given by its path below the driver root.

    Return None for a file that only containers need, such as firmware.
    """
    directory = directories.get(posixpath.dirname(file))
    return directory and f"{directory}/{posixpath.basename(file)}"


def wanted_links(request: Request, directories: Mapping[str, str]) -> dict[str, str]:
    """Return the links to all files of the driver root that the machine itself uses: targets by the link's path."""
    return {
        path: posixpath.relpath(f"{request.driver_root}/{file.target}", posixpath.dirname(path))
        for file in request.files
        if (path := link_to(file.target, directories))
    }


def plan_links(wanted: Mapping[str, str], present: Mapping[str, str]) -> LinkPlan:
    """Return the changes to the links.

    `present` has the entries of all link directories by path: the target of each link, and FOREIGN for other files.
    """
    leads_to = {
        path: posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        for path, target in present.items()
        if target
    }
    own = {path for path, place in leads_to.items() if place.startswith(f"{MACHINE_HOST_NVIDIA}/")}
    # ldconfig makes links of its own that lead to the agent's links, such as libcuda.so.1 to libcuda.so.550.163.01. The
    # agent may replace such a link, but need not remove it, because ldconfig also removes links that dangle.
    replaceable = own | {path for path, place in leads_to.items() if place in own | set(wanted)}
    conflicts = tuple(path for path in sorted(wanted) if path in present and path not in replaceable)
    make = {
        path: target for path, target in sorted(wanted.items()) if path not in conflicts and present.get(path) != target
    }
    return LinkPlan(tuple(sorted(own - set(wanted))), make, conflicts)


def link_libraries(context: Context, request: Request, data: tuple[str, ...] = ()) -> Condition:
    """Make the links and run ldconfig if needed, and return LibrariesLinked.

    `data` is as in link_directories. Raises AgentError or OSError.
    """
    system, notes, architecture, root = context.system, context.notes, context.handoff.architecture, request.driver_root
    # If the driver root is a symbolic link, nvidia-ctk omits all libraries and exits with 0. If it is empty, the host
    # has not mounted it yet. Old links stay: their driver root may soon be back, and removing them would fix nothing.
    if root and not (system.is_directory(root, follow=False) and system.entries(root)):
        advice = "see DriverRootStaged on the host, and the bind of its parent directory in the machine's .nspawn file"
        return false(KIND, Reason.NOT_STAGED, f"{root} is missing, empty or a link in this machine: {advice}")
    candidates = (f"/usr/lib/{TRIPLETS.get(architecture, architecture)}", LIBRARIES_32)
    directories = link_directories(architecture, {each for each in candidates if system.is_directory(each)}, data)
    present = {
        f"{directory}/{name}": target or FOREIGN
        for directory in directories.values()
        if system.is_directory(directory)
        for name, target in system.links(directory).items()
    }
    wanted = wanted_links(request, directories)
    plan = plan_links(wanted, present)
    changed, pending = (*plan.remove, *plan.make), system.exists(LDCONFIG_PENDING)
    if changed and not pending:
        system.write(LDCONFIG_PENDING, b"")
        pending = True
    for path in plan.remove:
        system.remove(path)
    for path, target in plan.make.items():
        system.link(path, target)
    # It is a repair if links had to change, although an earlier run had made exactly the links that are wanted now.
    links = sorted(item for item in wanted.items() if item[0] not in plan.conflicts)
    made = {"digest": sha256(repr(links).encode())}
    if changed and notes.load(f"links-{request.vendor}") == made:
        record_repair(notes, Repair.LINKS, f"somebody changed {first_of(changed, 1)}")
    notes.save(f"links-{request.vendor}", made)
    # Without a driver root, ldconfig must run only if links were removed: the loader cache still lists these links.
    if not root and not pending:
        return not_applicable(KIND, "no driver files are granted to this machine")
    # The links named like a SONAME, such as `libcuda.so.1`, must be in the loader cache. Plugins are loaded by path.
    needed = {
        link
        for file in request.files
        if file.link and posixpath.basename(file.target).partition(".so.")[2].isdecimal()
        if (link := link_to(file.target, directories))
        and f"/{posixpath.basename(posixpath.dirname(link))}" not in SUBDIRECTORIES
    }
    # Conflicting files are left out: a file that is not a library would never be in the cache.
    missing, shadowed = _refresh_loader_cache(context, request, needed - {*plan.conflicts}, plan, pending=pending)
    if plan.conflicts:
        in_the_way = first_of([_describe(system, path) for path in plan.conflicts])
        advice = f"or the package that contains them (`dpkg -S {plan.conflicts[0]}` in the machine)"
        message = (
            f"in the way of the driver's files, but not made by the agent: {in_the_way}; remove these files, {advice}"
        )
        return false(KIND, Reason.CONFLICT, message)
    if missing:
        unlisted = ", ".join(sorted({posixpath.dirname(path) for path in missing}))
        advice = f"add a line for {unlisted} to a file in {LOADER_CONFIGURATION}"
        message = f"ldconfig does not list {first_of(missing)}: {advice}"
        return false(KIND, Reason.NOT_IN_LOADER_CACHE, message)
    if shadowed:
        taken = first_of([f"{other} instead of {path}" for path, other in sorted(shadowed.items())])
        advice = f"remove that, or the line with its directory in {LOADER_CONFIGURATION}, then run ldconfig"
        return false(KIND, Reason.SHADOWED, f"programs in this machine load {taken}: {advice}")
    return true(KIND, Reason.LINKED, f"{len(wanted)} links into {root}" if root else "no links are needed")


def _describe(system: System, path: str) -> str:
    target = system.read_link(path)
    if target is not None:
        return f"{path} (a link to {target})"
    return f"{path} (a {'directory' if system.is_directory(path) else 'file'})"


def _refresh_loader_cache(
    context: Context, request: Request, needed: set[str], plan: LinkPlan, *, pending: bool
) -> tuple[list[str], dict[str, str]]:
    """Run ldconfig if needed, and return the remaining faults of the loader cache."""
    # ldconfig deletes dangling links, so it runs only after the links are made, and not while a driver root that the
    # handoff names is missing.
    system, notes, name = context.system, context.notes, f"loader-cache-{request.vendor}"
    # The cache's identity is read before its content: another run of ldconfig may replace the cache in between, and the
    # next run must notice that.
    cache = _cache_identity(system)
    if not pending and cache and notes.load(name) == {"cache": cache, "needed": sorted(needed)}:
        return [], {}
    missing, shadowed = (sorted(needed), {}) if pending else _cache_faults(system, needed)
    if pending or (missing and not _failure(context, name, missing).noted()):
        # Without -X, ldconfig would change the conflicting links: each would lead to the newest library of its SONAME.
        system.run("ldconfig", *(["-X"] if plan.conflicts else []), timeout=60)
        cache = _cache_identity(system)
        missing, shadowed = _cache_faults(system, needed)
        if missing:
            _failure(context, name, missing).save(missing=first_of(missing, 1))
    system.remove(LDCONFIG_PENDING)
    if not missing and not shadowed:
        notes.save(name, {"cache": cache, "needed": sorted(needed)})
    return missing, shadowed


def _failure(context: Context, name: str, missing: list[str]) -> Failure:
    """Return the note of a run of ldconfig that left libraries out of the cache, with all that the run depends on."""
    system, directory = context.system, LOADER_CONFIGURATION
    entries = system.entries(directory) if system.is_directory(directory) else ()
    files = (LOADER_MAIN, *(f"{directory}/{each}" for each in entries))
    configuration = {path: system.identity(path) for path in files if system.is_file(path)}
    # The content, because each ldconfig replaces the file.
    cache = system.digest(LOADER_CACHE) if system.is_file(LOADER_CACHE) else ""
    return Failure.of(context, f"{name}-failed", cache, missing, configuration)


def _cache_identity(system: System) -> list[int]:
    try:
        return [int(each) for each in system.identity(LOADER_CACHE)]
    except FileNotFoundError:
        return []


def _cache_faults(system: System, needed: set[str]) -> tuple[list[str], dict[str, str]]:
    """Return the faults of the loader cache, according to `ldconfig -p`.

    Of several entries with the same name and ABI, the loader takes the first (search_cache in dl-cache.c).
    """
    if not needed or not system.exists(LOADER_CACHE):
        return sorted(needed), {}
    first: dict[tuple[str, str], str] = {}
    listed: dict[str, tuple[str, str]] = {}
    for match in map(ENTRY.fullmatch, system.run("ldconfig", "-p").splitlines()):
        if match:
            first.setdefault((match["name"], match["abi"]), match["path"])
            listed.setdefault(match["path"], (match["name"], match["abi"]))
    missing, shadowed = list[str](), dict[str, str]()
    for path in sorted(needed):
        # In a machine with a merged /usr, ldconfig may list a library below /lib.
        other = path.removeprefix("/usr")
        key = listed.get(path) or (listed.get(other) if _place(system, path) == _place(system, other) else None)
        if key is None:
            missing.append(path)
        elif not _is_harmless(system, path, first[key]):
            shadowed[path] = first[key]
    return missing, shadowed


def _place(system: System, path: str) -> str:
    """Return a path's only name for all links to its directory. The last part is not followed."""
    try:
        return f"{system.real_path(posixpath.dirname(path))}/{posixpath.basename(path)}"
    except OSError:
        return path


def _is_harmless(system: System, path: str, other: str) -> bool:
    """Return whether `other`, which the loader cache has instead of `path`, leads to the same file or is gone."""
    if _place(system, path) == _place(system, other):
        return True
    try:
        return system.real_path(path) == system.real_path(other)
    except OSError:
        # One of the two was removed after the cache was written. If it is `other`, the loader skips it.
        return not system.exists(other)
