"""The opt-in restart of a device plugin's container, on a simulated machine with scripted crictl and systemd-run.

The process that listens is this test's; its cgroup is a file of the simulated machine.
"""

import os
import time

import pytest

from agent.machine.kubelet import PLUGINS, RESTART_INTERVAL, SOCKET
from agent.machine.notes import Notes
from tests.fakes.kubelet import PLUGIN_SOCKET, UUIDS, Kubelet
from tests.fakes.machine import EMPTY, REQUEST, Machine, failing, systemctl
from tests.fakes.plugin_restarts import BY_SYSTEMD, CGROUP, CONTAINER, allow_restarts, restarts

OTHER = CONTAINER[::-1]
NOTE = "device-plugin-restart-nvidia"


@pytest.fixture
def outdated(kubelet: Kubelet) -> Kubelet:
    kubelet.serve()
    allow_restarts(kubelet.machine)
    kubelet.advertise(gpu=[UUIDS[0]])
    kubelet.publish_later()
    return kubelet


def pass_time(machine: Machine, seconds: float) -> None:
    notes = Notes(machine)
    noted = notes.load(NOTE)
    notes.save(NOTE, {**noted, "at": noted["at"] - seconds})


@pytest.mark.parametrize("cgroup", [BY_SYSTEMD, f"0::/kubepods/besteffort/pod1-2/{CONTAINER}\n",
                                    f"12:devices:/kubepods/burstable/pod1-2/{CONTAINER}\n1:name=x:/\n"])  # fmt: skip
def test_the_container_that_serves_is_stopped_once(outdated: Kubelet, cgroup: str) -> None:
    """The kubelet starts it again. If it still lacks the GPU, for another reason, that is reported but not retried."""
    outdated.machine.put(CGROUP, cgroup)
    assert outdated.condition() == ("False", "DevicePluginRestartNeeded")
    (command,) = restarts(outdated.machine)
    assert command[:2] == ("/usr/local/bin/crictl", f"--runtime-endpoint=unix://{SOCKET}")
    assert "stop" in command
    assert command[-1] == CONTAINER
    assert "--no-block" in next(call for call in outdated.machine.calls if call[0] == "systemd-run")
    message = outdated.message()
    assert CONTAINER[:13] in message
    assert "restart 1 " in message
    outdated.machine.put(CGROUP, cgroup.replace(CONTAINER, OTHER))
    for _ in range(2):
        pass_time(outdated.machine, 2 * RESTART_INTERVAL)
        assert outdated.condition() == ("False", "DevicePluginRestartNeeded")
        assert outdated.message() == message
    assert len(restarts(outdated.machine)) == 1
    outdated.begin_later()
    assert outdated.condition() == ("False", "GPUsMissing")
    assert len(restarts(outdated.machine)) == 1


def test_the_plugin_of_a_machine_without_gpus_is_restarted_once(outdated: Kubelet) -> None:
    outdated.machine.hand(EMPTY, restart_device_plugin=True)
    for _ in range(3):
        assert outdated.condition() == ("False", "DevicePluginRestartNeeded")
        assert "restart 1 " in outdated.message()
        outdated.machine.put(CGROUP, BY_SYSTEMD.replace(CONTAINER, OTHER))
        pass_time(outdated.machine, 2 * RESTART_INTERVAL)
    assert len(restarts(outdated.machine)) == 1
    assert not outdated.machine.exists("/etc/cdi/nvidia.yaml")


def test_containerd_is_told_at_its_own_socket(outdated: Kubelet) -> None:
    outdated.machine.put("/proc/52/cmdline", "containerd\0-a\0/run/b.sock\0")
    outdated.machine.program("systemctl", systemctl("active", 10, main_process=52))
    outdated.condition()
    (command,) = restarts(outdated.machine)
    assert "--runtime-endpoint=unix:///run/b.sock" in command


def test_a_container_that_was_not_stopped_is_stopped_later(outdated: Kubelet) -> None:
    """crictl fails in its own unit: containerd may just be restarting."""
    outdated.condition()
    outdated.condition()
    assert len(restarts(outdated.machine)) == 1
    pass_time(outdated.machine, RESTART_INTERVAL)
    for _ in range(2):
        outdated.condition()
        assert len(restarts(outdated.machine)) == 2
        assert "restart 2 " in outdated.message()
        assert "which the one before could not" in outdated.message()


def test_another_gpu_soon_after_waits(outdated: Kubelet) -> None:
    """GPUs that are often added and removed must not keep the plugin from working."""
    outdated.condition()
    later = time.time() - 5
    os.utime(outdated.machine.tree / "etc/cdi/nvidia.yaml", (later, later))
    assert outdated.condition() == ("False", "DevicePluginRestartNeeded")
    assert "a later run restarts it" in outdated.message()
    assert len(restarts(outdated.machine)) == 1
    pass_time(outdated.machine, RESTART_INTERVAL)
    outdated.condition()
    assert len(restarts(outdated.machine)) == 2
    assert "restart 2 " in outdated.message()


def test_no_restart_unless_it_is_configured_and_helps(outdated: Kubelet) -> None:
    outdated.machine.hand(REQUEST)
    assert outdated.condition() == ("False", "DevicePluginRestartNeeded")
    outdated.machine.hand(REQUEST, restart_device_plugin=True)
    outdated.begin_later()
    assert outdated.condition() == ("False", "GPUsMissing")
    assert not restarts(outdated.machine)


@pytest.mark.parametrize(
    "cgroup",
    [
        "0::/system.slice/nvidia-device-plugin.service\n",
        "0::/user.slice/user-0.slice/session-1.scope\n",
        f"0::/system.slice/docker-{CONTAINER}.scope\n",
        "0::/kubepods.slice/kubepods-besteffort.slice\n",
        "",
        "none: it has just exited",
        "hard link",
    ],
)
def test_a_plugin_outside_of_pods_is_left_alone(outdated: Kubelet, cgroup: str) -> None:
    """A hard link may be of another plugin's socket."""
    if cgroup == "hard link":
        place = outdated.machine.tree / PLUGINS[1:]
        (place / "other.sock").hardlink_to(place / PLUGIN_SOCKET.rsplit("/", 1)[1])
    elif cgroup.startswith("none"):
        outdated.machine.drop(CGROUP)
    else:
        outdated.machine.put(CGROUP, cgroup)
    assert outdated.condition() == ("False", "DevicePluginRestartNeeded")
    assert "is not running in a pod's container" in outdated.message()
    assert not restarts(outdated.machine)


def test_what_keeps_the_plugin_from_being_restarted_is_reported_and_retried(outdated: Kubelet) -> None:
    outdated.machine.drop("/usr/local/bin/crictl")
    assert outdated.condition() == ("False", "DevicePluginRestartNeeded")
    assert "install crictl" in outdated.message()
    assert not restarts(outdated.machine)
    outdated.machine.put("/usr/bin/crictl")
    outdated.machine.program("systemd-run", "", status=1, stderr="Failed to connect to bus")
    assert outdated.condition() == ("False", "DevicePluginRestartNeeded")
    assert "Failed to connect to bus" in outdated.message()
    outdated.machine.program("systemd-run", "")
    outdated.condition()
    assert "restart 1 " in outdated.message()
    assert len(restarts(outdated.machine)) == 2


def test_a_restart_that_cannot_be_noted_is_not_done(outdated: Kubelet) -> None:
    """A restart that is not noted would be repeated each minute."""
    outdated.machine.before_write = failing(28, f"{NOTE}.json")
    assert outdated.condition() == ("False", "Failed")
    assert not restarts(outdated.machine)
