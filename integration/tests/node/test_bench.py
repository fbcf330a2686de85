"""The set-up's speed, as ratios of what is measured in one run; `integration/bench` prints all measures."""

import pytest

from integration.bed import wheels
from integration.bed.machine.machine_image import machines_disk
from integration.bed.measure.bench import measure_setup, recipe_on_split_layout
from integration.bed.measure.bench_live import measure_hotplug, measure_idle
from integration.bed.vm.host_image import host_image
from integration.bed.vm.installation import install
from integration.bed.vm.simulated_host import SimulatedHost
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

# The aim is 1.3 and 10. Seen: 1.19 to 1.35 and 11.7 to 14.8; beside other work on the same processors it is more.
SETUP_VS_FLOOR = 1.6
RECIPE_VS_SETUP = 8.0
# The aim is 2 and 3. Seen: 1.2 to 1.8 and 2.1 to 2.5. Two GPUs are few: this finds what has become much slower.
OPEN_VS_BARE = 4.0
READY_VS_CTK = 6.0


@pytest.mark.exhaustive
def test_setup_beside_bare_tools_and_the_plain_recipe() -> None:
    """On the flat layout, where the recipe works: near what ldconfig and nvidia-ctk need alone, far from the recipe."""
    image, machines = host_image(wheels.dependencies(), layout="flat"), machines_disk()
    with SimulatedHost(image, machines, memory_mib=3072) as host:
        install(host.guest)
        measures = measure_setup(host.guest, rounds=5)
    print(measures)
    assert measures["recipe_links"] == 60
    assert float(measures["setup_vs_floor"]) <= SETUP_VS_FLOOR, measures
    assert float(measures["recipe_vs_setup"]) >= RECIPE_VS_SETUP, measures


@pytest.mark.exhaustive
def test_the_plain_recipe_fails_on_the_split_layout(installed: Bed) -> None:
    """As Debian packages the driver: the links dangle, and nvidia-ctk finds no libnvidia-ml."""
    assert "ERROR_LIBRARY_NOT_FOUND" in recipe_on_split_layout(installed.guest)


def test_an_idle_service_starts_no_process(ready: Bed) -> None:
    """Over one of its intervals and a bit; integration/bench takes ten minutes."""
    measures = measure_idle(ready.guest, 75)
    print(measures)
    assert measures["idle_processes_spawned"] == 0, measures


@pytest.mark.exhaustive
def test_a_gpu_that_comes_beside_bare_tools(ready: Bed) -> None:
    """Until it opens in the machine: near set-property and bind alone; until it is in the CDI spec: near nvidia-ctk."""
    ready.wait_served()
    measures = measure_hotplug(ready.host, pairs=2)
    print(measures)
    assert float(measures["hotplug_open_vs_bare"]) <= OPEN_VS_BARE, measures
    assert float(measures["hotplug_ready_vs_ctk"]) <= READY_VS_CTK, measures
