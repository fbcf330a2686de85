"""Libraries in directories that no loader cache lists: which architecture each is for, its ELF header says (elf(5))."""

import errno
import struct
from collections.abc import Iterable

from agent.facts import CacheEntry
from agent.system.files import System
from agent.system.looking import NOT_THERE, UNUSABLE
from agent.system.owners import Ways
from agent.vendors.nvidia.driver_files import LIBRARY

HEADER = struct.Struct("<4sBB10xHH")
"""Magic, class (1: 32 bits, 2: 64), byte order (1: little-endian), type and machine, as elf.h has them."""
LITTLE_ENDIAN = 1
ARCHITECTURES = {(1, 3): "i686", (2, 62): "x86_64", (2, 183): "aarch64"}
"""By class and machine: EM_386, EM_X86_64 (of class 1 that is x32), EM_AARCH64."""


def list_libraries(system: System, directories: Iterable[str], native: str, ways: Ways) -> tuple[CacheEntry, ...]:
    """NVIDIA's libraries as a loader cache would list them. Raises OSError where looking failed.

    Directories that `ways` does not permit are never listed: who owns one may put a million names into it.
    """
    found = []
    for directory in filter(ways.permits, dict.fromkeys(directories)):
        for name in _names(system, directory):
            path = f"{directory}/{name}"
            if LIBRARY.fullmatch(name) and ways.permits(directory, path):
                found.append(CacheEntry(name, _architecture(system, path, native), path))
    return tuple(found)


def _names(system: System, directory: str) -> tuple[str, ...]:
    try:
        return system.entries(directory)
    except OSError as error:
        if error.errno in NOT_THERE:
            return ()
        raise


def _architecture(system: System, path: str, native: str) -> str:
    """Empty for what is no library of ours; a link that leads nowhere counts as native, so that it is told of."""
    try:
        header = system.head(path, HEADER.size)
    except OSError as error:
        if error.errno in NOT_THERE | {errno.ELOOP}:
            return native
        if error.errno in UNUSABLE:
            return ""
        raise
    if len(header) < HEADER.size:
        return ""
    magic, bits, order, _, machine = HEADER.unpack(header)
    return ARCHITECTURES.get((bits, machine), "") if magic == b"\x7fELF" and order == LITTLE_ENDIAN else ""
