"""Upgrades of the host's driver under a running machine: the new files wait for their kernel module.

The upgrade goes from Debian's current driver to its older branch 535, which is packaged next to it; the kernel modules
and NVML are the simulation's, in the same two versions.
"""

import json
import re
from typing import Any

import pytest

from agent.model.paths import TREES, handoff_file
from integration.bed.drivers.driver_upgrade import LOAD, MODULES, REPLACE, UNLOAD, UPGRADE, send_upgrade
from integration.bed.drivers.host_roots import LIBRARIES, SPLIT_LIBRARIES, driver_version, host_root
from integration.bed.machine.node import MACHINE
from integration.bed.machine.pod_images import CUDA_TEST
from integration.bed.waiting import wait
from integration.conftest import Bed
from integration.tests.kubernetes.test_pods import expect_gpus, look, uuids
from integration.tests.node.test_published_roots import mounted

pytestmark = pytest.mark.scenario("002")

STARTED_AT = f"systemctl show --value --property=ActiveEnterTimestampMonotonic systemd-nspawn@{MACHINE}.service"
HOLDERS = "find /proc/[0-9]*/fd -lname '/dev/nvidia*' 2>/dev/null || true"


def current_version() -> str:
    return driver_version(host_root())


def start_pod(bed: Bed, name: str) -> str:
    """Start a pod with GPU 1 that keeps running, and return its container's ID."""
    pod = {
        "metadata": {"name": name, "uid": name, "namespace": "work", "attempt": 0},
        "linux": {"cgroup_parent": "test.slice", "security_context": {"namespace_options": {"network": 2}}},
    }
    container = {
        "metadata": {"name": "main", "attempt": 0},
        "image": {"image": CUDA_TEST},
        "command": ["sleep", "infinity"],
        "CDI_devices": [{"name": "nvidia.com/gpu=1"}],
        "linux": {},
    }
    script = f"cat > /tmp/p <<X\n{json.dumps(pod)}\nX\ncat > /tmp/c <<X\n{json.dumps(container)}\nX\n"
    return bed.node.shell(f"{script}crictl run --no-pull /tmp/c /tmp/p").stdout.strip()


def reboot(bed: Bed, container: str) -> None:
    """Reboot the machine. Stop the container first: its sleep ignores SIGTERM as process 1, which would cost 90 s."""
    before = bed.run(*STARTED_AT.split()).stdout.strip()
    bed.node.run("crictl", "stop", "--timeout", "0", container)
    bed.run("machinectl", "reboot", MACHINE)
    bed.run("sh", "-c", f'while [ "$({STARTED_AT})" = {before} ]; do sleep 1; done', timeout=180)
    bed.wait_ready()


def expect_driver(bed: Bed, version: str) -> None:
    """Assert that a new pod sees its GPU through NVML, and has only files of that driver."""
    seen = look(bed.node, cdi=("1",))
    expect_gpus(seen.probe, {1})
    assert len(seen.uuids) == 1
    versions = {match[1] for path in seen.mounts if (match := re.search(r"\.so\.([0-9]+\.[0-9.]+)$", path))}
    assert version in versions
    assert {each for each in versions if each.split(".")[0] in ("535", "550")} == {version}


def granted(bed: Bed) -> dict[str, Any]:
    """Return the request that the machine was handed."""
    (request,) = json.loads(bed.guest.read(handoff_file(MACHINE)))["requests"]
    found: dict[str, Any] = request
    return found


def wait_named(bed: Bed, pod: str, seconds: float = 240) -> str:
    """Wait until the machine half names the pod as outdated; return the condition's message."""

    def named() -> str:
        message: str = bed.last_conditions()["CDISpecCurrent"]["message"]
        return message if pod in message.partition("PodsOutdated")[2] else ""

    return wait(f"{pod} is named", named, seconds, bed.evidence)


def test_the_next_driver_waits_and_is_switched_with_its_module(ready: Bed) -> None:
    """Machine and containerd keep running, and a running pod its files; the machine's reboot removes the old ones."""
    old, new = current_version(), send_upgrade(ready.guest)
    container = start_pod(ready, "before")
    started = ready.starts()
    place = {"libraries": LIBRARIES, "split": SPLIT_LIBRARIES}
    ready.run("sh", "-ec", REPLACE.format(old=old, new=UPGRADE, **place), timeout=120)
    before = ready.guest.read(handoff_file(MACHINE))
    ready.agent("apply", timeout=400)
    conditions = ready.conditions()
    assert conditions["Ready"]["status"] == "True"
    assert conditions["LibrariesPresent"]["reason"] == "ReloadNeeded"
    assert f"driver {new} is staged as driver root 1, but its kernel" in conditions["DriverRootStaged"]["message"]
    assert ready.guest.read(handoff_file(MACHINE)) == before
    expect_driver(ready, old)

    # The service runs meanwhile: a process that held a node would keep its module loaded.
    assert ready.run("sh", "-c", HOLDERS).stdout == ""
    ready.run("sh", "-ec", UNLOAD + LOAD.format(directory=MODULES), timeout=120)
    ready.agent("apply", timeout=400)
    assert ready.conditions()["LibrariesPresent"]["reason"] == "Present"
    request = granted(ready)
    assert (request["driver_version"], request["driver_root"]) == (new, "/run/host-nvidia/1")
    assert f"driver root 0 with driver {old})" in wait_named(ready, "work/before").partition("work/before (")[2]
    linked = ready.node.run("readlink", "-f", f"/{LIBRARIES}/libcuda.so.1").stdout.strip()
    assert linked == f"/run/host-nvidia/1/{LIBRARIES}/libcuda.so.{new}"
    assert len(uuids(ready.node.run("nvidia-smi", "-L").stdout)) == len(ready.host.gpus)
    assert ready.restarted(started) == "nothing"
    expect_driver(ready, new)

    ready.node.run("crictl", "exec", container, "sh", "-c", f"cat /{LIBRARIES}/libcuda.so.{old} > /dev/null")
    assert ready.run("ls", TREES).stdout.split() == ["0", "1"]
    assert mounted(ready) == {"host-nvidia", "host-nvidia/0", "host-nvidia/1"}
    reboot(ready, container)
    ready.agent("apply", timeout=400)
    assert ready.run("ls", TREES).stdout.split() == ["1"]
    assert mounted(ready) == {"host-nvidia", "host-nvidia/1"}
    mounts = [mount["hostPath"] for mount in ready.node.spec()["containerEdits"]["mounts"]]
    assert [path for path in mounts if not path.startswith("/run/host-nvidia/1/") or old in path] == []
    expect_driver(ready, new)


@pytest.mark.exhaustive
def test_other_majors_after_a_reload(ready: Bed) -> None:
    """nvidia-uvm's and nvidia-caps' numbers are dynamic: here another module takes the first one between two loads."""
    start_pod(ready, "before")
    started = ready.starts()
    before = {device["path"]: (device["major"], device["minor"]) for device in granted(ready)["devices"]}
    ready.run("sh", "-ec", f"{UNLOAD}; modprobe uio; /usr/lib/simulated-gpu-host/load-driver", timeout=120)
    ready.agent("apply", timeout=400)
    after = {device["path"]: (device["major"], device["minor"]) for device in granted(ready)["devices"]}
    assert after.keys() == before.keys()
    changed = {path for path in after if after[path] != before[path]}
    assert changed == {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
    number = ready.run("stat", "--format=%Hr %Lr", "/dev/nvidia-uvm").stdout.split()
    assert after["/dev/nvidia-uvm"] == tuple(map(int, number))
    major = before["/dev/nvidia-uvm"][0]
    assert f"work/before (/dev/nvidia-uvm as {major}:0, " in wait_named(ready, "work/before")
    ready.wait_ready()
    assert ready.restarted(started) == "nothing"
    nodes = {node["path"]: node for node in ready.node.spec()["containerEdits"]["deviceNodes"]}
    assert nodes["/dev/nvidia-uvm"]["major"] == after["/dev/nvidia-uvm"][0]
    expect_driver(ready, current_version())
