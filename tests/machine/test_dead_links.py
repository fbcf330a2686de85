"""A pod puts links to a file system that never answers where the machine half reads or writes: the run still ends.

Such links lead through /proc/PID/root to a file system that only the pod has mounted.
"""

import json

import pytest

from agent.machine.kubelet import CHECKPOINT, KUBELET_SOCKET, PLUGINS
from agent.machine.run import run
from agent.system.files import temporary_path
from agent.vendors.nvidia.contract import MARKERS
from agent.vendors.nvidia.contract import SPEC as PLUGIN_SPEC
from agent.vendors.nvidia.contract import SPEC_KIND as PLUGIN_SPEC_KIND
from tests.fakes.dead_links import TARGET, hang
from tests.fakes.kubelet import PLUGIN_SOCKET, Kubelet
from tests.fakes.machine import REQUEST, Machine

SPECS = ("/etc/cdi/nvidia.yaml", "/etc/cdi/site.json", "/var/run/cdi/nvidia.yaml", "/var/run/cdi/k8s.nvidia.com.yaml")
"""The agent's own one, and names that others use. Pods of device plugins and DRA drivers write in both directories."""
KUBELETS = (CHECKPOINT, KUBELET_SOCKET, PLUGIN_SOCKET, f"{PLUGINS}/nvidia-other.sock")


@pytest.fixture(autouse=True)
def ready(kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the machine ready, with a device plugin."""
    kubelet.machine.hand(REQUEST, validation_markers=True)
    kubelet.serve()
    kubelet.machine.link("/proc/1/root", "/")
    hang(monkeypatch)


@pytest.mark.parametrize("path", [*SPECS, *KUBELETS, *(marker.path for marker in MARKERS)])
def test_attack_with_a_link_to_a_dead_file_system(machine: Machine, path: str) -> None:
    run(machine)
    before = machine.conditions()
    machine.remove(path)
    machine.link(path, TARGET)
    for _ in range(2):
        run(machine)
        after = machine.conditions()
        assert after.keys() == before.keys()
        changed = {kind: after[kind] for kind in before if after[kind] != before[kind]}
        if path == SPECS[0]:
            assert (changed, machine.read_link(path)) == ({}, None), "it was repaired"
        elif path in SPECS:
            assert changed.pop("CDISpecCurrent") == ("False", "RuntimeBlocked")
            assert changed == {"ValidationMarkersSet": ("False", "NotProven")}
        elif path in KUBELETS:
            assert changed.keys() <= {"GPUsAdvertised"}
        else:
            assert changed == {"ValidationMarkersSet": ("False", "ForeignFile")}


@pytest.mark.parametrize("path", [PLUGIN_SPEC, SPECS[0]])
def test_attack_with_a_path_below_a_dead_link(machine: Machine, path: str) -> None:
    """The device plugin's own specification, and the agent's, are checked for missing files."""
    machine.link("/proc/7/root", TARGET)
    spec = json.loads(machine.read(SPECS[0])) | ({"kind": PLUGIN_SPEC_KIND} if path == PLUGIN_SPEC else {})
    spec["containerEdits"]["mounts"].append({"hostPath": "/proc/7/root/file", "containerPath": "/file"})
    machine.put(path, json.dumps(spec))
    run(machine)
    if path == PLUGIN_SPEC:
        assert machine.conditions()["GPUsAdvertised"] == ("False", "PluginSpecOutdated")
        assert "/proc/7/root/file does not exist" in machine.message("GPUsAdvertised")
    else:
        assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")
        assert "/proc/7/root" not in machine.read(path).decode()


def test_attack_with_a_link_to_what_another_process_sees(machine: Machine) -> None:
    """Container runtimes follow it, perhaps to a FIFO. That the machine has a file at the same path proves nothing."""
    machine.link("/proc/7/root", "/")
    machine.put("/srv/site.json", "{}")
    machine.link("/etc/cdi/site.json", "/proc/7/root/srv/site.json")
    assert machine.verdict("CDISpecCurrent") == ("False", "RuntimeBlocked")


def test_attack_with_a_directory_in_the_place_of_a_temporary_file(machine: Machine) -> None:
    """It was in the way of each new specification."""
    machine.put(f"{temporary_path(SPECS[0])}/file")
    machine.drop(SPECS[0])
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
