"""The node offers its GPUs itself, by Dynamic Resource Allocation, in a real cluster without any pod of a vendor."""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from agent.model.paths import DRA_DRIVER
from integration.bed.cluster.cluster import SHOW, Cluster, pod
from integration.bed.measure.versions import host_versions, machine_versions
from integration.bed.vm.installation import CONFIGURATION
from integration.bed.vm.simulated_host import SimulatedHost
from integration.conftest import READY, Bed
from integration.tests.kubernetes.conftest import RELEASES
from integration.tests.kubernetes.test_cluster import configure, share_gpus, unscheduled
from integration.tests.kubernetes.test_pods import GPUS, uuids
from integration.tests.node.test_gpu_errors import raise_xid
from integration.tests.node.test_hotplug import PORT, plug, uuid_of

pytestmark = [pytest.mark.scenario("002"), pytest.mark.usefixtures("record_release")]

NUMBER = len(GPUS)
SERVICE = "unbounded-agent-dra.service"
CLASSES = "device-class-nvidia"
DOUBLE_BIT_ECC = 48
HOLD = f"nvidia-smi -L; {SHOW}"
SHARED = "resource.kubernetes.io"
"""The prefix of attributes that all drivers share."""


@pytest.fixture(scope="module")
def cluster(simulated_host: SimulatedHost, release: str) -> Iterator[Cluster]:
    """A cluster whose node offers its GPUs itself; one DeviceClass is all that the cluster has for them."""
    simulated_host.restore(READY)
    simulated_host.guest.set_clock()
    bed = Bed(simulated_host)
    bed.node.run("systemctl", "start", "unbounded-agent-gpu.service")
    configure(bed, f'{CONFIGURATION}allocation = "dra"\n')
    with Cluster(simulated_host, release) as cluster:
        cluster.apply("runtime-class", CLASSES)
        wait_for_devices(cluster, NUMBER)
        yield cluster
    simulated_host.pause()


@pytest.fixture(autouse=True)
def _alone(cluster: Cluster, bed: Bed, record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Record versions, and delete all pods and claims after each test."""
    for part, version in (host_versions(cluster.host.guest) | machine_versions(cluster.node)).items():
        record_property(part, version)
    yield
    cluster.kubectl("delete", "pods", "--all")
    cluster.kubectl("delete", "resourceclaims,resourceclaimtemplates", "--all")


@pytest.fixture
def bed(cluster: Cluster) -> Bed:
    return Bed(cluster.host)


def value(device: dict[str, Any], name: str) -> Any:  # noqa: ANN401
    """Return a device's attribute, without its type."""
    ((_, found),) = device["attributes"][name].items()
    return found


def offered(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Return the devices in the slices by UUID. That of a new GPU comes later if nvidia-smi did not answer in time."""
    return {value(each, "uuid"): each for each in cluster.devices().values() if "uuid" in each["attributes"]}


def wait_for_devices(cluster: Cluster, number: int) -> None:
    def complete() -> bool:
        devices = cluster.devices().values()
        return len(devices) == number and all("uuid" in each["attributes"] for each in devices)

    cluster.wait(f"{number} GPUs in the slices, with their UUIDs", complete)


def tainted(cluster: Cluster, uuid: str) -> list[str]:
    """Return the taints of a GPU in the slices, as key=value:effect."""
    taints = offered(cluster)[uuid].get("taints", [])
    return [f"{each['key']}={each.get('value', '')}:{each['effect']}" for each in taints]


def holder(name: str, gpus: int = 1) -> dict[str, Any]:
    """Return a pod with the script HOLD.

    If its container cannot start, the kubelet tries again with a new sandbox: containerd 1.7 rarely takes 0 for the
    process id of a sandbox that starts next to others (containerd/containerd#9160).
    """
    made = pod(name, "sh", "-c", HOLD, gpus=gpus)
    made["spec"]["restartPolicy"] = "OnFailure"
    return made


def holding(cluster: Cluster, name: str) -> str:
    """Return the UUID of the one GPU that a pod with the script HOLD sees."""
    (listing,) = cluster.shown(name)
    (uuid,) = uuids(listing)
    return uuid


def claim_template(name: str, *selectors: str, count: int = 1) -> dict[str, Any]:
    exact = {
        "deviceClassName": "nvidia-gpu",
        "count": count,
        "selectors": [{"cel": {"expression": each}} for each in selectors],
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exact}]}}},
    }


def claiming(name: str, template: str, *command: str) -> dict[str, Any]:
    """Return a pod with a claim of its own."""
    claiming = pod(name, *command)
    claiming["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": template}]
    claiming["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    return claiming


def test_the_slices_have_every_gpu(cluster: Cluster, bed: Bed) -> None:
    listed = uuids(bed.run("nvidia-smi", "-L").stdout)
    assert offered(cluster).keys() == set(listed)
    assert cluster.allocatable() == 0, "no device plugin"
    for device in cluster.devices().values():
        assert value(device, "vendor") == "nvidia"
        assert value(device, "productName").startswith("NVIDIA H100")
        assert value(device, "kernelDriver") == "nvidia"
        assert value(device, "driverVersion") == "550.163.1"
        assert value(device, f"{SHARED}/pciBusID").startswith("0000:")
        assert value(device, f"{SHARED}/pcieRoot") == "pci0000:00"
        assert not device.get("taints")
    advertised = bed.conditions()["GPUsAdvertised"]
    assert (advertised["status"], advertised["reason"]) == ("True", "Advertised"), advertised
    pods = cluster.get("pods", "--all-namespaces")["items"]
    assert not [each for each in pods if "gpu" in each["metadata"]["name"]], "no pod of a vendor"


@pytest.mark.parametrize("shares", [(1, 1, 6), pytest.param((1,) * NUMBER, marks=pytest.mark.exhaustive)])
def test_unchanged_pods_get_all_gpus_and_one_more_waits_for_a_gpu_that_is_plugged_in(
    cluster: Cluster, bed: Bed, shares: tuple[int, ...]
) -> None:
    """Pods ask as they ask a device plugin. Nothing is restarted when a GPU comes and goes."""
    names = share_gpus(cluster, bed, shares)
    cluster.apply(holder("last"))
    cluster.wait("the scheduler's words", lambda: bool(unscheduled(cluster, "last")))
    assert cluster.phase("last") == "Pending"

    at_start = bed.starts()
    running = containers(cluster, [*names])
    plug(bed)
    assert holding(cluster, "last") == uuid_of(bed, PORT)
    cluster.delete_pods("last")
    bed.host.qemu.unplug(PORT)
    wait_for_devices(cluster, NUMBER)
    assert containers(cluster, [*names]) == running
    assert bed.restarted(at_start) == "nothing"


@pytest.mark.exhaustive
def test_claims_choose_by_attributes(cluster: Cluster, bed: Bed) -> None:
    wanted = uuid_of(bed, 5)
    by_uuid = f'device.attributes["{DRA_DRIVER}"].uuid == "{wanted}"'
    big = f'device.capacity["{DRA_DRIVER}"].memory.compareTo(quantity("40Gi")) >= 0'
    huge = f'device.capacity["{DRA_DRIVER}"].memory.compareTo(quantity("4Ti")) >= 0'
    cluster.apply(claim_template("one", by_uuid), claim_template("two", big, count=2), claim_template("huge", huge))
    assert uuids(cluster.run(claiming("by-uuid", "one", "nvidia-smi", "-L"))) == [wanted]
    assert len(set(uuids(cluster.run(claiming("two-gpus", "two", "nvidia-smi", "-L"))))) == 2
    cluster.apply(claiming("too-big", "huge", "true"))
    cluster.wait("the scheduler's words", lambda: "cannot allocate all claims" in unscheduled(cluster, "too-big"))


def test_a_failed_gpu_gets_no_pod_and_says_why(cluster: Cluster, bed: Bed) -> None:
    failed = uuid_of(bed, 3)
    cluster.apply(claim_template("third", f'device.attributes["{DRA_DRIVER}"].uuid == "{failed}"'))
    cluster.apply(claiming("holder", "third", "sh", "-c", HOLD))
    assert holding(cluster, "holder") == failed
    raise_xid(bed, 3, DOUBLE_BIT_ECC)
    cluster.wait("the taint", lambda: bool(tainted(cluster, failed)))

    def health() -> str:
        (status,) = cluster.get("pod", "holder")["status"]["containerStatuses"]
        return json.dumps(status.get("allocatedResourcesStatus", []))

    cluster.wait("the pod's status says it", lambda: "Unhealthy" in health() and "Xid 48" in health())
    cluster.apply(holder("others", NUMBER - 1))
    (listing,) = cluster.shown("others")
    assert len(set(uuids(listing)) - {failed}) == NUMBER - 1
    cluster.apply(pod("none-left", "true", gpus=1))
    cluster.wait("the scheduler's words", lambda: bool(unscheduled(cluster, "none-left")))
    assert cluster.phase("none-left") == "Pending"
    cluster.delete_pods("holder", "others")
    # Detached and attached again, the GPU is as new.
    address = addresses(cluster)[failed]
    bed.agent("gpus", "detach", address)
    cluster.wait("it is not offered", lambda: failed not in offered(cluster))
    bed.agent("gpus", "attach", address)
    cluster.wait("it is offered again", lambda: failed in offered(cluster) and not tainted(cluster, failed))
    cluster.finished("none-left")


def test_a_reset_evicts_only_the_gpus_pods_and_obeys_their_budgets(
    cluster: Cluster, bed: Bed, measured: Callable[[str, object], None]
) -> None:
    """Of two GPUs, one was given by a claim, and one as an extended resource. Another pod computes on all the while."""
    wanted = uuid_of(bed, 5)
    cluster.apply(claim_template("fifth", f'device.attributes["{DRA_DRIVER}"].uuid == "{wanted}"'))
    kept = claiming("kept", "fifth", "sh", "-c", HOLD)
    kept["metadata"]["labels"] = {"app": "kept"}
    about = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "kept"}}
    cluster.apply({**about, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "kept"}}}}, kept)
    assert holding(cluster, "kept") == wanted
    cluster.apply(holder("extended"), holder("other"))
    extended, _ = holding(cluster, "extended"), holding(cluster, "other")
    gpus = [addresses(cluster)[each] for each in (wanted, extended)]
    running = containers(cluster, ["kept", "other"])
    reset = ("gpus", "reset", *gpus, "--evict", "--yes")

    def observed() -> bool:
        return bool(cluster.get("pdb", "kept")["status"].get("expectedPods") == 1)

    cluster.wait("the budget counts its pod", observed)
    refused = bed.agent(*reset, "--timeout=30", check=False)
    assert refused.status == 1
    assert "default/kept: The disruption budget kept needs 1 healthy pods" in refused.stdout, refused
    assert containers(cluster, ["kept", "other"]) == running
    assert [tainted(cluster, each)[0].rpartition(":")[2] for each in (wanted, extended)] == ["NoSchedule"] * 2
    cluster.kubectl("delete", "pdb", "kept")
    before = time.monotonic()
    bed.agent(*reset, "--timeout=90", timeout=400)
    measured("seconds to evict pods and to reset two GPUs", f"{time.monotonic() - before:.0f}")
    cluster.wait("the GPUs are offered again", lambda: not any(tainted(cluster, each) for each in (wanted, extended)))
    names = {each["metadata"]["name"] for each in cluster.get("pods")["items"]}
    assert names == {"other"}
    assert containers(cluster, ["other"]) == running[1:]


@pytest.mark.exhaustive
def test_service_and_kubelet_go_away_and_come_back(cluster: Cluster, bed: Bed) -> None:
    cluster.apply(holder("holder"))
    held = holding(cluster, "holder")

    # Killed while pods arrive and one leaves.
    cluster.apply(*(holder(f"new-{index}") for index in range(3)))
    # Only the main process: while systemd kills all, one that is just leaving the control group can fail the command.
    kill = ("systemctl", "kill", "--kill-whom=main", "--signal=KILL", SERVICE)
    for _ in range(3):
        cluster.wait("the service runs and is killed", lambda: bed.node.run(*kill, check=False).status == 0)
        time.sleep(1)
    cluster.delete_pods("holder")
    shown = [holding(cluster, f"new-{index}") for index in range(3)]
    assert len(set(shown)) == 3

    # At its start, the kubelet deletes the slices of drivers that have not registered yet.
    bed.node.run("systemctl", "restart", "kubelet.service")
    cluster.wait("the service has registered again", lambda: registered(bed))
    cluster.wait("the slices are back", lambda: offered_stays(cluster))
    cluster.apply(holder("after-kubelet"))
    assert holding(cluster, "after-kubelet") not in shown
    assert held in offered(cluster)


def registered(bed: Bed) -> bool:
    return bed.node.run("test", "-S", f"/var/lib/kubelet/plugins/{DRA_DRIVER}/dra.sock", check=False).status == 0


def offered_stays(cluster: Cluster, number: int = NUMBER, seconds: float = 15) -> bool:
    """Return whether so many GPUs are offered, and still are a while later: the kubelet deletes slices belatedly."""
    if len(cluster.devices()) != number:
        return False
    time.sleep(seconds)
    return len(cluster.devices()) == number


def resident(bed: Bed, process: str) -> str:
    """Return the memory that a process of the machine has in use; `process` is a command that prints its id."""
    return bed.node.run("sh", "-c", f"grep VmRSS /proc/$({process})/status").stdout.partition(":")[2].strip()


@pytest.mark.exhaustive
def test_nothing_is_published_next_to_a_device_plugin(
    cluster: Cluster, bed: Bed, measured: Callable[[str, object], None]
) -> None:
    """Both at once would hand out the same GPU twice."""
    cluster.deploy_plugin(gpus=NUMBER)
    measured("memory of NVIDIA's device plugin", resident(bed, "pidof -s nvidia-device-plugin"))
    measured(f"memory of {SERVICE}", resident(bed, f"systemctl show --property=MainPID --value {SERVICE}"))
    try:
        cluster.wait("the slices are withdrawn", lambda: not cluster.devices())
        bed.node.run("systemctl", "start", "unbounded-agent-gpu.service", check=False)
        advertised = bed.conditions()["GPUsAdvertised"]
        assert advertised["status"] == "False", advertised
        assert "device plugin" in advertised["message"]
    finally:
        cluster.forget_plugin()
        wait_for_devices(cluster, NUMBER)


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", RELEASES[:1], indirect=True)
def test_thirty_cycles_of_plug_fault_recovery_and_unplug(cluster: Cluster, bed: Bed) -> None:
    """Slices and sysfs agree each time, and nothing is restarted.

    Meanwhile 40 pods start, four at a time because the emulated node takes a quarter of a minute for one: none gets a
    tainted GPU, and each sees the GPU of its claim and no other. One release has to do: it takes over half an hour.
    """
    at_start = bed.starts()
    names, avoided = [], ""
    for cycle in range(30):
        plug(bed)
        agree(cluster, bed, NUMBER + 1)
        ninth = uuid_of(bed, PORT)
        raise_xid(bed, PORT, DOUBLE_BIT_ECC)
        cluster.wait("the taint", lambda uuid=ninth: bool(tainted(cluster, uuid)))  # type: ignore[misc]
        if cycle % 3 == 0:
            names, avoided = [f"cycle-{cycle}-{index}" for index in range(4)], ninth
            cluster.apply(*(holder(name) for name in names))
            cluster.wait("claims are allocated", lambda names=names: None not in map(partial(gpu_of, cluster), names))  # type: ignore[misc]
        bed.agent("gpus", "attach", addresses(cluster)[ninth])
        cluster.wait("no taint", lambda uuid=ninth: not tainted(cluster, uuid))  # type: ignore[misc]
        bed.host.qemu.unplug(PORT)
        agree(cluster, bed, NUMBER)
        if cycle % 3 == 2:
            assert avoided not in hold_different(cluster, names)
            cluster.delete_pods(*names)
    assert bed.restarted(at_start) == "nothing"


@pytest.mark.exhaustive
def test_the_api_server_is_away_for_two_minutes(cluster: Cluster, bed: Bed) -> None:
    """Pods keep their GPUs. What changed meanwhile is offered afterwards, without a restart."""
    names = ["holder-0", "holder-1"]
    cluster.apply(*(holder(name) for name in names))
    held = hold_different(cluster, names)
    running = containers(cluster, names)
    free = next(minor for minor in range(NUMBER) if uuid_of(bed, minor) not in held)
    failed, before = uuid_of(bed, free), set(offered(cluster))
    at_start = bed.starts()
    cluster.control_plane.stop_api_server()
    try:
        plug(bed)
        raise_xid(bed, free, DOUBLE_BIT_ECC)
        time.sleep(120)
    finally:
        cluster.control_plane.start_api_server()
    agree(cluster, bed, NUMBER + 1)
    cluster.wait("the taint", lambda: bool(tainted(cluster, failed)))
    # A kubelet that was away deletes slices belatedly.
    cluster.wait("the slices stay", lambda: offered_stays(cluster, NUMBER + 1))
    # The scheduler may notice last that the server is back. Once it gives the new GPU to a pod, it knows the taint too.
    (new,) = offered(cluster).keys() - before
    cluster.apply(claim_template("new", f'device.attributes["{DRA_DRIVER}"].uuid == "{new}"'))
    assert uuids(cluster.run(claiming("new", "new", "nvidia-smi", "-L"))) == [new]
    cluster.apply(holder("after"))
    assert failed not in hold_different(cluster, [*names, "after"])
    assert containers(cluster, names) == running
    assert bed.restarted(at_start) == "nothing"
    cluster.delete_pods(*names, "after")
    bed.agent("gpus", "attach", addresses(cluster)[failed])
    bed.host.qemu.unplug(PORT)
    agree(cluster, bed, NUMBER)


def addresses(cluster: Cluster) -> dict[str, str]:
    """Return the PCI addresses of the GPUs in the slices, by their UUIDs."""
    return {uuid: value(device, f"{SHARED}/pciBusID") for uuid, device in offered(cluster).items()}


def containers(cluster: Cluster, names: list[str]) -> list[tuple[str, int]]:
    """Return the id of each pod's one container, with the number of its restarts."""
    found = [cluster.get("pod", name)["status"]["containerStatuses"][0] for name in names]
    return [(each["containerID"], each["restartCount"]) for each in found]


def agree(cluster: Cluster, bed: Bed, number: int) -> None:
    """Wait until so many GPUs are in the slices, and assert that they are those with a driver in sysfs."""
    wait_for_devices(cluster, number)
    in_sysfs = bed.run("sh", "-c", "cd /sys/bus/pci/drivers/nvidia; ls -d 0000:*").stdout.split()
    assert sorted(addresses(cluster).values()) == sorted(in_sysfs)


def gpu_of(cluster: Cluster, name: str) -> str | None:
    """Return the UUID of the GPU that the scheduler gave a pod, if it has yet."""
    made = cluster.get("pod", name)["status"].get("extendedResourceClaimStatus")
    claim = cluster.get("resourceclaim", made["resourceClaimName"]) if made else {}
    results = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results")
    return str(value(cluster.devices()[results[0]["device"]], "uuid")) if results else None


def hold_different(cluster: Cluster, names: list[str]) -> set[str]:
    """Wait until pods have started, assert that each sees the GPU of its claim and no two the same; return these."""
    seen = {name: holding(cluster, name) for name in names}
    assert seen == {name: gpu_of(cluster, name) for name in names}
    assert len(set(seen.values())) == len(names)
    return set(seen.values())
