"""Pods see exactly the GPUs that were granted, through the CRI, and nothing without a grant."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from integration.bed.machine.node import Node, Pod
from integration.bed.measure.versions import machine_versions
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
GPUS = tuple(f"/dev/nvidia{index}" for index in range(8))
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")


PROBE = ("gpu-probe", *GPUS, *CONTROL, *LIBRARIES)
SEPARATOR = "\n---\n"
# All checks in one pod: under emulation each pod takes seconds.
LOOK = f"set -e; {shlex.join(PROBE)}; echo; echo ---; nvidia-smi -L; echo ---; cat /proc/self/mountinfo"


@dataclass(frozen=True)
class Look:
    """The GPUs and mounts that one pod sees."""

    probe: dict[str, Any]
    uuids: list[str]
    """The GPUs that nvidia-smi lists."""
    mounts: set[str]
    """Mount points, except those below /dev, /proc and /sys."""


def look(node: Node, **pod: Any) -> Look:  # noqa: ANN401
    return seen_in(node.pod(Pod(("sh", "-c", LOOK), **pod)).stdout)


def seen_in(output: str) -> Look:
    """Return what the script LOOK printed."""
    found, listing, mountinfo = output.split(SEPARATOR)
    points = {line.split()[4] for line in mountinfo.splitlines()}
    # If runc may not make nodes, it binds them: then they are mount points too, and differ for each grant.
    kernel = re.compile("/(dev|proc|sys)(/|$)")
    return Look(json.loads(found), uuids(listing), {each for each in points if not kernel.match(each)})


def probe(node: Node, **pod: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return what gpu-probe finds in a pod, by node and by library."""
    found: dict[str, Any] = json.loads(node.pod(Pod(PROBE, **pod)).stdout)
    return found


def expect_gpus(found: dict[str, Any], granted: set[int]) -> None:
    opened = {path for path, result in found["open"].items() if result == "OK"}
    assert opened == {*CONTROL, *(f"/dev/nvidia{index}" for index in granted)}
    refused = {result for path, result in found["open"].items() if path not in opened}
    assert refused <= {"EPERM", "ENOENT"}
    for library in LIBRARIES:
        assert found["load"][library]["path"].endswith(f"/lib/x86_64-linux-gnu/{library}"), found["load"][library]


def uuids(listing: str) -> list[str]:
    """Return the UUIDs in lines of `nvidia-smi -L`: GPU 0: NAME (UUID: GPU-...)."""
    return [line.split("UUID: ")[1].rstrip(")") for line in listing.splitlines() if line]


@pytest.fixture(autouse=True)
def _record_machine(shared: Bed, record_property: Callable[[str, object], None]) -> None:
    for part, version in machine_versions(shared.node).items():
        record_property(part, version)


def test_one_gpu_by_cdi_name(shared: Bed) -> None:
    """GPU 1 of 8 opens, the other seven do not, libraries load by their plain names, and nvidia-smi lists one GPU."""
    seen = look(shared.node, cdi=("1",))
    expect_gpus(seen.probe, {1})
    assert seen.uuids == [uuids(shared.run("nvidia-smi", "-L").stdout)[1]]


def test_a_pod_cannot_change_the_mode_of_the_hosts_nodes(shared: Bed) -> None:
    """runc binds the machine's nodes, which are binds of the host's. The pod's root needs no capability for chmod."""
    nodes = ("/dev/nvidia1", "/dev/nvidiactl")
    before = shared.run("stat", "-c", "%a", *nodes).stdout
    pod = shared.node.pod(Pod(("sh", "-c", f"chmod 600 {' '.join(nodes)} 2>&1"), cdi=("1",)), check=False)
    assert pod.stdout.count("Read-only file system") == len(nodes)
    assert shared.run("stat", "-c", "%a", *nodes).stdout == before


def test_apparmor_confines_no_pod(shared: Bed) -> None:
    """The kernel has it, but the machine has no /sys/kernel/security, as docs/security.md says."""
    assert shared.run("cat", "/sys/module/apparmor/parameters/enabled").stdout.strip() == "Y"
    assert shared.node.shell("ls -A /sys/kernel/security").stdout.strip() == ""
    plain = shared.node.pod(Pod(("cat", "/proc/self/attr/current"), cdi=("1",)))
    assert plain.stdout.strip() == "unconfined"
    refused = shared.node.pod(Pod(("true",), apparmor=True), check=False)
    assert refused.status != 0
    assert "apparmor is not supported" in refused.stderr


def test_runtime_class_gives_our_spec_and_nothing_else(shared: Bed) -> None:
    """With runtimeClassName nvidia, NVIDIA_VISIBLE_DEVICES may be an index, a UUID or `all`.

    nvidia-container-runtime must not make its own specification in memory: the mounts are those of ours.
    """
    on_host = uuids(shared.run("nvidia-smi", "-L").stdout)
    assert len(set(on_host)) == len(GPUS)
    mounts = look(shared.node, cdi=("1",)).mounts
    assert mounts >= {mount["containerPath"] for mount in shared.node.spec()["containerEdits"]["mounts"]}
    for value, granted in (("2", {2}), (on_host[3], {3}), ("all", set(range(8)))):
        seen = look(shared.node, runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": value})
        expect_gpus(seen.probe, granted)
        assert seen.uuids == [on_host[minor] for minor in sorted(granted)], value
        assert seen.mounts == mounts, value


def test_without_a_grant_nothing_is_seen(shared: Bed) -> None:
    """Neither runc nor the nvidia runtime gives a pod anything that it did not request."""
    for runtime in ("", "nvidia"):
        found = probe(shared.node, runtime=runtime)
        assert set(found["open"].values()) == {"ENOENT"}
        assert all("error" in result for result in found["load"].values())


def test_none_gives_the_driver_and_no_gpu(shared: Bed) -> None:
    """Images set NVIDIA_VISIBLE_DEVICES=none to get the driver's files without a GPU."""
    expect_gpus(probe(shared.node, runtime="nvidia", environment={"NVIDIA_VISIBLE_DEVICES": "none"}), set())
