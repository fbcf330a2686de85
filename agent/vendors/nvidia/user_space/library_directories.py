"""Lists libraries in directories that are in no loader cache, with the architecture in their ELF headers (elf(5))."""

import errno
import struct
from collections.abc import Iterable

from agent.model.facts import CacheEntry
from agent.system.errnos import NOT_FOUND, UNUSABLE
from agent.system.files import System
from agent.system.path_trust import PathTrust
from agent.vendors.nvidia.user_space.file_groups import LIBRARY

HEADER = struct.Struct("<4sBB10xHH")
"""An ELF file begins with magic, class (1: 32 bits, 2: 64), byte order (1: little-endian), type and machine (elf.h)."""
LITTLE_ENDIAN = 1
ARCHITECTURES = {(1, 3): "i686", (2, 62): "x86_64", (2, 183): "aarch64"}
"""Architectures by class and machine: EM_386, EM_X86_64 (of class 2; class 1 is x32), EM_AARCH64."""


def list_libraries(system: System, directories: Iterable[str], native: str, trust: PathTrust) -> tuple[CacheEntry, ...]:
    """Return NVIDIA's libraries as a loader cache would list them. Raises OSError if an observation failed.

    Directories that `trust` refuses are not read, because their owner could put a million names into them.
    """
    found = []
    for directory in filter(trust.permits, dict.fromkeys(directories)):
        for name in _names(system, directory):
            path = f"{directory}/{name}"
            if LIBRARY.fullmatch(name) and trust.permits(directory, path):
                found.append(CacheEntry(name, _architecture(system, path, native), path))
    return tuple(found)


def _names(system: System, directory: str) -> tuple[str, ...]:
    try:
        return system.entries(directory)
    except OSError as error:
        if error.errno in NOT_FOUND:
            return ()
        raise


def _architecture(system: System, path: str, native: str) -> str:
    """Return a library's architecture; empty if unknown. A dangling link gets `native`, so that a fault is reported."""
    try:
        header = system.head(path, HEADER.size)
    except OSError as error:
        if error.errno in NOT_FOUND | {errno.ELOOP}:
            return native
        if error.errno in UNUSABLE:
            return ""
        raise
    if len(header) < HEADER.size:
        return ""
    magic, bits, order, _, machine = HEADER.unpack(header)
    return ARCHITECTURES.get((bits, machine), "") if magic == b"\x7fELF" and order == LITTLE_ENDIAN else ""
