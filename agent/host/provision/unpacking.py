"""Makes a root file system from an image: skopeo pulls it, umoci unpacks it.

Both work in `<root>.partial`. If they are interrupted, only that directory is left, and the next attempt removes it.
When the root file system is complete and on disk, a rename gives it its name.
"""

import contextlib
import gzip
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from agent.config.node import ImageSettings
from agent.host.provision.archives import DAMAGED, DESCRIPTION_LIMIT
from agent.host.provision.binaries import CHUNK
from agent.host.provision.image import MANIFEST_LIMIT, UNPACKED, access_options
from agent.host.provision.image_errors import explained
from agent.model.errors import AgentError, ApplyError, CommandError, DocumentError
from agent.model.json_document import get, objects, parse_object
from agent.model.node import NodeImage
from agent.model.paths import PARTIAL
from agent.system import opening
from agent.system.clearing import clear
from agent.system.files import System
from agent.system.root_writer import RootWriter

POLICY = "/etc/containers/policy.json"
INIT = ("/usr/lib/systemd/systemd", "/lib/systemd/systemd", "/sbin/init")
"""The programs that systemd-nspawn looks for. The first one that exists becomes the machine's init."""
PULL_LIMIT = 3600.0
UNPACK_LIMIT = 1800.0
SYNC_LIMIT = 1800.0
REMOVE_LIMIT = 300.0
"""Seconds that each of these four steps may take."""
RETRIES = "3"
"""How often skopeo retries after an error of the network: after 1, 2 and 4 seconds."""
MARGIN = 256 << 20
"""Bytes that must stay free on the file system."""
BLOCK = 4096
"""Bytes on disk that an entry of a layer takes in addition to its content: its inode, and its last block."""
WHITEOUT = ".wh."
"""Begins the name of an entry that removes the entry of this name, without the beginning, of an earlier layer."""
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
TICK = 1.0
"""Seconds between two progress messages."""

Progress = Callable[[str], None]
"""Takes a sentence for the user."""


def unpack(
    settings: ImageSettings, image: NodeImage, root: str, system: System, progress: Progress = lambda _: None
) -> None:
    """Make the directory `root` from an image that `inspect` has found. Raises AgentError, OSError.

    The directory must not exist yet. It appears only once it is complete.
    """
    partial = f"{root}{PARTIAL}"
    if system.exists(root):
        raise ApplyError(f"{root} exists already", "remove it, then run the command again")
    system.make_private(os.path.dirname(root))
    clear((partial,), system, REMOVE_LIMIT)
    system.make_private(partial)
    try:
        _check_space(image, partial, system)
        with _reporting_size(f"{partial}/image", image.size, system, progress):
            _pull(settings, image, partial, system)
        _check_layers(image, partial, system)
        progress(f"unpacking {image.name}")
        _unpack(image, partial, system)
        system.run_tool("sync", "--file-system", system.full_path(partial), timeout=SYNC_LIMIT)
        system.rename(f"{partial}/root", root)
    finally:
        # Free the disk space, which may be gigabytes: the next attempt or the node needs it.
        with contextlib.suppress(AgentError):
            clear((partial,), system, REMOVE_LIMIT)


def _check_space(image: NodeImage, partial: str, system: System) -> None:
    needed, free = image.size * (1 + UNPACKED) + MARGIN, system.free_bytes(partial)
    if free < needed:
        raise ApplyError(
            f"{os.path.dirname(partial)}: {image.name} needs {needed >> 20} MiB, but only {free >> 20} MiB are free",
            "free up space on that file system",
        )


def _pull(settings: ImageSettings, image: NodeImage, partial: str, system: System) -> None:
    policy = settings.signature_policy or (POLICY if system.is_file(POLICY) else "")
    # All layers become gzip layers, because umoci 0.4 does not know zstd. Layers that are already gzip stay unchanged.
    compression = ("--dest-compress-format", "gzip", "--dest-compress-level", "1")
    directory = system.full_path(partial)
    try:
        system.run_tool(
            "skopeo",
            *(("--policy", policy) if policy else ("--insecure-policy",)),
            *("--tmpdir", directory, "copy", "--quiet", "--retry-times", RETRIES),
            *access_options(settings, image.name, "src-", system),
            *compression,
            *(image.name, f"oci:{directory}/image:node"),
            timeout=PULL_LIMIT,
        )
    except CommandError as error:
        raise explained(error, image.name) from error


def _check_layers(image: NodeImage, partial: str, system: System) -> None:
    """Read all layers, and refuse what would fill the disk or lead out of the root file system. Raises ApplyError.

    What umoci writes is bounded by what is read here: it is at most the decompressed layers, because sparse files,
    whose holes umoci fills, are refused. A few hundred bytes may decompress to any number.
    """
    index = f"{partial}/image/index.json"
    (digest,) = objects(index, parse_object(index, system.read(index)), "manifests", _digest_of)
    manifest = parse_object(index, system.read(_blob(partial, digest), MANIFEST_LIMIT))
    free, inodes = system.free_bytes(partial) - MARGIN, system.free_files(partial) // 2
    until = time.monotonic() + UNPACK_LIMIT
    for layer, kind in objects(index, manifest, "layers", _layer_of):
        try:
            with opening.plain(system.full_path(_blob(partial, layer))) as file:
                # As umoci, do not look at the content: the same bytes may be a tar archive, and compressed.
                content = gzip.GzipFile(fileobj=file) if kind.endswith("+gzip") else file
                for name, size in _entries(cast(BinaryIO, content)):
                    free, inodes = free - BLOCK - size, inodes - 1
                    if why := _refusal(name, until):
                        raise ApplyError(f"{image.name}: layer {layer[:19]}: {why}", "use another image")
                    if free < 0 or inodes < 0:
                        raise ApplyError(
                            f"{image.name} unpacks to more bytes or files than the file system has room for",
                            "free up space on that file system, or use another image",
                        )
        except DAMAGED as error:
            raise ApplyError(
                f"{image.name}: layer {layer[:19]} is damaged or unusual: {error}", "use another image"
            ) from error


def _refusal(name: str, until: float) -> str:
    """Return why a layer is not unpacked because of the entry with this name, or nothing."""
    if time.monotonic() > until:
        return f"it took more than {UNPACK_LIMIT:.0f} s to read"
    if any(part.startswith(WHITEOUT) and part[len(WHITEOUT) :] in ("", ".", "..") for part in name.split("/")):
        return f"{name[:200]!a} would remove a directory outside of its own"
    return ""


def _entries(layer: BinaryIO) -> Iterator[tuple[str, int]]:
    """Yield each entry's name, and the size of its content. Raises one of DAMAGED.

    umoci and tarfile take some headers for different things, and then an entry's name or size, or where the next header
    is, differs. So what tools for images never write is refused here.
    """
    described: dict[bytes, bytes] = {}
    while any(block := layer.read(tarfile.BLOCKSIZE)):
        header = _header(block)
        if header.type in DESCRIPTIONS:
            if header.type in described or (described and tarfile.XHDTYPE in (header.type, *described)):
                raise tarfile.ReadError("more than one header gives the name of an entry")
            if header.size + sum(map(len, described.values())) > DESCRIPTION_LIMIT:
                raise tarfile.ReadError(f"more than {DESCRIPTION_LIMIT >> 10} KiB describe an entry")
            described[header.type] = b"".join(_content(layer, header.size))
            continue
        name, size = _name_and_size(header, described)
        described = {}
        yield name, size
        for _ in _content(layer, size):
            pass


def _header(block: bytes) -> tarfile.TarInfo:
    header = tarfile.TarInfo.frombuf(block, *ENCODING)
    if header.type == tarfile.GNUTYPE_SPARSE:
        raise tarfile.ReadError(f"{header.name[:200]!a} is a sparse file, which layers must not have")
    # The type is read from the block, because tarfile takes some files for directories.
    if block[156:157] not in (*DESCRIPTIONS, *KINDS):
        raise tarfile.ReadError(f"{header.name[:200]!a} has the type {block[156:157]!a}, which layers must not have")
    if not SIZE.fullmatch(block[124:136]) or block[508:] == STAR:
        raise tarfile.ReadError(f"the header of {header.name[:200]!a} has an unusual format")
    return header


def _name_and_size(header: tarfile.TarInfo, described: dict[bytes, bytes]) -> tuple[str, int]:
    """Return the name and the size of an entry with these headers before its own."""
    records = _records(described.get(tarfile.XHDTYPE, b""))
    long = described.get(tarfile.GNUTYPE_LONGNAME, b"").partition(b"\0")[0]
    name = (records.get(b"path") or long).decode(*ENCODING) or header.name
    size = records.get(b"size", b"%d" % header.size)
    if any(key.startswith(b"GNU.sparse.") for key in records):
        raise tarfile.ReadError(f"{name[:200]!a} is a sparse file, which layers must not have")
    if records.get(b"path") == b"" or not re.fullmatch(rb"[0-9]{1,19}", size):
        # umoci would take an empty name or size from elsewhere.
        raise tarfile.ReadError(f"{name[:200]!a} has an unusual path or size")
    return name, int(size) if header.type == tarfile.REGTYPE else 0


def _records(content: bytes) -> dict[bytes, bytes]:
    """Return what a header of PAX says (pax(1): pax Extended Header)."""
    found, start = {}, 0
    while start < len(content):
        length = re.compile(rb"([1-9][0-9]{0,5}) ").match(content, start)
        end = start + int(length[1]) if length else 0
        key, equals, value = content[length.end() if length else end : max(end - 1, 0)].partition(b"=")
        if not key or not equals or content[end - 1 : end] != b"\n":
            raise tarfile.ReadError("the description of an entry is malformed")
        found[key] = value
        start = end
    return found


def _content(layer: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield what follows a header, in parts, without its padding, which is read as well."""
    padding = -size % tarfile.BLOCKSIZE
    for length, wanted in ((size, True), (padding, False)):
        while length:
            if not (part := layer.read(min(length, CHUNK))):
                raise tarfile.ReadError("unexpected end of data")
            length -= len(part)
            if wanted:
                yield part


def _layer_of(where: str, document: dict[str, Any]) -> tuple[str, str]:
    return _digest_of(where, document), get(where, document, "mediaType", str)


def _digest_of(where: str, document: dict[str, Any]) -> str:
    digest = get(where, document, "digest", str)
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise DocumentError(f"{where}: digest is {digest[:100]!a}")
    return digest


def _blob(partial: str, digest: str) -> str:
    return f"{partial}/image/blobs/{digest.replace(':', '/')}"


def _unpack(image: NodeImage, partial: str, system: System) -> None:
    directory = system.full_path(partial)
    try:
        # Do not use `umoci unpack`, which reads all files again for digests that nobody needs.
        system.run_tool(
            "umoci", "raw", "unpack", "--image", f"{directory}/image:node", f"{directory}/root", timeout=UNPACK_LIMIT
        )
    except CommandError as error:
        raise explained(error, image.name) from error
    writer = RootWriter(f"{directory}/root")
    if not any(writer.is_program(path) for path in INIT):
        raise ApplyError(
            f"{image.name} has no init ({', '.join(INIT)}): it cannot boot as a machine",
            "use an image that containerfiles/ builds, or one with systemd",
        )


@contextlib.contextmanager
def _reporting_size(layout: str, size: int, system: System, progress: Progress) -> Iterator[None]:
    """Report how much of a layout is on disk, every TICK seconds until the block ends."""
    done = threading.Event()

    def watch() -> None:
        last = 0
        while not done.wait(TICK):
            if (now := _bytes(layout, system) >> 20) != last:
                progress(f"pulled {now} of {size >> 20} MiB")
                last = now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes(layout: str, system: System) -> int:
    """Return the size of the files in an OCI layout in bytes, including those that skopeo is still writing."""
    total = 0
    for directory in (layout, f"{layout}/blobs/sha256"):
        with contextlib.suppress(OSError):
            for name in system.entries(directory):
                # skopeo may rename a temporary file at any moment.
                with contextlib.suppress(OSError):
                    total += system.identity(f"{directory}/{name}").size
    return total
