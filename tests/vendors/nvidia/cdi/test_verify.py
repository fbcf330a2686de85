"""CDI specifications are verified by their content; every mutation of a good one is refused."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.device import DeviceNumber
from agent.model.errors import DocumentError
from agent.model.handoff import GrantedDevice, GrantedFile, Request
from agent.vendors.cdi import host_paths, normalised, without_groups
from agent.vendors.machine_vendor import Verdict
from agent.vendors.nvidia.contract import HOOK
from agent.vendors.nvidia.nvidia_ctk import with_no_gpu
from agent.vendors.nvidia.verify import Sieve, verify
from tests.fakes.cdi_specs import DRM, LIVE, LIVE_DRM, WITH_DRM, Spec, drm_spec
from tests.fakes.json_values import JSON
from tests.fakes.machine import GPUS, LIBRARIES, REQUEST, ROOT, SPEC, recorded_spec, without_a_gpu

MIG = GrantedDevice("/dev/nvidia-caps/nvidia-cap1", "capability", 510, 1)

PRESENT = {f"{ROOT}/{file.target}" for file in REQUEST.files}


def check(spec: object, request: Request = REQUEST) -> Verdict:
    return verify(spec, request, LIVE, PRESENT)


def edits(spec: Spec) -> Spec:
    common: Spec = spec["containerEdits"]
    return common


def mount(path: str) -> Spec:
    return {"hostPath": path, "containerPath": "/usr/lib/x", "options": ["ro", "nosuid", "nodev", "rbind"]}


def without_mount(spec: Spec, part: str) -> None:
    edits(spec)["mounts"] = [each for each in edits(spec)["mounts"] if part not in each["hostPath"]]


def without_node(spec: Spec, path: str) -> None:
    edits(spec)["deviceNodes"] = [each for each in edits(spec)["deviceNodes"] if each["path"] != path]


def test_what_the_recorded_spec_lacks_is_named() -> None:
    verdict = check(recorded_spec())
    assert (verdict.problems, verdict.missing_gpus) == ((), ())
    assert verdict.not_in_spec == (f"{LIBRARIES}/libnvidia-api.so.1",)
    uuids = tuple(f"GPU-11111111-2222-3333-4444-55555555555{index}" for index in (0, 1))
    assert verdict.devices == ("0", "1", *uuids, "all")
    # nvidia-ctk never mounts these libraries. They are named, but that they are missing is not a fault.
    library = GrantedFile("usr/lib/i386-linux-gnu/libcuda.so.550.163.01")
    verdict = check(recorded_spec(), REQUEST._replace(files=(*REQUEST.files, library)))
    assert verdict.problems == ()
    assert library.target in verdict.not_in_spec
    # A failed GPU costs only that GPU: the others can be served.
    verdict = check(without_a_gpu())
    assert (verdict.problems, verdict.missing_gpus) == ((), (GPUS[1],))


def place(spec: Spec, path: str) -> Any:  # noqa: ANN401
    """Return the part at a path, which begins in the containerEdits of all devices, or with `devices`."""
    found: Any = spec if path.startswith("devices") else spec["containerEdits"]
    for part in filter(None, path.split(".")):
        found = found[int(part) if part.isdecimal() else part]
    return found


def add(path: str, *values: object) -> Callable[[Spec], object]:
    return lambda spec: place(spec, path).extend(values)


def put(path: str, **members: object) -> Callable[[Spec], object]:
    return lambda spec: place(spec, path).update(members)


def link(argument: str) -> Callable[[Spec], object]:
    return add("hooks.0.args", "--link", argument)


SECOND, OF_SECOND = {"path": "/dev/nvidia1", "major": 195, "minor": 1}, "devices.1.containerEdits.deviceNodes"
# Those that test_leave_out.py calls dangerous or unknown are refused too.
MUTATIONS: dict[str, tuple[Callable[[Spec], object], str]] = {
    "path with dots": (add("mounts", mount(f"{ROOT}/../../../etc/shadow")), "not a file of the driver"),
    "another driver root": (add("mounts", mount("/run/host-nvidia/01/x")), "not a file of the driver"),
    "file beside those granted": (add("mounts", mount(f"{ROOT}/usr/lib/x")), "not a file of the driver"),
    "whole directory": (add("mounts", mount(f"{ROOT}/{LIBRARIES}")), "not a file of the driver"),
    "writable at second sight": (add("mounts.0.options", "rw"), "has unexpected option 'rw'"),
    "relative mount point": (put("mounts.0", containerPath="usr/x"), "debugdump at unexpected 'usr/x'"),
    "device's own mount": (put("devices.0.containerEdits", mounts=[mount("/root")]), "device 0: mount of '/root'"),
    "other ldconfig in two words": (
        add("hooks.1.args", "--ldconfig-path", "@/tmp/evil"),
        "update-ldcache --ldconfig-path @/tmp/evil",
    ),
    "container state": (add("hooks.0.args", "--container-spec", "/tmp/x"), "create-symlinks --container-spec /tmp/x"),
    "flag without value": (add("hooks.0.args", "--link"), "create-symlinks --link"),
    "link elsewhere": (link("libcuda.so.1::/etc/ld.so.preload"), "::/etc/ld.so.preload"),
    "link to elsewhere": (link(f"../../../etc/shadow::/{LIBRARIES}/libcuda.so"), "etc/shadow"),
    "absolute link": (link(f"/etc/shadow::/{LIBRARIES}/libcuda.so"), "/etc/shadow"),
    "link with dots": (link(f"libcuda.so.1::/{LIBRARIES}/x/../libcuda.so"), "x/../libcuda.so"),
    "link without target": (link(f"/{LIBRARIES}/libcuda.so"), "create-symlinks --link"),
    "link to no DRM node": (link(f"../card0::/dev/dri/by-path/pci-{GPUS[0]}-card"), "by-path"),
    "root's group": (put("", additionalGids=[0]), "additional group 0"),
    "no group": (put("", additionalGids=[True, "6"]), "additional group True"),
    "all permissions": (put("deviceNodes.0", permissions="rwmx"), "permissions 'rwmx'"),
    "set-user-ID": (put("deviceNodes.0", fileMode=0o4777), "has fileMode 2559 in the specification, but 438 in"),
    "node's owner": (put("deviceNodes.0", uid=1000), "has uid 1000 in the specification, but 0 in"),
    "node's group": (put("deviceNodes.0", gid=6), "has gid 6 in the specification, but 0 in"),
    "wrong minor": (put(f"{OF_SECOND}.0", minor=7), "195:7 in the specification, but 195:1 in"),
    "minor left out": (lambda spec: place(spec, OF_SECOND)[0].pop("minor"), "195:0 in the specification, but"),
    "a float as major": (put("deviceNodes.1", major=234.0), "is 234.0:0 in"),
    "a boolean as minor": (put(f"{OF_SECOND}.0", minor=True), "195:True in the specification, but 195:1 in"),
    "wrong major": (put("deviceNodes.1", major=511), "is 511:0 in the specification"),
    "block device": (put("deviceNodes.0", type="b"), "unexpected fields"),
    "missing libcuda": (lambda spec: without_mount(spec, "libcuda.so"), "libcuda.so is not in it"),
    "missing libnvidia-ml": (lambda spec: without_mount(spec, "libnvidia-ml"), "libnvidia-ml.so is not in it"),
    "missing library": (lambda spec: without_mount(spec, "glcore"), "libnvidia-glcore.so.550.163.01 is not in it"),
    "missing vdpau plug-in": (lambda spec: without_mount(spec, "vdpau"), "libvdpau_nvidia.so.550.163.01 is not in it"),
    "missing control node": (lambda spec: without_node(spec, "/dev/nvidiactl"), "no control node"),
    "missing UVM node": (lambda spec: without_node(spec, "/dev/nvidia-uvm"), "no uvm node"),
    "GPU for everybody": (add("deviceNodes", SECOND), "every container would get the gpu node /dev/nvidia1"),
    "GPU of another": (add("devices.0.containerEdits.deviceNodes", SECOND), "device 0 has 2 GPU nodes"),
    "foreign name": (put("devices.0", name="mine"), "neither an index nor a UUID"),
    "one name missing": (lambda spec: spec["devices"].pop(0), "differ"),
    "name twice": (lambda spec: spec["devices"].append(spec["devices"][0]), "the same name"),
    "library directory": (put("", env=["NVIDIA_CTK_LIBCUDA_DIR=/tmp"]), "LIBCUDA_DIR=/tmp"),
    "other kind": (lambda spec: spec.update(kind="nvidia.com/other"), "kind is"),
    "no edits": (lambda spec: spec["devices"][0].pop("containerEdits"), "not an object"),
    "mounts are an object": (put("", mounts={}), "not a list"),
    "no devices": (lambda spec: spec.update(devices=[]), "no device in it is a granted GPU"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_refused(name: str) -> None:
    mutate, expected = MUTATIONS[name]
    spec = recorded_spec()
    mutate(spec)
    assert expected in "; ".join(check(spec).problems)


def test_a_container_may_request_no_gpu() -> None:
    """For NVIDIA_VISIBLE_DEVICES=none, nvidia-container-runtime looks for a device `none`."""
    spec: Any = with_no_gpu(recorded_spec())
    verdict = check(spec)
    assert verdict.problems == ()
    assert verdict.devices[-1] == "none"
    spec["devices"][-1]["containerEdits"] = {"deviceNodes": [{"path": "/dev/nvidia0", "major": 195, "minor": 0}]}
    assert "device none is neither an index nor a UUID" in check(spec).problems
    # If nvidia-ctk finds no GPU, the device `none` does not hide that.
    assert "no device in it is a granted GPU" in check(with_no_gpu(recorded_spec() | {"devices": []})).problems


def test_what_the_machine_has_counts() -> None:
    """A pod that requests the first GPU would get the second, although the specification is true to the nodes."""
    spec = recorded_spec()
    for device in spec["devices"]:
        for node in device["containerEdits"]["deviceNodes"]:
            if node["path"] == "/dev/nvidia0":
                node |= {"major": 195, "minor": 1}
    assert set(verify(spec, REQUEST, LIVE | {"/dev/nvidia0": LIVE["/dev/nvidia1"]}, PRESENT).problems) == {
        f"device {name}: device node /dev/nvidia0 is 195:1 in this machine, but 195:0 was granted"
        for name in ("0", spec["devices"][2]["name"], "all")
    }
    # nvidia-ctk before 1.19 writes neither major nor minor.
    spec = recorded_spec()
    for node in edits(spec)["deviceNodes"]:
        node.pop("major")
        node.pop("minor", None)
    assert check(spec).problems == ()
    # Containers would fail to start with a node, or a granted file, that does not exist in the machine.
    live = {path: number for path, number in LIVE.items() if path != "/dev/nvidia-modeset"}
    gone = "containerEdits: device node /dev/nvidia-modeset is not in this machine"
    assert verify(recorded_spec(), REQUEST, live, PRESENT).problems == (gone,)
    gone = f"{ROOT}/usr/bin/nvidia-smi"
    found = verify(recorded_spec(), REQUEST, LIVE, PRESENT - {gone}).problems
    assert found == (f"containerEdits: mount of {gone}, which does not exist",)


def check_drm(spec: Spec, request: Request = WITH_DRM) -> str:
    return "; ".join(verify(spec, request, LIVE_DRM | {MIG.path: DeviceNumber(510, 1, 0o400)}, PRESENT).problems)


def test_drm_nodes_are_good() -> None:
    """nvidia-ctk writes them like this if udev has made links by PCI address."""
    assert check_drm(drm_spec()) == ""
    assert {each.path for each in DRM} <= {*verify(recorded_spec(), WITH_DRM, LIVE_DRM, PRESENT).not_in_spec}
    # nvidia-ctk 1.19.1 made it from all files of Debian's driver 550.163.01, for simulated nodes (all 1:3).
    recorded = json.loads((SPEC.parent / "nvidia-ctk-1.19.1-simulated-drm.json").read_text())
    files = tuple(GrantedFile(target, link) for target, link in recorded["files"])
    devices = tuple(each._replace(major=1, minor=3) for each in WITH_DRM.devices)
    live = {path: number._replace(major=1, minor=3) for path, number in LIVE_DRM.items()}
    request = REQUEST._replace(devices=devices, files=files)
    verdict = verify(recorded["spec"], request, live, set(host_paths(recorded["spec"])))
    assert (verdict.problems, verdict.missing_gpus) == ((), ())
    assert verdict.not_in_spec == (f"{LIBRARIES}/libnvidia-api.so.1",)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (f"../card1::/dev/dri/by-path/pci-{GPUS[0]}-card", "card1"),
        (f"../renderD128::/dev/dri/by-path/pci-{GPUS[0]}-card", "renderD128"),
        (f"../card0::/dev/dri/by-path/pci-{GPUS[1]}-card", "pci-0000:02"),
        ("../../sda::/dev/dri/by-path/pci-0000:01:00.0-card", "sda"),
    ],
)
def test_a_link_by_path_to_another_node_is_refused(link: str, expected: str) -> None:
    spec = drm_spec()
    spec["devices"][0]["containerEdits"]["hooks"][0]["args"] += ["--link", link]
    assert expected in check_drm(spec)


@pytest.mark.parametrize("device", [DRM[1], MIG])
def test_a_granted_node_that_is_not_for_every_container(device: GrantedDevice) -> None:
    """The machine may configure MIG; a container may not. A GPU's DRM nodes belong to that GPU."""
    request = WITH_DRM._replace(devices=(*WITH_DRM.devices, MIG))
    node = {"path": device.path, "major": device.major, "minor": device.minor}
    spec = drm_spec()
    edits(spec)["deviceNodes"].append(node)
    assert f"every container would get the {device.kind} node {device.path}" in check_drm(spec, request)
    for name in (0, 4):
        spec = drm_spec()
        spec["devices"][name]["containerEdits"]["deviceNodes"].append(node)
        assert bool(check_drm(spec, request)) == (device is MIG or name == 0)


@given(JSON, st.data())
def test_no_json_breaks_verification(value: object, data: st.DataObject) -> None:
    place: dict[str, Any] = {"": drm_spec()}
    container: Any = place
    key: Any = ""
    while isinstance(container[key], dict | list) and container[key] and data.draw(st.booleans()):
        container = container[key]
        key = data.draw(st.sampled_from(sorted(container) if isinstance(container, dict) else range(len(container))))
    container[key] = value
    spec = place[""]
    check(spec)
    without_groups(normalised(spec))
    host_paths(spec)
    if isinstance(spec, dict):
        with suppress(DocumentError):
            Sieve(REQUEST, LIVE, PRESENT).sift(spec)


# ---- configured hooks

OTHER_HOOKS = {
    "enable-cuda-compat": ("createContainer", ["--host-driver-version=550.163.01"]),
    "disable-device-node-modification": ("createContainer", []),
    "update-application-profile": ("createContainer", []),
    "apply-cuda-memory-limits": (
        "createRuntime",
        ["--driver-root", "/run/host-nvidia/0", "--gpu-id", "GPU-11111111-2222-3333-4444-555555555551"],
    ),
}
"""Hooks as nvidia-ctk 1.20.1 writes them."""


def hook_problems(name: str, stage: str, arguments: list[str], asked: tuple[str, ...]) -> list[str]:
    spec = recorded_spec()
    edits(spec)["hooks"].append({"hookName": stage, "path": HOOK, "args": ["nvidia-cdi-hook", name, *arguments]})
    return [each for each in check(spec, REQUEST._replace(cdi_hooks=asked)).problems if "hook" in each]


@pytest.mark.parametrize("name", OTHER_HOOKS)
def test_a_hook_is_accepted_if_configured(name: str) -> None:
    assert hook_problems(name, *OTHER_HOOKS[name], (name,)) == []
    (problem,) = hook_problems(name, *OTHER_HOOKS[name], ())
    assert f"unexpected hook {OTHER_HOOKS[name][0]}" in problem


@pytest.mark.parametrize(
    ("name", "stage", "arguments"),
    [
        ("enable-cuda-compat", "createContainer", ["--host-driver-version=999.1"]),
        ("enable-cuda-compat", "createContainer", ["--cuda-compat-container-root=/"]),
        ("enable-cuda-compat", "createRuntime", []),
        ("update-application-profile", "createContainer", ["--container-spec", "/tmp/x"]),
        ("apply-cuda-memory-limits", "createRuntime", ["--driver-root", "/", "--gpu-id", "GPU-" + "1" * 36]),
        ("apply-cuda-memory-limits", "createContainer", OTHER_HOOKS["apply-cuda-memory-limits"][1]),
        ("chmod", "createContainer", ["--mode", "755", "--path", "/dev/dri"]),
    ],
)
def test_a_hook_with_other_arguments_is_refused(name: str, stage: str, arguments: list[str]) -> None:
    problems = hook_problems(name, stage, arguments, (*OTHER_HOOKS,))
    assert [each for each in problems if "unexpected hook" in each]
