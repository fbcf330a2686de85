"""Finds the driver's files that are not libraries, by the names in `file_groups`."""

import json
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agent.model.facts import Library
from agent.system.files import NOT_FOUND, UNUSABLE, System
from agent.system.trust import file_fault, untrusted_component
from agent.vendors.nvidia.file_groups import (
    BINARIES,
    BINARY_DIRECTORIES,
    FIRMWARE_DIRECTORIES,
    FIRMWARE_PATH,
    GROUPS,
    RELEASE,
    Group,
)
from agent.vendors.nvidia.places import Place

VERSION = "{version}"
DATA = "data"
SCRIPT = b"#!"
"""How an executable script begins (execve(2))."""
STANDARD_DATA = ("/etc/", "/usr/local/share/", "/usr/share/")
"""Where loaders look for data. A place's own data directories have the same subdirectories."""


class Companions(Struct, frozen=True):
    """Files of one version of the driver that are not libraries."""

    files: tuple[Library, ...]
    not_installed: tuple[str, ...]
    """What every recent driver has, but this host does not have: names of groups of files, and nvidia-smi."""
    other_version: tuple[str, ...]
    """For groups that have no file of this version: the paths of their files of other versions."""
    problems: tuple[str, ...] = ()
    """Files that were left out, with the reason."""


def observe_companions(
    system: System, version: str, triplet: str, libraries: Sequence[str], place: Place, firmware: tuple[str, ...]
) -> Companions:
    """Return the companion files of this version in a place. Raises OSError if an observation failed.

    `libraries` has the directories of the driver's libraries, libcuda's first; `firmware` those where the kernel looks
    for firmware. All are below the place's root, which is the root of `system`.
    """
    on_host = {"libraries": tuple(libraries), "firmware": firmware, DATA: place.data}
    by_target: dict[str, Library] = {}
    found_groups: set[str] = set()
    # For each group without a usable file of this version: the paths of its files of any version.
    any_version: dict[str, tuple[str, ...]] = {}
    refused: dict[str, str] = {}

    def permitted(path: str) -> bool:
        fault = _fault(system, path, place)
        if fault:
            refused[path] = f"{path}: left out, because {fault}"
        return not fault

    for group in GROUPS:
        if group.needs and group.needs not in found_groups:
            continue
        target = group.target.format(version=version, triplet=triplet)
        files = _find(system, group, version, on_host, permitted)
        for name, real in files.items():
            by_target.setdefault(f"{target}/{name}", library(system, f"{target}/{name}", real))
        if files:
            found_groups.add(group.name)
        else:
            any_version[group.name] = tuple(_any_version(system, group, on_host))
    binaries, scripts = _binaries(system, (*place.binaries, *BINARY_DIRECTORIES), permitted)
    refused |= {path: f"{path}: left out, because it is a script, and not NVIDIA's program" for path in scripts}
    missing = [
        each.name
        for each in GROUPS
        if each.in_every_driver and each.name not in found_groups and not any_version[each.name]
    ]
    if not any(each.target == f"usr/bin/{BINARIES[0]}" for each in binaries):
        missing.append(BINARIES[0])
    # `any_version` also has the refused files of this version. Those are not files of another version.
    other_version = tuple(path for paths in any_version.values() for path in paths if path not in refused)
    return Companions((*by_target.values(), *binaries), tuple(missing), other_version, tuple(refused.values()))


def _fault(system: System, path: str, place: Place) -> str:
    """Return why a file must not be in a driver root, which all users in machines may read; empty if it may."""
    return (not place.configured and untrusted_component(system, path)) or file_fault(
        system, system.real_path(path), root_owned=not place.configured
    )


def library(system: System, target: str, real: str) -> Library:
    """Return the entry of a driver root for a file of the host. `real` is the file's real path."""
    identity = system.identity(real)
    return Library(target, real, size=identity.size, mtime_ns=identity.mtime_ns, executable=identity.executable)


def _find(
    system: System,
    group: Group,
    version: str,
    on_host: Mapping[str, tuple[str, ...]],
    permitted: Callable[[str], bool],
) -> dict[str, str]:
    """Return the real paths of a group's files, by name. Of several files with the same name, the first is used."""
    found: dict[str, str] = {}
    patterns = [pattern.replace(VERSION, version) for pattern in group.names]
    for directory in _directories(group, on_host):
        for name in _entries(system, directory.replace(VERSION, version)):
            path = f"{directory.replace(VERSION, version)}/{name}"
            wanted = name not in found and any(fnmatchcase(name, pattern) for pattern in patterns)
            if wanted and system.is_file(path) and permitted(path):
                found[name] = system.real_path(path)
    return found


def _any_version(system: System, group: Group, on_host: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the group's files that have any version in their own name or in their directory's, each path once.

    Called for a group that has no usable file of the driver's version.
    """
    seen: set[str] = set()
    for directory in _directories(group, on_host):
        parent, separator, _ = directory.partition(f"/{VERSION}")
        names = _entries(system, parent) if separator else ()
        directories = [f"{parent}/{name}" for name in names if name[:1].isdecimal()] if separator else [directory]
        for each in directories:
            for name in _entries(system, each):
                path = f"{each}/{name}"
                wanted = any(fnmatchcase(name, pattern.replace(VERSION, "[0-9]*")) for pattern in group.names)
                if wanted and (separator or any(VERSION in pattern for pattern in group.names)) and path not in seen:
                    seen.add(path)
                    yield path


def _directories(group: Group, on_host: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the directories where the group's files may be on this host, in the order of the search.

    The place's own data directories come first. `on_host` has these under the key DATA. Under the keys `libraries` and
    `firmware`, it has the directories that replace `{libraries}` and `{firmware}`.
    """
    relative = [
        each.removeprefix(base) for each in group.directories for base in STANDARD_DATA if each.startswith(base)
    ]
    yield from (f"{base}/{each}" for base in on_host[DATA] for each in dict.fromkeys(relative))
    for directory in group.directories:
        key = next((key for key in on_host if directory.startswith(f"{{{key}}}")), None)
        if key is None:
            yield directory
        else:
            yield from (each + directory.removeprefix(f"{{{key}}}") for each in on_host[key])


def _entries(system: System, directory: str) -> tuple[str, ...]:
    """Return the names in a directory, except those with unprintable characters; none if it is missing or unusable."""
    try:
        return tuple(name for name in system.entries(directory) if name.isprintable())
    except OSError as error:
        if error.errno in NOT_FOUND | UNUSABLE:
            return ()
        raise


def kernel_firmware(system: System) -> tuple[str, str]:
    """Return the running kernel's release, and the directory that it searches first for firmware (firmware_class.path).

    Each is empty if it is unknown or not set. Raises OSError.
    """
    return _line(system, RELEASE), _line(system, FIRMWARE_PATH)


def firmware_directories(release: str, path: str, place: Place, root: str) -> tuple[str, ...]:
    """Return where the kernel looks for firmware, as paths below the place's root. `root` is this root's real path."""
    standard = (each.format(release=release) for each in FIRMWARE_DIRECTORIES if release or "{release}" not in each)
    # A driver container makes the kernel search a directory of the container (nvidia-driver:
    # /run/nvidia/driver/lib/firmware).
    roots = (root, place.root.rstrip("/"))
    own = dict.fromkeys(path.removeprefix(each) for each in roots if path.startswith(f"{each}/"))
    return (*own, *standard)


def _line(system: System, path: str) -> str:
    try:
        return system.read_text(path).strip()
    except OSError as error:
        if error.errno in NOT_FOUND:
            return ""
        raise


def _binaries(
    system: System, directories: Sequence[str], permitted: Callable[[str], bool]
) -> tuple[list[Library], list[str]]:
    """Return, for each name in BINARIES, the first permitted program; if a name has none, return the name's scripts.

    NVIDIA's programs are ELF files. A script with such a name is not from NVIDIA, and runs a program that is elsewhere.
    The names contain no version, so files of several versions cannot be told apart.
    """
    found: list[Library] = []
    all_scripts: dict[str, None] = {}
    for name in BINARIES:
        # Scripts are collected by real path, so that each is listed once: /bin is usually a link to /usr/bin.
        scripts: dict[str, None] = {}
        for directory in directories:
            path = f"{directory}/{name}"
            if not (system.is_file(path) and system.identity(path).executable and permitted(path)):
                continue
            if system.head(path, len(SCRIPT)) == SCRIPT:
                scripts[system.real_path(path)] = None
                continue
            found.append(library(system, f"usr/bin/{name}", system.real_path(path)))
            break
        else:
            all_scripts |= scripts
    return found, list(all_scripts)


# Library paths in the files that loaders of Vulkan, EGL and OpenCL read: the host's paths are wrong in pods.
# NVIDIA's files name libraries without directories. RPM packages put /usr/lib64 before the names (negativo17,
# nvidia-driver.spec; RPM Fusion), and NixOS puts a directory in /nix/store before them. Each such path becomes the
# library's path in pods. It does not become a bare name, because a 64-bit program also reads the manifest of the 32-bit
# libraries. If that manifest had a bare name, the program would find the 64-bit library under this name, and would load
# the driver twice.

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
