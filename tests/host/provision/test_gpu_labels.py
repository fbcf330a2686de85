"""The labels that a Node gets for its GPUs, on a simulated host."""

import pytest

from agent.host.provision.up import gpu_labels
from agent.vendors.host_vendor import DriverForPods
from agent.vendors.nvidia.host import node_labels
from tests.fakes.gpu_host import reconciler
from tests.fakes.host import Host
from tests.fakes.libcuda import answer_of_libcuda

DRIVER = {
    "nvidia.com/cuda.driver-version.major": "550",
    "nvidia.com/cuda.driver-version.minor": "163",
    "nvidia.com/cuda.driver-version.revision": "01",
    "nvidia.com/cuda.driver-version.full": "550.163.01",
}
CUDA = {
    "nvidia.com/cuda.runtime-version.major": "12",
    "nvidia.com/cuda.runtime-version.minor": "4",
    "nvidia.com/cuda.runtime-version.full": "12.4",
}
PRESENT = {"nvidia.com/gpu.present": "true"}


def labels(host: Host) -> dict[str, str]:
    facts, planned, _ = reconciler(host).preview()
    return gpu_labels((grant for goal in planned.goal.machines for grant in goal.grants), facts, host)


@pytest.mark.parametrize(("answer", "status", "cuda"), [("12040\n", 0, CUDA), ("", 1, dict[str, str]())])
def test_versions_as_gpu_feature_discovery_names_them(
    gpu_host: Host, answer: str, status: int, cuda: dict[str, str]
) -> None:
    """An unknown version has no label."""
    answer_of_libcuda(gpu_host, answer, status)
    assert labels(gpu_host) == PRESENT | DRIVER | cuda
    assert node_labels(None) == PRESENT


def test_a_driver_version_may_have_two_numbers() -> None:
    full, *parts = (f"nvidia.com/cuda.driver-version.{part}" for part in ("full", "major", "minor"))
    assert node_labels(DriverForPods("nvidia", "580.95")) == PRESENT | dict(zip(parts, ("580", "95"), strict=True)) | {
        full: "580.95"
    }


def test_without_gpus_there_are_no_labels(gpu_host: Host) -> None:
    """A machine that had some keeps its settings, and grants without GPUs."""
    reconciler(gpu_host).reconcile()
    for address in ("0000:01:00.0", "0000:02:00.0"):
        gpu_host.unplug(address)
    assert labels(gpu_host) == {}
