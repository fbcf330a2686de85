"""Programs are taken from archives; nothing else of an archive gets anywhere, whatever is in it."""

import gzip
import hashlib
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.host.provision.binaries import ENTRIES_LIMIT, UNPACKED_LIMIT, put_programs
from agent.model.errors import AgentError
from agent.model.node import NodeBinary
from agent.system.files import System
from tests.fakes.archives import entry, packed
from tests.fakes.no_process import no_process

CRICTL = NodeBinary("crictl", "/srv/crictl.tar.gz", "0" * 64, "/usr/local/bin/crictl", "program")
PLUGINS = NodeBinary("cni_plugins", "/srv/cni.tgz", "0" * 64, "/usr/lib/cni", "programs")
Files = dict[str, tuple[str, int]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "root"
    (place / "usr/lib/cni").mkdir(parents=True)
    return place


@pytest.fixture
def put(root: Path, tmp_path: Path) -> Callable[[NodeBinary, bytes], Files]:
    def put_archive(binary: NodeBinary, tar: bytes) -> Files:
        (tmp_path / "archive").write_bytes(gzip.compress(tar, 1))
        return put_programs(binary, str(tmp_path / "archive"), System(no_process).image(str(root)))

    return put_archive


def there(root: Path) -> list[str]:
    return sorted(str(each.relative_to(root)) for each in root.rglob("*") if not each.is_dir())


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_the_standard_plugins(put: Callable[[NodeBinary, bytes], Files], root: Path, form: int) -> None:
    (root / "usr/lib/cni/bridge").write_text("the image's")
    tar = packed(
        entry("./", tarfile.DIRTYPE),
        entry("./bridge", mode=0o4755, mtime=1.5),
        entry("./host-local", uid=1001, uname="runner"),
        entry("./LICENSE", mode=0o644),
        form=form,
    )
    digest = hashlib.sha256(b"a program").hexdigest()
    found = put(PLUGINS, tar)
    assert found == {f"/usr/lib/cni/{name}": (digest, 9) for name in ("bridge", "host-local")}
    assert there(root) == ["usr/lib/cni/bridge", "usr/lib/cni/host-local"]
    for path in found:
        state = os.stat(f"{root}{path}")
        assert (state.st_mode & 0o7777, state.st_uid) == (0o755, os.getuid())
        assert (root / path[1:]).read_bytes() == b"a program"


def test_an_archive_chooses_no_place(put: Callable[[NodeBinary, bytes], Files], root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    hostile = (
        *(entry(name) for name in ("../up", "/etc/passwd", f"{outside}/file", "sub/program", "..", ".hidden", "a b")),
        entry("link", tarfile.SYMTYPE, linkname=str(outside)),
        entry("link/through"),
        entry("hard", tarfile.LNKTYPE, linkname="../../../etc/shadow"),
        entry("pipe", tarfile.FIFOTYPE),
        entry("disk", tarfile.BLKTYPE, devmajor=8),
        entry("good"),
    )
    put(PLUGINS, packed(*hostile))
    assert there(root) == ["usr/lib/cni/good"]
    assert os.listdir(outside) == []
    assert sorted(os.listdir(tmp_path)) == ["archive", "outside", "root"]


def test_a_link_of_the_image_leads_nowhere_else(
    put: Callable[[NodeBinary, bytes], Files], root: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (root / "usr/lib/cni").rmdir()
    (root / "usr/lib/cni").symlink_to(tmp_path / "outside")
    put(PLUGINS, packed(entry("bridge")))
    assert os.listdir(tmp_path / "outside") == []
    assert (root / str(tmp_path / "outside").lstrip("/") / "bridge").is_file()


def huge(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return the header of an entry that claims a size, and zeros."""
    return entry(name, kind, size=size).tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)


@pytest.mark.parametrize(
    ("tar", "message"),
    [
        (b"no archive" * 200, "not an archive that can be used"),
        (packed(entry("LICENSE", mode=0o644)), "has no executable file crictl at its top"),
        (packed(entry("bin/crictl")), "has no executable file crictl at its top"),
        (huge("crictl", UNPACKED_LIMIT + 1), "more than 1024 MiB"),
        (huge("crictl", 2 << 20), "unexpected end of data"),
        (huge("x", 4 << 30, tarfile.GNUTYPE_LONGNAME), "KiB describe an entry"),
        (huge("x", 4 << 30, tarfile.XHDTYPE), "KiB describe an entry"),
        (packed(*[entry("x", tarfile.DIRTYPE)] * (ENTRIES_LIMIT + 1)), f"more than {ENTRIES_LIMIT} entries"),
    ],
)
def test_what_is_not_the_releases_archive(
    put: Callable[[NodeBinary, bytes], Files], root: Path, tar: bytes, message: str
) -> None:
    with pytest.raises(AgentError, match=message) as caught:
        put(CRICTL, tar)
    assert "/srv/crictl.tar.gz" in caught.value.message
    assert "correct binaries.crictl_version or binaries.github_mirror, and sha256.crictl" in caught.value.hint
    assert there(root) == []


@pytest.mark.parametrize(
    ("flipped", "kept"),
    [(-8, None), (-1, None), (None, -1), (None, -8), (None, 5), (None, 300), (None, 700)],
)
def test_damage_is_noticed_wherever_it_is_and_the_archive_named(
    root: Path, tmp_path: Path, flipped: int | None, kept: int | None
) -> None:
    """gzip's checksum and length are at the very end, after zeros that tar does not need.

    The library reports damage by an OSError without a number: it must not be taken for one of the program's file.
    """
    whole = bytearray(gzip.compress(packed(entry("crictl"), content=os.urandom(1 << 10)), 1))
    if flipped is not None:
        whole[flipped] ^= 1
    (tmp_path / "archive").write_bytes(whole[:kept])
    with pytest.raises(AgentError, match=r"crictl.tar.gz: not an archive that can be used"):
        put_programs(CRICTL, str(tmp_path / "archive"), System(no_process).image(str(root)))


def test_what_follows_the_end_of_an_archive_is_limited_too(
    put: Callable[[NodeBinary, bytes], Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.host.provision.binaries.UNPACKED_LIMIT", 4 << 20)
    tar = packed(entry("crictl"))
    assert put(CRICTL, tar + bytes(3 << 20))
    with pytest.raises(AgentError, match="more than 4 MiB"):
        put(CRICTL, tar + bytes(5 << 20))


def test_a_program_is_listed_with_the_digest_that_it_must_have(root: Path, tmp_path: Path) -> None:
    """So damage of the cached file between its check and its use is found in the machine."""
    (tmp_path / "kubelet").write_bytes(b"damaged")
    kubelet = NodeBinary("kubelet", "/srv/kubelet", "0" * 64, "/usr/bin/kubelet")
    listed = put_programs(kubelet, str(tmp_path / "kubelet"), System(no_process).image(str(root)))
    assert listed == {"/usr/bin/kubelet": ("0" * 64, len(b"damaged"))}
