"""Files that drivers ship next to their libraries: found where hosts keep them, of one version, named if missing."""

import pytest

from agent.model.conditions import Condition, Status
from agent.model.facts import Library, Unseen, VendorFacts
from agent.model.goal import Grant
from agent.vendors.nvidia.conditions import nvidia_conditions
from agent.vendors.nvidia.host import observe_nvidia
from tests.fakes.host import Host
from tests.fakes.user_space import MAIN, X86, by_target, cache_of, libraries, sources, user_space

V = "550.163.01"
OTHER = "535.261.03"
SPLIT = "/usr/lib/x86_64-linux-gnu/nvidia/current"


@pytest.fixture
def driver(host: Host) -> Host:
    libraries(host, SPLIT, V, *MAIN)
    host.loader_cache(cache_of(*(f"{SPLIT}/{name}.so.{V}" for name in MAIN)))
    host.file("/usr/bin/nvidia-smi", executable=True)
    return host


def companions(host: Host) -> dict[str, Library]:
    return {target: each for target, each in by_target(user_space(host)).items() if "/libcuda" not in target}


AS_ON_THE_HOST = (
    "/usr/share/vulkan/icd.d/nvidia_icd.json",
    "/usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
    "/usr/share/vulkansc/icd.d/nvidia_icd_vksc.json",
    "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "/usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json",
    "/etc/OpenCL/vendors/nvidia.icd",
    "/usr/share/nvidia/nvoptix.bin",
    f"/usr/share/nvidia/nvidia-application-profiles-{V}-rc",
    "/usr/share/nvidia/files.d/sandboxutils-filelist.json",
    "/usr/share/X11/xorg.conf.d/10-nvidia.conf",
    f"/lib/firmware/nvidia/{V}/gsp_ga10x.bin",
)
ELSEWHERE = (
    ("/etc/vulkan/icd.d/nvidia_icd.i686.json", "usr/share/vulkan/icd.d/nvidia_icd.i686.json"),
    (f"{SPLIT}/nvoptix.bin", "usr/share/nvidia/nvoptix.bin"),
    (f"{SPLIT}/nvidia/wine/_nvngx.dll", f"{X86}/nvidia/wine/_nvngx.dll"),
    ("/usr/lib64/nvidia/wine/nvngx.dll", f"{X86}/nvidia/wine/nvngx.dll"),
    (f"/lib/firmware/updates/nvidia/{V}/gsp_tu10x.bin", f"lib/firmware/nvidia/{V}/gsp_tu10x.bin"),
    ("/usr/sbin/nvidia-cuda-mps-server", "usr/bin/nvidia-cuda-mps-server"),
)


@pytest.mark.parametrize(("source", "target"), [*((path, path.lstrip("/")) for path in AS_ON_THE_HOST), *ELSEWHERE])
def test_each_groups_places(driver: Host, source: str, target: str) -> None:
    driver.file(source, size=7, executable="/sbin/" in source)
    assert (companions(driver)[target].source, companions(driver)[target].size) == (source, 7)


@pytest.mark.parametrize(
    "where", ["{0}/nvidia/xorg", "/usr/lib64/xorg/modules/{1}", "/usr/lib/xorg/modules/updates/{1}"]
)
def test_the_x_servers_modules(driver: Host, where: str) -> None:
    """Wherever the host keeps the modules, they go to the place where X servers search by default."""
    libraries_, drivers = where.format(SPLIT, "extensions"), where.format(SPLIT, "drivers")
    driver.file(f"{libraries_}/libglxserver_nvidia.so.{V}")
    driver.file(f"{drivers}/nvidia_drv.so")
    found = companions(driver)
    assert found["usr/lib/xorg/modules/drivers/nvidia_drv.so"].source == f"{drivers}/nvidia_drv.so"
    target = f"usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{V}"
    assert found[target].source == f"{libraries_}/libglxserver_nvidia.so.{V}"


def test_links_of_alternatives_are_resolved(driver: Host) -> None:
    driver.file("/usr/lib/nvidia/current/nvidia_drv.so")
    driver.file(f"/usr/lib/nvidia/current/libglxserver_nvidia.so.{V}")
    driver.symlink("/usr/lib/nvidia/nvidia", "/etc/alternatives/nvidia")
    driver.symlink("/etc/alternatives/nvidia", "/usr/lib/nvidia/current")
    conf, link = "nvidia/current/nvidia-drm-outputclass.conf", "usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf"
    driver.file(f"/etc/{conf}")
    driver.symlink(f"/{link}", f"/etc/{conf}")
    found = companions(driver)
    assert found["usr/lib/xorg/modules/drivers/nvidia_drv.so"].source == "/usr/lib/nvidia/current/nvidia_drv.so"
    assert found[link].source == f"/etc/{conf}"


def test_what_stays_on_the_host(driver: Host) -> None:
    for name in ("nvidia-modprobe", "nvidia-settings", "nvidia-bug-report.sh", "nvidia-container-cli"):
        driver.file(f"/usr/bin/{name}", executable=True)
    assert {target for target in companions(driver) if target.startswith("usr/bin/")} == {"usr/bin/nvidia-smi"}
    driver.file("/usr/share/vulkan/icd.d/intel_icd.x86_64.json")
    driver.file("/usr/share/glvnd/egl_vendor.d/50_mesa.json")
    driver.file("/etc/X11/xorg.conf.d/10-nvidia.conf")
    assert not [target for target in companions(driver) if "icd" in target or "mesa" in target or "X11" in target]


def libraries_present(host: Host) -> Condition:
    host.driver(V, gpus=1)
    facts: VendorFacts = observe_nvidia(sources(host))
    return nvidia_conditions(facts, Grant("nvidia", ("0000:01:00.0",)))[2]


def test_missing_groups_are_named_but_are_not_a_fault(driver: Host) -> None:
    driver.remove_file("/usr/bin/nvidia-smi")
    found = libraries_present(driver)
    assert (found.status, found.reason) == (Status.TRUE, "Present")
    told = "not installed on this host: Vulkan, EGL, OpenCL, GSP firmware, nvidia-smi"
    assert found.message == f"2 files of driver {V} from the host's loader cache; {told}"


def test_files_of_another_version_are_left_out_and_named(driver: Host) -> None:
    """nvidia_drv.so has no version in its name: it has the version of the module next to it."""
    strange = (
        f"/usr/share/nvidia/nvidia-application-profiles-{OTHER}-rc",
        f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{OTHER}",
        f"/lib/firmware/nvidia/{OTHER}/gsp_ga10x.bin",
    )
    for path in strange:
        driver.file(path)
    driver.file("/usr/lib/xorg/modules/drivers/nvidia_drv.so")
    assert set(companions(driver)) == {"usr/bin/nvidia-smi", f"{X86}/libnvidia-ml.so.{V}"}
    found = libraries_present(driver)
    assert (found.status, found.reason) == (Status.TRUE, "PartlyOtherVersion")
    assert f"left out, because their version differs: {', '.join(strange)}" in found.message
    assert "GSP firmware" not in found.message


def test_another_driver_next_to_it_is_not_mentioned(driver: Host) -> None:
    for version in (V, OTHER):
        driver.file(f"/lib/firmware/nvidia/{version}/gsp_ga10x.bin")
        driver.file(f"/usr/share/nvidia/nvidia-application-profiles-{version}-rc")
        driver.file(f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{version}")
    assert not [target for target in companions(driver) if OTHER in target]
    assert libraries_present(driver).reason == "Present"


def test_an_untrusted_file_of_the_right_version_is_not_called_another_version(driver: Host) -> None:
    path = f"/lib/firmware/nvidia/{V}/gsp_ga10x.bin"
    driver.file(path)
    driver.owners[path] = (0o664, 0)
    found = user_space(driver)
    assert found.other_version == ()
    assert found.problems == (f"{path}: left out, because users other than root can write to it (mode 0664)",)
    # A failed observation is unseen.
    driver.failing["/usr/share/vulkan/icd.d"] = PermissionError(13, "Permission denied", "/usr/share/vulkan/icd.d")
    unseen = user_space(driver).files
    assert isinstance(unseen, Unseen)
    assert "/usr/share/vulkan/icd.d" in unseen.why


def test_the_backend_of_gbm_is_a_link_to_the_allocator(driver: Host) -> None:
    libraries(driver, SPLIT, V, "libnvidia-allocator")
    files = by_target(user_space(driver))
    assert files[f"{X86}/gbm/nvidia-drm_gbm.so"].link == f"../libnvidia-allocator.so.{V}"


def test_firmware_is_found_where_the_kernel_looks_first(driver: Host) -> None:
    driver.file("/proc/sys/kernel/osrelease", "6.12.1\n")
    for place in ("/lib/firmware", "/lib/firmware/6.12.1", "/lib/firmware/updates", "/opt/fw"):
        driver.file(f"{place}/nvidia/{V}/gsp_ga10x.bin")
    best, target = "/lib/firmware/updates/6.12.1", f"lib/firmware/nvidia/{V}/gsp_ga10x.bin"
    driver.file(f"{best}/nvidia/{V}/gsp_ga10x.bin")
    assert companions(driver)[target].source == f"{best}/nvidia/{V}/gsp_ga10x.bin"
    driver.file("/sys/module/firmware_class/parameters/path", "/opt/fw\n")
    assert companions(driver)[target].source == f"/opt/fw/nvidia/{V}/gsp_ga10x.bin"
