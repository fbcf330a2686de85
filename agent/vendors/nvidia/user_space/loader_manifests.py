"""Rewrites library paths in the files that loaders of Vulkan, EGL and OpenCL read: the host's paths are wrong in pods.

NVIDIA's files name libraries without directories. RPM packages put /usr/lib64 before the names (negativo17,
nvidia-driver.spec; RPM Fusion), and NixOS puts a directory in /nix/store before them. Each such path becomes the
library's path in pods. It does not become a bare name, because a 64-bit program also reads the manifest of the 32-bit
libraries. If that manifest had a bare name, the program would find the 64-bit library under this name, and would load
the driver twice.
"""

import json
import posixpath
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from agent.model.driver_root import Library
from agent.system.errnos import NOT_FOUND, UNUSABLE
from agent.system.files import System

KEY = "library_path"
"""The key with the library in manifests of Vulkan (LoaderDriverInterface.md), and of libglvnd's and NVIDIA's EGL."""
MANIFESTS = ("/icd.d/", "/implicit_layer.d/", "/explicit_layer.d/", "/egl_vendor.d/", "/egl_external_platform.d/")
VENDORS = "/OpenCL/vendors/"
"""Directory of OpenCL's files, which contain only the library's path (cl_khr_icd)."""
SIZE_LIMIT = 1 << 16


def with_pod_paths(
    system: System, companions: Iterable[Library], libraries: Iterable[Library]
) -> tuple[tuple[Library, ...], tuple[str, ...]]:
    """Return `companions`, and a problem for each path in them that leads to no library of the driver.

    A file in which paths have to change gets its new text. Raises OSError if an observation failed.
    """
    by_source = {each.source: each.target for each in libraries if each.source}
    targets = {each.target for each in libraries}
    problems: list[str] = []
    files = []
    for file in companions:

        def pod_path(value: str, file: Library = file) -> str:
            if "/" not in value:
                return value
            path = _pod_path(system, posixpath.join(posixpath.dirname(file.source), value), by_source, targets)
            if not path:
                problems.append(f"{file.source}: names {value!a}, which is not a library of this driver")
            return path or value

        text = _rewritten(system, file, pod_path)
        files.append(replace(file, text=text) if text else file)
    return tuple(files), tuple(problems)


def _pod_path(system: System, path: str, by_source: dict[str, str], targets: set[str]) -> str:
    """Return a library's path in pods; empty if the library is not the driver's.

    The path ends in the name that the manifest uses, if the driver root has a file or link of that name; otherwise it
    ends in the real file's name.
    """
    if not path.isprintable():
        # JSON can contain a null character or half a surrogate pair, for which system calls raise ValueError.
        return ""
    try:
        target = by_source.get(system.real_path(path), "")
    except OSError as error:
        if error.errno in NOT_FOUND | UNUSABLE:
            return ""
        raise
    named = posixpath.join(posixpath.dirname(target), posixpath.basename(path))
    return f"/{named if named in targets else target}" if target else ""


def _rewritten(system: System, file: Library, pod_path: Callable[[str], str]) -> str:
    """Return the new text of a loader's file; empty if the text stays as it is.

    The text stays as it is in two cases: no path in it has to change; or the file is malformed, too large, unreadable
    or not for a loader.
    """
    manifest = file.target.endswith(".json") and any(each in f"/{file.target}" for each in MANIFESTS)
    if not manifest and VENDORS not in f"/{file.target}":
        return ""
    try:
        with system.open_public(file.source) as reading:
            content = reading.read(SIZE_LIMIT + 1)
        if len(content) > SIZE_LIMIT:
            return ""
        text = content.decode()
        if not manifest:
            name = text.strip()
            return f"{new}\n" if (new := pod_path(name)) != name else ""
        document = json.loads(text)
        changed = _replaced(document, pod_path)
        return json.dumps(changed, indent=4) + "\n" if changed != document else ""
    except OSError as error:
        if error.errno in NOT_FOUND | UNUSABLE:
            return ""
        raise
    except (ValueError, RecursionError):
        return ""


def _replaced(value: Any, pod_path: Callable[[str], str]) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {
            key: pod_path(each) if key == KEY and isinstance(each, str) else _replaced(each, pod_path)
            for key, each in value.items()
        }
    return [_replaced(each, pod_path) for each in value] if isinstance(value, list) else value
