"""A machine gets the GPUs that it was given, and the kernel blocks the others."""

import pytest

from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

UNIT = "systemd-nspawn@gpu-node.service"
SET = f"/run/systemd/system.control/{UNIT}.d/50-DeviceAllow.conf"
SECOND = "0000:02:00.0"
OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"


def test_a_machine_with_one_of_eight_gpus(installed: Bed) -> None:
    """Given by PCI address: its node opens, another cannot even be made, and the specification names one GPU."""
    installed.guest.write("/etc/unbounded-agent/config.toml", f'[machines.gpu-node]\ngpus = ["{SECOND}"]\n'.encode())
    installed.agent("apply")
    node = installed.node
    uuid = node.run("nvidia-smi", "-L").stdout.split("UUID: ")[1].split(")")[0]
    assert set(each["name"] for each in node.spec()["devices"]) == {"0", uuid, "all", "none"}
    node.run("python3", "-c", OPEN, "/dev/nvidia1")
    # Root in the machine has CAP_MKNOD; the unit's device policy keeps it from using that here.
    made = node.run("mknod", "/dev/nvidia0", "c", "195", "0", check=False)
    assert made.status != 0
    assert "Operation not permitted" in made.stderr


@pytest.mark.exhaustive
def test_an_unknown_gpu_is_named_and_holds_up_nothing(installed: Bed) -> None:
    """There is a condition instead of a guess, and the machine starts with the GPU that exists."""
    text = f'[machines.gpu-node]\ngpus = ["{SECOND}", "0000:7f:00.0"]\n'
    installed.guest.write("/etc/unbounded-agent/config.toml", text.encode())
    finished = installed.agent("apply", check=False)
    assert finished.status == 1
    assert "GPU 0000:7f:00.0 is not on this host" in finished.stdout
    installed.node.run("python3", "-c", OPEN, "/dev/nvidia1")


def test_a_removed_machine_keeps_no_permission(ready: Bed) -> None:
    """Permissions that were set while it ran would apply to its next start, until the host reboots."""

    def allowed() -> str:
        return ready.run("systemctl", "show", "--property=DeviceAllow", UNIT).stdout

    # The service does this for a GPU that is plugged in.
    ready.run("systemctl", "set-property", "--runtime", UNIT, "DeviceAllow=/dev/char/195:0 rw")
    ready.run("systemctl", "stop", UNIT, timeout=120)
    assert "/dev/char/195:0" in ready.run("cat", SET).stdout
    ready.guest.write("/etc/unbounded-agent/config.toml", b"[machines.other]\n")
    ready.run("systemctl", "reload", "unbounded-agent.service")

    def withdrawn() -> bool:
        return ready.run("test", "-e", SET, check=False).status != 0 and "/dev/char/195:" not in allowed()

    wait("the permissions are withdrawn", withdrawn, 240, ready.evidence)
    # These are the installed template's, which apply to a start without our settings.
    assert "char-pts rw" in allowed()


REFUSED = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
FINIT_MODULE = {"x86_64": 313, "aarch64": 273}[os.uname().machine]

def refused(what):
    try:
        what()
    except PermissionError:
        return True
    return False

def load_module():
    if libc.syscall(FINIT_MODULE, -1, b"", 0):
        raise OSError(ctypes.get_errno(), "finit_module")

os.mkdir("/run/all-devices")
assert libc.mount(b"none", b"/run/all-devices", b"devtmpfs", 0, None) == 0
print("module", refused(load_module))
print("clock", refused(lambda: time.clock_settime(time.CLOCK_REALTIME, time.time())))
for node in ("loop-control", "loop0", "mapper/control", "vda"):
    print(node, refused(lambda: os.open(f"/run/all-devices/{node}", os.O_RDONLY)))
assert libc.mount(None, b"/proc/sys", None, 32 | 4096, None) == 0
os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
"""
"""Run as root in a machine: its capabilities and devices forbid these, even with the host's whole devtmpfs.

The last calls are what docs/security.md says that root may do. MS_REMOUNT | MS_BIND is 32 | 4096 (mount.h).
"""


def test_what_root_in_a_machine_cannot_do(ready: Bed) -> None:
    ready.run("modprobe", "--all", "loop", "dm_mod")
    found = ready.node.run("python3", "-c", REFUSED).stdout.splitlines()
    assert found == [f"{what} True" for what in ("module", "clock", "loop-control", "loop0", "mapper/control", "vda")]
