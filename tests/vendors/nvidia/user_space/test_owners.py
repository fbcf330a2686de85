"""The owners of a driver's places: what root copies from there for all machines must be root's. Owners are simulated.

The layouts are those of test_places.py.
"""

import errno
import posixpath
from pathlib import Path

import pytest

from agent.model.conditions import Status
from agent.model.facts import Absent, Unseen
from tests.fakes.host import Host
from tests.fakes.user_space import (
    DRIVER_CONTAINER,
    MAIN,
    OLDER,
    VERSION,
    X86,
    bare,
    by_target,
    cache_of,
    condition,
    listed,
    other_root,
    put,
    user_space,
)

USERS = "/home/kubernetes/bin/nvidia"
COS = "/home/kubernetes/bin/nvidia/lib64, /home/kubernetes/bin/nvidia/lib, /var/lib/nvidia/lib64, /var/lib/nvidia/lib"


@pytest.fixture
def user_place(host: Host) -> Host:
    """A host with a user called kubernetes, who would like everybody to read root's files."""
    put(bare(host), f"{USERS}/lib64")
    host.file("/etc/shadow", "root:secret")
    host.owners |= {"/home/kubernetes": (0o755, 1000), "/etc/shadow": (0o640, 0)}
    host.symlink(f"{USERS}/share/vulkan/icd.d/nvidia_x.json", "/etc/shadow")
    return host


def test_a_place_that_a_user_can_write_is_skipped_and_named(user_place: Host) -> None:
    found = user_space(user_place, VERSION)
    assert isinstance(found.version, Absent)
    assert isinstance(found.files, Absent)
    where = f"{USERS}/lib64, {USERS}/lib (Container-Optimized OS)"
    why = f"{where}, because /home/kubernetes belongs to user 1000, not to root"
    assert (found.other_places, found.skipped_directories) == ((), (why,))
    assert found.refused_places == ("Container-Optimized OS",)
    problem = condition(user_place)
    assert (problem.reason, problem.message.endswith(f"; not searched: {why}")) == ("NotInstalled", True)
    put(user_place, "/opt/nvidia/lib64")
    found = user_space(user_place, VERSION)
    assert (found.place.endswith("(/opt/nvidia)"), found.problems) == (True, ())
    assert "not searched" not in condition(user_place).message, "what is elsewhere does not matter"
    assert "not searched" in condition(user_place, "580.1.1").message


class Listed(Host):
    """Records which directories were listed, and which files were opened."""

    def __init__(self, tree: Path) -> None:
        super().__init__(tree)
        self.touched: list[str] = []

    def entries(self, path: str) -> tuple[str, ...]:
        self.touched.append(path)
        return super().entries(path)

    def head(self, path: str, size: int) -> bytes:
        self.touched.append(path)
        return super().head(path, size)


def test_a_users_directory_is_not_even_listed(tmp_path: Path) -> None:
    """The directory may have a million names, or be on a FUSE file system that never answers."""
    host = Listed(tmp_path)
    put(bare(host), "/var/lib/nvidia/lib64")
    put(host, f"{USERS}/lib64", OLDER)
    host.file(f"{USERS}/share/vulkan/icd.d/nvidia_icd.json", "{}")
    links = ("/var/lib/nvidia/lib", "/var/lib/nvidia/lib64/libnvidia-x.so.1")
    host.symlink(links[0], f"{USERS}/lib64")
    host.symlink(links[1], f"{USERS}/lib64/libcuda.so.{OLDER}")
    host.owners["/home/kubernetes"] = (0o755, 1000)
    found = user_space(host, VERSION)
    assert (found.version, found.place) == (VERSION, f"{COS} (Container-Optimized OS)")
    assert not [path for path in host.touched if path.startswith("/home") or path in links]
    assert not [each for each in by_target(found) if OLDER in each or "icd.d" in each]
    (libraries, beside) = found.problems
    why = "/home/kubernetes belongs to user 1000, not to root"
    assert libraries == (
        f"not searched: {USERS}/lib64, {USERS}/lib, links in /var/lib/nvidia/lib64, /var/lib/nvidia/lib "
        f"(Container-Optimized OS), because {why}"
    )
    assert beside.startswith(f"not searched: {USERS}/bin, {USERS}, {USERS}/share")


@pytest.mark.parametrize(
    ("driver", "other", "stale"),
    [
        ("/usr/lib64", "/usr/local/lib", OLDER),
        ("/var/lib/nvidia/lib64", f"{USERS}/lib64", VERSION),
        ("/opt/nvidia/lib64", "/opt/nvidia/current/lib64", VERSION),
    ],
)
def test_one_bad_directory_does_not_refuse_a_whole_place(host: Host, driver: str, other: str, stale: str) -> None:
    """On many hosts, Debian's /usr/local/lib belongs to the group staff; a user may be called kubernetes."""
    put(bare(host), driver)
    put(host, other, stale, "libnvidia-glcore", "libcuda")
    host.owners[other] = (0o2775, 0)
    found = user_space(host, VERSION)
    assert found.version == VERSION
    assert {posixpath.dirname(each.source) for each in by_target(found).values() if not each.link} == {driver}
    assert found.refused_places == ()
    (problem,) = found.problems
    assert problem.startswith(f"not searched: {other} (")
    assert problem.endswith(f"users other than root can write in {other} (mode 2775)")
    assert condition(host).status is Status.TRUE


def test_a_place_that_is_partly_roots_and_lacks_a_library_there(host: Host) -> None:
    put(bare(host), "/usr/lib64", VERSION, "libcuda")
    put(host, "/usr/local/lib")
    host.owners["/usr/local/lib"] = (0o2775, 0)
    problem = condition(host)
    assert problem.reason == "LibrariesBroken"
    why = "users other than root can write in /usr/local/lib (mode 2775)"
    assert problem.message.endswith(f"not searched: /usr/local/lib (a runfile's), because {why}")


def test_a_places_owner_cannot_hide_later_places(user_place: Host) -> None:
    """For example, a FUSE file system may deny access to root."""
    put(user_place, "/opt/nvidia/lib64")
    user_place.failing[f"{USERS}/lib64"] = PermissionError(errno.EACCES, "Permission denied", f"{USERS}/lib64")
    assert user_space(user_place, VERSION).place.endswith("(/opt/nvidia)")
    user_place.failing["/home"] = PermissionError(errno.EACCES, "Permission denied", "/home")
    assert isinstance(user_space(user_place, VERSION).version, Unseen), "whether its owner may be trusted is unknown"


def test_a_driver_containers_files_must_be_roots(host: Host) -> None:
    other_root(bare(host))
    assert user_space(host, VERSION).version == VERSION
    host.owners[f"{DRIVER_CONTAINER}/usr/lib"] = (0o775, 0)
    found = user_space(host, VERSION)
    assert isinstance(found.version, Absent)
    assert found.skipped_directories == (
        f"{DRIVER_CONTAINER}: /usr/lib/x86_64-linux-gnu (GPU Operator's driver container), because {DRIVER_CONTAINER}: "
        "users other than root can write in /usr/lib (mode 0775)",
    )
    host.owners = {"/run/nvidia": (0o755, 1000)}
    assert user_space(host, VERSION).skipped_directories == (
        f"{DRIVER_CONTAINER} (GPU Operator's driver container), because /run/nvidia belongs to user 1000, not to root",
    )


def test_an_entry_of_a_driver_containers_loader_cache(host: Host) -> None:
    other_root(bare(host))
    put(host, f"{DRIVER_CONTAINER}/usr/local/lib", OLDER, "libnvidia-glcore")
    listing = cache_of(
        *(f"/usr/lib/x86_64-linux-gnu/{name}.so.1" for name in MAIN), "/usr/local/lib/libnvidia-glcore.so.1"
    )
    cache = host.below(DRIVER_CONTAINER).full_path("/etc/ld.so.cache")
    for program in ("ldconfig", "/sbin/ldconfig"):
        host.command(program, "-p", "-C", cache, stdout=listing)
    host.owners[f"{DRIVER_CONTAINER}/usr/local/lib"] = (0o2775, 0)
    found = user_space(host, VERSION)
    assert found.version == VERSION
    assert [each.partition(" (")[0] for each in found.problems] == [f"not searched: {DRIVER_CONTAINER}: /usr/local/lib"]


def test_only_files_that_everybody_may_read_are_copied(user_place: Host) -> None:
    """This holds even for a place in the configuration, for whose owners the administrator is responsible."""
    user_place.file(f"{USERS}/share/glvnd/egl_vendor.d/10_nvidia.json", "{}")
    user_place.owners[f"{USERS}/lib64/libGLX_nvidia.so.{VERSION}"] = (0o600, 1000)
    settings = {"library_directories": [f"{USERS}/lib64"], "data_directories": [f"{USERS}/share"]}
    found = user_space(user_place, VERSION, **settings)
    files = by_target(found)
    assert {"usr/share/glvnd/egl_vendor.d/10_nvidia.json", f"{X86}/libcuda.so.{VERSION}"} < set(files)
    assert not [each for each in files.values() if each.source.startswith("/etc") or "GLX" in each.source]
    assert found.problems == (
        f"{USERS}/lib64/libGLX_nvidia.so.{VERSION}: left out, because not every user can read it (mode 0600)",
        f"{USERS}/share/vulkan/icd.d/nvidia_x.json: left out, because not every user can read it (mode 0640)",
    )


def test_companions_and_libraries_next_to_the_loader_caches(host: Host) -> None:
    listed(host)
    for prefix in ("/usr/local", "/usr"):
        host.file(f"{prefix}/share/vulkan/icd.d/nvidia_icd.json", "{}")
        host.file(f"{prefix}/bin/nvidia-smi", executable=True)
    glcore = f"/usr/lib/x86_64-linux-gnu/libnvidia-glcore.so.{VERSION}"
    host.owners |= {"/usr/local/share": (0o775, 0), "/usr/local/bin/nvidia-smi": (0o755, 1000), glcore: (0o666, 0)}
    found = user_space(host, VERSION)
    files = by_target(found)
    assert files["usr/share/vulkan/icd.d/nvidia_icd.json"].source == "/usr/share/vulkan/icd.d/nvidia_icd.json"
    assert files["usr/bin/nvidia-smi"].source == "/usr/bin/nvidia-smi"
    assert f"{X86}/libnvidia-glcore.so.{VERSION}" not in files
    left_out = [glcore, "/usr/local/share/vulkan/icd.d/nvidia_icd.json", "/usr/local/bin/nvidia-smi"]
    assert [each.partition(":")[0] for each in found.problems] == left_out


@pytest.mark.parametrize("link", [False, True])
def test_vdpaus_directory_next_to_the_loader_caches(host: Host, link: bool) -> None:
    """No entry leads there: it is not listed if others control it, unless the place was configured."""
    listed(host, directory="/usr/lib64")
    directory = "/home/user/vdpau" if link else "/usr/lib64/vdpau"
    put(host, directory, VERSION, "libvdpau_nvidia")
    if link:
        host.symlink("/usr/lib64/vdpau", directory)
    target = f"{X86}/vdpau/libvdpau_nvidia.so.{VERSION}"
    assert target in by_target(user_space(host, VERSION))
    others_directory = "/home/user" if link else directory
    host.owners[others_directory] = (0o755, 1000)
    found = user_space(host, VERSION)
    assert target not in by_target(found)
    assert found.problems == (
        f"/usr/lib64/vdpau: left out, because {others_directory} belongs to user 1000, not to root",
    )
    assert target in by_target(user_space(host, VERSION, library_directories=["/usr/lib64"]))
