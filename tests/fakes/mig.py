"""A GPU with MIG devices, as in the recorded CDI specification of nvidia-ctk."""

import json
from typing import Any

from agent.model.handoff import GrantedDevice
from tests.fakes.machine import GPUS, REQUEST, SPEC

MIG_SPEC = SPEC.with_name("nvidia-ctk-1.19.1-simulated-mig.json")
CAPS = {
    12: "gpu0/mig/gi1/access",
    13: "gpu0/mig/gi1/ci0/access",
    48: "gpu0/mig/gi5/access",
    49: "gpu0/mig/gi5/ci0/access",
    50: "gpu0/mig/gi5/ci1/access",
}
DRI = tuple(
    GrantedDevice(path, kind, 1, 3, GPUS[index])
    for index in (0, 1)
    for path, kind in ((f"/dev/dri/card{index}", "dri-card"), (f"/dev/dri/renderD{128 + index}", "dri-render"))
)
UUIDS = tuple(f"MIG-51000000-{each}-5000-8000-000000000100" for each in ("0100", "0500", "0501"))
Spec = dict[str, Any]


def capability(minor: int, gpu: str = GPUS[0]) -> GrantedDevice:
    return GrantedDevice(f"/dev/nvidia-caps/nvidia-cap{minor}", "capability", 1, 3, gpu, CAPS[minor])


DEVICES = (*(each._replace(major=1, minor=3) for each in REQUEST.devices), *DRI, *(capability(each) for each in CAPS))
MIG_REQUEST = REQUEST._replace(devices=DEVICES)


def live_mode(path: str) -> int:
    return 0o444 if "nvidia-caps/" in path else 0o660 if "/card" in path else 0o666


def mig_spec() -> Spec:
    loaded: Spec = json.loads(MIG_SPEC.read_text())
    return loaded
