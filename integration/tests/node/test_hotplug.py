"""GPUs come and go while machine, containerd and pods run: by PCI Express hot-plug of the virtual machine."""

import json
import re
from collections.abc import Callable

import pytest

from integration.bed.machine.node import MACHINE, Pod
from integration.bed.measure.watching import Sample, Watching, uptime
from integration.bed.vm.guest import GuestError
from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

PORT = 8
"""An empty port: the host begins with GPUs in 0 to 7."""
GPUS = tuple(f"/dev/nvidia{minor}" for minor in range(PORT + 1))
OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"


def nodes(bed: Bed) -> set[str]:
    """Return the GPU nodes of the machine."""
    return set(bed.node.shell("ls -d /dev/nvidia[0-9]* /dev/dri/renderD*").stdout.split())


def uuid_of(bed: Bed, minor: int) -> str:
    """Return the UUID of the GPU with that device minor, from the host's driver."""
    text = bed.run("sh", "-c", "cat /proc/driver/nvidia/gpus/*/information").stdout
    found = re.finditer(r"GPU UUID:\s*(?P<uuid>\S+).*?Device Minor:\s*(?P<minor>\d+)", text, re.DOTALL)
    return next(str(match["uuid"]) for match in found if int(match["minor"]) == minor)


def opens(bed: Bed, path: str) -> bool:
    return bed.node.run("python3", "-c", OPEN, path, check=False).status == 0


def wait_for_gpus(bed: Bed, count: int, seconds: float = 300) -> None:
    """Wait until the machine is ready with that many GPUs in its CDI specification, and nvidia-ctk reads them there."""

    # This only reads files: programs in the machine would take the processor from what is waited for.
    def reached() -> bool:
        return len(published(bed)) == count and bed.last_conditions()["Ready"]["status"] == "True"

    wait(f"the machine is ready with {count} GPUs", reached, seconds, lambda: f"{published(bed)}\n{bed.evidence()}")
    listed = bed.node.run("nvidia-ctk", "cdi", "list").stdout
    assert {line.rpartition("=")[2] for line in listed.splitlines() if "=GPU-" in line} == published(bed)


def published(bed: Bed) -> set[str]:
    """Return the UUIDs of the GPUs in the machine's CDI specification."""
    try:
        devices = bed.node.spec()["devices"]
    except GuestError:
        devices = []
    return {device["name"] for device in devices if device["name"].startswith("GPU-")}


def journal(bed: Bed) -> str:
    return bed.run("journalctl", "-u", "unbounded-agent", "--no-pager", "-n", "40").stdout


def plug(bed: Bed, port: int = PORT) -> float:
    """Plug in one more GPU, and make its node as NVIDIA's programs do; return when that was, by `uptime`."""
    bed.host.qemu.plug(port)
    bound = f"test $(ls -d /sys/bus/pci/drivers/nvidia/0000:* | wc -l) = {len(bed.host.gpus)}"
    wait("the driver is bound", lambda: bed.run("sh", "-c", bound, check=False).status == 0, 180,
         lambda: bed.run("dmesg").stdout[-2000:])  # fmt: skip
    made = uptime(bed.guest)
    bed.run("/usr/lib/simulated-gpu-host/make-nodes")
    return made


def usable(sample: Sample) -> bool:
    """Return whether the ninth GPU opens in the machine, and the metrics say that the machine is ready with nine."""
    return sample.opens and sample.ready == 1 and sample.gpus == PORT + 1


def claimed(sample: Sample) -> bool:
    """Return whether the metrics say ready with nine GPUs but the ninth does not open: that must never happen."""
    return sample.ready == 1 and sample.gpus == PORT + 1 and not sample.opens


def comes_and_goes(bed: Bed, measured: Callable[[str, object], None]) -> None:
    """Assert that a GPU is permitted, bound, listed and usable by a pod, and later withdrawn, without any restart."""
    before, at_start = nodes(bed), bed.starts()
    pod = bed.node.start_pod(Pod(("sleep", "infinity"), cdi=("0",)))
    with Watching(bed.node.run, GPUS[PORT]) as watching:
        made = plug(bed)
        measured("seconds to open", f"{watching.wait(lambda now: now.opens, made):.1f}")
        measured("seconds to ready", f"{watching.wait(usable, made):.1f}")
        measured("ready meanwhile", watching.ready_history())
        assert not [each for each in watching.samples() if claimed(each)]
    wait_for_gpus(bed, 9)
    new = nodes(bed) - before
    assert GPUS[PORT] in new
    assert len(new) == 2, "the GPU's own node and its render node"
    assert all(opens(bed, path) for path in new)
    # Bound while the machine runs, and read-only like those of its start: no pod can change the mode of the host's.
    assert all("Read-only" in bed.node.run("chmod", "600", path, check=False).stderr for path in new)
    # By its UUID, because an index does not identify a GPU.
    found = json.loads(bed.node.pod(Pod(("gpu-probe", *GPUS), cdi=(uuid_of(bed, PORT),))).stdout)["open"]
    assert [path for path, result in found.items() if result == "OK"] == [GPUS[PORT]]
    bed.host.qemu.unplug(PORT)
    wait_for_gpus(bed, 8)
    assert nodes(bed) == before
    allowed = bed.run("systemctl", "show", "--property=DeviceAllow", f"systemd-nspawn@{MACHINE}").stdout
    assert f"/dev/char/195:{PORT}" not in allowed
    found = json.loads(bed.node.in_container(pod, "gpu-probe", *GPUS).stdout)["open"]
    assert [path for path, result in found.items() if result == "OK"] == [GPUS[0]]
    measured("restarted", bed.restarted(at_start))
    assert bed.restarted(at_start) == "nothing"


def test_a_gpu_comes_and_goes(ready: Bed, measured: Callable[[str, object], None]) -> None:
    comes_and_goes(ready, measured)
