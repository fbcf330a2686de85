"""The file functions: atomic, within their root, and never blocking."""

import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from agent.model.errors import BusError
from agent.system.copy import Copies
from agent.system.files import System
from agent.system.process import host_runner
from tests.fakes.no_process import no_process
from tests.fakes.umask import umask


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(no_process, str(tmp_path))


def test_absolute_links_stay_below_the_root(system: System, tmp_path: Path) -> None:
    """Debian's alternatives are absolute links, which must not lead out of a recorded tree."""
    system.write("/usr/lib/nvidia/current/libcuda.so.550", b"library")
    system.link("/etc/alternatives/libcuda", "/usr/lib/nvidia/current/libcuda.so.550")
    system.link("/usr/lib/libcuda.so.1", "/etc/alternatives/libcuda")
    assert system.real_path("/usr/lib/libcuda.so.1") == "/usr/lib/nvidia/current/libcuda.so.550"
    assert system.read("/usr/lib/libcuda.so.1") == b"library"
    system.link("/escape", "../../../../etc/passwd")
    with pytest.raises(FileNotFoundError):
        system.real_path("/escape")
    system.link("/a", "b")
    system.link("/b", "a")
    with pytest.raises(OSError, match="symbolic links"):
        system.real_path("/a")


@pytest.mark.parametrize(
    ("text", "path"),
    [("a/../" * 800 + "l{}", "/l0"), ("b" * 250 + "/l{}", "/l0"), ("", "/a" * 5_000), ("", "/" + "b" * 500_000)],
    ids=["long links", "links to a long path", "many components", "a long name"],
)
def test_attack_a_path_takes_little_time(system: System, tmp_path: Path, text: str, path: str) -> None:
    """The kernel follows 40 links, each of 4095 bytes. 32,000 components took 44 ms, for each path in a document."""
    system.make_directory("/a")
    for number in range(39):
        system.link(f"/l{number}", text.format(number + 1) or "/a")
    with mock.patch.object(os, "readlink", wraps=os.readlink) as readlink:
        assert not system.leads_to_something(path)
    assert readlink.call_count < 400
    characters = sum(len(call.args[0]) for call in readlink.call_args_list)
    assert characters < 400 * (len(str(tmp_path)) + 4096) + len(path)


def test_an_error_of_reading_names_the_file() -> None:
    """The kernel opens this file, and refuses to read at address 0."""
    with pytest.raises(OSError, match="Input/output error") as raised:
        System(no_process).read("/proc/self/mem")
    assert raised.value.filename == "/proc/self/mem"


def test_the_links_of_a_directory(system: System) -> None:
    system.write("/usr/lib/library.so.1", b"library")
    system.make_directory("/usr/lib/directory")
    system.link("/usr/lib/library.so", "library.so.1")
    system.link("/usr/lib/dangling", "/nowhere")
    system.link("/lib", "/usr/lib")
    expected = {"library.so.1": None, "directory": None, "library.so": "library.so.1", "dangling": "/nowhere"}
    assert system.links("/lib") == expected
    with pytest.raises(FileNotFoundError):
        system.links("/usr/lib/dangling")


def test_a_program_is_found_as_it_would_be_started(system: System) -> None:
    """A link that leads nowhere does not count, nor does a file that is not executable."""
    system.link("/usr/local/sbin/tool", "/opt/tool/removed")
    system.write("/usr/local/bin/tool", b"", 0o644)
    assert system.find_program("tool") is None
    system.write("/opt/tool/tool", b"", 0o755)
    system.link("/usr/sbin/tool", "/opt/tool/tool")
    assert system.find_program("tool") == "/usr/sbin/tool"


def test_a_lock_is_its_owners_alone_and_not_made_behind_a_link(system: System, tmp_path: Path) -> None:
    """Whoever can open a lock can hold it forever."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with umask(0):
        os.close(system.open_lock("/lock"))
        with pytest.raises(OSError, match="symbolic links"):
            system.open_lock("/link")
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "target").exists()


HOLDS = """
import subprocess, sys, time
from contextlib import ExitStack
from agent.system.files import System
System(None, sys.argv[1]).stream("/request", (b"content",), until=ExitStack())
subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
print(flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_a_file_is_locked_until_its_writer_ends_or_is_killed(system: System, tmp_path: Path) -> None:
    """What the writer has started, and still runs, holds no lock."""
    with ExitStack() as until:
        system.stream("/request", (b"content",), until=until)
        assert system.is_locked("/request")
    assert not system.is_locked("/request")
    argv = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        assert process.stdout.readline()
        try:
            assert system.is_locked("/request")
            process.kill()
            process.wait()
            assert not system.is_locked("/request")
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_an_error_of_a_write_names_the_file(system: System) -> None:
    """The kernel's error for a full file system names none, and the others name a temporary file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            system.write("/etc/new.conf", b"content")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == "/etc/new.conf"


def test_only_regular_files_are_opened_and_no_descriptor_leaks(system: System, tmp_path: Path) -> None:
    """A machine may put anything in the place of its report, and opening a device may start it."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("/dev/ptmx")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("fifo", "directory", "link"):
        for _ in range(5):
            with pytest.raises(OSError, match=r"not a regular file|a symbolic link"):
                system.read_untrusted(f"/{name}", 100)
    for name in ("fifo", "directory"):
        for read in (system.read, lambda path: system.head(path, 4)):
            with pytest.raises(OSError, match="not a regular file"):
                read(f"/{name}")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_or_link_that_cannot_take_its_place_leaves_nothing(system: System, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        system.write("/place", b"content")
    assert caught.value.filename == "/place"
    with pytest.raises(IsADirectoryError):
        system.link("/place", "target")
    assert os.listdir(tmp_path) == ["place"]


def test_copies_share_no_data(system: System, tmp_path: Path) -> None:
    """A machine could write through a hard link in a bound directory."""
    system.write("/source", b"driver" * 1000)
    with (tmp_path / "source").open("rb") as reading, Copies(lambda: None) as copies:
        system.copy(reading, "/copy", 0o644, copies)
    (tmp_path / "copy").write_bytes(b"changed")
    assert system.read("/source") == b"driver" * 1000


def test_a_directory_that_several_make_at_once(system: System) -> None:
    """The machine half's threads write notes before the directory exists."""
    with ThreadPoolExecutor(8) as pool:
        for number in range(50):
            list(pool.map(system.make_directory, [f"/{number}/a/b/c"] * 8))
            assert system.is_directory(f"/{number}/a/b/c")


def test_a_system_without_a_bus_says_so(system: System) -> None:
    """The machine half has such a system."""
    with pytest.raises(BusError, match=r"org\.example\.I\.M of org\.example: .*no connection"):
        system.call("org.example", "/", "org.example.I.M")


def test_a_device_behind_a_link_is_found_like_stat(tmp_path: Path) -> None:
    """statx(2) fills our own structure. This also works in /proc/PID/fd, where a link may lead to a removed file."""
    system = System(host_runner)
    for path in ("/dev/null", "/dev/full", "/dev/tty"):
        number = os.stat(path).st_rdev
        system.link(str(tmp_path / "link"), path)
        assert system.device_behind(str(tmp_path / "link")) == (os.major(number), os.minor(number))
    with open(tmp_path / "file", "wb") as file, open("/dev/null", "rb") as null:
        (tmp_path / "file").unlink()
        assert system.device_behind(f"/proc/self/fd/{file.fileno()}") is None
        assert system.device_behind(f"/proc/self/fd/{null.fileno()}") == (1, 3)
    for name, target, why in (("link", "nothing", "No such file"), ("loop", "loop", "symbolic links")):
        system.link(str(tmp_path / name), target)
        with pytest.raises(OSError, match=why):
            system.device_behind(str(tmp_path / name))


def test_a_system_below_another(tmp_path: Path) -> None:
    """Links below the inner root do not lead out of it, nor does the link by which it is reached."""
    (tmp_path / "inner/etc").mkdir(parents=True)
    (tmp_path / "inner/etc/name").write_text("inner")
    (tmp_path / "name").write_text("outer")
    (tmp_path / "link").symlink_to("/inner")
    (tmp_path / "inner/absolute").symlink_to("/etc/name")
    (tmp_path / "inner/out").symlink_to("../../../name")
    system = System(no_process, str(tmp_path))
    inner = system.below("/link")
    assert inner.read("/absolute") == b"inner"
    assert inner.full_path("/etc") == str(tmp_path / "inner/etc")
    assert not inner.is_file("/out")
    assert system.read("/name") == b"outer"
    assert system.below("/").root == system.root
    with pytest.raises(FileNotFoundError):
        system.below("/none")
    assert System(no_process).below(str(tmp_path)).read("/inner/etc/name") == b"inner"


def test_a_directory_keeps_its_time_of_birth(tmp_path: Path) -> None:
    system, before = System(no_process), time.time_ns()
    place, link = tmp_path / "place", tmp_path / "link"
    place.mkdir()
    born = system.birth(str(place))
    # The kernel's clock for files ticks a hundred times a second or more.
    assert abs(born - before) < 10**9
    (place / "file").touch()
    place.chmod(0o700)
    place.rename(tmp_path / "renamed")
    assert system.birth(str(tmp_path / "renamed")) == born
    time.sleep(0.02)
    link.symlink_to("renamed")
    assert system.birth(str(link)) > born
    with pytest.raises(FileNotFoundError):
        system.birth(str(place))


def test_a_file_of_the_kernel_is_read_in_parts_to_its_end() -> None:
    """Its size is 0, and one read(2) returns at most a few pages."""
    system, path = System(no_process), "/proc/kallsyms"
    found = system.read(path, 64 << 20)
    assert len(found) > 1 << 17
    assert found.endswith(b"\n")
    with pytest.raises(OSError, match="larger than 100000 bytes"):
        system.read(path, 100_000)
    assert system.head(path, 100_000) == found[:100_000]
    assert len(system.head("/proc/self/status", 1 << 20)) < 1 << 16


def test_two_directories_change_places(system: System, tmp_path: Path) -> None:
    """Neither is missing at any moment, and links are not followed."""
    for name in ("one", "other"):
        system.write(f"/roots/{name}/file", name.encode())
    inodes = [system.link_inode(f"/roots/{name}") for name in ("one", "other")]
    system.exchange("/roots/one", "/roots/other")
    assert [system.link_inode(f"/roots/{name}") for name in ("other", "one")] == inodes
    assert system.read("/roots/one/file") == b"other"
    with pytest.raises(FileNotFoundError):
        system.exchange("/roots/one", "/roots/none")
    assert system.entries("/roots") == ("one", "other")
