"""On real GPUs without MIG: this computer is the host, the agent is installed, and one of its machines is ready.

Pods compute with CUDA. The tests restart the service, detach a GPU, and make a program crash on one.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.bed.machine.node import Node, Pod
from integration.bed.machine.pod_images import CUDA_TEST, pod_images
from integration.bed.measure.versions import host_versions, machine_versions
from integration.bed.process import CommandError
from integration.bed.this_computer import ThisComputer
from integration.bed.waiting import wait

pytestmark = pytest.mark.scenario("002")

INFORMATION = "/proc/driver/nvidia/gpus"
NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
IN_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""By default, CUDA lists the fastest GPU first."""
COMPUTE, LONG = ("cuda-sum",), "600"
"""The program, and for how many seconds it computes if it is stopped sooner."""
RELOADS = 10
"""Reloads of systemd on each side while a pod computes."""
PAGE_FAULT = 31
ARCHIVE = "/tmp/cuda-test.tar"
IMAGES = ("ctr", "--namespace", "k8s.io", "images")


@dataclass(frozen=True)
class GPU:
    """A GPU, as the kernel module describes it."""

    address: str
    uuid: str
    minor: int


@dataclass(frozen=True)
class RealHost:
    """This computer and its ready machine."""

    computer: ThisComputer
    node: Node
    gpus: tuple[GPU, ...]

    @property
    def uuids(self) -> list[str]:
        return [gpu.uuid for gpu in self.gpus]

    def agent(self, *arguments: str, check: bool = True) -> str:
        completed = self.computer.run(("unbounded-agent", *arguments), 120, check)
        return completed.stdout + completed.stderr

    def compute(self, *cdi: str) -> list[str]:
        """Return the UUIDs of the GPUs on which a pod with these CDI devices has computed."""
        return self.node.pod(Pod(COMPUTE, cdi=cdi, environment=IN_ORDER)).stdout.split()

    def start_computing(self, *cdi: str) -> str:
        """Start a pod that computes until it is stopped, and return its container's ID."""
        container = self.node.start_pod(Pod((*COMPUTE, LONG), cdi=cdi, environment=IN_ORDER))
        self.wait("the pod computes", lambda: self.log(container))
        return container

    def log(self, container: str) -> list[str]:
        return self.node.run("crictl", "logs", container).stdout.split()

    def wait(self, what: str, done: Callable[[], object], seconds: float = 60) -> None:
        wait(what, done, seconds, lambda: str(self.agent("status")))


def real_gpus() -> tuple[GPU, ...]:
    """Return this computer's GPUs that are bound to NVIDIA's driver, by PCI address."""
    found = []
    for path in sorted(Path(INFORMATION).glob("*/information")):
        values = dict(re.findall(r"^([^:]+):\s*(.*?)\s*$", path.read_text(), re.MULTILINE))
        found.append(GPU(path.parent.name, values["GPU UUID"], int(values["Device Minor"])))
    return tuple(found)


def ready_machine(computer: ThisComputer, gpus: tuple[GPU, ...]) -> str:
    """Return the name of a machine that is ready and has these GPUs; empty if there is none."""
    status = json.loads(computer.run(("unbounded-agent", "status", "--json")).stdout)
    for name, machine in status["machines"].items():
        ready = {each["type"]: each["status"] for each in machine["conditions"]}.get("Ready")
        if ready == "True" and {gpu.address for gpu in gpus} <= set(machine["gpus"]):
            return str(name)
    return ""


def why_not(host: RealHost) -> str:
    """Return why the tests must not run with this machine; empty if they may."""
    if host.node.run("systemctl", "is-active", "kubelet", check=False).stdout.strip() == "active":
        return f"a kubelet runs in {host.node.machine}, and would stop pods that it does not know"
    if "MIG" in host.node.run("nvidia-smi", "-L").stdout:
        return "a GPU has MIG devices"
    holders = host.agent("gpus", "holders")
    return f"other programs use the GPUs:\n{holders}" if "PID" in holders else ""


@pytest.fixture(scope="module")
def real() -> Iterator[RealHost]:
    gpus, computer = real_gpus(), ThisComputer()
    if not gpus:
        pytest.skip("this computer has no NVIDIA GPU")
    try:
        machine = ready_machine(computer, gpus)
    except (OSError, CommandError) as error:
        pytest.skip(f"the agent is not installed here, or does not work: {error}")
    if not machine:
        pytest.skip("no machine of this computer is ready and has all GPUs: see `unbounded-agent status`")
    host = RealHost(computer, Node(computer, machine), gpus)
    if why := why_not(host):
        pytest.skip(why)
    known = CUDA_TEST in host.node.run(*IMAGES, "list", "--quiet").stdout.split()
    host.node.run("rm", "--force", ARCHIVE)
    try:
        computer.run(("machinectl", "copy-to", machine, str(pod_images() / "cuda-test.tar"), ARCHIVE))
        host.node.run(*IMAGES, "import", ARCHIVE)
        yield host
    finally:
        host.node.remove_pods()
        host.node.run("rm", "--force", ARCHIVE)
        if not known:
            host.node.run(*IMAGES, "rm", CUDA_TEST, check=False)


@pytest.fixture(autouse=True)
def _record(real: RealHost, record_property: Callable[[str, object], None]) -> None:
    for part, version in (host_versions(real.computer) | machine_versions(real.node)).items():
        record_property(part, version)


def test_pods_compute_on_the_gpus_that_they_ask_for(real: RealHost) -> None:
    assert real.compute("all") == real.uuids
    for index, uuid in enumerate(real.uuids):
        assert real.compute(str(index)) == real.compute(uuid) == [uuid]
    listed = real.node.pod(Pod(("nvidia-smi", "-L"), cdi=("all",))).stdout
    assert re.findall(r"UUID: (\S+)\)", listed) == real.uuids
    assert listed == real.node.run("nvidia-smi", "-L").stdout


def test_a_pod_without_a_gpu_has_none(real: RealHost) -> None:
    found = json.loads(real.node.pod(Pod(("gpu-probe", *NODES, "libcuda.so.1"))).stdout)
    assert not {"OK"}.intersection(found["open"].values())
    assert "error" in found["load"]["libcuda.so.1"]
    made = real.node.pod(Pod(("sh", "-c", "mknod /dev/mine c 195 0; gpu-probe /dev/mine"))).stdout
    assert json.loads(made.splitlines()[-1])["open"]["/dev/mine"] in ("EPERM", "ENOENT")


def test_a_pod_cannot_change_the_mode_of_the_hosts_nodes(real: RealHost) -> None:
    """Not even a pod that runs as root, because the nodes are bound read-only."""
    before = real.computer.run(("stat", "--format=%a", *NODES)).stdout
    pod = real.node.pod(Pod(("sh", "-c", f"chmod 600 {' '.join(NODES)} 2>&1"), cdi=("all",)), check=False)
    assert pod.stdout.count("Read-only file system") == len(NODES)
    assert real.computer.run(("stat", "--format=%a", *NODES)).stdout == before


def test_a_pod_computes_on_while_systemd_reloads_and_the_service_restarts(real: RealHost) -> None:
    """With NVIDIA's older runtime, a reload took the GPU away: "Failed to initialize NVML: Unknown Error"."""
    container = real.start_computing("all")
    for _ in range(RELOADS):
        real.computer.run(("systemctl", "daemon-reload"))
        real.node.run("systemctl", "daemon-reload")
    real.computer.run(("systemctl", "restart", "unbounded-agent.service"))
    lines = len(real.log(container))
    assert real.node.in_container(container, *COMPUTE).stdout.split() == real.uuids
    real.wait("the pod computes on", lambda: len(real.log(container)) > lines + len(real.gpus))
    assert set(real.log(container)) == set(real.uuids)
    real.node.run("crictl", "stop", "--timeout", "0", container)


def test_a_gpu_in_use_is_not_detached_and_an_idle_one_is(real: RealHost) -> None:
    """With on_detach = "refuse", the default."""
    gpu = real.gpus[0]
    container = real.start_computing(gpu.uuid)
    try:
        refused = real.agent("gpus", "detach", gpu.address, check=False)
        assert f"{gpu.address} is in use" in refused
        assert container in refused
        real.node.run("crictl", "stop", "--timeout", "0", container)
        assert f"{gpu.address} may be removed" in real.agent("gpus", "detach", gpu.address)
        assert "unresolvable CDI devices" in real.node.pod(Pod(COMPUTE, cdi=(gpu.uuid,)), check=False).stderr
        assert real.node.shell(f"test -e /dev/nvidia{gpu.minor} || echo gone").stdout == "gone\n"
    finally:
        real.agent("gpus", "attach", gpu.address)
    assert real.compute(gpu.uuid) == [gpu.uuid]


def test_the_fault_of_a_program_is_logged_and_the_gpu_goes_on(real: RealHost) -> None:
    gpu = real.gpus[0]
    journal = ("journalctl", "--unit=unbounded-agent", "--output=cat", f"--since=@{int(time.time())}")
    failed = real.node.pod(Pod((*COMPUTE, "fault"), cdi=(gpu.uuid,)), check=False)
    assert "700: an illegal memory access was encountered" in failed.stdout
    error = f"{gpu.address}: Xid {PAGE_FAULT}: "
    real.wait("the error is logged", lambda: error in real.computer.run(journal).stdout)
    assert ready_machine(real.computer, real.gpus), real.agent("status")
    assert real.compute(gpu.uuid) == [gpu.uuid]
