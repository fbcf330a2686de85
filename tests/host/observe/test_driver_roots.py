"""Driver roots and their manifests on disk."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.host.observe.driver_roots import INDICES, observe_staged
from agent.host.state.records import MANIFEST
from agent.model.facts import StagedFacts, StagedRoot
from agent.model.paths import HOST_NVIDIA, MANIFESTS, TREES
from agent.system.files import MOUNTS
from tests.fakes.facts import library
from tests.fakes.host import Host


def stage(host: Host, index: int = 0, place: str = TREES) -> StagedRoot:
    """Make what staging leaves behind, except the mount."""
    root = StagedRoot(
        index,
        "nvidia",
        "550.163.01",
        (
            library("usr/lib/libcuda.so.550.163.01", "/real/libcuda.so.550.163.01", size=4, mtime_ns=7),
            library("usr/lib/libcuda.so.1", "", link="libcuda.so.550.163.01"),
        ),
    )
    host.make_directory(f"{place}/{index}")
    host.file(f"{MANIFESTS}/{index}.json", MANIFEST.render(root))
    return root


def test_complete_roots_are_read_back_with_their_visibility(host: Host) -> None:
    first, second = stage(host, 0), stage(host, 10)
    host.bus.mounts.mounted = {"parent": HOST_NVIDIA, "root": f"{HOST_NVIDIA}/0"}
    staged = observe_staged(host)
    assert staged == StagedFacts(staged=(first, second), next_driver_root_index=11, roots_mounted=True)
    assert [root.hidden for root in staged.staged] == [False, True]
    lines = [line.replace(b"overlay", b"tmpfs") for line in host.bus.mounts.lines()]
    host.bus.mounts.lines = lambda: iter(lines)  # type: ignore[method-assign]
    staged = observe_staged(host)
    assert not staged.roots_mounted, "a mount of another kind is not ours"
    assert [root.hidden for root in staged.staged] == [True, True]


def test_directories_that_only_root_may_list_do_not_prevent_a_plan(host: Host) -> None:
    for place in ("staging", "removed"):
        path = f"/var/lib/unbounded-agent/{place}"
        host.failing[path] = PermissionError(errno.EACCES, "Permission denied", path)
    assert not observe_staged(host).staged_unseen


@pytest.mark.parametrize(
    "put",
    [
        *(lambda place, text=text: Path(place).write_text(text) for text in ("", '{"version": 3}', "[" * 100_000)),
        *(os.mkdir, os.mkfifo, lambda place: os.symlink("/nowhere", place)),
    ],
)
def test_a_broken_manifest_damages_only_that_one(host: Host, put: Callable[[str], None]) -> None:
    """A directory or link in its place once counted as a failed observation: the whole host was unknown forever."""
    root = stage(host, 1)
    put(host.full_path(MANIFESTS) + "/4.json")
    staged = observe_staged(host)
    assert (staged.staged, staged.corrupt_roots, staged.staged_unseen) == ((root,), (4,), "")
    assert staged.next_driver_root_index == 5
    (problem,) = staged.staged_problems
    assert f"{MANIFESTS}/4.json" in problem


@pytest.mark.parametrize("path", [TREES, MANIFESTS, f"{MANIFESTS}/0.json", MOUNTS])
def test_nothing_is_called_corrupt_unless_everything_can_be_read(host: Host, path: str) -> None:
    stage(host)
    host.failing[path] = OSError(errno.EIO, "Input/output error", path)
    staged = observe_staged(host)
    assert (staged.staged, staged.corrupt_roots) == ((), ())
    assert staged.staged_unseen.startswith(path)


def test_a_plain_root_is_recognised_by_its_directory_and_no_link_is_followed(host: Host) -> None:
    """Root in a machine can put anything there: a link of any length, or into a file system that never answers."""
    root = stage(host, 0, HOST_NVIDIA)
    stage(host, 1, "/elsewhere")
    stage(host, 2, "/elsewhere")
    host.symlink(f"{HOST_NVIDIA}/1", "/elsewhere/1")
    host.symlink(f"{HOST_NVIDIA}/2", "x" * 300)
    for index in (3, 999999999):
        host.make_directory(f"{HOST_NVIDIA}/{index}")
    staged = observe_staged(host)
    assert (staged.staged, staged.plain_roots, staged.corrupt_roots) == ((root,), (0,), (1, 2))
    assert not root.hidden
    assert staged.next_driver_root_index == 4, "the next free one"


@pytest.mark.parametrize(("last", "index"), [(INDICES - 3, INDICES - 2), (INDICES - 1, 1)])
def test_indices_are_reused_when_mount_points_run_out(host: Host, last: int, index: int) -> None:
    stage(host, 0)
    stage(host, last)
    assert observe_staged(host).next_driver_root_index == index
