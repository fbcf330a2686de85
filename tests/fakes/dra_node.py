"""A node whose claims are prepared: an API server with claims, a kubelet's record, and devices. No sockets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.dra.claims import CHECKPOINT, RECORD_NAME, Checkpoint, ClaimReference, NodeClaims, NotAllocatedError
from agent.dra.inventory import Device
from agent.model.paths import DRA_DRIVER
from agent.system.files import System
from agent.system.process import host_runner

NODE = "node1"
KUBELET = "/var/lib/kubelet"
GPUS = ("gpu-0000-01-00-0", "gpu-0000-02-00-0")
PARTITION = f"{GPUS[0]}-mig-7-0"


def reference(name: str) -> ClaimReference:
    return ClaimReference("default", name, f"uid-of-{name}")


def claim(name: str, *devices: str, uid: str = "", **more: object) -> dict[str, Any]:
    """Return a claim as the API server has it, allocated to devices of this node."""
    results = [{"request": "gpu", "driver": DRA_DRIVER, "pool": NODE, "device": device, **more} for device in devices]
    document: dict[str, Any] = {"metadata": {"name": name, "uid": uid or f"uid-of-{name}"}, "status": {}}
    if devices:
        document["status"]["allocation"] = {"devices": {"results": results}}
    return document


class Node:
    """A node with two GPUs, an API server with claims, and a kubelet's record."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.system = System(host_runner, str(tree))
        self.api: dict[str, dict[str, Any] | None] = {}
        self.devices = {name: Device(name, "vendor", (f"vendor.com/gpu={name}",), "") for name in (*GPUS, PARTITION)}
        (tree / KUBELET[1:]).mkdir(parents=True)
        self._checkpoint: Checkpoint | None = None
        self.claims = self.restarted()

    def restarted(self) -> NodeClaims:
        """Return the claims as a new process knows them."""
        if self._checkpoint:
            self._checkpoint.close()
        self._checkpoint = Checkpoint(self.system, KUBELET)
        return NodeClaims(NODE, self.fetch, lambda: self.devices, self._checkpoint)

    def fetch(self, claim: ClaimReference) -> Mapping[str, Any]:
        if (found := self.api.get(claim.name)) is None:
            raise NotAllocatedError(f"claim {claim}: not found")
        return found

    def kubelet_has(self, *claims: ClaimReference) -> None:
        """Write a record in which the kubelet has these claims, each with the first GPU."""
        device = {"PoolName": NODE, "DeviceName": GPUS[0], "ShareID": None, "RequestNames": ["gpu"]}
        device["CDIDeviceIDs"] = [f"vendor.com/gpu={GPUS[0]}"]
        states = [
            {
                "ClaimUID": each.uid,
                "ClaimName": each.name,
                "Namespace": each.namespace,
                "PodUIDs": {"uid-of-pod": {}},
                "DriverState": {"other.example": {"Devices": None}, DRA_DRIVER: {"Devices": [device]}},
            }
            for each in claims
        ]
        data = {"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1", "ClaimInfoStateList": states}
        self.record.write_text(json.dumps({"Data": json.dumps(data), "Checksum": 1}))

    @property
    def record(self) -> Path:
        """The kubelet's."""
        return self.tree / KUBELET[1:] / RECORD_NAME

    @property
    def checkpoint(self) -> Path:
        return self.tree / CHECKPOINT[1:]
