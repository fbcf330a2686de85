"""The device plugin's own CDI specification is verified but never edited; the plugin is simulated."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from agent.vendors.nvidia.contract import SPEC, SPEC_KIND
from tests.fakes.kubelet import PLUGIN_SOCKET, Kubelet
from tests.fakes.machine import LIBRARIES, ROOT, VERSION, recorded_spec
from tests.fakes.plugin_restarts import allow_restarts, restarts

Spec = dict[str, Any]


def plugin_spec() -> Spec:
    """Return the specification as the plugin writes it: names are UUIDs only, and the kind is different."""
    spec = recorded_spec() | {"kind": SPEC_KIND}
    spec["devices"] = [each for each in spec["devices"] if each["name"].startswith("GPU-")]
    return spec


@pytest.fixture(autouse=True)
def with_a_spec(kubelet: Kubelet) -> None:
    kubelet.serve()
    kubelet.machine.put(SPEC, json.dumps(plugin_spec()))


def test_a_correct_spec(kubelet: Kubelet) -> None:
    """With the feature flag enable-coherent-annotations, the plugin adds some. A later release may add anything.

    The plugin's default strategy makes no specification.
    """
    later = plugin_spec()
    for device in later["devices"]:
        device |= {"annotations": {"gpu.nvidia.com/coherent": "false"}, "added": "by a later release"}
    for spec in (plugin_spec(), later):
        kubelet.machine.put(SPEC, json.dumps(spec))
        assert kubelet.condition() == ("True", "Advertised")
        assert kubelet.message().endswith(f"the plugin's own {SPEC} is in order")
    kubelet.machine.drop(SPEC)
    assert kubelet.condition() == ("True", "Advertised")
    assert SPEC not in kubelet.message()


FAULTS: dict[str, tuple[Callable[[Spec], object], str]] = {
    "GPU came": (lambda spec: spec["devices"].pop(), "it has no device with /dev/nvidia1"),
    "GPU went": (
        lambda spec: spec["devices"][0]["containerEdits"]["deviceNodes"].append({"path": "/dev/nvidia7"}),
        "device node /dev/nvidia7 is not granted to this machine",
    ),
    "path that is a list": (
        lambda spec: spec["containerEdits"]["deviceNodes"][1].update(path=["/dev/nvidia-uvm"]),
        """device node "['/dev/nvidia-uvm']" is not granted to this machine""",
    ),
    "host path that is an object": (
        lambda spec: spec["containerEdits"]["deviceNodes"][1].update(hostPath={"a": 1}),
        """device node "{'a': 1}" is not granted to this machine""",
    ),
    "major changed": (
        lambda spec: spec["containerEdits"]["deviceNodes"][1].update(major=511),
        "device node /dev/nvidia-uvm is 511:0 in the specification, but 234:0 in this machine",
    ),
    "driver root went": (
        lambda spec: spec["containerEdits"]["mounts"][4].update(hostPath="/run/host-nvidia/7/libcuda.so.1"),
        "/run/host-nvidia/7/libcuda.so.1 does not exist",
    ),
    "hook elsewhere": (
        lambda spec: spec["containerEdits"]["hooks"][0].update(path="/usr/local/nvidia/toolkit/nvidia-cdi-hook"),
        "/usr/local/nvidia/toolkit/nvidia-cdi-hook does not exist",
    ),
    "another kind": (lambda spec: spec.update(kind="site.com/gpu"), "its kind is site.com/gpu, not k8s.device-plugin."),
    "paths without end": (
        lambda spec: spec["containerEdits"]["mounts"].extend({"hostPath": f"/{n}"} for n in range(1100)),
        "it names more than 1024 files",
    ),
    "text in a kind": (
        lambda spec: spec.update(kind="in order; nothing to do\u0301"),
        "its kind is 'in order; nothing to do\\u0301', not k8s.device-plugin.",
    ),
    "text in a path": (
        lambda spec: spec["containerEdits"]["mounts"][4].update(hostPath="/x is fine; " + "y" * 1000),
        "'/x is fine; " + "y" * 288 + "...' does not exist",
    ),
    "no form": (lambda spec: spec.update(devices={}), "devices is not a list"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_the_file_left_alone(kubelet: Kubelet, name: str) -> None:
    spoil, said = FAULTS[name]
    spec = plugin_spec()
    spoil(spec)
    kubelet.machine.put(SPEC, text := json.dumps(spec))
    assert kubelet.condition() == ("False", "PluginSpecOutdated")
    assert said in kubelet.message()
    assert kubelet.message().startswith(f"the device plugin's own CDI specification {SPEC} is out of date: ")
    assert "restart its pod" in kubelet.message()
    assert kubelet.message().endswith(" or remove it if the plugin uses another strategy now")
    assert kubelet.machine.read_text(SPEC) == text
    assert kubelet.machine.conditions()["CDISpecCurrent"] == ("True", "Verified")


def test_what_is_not_a_spec(kubelet: Kubelet) -> None:
    """A link is not followed: pods may write in that directory. For a plugin that does not run, only that is said."""
    kubelet.machine.put(SPEC, "{")
    assert kubelet.condition() == ("False", "PluginSpecOutdated")
    assert "it is not JSON" in kubelet.message()
    kubelet.machine.drop(SPEC)
    kubelet.machine.put("/etc/elsewhere.json", json.dumps(plugin_spec()))
    kubelet.machine.link(SPEC, "/etc/elsewhere.json")
    assert kubelet.condition() == ("False", "Failed")
    kubelet.machine.drop(SPEC)
    kubelet.machine.put(SPEC, "{}")
    kubelet.kill(PLUGIN_SOCKET)
    assert kubelet.condition() == ("False", "DevicePluginDown")


def test_many_faults_of_one_upgrade_are_counted(kubelet: Kubelet) -> None:
    """Our own specification also misses the file that does not exist here; another condition reports that."""
    spec = plugin_spec()
    for mount in spec["containerEdits"]["mounts"]:
        mount["hostPath"] = mount["hostPath"].replace(ROOT, "/run/host-nvidia/7")
    kubelet.machine.put(SPEC, json.dumps(spec))
    assert kubelet.condition() == ("False", "PluginSpecOutdated")
    assert f"and {len(spec['containerEdits']['mounts']) - 3} more" in kubelet.message()
    assert f"/run/host-nvidia/7/{LIBRARIES}/libnvidia-ml.so.{VERSION} does not exist" not in kubelet.message()


def test_an_outdated_spec_restarts_the_plugin_if_configured(kubelet: Kubelet) -> None:
    """The plugin rewrites its specification when it starts."""
    machine = kubelet.machine
    allow_restarts(machine)
    machine.put(SPEC, json.dumps(plugin_spec() | {"devices": plugin_spec()["devices"][:1]}))
    assert kubelet.condition() == ("False", "PluginSpecOutdated")
    assert len(restarts(machine)) == 1
    assert "restart 1 since" in kubelet.message()
