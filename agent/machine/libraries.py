"""Makes the driver's libraries and programs usable in this machine, by links into the driver root and ldconfig."""

import posixpath
import re
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import NamedTuple

from agent.machine.notes import Context, Failure, Notes, record_repair
from agent.model.conditions import Condition, ConditionType, Reason, false, not_applicable, true
from agent.model.handoff import Repair, Request
from agent.model.paths import LOADER_CACHE, MACHINE_HOST_NVIDIA, STATE
from agent.model.text import first_of, sha256
from agent.system.files import System

# The links are relative, because programs that see the machine's file system in a subdirectory, such as a device plugin
# with /driver-root, would follow absolute links out of that subdirectory.

TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
"""Debian's multiarch directories below /usr/lib, by architecture. Driver roots have this layout."""
TRIPLET_32 = "i386-linux-gnu"
BINARIES = "/usr/bin"
SUBDIRECTORIES = ("", "vdpau", "gbm")
"""The library directory itself, and its two subdirectories for plugins, which libraries load by path."""
FOREIGN = ""
"""Stands in place of a link's target for an entry that is not a link."""


class LinkDirectories(NamedTuple):
    """The machine's directories that have links into a driver root."""

    by_root_directory: Mapping[str, str]
    """Directories in the machine, by the directory in the driver root to which their links lead."""
    data: tuple[str, ...] = ()
    """Directories with configuration for loaders, relative to `/`. They have the same path in the driver root."""

    def all(self) -> tuple[str, ...]:
        """Return the absolute path of every directory that may have one of the agent's links."""
        libraries = sorted(set(self.by_root_directory.values()) - {BINARIES})
        return (
            *(posixpath.join(each, sub).rstrip("/") for each in libraries for sub in SUBDIRECTORIES),
            BINARIES,
            *(f"/{each}" for each in self.data),
        )

    def link_to(self, file: str) -> str | None:
        """Return the path of the link to a file, which is given by its path below the driver root.

        Return None for a file that only containers need, such as firmware.
        """
        for root_directory, directory in self.by_root_directory.items():
            rest = file.removeprefix(f"{root_directory}/")
            if rest != file and posixpath.dirname(rest) in SUBDIRECTORIES:
                return f"{directory}/{rest}"
        return f"/{file}" if posixpath.dirname(file) in self.data else None


class LinkPlan(NamedTuple):
    """The changes to the links."""

    remove: tuple[str, ...]
    make: Mapping[str, str]
    """The targets of new links, by the link's path."""
    conflicts: tuple[str, ...]
    """Paths of wanted links where another file or link is in the way."""


def link_directories(architecture: str, existing: Set[str], data: tuple[str, ...] = ()) -> LinkDirectories:
    """Return the machine's directories for links. `existing` has those of the possible ones that exist."""
    triplet = TRIPLETS.get(architecture, f"{architecture}-linux-gnu")
    multiarch = f"/usr/lib/{triplet}"
    by_root_directory = {
        f"usr/lib/{triplet}": multiarch if multiarch in existing else "/usr/lib64",
        "usr/bin": BINARIES,
    }
    # A machine without a directory for 32-bit libraries has no 32-bit loader that could use them.
    if f"/usr/lib/{TRIPLET_32}" in existing:
        by_root_directory[f"usr/lib/{TRIPLET_32}"] = f"/usr/lib/{TRIPLET_32}"
    return LinkDirectories(by_root_directory, data)


def wanted_links(request: Request, directories: LinkDirectories) -> dict[str, str]:
    """Return the links to all files of the driver root that the machine itself uses: targets by the link's path."""
    return {
        path: posixpath.relpath(f"{request.driver_root}/{file.target}", posixpath.dirname(path))
        for file in request.files
        if (path := directories.link_to(file.target)) is not None
    }


def plan_links(wanted: Mapping[str, str], present: Mapping[str, str]) -> LinkPlan:
    """Return the changes to the links.

    `present` has the entries of all link directories by path: the target of each link, and FOREIGN for other files.
    """
    own = {path for path, target in present.items() if _points_into_driver_root(path, target)}
    # ldconfig makes links of its own that lead to the agent's links, such as libcuda.so.1 to libcuda.so.550.163.01. The
    # agent may replace such a link, but need not remove it, because ldconfig also removes links that dangle.
    replaceable = own | {
        path for path, target in present.items() if target and _resolve(path, target) in own | set(wanted)
    }
    conflicts = tuple(path for path in sorted(wanted) if path in present and path not in replaceable)
    make = {
        path: target for path, target in sorted(wanted.items()) if path not in conflicts and present.get(path) != target
    }
    return LinkPlan(tuple(sorted(own - set(wanted))), make, conflicts)


def _soname_links(request: Request, directories: LinkDirectories) -> frozenset[str]:
    """Return the paths of links that must be in the loader cache: those named like a SONAME, such as `libcuda.so.1`."""
    directories_of_libraries = set(directories.by_root_directory.values())
    return frozenset(
        path
        for file in request.files
        if (path := directories.link_to(file.target))
        and file.link
        and posixpath.basename(file.target).partition(".so.")[2].isdecimal()
        and posixpath.dirname(path) in directories_of_libraries
    )


def _points_into_driver_root(path: str, target: str) -> bool:
    return bool(target) and _resolve(path, target).startswith(f"{MACHINE_HOST_NVIDIA}/")


def _resolve(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


LOADER_MAIN, LOADER_CONFIGURATION = "/etc/ld.so.conf", "/etc/ld.so.conf.d"
ENTRY = re.compile(r"\t(?P<name>\S+) \((?P<abi>[^\s)]+?)(?:, [^)]*)?\) => (?P<path>.*)")
"""A line of `ldconfig -p` (print_entry in glibc's elf/cache.c). `hwcap:` and `OS ABI:` may follow the ABI."""
LDCONFIG_PENDING = f"{STATE}/ldconfig-owed"
"""This file exists while ldconfig must still run because links were changed. Like the links, it is on disk."""
KIND = ConditionType.LIBRARIES_LINKED


class CacheFaults(NamedTuple):
    """What is wrong with the loader cache."""

    missing: frozenset[str] = frozenset()
    """Paths of links that are not in the cache."""
    shadowed: Mapping[str, str] = MappingProxyType({})
    """Paths of the files that programs load instead, by the path of the agent's link."""


def link_libraries(context: Context, request: Request, data: tuple[str, ...] = ()) -> Condition:
    """Make the links and run ldconfig if needed, and return LibrariesLinked.

    `data` is as in LinkDirectories. Raises AgentError or OSError.
    """
    system = context.system
    directories = _existing_directories(system, context.handoff.architecture, data)
    if request.driver_root and not _staged(system, request.driver_root):
        # Old links stay: their driver root may soon be back, and removing them would fix nothing.
        advice = "see DriverRootStaged on the host, and the bind of its parent directory in the machine's .nspawn file"
        message = f"{request.driver_root} is missing, empty or a link in this machine: {advice}"
        return false(KIND, Reason.NOT_STAGED, message)
    wanted = wanted_links(request, directories)
    plan = plan_links(wanted, _link_entries(system, directories))
    ldconfig_pending = _change_links(system, plan)
    _record_repair(context.notes, request, wanted, plan)
    # Without a driver root, ldconfig must run only if links were removed: the loader cache still lists these links.
    if not request.driver_root and not ldconfig_pending:
        return not_applicable(KIND, "no driver files are granted to this machine")
    faults = _refresh_loader_cache(
        context, request, directories, ldconfig_pending=ldconfig_pending, conflicts=plan.conflicts
    )
    if plan.conflicts:
        in_the_way = ", ".join(_describe(system, path) for path in plan.conflicts)
        advice = f"or the package that contains them (`dpkg -S {plan.conflicts[0]}` in the machine)"
        message = (
            f"in the way of the driver's files, but not made by the agent: {in_the_way}; remove these files, {advice}"
        )
        return false(KIND, Reason.CONFLICT, message)
    if faults.missing:
        unlisted = ", ".join(sorted({posixpath.dirname(path) for path in faults.missing}))
        advice = f"add a line for {unlisted} to a file in {LOADER_CONFIGURATION}"
        message = f"ldconfig does not list {', '.join(sorted(faults.missing))}: {advice}"
        return false(KIND, Reason.NOT_IN_LOADER_CACHE, message)
    if faults.shadowed:
        taken = ", ".join(f"{other} instead of {path}" for path, other in sorted(faults.shadowed.items()))
        message = (
            f"programs in this machine load {taken} (see `ldconfig -p`). What they load may be a stub or another "
            f"driver's library: remove it, or the line with its directory in a file of {LOADER_CONFIGURATION}, then "
            "run ldconfig"
        )
        return false(KIND, Reason.SHADOWED, message)
    linked = f"{len(wanted)} links into {request.driver_root}" if request.driver_root else "no links are needed"
    return true(KIND, Reason.LINKED, linked)


def _record_repair(notes: Notes, request: Request, wanted: Mapping[str, str], plan: LinkPlan) -> None:
    """Log a repair if links had to change, although an earlier run had made exactly the links that are wanted now."""
    name = f"links-{request.vendor}"
    links = sorted(item for item in wanted.items() if item[0] not in plan.conflicts)
    made = {"digest": sha256(repr(links).encode())}
    changed = (*plan.remove, *plan.make)
    if changed and notes.load(name) == made:
        record_repair(notes, Repair.LINKS, f"somebody changed {first_of(changed, 1)}")
    notes.save(name, made)


def _existing_directories(system: System, architecture: str, data: tuple[str, ...]) -> LinkDirectories:
    candidates = (f"/usr/lib/{TRIPLETS.get(architecture, architecture)}", f"/usr/lib/{TRIPLET_32}", "/usr/lib64")
    return link_directories(architecture, {each for each in candidates if system.is_directory(each)}, data)


def _staged(system: System, driver_root: str) -> bool:
    # If the driver root is a symbolic link, nvidia-ctk omits all libraries and exits with 0. If it is empty, the host
    # has not mounted it yet.
    plain = system.is_directory(driver_root, follow=False)
    return plain and bool(system.entries(driver_root))


def _link_entries(system: System, directories: LinkDirectories) -> dict[str, str]:
    """Return the entries of all link directories by path: the target of each link, and FOREIGN for other entries."""
    return {
        f"{directory}/{name}": target or FOREIGN
        for directory in directories.all()
        if system.is_directory(directory)
        for name, target in system.links(directory).items()
    }


def _describe(system: System, path: str) -> str:
    target = system.read_link(path)
    if target is not None:
        return f"{path} (a link to {target})"
    return f"{path} (a {'directory' if system.is_directory(path) else 'file'})"


def _change_links(system: System, plan: LinkPlan) -> bool:
    """Change the links. Return whether ldconfig must run, because of this or an earlier change."""
    ldconfig_pending = system.exists(LDCONFIG_PENDING)
    if not (plan.remove or plan.make):
        return ldconfig_pending
    if not ldconfig_pending:
        system.write(LDCONFIG_PENDING, b"")
    for path in plan.remove:
        system.remove(path)
    for path, target in plan.make.items():
        system.link(path, target)
    return True


def _refresh_loader_cache(
    context: Context,
    request: Request,
    directories: LinkDirectories,
    *,
    ldconfig_pending: bool,
    conflicts: tuple[str, ...],
) -> CacheFaults:
    """Run ldconfig if needed, and return the remaining faults of the loader cache."""
    # ldconfig deletes dangling links, so it runs only after the links are made, and not while a driver root that the
    # handoff names is missing.
    system, notes = context.system, context.notes
    # Conflicting files are left out: a file that is not a library would never be in the cache.
    needed = _soname_links(request, directories) - frozenset(conflicts)
    name = f"loader-cache-{request.vendor}"
    # The cache's identity is read before its content: another run of ldconfig may replace the cache in between, and the
    # next run must notice that.
    cache = _identity(system)
    if not ldconfig_pending and cache and notes.load(name) == {"cache": cache, "needed": sorted(needed)}:
        return CacheFaults()
    faults = CacheFaults(needed) if ldconfig_pending else _cache_faults(system, needed)
    if ldconfig_pending or (faults.missing and not _failure(context, name, faults).noted()):
        # Without -X, ldconfig would change the conflicting links: each would lead to the newest library of its SONAME.
        system.run("ldconfig", *(["-X"] if conflicts else []), timeout=60)
        cache = _identity(system)
        faults = _cache_faults(system, needed)
        if faults.missing:
            _failure(context, name, faults).save(missing=first_of(sorted(faults.missing), 1))
    system.remove(LDCONFIG_PENDING)
    if faults == CacheFaults():
        notes.save(name, {"cache": cache, "needed": sorted(needed)})
    return faults


def _failure(context: Context, name: str, faults: CacheFaults) -> Failure:
    """Return the note of a run of ldconfig that left libraries out of the cache, with all that the run depends on.

    While nothing of that has changed, ldconfig would leave the same libraries out again.
    """
    system, directory = context.system, LOADER_CONFIGURATION
    entries = system.entries(directory) if system.is_directory(directory) else ()
    files = (LOADER_MAIN, *(f"{directory}/{each}" for each in entries))
    configuration = {path: system.identity(path) for path in files if system.is_file(path)}
    # The content, because each ldconfig replaces the file.
    cache = system.digest(LOADER_CACHE) if system.is_file(LOADER_CACHE) else ""
    return Failure.of(context, f"{name}-failed", cache, sorted(faults.missing), configuration)


def _identity(system: System) -> list[int]:
    try:
        return [int(each) for each in system.identity(LOADER_CACHE)]
    except FileNotFoundError:
        return []


def _cache_faults(system: System, needed: frozenset[str]) -> CacheFaults:
    """Return the faults of the loader cache, according to `ldconfig -p`.

    Of several entries with the same name and ABI, the loader takes the first (search_cache in dl-cache.c).
    """
    if not needed or not system.exists(LOADER_CACHE):
        return CacheFaults(needed)
    first: dict[tuple[str, str], str] = {}
    listed: dict[str, tuple[str, str]] = {}
    for match in map(ENTRY.fullmatch, system.run("ldconfig", "-p").splitlines()):
        if match:
            first.setdefault((match["name"], match["abi"]), match["path"])
            listed.setdefault(match["path"], (match["name"], match["abi"]))
    # In a machine with a merged /usr, ldconfig may list a library below /lib.
    others = {path: path.removeprefix("/usr") for path in needed}
    others = {path: other for path, other in others.items() if _place(system, path) == _place(system, other)}
    keys = {path: listed.get(path) or listed.get(others.get(path, path)) for path in needed}
    taken = {path: first[key] for path, key in keys.items() if key}
    shadowed = {path: other for path, other in taken.items() if not _is_harmless(system, path, other)}
    return CacheFaults(frozenset(path for path, key in keys.items() if not key), shadowed)


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
