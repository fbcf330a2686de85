"""With another driver's libraries earlier in the host's loader cache, pods get all files of the loaded driver.

This includes 32-bit libraries, configuration, and the socket of a simulated daemon.
"""

import re

import pytest

from integration.bed.drivers.foreign_trees import crowded_root
from integration.bed.drivers.host_roots import driver_version, host_root
from integration.bed.drivers.nvml import library_name
from integration.bed.machine.node import MACHINE, Pod
from integration.bed.vm.transfer import send_files
from integration.conftest import Bed
from integration.tests.drivers.test_hosts import staged_libraries
from integration.tests.kubernetes.test_pods import expect_gpus, probe

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

OLDER = "usr/lib/x86_64-linux-gnu/nvidia/tesla-535"
COMPATIBILITY = "usr/local/cuda/compat"
"""NVIDIA's cuda-compat packages put a libcuda of another driver here."""
X86_32 = "usr/lib/i386-linux-gnu"
SOCKET = "/run/nvidia-persistenced/socket"
# Each start makes a new directory with a new socket, like nvidia-persistenced.
LISTEN = """
import os, shutil, socket, sys
shutil.rmtree(os.path.dirname(sys.argv[1]), ignore_errors=True)
os.mkdir(os.path.dirname(sys.argv[1]))
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
while True:
    listening.accept()[0].sendall(sys.argv[2].encode())
"""
CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(99).decode())"
LOOK = f"cat /etc/vulkan/icd.d/nvidia_icd.json; readlink -f /{X86_32}/libnvidia-ml.so.1; ldconfig -p; ls -l {SOCKET}"


def start_daemon(bed: Bed, answer: str) -> None:
    """Start a simulated nvidia-persistenced, in place of one that runs; only its socket matters."""
    unit = "simulated-persistenced.service"
    bed.run("systemctl", "stop", unit, check=False)
    bed.run("systemd-run", "--collect", f"--unit={unit}", "python3", "-c", LISTEN, SOCKET, answer)
    bed.run("sh", "-c", f"until test -S {SOCKET}; do sleep 0.2; done")


def test_the_specification_has_the_loaded_driver_only(installed: Bed) -> None:
    """An older driver in /usr/local/lib and a CUDA compatibility directory are ignored, and no file is missing."""
    older = [path for path in (crowded_root() / OLDER).iterdir() if not path.is_symlink()]
    files = {f"usr/local/lib/{path.name}": path for path in older}
    files |= {f"{COMPATIBILITY}/{path.name}": path for path in older if path.name.startswith("libcuda.so.")}
    (narrow,) = (crowded_root() / X86_32 / "nvidia/current").glob("libnvidia-ml.so.*.*")
    # Named with the host's version, which a security update may have changed.
    library = library_name(driver_version(host_root()))
    files[f"{X86_32}/{library}"] = narrow
    send_files(installed.guest, files, "/")
    installed.guest.write("/etc/ld.so.conf.d/000-cuda.conf", f"/{COMPATIBILITY}\n/usr/local/lib\n".encode())
    installed.guest.write("/etc/ld.so.conf.d/i386.conf", f"/{X86_32}\n".encode())
    installed.run("ldconfig")
    listed = installed.run("ldconfig", "-p").stdout
    assert re.findall(r"libcuda\.so\.1 \(libc6,x86-64\) => (\S+)", listed)[:2] == [
        f"/{COMPATIBILITY}/libcuda.so.1",
        "/usr/local/lib/libcuda.so.1",
    ]
    installed.guest.write(
        "/etc/unbounded-agent/config.toml", f'[machines.{MACHINE}]\nsockets = ["persistenced"]\n'.encode()
    )
    start_daemon(installed, "first")
    installed.agent("apply", timeout=400)
    assert installed.conditions()["Ready"]["status"] == "True"
    mounted = {mount["containerPath"] for mount in installed.node.spec()["containerEdits"]["mounts"]}
    staged = staged_libraries(installed)
    assert staged
    assert {f"/{path}" for path in staged} <= mounted
    assert not [path for path in mounted if ".so.535." in path]
    installed.node.run("systemctl", "start", "simulated-pod-images.service", timeout=300)
    expect_gpus(probe(installed.node, cdi=("1",)), {1})
    expect_the_whole_driver(installed, library)
    expect_the_socket_to_follow(installed)


def expect_the_whole_driver(bed: Bed, library: str) -> None:
    """Assert that a pod has Vulkan's ICD, a 32-bit library that its loader knows, and the socket."""
    seen = bed.node.pod(Pod(("sh", "-c", LOOK), cdi=("1",))).stdout
    assert '"library_path": "libGLX_nvidia.so.0"' in seen
    assert f"\n/{X86_32}/{library}\n" in seen
    assert f"libnvidia-ml.so.1 (libc6) => /{X86_32}/libnvidia-ml.so.1" in seen
    assert re.search(rf"^s.* {SOCKET}$", seen, re.MULTILINE), seen
    assert f"{X86_32}/{library}" in bed.conditions()["CDISpecCurrent"]["message"]


def expect_the_socket_to_follow(bed: Bed) -> None:
    """Assert that the new directory of a restarted daemon is bound in the running machine; nothing else restarts."""
    assert bed.node.run("python3", "-c", CONNECT, SOCKET).stdout.strip() == "first"
    start_daemon(bed, "second")
    bed.agent("apply")
    assert bed.node.run("python3", "-c", CONNECT, SOCKET).stdout.strip() == "second"
    assert bed.conditions()["Ready"]["status"] == "True"
