"""Claims from the manifest to the CDI names in a container: real scheduler, real service, stand-in for the kubelet.

The manifests are those of Kubernetes' example driver and our own examples.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.cli.kube import DIRECTORY
from agent.model.allocatable import AllocatableDevice
from agent.model.gpu_states import GpuState, GpuStatus
from agent.model.paths import DRA_DRIVER
from integration.bed.cluster.dra_node import Offering, offering
from integration.bed.cluster.example_driver import DRIVER, demo
from integration.bed.cluster.stand_in_kubelet import DriverSocket, listed, prepared, until
from tests.fakes.dra_machine import GPUS, healthy, whole

NINE = (*GPUS, "0000:09:00.0")
"""The demo's pods need nine GPUs."""
ANYTHING = [{"operator": "Exists"}]
"""The node has no kubelet that renews its lease, so it gets taints."""
MIG = "MIG-00000000-0000-4000-8000-000000000007"


@pytest.fixture(scope="module")
def node() -> Iterator[Offering]:
    with offering() as node:
        for vendor in ("amd", "intel"):
            node.cluster.kubectl("create", f"--filename={DIRECTORY}/device-class-{vendor}.yaml")
        node.cluster.kubectl("label", "namespace", "default", "resource.kubernetes.io/admin-access=true")
        yield node


@pytest.fixture(autouse=True)
def _alone(node: Offering) -> Iterator[None]:
    """Give back all claims and delete all pods after each test."""
    yield
    with DriverSocket(node.machine.kubelet) as driver:
        for each in listed(node.cluster, "resourceclaims"):
            assert not driver.unprepare(each)
    node.cluster.kubectl("delete", "pods", "--all", "--all-namespaces", "--force", "--grace-period=0")
    kinds = "resourceclaims,resourceclaimtemplates"
    node.cluster.kubectl("delete", kinds, "--all", "--all-namespaces", "--wait=false")
    until("no claim is left", lambda: not listed(node.cluster, "resourceclaims"))


def offer(node: Offering, *devices: AllocatableDevice, vendor: str = "nvidia", driver: str = "nvidia") -> None:
    """Let these devices be verified and healthy, and wait until they are offered."""
    addresses = sorted({each.pci_address for each in devices})
    if vendor == "nvidia":
        node.machine.states(map(healthy, addresses))
    else:
        node.machine.states(GpuStatus(each, vendor, GpuState.HEALTHY, kernel_driver=driver) for each in addresses)
    node.machine.allocate(devices, vendor)

    def count() -> int:
        found = [device for each in listed(node.cluster, "resourceslices") for device in each["spec"]["devices"]]
        return sum(device["attributes"]["vendor"]["string"] == vendor for device in found)

    until("the devices are offered", lambda: count() == len(devices))


def example(name: str) -> str:
    return (Path(DIRECTORY) / f"{name}.yaml").read_text()


def create(node: Offering, text: str) -> None:
    """Create a manifest's objects, with pods that tolerate the node."""
    objects = [each for each in yaml.safe_load_all(text) if each]
    for each in objects:
        if each["kind"] == "Pod":
            each["spec"]["tolerations"] = ANYTHING
    node.cluster.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(objects))


def started(node: Offering, count: int) -> dict[str, dict[str, set[str]]]:
    """Wait until so many pods are bound; return, by `namespace/pod`, the CDI names that each container gets."""

    def bound() -> list[dict[str, Any]]:
        return [each for each in listed(node.cluster, "pods") if each["spec"].get("nodeName")]

    until(f"{count} pods are bound", lambda: len(bound()) == count)
    claims = listed(node.cluster, "resourceclaims")
    with DriverSocket(node.machine.kubelet) as driver:
        return {
            f"{each['metadata']['namespace']}/{each['metadata']['name']}": prepared(driver, each, claims)
            for each in bound()
        }


def test_the_example_driver_s_demo(node: Offering) -> None:
    """What its end-to-end test asserts of its six manifests, all at the same time."""
    offer(node, *map(whole, NINE))
    for number in range(1, 7):
        path = demo() / f"gpu-test{number}.yaml"
        namespace = f"gpu-test{number}"
        node.cluster.kubectl("create", "namespace", namespace)
        until(
            "its service account exists",
            lambda namespace=namespace: node.cluster.kubectl("get", "serviceaccounts", "-oname", "-n", namespace),  # type: ignore[misc]
        )
        # Parameters that the driver defines are for another driver here; see the next test.
        create(node, path.read_text().replace(f"deviceClassName: {DRIVER}", "deviceClassName: nvidia-gpu"))
    pods = started(node, 8)
    one, two = pods["gpu-test1/pod0"]["ctr0"], pods["gpu-test1/pod1"]["ctr0"]
    assert len(one) == len(two) == 1
    assert len(pods["gpu-test2/pod0"]["ctr0"]) == 2
    third = pods["gpu-test3/pod0"]
    assert third["ctr0"] == third["ctr1"], "two containers share one GPU"
    shared = pods["gpu-test4/pod0"]["ctr0"]
    assert pods["gpu-test4/pod1"]["ctr0"] == shared, "two pods share one claim"
    fifth = pods["gpu-test5/pod0"]
    assert fifth["ts-ctr0"] == fifth["ts-ctr1"]
    assert fifth["sp-ctr0"] == fifth["sp-ctr1"]
    sixth = pods["gpu-test6/pod0"]
    assert sixth["init0"] == sixth["ctr0"], "an init container and a container share one GPU"
    sets = [one, two, pods["gpu-test2/pod0"]["ctr0"], third["ctr0"], shared, fifth["ts-ctr0"], fifth["sp-ctr0"]]
    given = [name for each in (*sets, sixth["ctr0"]) for name in each]
    assert sorted(given) == sorted(each.cdi_names[0] for each in map(whole, NINE)), "no GPU went to two claims"


def test_parameters_for_our_driver_are_refused(node: Offering) -> None:
    """It takes none: to ignore them would let a pod start with another GPU than it asked for."""
    offer(node, *map(whole, GPUS))
    text = (demo() / "gpu-test5.yaml").read_text()
    text = text.replace(f"deviceClassName: {DRIVER}", "deviceClassName: nvidia-gpu")
    create(node, text.replace(f"driver: {DRIVER}", f"driver: {DRA_DRIVER}").replace("gpu-test5", "default"))
    with pytest.raises(AssertionError, match="which takes none"):
        started(node, 1)


@pytest.mark.parametrize(
    ("name", "count"),
    [("memory", 1), ("product", 1), ("shared", 1), ("two-gpus", 2), ("admin-access", 8)],
)
def test_our_examples(node: Offering, name: str, count: int) -> None:
    offer(node, *map(whole, GPUS))
    create(node, example(f"claim-{name}"))
    (containers,) = started(node, 1).values()
    assert {len(each) for each in containers.values()} == {count}
    assert len(set(map(frozenset, containers.values()))) == 1


def test_a_mig_instance_by_its_profile(node: Offering) -> None:
    other = MIG[:-1] + "2"
    offer(
        node,
        AllocatableDevice(GPUS[0], (f"nvidia.com/gpu={other}",), (2, 0)),
        AllocatableDevice(GPUS[0], (f"nvidia.com/gpu={MIG}",), (7, 0)),
    )
    create(node, example("claim-mig"))
    assert started(node, 1) == {"default/gpu-mig": {"main": {f"nvidia.com/gpu={MIG}"}}}


@pytest.mark.parametrize(
    ("vendor", "driver", "resource"),
    [("amd", "amdgpu", "amd.com/gpu"), ("intel", "i915", "gpu.intel.com/i915"), ("intel", "xe", "gpu.intel.com/xe")],
)
def test_gpus_of_other_vendors(node: Offering, vendor: str, driver: str, resource: str) -> None:
    """By their extended resource, as unchanged pods ask for them."""
    device = AllocatableDevice(GPUS[0], (f"{vendor}.com/gpu={GPUS[0]}",))
    offer(node, device, vendor=vendor, driver=driver)
    container = {"name": "main", "image": "registry.invalid/none", "resources": {"limits": {resource: "1"}}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": {"containers": [container]}}
    create(node, yaml.safe_dump(pod))
    assert started(node, 1) == {"default/one": {"main": set(device.cdi_names)}}
