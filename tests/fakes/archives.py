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
