"""Graphics in a pod with a GPU: its image's loaders find and load NVIDIA's driver, or the reason why Mesa answers.

There is no GPU, so NVIDIA's libraries cannot initialise or render. The tests show which libraries are loaded, and in
which order. The image's loaders, Mesa and X server are Debian's; the driver's files are real.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from integration.bed.cache import step
from integration.bed.drivers.graphics_image import GRAPHICS_TEST, RENDERER_PATH, graphics_image
from integration.bed.machine.node import MACHINE, Node, Pod
from integration.bed.measure.versions import machine_versions
from integration.bed.vm.installation import CONFIGURATION
from integration.bed.vm.simulated_host import SimulatedHost
from integration.bed.vm.transfer import send_files
from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("000")

PLACE = "var/lib/unbounded-agent-bed/graphics"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
NAME = "__GLX_VENDOR_LIBRARY_NAME"
# No abstract socket: pods share the node's network here, so it would be visible to all of them.
X_SERVER = "Xvfb :99 -screen 0 64x64x24 -nolisten local >/tmp/xvfb.log 2>&1 & exec sleep infinity"
WAIT = "for _ in $(seq 300); do test -e /tmp/.X11-unix/X99 && exit; sleep 0.2; done; cat /tmp/xvfb.log"
INITIALISED = re.compile(r"calling init: \S+/([^/\s]+)$", re.MULTILINE)
"""Printed by ld.so(8) with LD_DEBUG=files for each library, once it is loaded with all that it needs."""


@dataclass(frozen=True)
class Loaded:
    """A program's output, and the libraries that it loaded, in order."""

    output: str
    libraries: list[str]

    def has(self, *parts: str) -> bool:
        """Return whether libraries whose names begin like this were loaded in this order."""
        places = [next((at for at, name in enumerate(self.libraries) if name.startswith(part)), -1) for part in parts]
        return -1 not in places and places == sorted(places)


@dataclass(frozen=True)
class Shell:
    """A shell in a running container, as with `kubectl exec`."""

    node: Node
    container: str

    def run(self, script: str) -> str:
        """Return a script's output, whatever its exit status: without a GPU most programs fail."""
        # If a command fails, crictl prints only the failure. It also adds line breaks.
        script = f"({script}) 2>&1 || true"
        return self.node.in_container(self.container, "sh", "-c", script, timeout=120).stdout.strip()

    def loaded(self, command: str, environment: str = "") -> Loaded:
        """Return what a command loads."""
        trace = "/tmp/loaded"
        traced = f"{environment} LD_DEBUG=files LD_DEBUG_OUTPUT={trace} {command}"
        said = self.run(f"rm -f {trace}.*; {traced}; echo exit status $?")
        return Loaded(said, INITIALISED.findall(self.run(f"grep -h 'calling init' {trace}.*")))


@pytest.fixture(scope="module")
def host(shared_host: SimulatedHost) -> SimulatedHost:
    """A ready host whose node has the image."""
    bed = Bed(shared_host)
    image = graphics_image()
    files = {str(path.relative_to(image)): path for path in image.rglob("*") if path.is_file()}
    with step("import the graphics image"):
        bed.node.run("mkdir", f"/{PLACE}")
        send_files(bed.guest, files, f"/var/lib/machines/{MACHINE}/{PLACE}")
        archive = f"/{PLACE}/graphics-test.tar"
        bed.node.run("ctr", "--namespace", "k8s.io", "images", "import", archive, timeout=400)
    return shared_host


@pytest.fixture
def bed(host: SimulatedHost, record_host: None, record_property: Callable[[str, object], None]) -> Bed:
    bed = Bed(host)
    for part, version in machine_versions(bed.node).items():
        record_property(part, version)
    return bed


def start(host: SimulatedHost, **environment: str) -> Shell:
    """Start a pod with GPU 1 of 8, and an X server that knows no GPU."""
    node = Bed(host).node
    pod = Pod(
        ("sh", "-c", X_SERVER),
        cdi=("1",),
        environment={"DISPLAY": ":99"} | environment,
        image=GRAPHICS_TEST,
        mounts={RENDERER_PATH: f"/{PLACE}/renderer"},
    )
    shell = Shell(node, node.start_pod(pod))
    assert shell.run(WAIT) == ""
    return shell


@pytest.fixture(scope="module")
def shell(host: SimulatedHost) -> Shell:
    """A pod without graphics settings."""
    return start(host)


def test_the_driver_is_present(bed: Bed, shell: Shell) -> None:
    """The first three steps of debugging: nvidia-smi, the libraries, the files that configure the loaders."""
    assert shell.run("nvidia-smi -L").count("UUID: GPU-") == 1
    mounts = shell.run("cat /proc/self/mountinfo")
    assert re.search(rf" {LIBRARIES}/libGLX_nvidia\.so\.\S+ ro,.*lowerdir\S*/trees/0\b", mounts)
    files = shell.run(
        f"ls /dev/dri /usr/share/glvnd/egl_vendor.d /etc/vulkan/icd.d; readlink {LIBRARIES}/gbm/nvidia-drm_gbm.so"
    ).split()
    for name in ("renderD129", "card1", "10_nvidia.json", "50_mesa.json", "nvidia_icd.json"):
        assert name in files
    assert "renderD128" not in files
    assert files[-1].startswith("../libnvidia-allocator.so.")
    assert "libEGL_nvidia.so.0" in shell.run("cat /usr/share/glvnd/egl_vendor.d/10_nvidia.json")


def test_vulkan_loads_nvidia(bed: Bed, shell: Shell) -> None:
    found = shell.loaded("vulkaninfo --summary", "VK_LOADER_DEBUG=all")
    assert "Found ICD manifest file /etc/vulkan/icd.d/nvidia_icd.json" in found.output
    assert "Found manifest file /etc/vulkan/implicit_layer.d/nvidia_layers.json" in found.output
    assert found.has("libnvidia-glcore.so.", "libGLX_nvidia.so.0"), found
    # Without a GPU, the driver offers nothing to the loader.
    assert "Could not get 'vkCreateInstance' via 'vk_icdGetInstanceProcAddr' for ICD libGLX_nvidia.so.0" in found.output


def test_egl_loads_nvidia_before_mesa(bed: Bed, shell: Shell) -> None:
    """The numbers in the file names give the order. With a working GPU, the device platform would be NVIDIA's."""
    found = shell.loaded("eglinfo -B")
    assert found.has("libEGL_nvidia.so.0", "libnvidia-eglcore.so.", "libEGL_mesa.so.0"), found
    assert "Device platform:" in found.output, found.output
    # Mesa answers instead, because NVIDIA's driver has no GPU.
    assert "renderer: llvmpipe" in found.output
    alone = shell.loaded("eglinfo -B", "__EGL_VENDOR_LIBRARY_FILENAMES=/usr/share/glvnd/egl_vendor.d/10_nvidia.json")
    assert (alone.has("libEGL_nvidia.so.0"), alone.has("libEGL_mesa.so.0")) == (True, False), alone
    assert "eglInitialize failed" in alone.output
    assert "llvmpipe" not in alone.output


def test_gbm_loads_the_backend_of_the_nodes_driver(bed: Bed, shell: Shell) -> None:
    """libgbm asks the kernel for the node's driver; NVIDIA's backend then finds that the stand-in is not a real one."""
    found = shell.loaded("gbm-probe /dev/dri/renderD129")
    assert found.has("libgbm.so.1", "nvidia-drm_gbm.so", "dri_gbm.so"), found
    assert "DRM_IOCTL_NVIDIA_GET_DEV_INFO failed" in found.output


def test_glx_asks_the_x_server_and_falls_back_to_llvmpipe(bed: Bed, shell: Shell) -> None:
    """The whole driver is present, but Mesa answers: Xvfb names no other vendor."""
    found = shell.loaded("glxinfo -B")
    assert "OpenGL renderer string: llvmpipe" in found.output
    assert found.has("libGLX.so.0", "libGLX_mesa.so.0"), found
    assert not found.has("libGLX_nvidia.so.0"), found
    forced = shell.loaded("glxinfo -B", f"{NAME}=nvidia")
    assert forced.has("libGLX.so.0", "libnvidia-glcore.so.", "libGLX_nvidia.so.0"), forced
    assert not forced.has("libGLX_mesa.so.0"), forced
    # NVIDIA's library asks for a GPU that does not exist, of an X server that does not know it.
    assert "X_GLXCreateNewContext" in forced.output
    assert "llvmpipe" not in forced.output


def configure(bed: Bed, setting: str) -> None:
    """Configure the variable, or none if `setting` is empty, and wait until the published specification follows."""
    line = f'pod_environment.nvidia = {{ {NAME} = "{setting}" }}\n' if setting else ""
    bed.guest.write("/etc/unbounded-agent/config.toml", (CONFIGURATION + line).encode())
    bed.run("systemctl", "reload", "unbounded-agent.service")
    wanted = [f"{NAME}={setting}"] if setting else []

    def follows() -> bool:
        return [each for each in bed.node.spec()["containerEdits"]["env"] if each.startswith(NAME)] == wanted

    wait(f"the specification has {wanted}", follows, 240, bed.evidence)


@pytest.mark.exhaustive
def test_the_configuration_chooses_the_vendor(bed: Bed, host: SimulatedHost, shell: Shell) -> None:
    """New pods get the setting without any change to their manifests or any restart. It overrides what a pod says."""
    before = bed.starts()
    try:
        configure(bed, "nvidia")
        found = start(host, **{NAME: "mesa"}).loaded("glxinfo -B")
        assert (found.has("libGLX_nvidia.so.0"), found.has("libGLX_mesa.so.0")) == (True, False), found
        assert bed.wait_ready()["CDISpecCurrent"]["reason"] == "Verified"
        assert NAME not in shell.run("env")
    finally:
        configure(bed, "")
    assert bed.restarted(before) == "nothing"
