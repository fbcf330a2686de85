"""Device nodes in the machine that are no longer granted."""

import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.machine.devices import FAILED_SEARCHES, WITHDRAWN, left_open_remark
from agent.machine.notes import OWNED_COPY, Context, Notes
from agent.machine.run import run
from agent.model.handoff import Request
from agent.model.paths import MACHINE_STATE, OWNED, spec_file
from agent.system.process import Completed
from tests.fakes.machine import DEVICES, GPUS, REQUEST, Machine, failing, nvidia_ctk, recorded_spec
from tests.fakes.pod_bundles import bundle, specification
from tests.fakes.processes import CONTAINER, POD_GROUP, process

LESS = REQUEST._replace(gpus=GPUS[:1], devices=tuple(each for each in DEVICES if each.path != "/dev/nvidia1"))
SPEC = spec_file("nvidia")
UMOUNT = ("umount", "--lazy", "/dev/nvidia1")


@pytest.fixture
def machine(machine: Machine) -> Machine:
    machine.mounts = [device.path for device in DEVICES]
    run(machine)
    machine.calls.clear()
    return machine


@pytest.mark.parametrize("mounts", [1, 2])
def test_a_node_that_is_no_longer_granted_is_removed(machine: Machine, mounts: int) -> None:
    """systemd before 255 mounts on top of existing mounts."""
    machine.mounts += ["/dev/nvidia1"] * (mounts - 1)
    machine.hand(LESS)
    assert machine.verdict("DevicesAllowed") == ("True", "Opened")
    assert machine.calls.count(UMOUNT) == mounts
    assert not machine.exists("/dev/nvidia1")
    assert machine.exists("/dev/nvidia0")


def test_a_failed_removal_is_reported_and_retried(machine: Machine) -> None:
    """A foreign file in the node's place stays."""
    machine.hand(LESS)
    working = machine.programs["umount"]
    machine.program("umount", lambda argv: Completed(32, b"", b"umount: permission denied"))
    assert machine.verdict("DevicesAllowed") == ("False", "NotWithdrawn")
    assert "permission denied" in machine.message("DevicesAllowed")
    machine.program("umount", working)
    assert machine.verdict("DevicesAllowed") == ("True", "Opened")
    assert not machine.exists("/dev/nvidia1")
    machine.put("/dev/nvidia1", "a file of somebody's own")
    run(machine)
    assert machine.read("/dev/nvidia1") == b"a file of somebody's own"


def withdrawn_early(machine: Machine) -> None:
    """Let nspawn bind all nodes, and the first handoff that a run reads grant one GPU; the generator lists nodes."""
    machine.remove_tree(MACHINE_STATE)
    for path in (OWNED, OWNED_COPY, SPEC):
        machine.remove(path)

    def listed(argv: tuple[str, ...]) -> Completed:
        spec = recorded_spec()
        gone = [] if machine.exists("/dev/nvidia1") else ["/dev/nvidia1"]
        devices = [each for each in spec["devices"] if not set(gone) & {node["path"] for node in nodes(each)}]
        spec["devices"] = devices if not gone else [*devices, {**spec["devices"][0], "name": "all"}]
        return nvidia_ctk(machine, argv, spec)

    machine.program("nvidia-ctk", listed)
    machine.hand(LESS, withdrawn=("/dev/nvidia1",))


def nodes(device: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = device["containerEdits"]["deviceNodes"]
    return found


@pytest.mark.parametrize("unwritable", ["", "/withdrawn.json", "/granted-nvidia.json"])
def test_a_gpu_that_was_withdrawn_before_the_first_run_is_removed(machine: Machine, unwritable: str) -> None:
    """If that cannot be noted, it costs no specification."""
    withdrawn_early(machine)

    def full(path: str) -> None:
        if unwritable and path.endswith(unwritable) and not machine.exists("/dev/nvidia1"):
            raise OSError(errno.ENOSPC, "No space left on device", path)

    machine.before_write = full
    assert machine.verdict("DevicesAllowed") == (("False", "NotWithdrawn") if unwritable else ("True", "Opened"))
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")
    assert not machine.exists("/dev/nvidia1")
    assert machine.exists("/dev/nvidia0")
    machine.before_write = lambda path: None
    run(machine)
    assert Notes(machine).load("granted-nvidia").keys() == {each.path for each in LESS.devices}


def test_a_node_that_the_host_binds_before_its_handoff_stays(machine: Machine, later: Callable[[float], None]) -> None:
    """In between, the host may stage a driver root for a minute. Runs withdrew the new GPU's nodes."""
    machine.remove_tree(MACHINE_STATE)
    machine.hand(LESS)
    for _ in range(2):
        run(machine)
        later(60)
    assert "/dev/nvidia1" in machine.mounts
    machine.hand(REQUEST)
    assert machine.verdict("DevicesAllowed") == ("True", "Opened")
    assert not [call for call in machine.calls if call[0] == "umount"]
    machine.remove_tree(MACHINE_STATE)
    machine.hand(LESS)
    for _ in range(4):
        run(machine)
        later(60)
    assert "/dev/nvidia1" not in machine.mounts, "the host has lost its record of it"


@pytest.mark.parametrize("vendor", ["nvidia", "intel", "nobody"])
def test_a_vendor_that_was_withdrawn_before_the_first_run_is_removed(machine: Machine, vendor: str) -> None:
    """The handoff does not name the vendor, or names an unknown one."""
    machine.remove_tree(MACHINE_STATE)
    machine.node("/dev/dri/renderD129", 226, 129)
    machine.mounts += ["/dev/dri/renderD129"]
    machine.node("/dev/kvm", 10, 232)
    machine.mounts += ["/dev/kvm"]
    withdrawn = tuple(path for path in machine.mounts if path != "/dev/kvm")
    machine.hand(*([] if vendor == "nobody" else [Request(vendor, (), ())]), withdrawn=withdrawn)
    run(machine)
    assert not [path for path in machine.mounts if path != "/dev/kvm"]
    assert machine.exists("/dev/kvm"), "somebody may have bound it by hand: no setting of ours is for nodes of GPUs"


@pytest.mark.parametrize("unreadable", [True, False])
def test_a_note_that_cannot_be_read_or_written_costs_no_report(machine: Machine, unreadable: bool) -> None:
    """An unreadable note is not an empty one."""
    machine.hand(LESS)
    if unreadable:
        machine.mounts.remove("/dev/nvidia1")
        machine.before_read = failing(errno.EIO, "/granted-nvidia.json")
    else:
        machine.before_write = failing(errno.ENOSPC, "/granted-nvidia.json")
    assert machine.verdict("DevicesAllowed") == ("False", "NotWithdrawn")
    assert ("No space left on device" in machine.message("DevicesAllowed")) is not unreadable
    assert machine.conditions()["LibrariesLinked"][0] == "True"
    machine.before_read = machine.before_write = lambda path: None
    assert machine.verdict("DevicesAllowed") == ("True", "Opened")
    assert not machine.exists("/dev/nvidia1"), "the empty file that the node was mounted on"


def test_the_mount_of_a_node_that_the_host_removed_is_unmounted(machine: Machine) -> None:
    """For example, nvidia-drm was reloaded with the same grant: the host binds its new node, on systemd 252 too."""
    machine.mounts.append("/dev/nvidia1")
    machine.removed += ["/dev/nvidia1"] * 2
    run(machine)
    assert [call for call in machine.calls if call[0] == "umount"] == [UMOUNT] * 2
    assert machine.conditions()["DevicesAllowed"] == ("False", "WrongNode")
    assert machine.exists("/dev/nvidia1"), "what systemd mounts on"
    machine.node("/dev/nvidia1", 195, 1)
    machine.mounts.append("/dev/nvidia1")
    machine.calls.clear()
    assert machine.verdict("DevicesAllowed") == ("True", "Opened")
    assert UMOUNT not in machine.calls


def test_a_node_below_a_removed_one_stays(machine: Machine) -> None:
    machine.mounts.append("/dev/nvidia1")
    machine.removed.append("/dev/nvidia1")
    run(machine)
    assert machine.calls.count(UMOUNT) == 1
    assert machine.conditions()["DevicesAllowed"] == ("True", "Opened")


def test_a_daemons_recreated_directory_is_unmounted(machine: Machine) -> None:
    directory = "/run/nvidia-persistenced"
    machine.make_directory(directory)
    machine.hand(REQUEST._replace(sockets=("persistenced",)))
    machine.mounts.append(directory)
    run(machine)
    assert ("umount", "--lazy", directory) not in machine.calls
    machine.removed.append(directory)
    run(machine)
    assert machine.calls.count(("umount", "--lazy", directory)) == 1


def test_a_removed_mount_that_stays_is_reported(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.removed.append("/dev/nvidia1")
    machine.program("umount", lambda argv: Completed(32, b"", b"umount: permission denied"))
    assert machine.verdict("DevicesAllowed") == ("False", "WrongNode")
    assert "cannot unmount /dev/nvidia1, which was removed on the host: umount" in capsys.readouterr().err


LEFT_OPEN = "; LeftOpen (no longer granted, but still open; PIDs are the machine's): "


def hold(machine: Machine, pid: int = 77, group: str = POD_GROUP.partition("payload")[2]) -> Path:
    """Add a process that has the node open by a path of its own, while the machine's is withdrawn."""
    number = next(each for each in DEVICES if each.path == "/dev/nvidia1")
    machine.node("/run/pod/dev/nvidia1", number.major, number.minor)
    return process(machine.tree, pid, opened=("/run/pod/dev/nvidia1",), group=group, inner=(1,))


def test_a_process_with_a_withdrawn_node_open_is_named_until_it_exits(machine: Machine) -> None:
    bundle(machine, CONTAINER, specification("work/cuda"))
    run(machine)
    directory = hold(machine)
    run(machine)
    assert "LeftOpen" not in machine.message("DevicesAllowed"), "what is granted may be open"
    machine.hand(LESS)
    for _ in range(2):
        assert machine.verdict("DevicesAllowed") == ("True", "Opened")
        assert machine.message("DevicesAllowed").endswith(f"{LEFT_OPEN}PID 77 (python3), pod work/cuda: /dev/nvidia1")
    shutil.rmtree(directory)
    run(machine)
    assert "LeftOpen" not in machine.message("DevicesAllowed")
    hold(machine, pid=78)
    run(machine)
    assert "LeftOpen" not in machine.message("DevicesAllowed"), "forgotten: no process is looked at any more"


def test_a_number_that_is_granted_again_belongs_to_another_gpu(machine: Machine) -> None:
    number = machine.nodes["/dev/nvidia1"]
    hold(machine)
    machine.hand(LESS)
    run(machine)
    assert LEFT_OPEN in machine.message("DevicesAllowed")
    machine.node("/dev/nvidia1", number.major, number.minor)
    machine.hand(REQUEST)
    run(machine)
    assert "LeftOpen" not in machine.message("DevicesAllowed")


def test_many_processes_are_counted(machine: Machine) -> None:
    for pid in range(30, 50):
        hold(machine, pid, group="/system.slice/x.service")
    machine.hand(LESS)
    run(machine)
    message = machine.message("DevicesAllowed")
    assert "PID 39 (python3): /dev/nvidia1 and 10 more" in message
    assert "PID 40" not in message


def refuse(directory: str, error: Exception) -> Callable[[str], None]:
    def listed(path: str) -> None:
        if path == directory:
            raise error

    return listed


def listings(machine: Machine, runs: int) -> list[str]:
    listed: list[str] = []
    refused = machine.before_list

    def note(path: str) -> None:
        listed.append(path)
        refused(path)

    machine.before_list = note
    for _ in range(runs):
        run(machine)
    machine.before_list = refused
    return [path for path in listed if path == "/proc"]


DENIED = PermissionError(errno.EACCES, "Permission denied")
CANNOT_TELL = "cannot tell which processes still have nodes open that are no longer granted: "


@pytest.mark.parametrize(
    ("directory", "error", "remark", "tries"),
    [
        # Some processes never can be inspected; runs of every minute must not go on trying forever.
        ("/proc/77/task/77/fd", DENIED, "; 1 process could not be inspected, and may still have nodes open", 1),
        ("/proc", ValueError("line 3 of maps"), f"{CANNOT_TELL}line 3 of maps", FAILED_SEARCHES),
        ("/proc", DENIED, f"{CANNOT_TELL}{DENIED}", FAILED_SEARCHES),
    ],
)
def test_a_failed_inspection_costs_no_report(
    machine: Machine, directory: str, error: Exception, remark: str, tries: int
) -> None:
    hold(machine)
    machine.hand(LESS)
    machine.before_list = refuse(directory, error)
    assert machine.verdict("DevicesAllowed") == ("True", "Opened")
    assert remark in machine.message("DevicesAllowed")
    assert len(listings(machine, tries + 1)) == tries - 1
    assert remark not in machine.message("DevicesAllowed")


def test_a_hanging_inspection_ends_at_its_limit(machine: Machine) -> None:
    end = threading.Event()
    machine.before_list = lambda path: None if path != "/proc" else (end.wait(60), None)[1]
    notes = Notes(machine)
    notes.save(WITHDRAWN, {"/dev/nvidia1": [195, 1]})
    with pytest.raises(TimeoutError):
        left_open_remark(Context.of(machine, machine.hand()), limit=0.1)
    assert notes.load(WITHDRAWN)
    end.set()


def test_the_service_may_inspect_every_process() -> None:
    """Pods' processes have other users, or capabilities that the service lacks."""
    unit = Path(__file__).parents[3] / "systemd/machine/unbounded-agent-gpu.service"
    (line,) = (each for each in unit.read_text().splitlines() if each.startswith("CapabilityBoundingSet="))
    # CAP_SYS_ADMIN is for the links in /proc/PID/map_files (proc_map_files_get_link in the kernel's fs/proc/base.c).
    assert {"CAP_SYS_PTRACE", "CAP_SYS_ADMIN"} <= set(line.partition("=")[2].split())
