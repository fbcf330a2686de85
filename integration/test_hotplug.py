"""GPUs that come and go while machine, containerd and pods run: by PCI Express hot-plug of the virtual machine."""

import json
import re
import time

import pytest

from integration.bed.node import MACHINE, Pod
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("000")

PORT = 8
"""An empty one: the host begins with GPUs in 0 to 7."""
GPUS = tuple(f"/dev/nvidia{minor}" for minor in range(PORT + 1))
UNITS = ("containerd.service", "dbus.service")
"""In the machine: what was started when."""
OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"


def started(bed: Bed) -> str:
    """When the machine and its services were started: what nobody may restart."""
    show = ("systemctl", "show", "--property=Id,ExecMainStartTimestampMonotonic")
    return bed.run(*show, f"systemd-nspawn@{MACHINE}.service").stdout + bed.node.run(*show, *UNITS).stdout


def nodes(bed: Bed) -> set[str]:
    """GPU nodes of the machine."""
    return set(bed.node.shell("ls -d /dev/nvidia[0-9]* /dev/dri/renderD*").stdout.split())


def uuid_of(bed: Bed, minor: int) -> str:
    """Of the GPU with that device minor, as the host's driver tells it."""
    text = bed.run("sh", "-c", "cat /proc/driver/nvidia/gpus/*/information").stdout
    found = re.finditer(r"GPU UUID:\s*(?P<uuid>\S+).*?Device Minor:\s*(?P<minor>\d+)", text, re.DOTALL)
    return next(str(match["uuid"]) for match in found if int(match["minor"]) == minor)


def opens(bed: Bed, path: str) -> bool:
    return bed.node.run("python3", "-c", OPEN, path, check=False).status == 0


def wait_for_gpus(bed: Bed, count: int, seconds: float = 150) -> None:
    """Until the machine is ready with that many GPUs in its CDI spec."""
    deadline = time.monotonic() + seconds
    while True:
        listed = bed.node.run("nvidia-ctk", "cdi", "list", check=False).stdout
        uuids = {line.rpartition("=")[2] for line in listed.splitlines() if "=GPU-" in line}
        if len(uuids) == count and bed.conditions()["Ready"]["status"] == "True":
            return
        assert time.monotonic() < deadline, f"{listed}\n{bed.agent('status').stdout}\n{journal(bed)}"
        time.sleep(1)


def journal(bed: Bed) -> str:
    return bed.run("journalctl", "-u", "unbounded-agent", "--no-pager", "-n", "40").stdout


def plug(bed: Bed, port: int = PORT) -> None:
    """One more GPU; its node is made as NVIDIA's programs make it."""
    bed.host.qemu.plug(port)
    deadline = time.monotonic() + 60
    bound = f"test $(ls -d /sys/bus/pci/drivers/nvidia/0000:* | wc -l) = {len(bed.host.gpus)}"
    while bed.run("sh", "-c", bound, check=False).status:
        assert time.monotonic() < deadline, bed.run("dmesg").stdout[-2000:]
        time.sleep(0.5)
    bed.run("/usr/lib/simulated-gpu-host/make-nodes")


def test_a_gpu_comes_and_goes(ready: Bed) -> None:
    """Permitted, bound, in the spec, usable by a pod; then withdrawn. Nothing is restarted for it."""
    before, at_start = nodes(ready), started(ready)
    pod = ready.node.start_pod(Pod(("sleep", "infinity"), cdi=("0",)))
    plug(ready)
    wait_for_gpus(ready, 9)
    new = nodes(ready) - before
    assert "/dev/nvidia8" in new
    assert len(new) == 2, "the GPU's own node and its render node"
    assert all(opens(ready, path) for path in new)
    # By its UUID: the index is nobody's identity.
    found = json.loads(ready.node.pod(Pod(("gpu-probe", *GPUS), cdi=(uuid_of(ready, 8),))).stdout)["open"]
    assert [path for path, result in found.items() if result == "OK"] == ["/dev/nvidia8"]
    ready.host.qemu.unplug(PORT)
    wait_for_gpus(ready, 8)
    assert nodes(ready) == before
    allowed = ready.run("systemctl", "show", "--property=DeviceAllow", f"systemd-nspawn@{MACHINE}").stdout
    assert "/dev/char/195:8" not in allowed
    found = json.loads(ready.node.in_container(pod, "gpu-probe", *GPUS).stdout)["open"]
    assert [path for path, result in found.items() if result == "OK"] == ["/dev/nvidia0"]
    assert started(ready) == at_start
    assert "restart" not in journal(ready)
