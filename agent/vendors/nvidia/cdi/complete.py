"""Adds to a CDI specification the files of a driver root that nvidia-ctk leaves out. Pure.

nvidia-ctk lists libraries of the native architecture whose names end in the driver's version, and a fixed set of other
files (those of `user_space/file_groups.py` with the source CTK). Added entries look like those of nvidia-ctk, and are
verified in the same way.
"""

import posixpath
from collections.abc import Iterable, Mapping, Set
from itertools import groupby
from typing import Any

from agent.model.errors import DocumentError
from agent.model.handoff import GrantedFile, Request
from agent.vendors.cdi.document import items, object_of, objects, strings
from agent.vendors.nvidia import sockets
from agent.vendors.nvidia.cdi.command import HOOK
from agent.vendors.nvidia.cdi.verify import NEEDED_LIBRARIES
from agent.vendors.nvidia.cdi.verify_edits import VOID_VARIABLE

MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
"""Options of nvidia-ctk's mounts (internal/discover/mounts.go)."""
HOOK_ENVIRONMENT = "NVIDIA_CTK_DEBUG=false"
INDIRECT = ("libGLX_nvidia.so.", "libGLX_indirect.so.0")
"""The start of a library's name, and the link by which GLVND finds that library for indirect rendering. nvidia-ctk
makes the link only in the native directory (symlinks.go)."""
TRIPLET_32 = "i386-linux-gnu"
FEW = 3
"""Up to this many files of one directory are named one by one; more are counted."""


def with_additions(spec: object, request: Request, present: Set[str] = frozenset()) -> tuple[object, tuple[str, ...]]:
    """Return the completed specification, and the paths of the added files below the driver root.

    A specification that is malformed, or lacks a main library, is returned as it is: `verify` refuses it.
    `present` has the paths of daemons' sockets that exist in the machine.
    """
    try:
        document = object_of(spec, "the specification")
        common = object_of(document.get("containerEdits", {}), "containerEdits")
        mounted = strings(common, "mounts", "hostPath")
        hooks = objects(common, "hooks")
        linked = {each.partition("::")[2] for hook in hooks for each in items(hook, "args") if isinstance(each, str)}
        ldcache_arguments = {
            each
            for hook in hooks
            if _kind(hook) == "update-ldcache"
            for each in items(hook, "args")
            if isinstance(each, str)
        }
        environment = _environment(items(common, "env"), request)
    except DocumentError:
        return spec, ()
    paths = (_host_path(request, each) for each in request.files)
    if not {path for path in paths if _is_main(path, request)} <= mounted:
        # nvidia-ctk did not find the driver. If the driver's files were added here, `verify` would not notice that.
        return spec, ()
    files = [each for each in request.files if not each.link and _host_path(request, each) not in mounted]
    links = {path: target for path, target in _links(request).items() if path not in linked}
    mounts = [*objects(common, "mounts"), *(_mount(request, file) for file in files)]
    mounts += [each for each in sockets.mounts(request.sockets, present) if each["hostPath"] not in mounted]
    arguments = [argument for path, target in sorted(links.items()) for argument in ("--link", f"{target}::{path}")]
    hooks = _extended(hooks, "create-symlinks", arguments, first=True)
    folders = {f"/{posixpath.dirname(file.target)}" for file in request.files if not file.link and _is_library(file)}
    arguments = [argument for folder in sorted(folders - ldcache_arguments) for argument in ("--folder", folder)]
    hooks = _extended(hooks, "update-ldcache", arguments)
    added = document | {"containerEdits": common | environment | {"mounts": mounts, "hooks": hooks}}
    return added, tuple(file.target for file in files)


def in_words(added: Iterable[str]) -> str:
    """Return the added files in words: their paths, or their number for a directory with more than FEW of them."""
    parts = []
    for directory, group in groupby(sorted(added, key=lambda path: (posixpath.dirname(path), path)), posixpath.dirname):
        paths = list(group)
        parts += [f"{directory}/ ({len(paths)} files)"] if len(paths) > FEW else paths
    return ", ".join(parts)


def _host_path(request: Request, file: GrantedFile) -> str:
    return f"{request.driver_root}/{file.target}"


def _mount(request: Request, file: GrantedFile) -> dict[str, Any]:
    return {
        "hostPath": _host_path(request, file),
        "containerPath": f"/{file.target}",
        "options": list(MOUNT_OPTIONS),
    }


def _environment(present: list[Any], request: Request) -> dict[str, Any]:
    """Return the key `env` with `present`, the requested variables and VOID_VARIABLE; nothing if `present` has them."""
    wanted = [*(f"{each.name}={each.value}" for each in request.environment), VOID_VARIABLE]
    missing = [each for each in wanted if each not in present]
    return {"env": [*present, *missing]} if missing else {}


def _links(request: Request) -> dict[str, str]:
    """Return the driver root's links, and a link next to each library that needs one for indirect rendering (INDIRECT).

    Maps each link's path in containers to its target.
    """
    links = {f"/{file.target}": file.link for file in request.files if file.link}
    library, link = INDIRECT
    for file in request.files:
        directory, name = posixpath.split(file.target)
        if name.startswith(library) and not file.link:
            links[f"/{directory}/{link}"] = name
    return links


def _is_library(file: GrantedFile) -> bool:
    """Return whether the dynamic loader must find the file. X servers' modules and VDPAU drivers are loaded by path."""
    directory, name = posixpath.split(file.target)
    return ".so" in name and posixpath.basename(posixpath.dirname(directory)) == "lib"


def _is_main(path: str, request: Request) -> bool:
    """Return whether the path is a main library of the native architecture. nvidia-ctk finds only native ones."""
    names = {f"{library}.{request.driver_version}" for library in NEEDED_LIBRARIES}
    return posixpath.basename(path) in names and f"/{TRIPLET_32}/" not in path


def _kind(hook: Mapping[str, Any]) -> str:
    arguments = items(dict(hook), "args")
    return arguments[1] if len(arguments) > 1 and isinstance(arguments[1], str) else ""


def _extended(
    hooks: list[dict[str, Any]], kind: str, arguments: list[str], *, first: bool = False
) -> list[dict[str, Any]]:
    """Return the hooks with the arguments added to the hook of that kind; if there is none, to a new hook of that kind.

    A second hook of the same kind would start one more process in each container. With `first`, a new hook comes before
    the others, because the links that it makes must exist before ldconfig runs.
    """
    if not arguments:
        return hooks
    for index, hook in enumerate(hooks):
        if _kind(hook) == kind:
            return [*hooks[:index], hook | {"args": [*items(hook, "args"), *arguments]}, *hooks[index + 1 :]]
    new = {
        "hookName": "createContainer",
        "path": HOOK,
        "args": [posixpath.basename(HOOK), kind, *arguments],
        "env": [HOOK_ENVIRONMENT],
    }
    return [new, *hooks] if first else [*hooks, new]
