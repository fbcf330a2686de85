"""The set-up survives reloads, restarts and reboots of everything around the agent, and pauses of the agent."""

import json
import time
from collections.abc import Callable

import pytest

from agent.model.paths import MACHINE_ROOTS
from integration.bed.machine.node import Pod
from integration.bed.measure.journal import messages
from integration.bed.measure.restarts import AGENT, CONTAINERD, MACHINE_UNIT
from integration.bed.measure.watching import Watching, uptime
from integration.bed.waiting import wait
from integration.conftest import Bed
from integration.tests.node.test_hotplug import GPUS, PORT, claimed, plug, usable
from integration.tests.node.test_live import wait_for_wakeup, wakeups

pytestmark = pytest.mark.scenario("002")

STOPPED = 60
"""Seconds without the agent."""
Measured = Callable[[str, object], None]

PROBE = ("gpu-probe", "/dev/nvidia1", "/dev/nvidia2", "libcuda.so.1")


def expect_one_gpu(bed: Bed, pod: Pod) -> None:
    found = json.loads(bed.node.pod(pod).stdout)
    assert found["open"]["/dev/nvidia1"] == "OK"
    assert found["open"]["/dev/nvidia2"] in ("EPERM", "ENOENT")
    assert "path" in found["load"]["libcuda.so.1"]


def expect_by_cdi(bed: Bed) -> None:
    expect_one_gpu(bed, Pod(PROBE, cdi=("1",)))


def expect_all_ways(bed: Bed) -> None:
    """Assert access by CDI name and by runtimeClassName, and no access without a grant."""
    expect_by_cdi(bed)
    expect_one_gpu(bed, Pod(PROBE, runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": "1"}))
    found = json.loads(bed.node.pod(Pod(PROBE)).stdout)
    assert set(found["open"].values()) == {"ENOENT"}
    assert "error" in found["load"]["libcuda.so.1"]


def test_daemon_reload_on_the_host_and_in_the_machine(ready: Bed) -> None:
    ready.run("systemctl", "daemon-reload")
    ready.node.run("systemctl", "daemon-reload")
    expect_by_cdi(ready)


def test_restarts_of_machined_dbus_and_containerd(ready: Bed, measured: Measured) -> None:
    """The agent needs no restart of its own and restarts nothing; afterwards, a new GPU still arrives."""
    ready.wait_served()
    before = ready.starts()
    for restart in (("systemctl", "restart", "systemd-machined.service"), ("systemctl", "restart", "dbus.service")):
        ready.run(*restart)
        passes = wakeups(ready)["loader-cache"]
        ready.run("ldconfig")
        wait_for_wakeup(ready, "loader-cache", passes)
        ready.wait_served()
        assert ready.restarted(before) == "nothing"
    with Watching(ready.node.run, GPUS[PORT]) as watching:
        ready.node.run("systemctl", "restart", CONTAINERD)
        restarted = ready.starts()
        made = plug(ready)
        measured("seconds to open", f"{watching.wait(lambda now: now.opens, made):.1f}")
        measured("seconds to ready", f"{watching.wait(usable, made):.1f}")
        measured("ready meanwhile", watching.ready_history())
        assert not [each for each in watching.samples() if claimed(each)]
    assert ready.restarted(before) == CONTAINERD
    measured("restarted", ready.restarted(restarted))
    assert ready.restarted(restarted) == "nothing"
    expect_by_cdi(ready)


@pytest.mark.exhaustive
def test_a_service_that_is_stopped_for_a_minute(ready: Bed, measured: Measured) -> None:
    """The watchdog does not fire, and changes during the pause are handled as if they had just been seen."""
    ready.wait_served()
    before = ready.starts()
    with Watching(ready.node.run, GPUS[PORT]) as watching:
        ready.run("systemctl", "kill", "--kill-whom=main", "--signal=SIGSTOP", AGENT)
        stopped = uptime(ready.guest)
        plug(ready)
        ready.run("sh", "-c", "mknod /dev/nvidia99 c 195 99 && rm /dev/nvidia99 && ldconfig")
        assert ready.node.run("test", "-e", GPUS[PORT], check=False).status != 0
        expect_by_cdi(ready)
        while uptime(ready.guest) < stopped + STOPPED:
            time.sleep(1)
        ready.run("systemctl", "kill", "--kill-whom=main", "--signal=SIGCONT", AGENT)
        went_on = uptime(ready.guest)
        measured("seconds to open", f"{watching.wait(lambda now: now.opens, went_on):.1f}")
        measured("seconds to ready", f"{watching.wait(usable, went_on):.1f}")
        measured("ready meanwhile", watching.ready_history())
        assert not [each for each in watching.samples() if claimed(each)]
    measured("restarted", ready.restarted(before))
    assert ready.restarted(before) == "nothing"


@pytest.mark.exhaustive
def test_a_service_that_is_killed_for_its_memory(ready: Bed, measured: Measured) -> None:
    """The kernel kills it at the limit of its unit. The machine and its pods go on, and systemd starts it again."""
    ready.wait_served()
    before = ready.starts()
    pod = ready.node.start_pod(Pod(("sleep", "infinity"), cdi=("1",)))
    limit = ("systemctl", "set-property", "--runtime", AGENT, "MemorySwapMax=0")
    ready.run(*limit, "MemoryMax=8M")
    killed = uptime(ready.guest)
    said = f"{AGENT} has ended, and systemd will start it again"
    wait("doctor says so", lambda: said in ready.agent("doctor", check=False).stdout, 120, ready.evidence)
    # The command that doctor advises.
    why = ready.run("journalctl", "-b", "-u", AGENT, "--no-pager", "-n", "50").stdout
    assert "killed by the OOM killer" in why
    assert "Failed with result 'oom-kill'" in why
    expect_by_cdi(ready)
    ready.run(*limit, "MemoryMax=512M")
    wait("it runs again", lambda: ready.run("systemctl", "is-active", AGENT, check=False).status == 0, 240)
    ready.wait_served()
    measured("seconds to ready, with the time without memory", f"{uptime(ready.guest) - killed:.0f}")
    assert ready.restarted(before) == AGENT
    found = json.loads(ready.node.in_container(pod, "gpu-probe", "/dev/nvidia1").stdout)
    assert found["open"]["/dev/nvidia1"] == "OK"


def test_a_machine_that_reboots_by_itself(ready: Bed, measured: Measured) -> None:
    """Nobody on the host has to do anything: prepare@ runs before the unit starts again."""
    ready.wait_served()
    # As a file system that was mounted there meanwhile may have it.
    ready.run("chmod", "755", MACHINE_ROOTS)
    before = ready.starts()
    invocation = f"systemctl show -P InvocationID {MACHINE_UNIT}"
    running = ready.run(*invocation.split()).stdout.strip()
    with Watching(ready.run, GPUS[1]) as watching:
        ready.node.run("systemctl", "--no-block", "reboot")
        reboot = uptime(ready.guest)
        ready.run("sh", "-c", f'while [ "$({invocation})" = {running} ]; do sleep 1; done', timeout=120)
        again = uptime(ready.guest)
        lost = watching.wait(lambda now: now.ready == 0, reboot)
        back = watching.wait(lambda now: now.ready == 1, reboot + lost)
        measured("seconds to its next start", f"{again - reboot:.1f}")
        measured("seconds to not ready", f"{lost:.1f}")
        measured("seconds to ready", f"{lost + back:.1f}")
        measured("ready meanwhile", watching.ready_history())
    expect_all_ways(ready)
    assert AGENT not in ready.restarted(before)
    assert ready.run("stat", "--format=%a", MACHINE_ROOTS).stdout == "700\n"


@pytest.mark.exhaustive
def test_a_host_that_reboots_with_its_driver_60_seconds_late(ready: Bed, measured: Measured) -> None:
    """The machine's start waits for the driver, and the machine boots with its GPUs."""
    ready.run("machinectl", "enable", "gpu-node")
    ready.guest.write("/etc/simulated-driver/late", b"60")
    ready.run("sync")
    ready.host.reboot(timeout=600)
    ready.wait_ready(420)
    measured("seconds from boot to ready", f"{uptime(ready.guest):.0f}")
    journal = messages(ready.run, "unbounded-agent-prepare@gpu-node")
    assert "waiting for the driver of GPU 0000:01:00.0" in journal
    expect_all_ways(ready)
