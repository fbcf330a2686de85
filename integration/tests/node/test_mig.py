"""An administrator makes and removes MIG instances and IMEX channels while machine and pods run.

The instances are the simulation's, made step by step as NVML does. NVIDIA's own nvidia-modprobe makes the nodes; the
kernel's device policy, CDI and runc decide who may open what.
"""

import json
from collections.abc import Callable

import pytest

from integration.bed.machine.node import MACHINE, Pod
from integration.bed.waiting import wait
from integration.conftest import Bed
from integration.tests.node.test_hotplug import OPEN, journal

pytestmark = pytest.mark.scenario("002")

MAKE_NODES = "/usr/lib/simulated-gpu-host/make-nodes"
CAPS = {minor: f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (1, 12, 13, 21, 22)}
"""mig/config, gi1 and its ci0, gi2 and its ci0 of the first GPU, by the driver's table of all possible ones."""
NODES = ("/dev/nvidia0", "/dev/nvidia1", *CAPS.values())
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
SECONDS = 150
"""An instance that is destroyed makes no event: the timer's next pass finds out, in an emulated machine."""


def mig(bed: Bed, *words: object) -> None:
    """Do an administrator's step, in the simulation's terms."""
    step = " ".join(map(str, words))
    bed.run("sh", "-c", f"echo {step} > /proc/driver/nvidia/simulated_mig")


def wait_until(bed: Bed, what: str, holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    wait(what, holds, seconds, bed.evidence)


def names(bed: Bed) -> set[str]:
    """Return the names of the devices in the published CDI specification."""
    return {each["name"] for each in bed.node.spec()["devices"]}


def message(bed: Bed, kind: str) -> str:
    found = bed.conditions()
    assert found["Ready"]["status"] == "True", found
    return str(found[kind]["message"])


def is_ready(bed: Bed) -> bool:
    return bool(bed.last_conditions()["Ready"]["status"] == "True")


def opened(output: str) -> set[str]:
    return {path for path, result in json.loads(output)["open"].items() if result == "OK"}


def test_a_mig_device_is_made_and_destroyed_by_hand(ready: Bed) -> None:
    """It is offered only when complete. A pod then gets its GPU and its own two capabilities, without any restart."""
    at_start = ready.starts()
    pod = ready.node.start_pod(Pod(("sleep", "infinity"), cdi=("1",)))
    mig(ready, "enable", 0)
    mig(ready, "create-gi", 0, 1, 1)
    mig(ready, "create-ci", 0, 1, 0, 1)
    mig(ready, "create-gi", 0, 2, 3)
    ready.run(MAKE_NODES)
    wait_until(ready, "published", lambda: "0:0" in names(ready) and is_ready(ready))
    uuids = {name for name in names(ready) if name.startswith("MIG-")}
    assert len(uuids) == 1, "the other one has no compute instance"
    assert "0" not in names(ready), "a GPU in MIG mode has no device of its own"
    assert "MIG instance gi2 of 0000:01:00.0 has no compute instance yet" in message(ready, "DevicesPresent")
    nodes = set(ready.node.shell("ls -d /dev/nvidia-caps/*").stdout.split())
    assert nodes == {CAPS[12], CAPS[13]}
    look = ("sh", "-c", f"gpu-probe {' '.join(NODES)}; echo ---; nvidia-smi -L")
    for name in ("0:0", *uuids):
        found, listed = ready.node.pod(Pod(look, cdi=(name,))).stdout.split("---\n")
        assert opened(found) == {"/dev/nvidia0", CAPS[12], CAPS[13]}
        assert [line.split()[0] for line in listed.splitlines()] == ["GPU", "MIG"], listed
    mig(ready, "destroy-ci", 0, 1, 0)
    mig(ready, "destroy-gi", 0, 1)
    mig(ready, "destroy-gi", 0, 2)
    mig(ready, "disable", 0)
    ready.run("test", "-e", CAPS[12])
    wait_until(ready, "withdrawn", lambda: "0:0" not in names(ready) and "0" in names(ready) and is_ready(ready))
    assert not ready.node.shell("ls /dev/nvidia-caps").stdout
    major = ready.run("stat", "--format=%Hr", CAPS[12]).stdout.strip()
    allowed = ready.run("systemctl", "show", "--property=DeviceAllow", f"systemd-nspawn@{MACHINE}").stdout
    assert f"/dev/char/{major}:12" not in allowed
    assert opened(ready.node.in_container(pod, "gpu-probe", *NODES).stdout) == {"/dev/nvidia1"}
    assert ready.restarted(at_start) == "nothing"
    assert "restart" not in journal(ready)


@pytest.mark.exhaustive
def test_an_instance_without_a_node_is_named_and_published_with_it(ready: Bed) -> None:
    """The driver has made the instance, but its nodes are not made yet; other GPUs keep working."""
    mig(ready, "enable", 0)
    mig(ready, "create-gi", 0, 1, 1)
    mig(ready, "create-ci", 0, 1, 0, 1)
    ready.run("nvidia-modprobe", "-f", "/proc/driver/nvidia/capabilities/gpu0/mig/gi1/access")
    wait_until(ready, "named", lambda: f"is missing {CAPS[13]}" in message(ready, "DevicesPresent"))
    assert not {name for name in names(ready) if ":" in name or name.startswith("MIG-")}
    assert ready.node.shell("ls /dev/nvidia-caps", check=False).stdout == ""
    ready.run("nvidia-modprobe", "-f", "/proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access")
    wait_until(ready, "published", lambda: "0:0" in names(ready) and is_ready(ready))


@pytest.mark.exhaustive
def test_an_imex_channel_comes_and_goes(ready: Bed) -> None:
    """If the configuration asks for channels, the node appears in the running machine, opens, and is withdrawn."""
    at_start = ready.starts()
    ready.guest.write("/etc/unbounded-agent/config.toml", f"[machines.{MACHINE}]\nimex_channels = true\n".encode())
    ready.run("systemctl", "reload", "unbounded-agent.service", timeout=120)
    major = "awk '$2 == \"nvidia-caps-imex-channels\" { print $1 }' /proc/devices"
    ready.run("sh", "-c", f"mkdir {CHANNEL.rpartition('/')[0]} && mknod {CHANNEL} c $({major}) 0")
    opens = ("python3", "-c", OPEN, CHANNEL)
    wait_until(ready, "given", lambda: ready.node.run(*opens, check=False).status == 0 and is_ready(ready))
    ready.run("rm", CHANNEL)
    wait_until(ready, "withdrawn", lambda: ready.node.run("test", "-e", CHANNEL, check=False).status != 0)
    assert ready.restarted(at_start) == "nothing"
