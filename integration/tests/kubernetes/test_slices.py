"""ResourceSlices at a real API server, and pods that a real scheduler gives their devices.

Only the node is simulated: the test writes its Node object as its kubelet would, and does what the kubelet does to
slices. The service is the real one, with a kubelet's client certificate and no other right.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.host.allocation import DIRECTORY
from agent.model.conditions import Reason
from agent.model.contract import AllocatableDevice, Effect, GpuState, GpuStatus
from agent.model.paths import DRA_DRIVER
from integration.bed.cluster.control_plane import ControlPlane, node_user
from integration.bed.cluster.stand_in_kubelet import ROOM, DriverSocket, StandInKubelet, listed, until
from integration.bed.machine.kubelet_relay import DRIVER
from integration.bed.process import CommandError
from tests.fakes.dra_machine import GPUS, KUBECONFIG, NODE, DraMachine, healthy, whole

pytestmark = pytest.mark.usefixtures("record_release")

OTHER_NODE = "other-node"
ANYTHING = [{"operator": "Exists"}]
"""A new node has taints until the control plane has seen that it is ready."""


@pytest.fixture(scope="module")
def cluster(release: str) -> Iterator[ControlPlane]:
    with ControlPlane((NODE, OTHER_NODE), release=release) as control_plane:
        for node in (NODE, OTHER_NODE):
            StandInKubelet(control_plane, node).create_node(ROOM if node == NODE else {})
        for vendor in ("nvidia", "intel"):
            control_plane.kubectl("create", f"--filename={DIRECTORY}/device-class-{vendor}.yaml")
        until("the default service account exists", lambda: control_plane.kubectl("get", "serviceaccounts", "-oname"))
        yield control_plane


@pytest.fixture
def machine(cluster: ControlPlane) -> Iterator[DraMachine]:
    """A machine whose service offers two GPUs, with the certificate of the node's kubelet."""
    # Not in pytest's tmp_path, which is too long for the path of a socket.
    with tempfile.TemporaryDirectory(prefix="dra-") as directory:
        yield from running_machine(cluster, Path(directory))


def running_machine(cluster: ControlPlane, tree: Path) -> Iterator[DraMachine]:
    found = DraMachine(tree)
    found.run_kubelet(StandInKubelet(cluster, NODE).kubeconfig(found))
    found.grant(*GPUS[:2])
    found.start()
    until("two GPUs are offered", lambda: names(cluster) == ["01", "02"])
    yield found
    found.stop()
    cluster.kubectl("delete", "pods", "--all", "--force", "--grace-period=0")
    cluster.kubectl("delete", "resourceclaims,resourceclaimtemplates", "--all", "--wait=false")
    until("no claim is left", lambda: not listed(cluster, "resourceclaims"))
    StandInKubelet(cluster, NODE).wipe()


def offered(cluster: ControlPlane) -> dict[str, dict[str, Any]]:
    """Return the offered devices by their bus numbers."""
    slices = [each for each in listed(cluster, "resourceslices") if each["spec"]["nodeName"] == NODE]
    return {device["name"][9:11]: device for each in slices for device in each["spec"]["devices"]}


def names(cluster: ControlPlane) -> list[str]:
    return sorted(offered(cluster))


def generation(cluster: ControlPlane) -> int:
    return max((each["spec"]["pool"]["generation"] for each in listed(cluster, "resourceslices")), default=0)


def pod(name: str, **spec: object) -> dict[str, Any]:
    """Return a pod that nothing will run; `container` has further keys of its container."""
    container = {"name": "main", "image": "registry.invalid/never-pulled", **(spec.pop("container", {}) or {})}  # type: ignore[dict-item]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container], "tolerations": ANYTHING, **spec},
    }


def by_resource(name: str, resource: str = "nvidia.com/gpu") -> dict[str, Any]:
    return pod(name, container={"resources": {"limits": {resource: "1"}}})


def with_claim(name: str, expression: str) -> list[dict[str, Any]]:
    """Return a pod and the claim that it names, for one GPU that fits the expression."""
    exactly = {"deviceClassName": "nvidia-gpu", "selectors": [{"cel": {"expression": expression}}]}
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    }
    container = {"resources": {"claims": [{"name": "gpu"}]}}
    return [claim, pod(name, container=container, resourceClaims=[{"name": "gpu", "resourceClaimName": name}])]


def create(cluster: ControlPlane, *items: dict[str, Any]) -> None:
    content = {"apiVersion": "v1", "kind": "List", "items": list(items)}
    cluster.kubectl("create", "--filename=-", stdin=json.dumps(content))


def bound(cluster: ControlPlane) -> dict[str, str]:
    """Return the bus number of each bound pod's GPU, by the pod's name."""
    claims = {}
    for each in listed(cluster, "resourceclaims"):
        results = each.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
        for user in each.get("status", {}).get("reservedFor", ()):
            claims[user["name"]] = " ".join(result["device"][9:11] for result in results)
    pods = [each for each in listed(cluster, "pods") if each["spec"].get("nodeName") == NODE]
    return {each["metadata"]["name"]: claims.get(each["metadata"]["name"], "") for each in pods}


def test_the_real_server_keeps_everything_that_is_written(cluster: ControlPlane, machine: DraMachine) -> None:
    """Also the form of quantities and times: after a restart, nothing is written again."""
    machine.change(GpuStatus(GPUS[1], "nvidia", GpuState.UNHEALTHY, "Xid48", "x", since=1_700_000_000))
    until("it is tainted", lambda: offered(cluster)["02"].get("taints"))
    (taint,) = offered(cluster)["02"]["taints"]
    assert taint == {
        "key": "gpu.unbounded-agent.io/unhealthy",
        "value": "Xid48",
        "effect": "NoSchedule",
        "timeAdded": "2023-11-14T22:13:20Z",
    }
    device = offered(cluster)["01"]
    assert device["capacity"] == {"memory": {"value": "20Gi"}}
    assert device["attributes"]["driverVersion"] == {"version": "550.163.1"}
    before = listed(cluster, "resourceslices")
    machine.stop()
    machine.start()
    until("it has looked", lambda: machine.status.offers)
    time.sleep(1)
    assert listed(cluster, "resourceslices") == before


def test_two_pods_get_two_gpus_and_the_third_waits_for_one(cluster: ControlPlane, machine: DraMachine) -> None:
    create(cluster, *(by_resource(f"pod-{number}") for number in range(3)))
    until("two are bound", lambda: len(bound(cluster)) == 2)
    assert sorted(bound(cluster).values()) == ["01", "02"]
    machine.grant(*GPUS[:3])
    until("all are bound", lambda: len(bound(cluster)) == 3)
    assert sorted(bound(cluster).values()) == ["01", "02", "03"]


def test_claims_select_by_attributes_and_memory(cluster: ControlPlane, machine: DraMachine) -> None:
    selectors = {
        "by-memory": f'device.capacity["{DRA_DRIVER}"].memory.compareTo(quantity("30Gi")) >= 0',
        "by-version": f'device.attributes["{DRA_DRIVER}"].driverVersion.isGreaterThan(semver("550.0.0"))',
    }
    for name, expression in selectors.items():
        create(cluster, *with_claim(name, expression))
        until("it is bound", lambda name=name: name in bound(cluster))  # type: ignore[misc]
    assert bound(cluster) == {"by-memory": "02", "by-version": "01"}


def test_a_gpu_without_an_attribute_does_not_keep_claims_from_the_others(
    cluster: ControlPlane, machine: DraMachine
) -> None:
    """CEL ends with an error where an attribute is missing, unless the expression says what then counts."""
    machine.allocate([])
    until("nothing is offered", lambda: names(cluster) == [])
    machine.states(map(healthy, GPUS[1:3]))
    machine.allocate(map(whole, GPUS[:3]))
    until(
        "two have memory", lambda: [bus for bus, each in offered(cluster).items() if "capacity" in each] == ["02", "03"]
    )
    product = f'device.attributes["{DRA_DRIVER}"].productName'
    selectors = {
        "memory": f'device.capacity["{DRA_DRIVER}"].?memory.orValue(quantity("0")).compareTo(quantity("30Gi")) >= 0',
        "product": f'has({product}) && {product}.contains("40960")',
    }
    for name, expression in selectors.items():
        create(cluster, *with_claim(name, expression))
    until("they are bound", lambda: sorted(bound(cluster).values()) == ["02", "03"])
    create(cluster, *with_claim("strict", f'device.capacity["{DRA_DRIVER}"].memory.compareTo(quantity("1Gi")) >= 0'))
    until("the error is in the pod's status", lambda: "no such key: memory" in json.dumps(listed(cluster, "pods")))


def test_an_intel_gpu_without_a_driver_does_not_keep_pods_from_the_others(
    cluster: ControlPlane, machine: DraMachine
) -> None:
    """The class selects by the kernel driver's name, which such a GPU does not have."""
    first, second = (GpuStatus(each, "intel", GpuState.HEALTHY) for each in GPUS[:2])
    machine.states([first, second._replace(kernel_driver="xe")])
    machine.allocate((AllocatableDevice(each, (f"intel.com/gpu={each}",)) for each in GPUS[:2]), vendor="intel")
    until("Intel's GPUs are offered", lambda: [of_vendor(each) for each in offered(cluster).values()] == ["intel"] * 2)
    create(cluster, by_resource("xe", "gpu.intel.com/xe"), by_resource("i915", "gpu.intel.com/i915"))
    until("one is bound", lambda: bound(cluster) == {"xe": "02"})


def of_vendor(device: dict[str, Any]) -> str:
    return str(device["attributes"]["vendor"]["string"])


def test_mig_devices_are_given_by_claims_and_their_gpu_is_not(cluster: ControlPlane, machine: DraMachine) -> None:
    parts = [AllocatableDevice(GPUS[0], (f"nvidia.com/gpu=MIG-{each}",), (each, 0)) for each in (7, 8)]
    machine.allocate([whole(GPUS[0]), *parts])

    def offered_names() -> list[str]:
        return [each["name"] for item in listed(cluster, "resourceslices") for each in item["spec"]["devices"]]

    # By their names: two whole GPUs were offered before.
    until("only partitions are offered", lambda: [name[-8:] for name in offered_names()] == ["-mig-7-0", "-mig-8-0"])
    claim, user = with_claim("part", f'device.attributes["{DRA_DRIVER}"].gpuInstance == 8')
    claim["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "nvidia-mig"
    create(cluster, by_resource("whole"), claim, user)
    until("one is bound", lambda: list(bound(cluster)) == ["part"])
    (given,) = (each for each in listed(cluster, "resourceclaims") if each["metadata"]["name"] == "part")
    (result,) = given["status"]["allocation"]["devices"]["results"]
    assert result["device"] == "gpu-0000-01-00-0-mig-8-0"


def test_a_pool_may_have_several_slices(cluster: ControlPlane, machine: DraMachine) -> None:
    """The server's limits: 128 devices in a slice, and 64 if one of them has a taint."""
    many = [AllocatableDevice(f"0001:{bus:02x}:00.0", (f"nvidia.com/gpu={bus}",)) for bus in range(130)]
    machine.allocate(many)
    until("there are two", lambda: sizes(cluster) == [128, 2])
    machine.states([GpuStatus(many[0].pci_address, "nvidia", GpuState.UNHEALTHY, "Xid48", "x", since=7)])
    until("there are three", lambda: sizes(cluster) == [64, 64, 2])
    create(cluster, by_resource("bound"))
    until("it is bound", lambda: "bound" in bound(cluster))
    machine.grant(*GPUS[:2])
    until("there is one", lambda: sizes(cluster) == [2])


def sizes(cluster: ControlPlane) -> list[int]:
    return sorted((len(each["spec"]["devices"]) for each in listed(cluster, "resourceslices")), reverse=True)


def test_a_claim_is_prepared_with_the_name_in_the_verified_specification(
    cluster: ControlPlane, machine: DraMachine
) -> None:
    """By the kubelet's call on the driver's socket, with gRPC's own client."""
    create(cluster, *with_claim("prepared", "true"))
    until("it is bound", lambda: "prepared" in bound(cluster))
    (claim,) = listed(cluster, "resourceclaims")
    with DriverSocket(machine.kubelet, DRIVER) as driver:
        (device,) = driver.prepare(claim).devices
        assert device.cdi_device_ids == [f"nvidia.com/gpu=GPU-{bound(cluster)['prepared']}"]
        machine.grant()
        assert "has no device" in driver.prepare(claim).error


def test_no_pod_gets_a_tainted_gpu(cluster: ControlPlane, machine: DraMachine) -> None:
    machine.states(GpuStatus(each, "nvidia", GpuState.UNHEALTHY, "Xid48", "x", since=7) for each in GPUS[:2])
    until("both are tainted", lambda: all(each.get("taints") for each in offered(cluster).values()))
    create(cluster, by_resource("waits"))
    time.sleep(3)
    assert bound(cluster) == {}
    machine.change(healthy(GPUS[1]))
    until("it is bound", lambda: bound(cluster) == {"waits": "02"})


def test_a_lost_gpu_s_pod_is_evicted(cluster: ControlPlane, machine: DraMachine) -> None:
    create(cluster, *with_claim("evicted", "true"))
    until("it is bound", lambda: "evicted" in bound(cluster))
    address = f"0000:{bound(cluster)['evicted']}:00.0"
    now = int(time.time())
    machine.change(GpuStatus(address, "nvidia", GpuState.LOST, "Xid79", "x", Effect.NO_EXECUTE, since=now))
    until(
        "it is being deleted",
        lambda: not listed(cluster, "pods") or "deletionTimestamp" in listed(cluster, "pods")[0]["metadata"],
    )


def test_the_kubelet_s_wipe_is_repaired(
    cluster: ControlPlane, machine: DraMachine, measured: Callable[[str, object], None]
) -> None:
    before, longest = generation(cluster), 0.0
    for _ in range(3):
        StandInKubelet(cluster, NODE).wipe()
        begun = time.monotonic()
        until("two GPUs are offered", lambda: names(cluster) == ["01", "02"])
        longest = max(longest, time.monotonic() - begun)
    assert generation(cluster) > before
    measured("slices wiped by the kubelet, and written again", f"{longest:.1f} s at most, the test's pauses included")


def test_thirty_changes_are_generation_after_generation(cluster: ControlPlane, machine: DraMachine) -> None:
    for number in range(30):
        granted = GPUS[: 1 + number % 4]
        machine.grant(*granted)
        machine.change(GpuStatus(granted[-1], "nvidia", GpuState.UNHEALTHY, "Xid48", "x", since=number + 1))
        wanted = {each[5:7]: each == granted[-1] for each in granted}
        until(
            f"change {number} is there",
            lambda wanted=wanted: {bus: "taints" in each for bus, each in offered(cluster).items()} == wanted,  # type: ignore[misc]
        )
    assert generation(cluster) >= 30


def test_nothing_is_offered_beside_a_device_plugin(cluster: ControlPlane, machine: DraMachine) -> None:
    kubelet = StandInKubelet(cluster, NODE)
    kubelet.set_resources({**ROOM, "nvidia.com/gpu": "2"})
    until("nothing is offered", lambda: names(cluster) == [])
    until("the status says why", lambda: machine.status.offers[0].reason == Reason.DEVICE_PLUGIN_ACTIVE)
    kubelet.set_resources({**ROOM, "nvidia.com/gpu": "0"})
    until("two GPUs are offered", lambda: names(cluster) == ["01", "02"])
    kubelet.set_resources(ROOM)


def test_an_outage_of_the_server_is_survived(cluster: ControlPlane, machine: DraMachine) -> None:
    cluster.stop_api_server()
    machine.grant(*GPUS[:3])
    until("the status says so", lambda: machine.status.reason == Reason.API_UNREACHABLE)
    time.sleep(5)
    cluster.start_api_server()
    until("three GPUs are offered", lambda: names(cluster) == ["01", "02", "03"])
    until("the status says so", lambda: not machine.status.reason)


def test_a_kubelet_may_not_write_another_node_s_slices(cluster: ControlPlane, machine: DraMachine) -> None:
    """The node authorizer and NodeRestriction refuse it, and the status explains the refusal."""
    foreign = {**listed(cluster, "resourceslices")[0], "metadata": {"name": "foreign"}}
    foreign["spec"] = {**foreign["spec"], "nodeName": OTHER_NODE}
    with pytest.raises(CommandError, match="can only create ResourceSlice with the same NodeName"):
        cluster.kubectl("create", "--filename=-", stdin=json.dumps(foreign), user=node_user(NODE))
    machine.put(KUBECONFIG, StandInKubelet(cluster, OTHER_NODE).kubeconfig(machine))
    machine.grant(GPUS[0])
    until("the status says so", lambda: machine.status.reason == Reason.REFUSED)
    assert "authorization mode Node" in machine.status.message
    assert names(cluster) == ["01", "02"]
