"""Synthetic processes below a tree's /proc, in the form of proc(5). Nodes are those that the test's host has listed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

POD_UID = "0a1b2c3d-1111-2222-3333-444455556666"
CONTAINER = "9f" * 32
MACHINE_GROUP = "/machine.slice/systemd-nspawn@gpu-node.service/payload"
POD_GROUP = (
    f"{MACHINE_GROUP}/kubepods.slice/kubepods-besteffort.slice/"
    f"kubepods-besteffort-pod{POD_UID.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope"
)
MAPS = """\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/python3
{start:08x}-{end:08x} rw-s 00000000 00:05 {inode}      {path} (deleted)
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
) -> Path:
    """`opened`: what its descriptors lead to; `mapped`: a device; `inner`: its PIDs in the namespaces below."""
    files: Mapping[str, bytes] = {
        "comm": command + b"\n",
        "cgroup": f"0::{group}\n".encode(),
        "status": b"Name:\tx\nNSpid:\t" + "\t".join(str(each) for each in (pid, *inner)).encode() + b"\nThreads:\t1\n",
        "maps": MAPS.format(start=0x1000, end=0x3000, inode=900 + pid, path=mapped).encode() if mapped else b"",
    }
    directory = tree / "proc" / str(pid)
    (directory / "fd").mkdir(parents=True)
    (directory / "map_files").mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    for number, path in enumerate(("socket:[4711]", *opened)):
        (directory / "fd" / str(number)).symlink_to(path)
    if mapped:
        (directory / "map_files" / "1000-3000").symlink_to(mapped)
    return directory
