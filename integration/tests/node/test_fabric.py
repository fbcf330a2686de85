"""GPUs that are not registered with their NVLink fabric, as on HGX B200, say so, whatever the Fabric Manager says."""

from typing import Any

import pytest

from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

MANAGER = "nvidia-fabricmanager.service"
UNIT = b"[Service]\nExecStart=/usr/bin/sleep infinity\n"
QUERY = ("nvidia-smi", "--query-gpu=pci.bus_id,fabric.state,fabric.status", "--format=csv")
IN_PROGRESS, REGISTERED = 2, 3


def set_fabric(bed: Bed, state: int) -> None:
    """Simulation: NVML's nvmlGpuFabricState_t, for all GPUs."""
    minors = " ".join(str(minor) for minor in range(len(bed.host.gpus)))
    set_one = f"echo $minor fabric_state {state} >/proc/driver/nvidia/simulated_health"
    bed.run("sh", "-c", f"for minor in {minors}; do {set_one}; done")


def wait_for(bed: Bed, reason: str, seconds: float = 300, *, reload: bool = True) -> dict[str, Any]:
    if reload:
        bed.run("systemctl", "reload", "unbounded-agent.service")
    wait(reason, lambda: bed.last_conditions().get("FabricReady", {}).get("reason") == reason, seconds, bed.evidence)
    conditions = bed.last_conditions()
    return {"ready": conditions["Ready"]["status"], **conditions["FabricReady"]}


def test_gpus_that_are_not_registered_with_their_fabric_are_not_ready(ready: Bed) -> None:
    """The Fabric Manager is active or not: only what the GPUs say counts, and the machine half asks again by itself."""
    assert ready.conditions()["FabricReady"]["message"] == "the GPUs have no NVLink fabric (fabric.state N/A)"
    persistence = ready.conditions()["PersistenceMode"]
    assert persistence["reason"] == "DaemonNotRunning"
    assert "inferred" not in persistence["message"], "the same query asks for persistence_mode"
    set_fabric(ready, IN_PROGRESS)
    ready.guest.write(f"/run/systemd/system/{MANAGER}", UNIT)
    ready.run("systemctl", "daemon-reload")
    ready.run("systemctl", "start", MANAGER)
    found = wait_for(ready, "FabricRegistering")
    _, *rows = ready.node.run(*QUERY).stdout.splitlines()
    assert {row.partition(", ")[2] for row in rows} == {"state  In Progress, status N/A"}
    assert (found["status"], found["ready"]) == ("Unknown", "Unknown")
    assert "0000:01:00.0" in found["message"]
    assert "fabric.state In Progress, fabric.status N/A" in found["message"]
    assert "not loaded: mlx5_ib, ib_umad" in found["message"]
    ready.run("systemctl", "stop", MANAGER)
    found = wait_for(ready, "FabricNotRegistered")
    assert (found["status"], found["ready"]) == ("False", "False")
    assert f"{MANAGER} is inactive" in found["message"]
    ready.run("systemctl", "start", MANAGER)
    ready.run("systemctl", "reload", "unbounded-agent.service")
    set_fabric(ready, REGISTERED)
    found = wait_for(ready, "FabricRegistered", 600, reload=False)
    assert found["status"] == "True"
    assert ready.wait_ready()["FabricReady"]["reason"] == "FabricRegistered"
