"""Adds to a CDI spec what nvidia-ctk leaves out of a complete driver root. Pure.

It lists libraries of the native architecture that end in the driver's version, and a fixed set of names beside them
(`driver_files` has where). What is added has the form of its own entries, and the verdict judges it as it judges those.
"""

import posixpath
from collections.abc import Iterable, Mapping, Set
from itertools import groupby
from typing import Any

from agent.errors import DocumentError
from agent.handoff import GrantedFile, Request
from agent.vendors.cdi_document import items, object_of, objects, strings
from agent.vendors.nvidia import sockets
from agent.vendors.nvidia.cdi import NEEDED_LIBRARIES
from agent.vendors.nvidia.generate_command import HOOK

MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
"""Of nvidia-ctk's mounts (internal/discover/mounts.go)."""
HOOK_ENVIRONMENT = "NVIDIA_CTK_DEBUG=false"
INDIRECT = ("libGLX_nvidia.so.", "libGLX_indirect.so.0")
"""GLVND's name for indirect rendering; nvidia-ctk makes the link in the native directory (symlinks.go)."""
TRIPLET_32 = "i386-linux-gnu"
FEW = 3
"""Files of one directory that are named one by one."""


def with_additions(spec: object, request: Request, present: Set[str] = frozenset()) -> tuple[object, tuple[str, ...]]:
    """The spec, and what was added: paths of the driver root. A spec without its form is left to the verdict.

    `present` has the paths of daemons' sockets that are in the machine.
    """
    try:
        document = object_of(spec, "the spec")
        common = object_of(document.get("containerEdits", {}), "containerEdits")
        mounted = strings(common, "mounts", "hostPath")
        hooks = objects(common, "hooks")
        linked = {each.partition("::")[2] for hook in hooks for each in items(hook, "args") if isinstance(each, str)}
        known = {
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
        # Then nvidia-ctk has not found the driver at all, which nothing must hide: the verdict refuses that.
        return spec, ()
    files = [each for each in request.files if not each.link and _host_path(request, each) not in mounted]
    links = {path: target for path, target in _links(request).items() if path not in linked}
    mounts = [*objects(common, "mounts"), *(_mount(request, file) for file in files)]
    mounts += [each for each in sockets.mounts(request.sockets, present) if each["hostPath"] not in mounted]
    arguments = [argument for path, target in sorted(links.items()) for argument in ("--link", f"{target}::{path}")]
    hooks = _extended(hooks, "create-symlinks", arguments, first=True)
    folders = {f"/{posixpath.dirname(file.target)}" for file in files if _is_library(file)}
    arguments = [argument for folder in sorted(folders - known) for argument in ("--folder", folder)]
    hooks = _extended(hooks, "update-ldcache", arguments)
    added = document | {"containerEdits": common | environment | {"mounts": mounts, "hooks": hooks}}
    return added, tuple(file.target for file in files)


def in_words(added: Iterable[str]) -> str:
    """Directories with the number of files, where there are many."""
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
    """The edit `env` with what was asked for; none where nothing was."""
    asked = [f"{each.name}={each.value}" for each in request.environment]
    return {"env": [*present, *(each for each in asked if each not in present)]} if asked else {}


def _links(request: Request) -> dict[str, str]:
    """Every link of the driver root, and INDIRECT in each directory: target by path in containers."""
    links = {f"/{file.target}": file.link for file in request.files if file.link}
    library, link = INDIRECT
    for file in request.files:
        directory, name = posixpath.split(file.target)
        if name.startswith(library) and not file.link:
            links[f"/{directory}/{link}"] = name
    return links


def _is_library(file: GrantedFile) -> bool:
    """Found by the loader: not the X server's modules, and not VDPAU's drivers, which are loaded by their path."""
    directory, name = posixpath.split(file.target)
    return ".so" in name and posixpath.basename(posixpath.dirname(directory)) == "lib"


def _is_main(path: str, request: Request) -> bool:
    """Of the native architecture, which nvidia-ctk looks in alone."""
    names = {f"{library}.{request.driver_version}" for library in NEEDED_LIBRARIES}
    return posixpath.basename(path) in names and f"/{TRIPLET_32}/" not in path


def _kind(hook: Mapping[str, Any]) -> str:
    arguments = items(dict(hook), "args")
    return arguments[1] if len(arguments) > 1 and isinstance(arguments[1], str) else ""


def _extended(
    hooks: list[dict[str, Any]], kind: str, arguments: list[str], *, first: bool = False
) -> list[dict[str, Any]]:
    """With more arguments for the hook of that kind: a second one would be one more process in each container's start.

    `first`: where there is none yet, it comes before the others, as ldconfig has to see what it makes.
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
