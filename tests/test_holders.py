"""Who has a device open: by number, on a synthetic /proc."""

import errno
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.holders import find_holders
from agent.system.deadlines import stuck
from tests.processes import CONTAINER, MACHINE_GROUP, POD_GROUP, POD_UID, process
from tests.recorded import Host

WANTED = {(195, 0): "/dev/nvidia0", (226, 128): "/dev/dri/renderD128"}


@pytest.fixture
def tree(host: Host) -> Path:
    """With nodes of one GPU, of another one, and of the first again at another path."""
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
    held = find_holders(host, WANTED)
    assert [(each.pid, each.paths) for each in held.holders] == [
        (2, ("/dev/nvidia0",)),
        (11, ("/dev/dri/renderD128", "/dev/nvidia0")),
    ]
    assert held.holders[0].describe() == "PID 2 (nvidia-persiste): /dev/nvidia0"
    assert held.unseen == ()


def test_a_mapping_counts_without_a_descriptor(host: Host, tree: Path) -> None:
    process(tree, 10, mapped="/dev/nvidia0")
    process(tree, 11, mapped="/dev/nvidia1")
    assert [each.pid for each in find_holders(host, WANTED).holders] == [10]


def test_a_pods_process_is_told_with_machine_pod_and_container(host: Host, tree: Path) -> None:
    process(tree, 4242, opened=("/dev/nvidia0",), group=POD_GROUP, inner=(77, 1), command=b"train")
    (holder,) = find_holders(host, WANTED).holders
    assert (holder.machine, holder.inner_pids, holder.pod_uid, holder.container) == (
        "gpu-node",
        (77, 1),
        POD_UID,
        CONTAINER,
    )
    assert holder.describe() == (
        f"PID 4242 (train), machine gpu-node (there PID 77), pod {POD_UID}, container {CONTAINER}: /dev/nvidia0"
    )
    assert holder.describe(pod="work/cuda").endswith("(there PID 77), pod work/cuda: /dev/nvidia0")


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


def test_a_hostile_name_reaches_no_terminal(host: Host, tree: Path) -> None:
    process(tree, 10, opened=("/dev/nvidia0",), command=b"\x1b[2J\xff\n\xe2\x80\xae")
    (holder,) = find_holders(host, WANTED).holders
    assert holder.describe().isprintable()


def test_a_process_that_ends_meanwhile_holds_nothing(host: Host, tree: Path) -> None:
    """It, its descriptors and its mappings go at any moment."""
    for pid in (10, 11, 12):
        process(tree, pid, opened=("/dev/nvidia0",), mapped="/dev/nvidia0")
    shutil.rmtree(tree / "proc/10/fd")
    host.failing["/proc/11/maps"] = ProcessLookupError(errno.ESRCH, "No such process")
    host.failing["/proc/12/fd/1"] = FileNotFoundError(errno.ENOENT, "closed")
    (tree / "proc/12/map_files/1000-3000").unlink()
    held = find_holders(host, WANTED)
    assert (held.holders, held.unseen) == ((), ())


def test_a_process_that_cannot_be_looked_at_may_hold_it(host: Host, tree: Path) -> None:
    process(tree, 10, opened=("/dev/nvidia0",))
    process(tree, 11, opened=("/dev/nvidia0",))
    host.failing["/proc/10/fd"] = PermissionError(errno.EACCES, "Permission denied")
    held = find_holders(host, WANTED)
    assert held
    assert held.unseen == ("PID 10 cannot be looked at: Permission denied",)
    assert [each.pid for each in held.holders] == [11]


@pytest.fixture
def end() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


class HangingHost(Host):
    """One process hangs in a driver, and the kernel cannot list its mappings."""

    end: threading.Event

    def read(self, path: str, limit: int = 4 << 20) -> bytes:
        if path == "/proc/10/maps":
            self.end.wait()
        return super().read(path, limit)


def test_a_process_that_hangs_in_the_driver_holds_up_nobody(tmp_path: Path, end: threading.Event) -> None:
    host = HangingHost(tmp_path)
    host.end = end
    host.node("/dev/nvidia0", 195, 0)
    process(tmp_path, 10, opened=("/dev/nvidia0",))
    process(tmp_path, 11, opened=("/dev/nvidia0",))
    held = find_holders(host, WANTED)
    assert [each.pid for each in held.holders] == [11]
    assert held.unseen == ("PID 10 cannot be looked at: no answer within 2 s",)
    end.set()
    while stuck():
        pass
