"""Removes trees with real mounts, in a mount namespace of their own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.system import removal
from agent.system.removal import FAILED, MOUNTED

root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
pytestmark = [pytest.mark.processes]

DOOR = f"{sys.executable} -IS {removal.__file__}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree to remove, next to data that must stay."""
    for name in ("tree/a/b", "tree/empty", "data"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("tree/file", "tree/a/file", "tree/a/b/file", "data/kept"):
        (tmp_path / name).write_text(name)
    (tmp_path / "tree/a/link").symlink_to(tmp_path / "data")
    os.mkfifo(tmp_path / "tree/a/fifo")
    return tmp_path / "tree"


def run(script: str, tree: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script in the directory above the tree, in a namespace whose mounts nobody else sees."""
    argv = ("unshare", "--mount", "--propagation", "private", "sh", "-euc", script.replace("DOOR", DOOR))
    return subprocess.run(argv, cwd=tree.parent, capture_output=True, text=True, timeout=60)


def test_a_tree_is_removed_and_no_link_is_followed(tree: Path) -> None:
    (tree / "directory").symlink_to(tree / "a")
    for path in ("file", "directory", "missing", "missing/below"):
        removal.remove(str(tree / path))
    assert sorted(os.listdir(tree)) == ["a", "empty"]
    removal.remove(str(tree))
    assert [each.name for each in tree.parent.iterdir()] == ["data"]
    assert (tree.parent / "data/kept").exists()


def test_a_tree_of_any_depth_and_breadth(tmp_path: Path) -> None:
    """More levels than Python recurses and than descriptors may be open, and more names than are read at once."""
    (tmp_path / "tree").mkdir()
    for number in range(removal.NAMES + 100):
        (tmp_path / f"tree/{number}").mkdir()
    back = os.open(".", os.O_RDONLY)
    os.chdir(tmp_path / "tree/7")
    for _ in range(1500):
        os.mkdir("y")
        os.chdir("y")
    os.fchdir(back)
    os.close(back)
    removal.remove(str(tmp_path / "tree"))
    assert os.listdir(tmp_path) == []


MOUNTS = {
    "bind": "mount --bind data tree/a",
    "bind of a file": "mount --bind data/kept tree/a/file",
    "at the tree itself": "mount --bind data tree",
    "with a space": "mkdir 'tree/a b' && mount --bind data 'tree/a b'",
    "tmpfs": "mount -t tmpfs none tree/a && touch tree/a/kept",
    "overlay": "mkdir up work && mount -t tmpfs none up && mkdir up/u up/w && "
    "mount -t overlay none -o lowerdir=data,upperdir=up/u,workdir=up/w tree/a/b",
    "mount below a mount": "mount --bind data tree/a && mkdir -p data/x && mount -t tmpfs none tree/a/x",
}


LATE = """
import subprocess, sys
sys.path.insert(0, {directory!r})
import removal
real = removal.refuse_mounts
def late(path):
    real(path)
    subprocess.run({mount!r}, shell=True, check=True)
removal.refuse_mounts = late
sys.exit(removal.main(sys.argv[1:]))
"""


@root
@pytest.mark.parametrize("late", [False, True], ids=["before the check", "after the check"])
@pytest.mark.parametrize("kind", MOUNTS)
def test_what_is_mounted_is_not_touched(tree: Path, kind: str, late: bool) -> None:
    """A bind mount of the same file system has the same device number."""
    before = sorted(tree.rglob("*"))
    if late:
        code = LATE.format(directory=str(Path(removal.__file__).parent), mount=MOUNTS[kind])
        (tree.parent / "late.py").write_text(code)
        done = run(f"{sys.executable} -S late.py {tree}", tree)
        assert "was not touched; unmount it: `umount " in done.stderr
    else:
        done = run(f"{MOUNTS[kind]}\nDOOR {tree}", tree)
        assert f"{tree}: not removed, because something is mounted there: " in done.stderr
        assert "`umount " in done.stderr
        assert {*before} <= {*tree.rglob("*")}, "nothing is removed"
    assert done.returncode == MOUNTED, done.stderr
    assert (tree.parent / "data/kept").exists()


@root
def test_the_advised_command_unmounts_it(tree: Path) -> None:
    script = f"""
        mkdir "tree/a/it's here" && mount --bind data "tree/a/it's here" && mount --bind data tree/a/b
        advice=$(DOOR {tree} 2>&1 >/dev/null || true)
        eval "$(echo "$advice" | sed 's/.*`\\(.*\\)`.*/\\1/')"
        DOOR {tree}
    """
    done = run(script, tree)
    assert (done.returncode, done.stderr) == (0, "")
    assert not tree.exists()
    assert (tree.parent / "data/kept").exists()


@root
def test_a_tree_behind_a_link_is_checked_and_holds_up_no_other(tree: Path) -> None:
    (tree.parent / "link").symlink_to(".")
    (tree.parent / "other").mkdir()
    assert run("mount --bind data tree/a && DOOR link/tree other", tree).returncode == MOUNTED
    assert not (tree.parent / "other").exists()
    assert (tree / "file").exists()
    assert (tree.parent / "data/kept").exists()


@root
def test_a_check_changes_nothing(tree: Path) -> None:
    assert run("mount --bind data tree/a && touch tree/new && DOOR --check tree", tree).returncode == MOUNTED
    assert run("DOOR --check tree missing", tree).returncode == 0
    assert (tree / "file").exists()


@root
def test_a_race_with_mounts_that_come_and_go(tree: Path) -> None:
    """Whatever the moment, what is mounted stays complete."""
    for name in range(50):
        (tree.parent / f"data/{name}").touch()
    script = f"""
        (while :; do
            mkdir -p tree/a/b && mount --bind data tree/a/b && umount tree/a/b
            mkdir -p tree/a/b && mount --bind data tree/a && umount tree/a
        done 2>/dev/null) & pid=$!
        end=$(( $(date +%s) + 2 ))
        while [ "$(date +%s)" -lt $end ]; do DOOR {tree} || true; done
        kill $pid; wait $pid || true
        umount tree/a/b tree/a || true
    """
    done = run(script, tree)
    assert "Traceback" not in done.stderr
    assert len([*(tree.parent / "data").iterdir()]) == 51


def flags(*words: str) -> None:
    done = subprocess.run(["chattr", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"chattr: {done.stderr}")


@contextlib.contextmanager
def immutable(path: Path) -> Iterator[None]:
    flags("+i", str(path))
    try:
        yield
    finally:
        flags("-i", str(path))


@root
@pytest.mark.parametrize("flag", ["i", "a"])
def test_files_and_directories_that_cannot_be_changed_are_removed(tree: Path, flag: str) -> None:
    """Root in a machine can set these flags."""
    for path in ("a/b/file", "a/b", "a", "a/file", "empty", "."):
        flags(f"+{flag}", str(tree / path))
    with pytest.raises(PermissionError):
        tree.rename(tree.parent / "new")
    removal.allow_removal(str(tree))
    tree.rename(tree.parent / "new")
    (tree.parent / "new").rename(tree)
    assert subprocess.run(["rm", "-rf", tree], capture_output=True).returncode == 1
    removal.remove(str(tree))
    assert not tree.exists()


@root
def test_another_name_of_a_file_keeps_its_flags(tree: Path) -> None:
    os.link(tree.parent / "data/kept", tree / "a/kept")
    with immutable(tree.parent / "data/kept"):
        removal.remove(str(tree))
        listed = subprocess.run(["lsattr", tree.parent / "data/kept"], capture_output=True, text=True).stdout
    assert "i" in listed.split()[0]
    assert not tree.exists()


@root
def test_the_directory_above_keeps_its_flags(tree: Path) -> None:
    """It is the administrator's."""
    with immutable(tree.parent):
        done = run(f"DOOR {tree}", tree)
    assert done.returncode == FAILED
    assert f"{tree}: Operation not permitted" in done.stderr


def test_what_could_not_be_removed_is_named(tree: Path) -> None:
    """As a user without rights."""
    argv = [sys.executable, "-IS", removal.__file__, "/proc/self/task", "/proc/1"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == FAILED
    assert all(line.startswith("/proc/") and "Operation not permitted" in line for line in done.stderr.splitlines())
    assert len(done.stderr.splitlines()) == 2
