"""Pods of each version of the NVIDIA Container Toolkit that the agent accepts open their GPUs."""

from collections.abc import Callable

import pytest

from integration.bed.machine.node import MACHINE
from integration.bed.toolkits import NEWEST, PINNED, VERSIONS, toolkit_of
from integration.bed.vm.transfer import send_files
from integration.conftest import Bed
from integration.tests.kubernetes.test_pods import expect_gpus, probe

pytestmark = pytest.mark.scenario("002")

BINARIES = f"/var/lib/machines/{MACHINE}/usr/bin"


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", VERSIONS)
def test_a_pod_opens_its_gpu(ready: Bed, version: str, record_property: Callable[[str, object], None]) -> None:
    """The image's toolkit is replaced while the machine runs. The whole specification is published, and verified."""
    record_property("NVIDIA Container Toolkit", version)
    node = ready.node
    send_files(ready.guest, {file.name: file for file in toolkit_of(version).iterdir()}, BINARIES)
    assert f"version {version}\n" in node.run("nvidia-ctk", "--version").stdout
    node.run("systemctl", "restart", "unbounded-agent-gpu.service", timeout=240)
    conditions = ready.wait_ready()
    assert conditions["CDISpecCurrent"]["reason"] == "Verified"
    if version in PINNED:
        assert ("mount of /dev/null" in conditions["CDISpecCurrent"]["message"]) is (version == NEWEST)
    expect_gpus(probe(node, cdi=("1",)), {1})
    for value, granted in (("2", {2}), ("none", set())):
        expect_gpus(probe(node, runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": value}), granted)
