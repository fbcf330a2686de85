"""Devices other than GPUs, and mounts, in a real machine on a real kernel."""

import json
import time
from collections.abc import Callable

import pytest

from integration.bed.machine.node import Pod
from integration.bed.vm.kernel_modules import simulated_module
from integration.bed.waiting import wait
from integration.conftest import Bed

CONFIG = "/etc/unbounded-agent/config.toml"
LATENCY = "/dev/cpu_dma_latency"
"""A miscellaneous device of kernels with power management, from which four bytes can be read (kernel/power/qos.c)."""
SETTINGS = f"""\
[machines.gpu-node]
devices = ["gdrcopy"]
extra_devices = [{{ path = "{LATENCY}", mode = "r" }}]
extra_mounts = [
    {{ source = "/srv/models", target = "/srv/models" }},
    {{ source = "/run/udev/data", target = "/run/udev/data" }},
    {{ source = "/srv/absent", target = "/mnt/absent" }},
    {{ source = "/home/user/data", target = "/mnt/data" }},
]
"""
LATE = "/dev/late"
DEVICE_CLASSES = """\
[machines.gpu-node]
devices = ["kvm", "tun", "vhost", "infiniband", "gdrcopy", "nvidia-fs", "accel"]
cdi_modes = ["gds", "mofed", "gdrcopy", "imex", "nvswitch", "management"]
imex_channels = true
"""
KERNEL_NODES = (
    *("/dev/kvm", "/dev/net/tun", "/dev/vhost-net", "/dev/vhost-vsock"),
    *("/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"),
)
"""Nodes of the kernel's real drivers: KVM on the emulated processor, RDMA over Ethernet on the loopback interface."""
SIMULATED = ("/dev/accel/accel0", "/dev/gdrdrv", "/dev/nvidia-fs0", "/dev/nvidia-fs1")
SWITCH = ("/dev/nvidia-nvswitch0", "/dev/nvidia-nvswitchctl")
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
MAKE_NODES = """
make() { mkdir -p $(dirname $1); mknod -m 666 $1 c $(awk -v name=$2 '$2 == name { print $1 }' /proc/devices) $3; }
make /dev/gdrdrv gdrdrv 0
make /dev/nvidia-nvswitch0 nvidia-nvswitch 0
make /dev/nvidia-nvswitchctl nvidia-nvswitch 255
make /dev/nvidia-caps-imex-channels/channel0 nvidia-caps-imex-channels 0
"""
KVM_VERSION = "import fcntl, os; print(fcntl.ioctl(os.open('/dev/kvm', os.O_RDWR), 0xAE00))"
"""KVM_GET_API_VERSION, which is always 12 (Documentation/virt/kvm/api.rst)."""


def test_configured_devices_are_present_and_missing_ones_stop_nothing(installed: Bed) -> None:
    installed.run("mkdir", "-p", "/srv/models", "/home/user/data")
    installed.run("chown", "1000", "/home/user")
    installed.guest.write("/srv/models/weights", b"some")
    installed.guest.write(CONFIG, SETTINGS.encode())
    installed.agent("apply")
    node = installed.node
    assert node.run("cat", "/srv/models/weights").stdout == "some"
    assert node.run("ls", "/run/udev/data").stdout.split(), "where nvidia-ctk looks for storage"
    assert "Read-only file system" in node.run("touch", "/srv/models/weights", check=False).stderr
    node.run("head", "-c", "4", LATENCY)
    assert "Operation not permitted" in node.run("dd", "if=/dev/zero", f"of={LATENCY}", "count=1", check=False).stderr
    conditions = installed.conditions()
    assert conditions["Ready"]["status"] == "True"
    assert "other devices: 1 node" in conditions["DevicesAllowed"]["message"]
    message = conditions["DevicesPresent"]["message"].partition("requested but missing: ")[2]
    assert 'devices "gdrcopy"' in message
    assert "/srv/absent for /mnt/absent" in message
    assert "/home/user belongs to user 1000" in message, "who could put a link to anything of the host there"


def test_a_device_that_comes_and_goes_while_the_machine_runs(ready: Bed) -> None:
    """No event is needed: passes of the service find nodes that are configured by path."""
    before = ready.starts()
    ready.guest.write(CONFIG, f'[machines.gpu-node]\nextra_devices = [{{ path = "{LATE}" }}]\n'.encode())
    minor = ready.run("stat", "--format=%T", LATENCY).stdout.strip()
    ready.run("mknod", LATE, "c", "10", str(int(minor, 16)))
    reconcile(ready)
    wait_until(ready, f"test -c {LATE}")
    ready.node.run("head", "-c", "4", LATE)
    ready.run("rm", LATE)
    reconcile(ready)
    wait_until(ready, f"test ! -e {LATE}")
    # In the machine, the number is no longer permitted either: node and permission are separate.
    ready.node.run("mknod", "/run/again", "c", "10", str(int(minor, 16)), check=False)
    assert ready.node.run("head", "-c", "4", "/run/again", check=False).status != 0
    assert ready.restarted(before) == "nothing"


@pytest.mark.exhaustive
def test_every_device_class_and_mode_while_the_machine_runs(
    ready: Bed, measured: Callable[[str, object], None]
) -> None:
    """Real drivers where the kernel has one that needs no hardware, otherwise stand-ins (simulations)."""
    bed, before = ready, ready.starts()
    load_drivers(bed)
    bed.guest.write(CONFIG, DEVICE_CLASSES.encode())
    reconcile(bed)
    started = time.monotonic()
    modes = ("gdrcopy", "gds", "imex", "management", "mofed", "nvswitch")
    wait_for_specs(bed, *modes)
    measured("seconds until all specifications are there", round(time.monotonic() - started, 1))
    bed.node.shell("for each in /etc/cdi/*; do cdi-validate $each || exit 1; done")
    assert bed.node.run("python3", "-c", KVM_VERSION).stdout.strip() == "12"
    numbers = ("stat", "-c", "%n %t:%T", *KERNEL_NODES, *SIMULATED)
    assert bed.node.run(*numbers).stdout == bed.run(*numbers).stdout

    assert opened(bed, "nvidia.com/mofed=all", "nvidia.com/gdrcopy=all") == {*KERNEL_NODES[-2:], "/dev/gdrdrv"}
    assert opened(bed, "nvidia.com/gds=all", "nvidia.com/imex-channel=0") == {*SIMULATED[-2:], CHANNEL}
    assert opened(bed, "nvidia.com/nvswitch=all") == {*SWITCH}
    assert opened(bed, "management.nvidia.com/gpu=all") == {"/dev/nvidia0", "/dev/nvidia7", "/dev/nvidiactl", CHANNEL}
    assert opened(bed) == set()
    # A pod can set this itself if it may use that RuntimeClass.
    visible = {"NVIDIA_VISIBLE_DEVICES": "7,nvidia.com/mofed=all"}
    wanted = {*KERNEL_NODES[-2:], "/dev/nvidia7", "/dev/nvidiactl"}
    assert opened(bed, runtime="nvidia", environment=visible) == wanted

    # A device that disappears is first removed from the specifications, then from the machine.
    bed.run("rdma", "link", "delete", "rxe0")
    bed.run("rm", "/dev/gdrdrv", *SWITCH)
    bed.run("rmmod", "simulated_devices")
    wait_for_specs(bed, "imex", "management", "mofed")
    gone = ("/dev/infiniband/uverbs0", *SIMULATED, *SWITCH)
    wait_gone(bed, *gone)
    assert opened(bed, "nvidia.com/mofed=all") == {"/dev/infiniband/rdma_cm"}
    conditions = bed.wait_ready()
    message = conditions["DevicesPresent"]["message"].partition("requested but missing: ")[2]
    assert all(f'devices "{name}"' in message for name in ("gdrcopy", "nvidia-fs", "accel")), message
    assert "no devices for mode gds, gdrcopy, nvswitch" in conditions["CDISpecCurrent"]["message"]

    bed.guest.write(CONFIG, b"[machines.gpu-node]\n")
    reconcile(bed)
    wait_for_specs(bed)
    wait_gone(bed, *KERNEL_NODES[2:], CHANNEL)
    bed.wait_ready()
    assert bed.restarted(before) == "nothing"


def load_drivers(bed: Bed) -> None:
    """Load the drivers, and make the nodes that no driver makes by itself."""
    bed.run("modprobe", "--all", "kvm_amd", "tun", "vhost_net", "vhost_vsock", "rdma_rxe", "rdma_ucm", "drm")
    bed.run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "lo")
    bed.guest.write("/root/simulated_devices.ko", simulated_module("devices").read_bytes())
    bed.run("insmod", "/root/simulated_devices.ko")
    bed.run("sh", "-ec", MAKE_NODES)


def reconcile(bed: Bed) -> None:
    """Let the service read its configuration and make a pass."""
    bed.run("systemctl", "reload", "unbounded-agent.service")


def wait_until(bed: Bed, script: str, seconds: float = 240) -> None:
    """Wait until a script succeeds in the machine."""
    wait(script, lambda: bed.node.shell(script, check=False).status == 0, seconds, bed.evidence)


def wait_for_specs(bed: Bed, *modes: str) -> None:
    """Wait until only these modes have a specification next to the GPUs'."""
    names = " ".join([*(f"nvidia-{mode}.yaml" for mode in sorted(modes)), "nvidia.yaml"])
    wait_until(bed, f'test "$(echo $(ls /etc/cdi))" = "{names}"')


def wait_gone(bed: Bed, *paths: str) -> None:
    """Wait until none of these is in the machine: its half removes specifications first, then nodes, one by one."""
    wait_until(bed, f'test -z "$(ls {" ".join(paths)} 2>/dev/null)"')


def opened(bed: Bed, *names: str, runtime: str = "", environment: dict[str, str] | None = None) -> set[str]:
    """Return which of all possible nodes a pod with these CDI devices can open."""
    nodes = (*KERNEL_NODES, *SIMULATED, *SWITCH, CHANNEL, "/dev/nvidia0", "/dev/nvidia7", "/dev/nvidiactl")
    found = bed.node.pod(Pod(("gpu-probe", *nodes), names, runtime, environment or {})).stdout
    return {path for path, result in json.loads(found)["open"].items() if result == "OK"}
