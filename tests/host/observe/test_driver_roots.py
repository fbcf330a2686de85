"""Our own state on disk, and the machine's: ownership record, manifests, driver roots, report file."""

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.host.observe.driver_roots import INDICES, Staged, observe_staged
from agent.host.observe.host import observe_files, read_owned
from agent.host.observe.machine import Unit, observe_machine
from agent.host.state.records import OWNED_FILES, Owned, render_manifest
from agent.model.errors import DocumentError
from agent.model.facts import (
    FIXED_FORM,
    Absent,
    Broken,
    DeviceAllow,
    FileState,
    Library,
    LiveSettings,
    StagedRoot,
    render_live,
)
from agent.model.paths import (
    HOST_NVIDIA,
    MANIFESTS,
    OWNED,
    REMEMBERED_GPUS,
    TREES,
    device_allow_drop_in,
    live_file,
    machine_files,
    nspawn_file,
    report_directory,
)
from agent.system.files import MOUNTS
from agent.system.journal import Ages
from tests.fakes.host import Host

DIGEST = "0" * 64
REPORT = f"{report_directory('node')}/report.json"


@given(st.dictionaries(st.text("ab%: é\\", min_size=1).map("/etc/{}".format), st.just(DIGEST), max_size=5))
def test_ownership_record_is_read_back(files: dict[str, str]) -> None:
    assert OWNED_FILES.parse(OWNED, OWNED_FILES.render(Owned(files))) == Owned(files)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"version": 2, "files": {}}',
        b'{"version": 1, "files": []}',
        OWNED_FILES.render(Owned({"etc/passwd": DIGEST})),
        OWNED_FILES.render(Owned({"/etc/../etc/passwd": DIGEST})),
        OWNED_FILES.render(Owned({"/etc/a\nb": DIGEST})),
        OWNED_FILES.render(Owned({"/etc/a": "short"})),
    ],
)
def test_a_record_of_unknown_format_is_discarded_and_reported(host: Host, data: bytes) -> None:
    with pytest.raises(DocumentError):
        OWNED_FILES.parse(OWNED, data)
    host.file(OWNED, data)
    owned, problem = read_owned(host)
    assert owned == {}
    assert OWNED in problem


def test_a_directory_in_the_records_place_is_discarded(host: Host) -> None:
    assert read_owned(host) == ({}, "")
    host.make_directory(OWNED)
    owned, problem = read_owned(host)
    assert owned == {}
    assert OWNED in problem


def test_files_of_the_goal_and_of_the_record(host: Host) -> None:
    host.file(nspawn_file("node"), "[Exec]\n")
    owned = {nspawn_file("old"): DIGEST, nspawn_file("node"): hashlib.sha256(b"[Exec]\n").hexdigest()}
    files = observe_files(["node"], owned, host)
    assert files[nspawn_file("node")] == FileState(b"[Exec]\n", owned=True)
    assert isinstance(files[nspawn_file("old")].content, Absent)
    assert files[nspawn_file("old")].owned
    assert files.keys() == {
        *machine_files("node"),
        *REMEMBERED_GPUS,
        device_allow_drop_in("node"),
        nspawn_file("old"),
    }


def stage(host: Host, index: int = 0, place: str = TREES) -> StagedRoot:
    """Make what staging leaves behind, except the mount."""
    root = StagedRoot(
        index,
        "nvidia",
        "550.163.01",
        (
            Library("usr/lib/libcuda.so.550.163.01", "/real/libcuda.so.550.163.01", size=4, mtime_ns=7),
            Library("usr/lib/libcuda.so.1", "", link="libcuda.so.550.163.01"),
        ),
    )
    host.make_directory(f"{place}/{index}")
    host.file(f"{MANIFESTS}/{index}.json", render_manifest(root))
    return root


def test_complete_roots_are_read_back_with_their_visibility(host: Host) -> None:
    first, second = stage(host, 0), stage(host, 10)
    host.bus.mounts.mounted = {"parent": HOST_NVIDIA, "root": f"{HOST_NVIDIA}/0"}
    staged = observe_staged(host)
    assert staged == Staged((first, second), next_index=11, mounted=True)
    assert [root.hidden for root in staged.roots] == [False, True]


def test_a_mount_of_another_kind_is_not_ours(host: Host) -> None:
    stage(host)
    host.bus.mounts.mounted = {"parent": HOST_NVIDIA, "root": f"{HOST_NVIDIA}/0"}
    lines = [line.replace(b"overlay", b"tmpfs") for line in host.bus.mounts.lines()]
    host.bus.mounts.lines = lambda: iter(lines)  # type: ignore[method-assign]
    staged = observe_staged(host)
    assert (staged.mounted, [root.hidden for root in staged.roots]) == (False, [True])


def test_directories_that_only_root_may_list_do_not_prevent_a_plan(host: Host) -> None:
    for place in ("staging", "removed"):
        path = f"/var/lib/unbounded-agent/{place}"
        host.failing[path] = PermissionError(errno.EACCES, "Permission denied", path)
    assert not observe_staged(host).unseen


def test_without_driver_roots_there_is_no_problem(host: Host) -> None:
    assert observe_staged(host) == Staged((), next_index=0)


def test_a_root_without_its_files_does_not_count(host: Host) -> None:
    stage(host)
    host.remove_tree(f"{TREES}/0")
    staged = observe_staged(host)
    assert (staged.roots, staged.corrupt, staged.next_index) == ((), (0,), 1)
    assert staged.problems == (
        f"{MANIFESTS}/0.json: the files of driver root 0 are missing (the driver root will be staged again)",
    )


@pytest.mark.parametrize("text", ["", "{}", '{"version": 3}', "[" * 100_000])
def test_a_broken_manifest_does_not_hold_up_the_others(host: Host, text: str) -> None:
    root = stage(host, 1)
    host.file(f"{MANIFESTS}/4.json", text)
    staged = observe_staged(host)
    assert (staged.roots, staged.next_index, staged.corrupt, len(staged.problems)) == ((root,), 5, (4,), 1)
    assert f"{MANIFESTS}/4.json" in staged.problems[0]


@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo, lambda place: os.symlink("/nowhere", place)])
def test_a_directory_or_link_in_a_manifests_place_damages_only_that_one(host: Host, put: Callable[[str], None]) -> None:
    """This once counted as a failed observation, which made the whole host unknown forever."""
    root = stage(host, 1)
    put(host.full_path(MANIFESTS) + "/0.json")
    staged = observe_staged(host)
    assert (staged.roots, staged.corrupt, staged.unseen, len(staged.problems)) == ((root,), (0,), "", 1)


def test_files_without_a_manifest_take_their_index(host: Host) -> None:
    host.make_directory(f"{TREES}/0")
    host.make_directory(f"{TREES}/1")
    assert observe_staged(host) == Staged((), next_index=2, corrupt=(0, 1))


@pytest.mark.parametrize("path", [TREES, MANIFESTS, f"{MANIFESTS}/0.json", MOUNTS])
def test_nothing_is_called_corrupt_unless_everything_can_be_read(host: Host, path: str) -> None:
    stage(host)
    host.failing[path] = OSError(errno.EIO, "Input/output error", path)
    staged = observe_staged(host)
    assert (staged.roots, staged.corrupt) == ((), ())
    assert staged.unseen.startswith(path)


def test_a_plain_root_is_recognised_by_its_directory_and_no_link_is_followed(host: Host) -> None:
    """Root in a machine can put anything there: a link of any length, or into a file system that never answers."""
    root = stage(host, 0, HOST_NVIDIA)
    stage(host, 1, "/elsewhere")
    stage(host, 2, "/elsewhere")
    host.symlink(f"{HOST_NVIDIA}/1", "/elsewhere/1")
    host.symlink(f"{HOST_NVIDIA}/2", "x" * 300)
    staged = observe_staged(host)
    assert (staged.roots, staged.plain, staged.corrupt) == ((root,), (0,), (1, 2))
    assert not root.hidden


def test_the_next_index_skips_what_a_machine_puts_in_the_way(host: Host) -> None:
    stage(host, 0, HOST_NVIDIA)
    host.make_directory(f"{HOST_NVIDIA}/1")
    host.symlink(f"{HOST_NVIDIA}/2", "x" * 300)
    host.make_directory(f"{HOST_NVIDIA}/999999999")
    assert observe_staged(host).next_index == 3


def test_indices_are_reused_when_mount_points_run_out(host: Host) -> None:
    stage(host, 0)
    stage(host, INDICES - 1)
    assert observe_staged(host).next_index == 1


def test_the_last_two_mount_points_are_used(host: Host) -> None:
    stage(host, INDICES - 3)
    assert observe_staged(host).next_index == INDICES - 2


def test_a_machine_without_anything(host: Host) -> None:
    facts = observe_machine("node", Unit("inactive"), host, Ages())
    assert (facts.unit_state, facts.live) == ("inactive", None)
    assert isinstance(facts.root, Absent)
    assert isinstance(facts.report, Absent)


def test_a_machine_that_reports(host: Host) -> None:
    host.make_directory("/var/lib/machines/node")
    live = LiveSettings(FIXED_FORM + DIGEST, (DeviceAllow("char-pts", "rw"),), {"/dev/nvidia0": "195:0"})
    host.file(live_file("node"), render_live(live))
    host.file(REPORT, "{}")
    facts = observe_machine("node", Unit("active", needs_reload=True), host, Ages())
    assert (facts.root, facts.live) == ("/var/lib/machines/node", live)
    assert isinstance(facts.report, Broken)
    assert "report.json: key version is missing" in facts.report.why
    assert facts.unit_needs_reload
    # The file's modification time is years ago, but the writer chooses that.
    assert 0 <= facts.report_age < 60


def test_a_link_as_the_machines_root_is_not_followed(host: Host) -> None:
    host.make_directory("/srv/elsewhere")
    host.symlink("/var/lib/machines/node", "/srv/elsewhere")
    assert isinstance(observe_machine("node", Unit("inactive"), host, Ages()).root, Broken)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "large"])
def test_a_hostile_report_file_is_refused(host: Host, tmp_path: Path, kind: str) -> None:
    place = tmp_path / f"host{REPORT}"
    place.parent.mkdir(parents=True)
    match kind:
        case "link":
            host.file("/etc/shadow", "secret")
            place.symlink_to("/etc/shadow")
        case "fifo":
            os.mkfifo(place)
        case "directory":
            place.mkdir()
        case _:
            host.file(REPORT, size=2 << 20)
    report = observe_machine("node", Unit("active"), host, Ages()).report
    assert isinstance(report, Broken)
    assert "report.json" in report.why
