"""Our own state on disk and the machine's: ownership record, manifests, driver roots, report file."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import DocumentError
from agent.facts import Absent, Broken, FileState, Library, StagedRoot
from agent.live import LiveSettings, render_live
from agent.manifest import render_manifest
from agent.observe.files import observe_files, read_owned
from agent.observe.machine import observe_machine
from agent.observe.staged import Staged, observe_staged
from agent.observe.units import Unit
from agent.ownership import parse_owned, render_owned
from agent.paths import (
    HOST_NVIDIA,
    MANIFESTS,
    OWNED,
    live_file,
    machine_files,
    nspawn_file,
    report_directory,
    set_device_allow,
)
from tests.recorded import Host

DIGEST = "0" * 64
REPORT = f"{report_directory('node')}/report.json"


@given(st.dictionaries(st.text("ab%: é\\", min_size=1).map("/etc/{}".format), st.just(DIGEST), max_size=5))
def test_ownership_record_is_read_back(files: dict[str, str]) -> None:
    assert parse_owned(render_owned(files)) == files


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"version": 2, "files": {}}',
        b'{"version": 1, "files": []}',
        render_owned({"etc/passwd": DIGEST}),
        render_owned({"/etc/../etc/passwd": DIGEST}),
        render_owned({"/etc/a\nb": DIGEST}),
        render_owned({"/etc/a": "short"}),
    ],
)
def test_a_record_that_is_not_ours_is_discarded_and_said(host: Host, data: bytes) -> None:
    with pytest.raises(DocumentError):
        parse_owned(data)
    host.file(OWNED, data)
    owned, problem = read_owned(host)
    assert owned == {}
    assert OWNED in problem


def test_a_directory_in_the_record_s_place_is_discarded_and_no_record_is_none(host: Host) -> None:
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
    assert files.keys() == {*machine_files("node"), set_device_allow("node"), nspawn_file("old")}


def stage(host: Host, index: int = 0) -> StagedRoot:
    """What apply leaves behind."""
    root = StagedRoot(
        index,
        "nvidia",
        "550.163.01",
        (
            Library("usr/lib/libcuda.so.550.163.01", "/real/libcuda.so.550.163.01", size=4, mtime_ns=7),
            Library("usr/lib/libcuda.so.1", "", link="libcuda.so.550.163.01"),
        ),
    )
    place = f"{HOST_NVIDIA}/{index}/usr/lib"
    host.file(f"{place}/libcuda.so.550.163.01", "ELF!")
    host.symlink(f"{place}/libcuda.so.1", "libcuda.so.550.163.01")
    identity = host.identity(f"{place}/libcuda.so.550.163.01")
    host.file(f"{MANIFESTS}/{index}.json", render_manifest(root, {root.files[0].target: identity}))
    return root


def test_a_whole_root_is_read_back(host: Host) -> None:
    first, second = stage(host, 0), stage(host, 10)
    assert observe_staged(host) == Staged((first, second), next_index=11, problems=())


def test_nothing_staged_is_no_problem(host: Host) -> None:
    assert observe_staged(host) == Staged((), next_index=0, problems=())


@pytest.mark.parametrize("change", ["content", "mode", "gone", "replaced", "link", "link gone"])
def test_a_changed_root_does_not_count(host: Host, tmp_path: Path, change: str) -> None:
    stage(host)
    library = tmp_path / f"host{HOST_NVIDIA}/0/usr/lib/libcuda.so.550.163.01"
    link = library.with_name("libcuda.so.1")
    match change:
        case "content":
            library.write_bytes(b"EVIL")
        case "mode":
            library.chmod(0o777)
        case "gone":
            library.unlink()
        case "replaced":
            other = library.with_name("other")
            other.write_bytes(b"ELF!")
            other.rename(library)
        case "link":
            link.unlink()
            link.symlink_to("/etc/passwd")
        case _:
            link.unlink()
    staged = observe_staged(host)
    assert (staged.roots, staged.next_index) == ((), 1)
    assert "missing or changed" in staged.problems[0]


@pytest.mark.parametrize("text", ["", "{}", '{"version": 2}', "[" * 100_000])
def test_a_broken_manifest_does_not_hold_up_the_others(host: Host, text: str) -> None:
    root = stage(host, 1)
    host.file(f"{MANIFESTS}/4.json", text)
    staged = observe_staged(host)
    assert (staged.roots, staged.next_index, len(staged.problems)) == ((root,), 5, 1)
    assert f"{MANIFESTS}/4.json" in staged.problems[0]


def test_a_manifest_that_lacks_a_copy_s_identity(host: Host) -> None:
    root = stage(host)
    host.file(f"{MANIFESTS}/0.json", render_manifest(root, {}))
    staged = observe_staged(host)
    assert staged.roots == ()
    assert "usr/lib/libcuda.so.550.163.01 is not in both" in staged.problems[0]


def test_a_root_without_a_manifest_takes_its_index(host: Host) -> None:
    host.make_directory(f"{HOST_NVIDIA}/0")
    host.make_directory(f"{HOST_NVIDIA}/1")
    assert observe_staged(host) == Staged((), next_index=2, problems=(), spoiled=(0, 1))


def test_a_directory_that_a_machine_planted_costs_no_index(host: Host) -> None:
    """Root in a machine can remount its bind writable: a huge number there must not use up the indices."""
    host.make_directory(f"{HOST_NVIDIA}/999999999")
    assert observe_staged(host) == Staged((), next_index=0, problems=())


def test_machine_without_anything(host: Host) -> None:
    facts = observe_machine("node", Unit("inactive"), host)
    assert (facts.unit_state, facts.live) == ("inactive", None)
    assert isinstance(facts.root, Absent)
    assert isinstance(facts.report, Absent)


def test_machine_that_reports(host: Host) -> None:
    host.make_directory("/var/lib/machines/node")
    live = LiveSettings(DIGEST, ("char-pts rw",), {"/dev/nvidia0": "195:0"})
    host.file(live_file("node"), render_live(live))
    host.file(REPORT, "{}")
    facts = observe_machine("node", Unit("active", needs_reload=True), host)
    assert (facts.root, facts.live, facts.report) == ("/var/lib/machines/node", live, b"{}")
    assert facts.unit_needs_reload
    # The file's modification time is years ago, but that is the writer's to choose.
    assert 0 <= facts.report_age < 60


def test_a_link_as_the_machine_s_root_is_not_followed(host: Host) -> None:
    host.make_directory("/srv/elsewhere")
    host.symlink("/var/lib/machines/node", "/srv/elsewhere")
    assert isinstance(observe_machine("node", Unit("inactive"), host).root, Broken)


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
    report = observe_machine("node", Unit("active"), host).report
    assert isinstance(report, Broken)
    assert "report.json" in report.why
