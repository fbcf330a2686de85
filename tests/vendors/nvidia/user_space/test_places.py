"""In which of a host's places the driver is found: layouts of hosts whose loader cache does not list it.

The layouts are simulated, after the sources that places.py names; the files have only an ELF header.
"""

import errno
import json
import threading
from typing import Any

import pytest

from agent.config.settings import DriverSettings
from agent.host.observe.host import list_loader_cache
from agent.model.conditions import Status
from agent.model.facts import Absent, Broken, Unseen
from agent.system.deadlines import bounded, stuck
from agent.vendors.nvidia.places import PLACES, watched_directories
from tests.fakes.host import Host
from tests.fakes.user_space import (
    AARCH64,
    DRIVER_CONTAINER,
    I386,
    I686,
    MAIN,
    OLDER,
    VERSION,
    X32,
    X86,
    X86_64,
    bare,
    by_target,
    cache_of,
    condition,
    listed,
    other_root,
    put,
    user_space,
)
from tests.fakes.waiting import wait_for

# ---- the places, one by one


@pytest.mark.scenario("001")
def test_talos(host: Host) -> None:
    """musl has no loader cache: the libraries are next to a separate glibc, the rest where Talos has it."""
    put(host, "/usr/local/glibc/usr/lib")
    host.file("/usr/local/bin/nvidia-smi", executable=True)
    host.file("/etc/vulkan/icd.d/nvidia_icd.json", "{}")
    host.file("/usr/local/glibc/etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1\n")
    host.file("/usr/local/glibc/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "{}")
    host.file(f"/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin", "firmware")
    host.symlink("/lib", "usr/lib")
    found = user_space(host, VERSION)
    assert found.place == "/usr/local/glibc/usr/lib, /usr/local/glibc/usr/lib64 (Talos)"
    assert (found.version, found.problems, found.other_places) == (VERSION, (), ())
    files = by_target(found)
    assert files[f"{X86}/libcuda.so.{VERSION}"].source == f"/usr/local/glibc/usr/lib/libcuda.so.{VERSION}"
    assert files[f"{X86}/libcuda.so.1"].link == f"libcuda.so.{VERSION}"
    assert files["usr/bin/nvidia-smi"].source == "/usr/local/bin/nvidia-smi"
    firmware = f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"
    vendor, icd = "usr/share/glvnd/egl_vendor.d/10_nvidia.json", "usr/share/vulkan/icd.d/nvidia_icd.json"
    assert {icd, "etc/OpenCL/vendors/nvidia.icd", vendor, firmware} < set(files)
    assert found.not_installed == ()


@pytest.mark.scenario("001")
def test_a_driver_container(host: Host) -> None:
    """Absolute links stay within its root, none leads out, and the kernel's firmware path is one of the host's."""
    other_root(host)
    host.file("/usr/bin/nvidia-smi", "the host's", executable=True)
    host.file(f"{DRIVER_CONTAINER}/opt/real-smi", "the container's", executable=True)
    host.symlink(f"{DRIVER_CONTAINER}/usr/bin/nvidia-smi", "/opt/real-smi")
    host.file("/etc/vulkan/icd.d/nvidia_icd.json", "{}")
    out = "../../../../../../etc/vulkan/icd.d/nvidia_icd.json"
    host.symlink(f"{DRIVER_CONTAINER}/etc/vulkan/icd.d/nvidia_icd.json", out)
    host.file("/sys/module/firmware_class/parameters/path", f"{DRIVER_CONTAINER}/lib/firmware\n")
    host.file(f"{DRIVER_CONTAINER}/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin", "firmware")
    found = user_space(host, VERSION)
    files = by_target(found)
    assert found.place == f"{DRIVER_CONTAINER} (GPU Operator's driver container)"
    assert files["usr/bin/nvidia-smi"].source == f"{DRIVER_CONTAINER}/opt/real-smi"
    assert f"lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin" in files
    assert all(file.source.startswith(f"{DRIVER_CONTAINER}/") for file in files.values() if not file.link)
    for file in files.values():
        assert file.link or host.real_path(file.source) == file.source
    # The link's `..` ends at the container's root, where the link points to itself.
    assert "usr/share/vulkan/icd.d/nvidia_icd.json" not in files


@pytest.mark.parametrize(
    ("directory", "binary", "data"),
    [
        ("/home/kubernetes/bin/nvidia/lib64", "/home/kubernetes/bin/nvidia/bin", "/home/kubernetes/bin/nvidia"),
        ("/usr/local/nvidia/lib64", "/usr/local/nvidia/bin", "/usr/local/nvidia/share"),
        ("/opt/nvidia/current/lib64", "/opt/nvidia/current/bin", "/opt/nvidia/current/share"),
        ("/usr/lib64", "/usr/bin", "/etc"),
    ],
)
def test_directories_of_the_driver_alone(host: Host, directory: str, binary: str, data: str) -> None:
    bare(host)
    put(host, directory)
    host.file(f"{binary}/nvidia-smi", executable=True)
    host.file(f"{data}/vulkan/icd.d/nvidia_icd.json", "{}")
    files = by_target(user_space(host, VERSION))
    assert files[f"{X86}/libcuda.so.{VERSION}"].source == f"{directory}/libcuda.so.{VERSION}"
    assert files["usr/bin/nvidia-smi"].source == f"{binary}/nvidia-smi"
    assert files["usr/share/vulkan/icd.d/nvidia_icd.json"].source == f"{data}/vulkan/icd.d/nvidia_icd.json"


def test_nixos_links_into_its_store(host: Host) -> None:
    store = "/nix/store/hash-graphics-drivers"
    put(host, f"{store}/lib")
    icd = {"ICD": {"library_path": f"{store}/lib/libGLX_nvidia.so.0", "api_version": "1.4"}}
    host.file(f"{store}/share/vulkan/icd.d/nvidia_icd.x86_64.json", json.dumps(icd))
    host.symlink("/run/opengl-driver", store)
    files = by_target(user_space(host, VERSION))
    assert files[f"{X86}/libcuda.so.{VERSION}"].source == f"{store}/lib/libcuda.so.{VERSION}"
    manifest = json.loads(files["usr/share/vulkan/icd.d/nvidia_icd.x86_64.json"].text)
    assert manifest["ICD"] == {"library_path": f"/{X86}/libGLX_nvidia.so.0", "api_version": "1.4"}


def test_the_elf_header_gives_the_architecture(host: Host) -> None:
    """Other files are left out: libraries for another processor, x32 or big-endian, a linker script, a short file."""
    bare(host)
    put(host, "/usr/lib64")
    put(host, "/usr/lib", VERSION, *MAIN, header=I686)
    big = X86_64[:5] + b"\x02" + X86_64[6:]
    others = {"arm": AARCH64, "x32": X32, "script": b"GROUP ( libcuda.so.1 )" * 4, "short": b"\x7fELF", "big": big}
    others["empty"] = b""
    for name, content in others.items():
        host.file(f"/usr/lib32/libnvidia-{name}.so.{VERSION}", content)
    host.make_directory(f"/usr/lib32/libnvidia-directory.so.{VERSION}")
    found = user_space(host, VERSION)
    targets = {target for target in by_target(found) if target.startswith("usr/lib/")}
    assert {f"{X86}/libcuda.so.{VERSION}", f"{I386}/libcuda.so.{VERSION}"} < targets
    assert {target.rpartition("/")[0] for target in targets} == {X86, I386}
    assert {each.partition("libnvidia-")[2].partition(".")[0] for each in targets} & {*others, "directory"} == set()


# ---- which of them


def test_the_loader_cache_comes_first_and_the_others_are_named(host: Host) -> None:
    listed(host)
    put(host, "/opt/nvidia/lib64", OLDER)
    put(host, "/usr/local/nvidia/lib64")
    found = user_space(host, VERSION)
    assert found.place == "the host's loader cache"
    assert found.other_places == (
        f"driver {VERSION} in /usr/local/nvidia/lib64, /usr/local/nvidia/lib (/usr/local/nvidia)",
        f"driver {OLDER} in /opt/nvidia/current/lib64, /opt/nvidia/current/lib, /opt/nvidia/lib64, /opt/nvidia/lib "
        "(/opt/nvidia)",
    )
    message = condition(host).message
    assert f"from the host's loader cache; not used: driver {VERSION} in /usr/local/nvidia/lib64" in message


def test_a_driver_that_matches_the_module_wins_over_an_earlier_one(host: Host) -> None:
    listed(host, OLDER)
    put(host, "/usr/local/nvidia/lib64")
    assert user_space(host, VERSION).place.endswith("(/usr/local/nvidia)")
    for module in (OLDER, "", "580.1.1"):
        found = user_space(host, module)
        assert (found.place, found.version) == ("the host's loader cache", OLDER)


def test_an_incomplete_driver_does_not_hide_a_complete_one(host: Host) -> None:
    put(host, "/usr/lib/x86_64-linux-gnu", VERSION, "libcuda")
    host.loader_cache(cache_of("/usr/lib/x86_64-linux-gnu/libcuda.so.1"))
    assert isinstance(user_space(host, VERSION).version, Broken)
    assert condition(host).message.startswith("the host's loader cache: no driver version")
    put(host, "/opt/nvidia/lib64")
    assert user_space(host, VERSION).version == VERSION
    assert isinstance(user_space(host, "580.1.1").version, Broken), "what is in the middle of an upgrade"


def test_a_loader_cache_that_lists_only_a_part(host: Host) -> None:
    """ldconfig has not run since, or searches only one of the directories: the complete driver is found anyway."""
    put(host, "/usr/lib64")
    put(host, "/usr/lib", header=I686)
    listing = cache_of(*(f"/usr/lib/{name}.so.1" for name in MAIN)).replace("(libc6,x86-64)", "(libc6)")
    host.loader_cache(listing)
    found = user_space(host, VERSION)
    assert found.place.endswith("(a runfile's)")
    assert {f"{X86}/libcuda.so.1", f"{I386}/libcuda.so.1", f"{I386}/libGLX_nvidia.so.0"} < set(by_target(found))


def test_one_directory_is_one_driver(host: Host) -> None:
    """Fedora's directory is in the loader cache, and is also a place where a runfile may have put a driver."""
    put(host, "/usr/lib64")
    host.loader_cache(cache_of(*(f"/lib64/{name}.so.1" for name in MAIN)))
    host.symlink("/lib64", "usr/lib64")
    found = user_space(host, VERSION)
    assert (found.place, found.other_places) == ("the host's loader cache", ())


def test_a_place_after_an_unseen_one_is_not_used_instead(host: Host) -> None:
    bare(host)
    put(host, "/opt/nvidia/lib64")
    before = "/usr/local/nvidia/lib64"
    host.failing[before] = PermissionError(errno.EACCES, "Permission denied", before)
    assert isinstance(user_space(host, VERSION).version, Unseen)
    del host.failing[before]
    host.failing["/usr/lib64"] = PermissionError(errno.EACCES, "Permission denied", "/usr/lib64")
    assert user_space(host, VERSION).version == VERSION


def test_a_place_that_hangs_does_not_delay_the_others(host: Host) -> None:
    """The place, such as a network file system, is unseen, and is not waited for again while it hangs."""
    listed(host)
    (place,) = (each for each in PLACES if each.name == "/opt/nvidia")
    what, released = f"the driver's place {place}", threading.Event()
    try:
        with pytest.raises(TimeoutError):
            bounded(what, released.wait, 0.01)
        found = user_space(host, VERSION)
        assert (found.place, found.version) == ("the host's loader cache", VERSION)
        unseen = user_space(host, "580.1.1").version
        assert isinstance(unseen, Unseen), "what it has is not known"
        assert "/opt/nvidia/current/lib64" in unseen.why
    finally:
        released.set()
    wait_for(lambda: what not in stuck())


def test_no_driver_anywhere(host: Host) -> None:
    found = condition(bare(host))
    assert (found.status, found.reason) == (Status.FALSE, "NotInstalled")
    assert "driver.library_directories" in found.message


# ---- the configuration


@pytest.mark.scenario("001")
def test_configured_directories(host: Host) -> None:
    put(host, "/srv/driver/libs")
    listed(host, OLDER)
    host.file("/srv/driver/tools/nvidia-smi", executable=True)
    host.file("/srv/driver/data/vulkan/icd.d/nvidia_icd.json", "{}")
    settings: dict[str, Any] = {
        "library_directories": ["/srv/none", "/srv/driver/libs/"],
        "binary_directories": ["/srv/driver/tools"],
        "data_directories": ["/srv/driver/data"],
    }
    found = user_space(host, OLDER, **settings)
    assert (found.version, found.place) == (VERSION, "/srv/none, /srv/driver/libs (driver.library_directories)")
    files = by_target(found)
    assert files["usr/bin/nvidia-smi"].source == "/srv/driver/tools/nvidia-smi"
    assert files["usr/share/vulkan/icd.d/nvidia_icd.json"].source == "/srv/driver/data/vulkan/icd.d/nvidia_icd.json"
    assert condition(host, **settings).status is Status.TRUE
    put(host, "/srv/image/usr/lib64")
    host.symlink("/srv/current", "image")
    found = user_space(host, VERSION, root="/srv/current", library_directories=["/usr/lib64"])
    assert found.place == "/usr/lib64 in /srv/current (driver.library_directories)"
    assert by_target(found)[f"{X86}/libcuda.so.{VERSION}"].source == f"/srv/image/usr/lib64/libcuda.so.{VERSION}"


@pytest.mark.scenario("001")
@pytest.mark.parametrize(
    ("driver", "key", "why"),
    [
        ({"root": "/srv/none"}, "driver.root", "/srv/none: no such file"),
        ({"root": "/srv/empty"}, "driver.root", "/srv/empty: /etc/ld.so.cache: no such file"),
        ({"library_directories": ["/srv/none"]}, "driver.library_directories", "found no library"),
        ({"root": "/"}, "driver.root", "found no library"),
    ],
)
def test_a_configured_place_without_a_driver_is_an_error_that_names_the_key(
    host: Host, driver: dict[str, Any], key: str, why: str
) -> None:
    """There is never a fallback to other places."""
    put(host, "/opt/nvidia/lib64")
    host.make_directory("/srv/empty")
    bare(host)
    assert user_space(host, VERSION).version == VERSION
    assert isinstance(user_space(host, VERSION, **driver).version, Absent)
    found = condition(host, **driver)
    assert (found.status, found.reason) == (Status.FALSE, "NotInConfiguredPlace")
    assert f"correct the key {key}" in found.message
    assert why in found.message


def test_watched_directories() -> None:
    """Loader caches and directories; of a configured place only the host's own cache, because a network's may hang."""
    everything = watched_directories(DriverSettings())
    assert everything[:3] == ("/etc", "/run/nvidia/driver/etc", "/usr/local/glibc/usr/lib")
    assert len(set(everything)) == len(everything)
    assert not [each for each in everything if each.startswith(("/opt", "/home"))], "which may be a network's"
    assert watched_directories(DriverSettings.validated({"root": "/"})) == ("/etc",)
    elsewhere = {"root": "/srv", "library_directories": ["/lib"]}
    for driver in ({"root": "/srv/image"}, {"library_directories": ["/srv/lib"]}, elsewhere):
        assert watched_directories(DriverSettings.validated(driver)) == ()


# ---- loader caches of other roots


def test_each_root_has_its_cache(host: Host) -> None:
    bare(host)
    other_root(host)
    first = list_loader_cache(host, DRIVER_CONTAINER)
    assert isinstance(first, tuple)
    assert [entry.path for entry in first] == [f"/{X86}/{name}.so.1" for name in MAIN]
    assert list_loader_cache(host) != first
    # A link out of the root leads to the file of that name below the root, or to none, but never to the host's.
    host.remove_file(f"{DRIVER_CONTAINER}/etc/ld.so.cache")
    host.symlink(f"{DRIVER_CONTAINER}/etc/ld.so.cache", "../../../../etc/ld.so.cache")
    assert not isinstance(list_loader_cache(host, DRIVER_CONTAINER), tuple)
    assert isinstance(list_loader_cache(host, "/run/none"), Absent)
