"""Claims from the manifest to the CDI names in a container: real scheduler, real service, stand-in for the kubelet.

The manifests are those of Kubernetes' example driver and our own examples.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.dra.claims import CHECKPOINT
from agent.host.allocation import DIRECTORY
from agent.model.contract import AllocatableDevice, GpuState, GpuStatus, slice_name
from agent.model.paths import DRA_DRIVER
from integration.bed.cluster.dra_node import Offering, offering
from integration.bed.cluster.example_driver import DRIVER, demo
from integration.bed.cluster.stand_in_kubelet import DriverSocket, listed, prepared, until
from tests.fakes.dra_machine import GPUS, healthy, whole

pytestmark = pytest.mark.usefixtures("record_release")

NINE = (*GPUS, "0000:09:00.0")
"""The demo's pods need nine GPUs."""
ANYTHING = [{"operator": "Exists"}]
"""A new node has taints until the control plane has seen that it is ready."""
SHARED = "allowMultipleAllocations"
WHILE = 2.0
"""Seconds in which the scheduler would have bound a pod that fits."""
MIG = "MIG-00000000-0000-4000-8000-000000000007"


@pytest.fixture(scope="module")
def node(release: str) -> Iterator[Offering]:
    with offering(release) as node:
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


def offer(
    node: Offering, *devices: AllocatableDevice, vendor: str = "nvidia", driver: str = "nvidia", shared: bool = False
) -> None:
    """Let these devices be verified and healthy, and wait until they are offered."""
    addresses = sorted({each.pci_address for each in devices})
    if vendor == "nvidia":
        node.machine.states(healthy(each)._replace(shared=shared) for each in addresses)
    else:
        node.machine.states(GpuStatus(each, vendor, GpuState.HEALTHY, kernel_driver=driver) for each in addresses)
    node.machine.allocate(devices, vendor)

    def key(device: dict[str, Any]) -> tuple[str, str, bool]:
        # A GPU without a known state has no kernel driver.
        kernel_driver = device["attributes"].get("kernelDriver", {}).get("string", "")
        return device["name"], kernel_driver, device.get(SHARED, False)

    def offered() -> set[tuple[str, str, bool]]:
        return {key(each) for item in listed(node.cluster, "resourceslices") for each in item["spec"]["devices"]}

    # By their names: as many other devices may have been offered before.
    wanted = {(slice_name(each.pci_address, each.partition), driver, shared) for each in devices}
    until("only these devices are offered", lambda: offered() == wanted)


def example(name: str) -> str:
    return (Path(DIRECTORY) / f"{name}.yaml").read_text()


def create(node: Offering, text: str) -> None:
    """Create a manifest's objects, with pods that tolerate the node."""
    objects = [each for each in yaml.safe_load_all(text) if each]
    for each in objects:
        if each["kind"] == "Pod":
            each["spec"]["tolerations"] = ANYTHING
    node.cluster.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(objects))


def by_resource(name: str, resource: str) -> str:
    container = {"name": "main", "image": "registry.invalid/none", "resources": {"limits": {resource: "1"}}}
    return yaml.safe_dump(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container]}}
    )


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
        # The manifests' parameters still name the example driver, so ours ignores them; see the next test.
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


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("name", "count"),
    [("memory", 1), ("product", 1), ("shared", 1), ("two-gpus", 2), ("admin-access", 8)],
)
def test_our_examples(node: Offering, name: str, count: int, shared: bool) -> None:
    """They get the same devices whether or not claims may share GPUs."""
    offer(node, *map(whole, GPUS), shared=shared)
    create(node, example(f"claim-{name}"))
    (containers,) = started(node, 1).values()
    assert {len(each) for each in containers.values()} == {count}
    assert len(set(map(frozenset, containers.values()))) == 1


@pytest.mark.exhaustive
def test_claims_share_a_gpu_by_its_memory(node: Offering) -> None:
    """If the host's settings say so. A claim that asks for no part gets the whole GPU for itself."""
    offer(node, whole(GPUS[1]))
    create(node, example("claim-part"))
    started(node, 1)
    share(node, GPUS[1])
    time.sleep(WHILE)
    assert len(started(node, 1)) == 1, "a claim that was allocated before has all of its GPU"
    remove(node, "gpu-part-1", "gpu-part-2")
    create(node, example("claim-part"))
    both = started(node, 2)
    assert both["default/gpu-part-1"] == both["default/gpu-part-2"]
    assert len(shares(node)) == 2
    # 20 of 40 GiB are left, and a pod that asks for a GPU does not share one.
    create(node, by_resource("whole", "nvidia.com/gpu"))
    create(node, example("claim-part").replace("gpu-part", "gpu-third").replace("gpu-third-2", "gpu-fourth"))
    assert "default/whole" not in started(node, 4)
    remove(node, "gpu-part-1", "gpu-part-2", "gpu-third-1", "gpu-fourth")
    assert list(started(node, 1)) == ["default/whole"]
    create(node, example("claim-part"))
    create(node, example("claim-part").replace("gpu-", "nothing-").replace("10Gi", "0"))
    time.sleep(WHILE)
    assert list(started(node, 1)) == ["default/whole"], "it has all of the GPU"


@pytest.mark.exhaustive
def test_a_gpu_that_is_no_longer_shared_goes_to_one_claim_after_the_others(node: Offering) -> None:
    """Those that have parts of it keep them."""
    offer(node, whole(GPUS[1]))
    share(node, GPUS[1])
    create(node, example("claim-part"))
    started(node, 2)
    node.machine.states([healthy(GPUS[1])])
    until("the slice says so", lambda: SHARED not in str(listed(node.cluster, "resourceslices")))
    create(node, by_resource("whole", "nvidia.com/gpu"))
    time.sleep(WHILE)
    assert "default/whole" not in started(node, 2)
    remove(node, "gpu-part-1", "gpu-part-2")
    assert list(started(node, 1)) == ["default/whole"]


def share(node: Offering, address: str) -> None:
    """Let pods share this GPU, which is the only one."""
    node.machine.states([healthy(address)._replace(shared=True)])
    until("the slice says so", lambda: SHARED in str(listed(node.cluster, "resourceslices")))


def shares(node: Offering) -> set[str]:
    """Return the ids of the parts that claims have."""
    allocations = [each.get("status", {}).get("allocation") for each in listed(node.cluster, "resourceclaims")]
    return {result.get("shareID", "") for each in allocations if each for result in each["devices"]["results"]}


def remove(node: Offering, *names: str) -> None:
    """Delete pods, and give their claims back, as the kubelet does."""
    mine = [
        each
        for each in listed(node.cluster, "resourceclaims")
        if any(user["name"] in names for user in each.get("status", {}).get("reservedFor", ()))
    ]
    node.cluster.kubectl("delete", "pod", *names, "--force", "--grace-period=0")
    with DriverSocket(node.machine.kubelet) as driver:
        for each in mine:
            assert not driver.unprepare(each)


@pytest.mark.exhaustive
def test_claims_come_and_go_and_leave_nothing(node: Offering) -> None:
    """As the robustness and stress tests of NVIDIA's driver: two claims of one pod, and one claim of four pods."""
    offer(node, *map(whole, GPUS[:3]))
    (slices,) = listed(node.cluster, "resourceslices")
    sharing = [f"sharing-{number}" for number in range(4)]
    request = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "nvidia-gpu"}}]}}
    for _ in range(5):
        create(node, claim_of("ResourceClaimTemplate", "own", {"spec": request}))
        create(node, claim_of("ResourceClaim", "common", request))
        create(node, claiming("two", resourceClaimTemplateName="own", count=2))
        for name in sharing:
            create(node, claiming(name, resourceClaimName="common"))
        given = started(node, 5)
        (common,) = {frozenset(given[f"default/{name}"]["main"]) for name in sharing}
        assert common | given["default/two"]["main"] == {each.cdi_names[0] for each in map(whole, GPUS[:3])}
        users = [len(each["status"]["reservedFor"]) for each in listed(node.cluster, "resourceclaims")]
        assert sorted(users) == [1, 1, 4]
        remove(node, "two", *sharing)
        node.cluster.kubectl("delete", "resourceclaims/common", "resourceclaimtemplates/own", "--wait=false")
        until("no claim is left", lambda: not listed(node.cluster, "resourceclaims"))
    assert listed(node.cluster, "resourceslices") == [slices]
    assert json.loads((node.machine.tree / CHECKPOINT[1:]).read_text())["claims"] == []


@pytest.mark.exhaustive
def test_a_claim_that_is_gone_meanwhile(node: Offering) -> None:
    """Before the kubelet asks for it, or later, with a kubelet that lost its files and never gives it back."""
    offer(node, whole(GPUS[0]))
    pod = example("claim-shared")
    create(node, pod)
    until("it is allocated", lambda: "allocation" in str(listed(node.cluster, "resourceclaims")))
    (claim,) = listed(node.cluster, "resourceclaims")
    for _ in range(2):
        node.cluster.kubectl("delete", "pod", "gpu-shared", "--force", "--grace-period=0")
        until("its claim is gone", lambda: not listed(node.cluster, "resourceclaims"))
        with DriverSocket(node.machine.kubelet) as driver:
            assert claim["metadata"]["name"] in driver.prepare(claim).error
        create(node, pod)
        assert list(started(node, 1)) == ["default/gpu-shared"]
        (claim,) = listed(node.cluster, "resourceclaims")


def claim_of(kind: str, name: str, spec: dict[str, Any]) -> str:
    return yaml.safe_dump({"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec})


def claiming(name: str, count: int = 1, **source: str) -> str:
    """Return a pod with one container that has so many claims, made from a template or existing."""
    claims = [{"name": f"claim-{number}", **source} for number in range(count)]
    wanted = [{"name": each["name"]} for each in claims]
    container = {"name": "main", "image": "registry.invalid/none", "resources": {"claims": wanted}}
    spec = {"containers": [container], "resourceClaims": claims}
    return yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})


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
    create(node, by_resource("one", resource))
    assert started(node, 1) == {"default/one": {"main": set(device.cdi_names)}}
