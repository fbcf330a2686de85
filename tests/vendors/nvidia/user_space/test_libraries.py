"""Which files make a driver root, with Debian's and Ubuntu's real packages, and what can be wrong with them."""

import posixpath
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from agent.model.facts import Absent, Broken, Unseen
from agent.model.paths import LOADER_CACHE
from tests.fakes.facts import library
from tests.fakes.host import Host
from tests.fakes.user_space import MAIN, X86, by_target, cache_of, libraries, user_space

WITH_WRAPPERS = "ubuntu-24.04-driver-580-in-usr-local-nvidia"
MAIN_FILES = [f"{X86}/{name}.so.550.163.01" for name in MAIN]


@pytest.mark.scenario("002")
def test_debian_splits_the_driver_over_two_directories(host: Host) -> None:
    host.load("debian-13-driver-550")
    found = user_space(host, "550.163.01")
    files = by_target(found)
    assert (found.version, found.problems) == ("550.163.01", ())
    split = "/usr/lib/x86_64-linux-gnu/nvidia/current"
    cuda, nanoseconds = "libcuda.so.550.163.01", 1_700_000_000 * 10**9
    assert files[f"{X86}/{cuda}"] == library(f"{X86}/{cuda}", f"{split}/{cuda}", size=28712096, mtime_ns=nanoseconds)
    assert files[f"{X86}/libnvidia-glcore.so.550.163.01"].source == f"/{X86}/libnvidia-glcore.so.550.163.01"
    assert files[f"{X86}/libcuda.so.1"].link == files[f"{X86}/libcuda.so"].link == cuda
    assert files[f"{X86}/libnvidia-nvvm.so.550.163.01"].source == f"{split}/libnvidia-nvvm.so.550.163.01"
    program = files["usr/bin/nvidia-smi"]
    assert (program.source, program.executable) == ("/usr/lib/nvidia/current/nvidia-smi", True)


def test_a_driver_in_usr_local_nvidia_behind_wrapper_scripts(host: Host) -> None:
    """Seen on a host with an H200: /usr/bin/nvidia-smi is a script that runs /usr/local/nvidia/bin/nvidia-smi."""
    host.load(WITH_WRAPPERS)
    found = user_space(host, "580.159.04")
    assert (found.version, found.problems, found.place_name) == ("580.159.04", (), "the host's loader cache")
    files = by_target(found)
    programs = {target: file.source for target, file in files.items() if target.startswith("usr/bin/")}
    names = ("smi", "debugdump", "persistenced", "cuda-mps-control", "cuda-mps-server")
    assert programs == {f"usr/bin/nvidia-{name}": f"/usr/local/nvidia/bin/nvidia-{name}" for name in names}
    layer = "vulkan/implicit_layer.d/nvidia_layers.json"
    assert files[f"usr/share/{layer}"].source == f"/usr/local/nvidia/share/{layer}", "no usual directory has a link"
    assert files[f"{X86}/libcuda.so.1"].link == "libcuda.so.580.159.04"


@pytest.fixture
def prefix(host: Host) -> Host:
    """A host with a driver in a prefix of its own, which the loader cache names by a link, as Flatcar makes it."""
    libraries(host, "/opt/nvidia/580.1.2/lib64", "580.1.2", *MAIN)
    host.symlink("/opt/nvidia/current", "580.1.2")
    for directory in ("/opt/nvidia/580.1.2/bin", "/srv/bin", "/usr/bin"):
        host.file(f"{directory}/nvidia-smi", executable=True)
    host.loader_cache(cache_of(*(f"/opt/nvidia/current/lib64/{name}.so.580.1.2" for name in MAIN)))
    return host


def test_programs_next_to_the_libraries_come_before_the_usual_ones_and_after_configured_ones(prefix: Host) -> None:
    expected: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "/opt/nvidia/580.1.2"),
        ({"root": "/"}, "/opt/nvidia/580.1.2"),
        ({"root": "/", "binary_directories": ["/srv/bin"]}, "/srv"),
    )
    for settings, place in expected:
        found = by_target(user_space(prefix, "580.1.2", **settings))
        assert found["usr/bin/nvidia-smi"].source == f"{place}/bin/nvidia-smi"


def test_another_users_directory_next_to_the_libraries_is_not_searched(prefix: Host) -> None:
    prefix.owners["/opt/nvidia/580.1.2/bin"] = (0o755, 1000)
    found = user_space(prefix, "580.1.2")
    assert by_target(found)["usr/bin/nvidia-smi"].source == "/usr/bin/nvidia-smi"
    (problem,) = found.problems
    assert problem.startswith("not searched: /opt/nvidia/580.1.2/bin (the host's loader cache), because ")


def test_a_script_is_not_a_driver_program(host: Host) -> None:
    host.load("ubuntu-24.04-driver-580")
    for directory in ("/usr/local/bin", "/usr/bin"):
        host.file(f"{directory}/nvidia-persistenced", "#!/bin/sh\n", executable=True)
    host.file("/usr/local/bin/nvidia-smi", "#!/bin/sh\n", executable=True)
    found = user_space(host, "580.178.04")
    files = by_target(found)
    assert files["usr/bin/nvidia-smi"].source == "/usr/bin/nvidia-smi"
    assert "usr/bin/nvidia-persistenced" not in files
    assert found.problems == tuple(
        f"{directory}/nvidia-persistenced: left out, because it is a script, and not NVIDIA's program"
        for directory in ("/usr/local/bin", "/usr/bin")
    )


def test_ubuntu_is_flat_and_has_libraries_with_their_own_numbers(host: Host) -> None:
    host.load("ubuntu-24.04-driver-580")
    found = user_space(host, "580.178.04")
    files = by_target(found)
    assert (found.version, found.problems) == ("580.178.04", ())
    assert files[f"{X86}/libnvidia-nvvm70.so.4"].source == f"/{X86}/libnvidia-nvvm70.so.4"
    assert files[f"{X86}/libnvidia-egl-gbm.so.1"].link == "libnvidia-egl-gbm.so.1.1.3"
    assert files[f"{X86}/vdpau/libvdpau_nvidia.so.580.178.04"].size == 683344
    assert files[f"{X86}/vdpau/libvdpau_nvidia.so.1"].link == "libvdpau_nvidia.so.580.178.04"
    assert {"usr/bin/nvidia-cuda-mps-server", "usr/bin/nvidia-persistenced"} < set(files)
    assert not [target for target in files if "libicudata" in target or "nvidia-xconfig" in target]


@pytest.mark.parametrize("name", ["debian-13-driver-550", "ubuntu-24.04-driver-580", WITH_WRAPPERS])
def test_every_link_of_a_driver_root_leads_to_a_file_in_it(host: Host, name: str) -> None:
    host.load(name)
    files = by_target(user_space(host))
    for link in (each for each in files.values() if each.link):
        directory = link.target.rpartition("/")[0]
        assert not files[posixpath.normpath(f"{directory}/{link.link}")].link, link
    for file in (each for each in files.values() if not each.link):
        assert host.real_path(file.source) == file.source


class Choice(NamedTuple):
    """Files by directory, what the loader cache lists, and what is chosen for a module's version."""

    files: Mapping[str, tuple[str, ...]]
    listed: tuple[str, ...]
    module: str
    chosen: dict[str, str]
    """The chosen sources by name; all others must not be chosen."""


def at(directory: str, *names: str) -> dict[str, str]:
    return {name: f"{directory}/{name}" for name in names}


def paths(directory: str, *names: str) -> tuple[str, ...]:
    return tuple(at(directory, *names).values())


OURS = ("libcuda.so.550.163.01", "libnvidia-ml.so.550.163.01")
NEXT = ("libcuda.so.580.178.04", "libnvidia-ml.so.580.178.04")
PLAIN = at("/usr/lib64", *OURS)
OF_CUDA = paths("/usr/lib64", OURS[0])
API, GLCORE = "libnvidia-api.so.1", "libnvidia-glcore.so.550.163.01"
COMPAT = "/usr/local/cuda/compat"
TWO = {"/usr/local/lib": (*NEXT, API), "/usr/lib64": (*OURS, API)}
BOTH = (*paths("/usr/local/lib", API, NEXT[0]), *paths("/usr/lib64", API, OURS[0]))
HWCAPS = "/usr/lib64/glibc-hwcaps/x86-64-v3"
TOOLKITS = ("libnvidia-container.so.1.19.1", "libnvidia-container-go.so.1.19.1", "libnvidia-gtk3.so.550.163.01")
SWITCHES = ("libnvidia-nscq.so.550.163.01", "libnvsdm.so.550.163.01")
CHOICES = {
    # A CUDA compatibility directory has a libcuda of another version and no NVML, and may be first in the cache.
    **{
        f"compatibility directory {module}": Choice(
            {COMPAT: ("libcuda.so.575.57.08", API), "/usr/lib64": (*OURS, API)},
            (*paths(COMPAT, "libcuda.so.575.57.08", API), *paths("/usr/lib64", OURS[0], API)),
            module,
            at("/usr/lib64", *OURS, API),
        )
        for module in ("550.163.01", "575.57.08", "")
    },
    "compatibility directory of our version": Choice(
        {COMPAT: OURS[:1], "/usr/lib64": OURS}, (*paths(COMPAT, OURS[0]), *OF_CUDA), "", PLAIN
    ),
    # A file with its own number comes from the chosen version's directory.
    "two versions, the older loaded": Choice(TWO, BOTH, "550.163.01", at("/usr/lib64", *OURS, API)),
    "two versions, the newer loaded": Choice(TWO, BOTH, "580.178.04", at("/usr/local/lib", *NEXT, API)),
    "two versions, another loaded": Choice(TWO, BOTH, "535.1.2", at("/usr/local/lib", *NEXT, API)),
    "the loader's first": Choice(
        {"/opt/second": OURS, "/opt/first": OURS},
        (*paths("/opt/first", OURS[0]), *paths("/opt/second", OURS[0])),
        "",
        at("/opt/first", *OURS),
    ),
    "libcuda's directory before the loader's first": Choice(
        {"/opt/half": (OURS[1], GLCORE), "/usr/lib64": (OURS[0], GLCORE)},
        (*paths("/opt/half", OURS[1]), *OF_CUDA),
        "",
        at("/usr/lib64", OURS[0], GLCORE) | at("/opt/half", OURS[1]),
    ),
    "for newer processors only": Choice(
        {HWCAPS: OURS, "/usr/lib64": OURS}, (*paths(HWCAPS, OURS[0]), *OF_CUDA), "", PLAIN
    ),
    "the toolkit's and nvidia-settings'": Choice(
        {"/usr/lib64": (*OURS, *TOOLKITS)}, (*paths("/usr/lib64", *TOOLKITS), *OF_CUDA), "", PLAIN
    ),
    # DCGM loads these by their sonames. Packages of their own install them in the driver's version.
    "for monitoring of switches": Choice(
        {"/usr/lib64": (*OURS, *SWITCHES)}, OF_CUDA, "", at("/usr/lib64", *OURS, *SWITCHES)
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_which_files_are_chosen(host: Host, name: str) -> None:
    choice = CHOICES[name]
    for directory, names in choice.files.items():
        for each in names:
            host.file(f"{directory}/{each}", size=1000)
    host.loader_cache(cache_of(*choice.listed))
    files = by_target(user_space(host, choice.module))
    assert {posixpath.basename(each.source): each.source for each in files.values() if each.source} == choice.chosen
    links = {posixpath.basename(file.link) for file in files.values() if file.link}
    assert links <= choice.chosen.keys()


STUBS = "/usr/local/cuda/targets/x86_64-linux/lib/stubs"


@pytest.mark.parametrize("name", ["libcuda.so", "libcuda.so.1", "libnvidia-encode.so"])
@pytest.mark.parametrize("way", ["directory", "link", "copy", "elsewhere"])
@pytest.mark.parametrize("first", [True, False])
def test_a_toolkits_stub_is_not_the_drivers(host: Host, name: str, way: str, first: bool) -> None:
    """The stub is in a directory of ld.so.conf.d, or linked, or copied; and the loader may find it first."""
    libraries(host, "/usr/lib64", "550.163.01", *MAIN)
    listed = f"/usr/lib64/{name}" if way in ("link", "copy") else f"{STUBS}/{name}"
    real = {"copy": f"/usr/lib64/{name}", "elsewhere": f"/opt/sdk/lib/{name}"}.get(way, f"{STUBS}/{name}")
    host.file(real, size=100)
    if listed != real:
        host.symlink(listed, real)
    host.loader_cache(cache_of(*((listed, *OF_CUDA) if first else (*OF_CUDA, listed))))
    files = by_target(user_space(host, "550.163.01"))
    assert {each.source for each in files.values() if not each.link} == {*PLAIN.values()}
    assert {each.link for each in files.values() if each.link} <= {"libcuda.so.550.163.01"}


def test_what_is_not_a_driver(host: Host) -> None:
    host.loader_cache(cache_of("/lib/x86_64-linux-gnu/libc.so.6", "/lib/x86_64-linux-gnu/libicudata.so.74"))
    assert isinstance(user_space(host).files, Absent)
    stubs = paths(STUBS, "libcuda.so", "libnvidia-ml.so")
    for path in stubs:
        host.file(path, size=100)
    host.loader_cache(cache_of(*stubs))
    assert isinstance(user_space(host).files, Absent)
    libraries(host, "/usr/lib64", "550.163.01", "libnvidia-glcore")
    host.loader_cache(cache_of("/usr/lib64/libnvidia-glcore.so.550.163.01"))
    assert isinstance(user_space(host).files, Broken)
    libraries(host, COMPAT, "575.57.08", "libcuda")
    libraries(host, "/usr/lib64", "550.163.01", "libnvidia-ml")
    host.loader_cache(cache_of(f"{COMPAT}/libcuda.so.575.57.08", f"/usr/lib64/{OURS[1]}"))
    found = user_space(host, "550.163.01")
    assert isinstance(found.files, Broken)
    assert "libcuda 575.57.08 and libnvidia-ml 550.163.01" in found.files.why


def test_dangling_links_are_named(host: Host) -> None:
    host.load("debian-13-driver-550")
    host.remove_file("/etc/alternatives/nvidia--libnvoptix.so.1-x86_64-linux-gnu")
    found = user_space(host)
    assert [problem.partition(":")[0] for problem in found.problems] == ["/lib/x86_64-linux-gnu/libnvoptix.so.1"]
    assert f"{X86}/libnvoptix.so.550.163.01" in by_target(found)


def test_links_that_lead_in_a_circle_are_named(host: Host) -> None:
    libraries(host, "/usr/lib64", "550.163.01", *MAIN)
    host.symlink("/usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.1")
    host.symlink("/usr/bin/nvidia-smi", "nvidia-smi")
    host.loader_cache(cache_of("/usr/lib64/libcuda.so.550.163.01", "/usr/lib64/libnvidia-ml.so.1"))
    found = user_space(host)
    # The target has the name that the loader looks for, whatever the host's link is.
    assert list(by_target(found)) == [*MAIN_FILES, f"{X86}/libnvidia-ml.so.1"]
    assert [problem.partition(":")[0] for problem in found.problems] == ["/usr/lib64/libnvidia-ml.so.1"]


def test_an_architecture_without_a_driver(tmp_path_factory: pytest.TempPathFactory) -> None:
    host = Host(tmp_path_factory.mktemp("host"), "riscv64")
    host.loader_cache(cache_of("/lib/libc.so.6", tags="libc6,double-float"))
    assert isinstance(user_space(host).files, Absent)


def test_names_with_control_characters_are_refused_by_name(host: Host) -> None:
    libraries(host, "/usr/lib64", "550.163.01", *MAIN, "libnvidia-a\nBind=/etc")
    host.loader_cache(cache_of("/usr/lib64/libcuda.so.550.163.01"))
    found = user_space(host)
    assert list(by_target(found)) == MAIN_FILES
    assert r"libnvidia-a\nBind=" in "".join(found.problems)


@pytest.mark.parametrize("where", ["/usr/lib/x86_64-linux-gnu/nvidia/current", "/lib/x86_64-linux-gnu/libcuda.so.1"])
def test_a_failed_observation_is_unseen(host: Host, where: str) -> None:
    """An unseen loader cache is not an absent driver."""
    host.load("debian-13-driver-550")
    host.failing[where] = PermissionError(13, "Permission denied", where)
    found = user_space(host, "550.163.01")
    assert isinstance(found.files, Unseen)
    assert where in found.files.why
    host.command("/sbin/ldconfig", "-p", status=-9)
    assert isinstance(user_space(host).files, Unseen)
    host.remove_file(LOADER_CACHE)
    assert isinstance(user_space(host).files, Absent)


def test_facts_do_not_depend_on_the_order_of_directories_and_lines(host: Host) -> None:
    host.load("debian-13-driver-550")
    first = by_target(user_space(host))
    header, *lines = host.runner.answers["/sbin/ldconfig", "-p"].stdout.decode().splitlines()
    host.loader_cache("\n".join([header, *reversed(lines)]))
    assert by_target(user_space(host)) == first
