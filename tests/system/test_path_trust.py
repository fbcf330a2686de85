"""The owners of a path's components, and whether everybody may read the file. Owners are simulated."""

import errno
import os
import stat
import struct
from pathlib import Path

import pytest

from agent.system.files import System
from agent.system.process import host_runner
from agent.system.trust import PathTrust, file_fault, untrusted_component
from tests.fakes.host import Host

USER = 1000


FILE = "/srv/driver/lib/libcuda.so"


@pytest.fixture
def tree(host: Host) -> Host:
    host.file(FILE)
    return host


def test_a_path_that_root_controls(tree: Host) -> None:
    tree.symlink("/srv/driver/lib/libcuda.so.1", "../lib/libcuda.so")
    assert untrusted_component(tree, "/srv/driver/lib/libcuda.so.1") == ""
    assert untrusted_component(tree, "/srv/none/lib") == "", "what is not there is nobody's"
    tree.owners[FILE] = (0o666, USER)
    assert untrusted_component(tree, FILE) == "", "one bad file makes no directory bad"


@pytest.mark.parametrize("directory", ["/", "/srv", "/srv/driver", "/srv/driver/lib"])
def test_each_component_of_the_path_counts(tree: Host, directory: str) -> None:
    tree.owners[directory] = (0o755, USER)
    assert untrusted_component(tree, FILE) == f"{directory} belongs to user {USER}, not to root"
    for mode in (0o775, 0o757):
        tree.owners[directory] = (mode, 0)
        assert untrusted_component(tree, FILE) == f"users other than root can write in {directory} (mode {mode:04o})"


def test_refused_paths_are_kept(tree: Host) -> None:
    tree.make_directory("/home/user")
    tree.owners["/home/user"] = (0o755, USER)
    tree.symlink("/srv/driver/lib/libcuda.so.1", "/home/user/libcuda.so.1")
    trust = PathTrust(tree)
    assert trust.permits("/srv/driver/lib")
    assert not trust.permits("/home/user/lib")
    assert not trust.permits("/srv/driver/lib", "/srv/driver/lib/libcuda.so.1")
    why = f"/home/user belongs to user {USER}, not to root"
    assert {key: tuple(each) for key, each in trust.refused.items()} == {
        why: ("/home/user/lib", "links in /srv/driver/lib")
    }
    assert PathTrust(tree, checked=False).permits("/home/user")


@pytest.mark.parametrize("path", ["/srv/driver", "/srv/driver/lib/libcuda.so"])
def test_a_path_that_roots_group_may_write_is_roots(tree: Host, path: str) -> None:
    """This does not hold for a file with an ACL: the group's bits in the mode then stand for the list's other users."""

    def faults() -> str:
        return untrusted_component(tree, FILE) + file_fault(tree, FILE, root_owned=True)

    tree.owners[path] = (0o775, 0, 0)
    assert faults() == ""
    tree.acls.add(path)
    assert "(mode 0775)" in faults()
    tree.acls.clear()
    tree.owners[path] = (0o777, 0, 0)
    assert "(mode 0777)" in faults()


def test_links_in_the_path_are_followed(tree: Host) -> None:
    tree.make_directory("/home/user")
    tree.symlink("/home/user/lib", "/srv/driver/lib")
    tree.symlink("/opt/lib", "../home/user/lib")
    assert untrusted_component(tree, "/opt/lib/libcuda.so") == ""
    tree.owners["/home/user"] = (0o755, USER)
    assert untrusted_component(tree, "/opt/lib/libcuda.so").startswith("/home/user belongs")
    tree.symlink("/opt/circle", "circle")
    with pytest.raises(OSError, match="symbolic links"):
        untrusted_component(tree, "/opt/circle")
    tree.failing["/srv/driver"] = PermissionError(errno.EACCES, "Permission denied", "/srv/driver")
    with pytest.raises(PermissionError):
        untrusted_component(tree, "/srv/driver/lib")


def test_a_sticky_directory_protects_roots_directories(tree: Host) -> None:
    """An example is /nix/store, whose group is nixbld. Files of other users there belong to those users."""
    tree.owners["/srv"] = (0o1775, 0)
    assert untrusted_component(tree, FILE) == ""
    tree.owners["/srv/driver"] = (0o755, USER)
    assert untrusted_component(tree, "/srv/driver/lib").startswith("/srv/driver belongs")
    tree.symlink("/srv/link", "/etc")
    assert untrusted_component(tree, "/srv/link").startswith("users other than root can write in /srv ")
    assert untrusted_component(tree, "/srv").startswith("users other than root can write in /srv ")


@pytest.mark.parametrize(
    ("mode", "uid", "root_owned", "fault"),
    [
        (0o644, 0, True, ""),
        (0o640, 0, True, "not every user can read it (mode 0640)"),
        (0o640, 0, False, "not every user can read it (mode 0640)"),
        (0o644, USER, True, "it belongs to user 1000, not to root"),
        (0o666, 0, True, "users other than root can write to it (mode 0666)"),
        (0o666, USER, False, ""),
    ],
)
def test_files(tree: Host, mode: int, uid: int, root_owned: bool, fault: str) -> None:
    tree.owners[FILE] = (mode, uid)
    assert file_fault(tree, FILE, root_owned=root_owned) == fault


def test_other_files_have_a_fault(tree: Host) -> None:
    assert file_fault(tree, "/srv/driver", root_owned=False) == "it is not a regular file"
    tree.file("/srv/a\nb")
    assert "characters" in file_fault(tree, "/srv/a\nb", root_owned=False)


def test_modes_owners_and_access_control_lists_come_from_the_file_system(tmp_path: Path) -> None:
    """This is not simulated: a link has its own owner, and an absolute one in the path stays below the root."""
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "inner").symlink_to("/")
    system = System(host_runner, str(tmp_path))
    assert system.owner("/inner/file") == (stat.S_IFREG | 0o640, os.getuid(), (tmp_path / "file").stat().st_gid)
    assert stat.S_ISLNK(system.owner("/link")[0])
    assert file_fault(system, "/file", root_owned=False) == "not every user can read it (mode 0640)"
    assert not system.has_acl("/file")
    # The mode has the list's mask for the group (acl(5)).
    nobody = 0xFFFFFFFF
    entries = ((0x01, 6, nobody), (0x02, 6, USER), (0x04, 4, nobody), (0x10, 6, nobody), (0x20, 0, nobody))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(tmp_path / "file", "system.posix_acl_access", acl)
    assert system.has_acl("/file")
    assert stat.S_IMODE(system.owner("/file")[0]) == 0o660
