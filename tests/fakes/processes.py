"""Synthetic processes below a tree's /proc, in the format of proc(5). Device nodes are those that the host lists."""

from collections.abc import Mapping, Sequence
from pathlib import Path

POD_UID = "0a1b2c3d-1111-2222-3333-444455556666"
CONTAINER = "9f" * 32
MACHINE_GROUP = "/machine.slice/systemd-nspawn@gpu-node.service/payload"
POD_GROUP = (
    f"{MACHINE_GROUP}/kubepods.slice/kubepods-besteffort.slice/"
    f"kubepods-besteffort-pod{POD_UID.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope"
)
MAPS = b"""\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/python3
%(start)08x-%(end)08x rw-s 00000000 00:05 %(inode)d      %(path)s (deleted)
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0   [stack]
"""


def process(
    tree: Path,
    pid: int,
    *,
    opened: Sequence[str] = (),
    mapped: str = "",
    command: bytes = b"python3",
    group: str = "/user.slice",
    inner: Sequence[int] = (),
    path: bytes = b"",
) -> Path:
    """Make a process. `opened`: targets of its descriptors; `mapped`: a device; `inner`: its PIDs in inner namespaces.

    `path`: the mapped device's path in the process's mappings, as bytes.
    """
    files: Mapping[str, bytes] = {
        "comm": command + b"\n",
        "cgroup": f"0::{group}\n".encode(),
        "status": b"Name:\tx\nNSpid:\t" + "\t".join(str(each) for each in (pid, *inner)).encode() + b"\nThreads:\t1\n",
    }
    directory = tree / "proc" / str(pid)
    (directory / "map_files").mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    maps = MAPS % {b"start": 0x1000, b"end": 0x3000, b"inode": 900, b"path": path or mapped.encode()}
    thread(tree, pid, pid, opened=opened, maps=maps if mapped else b"")
    if mapped:
        (directory / "map_files" / "1000-3000").symlink_to(mapped)
    return directory


def thread(tree: Path, pid: int, number: int, *, opened: Sequence[str] = (), maps: bytes = b"") -> Path:
    """Make a thread; the first one has the process's number. An exited thread has no descriptors or mappings."""
    directory = tree / "proc" / str(pid) / "task" / str(number)
    (directory / "fd").mkdir(parents=True)
    (directory / "maps").write_bytes(maps)
    for descriptor, target in enumerate(("socket:[4711]", *opened)):
        (directory / "fd" / str(descriptor)).symlink_to(target)
    return directory
