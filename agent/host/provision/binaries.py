"""Fetches a node's programs from a mirror or an offline bundle, and verifies them against the configured digests.

Verified files stay in a cache, named by their digests, so rebuilding a node does not fetch them again.
"""

import contextlib
import gzip
import hashlib
import http.client
import os
import re
import tarfile
import urllib.error
import zlib
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, Literal

from agent.config.settings import NodeSettings
from agent.model.errors import AgentError
from agent.model.node import Archive, NodeBinary
from agent.system import opening
from agent.system.deadlines import bounded
from agent.system.files import System, temporary_path
from agent.system.http import open_url

DIRECTORY = "/usr/local/bin"
"""The directory in the machine for all programs except the CNI plugins."""
POD_IMAGES_DIRECTORY = "/var/lib/unbounded-agent/pod-images"
"""The directory in the machine for archives of pods' images, until they are imported."""
CRICTL_RELEASE = "kubernetes-sigs/cri-tools/releases/download/v{version}/crictl-v{version}-linux-{architecture}.tar.gz"
CNI_PLUGINS_RELEASE = (
    "containernetworking/plugins/releases/download/v{version}/cni-plugins-linux-{architecture}-v{version}.tgz"
)
"""Paths of the projects' release archives on GitHub."""
CHUNK = 1 << 20
SILENCE_LIMIT = 30.0
"""Seconds for which a mirror may send nothing."""
CHECK_LIMIT = 60.0
"""Seconds for a mirror to say whether it has a program."""
FETCH_LIMIT = 1800.0
"""Seconds to fetch one program."""
SIZE_LIMIT = 1 << 30
"""Bytes of one program, so that a mirror cannot fill the disk before the digest is known. The kubelet of 2026 has 60
million."""
IMAGES_LIMIT = 64 << 30
"""Bytes of one archive of pods' images, which lies on the host already."""
MISSING = (403, 404, 410)
"""Status codes by which a server says that it has no such file, or lets nobody have it."""


def wanted_binaries(node: NodeSettings, architecture: str) -> tuple[NodeBinary, ...]:
    """Return the programs to put into a root file system. `architecture` is one of Go's names, such as amd64."""
    settings = node.binaries
    if settings is None:
        return ()
    kubernetes, github = settings.mirror.rstrip("/"), settings.github_mirror.rstrip("/")

    def wanted(name: str, digest: str) -> NodeBinary:
        path = f"{DIRECTORY}/{name}"
        archive: Archive = ""
        match name:
            case "crictl":
                release = CRICTL_RELEASE.format(version=settings.crictl_version, architecture=architecture)
                source, archive = f"{github}/{release}", "program"
            case "cni_plugins":
                release = CNI_PLUGINS_RELEASE.format(version=settings.cni_plugins_version, architecture=architecture)
                source, archive, path = f"{github}/{release}", "programs", node.containerd.cni_binaries
            case _:
                source = f"{kubernetes}/release/v{settings.version}/bin/linux/{architecture}/{name}"
        if settings.bundle:
            source = f"{settings.bundle}/{source.rpartition('/')[2]}"
        return NodeBinary(name, source, digest, path, archive)

    images = (
        NodeBinary(name, f"{settings.bundle}/{name}", digest, f"{POD_IMAGES_DIRECTORY}/{name}", "images")
        for name, digest in sorted(settings.pod_images.items())
    )
    return (*(wanted(*each) for each in sorted(settings.sha256.items())), *images)


def _settings_of(binary: NodeBinary) -> tuple[str, str]:
    """Return the names of the settings with the version and the mirror of a file, for hints."""
    version = f"binaries.{binary.name}_version" if binary.archive else "binaries.version"
    return version, "binaries.github_mirror" if binary.archive else "binaries.mirror"


def cached(binary: NodeBinary, directory: str) -> str:
    """Return where `fetch` puts a program."""
    return f"{directory}/{binary.sha256}"


def check_source(binary: NodeBinary, system: System) -> None:
    """Check that the mirror or the bundle has the program, even if the cache has it. Raises AgentError or OSError."""
    if "://" not in binary.source:
        if not system.is_file(binary.source):
            raise AgentError(f"{binary.source}: no such file", "put the file there, or correct binaries.bundle")
        return

    def ask() -> None:
        with _answer(binary, "HEAD"):
            pass

    # The DNS lookup has no time limit of its own.
    bounded(f"HEAD {binary.source}", ask, CHECK_LIMIT)


def fetch(binary: NodeBinary, directory: str, system: System, limit: float = FETCH_LIMIT) -> str:
    """Fetch a program, unless it is in the cache `directory`. Return its path there. Raises AgentError, OSError.

    A download may take `limit` seconds.
    """
    path, source = cached(binary, directory), binary.source
    # Whatever is in the cache and is not the program is replaced, even a directory or a huge file. An error of `_copy`
    # would wrongly blame the mirror.
    with contextlib.suppress(AgentError, OSError), opening.plain(system.full_path(path)) as file:
        if _copy(path, file, None, _limit(binary)) == binary.sha256:
            return path
    system.make_directory(directory)
    # Remove the temporary file of a killed attempt, and whatever is at the path itself, such as a damaged file.
    system.remove_temporary(path)
    system.remove_tree(path)
    temporary = temporary_path(path)
    try:
        with opening.new_file(system.full_path(temporary)) as file:
            if "://" in source:
                digest = _download(binary, file, limit)
            else:
                try:
                    reading = opening.plain(system.full_path(source))
                except OSError as error:
                    put = "put the file there, or correct binaries.bundle"
                    raise AgentError(f"{source}: {error.strerror}", put) from error
                with reading:
                    digest = _copy(source, reading, file, _limit(binary))
            file.flush()
            os.fsync(file.fileno())
        if digest != binary.sha256:
            check = f"check {' or '.join(_settings_of(binary))} and the digest against a source that you trust"
            raise AgentError(
                f"{source}: its SHA-256 digest is {digest}, not {binary.sha256} (sha256.{binary.name})",
                f"{check}; if they are right, do not use this file",
            )
        system.rename(temporary, path)
    finally:
        system.remove_temporary(path)
    return path


def _download(binary: NodeBinary, file: BinaryIO, limit: float) -> str:

    def download() -> str:
        with _answer(binary, "GET") as answer:
            digest = _copy(binary.source, answer, file, SIZE_LIMIT)
            # If the connection breaks, reading in chunks raises no error. `length` is the number of missing bytes.
            if answer.length:
                raise _unreachable(binary, f"the connection broke {answer.length} bytes before the end")
            return digest

    try:
        # A server that sends one byte from time to time never exceeds SILENCE_LIMIT, so the whole download has a limit.
        return bounded(f"GET {binary.source}", download, limit)
    except TimeoutError as error:
        raise _unreachable(binary, error.strerror or "not complete in time") from error


@contextlib.contextmanager
def _answer(binary: NodeBinary, method: Literal["GET", "HEAD"]) -> Iterator[http.client.HTTPResponse]:
    """Yield the server's response for the program's URL.

    Raises AgentError if the request fails, or if the connection fails while the caller reads the response.
    """
    try:
        with open_url(binary.source, SILENCE_LIMIT, method) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        error.close()
        hint = "wait, then run the command again; check the proxy (HTTPS_PROXY, NO_PROXY), or use binaries.bundle"
        if error.code in MISSING:
            hint = f"correct {' or '.join(_settings_of(binary))}, or use binaries.bundle"
        raise AgentError(f"{binary.source}: {error.code} {error.reason}", hint) from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise _unreachable(binary, str(getattr(error, "reason", error)) or type(error).__name__) from error


def _unreachable(binary: NodeBinary, why: str) -> AgentError:
    hint = (
        f"check the network to the mirror, the proxy (HTTPS_PROXY, NO_PROXY), and that this host accepts the mirror's "
        f"certificate (update-ca-certificates(8)); or set {_settings_of(binary)[1]} or binaries.bundle"
    )
    return AgentError(f"{binary.source}: {why}", hint)


def _limit(binary: NodeBinary) -> int:
    return IMAGES_LIMIT if binary.archive == "images" else SIZE_LIMIT


def _copy(what: str, source: BinaryIO | http.client.HTTPResponse, file: BinaryIO | None, limit: int) -> str:
    """Return the SHA-256 digest of the data in `source`. If `file` is given, also copy the data to it.

    Raises AgentError if there are more than `limit` bytes.
    """
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        size += len(chunk)
        if size > limit:
            more = f"{what} has more than {limit >> 20} MiB"
            raise AgentError(more, "check the mirror, or the files of binaries.bundle")
        digest.update(chunk)
        if file:
            file.write(chunk)
    return digest.hexdigest()


# Puts the programs of an archive into a root file system: crictl, and the standard CNI plugins.
#
# The archives are those of the projects' releases: tar files compressed with gzip, with the programs at the top level.
# Nothing is unpacked on the host. An archive determines only the contents of the programs, and the names of the CNI
# plugins in their directory.


NAME = re.compile(r"(?:\./)?([A-Za-z0-9][A-Za-z0-9._+-]{0,63})")
"""The name of an entry at the top level of an archive. It begins with `./` if tar packed a directory. Entries with any
other name are left out."""
UNPACKED_LIMIT = 1 << 30
"""Bytes of all entries together. The CNI plugins of 2026 have 90 million, crictl 40 million."""
ENTRIES_LIMIT = 1000
DESCRIPTION_LIMIT = 1 << 16
"""Bytes with which an archive may describe one entry: a long name, times and the like. They precede its content."""
ENCODING = ("utf-8", "surrogateescape")
DESCRIPTIONS = (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
"""The types of headers that describe the next entry."""
KINDS = (
    tarfile.REGTYPE,
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)
"""The types of entries. The archaic type of files is not among them: whether they are directories depends on which of
an entry's names a program looks at."""
SIZE = re.compile(rb" *[0-7]*[ \0]*|\x80.*", re.DOTALL)
"""The size in a header: with base 8, or a large one with base 256."""
STAR = b"tar\0"
"""Ends a header of the old format of star, which has other bytes in its name."""
DAMAGED = (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, ArithmeticError, RecursionError, ValueError)
"""What tarfile and gzip raise for malformed archives."""


def put_programs(binary: NodeBinary, path: str, root: System) -> dict[str, tuple[str, int]]:
    """Write a program, or an archive's programs, into the root file system. `path` is the file's path on the host.

    Returns each program's digest and size, by its path in the root file system: for a program by itself, the digest
    that it must have. Raises OSError if a file cannot be read
    or written; AgentError if the archive is damaged or too large, or does not contain the programs.
    """
    if binary.archive in ("", "images"):
        with opening.plain(path) as file:
            return {binary.path: (binary.sha256, _put(iter(partial(file.read, CHUNK), b""), binary.path, root)[1])}
    several, found, total = binary.archive == "programs", dict[str, tuple[str, int]](), 0
    settings = f"{' or '.join(_settings_of(binary))}, and sha256.{binary.name}"
    hint = f"use the archive that the project of {binary.name} releases: correct {settings}"
    try:
        with opening.plain(path) as file, gzip.GzipFile(fileobj=file) as unpacked:
            for number, (entry, size, header, content) in enumerate(entries(unpacked)):
                total += size
                if total > UNPACKED_LIMIT or number >= ENTRIES_LIMIT:
                    limits = f"{UNPACKED_LIMIT >> 20} MiB, or more than {ENTRIES_LIMIT} entries"
                    raise tarfile.ReadError(f"more than {limits}")
                name = NAME.fullmatch(entry)
                if name and header.isreg() and header.mode & 0o111 and (several or name[1] == binary.name):
                    target = f"{binary.path}/{name[1]}" if several else binary.path
                    found[target] = _put(content, target, root)
            # gzip's checksum of everything comes after tar's end marker, and is compared when it is read.
            while rest := unpacked.read(CHUNK):
                total += len(rest)
                if total > UNPACKED_LIMIT:
                    raise tarfile.ReadError(f"more than {UNPACKED_LIMIT >> 20} MiB")
    except DAMAGED as error:
        raise AgentError(f"{binary.source}: not an archive that can be used: {error}", hint) from error
    if not found:
        what = "no programs" if several else f"no executable file {binary.name}"
        raise AgentError(f"{binary.source} has {what} at its top level", hint)
    return found


def _put(program: Iterator[bytes], path: str, root: System) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0

    def chunks() -> Iterator[bytes]:
        nonlocal size
        for chunk in program:
            digest.update(chunk)
            size += len(chunk)
            yield chunk

    root.stream(path, chunks(), 0o755)
    return digest.hexdigest(), size


def entries(archive: BinaryIO | gzip.GzipFile) -> Iterator[tuple[str, int, tarfile.TarInfo, Iterator[bytes]]]:
    """Yield each entry's name, the size of its content, its header, and the content. Raises one of DAMAGED.

    umoci, which unpacks image layers, and tarfile take some headers for different things, and then an entry's name or
    size, or where the next header is, differs. So what tools for images never write is refused here.
    """
    described: dict[bytes, bytes] = {}
    while any(block := archive.read(tarfile.BLOCKSIZE)):
        header = _header(block)
        if header.type in DESCRIPTIONS:
            if header.type in described or (described and tarfile.XHDTYPE in (header.type, *described)):
                raise tarfile.ReadError("more than one header gives the name of an entry")
            if header.size + sum(map(len, described.values())) > DESCRIPTION_LIMIT:
                raise tarfile.ReadError(f"more than {DESCRIPTION_LIMIT >> 10} KiB describe an entry")
            described[header.type] = b"".join(_content(archive, header.size))
            continue
        name, size = _name_and_size(header, described)
        described = {}
        content = _content(archive, size)
        yield name, size, header, content
        for _ in content:
            pass


def _header(block: bytes) -> tarfile.TarInfo:
    header = tarfile.TarInfo.frombuf(block, *ENCODING)
    if header.type == tarfile.GNUTYPE_SPARSE:
        raise tarfile.ReadError(f"{header.name[:200]!a} is a sparse file, which archives must not have")
    # The type is read from the block, because tarfile takes some files for directories.
    if block[156:157] not in (*DESCRIPTIONS, *KINDS):
        raise tarfile.ReadError(f"{header.name[:200]!a} has the type {block[156:157]!a}, which archives must not have")
    if not SIZE.fullmatch(block[124:136]) or block[508:] == STAR:
        raise tarfile.ReadError(f"the header of {header.name[:200]!a} has an unusual format")
    return header


def _name_and_size(header: tarfile.TarInfo, described: dict[bytes, bytes]) -> tuple[str, int]:
    """Return the name and the size of an entry with these headers before its own."""
    # What a header of PAX says (pax(1): pax Extended Header).
    pax, records, start = described.get(tarfile.XHDTYPE, b""), dict[bytes, bytes](), 0
    while start < len(pax):
        length = re.compile(rb"([1-9][0-9]{0,5}) ").match(pax, start)
        end = start + int(length[1]) if length else 0
        key, equals, value = pax[length.end() if length else end : max(end - 1, 0)].partition(b"=")
        if not key or not equals or pax[end - 1 : end] != b"\n":
            raise tarfile.ReadError("the description of an entry is malformed")
        records[key] = value
        start = end
    long = described.get(tarfile.GNUTYPE_LONGNAME, b"").partition(b"\0")[0]
    name = (records.get(b"path") or long).decode(*ENCODING) or header.name
    size = records.get(b"size", b"%d" % header.size)
    if any(key.startswith(b"GNU.sparse.") for key in records):
        raise tarfile.ReadError(f"{name[:200]!a} is a sparse file, which archives must not have")
    if records.get(b"path") == b"" or not re.fullmatch(rb"[0-9]{1,19}", size):
        # umoci would take an empty name or size from elsewhere.
        raise tarfile.ReadError(f"{name[:200]!a} has an unusual path or size")
    return name, int(size) if header.type == tarfile.REGTYPE else 0


def _content(archive: BinaryIO | gzip.GzipFile, size: int) -> Iterator[bytes]:
    """Yield what follows a header, in parts, without its padding, which is read as well."""
    padding = -size % tarfile.BLOCKSIZE
    for length, wanted in ((size, True), (padding, False)):
        while length:
            if not (part := archive.read(min(length, CHUNK))):
                raise tarfile.ReadError("unexpected end of data")
            length -= len(part)
            if wanted:
                yield part
