"""Speed, as ratios of what is measured in one run; `integration/bench` prints all measurements."""

from collections.abc import Callable

import pytest

from integration.bed import wheels
from integration.bed.cluster.cluster import Cluster
from integration.bed.machine.machine_image import machines_disk
from integration.bed.measure.bench import RESET_GPU, measure_setup, recipe_on_split_layout
from integration.bed.measure.bench_dra import measure_dra
from integration.bed.measure.bench_faults import measure_faults
from integration.bed.measure.bench_join import measure_join
from integration.bed.measure.bench_live import measure_hotplug, measure_idle, measure_reset
from integration.bed.measure.bench_pods import measure_pod_start
from integration.bed.measure.bench_staging import measure_staging
from integration.bed.vm.host_image import host_image
from integration.bed.vm.installation import install
from integration.bed.vm.simulated_host import SimulatedHost
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

# The goals are 1.3 and 10. Observed: 1.19 to 1.35 and 11.7 to 14.8; more if other work runs on the same processors.
SETUP_VS_FLOOR = 1.6
RECIPE_VS_SETUP = 8.0
# The goal is 2. Observed: 1.7 to 2.0; more if other work runs on the same processors.
PREPARE_VS_BARE = 2.6
# The goal is 1.15. Observed: 1.06; 0.4 to 1.5 next to much other work. This catches only large slowdowns.
JOIN_VS_BARE = 2.0
# The goal is 1.2. Observed: 0.8; more if other work writes to the same disk.
STAGING_VS_CP = 2.0
# Observed: 0.03 to 0.35. The service reads the documents again up to five times a second.
SLICE_SECONDS = 1.5
# Observed: 0.17 s, and 29 to 39 times a read and a request on a new connection, next to other work.
FAULT_SECONDS, FAULT_VS_BARE = 1.5, 200.0
# The goals are 64 MB and 45 MB.
DRA_MIB = 61
SERVICE_MIB = 43
# The goals are 2 and 3. Observed: 1.2 to 1.8 and 2.1 to 2.5. Two GPUs are few: this catches only large slowdowns.
OPEN_VS_BARE = 4.0
READY_VS_CTK = 6.0
# Observed: 234. The simulated tool resets in 0.1 s, a real one takes seconds: this catches only large slowdowns.
RESET_VS_BARE = 600.0
# Observed: 0.97; 1.4 next to other work. The kubelet does the same work for both: it asks a driver or a device plugin.
DRA_VS_PLUGIN = 1.5


@pytest.mark.exhaustive
def test_setup_compared_with_bare_tools_and_the_plain_recipe() -> None:
    """On the flat layout, where the recipe works, set-up is close to the bare time of ldconfig and nvidia-ctk."""
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
    """In Debian's layout, the recipe's links dangle, and nvidia-ctk finds no libnvidia-ml."""
    assert "ERROR_LIBRARY_NOT_FOUND" in recipe_on_split_layout(installed.guest)


@pytest.mark.exhaustive
def test_a_nodes_root_file_system_takes_as_long_as_with_the_bare_tools(
    measured: Callable[[str, object], None],
) -> None:
    """Natively: skopeo, umoci, and a registry and a mirror on this computer, which make the agent's part largest."""
    measures = measure_join()
    for name, value in measures.items():
        measured(name, f"{value:.2f}")
    assert float(measures["join_vs_bare"]) <= JOIN_VS_BARE, measures


@pytest.mark.exhaustive
def test_a_driver_is_staged_about_as_fast_as_by_cp_and_sync(measured: Callable[[str, object], None]) -> None:
    """Natively. On XFS and Btrfs, which copy nothing, both take less than a tenth of a second."""
    measures = measure_staging(pairs=3)
    for name, value in measures.items():
        measured(name, f"{value:.2f}")
    assert float(measures["staging_ext4_vs_cp"]) <= STAGING_VS_CP, measures
    for kind in ("xfs", "btrfs"):
        assert float(measures[f"staging_{kind}_seconds"]) < float(measures["staging_ext4_seconds"]), measures


@pytest.mark.exhaustive
def test_a_claim_is_prepared_little_later_than_it_can_be_read(measured: Callable[[str, object], None]) -> None:
    """Natively, at a real API server; the service runs as its unit runs it."""
    measures = measure_dra()
    for name, value in measures.items():
        measured(name, f"{value:.2f}")
    assert float(measures["prepare_vs_bare"]) <= PREPARE_VS_BARE, measures
    assert float(measures["slice_vs_cdi_seconds"]) <= SLICE_SECONDS, measures
    assert float(measures["dra_resident_mib"]) <= DRA_MIB, measures


@pytest.mark.exhaustive
def test_a_gpu_that_fails_is_tainted_at_once(measured: Callable[[str, object], None]) -> None:
    """Natively, at a real API server, from the record of a simulated kernel log."""
    measures = measure_faults()
    for name, value in measures.items():
        measured(name, f"{value:.2f}")
    assert float(measures["fault_to_taint_seconds"]) <= FAULT_SECONDS, measures
    assert float(measures["fault_to_taint_vs_bare"]) <= FAULT_VS_BARE, measures


@pytest.mark.exhaustive
def test_a_reset_by_the_agent_compared_with_nvidia_smi_alone(
    ready: Bed, measured: Callable[[str, object], None]
) -> None:
    """The agent also takes the GPU from its machine, and gives it back."""
    ready.wait_served()
    measures = measure_reset(ready.guest, RESET_GPU, pairs=3)
    for name, value in measures.items():
        measured(name, f"{value:.2f}")
    assert float(measures["reset_to_schedulable_vs_bare"]) <= RESET_VS_BARE, measures


@pytest.mark.exhaustive
def test_an_idle_service_starts_no_process(ready: Bed) -> None:
    """Measures a little more than one interval of the service; integration/bench takes ten minutes."""
    measures = measure_idle(ready.guest, 75)
    print(measures)
    assert measures["idle_processes_spawned"] == 0, measures
    assert float(measures["resident_mib"]) <= SERVICE_MIB, measures


@pytest.mark.exhaustive
def test_hotplug_compared_with_bare_tools(ready: Bed) -> None:
    """A GPU opens little later than with set-property and bind alone, and is listed little later than by nvidia-ctk."""
    ready.wait_served()
    measures = measure_hotplug(ready.host, pairs=2)
    print(measures)
    assert float(measures["hotplug_open_vs_bare"]) <= OPEN_VS_BARE, measures
    assert float(measures["hotplug_ready_vs_ctk"]) <= READY_VS_CTK, measures


@pytest.mark.exhaustive
def test_pods_start_about_as_soon_as_with_a_device_plugin(ready: Bed, measured: Callable[[str, object], None]) -> None:
    """Pods that get their GPU by Dynamic Resource Allocation, in turns with pods that get it from a device plugin."""
    ready.guest.set_clock()
    ready.node.run("systemctl", "start", "unbounded-agent-gpu.service")
    with Cluster(ready.host) as cluster:
        cluster.apply("runtime-class")
        measures = measure_pod_start(cluster, rounds=2)
    for name, value in measures.items():
        measured(name, f"{value:.2f}")
    assert float(measures["pod_start_dra_vs_plugin"]) <= DRA_VS_PLUGIN, measures
