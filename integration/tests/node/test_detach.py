"""Planned removal of a GPU: who has it open, what each policy does, and that the GPU returns when plugged in again."""

import json
import re

import pytest

from integration.bed.machine.node import MACHINE, Pod
from integration.conftest import Bed
from integration.tests.node.test_hotplug import nodes, plug, wait_for_gpus

pytestmark = pytest.mark.scenario("002")

PORT = 7
NODE = f"/dev/nvidia{PORT}"
HOLD = ("sh", "-c", f"exec 3<>{NODE}; exec sleep infinity")
POLICY = "/etc/unbounded-agent/config.d/50-detach.toml"


def address(bed: Bed) -> str:
    """Return the PCI address of the GPU behind NODE, from the host's driver."""
    found = bed.run("sh", "-c", f"grep -l 'Device Minor:.*{PORT}$' /proc/driver/nvidia/gpus/*/information").stdout
    return found.split("/")[5]


def holder(text: str, container: str) -> tuple[str, str]:
    """Return the holder's PID on the host and in the machine, from the line that names its container."""
    place = rf"machine {MACHINE} \(PID (?P<inner>\d+) there\), container {container}: {NODE}"
    found = re.search(rf"PID (?P<pid>\d+) \(sleep\), {place}", text)
    assert found, text
    return found["pid"], found["inner"]


def permitted(bed: Bed) -> bool:
    allowed = bed.run("systemctl", "show", "--property=DeviceAllow", f"systemd-nspawn@{MACHINE}").stdout
    return f"/dev/char/195:{PORT} " in allowed


def opens_in(bed: Bed, container: str) -> bool:
    found = json.loads(bed.node.in_container(container, "gpu-probe", NODE).stdout)["open"]
    return bool(found[NODE] == "OK")


def stop(bed: Bed, container: str) -> None:
    bed.node.run("crictl", "stop", "--timeout=0", container)


def test_a_gpu_is_detached_removed_and_plugged_again(ready: Bed) -> None:
    """While a pod has the GPU open, detach refuses and names the pod. Later it works, and nothing is restarted."""
    before, at_start, pci = nodes(ready), ready.starts(), address(ready)
    pod = ready.node.start_pod(Pod(HOLD, cdi=(str(PORT),)))
    refused = ready.agent("gpus", "detach", pci, check=False)
    assert refused.status == 1
    assert "nothing was changed" in refused.stdout
    pid, inner = holder(refused.stdout, pod)
    assert pod in ready.run("cat", f"/proc/{pid}/cgroup").stdout
    assert ready.node.run("cat", f"/proc/{inner}/comm").stdout == "sleep\n"
    assert nodes(ready) == before
    assert permitted(ready)
    assert ready.agent("gpus", "detach", "0000:ff:00.0", check=False).status == 2
    stop(ready, pod)
    detached = ready.agent("gpus", "detach", pci)
    assert f"{pci} may be removed" in detached.stdout
    assert before - nodes(ready) == {NODE, f"/dev/dri/renderD{128 + PORT}"}
    assert not permitted(ready)
    wait_for_gpus(ready, 7)
    present = ready.conditions()["DevicesPresent"]
    assert (present["status"], present["reason"]) == ("True", "GPUDetached")
    assert pci in present["message"]
    ready.host.qemu.unplug(PORT)
    plug(ready, PORT)
    wait_for_gpus(ready, 8)
    assert nodes(ready) == before
    assert ready.restarted(at_start) == "nothing"


@pytest.mark.exhaustive
def test_a_gpu_in_use_is_drained_or_taken_by_force(ready: Bed) -> None:
    """A drained GPU stays with its users, and nobody else gets it. By force, users keep what is open, and are named."""
    pci, table = address(ready), f"[machines.{MACHINE}]\n"
    pod = ready.node.start_pod(Pod(HOLD, cdi=(str(PORT),)))
    ready.guest.write(POLICY, f'{table}on_detach = "drain-wait"\ndrain_wait = 1\n'.encode())
    drained = ready.agent("gpus", "detach", pci, check=False)
    assert drained.status == 1
    assert "is withheld from new pods, but is still in use after 1 s" in drained.stdout
    _, inner = holder(drained.stdout, pod)
    assert NODE not in nodes(ready)
    assert permitted(ready)
    assert opens_in(ready, pod)
    ready.guest.write(POLICY, f'{table}on_detach = "force"\n'.encode())
    forced = ready.agent("gpus", "detach", pci, check=False)
    assert forced.status == 1
    assert "still in use: do not remove it yet" in forced.stdout
    assert holder(forced.stdout, pod)[1] == inner
    assert not permitted(ready)
    assert not opens_in(ready, pod)
    left = ready.conditions()["DevicesAllowed"]
    assert left["status"] == "True"
    assert (
        f"LeftOpen (no longer granted, but still open; PIDs are the machine's): PID {inner} (sleep)" in left["message"]
    )
    stop(ready, pod)
    assert ready.agent("gpus", "detach", pci).status == 0
    ready.node.run("systemctl", "start", "unbounded-agent-gpu.service")
    assert "LeftOpen" not in ready.conditions()["DevicesAllowed"]["message"]
