"""An emulated arm64 host with Debian's driver, our package, and an arm64 machine: by integration/arm64 only."""

import json
from collections.abc import Iterator

import pytest

from agent.model.paths import TREES
from integration.bed.architecture import ARM64, CHOSEN
from integration.bed.machine.machine_image import machines_disk
from integration.bed.machine.node import Pod
from integration.bed.vm.host_image import host_image
from integration.bed.vm.installation import CONFIGURATION
from integration.bed.vm.simulated_host import SimulatedHost
from integration.conftest import Bed
from integration.tests.kubernetes.test_pods import uuids
from integration.tests.node.test_hotplug import plug, wait_for_gpus
from integration.tests.node.test_package import install_package
from integration.tests.node.test_survives import expect_all_ways

pytestmark = pytest.mark.scenario("002")

GPUS = 3


@pytest.fixture(scope="module")
def other() -> Iterator[Bed]:
    """A host with the driver and the package, configured and not yet applied."""
    assert CHOSEN is ARM64, "run these tests by integration/arm64"
    with SimulatedHost(host_image(), machines_disk(), gpus=range(GPUS), memory_mib=3072) as host:
        bed = Bed(host)
        install_package(bed, "1.0")
        bed.guest.write("/etc/unbounded-agent/config.toml", CONFIGURATION.encode())
        yield bed


def test_the_package_runs_and_finds_the_gpus(other: Bed) -> None:
    assert other.run("uname", "-m").stdout.strip() == ARM64.processor
    found = json.loads(other.agent("gpus", "--json").stdout)
    assert len(found["gpus"]) == GPUS


def test_one_command_makes_the_machine_ready(other: Bed) -> None:
    """The driver root has arm64's libraries, and the specification that was verified names each of them."""
    other.agent("apply", timeout=900)
    conditions = other.conditions()
    assert conditions["Ready"]["status"] == "True"
    staged = other.run("ls", f"{TREES}/0/{ARM64.libraries}").stdout.split()
    assert "libcuda.so.1" in staged
    mounted = {mount["containerPath"] for mount in other.node.spec()["containerEdits"]["mounts"]}
    assert any(path.startswith(f"/{ARM64.libraries}/libcuda.so.") for path in mounted), mounted


def test_pods_get_a_gpu_by_its_cdi_name_and_by_the_runtime_class(other: Bed) -> None:
    other.node.run("systemctl", "start", "simulated-pod-images.service", timeout=600)
    listing = other.node.pod(Pod(("nvidia-smi", "-L"), cdi=("1",)), timeout=300).stdout
    assert len(uuids(listing)) == 1
    expect_all_ways(other)


def test_the_service_offers_a_gpu_that_is_plugged_in(other: Bed) -> None:
    other.run("systemctl", "enable", "--now", "unbounded-agent.service", timeout=240)
    other.wait_served()
    plug(other, GPUS)
    wait_for_gpus(other, GPUS + 1)
