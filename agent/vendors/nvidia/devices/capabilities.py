"""Observes NVIDIA's capabilities (kernel-open/nvidia/nv-caps.c).

Whoever can open a capability's node has the capability. Nodes of destroyed MIG instances stay in /dev/nvidia-caps.
Only the entries in procfs show which capabilities exist.
"""

import contextlib
import re
from collections.abc import Iterator

from agent.model.digits import whole_number
from agent.system.deadlines import read_device_text, read_device_texts
from agent.system.files import System
from agent.system.seen import entries_if_present

CAPABILITIES = "/proc/driver/nvidia/capabilities"
MINOR_TABLES = ("/proc/driver/nvidia-caps/mig-minors", "/proc/driver/nvidia-caps/sys-minors")
"""Tables of the minors of all possible capabilities, with lines `name minor`. Every user may read them."""
MINOR = re.compile(r"^DeviceFileMinor:\s*([0-9]{1,9})\s*$", re.MULTILINE)
DEPTH = 6
"""How many levels of directories below CAPABILITIES are searched. Fewer would be enough: the path of the deepest entry,
gpu0/mig/gi1/ci0/access, has 5 parts."""


def observe_capabilities(system: System) -> dict[int, str]:
    """Return the existing capabilities by minor, as paths relative to CAPABILITIES. Raises OSError."""
    by_minor: dict[int, str] = {}
    table: dict[str, int] | None = None
    names = list(_walk(system, "", DEPTH))
    texts = read_device_texts(system, [f"{CAPABILITIES}/{name}" for name in names])
    for name, text in zip(names, texts, strict=True):
        match text:
            case FileNotFoundError() | NotADirectoryError():
                continue
            case PermissionError():
                # Only root may read mig/config and fabric-imex-mgmt, but the tables have their minors.
                table = _tables(system) if table is None else table
                minor = table.get(name.replace("mig/", "", 1))
            case OSError():
                raise text
            case _:
                found = MINOR.search(text)
                minor = int(found[1]) if found else None
        if minor is not None:
            by_minor[minor] = name
    return by_minor


def _walk(system: System, below: str, depth: int) -> Iterator[str]:
    """Yield the relative paths of all files. A file that is removed during the walk may be missing."""
    for name in entries_if_present(system, f"{CAPABILITIES}/{below}".rstrip("/")):
        path = f"{below}/{name}".lstrip("/")
        if not system.is_directory(f"{CAPABILITIES}/{path}"):
            yield path
        elif depth:
            yield from _walk(system, path, depth - 1)


def _tables(system: System) -> dict[str, int]:
    minors = {}
    for table in MINOR_TABLES:
        with contextlib.suppress(FileNotFoundError):
            for line in read_device_text(system, table).splitlines():
                name, _, digits = line.rpartition(" ")
                if (minor := whole_number(digits)) is not None:
                    minors[name] = minor
    return minors
