"""What pods see of the GPUs, through the CRI: exactly what was granted, and nothing without a grant."""

import json
from typing import Any

import pytest

from integration.bed.node import Node, Pod
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
GPUS = tuple(f"/dev/nvidia{index}" for index in range(8))
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")


def probe(node: Node, **pod: Any) -> dict[str, Any]:  # noqa: ANN401
    """What gpu-probe finds in a pod: node by node, library by library."""
    found: dict[str, Any] = json.loads(node.pod(Pod(("gpu-probe", *GPUS, *CONTROL, *LIBRARIES), **pod)).stdout)
    return found


def expect_gpus(found: dict[str, Any], granted: set[int]) -> None:
    opened = {path for path, result in found["open"].items() if result == "OK"}
    assert opened == {*CONTROL, *(f"/dev/nvidia{index}" for index in granted)}
    refused = {result for path, result in found["open"].items() if path not in opened}
    assert refused <= {"EPERM", "ENOENT"}
    for library in LIBRARIES:
        assert found["load"][library]["path"].endswith(f"/lib/x86_64-linux-gnu/{library}"), found["load"][library]


def uuid_of(bed: Bed, minor: int) -> str:
    listing = bed.run("nvidia-smi", "-L").stdout.splitlines()
    return listing[minor].split("UUID: ")[1].rstrip(")")


def test_one_gpu_by_cdi_name(ready: Bed) -> None:
    """GPU 1 of 8 opens, the seven others do not, the libraries load by their plain names, nvidia-smi lists one GPU."""
    expect_gpus(probe(ready.node, cdi=("1",)), {1})
    listing = ready.node.pod(Pod(("nvidia-smi", "-L"), cdi=("1",))).stdout.splitlines()
    assert len(listing) == 1
    assert uuid_of(ready, 1) in listing[0]


def test_runtime_class_gives_our_spec_and_nothing_else(ready: Bed) -> None:
    """runtimeClassName: nvidia with NVIDIA_VISIBLE_DEVICES as index, UUID and all."""
    uuid = uuid_of(ready, 3)
    for value, granted in (("2", {2}), (uuid, {3}), ("all", set(range(8)))):
        found = probe(ready.node, runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": value})
        expect_gpus(found, granted)


def test_the_runtime_class_and_cdi_give_the_same_mounts(ready: Bed) -> None:
    """nvidia-container-runtime must not make a spec of its own in memory: its mounts are those of our spec."""
    command = ("cat", "/proc/self/mountinfo")
    by_cdi = ready.node.pod(Pod(command, cdi=("1",))).stdout
    by_class = ready.node.pod(Pod(command, runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": "1"})).stdout

    def driver_mounts(text: str) -> set[str]:
        return {line.split()[4] for line in text.splitlines() if "nvidia" in line or "libcuda" in line}

    assert driver_mounts(by_cdi) == driver_mounts(by_class)
    spec = {mount["containerPath"] for mount in ready.node.spec()["containerEdits"]["mounts"]}
    assert spec <= driver_mounts(by_cdi)


def test_without_a_grant_nothing_is_seen(ready: Bed) -> None:
    """Neither runc nor the nvidia runtime give a pod anything that it did not ask for."""
    for runtime in ("", "nvidia"):
        found = probe(ready.node, runtime=runtime)
        assert set(found["open"].values()) == {"ENOENT"}
        assert all("error" in result for result in found["load"].values())
