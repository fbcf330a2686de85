"""GPUsAdvertised on a simulated machine; tests/fakes/kubelet.py says what is simulated."""

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.machine.kubelet import CHECKPOINT, KUBELET_SOCKET, PLUGINS, parse_checkpoint
from agent.machine.notes import OWNED_COPY
from agent.model.paths import OWNED
from agent.vendors.nvidia.contract import gpu_of
from tests.fakes.kubelet import BACKLOG, PLUGIN_SOCKET, SPEC, UUIDS, Kubelet
from tests.fakes.machine import EMPTY

AHEAD = 7200
UUID = "7a0e1b2c-0000-4000-8000-0123456789ab"
OTHER = "GPU-99999999-0000-0000-0000-000000000000"


@pytest.fixture
def serving(kubelet: Kubelet) -> Kubelet:
    kubelet.serve()
    return kubelet


def test_every_granted_gpu_is_advertised(serving: Kubelet) -> None:
    assert len(UUIDS) == 2
    assert serving.condition() == ("True", "Advertised")
    assert "nvidia.com/gpu: 2" in serving.message()
    serving.machine.calls.clear()
    assert serving.condition() == ("True", "Advertised")
    assert not [call for call in serving.machine.calls if "kubelet" in " ".join(call)], "no process for it"
    assert serving.condition() == ("True", "Advertised")
    listener = serving.sockets[PLUGIN_SOCKET]
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(1) == b"", "closed without a byte"


def test_a_gpu_added_or_removed_after_the_plugins_start_needs_its_restart(serving: Kubelet) -> None:
    """The plugin searches for GPUs only when it starts, which also creates its socket again.

    NVIDIA's Network Operator offers `nvidia.com/hostdev`, which shows nothing about a device plugin for GPUs.
    """
    serving.advertise(gpu=list(UUIDS[:1]), hostdev=["0000:3b:00.0"])
    serving.publish_later()
    assert serving.condition() == ("False", "DevicePluginRestartNeeded")
    assert UUIDS[1] in serving.message()
    assert "hostdev" not in serving.message()
    serving.begin_later()
    assert serving.condition() == ("False", "GPUsMissing")
    serving.advertise(gpu=[*UUIDS, OTHER])
    serving.publish_later()
    assert serving.condition() == ("False", "DevicePluginRestartNeeded")
    assert OTHER in serving.message()


def test_an_unhealthy_gpu_needs_no_restart(serving: Kubelet) -> None:
    """The plugin knew the GPU; a restart would only make it forget that the GPU is unhealthy."""
    serving.publish_later()
    assert serving.condition() == ("True", "Advertised")
    serving.advertise(gpu=list(UUIDS[:1]))
    assert serving.condition() == ("False", "GPUsMissing")


def test_replicas_are_compared_by_gpu(serving: Kubelet) -> None:
    replicas = [f"{gpu}::{index}" for gpu in UUIDS for index in range(4)]
    serving.advertise(gpu_shared=replicas)
    assert serving.condition() == ("True", "Advertised")
    assert "nvidia.com/gpu.shared: 8" in serving.message()
    assert serving.machine.report()["advertised_gpus"] == 2
    serving.advertise(gpu_shared=[f"{UUIDS[0]}::{index}" for index in range(8)])
    assert serving.condition() == ("False", "GPUsMissing")
    # HAMi's plugin offers each GPU ten times. A new specification does not make it restart.
    devices = [f"{gpu}-{index}" for gpu in UUIDS for index in range(10)]
    serving.advertise(gpu=devices)
    assert serving.condition() == ("True", "Advertised")
    assert "nvidia.com/gpu: 20" in serving.message()
    assert serving.machine.report()["advertised_gpus"] == 2
    serving.publish_later()
    assert serving.condition() == ("True", "Advertised")
    serving.advertise(gpu=devices[:10])
    assert serving.condition() == ("False", "GPUsMissing")
    serving.advertise(gpu=[f"{gpu}-x{index}" for gpu in UUIDS for index in range(10)])
    assert serving.condition() == ("Unknown", "UnknownIDs"), "ids of another kind prove nothing"


def test_missing_and_stale_gpus_are_named(serving: Kubelet) -> None:
    serving.advertise(gpu=[UUIDS[0]])
    assert serving.condition() == ("False", "GPUsMissing")
    assert serving.message().startswith(f"not advertised, although granted: {UUIDS[1]};")
    assert serving.machine.report()["advertised_gpus"] == 1
    serving.advertise(gpu=[*UUIDS, OTHER])
    assert serving.condition() == ("False", "StaleGPUs")
    assert serving.message().startswith(f"advertised, but not (or no longer) in the CDI specification: {OTHER};")
    serving.advertise(gpu=[UUIDS[0], OTHER])
    assert serving.condition() == ("False", "GPUsMissing")
    assert UUIDS[1] in serving.message()
    assert OTHER in serving.message()


def test_all_gpus_are_withdrawn(serving: Kubelet) -> None:
    serving.machine.hand(EMPTY)
    assert serving.condition() == ("False", "DevicePluginRestartNeeded")
    serving.advertise(gpu=[])
    assert serving.condition() == ("True", "NotApplicable")


def test_a_plugin_that_exited_or_was_killed(serving: Kubelet) -> None:
    """The kubelet's checkpoint keeps the plugin's devices for five minutes."""
    serving.kill(PLUGIN_SOCKET)
    assert serving.condition() == ("False", "DevicePluginDown")
    assert PLUGIN_SOCKET in serving.message()
    serving.machine.drop(PLUGIN_SOCKET)
    assert serving.condition() == ("False", "DevicePluginDown")
    serving.advertise()
    assert serving.condition() == ("Unknown", "NoDevicePlugin")


def test_a_dead_plugin_next_to_one_that_serves(serving: Kubelet) -> None:
    other = f"{PLUGINS}/nvidia-mig-1g.5gb.sock"
    serving.listen(other)
    serving.advertise(gpu=list(UUIDS))
    assert serving.condition() == ("True", "Advertised")
    serving.kill(other)
    assert serving.condition() == ("False", "DevicePluginDown")
    assert serving.message().startswith(f"no connection is accepted at {other}, only at {PLUGIN_SOCKET};")


def test_attack_many_sockets_cost_little(serving: Kubelet) -> None:
    """Pods of device plugins may make any number of them in the kubelet's directory."""
    for number in range(500):
        (serving.machine.tree / PLUGINS[1:] / f"nvidia-{number}; all is well.sock").touch()
    assert serving.condition() == ("False", "DevicePluginDown")
    message = serving.message()
    assert message.startswith(
        f"the device plugin is not running: no connection is accepted at '{PLUGINS}/nvidia-0; all"
    )
    assert "and 48 more; see" in message, "16 are shown, and 64 were tried"
    assert serving.machine.conditions()["CDISpecCurrent"] == ("True", "Verified")


def test_a_plugin_that_hangs_with_a_full_backlog(serving: Kubelet) -> None:
    """connect(2) would wait for it."""
    with ExitStack() as stack:
        for _ in range(BACKLOG + 1):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.settimeout(5)
            directory = os.open(serving.machine.tree / PLUGINS[1:], os.O_PATH)
            client.connect(f"/proc/self/fd/{directory}/nvidia-gpu.sock")
            os.close(directory)
        assert serving.condition() == ("False", "DevicePluginDown")


def test_a_kubelet_that_restarts(serving: Kubelet) -> None:
    """A kubelet removes all sockets and creates its own. Its old list proves nothing until the plugin sends one."""
    serving.kill(KUBELET_SOCKET)
    assert serving.condition() == ("Unknown", "KubeletDown")
    for path in (KUBELET_SOCKET, PLUGIN_SOCKET):
        serving.machine.drop(path)
    serving.listen(KUBELET_SOCKET)
    assert serving.condition() == ("False", "DevicePluginDown")
    serving.listen(PLUGIN_SOCKET)
    assert serving.condition() == ("False", "NotRegistered")
    serving.advertise(gpu=list(UUIDS))
    assert serving.condition() == ("True", "Advertised")


def test_a_clock_that_was_set_back(serving: Kubelet) -> None:
    """The list is written after the socket, whatever the clock says; before that it is not called missing."""
    later = time.time_ns() + 3600 * 10**9
    os.utime(serving.machine.tree / PLUGIN_SOCKET[1:], ns=(later, later))
    assert serving.condition() == ("True", "Advertised")


def test_a_clock_that_was_ahead_when_the_plugin_started(serving: Kubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours after the clock was set back, a list that the kubelet wrote since then looked older than the socket."""
    wall, since_boot = time.time, time.monotonic
    for path in (PLUGIN_SOCKET, CHECKPOINT):
        ahead(serving, path)
    monkeypatch.setattr(time, "time", lambda: wall() + AHEAD)
    assert serving.condition() == ("True", "Advertised")
    monkeypatch.setattr(time, "time", wall)
    serving.advertise(gpu=list(UUIDS))
    assert serving.condition() == ("True", "Advertised")
    monkeypatch.setattr(time, "time", lambda: wall() + AHEAD + 60)
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    monkeypatch.setattr(time, "monotonic", lambda: since_boot() + AHEAD + 60)
    assert serving.condition() == ("True", "Advertised")


def test_a_specification_from_before_the_clock_was_set_back(serving: Kubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin started later, so that another restart would not help."""
    wall = time.time
    ahead(serving, SPEC)
    monkeypatch.setattr(time, "time", lambda: wall() + AHEAD)
    serving.condition()
    monkeypatch.setattr(time, "time", wall)
    serving.kill(PLUGIN_SOCKET)
    serving.machine.drop(PLUGIN_SOCKET)
    serving.listen(PLUGIN_SOCKET)
    serving.advertise(gpu=[])
    assert serving.condition() == ("False", "GPUsMissing")


def ahead(kubelet: Kubelet, path: str) -> None:
    file = kubelet.machine.tree / path[1:]
    dated = file.stat().st_mtime_ns + AHEAD * 10**9
    os.utime(file, ns=(dated, dated))


def test_a_plugin_that_has_not_registered(kubelet: Kubelet) -> None:
    """Plugins of other vendors do not matter."""
    kubelet.listen(KUBELET_SOCKET)
    assert kubelet.condition() == ("Unknown", "NoDevicePlugin")
    kubelet.listen(f"{PLUGINS}/other.sock")
    kubelet.checkpoint(json.dumps({"Data": {"RegisteredDevices": {"example.com/nic": ["GPU-1"]}}}))
    assert kubelet.condition() == ("Unknown", "NoDevicePlugin")
    kubelet.listen(PLUGIN_SOCKET)
    assert kubelet.condition() == ("False", "NotRegistered")


def test_ids_of_other_plugins(serving: Kubelet) -> None:
    """Google's plugin has such IDs."""
    serving.advertise(gpu=["nvidia0", "nvidia1"])
    assert serving.condition() == ("Unknown", "UnknownIDs")
    for path in (OWNED, OWNED_COPY):
        serving.machine.drop(path)
    serving.machine.put("/etc/cdi/nvidia.yaml", "theirs")
    assert serving.condition() == ("Unknown", "NotPublished")


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.touch(), os.mkfifo, None,
                                  lambda path: path.symlink_to("/dev/null")])  # fmt: skip
def test_other_files_in_place_of_a_socket(kubelet: Kubelet, make: Callable[[Path], object] | None) -> None:
    """Pods of device plugins write to this directory. None stands for a socket of another type."""
    kubelet.listen(KUBELET_SOCKET)
    if make is None:
        kubelet.listen(PLUGIN_SOCKET, socket.SOCK_DGRAM)
    else:
        make(kubelet.machine.tree / PLUGIN_SOCKET[1:])
    assert kubelet.condition() == ("False", "DevicePluginDown")


# ---- the checkpoint


@pytest.mark.parametrize(
    "document",
    [
        {"Data": {"PodDeviceEntries": [{"PodUID": "u", "ContainerName": "c", "ResourceName": "nvidia.com/gpu",
                                        "DeviceIDs": {"0": ["GPU-1"]}, "AllocResp": "Eg=="}],
                  "RegisteredDevices": {"nvidia.com/gpu": ["GPU-1"], "a.b/c": None}}, "Checksum": 7},
        {"Data": {"PodDeviceEntries": [{"PodUID": "u", "ContainerName": "c", "ResourceName": "nvidia.com/gpu",
                                        "DeviceIDs": ["GPU-1"], "AllocResp": "Eg=="}],
                  "RegisteredDevices": {"nvidia.com/gpu": ["GPU-1"], "a.b/c": []}}, "Checksum": 7},
    ],
    ids=["1.20 and newer", "1.10 to 1.19"],
)  # fmt: skip
def test_formats_of_the_checkpoint(document: object) -> None:
    assert parse_checkpoint(json.dumps(document).encode()) == {"nvidia.com/gpu": ("GPU-1",), "a.b/c": ()}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "not JSON"),
        (b"{\xff}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "it is not an object"),
        (b'{"Data": 3}', "key Data is not an object"),
        (b'{"Data": {}}', "key Data.RegisteredDevices is not an object"),
        (b'{"Data": {"RegisteredDevices": []}}', "key Data.RegisteredDevices is not an object"),
        (
            b'{"Data": {"RegisteredDevices": {"nvidia.com/gpu": 3}}}',
            "RegisteredDevices['nvidia.com/gpu'] is not a list",
        ),
        (b'{"Data": {"RegisteredDevices": {"a\\u001b[2J": [3]}}}', "RegisteredDevices['a\\x1b[2J'] is not a list"),
        pytest.param(b" " * ((8 << 20) + 1), "larger than", id="large"),
        (None, "not a regular file"),
    ],
)
def test_a_bad_checkpoint_is_named(serving: Kubelet, text: bytes | None, named: str) -> None:
    """None stands for a FIFO."""
    serving.machine.drop(CHECKPOINT)
    if text is None:
        os.mkfifo(serving.machine.tree / CHECKPOINT[1:])
    else:
        serving.checkpoint(text)
    assert serving.condition() == ("Unknown", "BadCheckpoint")
    assert serving.message().startswith(f"{CHECKPOINT}: ")
    assert named in serving.message()
    assert serving.machine.conditions()["CDISpecCurrent"] == ("True", "Verified")


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        (f"GPU-{UUID}", f"GPU-{UUID}"),
        (f"GPU-{UUID}::3", f"GPU-{UUID}"),
        (f"GPU-{UUID}-3", f"GPU-{UUID}"),
        (f"MIG-{UUID}", f"MIG-{UUID}"),
        (f"MIG-{UUID}-0", f"MIG-{UUID}"),
        (f"MIG-GPU-{UUID}/1/0::12", f"MIG-GPU-{UUID}/1/0"),
        (f"GPU-{UUID}::x", ""),
        (f"GPU-{UUID}-x", ""),
        (f"GPU-{UUID}-3-4", ""),
        (f"GPU-{UUID}/1/0", ""),
        (f"GPU-{UUID}0", ""),
        (f"GPU-{UUID[:-1]}", ""),
        ("GPU-7a0e", ""),
        ("0:1", ""),
        ("all", ""),
    ],
)
def test_identity_in_a_device_name(name: str, gpu: str) -> None:
    assert gpu_of(name) == gpu
