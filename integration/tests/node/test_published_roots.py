"""Driver roots as machines see them: a machine cannot change them, and the host mounts them without the agent."""

import pytest

from agent.model.paths import HOST_NVIDIA, MACHINE_HOST_NVIDIA, STATE, TREES
from integration.bed.machine.node import MACHINE
from integration.conftest import Bed
from integration.tests.kubernetes.test_pods import expect_gpus, look
from integration.tests.node.test_boots_whatever_is_wrong import wait_for_machine

pytestmark = pytest.mark.scenario("002")

ATTACKS = (
    "touch {root}/x",
    "mount -o remount,bind,rw {root} && touch {root}/x",
    "mount -o remount,rw {root}",
    "mount -o remount,bind,rw {parent} && touch {parent}/x",
    "mount -o remount,rw {parent}",
    "chattr +i {parent}",
    # Unmount the directory here: the kernel would refuse to remove a mount point.
    "umount {root} && rmdir {root}",
    "mv {root} {parent}/9",
    "mkdir {parent}/999",
)
"""Each follows the ones before, as root in the machine, with a machine's capabilities and no user namespace."""
NO_OVERLAY = """
rmmod overlay || true
mv "$(modinfo -F filename overlay)" /root/
depmod
"""
OVERLAY_AGAIN = "mv /root/overlay.ko* /usr/lib/modules/$(uname -r)/kernel/fs/overlayfs/ && depmod"


def mounted(bed: Bed) -> set[str]:
    """Return the mount points of overlays in the agent's state directory, relative to it."""
    listed = bed.run("findmnt", "--noheadings", "--raw", "--output=TARGET,FSTYPE").stdout.splitlines()
    found = {path for path, kind in map(str.split, listed) if kind == "overlay"}
    return {path.removeprefix(f"{STATE}/") for path in found if path.startswith(f"{STATE}/")}


def expect_unchangeable(bed: Bed, index: str = "0") -> None:
    """Attack as root in the machine. The host's mounts and files stay the same, and machines that start see them."""
    before, files = mounted(bed), f"find {HOST_NVIDIA}/{index}/ | sort | sha256sum"
    assert {"host-nvidia", f"host-nvidia/{index}"} <= before
    digest = bed.run("sh", "-c", files).stdout
    for attack in ATTACKS:
        script = attack.format(parent=MACHINE_HOST_NVIDIA, root=f"{MACHINE_HOST_NVIDIA}/{index}")
        assert bed.node.run("sh", "-c", script, check=False).status != 0, script
    assert bed.run("sh", "-c", files).stdout == digest
    assert mounted(bed) == before


def driver_root(bed: Bed) -> str:
    """Return the index of the driver root that the machine's libcuda links to."""
    script = "readlink -f /usr/lib/x86_64-linux-gnu/libcuda.so.1"
    path: str = bed.node.run("sh", "-c", f"{script} && test -s $({script})").stdout
    return path.removeprefix(f"{MACHINE_HOST_NVIDIA}/").partition("/")[0]


def test_root_in_a_machine_changes_nothing_that_others_see(ready: Bed) -> None:
    expect_unchangeable(ready)
    ready.run("systemctl", "restart", f"systemd-nspawn@{MACHINE}.service", timeout=300)
    ready.wait_ready()
    assert driver_root(ready) == "0"


@pytest.mark.exhaustive
def test_a_host_that_starts_without_the_agent_mounts_driver_roots(ready: Bed) -> None:
    ready.run("machinectl", "enable", MACHINE)
    ready.run("rm", "-r", "/opt/unbounded-agent")
    ready.run("sync")
    ready.host.reboot(timeout=600, may_fail="unbounded-agent")
    wait_for_machine(ready)
    assert driver_root(ready) == "0"
    assert mounted(ready) == {"host-nvidia", "host-nvidia/0"}


@pytest.mark.exhaustive
def test_missing_files_are_staged_again(ready: Bed) -> None:
    """They get another index: containers keep what is left of the first."""
    ready.wait_served()
    ready.run("rm", "-r", f"{TREES}/0")
    ready.agent("apply", timeout=400)
    ready.wait_ready()
    assert driver_root(ready) == "1"
    assert "host-nvidia/1" in mounted(ready)
    expect_gpus(look(ready.node, cdi=("1",)).probe, {1})


@pytest.mark.exhaustive
def test_a_kernel_without_overlay_file_systems(installed: Bed) -> None:
    """The machine boots with its GPUs from plain directories, replaced once overlays work and no machine runs."""
    installed.run("sh", "-ec", NO_OVERLAY, timeout=240)
    installed.agent("apply", timeout=400, check=False)
    staged = installed.conditions()["DriverRootStaged"]
    assert (staged["status"], staged["reason"]) == ("True", "PlainCopy")
    assert driver_root(installed) == "0"
    assert "GPU-" in installed.node.run("nvidia-smi", "-L").stdout
    assert mounted(installed) == set()
    found = installed.agent("doctor", check=False).stdout
    assert "modprobe overlay" in found

    installed.run("sh", "-ec", OVERLAY_AGAIN, timeout=240)
    installed.run("systemctl", "reset-failed")
    installed.run("systemctl", "stop", f"systemd-nspawn@{MACHINE}.service", timeout=120)
    installed.agent("apply", timeout=400)
    assert installed.conditions()["DriverRootStaged"]["reason"] == "Staged"
    assert driver_root(installed) == "1"
    expect_unchangeable(installed, "1")
