"""Puts the programs of an archive into a root file system: crictl, and the standard CNI plugins.

The archives are those of the projects' releases: tar files compressed with gzip, with the programs at the top level.
Nothing is unpacked on the host. An archive determines only the contents of the programs, and the names of the CNI
plugins in their directory.
"""

import gzip
import hashlib
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, BinaryIO, Self, cast

from agent.host.provision.binaries import CHUNK, settings_of
from agent.model.errors import ApplyError
from agent.model.node import NodeBinary
from agent.system import opening
from agent.system.root_writer import RootWriter

NAME = re.compile(r"(?:\./)?([A-Za-z0-9][A-Za-z0-9._+-]{0,63})")
"""The name of an entry at the top level of an archive. It begins with `./` if tar packed a directory. Entries with any
other name are left out."""
UNPACKED_LIMIT = 1 << 30
"""Bytes of all entries together. The CNI plugins of 2026 have 90 million, crictl 40 million."""
ENTRIES_LIMIT = 1000
DESCRIPTION_LIMIT = 1 << 16
"""Bytes with which an archive may describe one entry: a long name, times and the like. They precede its content."""
BLOCK = 1 << 15
"""Bytes that are read at once."""
END = (tarfile.EOFHeaderError, tarfile.EmptyHeaderError)  # type: ignore[attr-defined]  # its stubs lack these
"""What tarfile raises at the end of an archive, with and without zeros."""
DAMAGED = (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, ArithmeticError, RecursionError, ValueError)
"""What tarfile and gzip raise for malformed archives."""


class _Metered:
    """An archive of which tarfile may read only `allowance` further bytes.

    Without a limit, tarfile would keep the whole description of an entry in memory, however long it is. `_entries` sets
    the allowance again for each entry.
    """

    def __init__(self, content: BinaryIO) -> None:
        self._content = content
        self.allowance = DESCRIPTION_LIMIT

    def read(self, size: int) -> bytes:
        self.allowance -= size
        if self.allowance < 0:
            raise tarfile.ReadError(f"more than {DESCRIPTION_LIMIT >> 10} KiB describe an entry")
        try:
            return self._content.read(size)
        except gzip.BadGzipFile as error:
            # BadGzipFile is an OSError, which RootWriter would report as a failure to write the program's file.
            raise tarfile.ReadError(str(error)) from error


class _Entry(tarfile.TarInfo):
    """An entry whose malformed header is an error. tarfile would take it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile_)
        except END:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error


def put_programs(binary: NodeBinary, path: str, writer: RootWriter) -> dict[str, tuple[str, int]]:
    """Write an archive's programs into the root file system. `path` is the archive's path on the host.

    Returns each program's digest and size, by its path in the root file system. Raises OSError if a file cannot be read
    or written; ApplyError if the archive is damaged or too large, or does not contain the programs.
    """
    found: dict[str, tuple[str, int]] = {}
    try:
        with opening.plain(path) as file, gzip.GzipFile(fileobj=file) as content:
            for name, program in _programs(cast(BinaryIO, content)):
                if binary.archive == "programs":
                    found |= _put(program, f"{binary.path}/{name}", writer)
                elif name == binary.name:
                    found |= _put(program, binary.path, writer)
    except DAMAGED as error:
        raise ApplyError(f"{binary.source}: not an archive that can be used: {error}", _hint(binary)) from error
    if not found:
        what = "no programs" if binary.archive == "programs" else f"no executable file {binary.name}"
        raise ApplyError(f"{binary.source} has {what} at its top level", _hint(binary))
    return found


def _programs(content: BinaryIO) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and the content of each program. The caller must read one content before it asks for the next."""
    size = 0
    for number, (archive, entry) in enumerate(_entries(content)):
        size += entry.size
        if size > UNPACKED_LIMIT or number >= ENTRIES_LIMIT:
            raise tarfile.ReadError(f"more than {UNPACKED_LIMIT >> 20} MiB, or more than {ENTRIES_LIMIT} entries")
        name = NAME.fullmatch(entry.name)
        program = archive.extractfile(entry) if name and entry.isreg() and entry.mode & 0o111 else None
        if name and program:
            yield name[1], program


def _entries(content: BinaryIO) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the entries of an archive that is not trusted, in bounded memory. Raises one of DAMAGED."""
    metered = _Metered(content)
    # In this mode, tarfile reads the archive once, from start to end, whatever its entries say.
    with tarfile.open(fileobj=cast(BinaryIO, metered), mode="r|", bufsize=BLOCK, tarinfo=_Entry) as archive:
        while entry := archive.next():
            # tarfile would keep all of them.
            archive.members.clear()  # type: ignore[attr-defined]  # its documentation does not mention it
            if entry.size < 0:
                raise tarfile.ReadError(f"the entry {entry.name!a} has a negative size")
            metered.allowance = entry.size + DESCRIPTION_LIMIT
            yield archive, entry


def _put(program: IO[bytes], path: str, writer: RootWriter) -> dict[str, tuple[str, int]]:
    digest, size = hashlib.sha256(), 0

    def chunks() -> Iterator[bytes]:
        nonlocal size
        while chunk := program.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
            yield chunk

    writer.stream(path, chunks(), 0o755)
    return {path: (digest.hexdigest(), size)}


def _hint(binary: NodeBinary) -> str:
    name = binary.name
    return f"use the archive that the project of {name} releases: correct {settings_of(binary)}, and sha256.{name}"
