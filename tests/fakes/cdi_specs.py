"""CDI specifications with DRM nodes, and small ones for each feature of the format."""

from typing import Any

from agent.model.device import DeviceNumber
from agent.model.handoff import GrantedDevice, GrantedFile
from agent.vendors.nvidia.contract import HOOK
from tests.fakes.machine import GPUS, LIBRARIES, REQUEST, ROOT, VERSION, recorded_spec

DRM = tuple(
    GrantedDevice(f"/dev/dri/{name}{first + index}", kind, 226, first + index, gpu)
    for name, kind, first in (("card", "dri-card", 0), ("renderD", "dri-render", 128))
    for index, gpu in enumerate(GPUS)
)
WITH_DRM = REQUEST._replace(devices=(*REQUEST.devices, *DRM))
VIDEO, RENDER = 44, 104
LIVE = {device.path: DeviceNumber(device.major, device.minor) for device in REQUEST.devices}
LIVE_DRM = LIVE | {
    each.path: DeviceNumber(each.major, each.minor, 0o660, 0, VIDEO if "card" in each.path else RENDER) for each in DRM
}
Spec = dict[str, Any]


def drm_spec() -> Spec:
    """Return the recorded specification with nvidia-ctk 1.19's additions for DRM nodes, such as PCI links."""
    spec = recorded_spec()
    for device in spec["devices"]:
        own = [
            gpu
            for gpu, mark in zip(GPUS, ("0", "1"), strict=True)
            if device["name"] == "all" or mark == device["name"][-1]
        ]
        nodes = [each for each in DRM if each.pci_address in own]
        device["containerEdits"]["deviceNodes"] += [
            {"path": each.path, "major": each.major, "minor": each.minor, "fileMode": 0o660, "permissions": "rwm"}
            | {"gid": LIVE_DRM[each.path].gid}
            for each in nodes
        ]
        device["containerEdits"]["additionalGids"] = [VIDEO, RENDER]
        links = [
            f"../{each.path.rpartition('/')[2]}::/dev/dri/by-path/pci-{each.pci_address}-{each.kind.removeprefix('dri-')}"
            for each in nodes
        ]
        flags = [part for link in links for part in ("--link", link)]
        device["containerEdits"]["hooks"] = [
            {"hookName": "createContainer", "path": HOOK, "args": ["nvidia-cdi-hook", "create-symlinks", *flags]}
        ]
    return spec


NODE: Spec = {"path": "/dev/x"}


def spec(edits: Spec | None = None, common: Spec | None = None, **more: object) -> Spec:
    device = {"name": "x0", "containerEdits": edits or {"deviceNodes": [NODE]}}
    return {
        "cdiVersion": "1.1.0",
        "kind": "vendor.com/class",
        "devices": [device],
        "containerEdits": common or {},
    } | more


VERSIONS: dict[str, tuple[Spec, str]] = {
    "nothing": (spec(), "0.5.0"),
    "vendor with dots": (spec(kind="a.b.c/class"), "0.5.0"),
    "mount's type": (spec({"mounts": [{"hostPath": "/a", "containerPath": "/a", "type": "bind"}]}), "0.5.0"),
    "digit": (spec(devices=[{"name": "0", "containerEdits": {"env": ["A=B"]}}]), "0.5.0"),
    "host path": (spec({"deviceNodes": [NODE | {"hostPath": "/dev/y"}]}), "0.5.0"),
    "groups": (spec({"deviceNodes": [NODE], "additionalGids": [44]}), "0.7.0"),
    "common groups": (spec(common={"additionalGids": [44]}), "0.7.0"),
    "no groups": (spec(common={"additionalGids": []}), "0.5.0"),
    "recorded": (recorded_spec(), "0.5.0"),
    "recorded with DRM nodes": (drm_spec(), "0.7.0"),
}
X86_32 = "usr/lib/i386-linux-gnu"
COMPLETE = REQUEST._replace(
    files=tuple(
        sorted(
            (
                *REQUEST.files,
                GrantedFile(f"{LIBRARIES}/gbm/nvidia-drm_gbm.so", f"../libnvidia-allocator.so.{VERSION}"),
                *(GrantedFile(f"{X86_32}/{name}.so.{VERSION}") for name in ("libcuda", "libGLX_nvidia")),
                GrantedFile(f"{X86_32}/libcuda.so.1", f"libcuda.so.{VERSION}"),
                GrantedFile(f"{X86_32}/vdpau/libvdpau_nvidia.so.{VERSION}"),
                GrantedFile(f"{X86_32}/vdpau/libvdpau_nvidia.so.1", f"libvdpau_nvidia.so.{VERSION}"),
                GrantedFile("etc/OpenCL/vendors/nvidia.icd"),
                GrantedFile(f"usr/share/nvidia/nvidia-application-profiles-{VERSION}-rc"),
                GrantedFile("usr/lib/x86_64-linux-gnu/nvidia/wine/nvngx.dll"),
            )
        )
    ),
)
PRESENT = {f"{ROOT}/{file.target}" for file in COMPLETE.files}
