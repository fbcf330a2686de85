"""Processes that have a device open, found by number in a synthetic /proc."""

import errno
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.system.deadlines import stuck
from agent.system.files import READ_LIMIT, System
from agent.system.process import host_runner
from agent.system.processes import find_holders
from tests.fakes.host import Host
from tests.fakes.processes import CONTAINER, MACHINE_GROUP, POD_GROUP, POD_UID, process, thread
from tests.fakes.waiting import wait_for

WANTED = {(195, 0): "/dev/nvidia0", (226, 128): "/dev/dri/renderD128"}


@pytest.fixture
def tree(host: Host) -> Path:
    """A tree with nodes of one GPU, of another, and of the first again at another path."""
    host.node("/dev/nvidia0", 195, 0)
    host.node("/dev/nvidia1", 195, 1)
    host.node("/dev/dri/renderD128", 226, 128)
    host.node("/run/containers/x/dev/accelerator", 195, 0)
    host.file("/usr/bin/python3")
    return Path(host.root)


def test_holders_are_found_by_number_wherever_the_node_is(host: Host, tree: Path) -> None:
    process(tree, 10, opened=("/dev/nvidia1", "/usr/bin/python3"))
    process(tree, 11, opened=("/run/containers/x/dev/accelerator", "/dev/dri/renderD128"))
    process(tree, 2, opened=("/dev/nvidia0",), command=b"nvidia-persiste")
    process(tree, 12, mapped="/dev/nvidia0")
    process(tree, 13, mapped="/dev/nvidia1")
    held = find_holders(host, WANTED)
    assert [(each.pid, each.paths) for each in held.holders] == [
        (2, ("/dev/nvidia0",)),
        (11, ("/dev/dri/renderD128", "/dev/nvidia0")),
        (12, ("/dev/nvidia0",)),
    ]
    assert held.holders[0].describe() == "PID 2 (nvidia-persiste): /dev/nvidia0"
    assert held.unseen == ()


def test_a_pods_process_is_named_with_machine_pod_and_container(host: Host, tree: Path) -> None:
    process(tree, 4242, opened=("/dev/nvidia0",), group=POD_GROUP, inner=(77, 1), command=b"train")
    (holder,) = find_holders(host, WANTED).holders
    assert (holder.machine, holder.inner_pids) == ("gpu-node", (77, 1))
    assert (holder.pod_uid, holder.container) == (POD_UID, CONTAINER)
    assert holder.describe() == (
        f"PID 4242 (train), machine gpu-node (PID 77 there), pod {POD_UID}, container {CONTAINER}: /dev/nvidia0"
    )
    assert holder.describe(pod="work/cuda").endswith("(PID 77 there), pod work/cuda: /dev/nvidia0")


@pytest.mark.parametrize(
    ("group", "uid", "container"),
    [
        (f"{MACHINE_GROUP}/kubepods/burstable/pod{POD_UID}/{CONTAINER}", POD_UID, CONTAINER),
        (f"{MACHINE_GROUP}/kubepods.slice/kubepods-pod{'0a' * 16}.slice/crio-{CONTAINER}.scope", "0a" * 16, CONTAINER),
        (f"{MACHINE_GROUP}/test.slice/cri-containerd-{CONTAINER}.scope", "", CONTAINER),
        (f"{MACHINE_GROUP}/system.slice/podman.service", "", ""),
        (f"{MACHINE_GROUP}/kubepods.slice/kubepods-podx.slice/cri-containerd-y.scope", "", ""),
    ],
)
def test_control_groups_of_every_driver_are_understood(
    host: Host, tree: Path, group: str, uid: str, container: str
) -> None:
    process(tree, 10, opened=("/dev/nvidia0",), group=group)
    (holder,) = find_holders(host, WANTED).holders
    assert (holder.machine, holder.pod_uid, holder.container) == ("gpu-node", uid, container)


def test_a_process_that_exits_meanwhile_has_nothing_open(host: Host, tree: Path) -> None:
    """The process, its descriptors and its mappings may disappear at any moment."""
    for pid in (10, 11, 12):
        process(tree, pid, opened=("/dev/nvidia0",), mapped="/dev/nvidia0")
    shutil.rmtree(tree / "proc/10")
    (tree / "proc/10").mkdir()
    shutil.rmtree(tree / "proc/11/task/11/fd")
    host.failing["/proc/11/task/11/maps"] = ProcessLookupError(errno.ESRCH, "No such process")
    host.failing["/proc/12/task/12/fd/1"] = FileNotFoundError(errno.ENOENT, "closed")
    (tree / "proc/12/map_files/1000-3000").unlink()
    held = find_holders(host, WANTED)
    assert (held.holders, held.unseen) == ((), ())


def test_a_process_that_cannot_be_inspected_may_have_it_open(host: Host, tree: Path) -> None:
    process(tree, 10, opened=("/dev/nvidia0",))
    process(tree, 11, opened=("/dev/nvidia0",))
    host.failing["/proc/10/task/10/fd"] = PermissionError(errno.EACCES, "Permission denied")
    held = find_holders(host, WANTED)
    assert held.unseen == ("cannot inspect PID 10: Permission denied",)
    assert [each.pid for each in held.holders] == [11]


def test_a_process_that_hangs_in_the_driver_delays_nobody(host: Host, tree: Path) -> None:
    """The process's open files are found nevertheless. A process that may only have mapped the device is reported."""
    end, lines = threading.Event(), host.lines

    def hang(path: str) -> Iterator[bytes]:
        if path in ("/proc/10/task/10/maps", "/proc/11/task/11/maps"):
            end.wait(60)
        return lines(path)

    # The kernel cannot list the mappings of a process that hangs in a driver.
    host.lines = hang  # type: ignore[method-assign]
    process(tree, 10, opened=("/dev/nvidia0",))
    process(tree, 11)
    process(tree, 12, mapped="/dev/nvidia0")
    held = find_holders(host, WANTED)
    assert [each.pid for each in held.holders] == [10, 12]
    assert held.unseen == ("cannot inspect PID 11: no answer within 1 s",)
    end.set()
    wait_for(lambda: not stuck())


@pytest.mark.parametrize(
    "separator", [b"\x0b", b"\x0c", b"\x1c", b"\x1d", b"\x1e", b"\xc2\x85", b"\xe2\x80\xa8", b"\r"]
)
def test_the_name_of_a_mapped_file_forges_no_line(host: Host, tree: Path, separator: bytes) -> None:
    """The kernel escapes a newline in the name, but no other character at which text is split into lines."""
    forged = b"/x" + separator + b"zz-zz rw-s 00000000 00:05 900 /dev/nvidia0"
    process(tree, 10, mapped="/usr/bin/python3", path=forged)
    process(tree, 11, mapped="/dev/nvidia0")
    held = find_holders(host, WANTED)
    assert ([each.pid for each in held.holders], held.unseen) == ([11], ())


def test_what_a_process_chooses_forges_nothing(host: Host, tree: Path) -> None:
    process(tree, 10)
    (tree / "proc/10/task/10/maps").write_bytes(b"zz-zz rw-s 00000000 00:05 900 /dev/nvidia0\n")
    group = f"{MACHINE_GROUP}/x\u20280::/user.slice"
    process(tree, 11, opened=("/dev/nvidia0",), group=group, command=b"\x1b[2J\xff\n\xe2\x80\xae")
    held = find_holders(host, WANTED)
    (holder,) = held.holders
    assert (holder.machine, holder.cgroup) == ("gpu-node", f"{MACHINE_GROUP}/x 0::/user.slice")
    assert holder.describe().isprintable()
    assert held.unseen == (
        "cannot inspect PID 10: a line of its mappings has an unknown format: "
        "b'zz-zz rw-s 00000000 00:05 900 /dev/nvidia0'",
    )


def test_mappings_of_any_length_are_read(host: Host, tree: Path) -> None:
    """With a limit, any pod could have a process that cannot be inspected."""
    process(tree, 10, mapped="/dev/nvidia0")
    maps = tree / "proc/10/task/10/maps"
    line = b"7f0000000000-7f0000001000 rw-p 00000000 08:02 173521 /" + b"x" * 4000 + b"\n"
    maps.write_bytes(line * (2 * READ_LIMIT // len(line)) + maps.read_bytes())
    held = find_holders(host, WANTED)
    assert ([each.pid for each in held.holders], held.unseen) == ([10], ())


def test_another_threads_descriptors_and_memory_count(host: Host, tree: Path) -> None:
    """A thread can unshare(CLONE_FILES), and an exited first thread has no descriptors and no memory."""
    process(tree, 10, opened=("/dev/nvidia1",))
    thread(tree, 10, 1010, opened=("/dev/nvidia0",))
    maps = process(tree, 11, mapped="/dev/nvidia0") / "task/11/maps"
    thread(tree, 11, 1011, maps=maps.read_bytes())
    maps.write_bytes(b"")
    (tree / "proc/1011").mkdir()
    (tree / "proc/11/map_files").rename(tree / "proc/1011/map_files")
    held = find_holders(host, WANTED)
    assert ([each.pid for each in held.holders], held.unseen) == ([10, 11], ())


ENDED_FIRST = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
def work():
    libc.unshare(0x400)  # CLONE_FILES
    os.open("/dev/full", os.O_RDONLY)
    print("open", flush=True)
    time.sleep(60)
threading.Thread(target=work).start()
libc.pthread_exit(None)
"""


def test_a_real_process_whose_first_thread_has_ended(tmp_path: Path) -> None:
    """This uses this kernel's /proc, and a device that everybody may open."""
    with subprocess.Popen([sys.executable, "-c", ENDED_FIRST], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout
            assert child.stdout.readline() == "open\n"
            held = find_holders(System(host_runner), {(1, 7): "/dev/full"})
        finally:
            child.kill()
    assert (child.pid, ("/dev/full",)) in [(each.pid, each.paths) for each in held.holders]
