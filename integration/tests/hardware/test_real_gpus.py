"""On real GPUs: this computer is the host, the agent is installed, and one of its machines is ready.

Pods compute with CUDA. The tests detach every GPU, and let a program fail: nothing else may use the GPUs.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.bed.machine.node import Node, Pod
from integration.bed.machine.pod_images import CUDA_TEST, pod_images
from integration.bed.measure.tested_with import NO_GPU
from integration.bed.measure.versions import host_versions, machine_versions
from integration.bed.this_computer import ThisComputer

pytestmark = pytest.mark.scenario("002")

INFORMATION = "/proc/driver/nvidia/gpus"
NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
COMPUTE = ("cuda-sum",)
SECONDS = 20
"""How long a pod computes while something else happens."""
RELOADS = 10
"""Reloads of systemd on each side meanwhile."""
PAGE_FAULT = 31


@dataclass(frozen=True)
class RealHost:
    """This computer and its ready machine."""

    computer: ThisComputer
    node: Node
    gpus: dict[str, str]
    """UUIDs by PCI address, as the kernel module has them."""

    def agent(self, *arguments: str, timeout: float = 120, check: bool = True) -> str:
        completed = self.computer.run(("unbounded-agent", *arguments), timeout, check)
        return completed.stdout + completed.stderr

    def compute(self, *cdi: str) -> list[str]:
        """Return the UUIDs of the GPUs on which a pod with these CDI devices has computed."""
        return self.node.pod(Pod(COMPUTE, cdi=cdi)).stdout.split()

    def wait(self, what: str, done: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.agent('status')}"
            time.sleep(0.2)


def uuids() -> dict[str, str]:
    """Return the UUIDs of this computer's GPUs, by PCI address."""
    files = Path(INFORMATION).glob("*/information")
    found = {path.parent.name: re.search(r"GPU UUID:\s*(GPU-\S+)", path.read_text()) for path in files}
    return {address: match[1] for address, match in sorted(found.items()) if match}


def ready_machine(computer: ThisComputer) -> str:
    """Return the name of a machine that is ready and has all GPUs; empty if there is none."""
    try:
        status: dict[str, Any] = json.loads(computer.run(("unbounded-agent", "status", "--json")).stdout)
    except OSError:
        return ""
    for name, machine in status["machines"].items():
        ready = {each["type"]: each["status"] for each in machine["conditions"]}.get("Ready")
        if ready == "True" and len(machine["gpus"]) == len(uuids()):
            return str(name)
    return ""


@pytest.fixture(scope="module")
def real() -> Iterator[RealHost]:
    gpus, computer = uuids(), ThisComputer()
    if not gpus:
        pytest.skip(NO_GPU)
    machine = ready_machine(computer)
    if not machine:
        pytest.skip("no machine of unbounded-agent on this computer is ready and has all GPUs")
    host = RealHost(computer, Node(computer, machine), gpus)
    listed = json.loads(host.agent("gpus", "list", "--json"))["gpus"]
    if any(each["processes"] for each in listed):
        pytest.skip("other programs use this computer's GPUs")
    archive, images = "/tmp/cuda-test.tar", ("ctr", "--namespace", "k8s.io", "images")
    known = CUDA_TEST in host.node.run(*images, "list", "--quiet").stdout.split()
    computer.run(("machinectl", "copy-to", machine, str(pod_images() / "cuda-test.tar"), archive))
    host.node.run(*images, "import", archive)
    yield host
    host.node.run("rm", archive)
    if not known:
        host.node.run(*images, "rm", CUDA_TEST)


@pytest.fixture(autouse=True)
def _record(real: RealHost, record_property: Callable[[str, object], None]) -> None:
    for part, version in (host_versions(real.computer) | machine_versions(real.node)).items():
        record_property(part, version)


def test_pods_compute_on_the_gpus_that_they_ask_for(real: RealHost) -> None:
    assert real.compute("all") == list(real.gpus.values())
    for index, uuid in enumerate(real.gpus.values()):
        assert real.compute(str(index)) == real.compute(uuid) == [uuid]
    listed = real.node.pod(Pod(("nvidia-smi", "-L"), cdi=("all",))).stdout
    assert re.findall(r"UUID: (\S+)\)", listed) == list(real.gpus.values())
    assert listed == real.node.run("nvidia-smi", "-L").stdout


def test_a_pod_without_a_gpu_has_none(real: RealHost) -> None:
    found = json.loads(real.node.pod(Pod(("gpu-probe", *NODES, "libcuda.so.1"))).stdout)
    assert not {"OK"}.intersection(found["open"].values())
    assert "error" in found["load"]["libcuda.so.1"]
    made = "mknod /dev/mine c 195 0 && gpu-probe /dev/mine"
    assert '"OK"' not in real.node.pod(Pod(("sh", "-c", made)), check=False).stdout


def test_a_pod_computes_on_while_systemd_reloads_and_the_service_restarts(real: RealHost) -> None:
    """NVML and CUDA in pods used to fail after a reload: "Failed to initialize NVML: Unknown Error"."""
    container = real.node.start_pod(Pod((*COMPUTE, str(SECONDS)), cdi=("all",)))
    for _ in range(RELOADS):
        real.computer.run(("systemctl", "daemon-reload"))
        real.node.run("systemctl", "daemon-reload")
    real.computer.run(("systemctl", "restart", "unbounded-agent.service"))
    assert real.node.in_container(container, *COMPUTE).stdout.split() == list(real.gpus.values())
    real.wait("the pod has ended", lambda: "CONTAINER_EXITED" in real.node.run("crictl", "inspect", container).stdout)
    log = real.node.run("crictl", "logs", container).stdout.split()
    assert set(log) == set(real.gpus.values())
    assert '"exitCode": 0' in real.node.run("crictl", "inspect", container).stdout


def test_a_gpu_in_use_is_not_detached_and_an_idle_one_is(real: RealHost) -> None:
    address, uuid = next(iter(real.gpus.items()))
    container = real.node.start_pod(Pod((*COMPUTE, str(SECONDS)), cdi=(uuid,)))
    real.wait("the pod computes", lambda: uuid in real.node.run("crictl", "logs", container).stdout)
    refused = real.agent("gpus", "detach", address, check=False)
    assert f"{address} is in use" in refused
    assert container in refused
    real.node.run("crictl", "stop", "--timeout", "0", container)
    assert f"{address} may be removed" in real.agent("gpus", "detach", address)
    try:
        assert "unresolvable CDI devices" in real.node.pod(Pod(COMPUTE, cdi=(uuid,)), check=False).stderr
        node = f"/dev/nvidia{list(real.gpus).index(address)}"
        assert real.node.run("test", "-e", node, check=False).status
    finally:
        real.agent("gpus", "attach", address)
    assert real.compute(uuid) == [uuid]


def test_the_fault_of_a_program_is_logged_and_the_gpu_goes_on(real: RealHost) -> None:
    address, uuid = next(iter(real.gpus.items()))
    journal = ("journalctl", "--unit=unbounded-agent", "--output=cat", f"--since=@{int(time.time())}")
    failed = real.node.pod(Pod((*COMPUTE, "fault"), cdi=(uuid,)), check=False)
    assert "700: an illegal memory access was encountered" in failed.stdout
    error = f"{address}: Xid {PAGE_FAULT}: "
    real.wait("the error is logged", lambda: error in real.computer.run(journal).stdout)
    assert ready_machine(real.computer), real.agent("status")
    assert real.compute(uuid) == [uuid]
