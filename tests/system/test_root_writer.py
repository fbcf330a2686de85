"""Files are written into the root file system of a hostile image, and nothing outside of it changes."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from agent.system.files import System
from tests.fakes.no_process import no_process
from tests.fakes.umask import umask

WRITTEN = "/etc/kubernetes/pki/ca.crt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty root file system; the next directory has files of the host."""
    for each in ("root", "host/etc/kubernetes/pki"):
        (tmp_path / each).mkdir(parents=True)
    for each in ("etc/kubernetes/pki/ca.crt", "secret"):
        (tmp_path / "host" / each).write_text("the host's")
    (tmp_path / "host/secret").chmod(0o755)
    return tmp_path / "root"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "host"


@pytest.fixture
def writer(root: Path) -> System:
    return System(no_process).image(str(root))


@pytest.fixture(autouse=True)
def nothing_leaks(root: Path, host: Path) -> Iterator[None]:
    """The host's files stay as they are, and no descriptor stays open."""
    before, descriptors = _content(host), os.listdir("/proc/self/fd")
    yield
    assert _content(host) == before
    assert os.listdir("/proc/self/fd") == descriptors


def _content(tree: Path) -> dict[str, str]:
    return {str(each): each.read_text() if each.is_file() else "" for each in sorted(tree.rglob("*"))}


def test_a_file_replaces_another_with_its_mode(writer: System, root: Path) -> None:
    with umask(0o077):
        writer.write(WRITTEN, b"one")
        writer.write(WRITTEN, b"two", 0o640)
    file = root / WRITTEN.lstrip("/")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"two", 0o640)
    assert [each.stat().st_mode & 0o777 for each in (file.parent, root / "etc")] == [0o755, 0o755]
    assert os.listdir(file.parent) == ["ca.crt"]


def test_nobody_else_can_read_a_file_that_is_being_written(writer: System, root: Path) -> None:
    modes = []

    def chunks() -> Iterator[bytes]:
        yield b"the key of "
        modes.append((root / "etc/.key.unbounded-agent-new").stat().st_mode & 0o777)
        yield b"a kubelet"

    with umask(0):
        writer.stream("/etc/key", chunks(), 0o644)
    assert modes == [0o600]
    assert (root / "etc/key").read_bytes() == b"the key of a kubelet"
    assert (root / "etc/key").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("to_a_file", [False, True])
def test_a_link_that_appears_meanwhile_is_not_followed(
    writer: System, root: Path, host: Path, monkeypatch: pytest.MonkeyPatch, to_a_file: bool
) -> None:
    """Nobody should change the root while it is written; whoever does gets an error and no file of the host."""
    (root / "etc").mkdir()
    place = root / "etc/.file.unbounded-agent-new"
    unlink = os.unlink

    def unlink_and_link(name: str) -> None:
        with suppress(FileNotFoundError):
            unlink(name)
        if not place.is_symlink():
            place.symlink_to(host / ("secret" if to_a_file else "new"))

    monkeypatch.setattr(os, "unlink", unlink_and_link)
    with pytest.raises(FileExistsError):
        writer.write("/etc/file", b"ours")
    assert not (root / "etc/file").exists()


def test_links_are_followed_within_the_root(writer: System, root: Path) -> None:
    """As on a merged /usr, where /lib and /bin are links."""
    (root / "usr/lib").mkdir(parents=True)
    (root / "lib").symlink_to("/usr/lib")
    (root / "etc").mkdir()
    (root / "etc/kubernetes").symlink_to("../../../../../../..")
    writer.write(WRITTEN, b"ours")
    assert (root / "pki/ca.crt").read_bytes() == b"ours"
    writer.write("/lib/systemd/system/x.service", b"unit", 0o755)
    assert writer.is_program("/lib/systemd/system/x.service")
    for path in ("/pki/ca.crt", "/pki", "/none"):
        assert not writer.is_program(path), "it is known by its mode"
    assert (root / "usr/lib/systemd/system/x.service").read_bytes() == b"unit"
    assert writer.read("/lib/systemd/system/x.service", 4) == b"unit"


@pytest.mark.parametrize(
    "link", ["{host}/etc", "../../../../../../../../../../../../..{host}/etc", "/proc/self/root{host}/etc"]
)
@pytest.mark.parametrize("place", ["etc", "etc/kubernetes", "etc/kubernetes/pki"])
def test_no_link_of_a_directory_leads_out(writer: System, root: Path, host: Path, place: str, link: str) -> None:
    directory = root / place
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.symlink_to(link.format(host=host))
    writer.write(WRITTEN, b"ours")
    assert writer.read(WRITTEN, 100) == b"ours"


def listener(place: Path, host: Path) -> None:
    # A socket's path has at most 108 bytes.
    with closing(socket.socket(socket.AF_UNIX)) as server:
        descriptor = os.open(place.parent, os.O_PATH)
        server.bind(f"/proc/self/fd/{descriptor}/{place.name}")
        os.close(descriptor)


LINKS_OUT: dict[str, Callable[[Path, Path], object]] = {
    "a link out": lambda place, host: place.symlink_to(host / "secret"),
    "a relative link out": lambda place, host: place.symlink_to(f"../../../../../../../../../../../..{host}/secret"),
    "a dangling link": lambda place, host: place.symlink_to(host / "new"),
}
IN_PLACE = {**LINKS_OUT, "a FIFO": lambda place, _: os.mkfifo(place), "a socket": listener}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_is_in_a_files_place_is_replaced(writer: System, root: Path, host: Path, kind: str) -> None:
    """The same holds for the temporary file's place."""
    file = root / WRITTEN.lstrip("/")
    file.parent.mkdir(parents=True)
    for place in (file, file.with_name(".ca.crt.unbounded-agent-new")):
        IN_PLACE[kind](place, host)
    writer.write(WRITTEN, b"ours")
    assert not file.is_symlink()
    assert file.read_bytes() == b"ours"


def test_another_name_of_a_file_keeps_its_content(writer: System, root: Path) -> None:
    (root / "other").write_text("another of the image's")
    os.link(root / "other", root / "file")
    writer.write("/file", b"ours")
    assert [(root / name).read_text() for name in ("file", "other")] == ["ours", "another of the image's"]


@pytest.mark.parametrize("kind", LINKS_OUT)
def test_reading_never_leaves_the_root(writer: System, root: Path, host: Path, kind: str) -> None:
    LINKS_OUT[kind](root / "file", host)
    with pytest.raises(FileNotFoundError):
        writer.read("/file", 100)
    assert not writer.is_program("/file")


def test_a_root_that_is_a_link_is_refused(root: Path) -> None:
    (root / "link").symlink_to(root)
    with pytest.raises(NotADirectoryError):
        System(no_process).image(str(root / "link"))


@pytest.mark.parametrize("path", ["/", "/etc/", "/etc/..", "/etc/."])
def test_only_files_are_written(writer: System, root: Path, path: str) -> None:
    (root / "etc").mkdir()
    with pytest.raises(OSError, match=path):
        writer.write(path, b"ours")
    assert os.listdir(root) == ["etc"]
