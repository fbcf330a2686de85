"""Another driver's libraries on the host, earlier in its loader cache: pods get the loaded driver's, all of them."""

import re

import pytest

from integration.bed.foreign_trees import crowded_root
from integration.bed.transfer import send_files
from integration.conftest import Bed
from integration.test_hosts import staged_libraries
from integration.test_pods import expect_gpus, probe

pytestmark = pytest.mark.scenario("002")

OLDER = "usr/lib/x86_64-linux-gnu/nvidia/tesla-535"
COMPATIBILITY = "usr/local/cuda/compat"
"""Where NVIDIA's cuda-compat packages have a libcuda of another driver."""


def test_the_specification_is_of_the_loaded_driver(installed: Bed) -> None:
    """Beside an older driver in /usr/local/lib and a CUDA compatibility directory."""
    older = [path for path in (crowded_root() / OLDER).iterdir() if not path.is_symlink()]
    files = {f"usr/local/lib/{path.name}": path for path in older}
    files |= {f"{COMPATIBILITY}/{path.name}": path for path in older if path.name.startswith("libcuda.so.")}
    send_files(installed.guest, files, "/")
    installed.guest.write("/etc/ld.so.conf.d/000-cuda.conf", f"/{COMPATIBILITY}\n/usr/local/lib\n".encode())
    installed.run("ldconfig")
    listed = installed.run("ldconfig", "-p").stdout
    assert re.findall(r"libcuda\.so\.1 \(libc6,x86-64\) => (\S+)", listed)[:2] == [
        f"/{COMPATIBILITY}/libcuda.so.1",
        "/usr/local/lib/libcuda.so.1",
    ]
    installed.agent("apply", timeout=400)
    assert installed.conditions()["Ready"]["status"] == "True"
    mounted = {mount["containerPath"] for mount in installed.node.spec()["containerEdits"]["mounts"]}
    staged = staged_libraries(installed)
    assert staged
    assert {f"/{path}" for path in staged} <= mounted
    assert not [path for path in mounted if ".so.535." in path]
    installed.node.run("systemctl", "start", "simulated-pod-images.service", timeout=300)
    expect_gpus(probe(installed.node, cdi=("1",)), {1})
