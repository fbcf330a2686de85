"""Bundles of running pods, as containerd writes them."""

import json
from typing import Any

from agent.machine.cdi import BUNDLES, STATE
from tests.fakes.machine import DEVICES, ROOT, Machine

UVM = next(device for device in DEVICES if device.kind == "uvm")


def specification(pod: str, *, root: str = ROOT, uvm: int = UVM.major) -> dict[str, Any]:
    namespace, _, name = pod.partition("/")
    library = "usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01"
    mount = {"destination": f"/{library}", "source": f"{root}/{library}", "options": ["ro", "rbind", "rprivate"]}
    annotations = {"io.kubernetes.cri.sandbox-namespace": namespace, "io.kubernetes.cri.sandbox-name": name}
    node = {"path": UVM.path, "type": "c", "major": uvm, "minor": 0, "fileMode": 438}
    proc = {"destination": "/proc", "type": "proc", "source": "proc"}
    return {"annotations": annotations, "mounts": [proc, mount], "linux": {"devices": [node]}}


def bundle(machine: Machine, name: str, content: object, state: str = STATE) -> None:
    machine.put(f"{state}/{BUNDLES}/{name}/config.json", content if isinstance(content, bytes) else json.dumps(content))
