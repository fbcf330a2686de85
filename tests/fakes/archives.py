"""Tar archives as releases of crictl and the CNI plugins have, and hostile ones."""

import io
import tarfile


def entry(name: str, kind: bytes = tarfile.REGTYPE, mode: int = 0o755, **more: object) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.mode = kind, mode
    for key, value in more.items():
        setattr(found, key, value)
    return found


def packed(*entries: tarfile.TarInfo, content: bytes = b"a program", form: int = tarfile.GNU_FORMAT) -> bytes:
    """Return an archive; its regular files have the same content."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w", format=form) as archive:
        for each in entries:
            each.size = len(content) if each.isreg() else 0
            archive.addfile(each, io.BytesIO(content) if each.isreg() else None)
    return memory.getvalue()


def raw(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, *, padding: bytes = b"", **fields: bytes
) -> bytes:
    """Return a header and its content, with what tarfile would never write: `s100` are the bytes at position 100."""
    header = bytearray(entry(name, kind, size=len(content)).tobuf(tarfile.USTAR_FORMAT))
    for place, value in fields.items():
        start = int(place.removeprefix("s"))
        header[start : start + len(value)] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content + (padding + bytes(512))[: -len(content) % 512]


def record(key: str, value: str) -> bytes:
    """Return a record as a header of PAX has."""
    rest = f" {key}={value}\n".encode()
    length = next(number for number in range(1 << 20) if number == len(b"%d" % number) + len(rest))
    return b"%d" % length + rest
