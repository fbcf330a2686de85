"""A user's whole setup: a real Kubernetes cluster, NVIDIA's device plugin, `kubectl apply`, and pods on GPUs."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.model.paths import CORDONED_FOR
from integration.bed.cluster.cluster import SHOW, Cluster, pod
from integration.bed.cluster.control_plane import node_user
from integration.bed.cluster.intel_plugin import intel_plugin_image, intel_plugin_version
from integration.bed.drivers import drm_gpus
from integration.bed.machine.node import MACHINE
from integration.bed.measure.versions import host_versions, machine_versions
from integration.bed.process import CommandError
from integration.bed.vm.installation import CONFIGURATION
from integration.bed.vm.transfer import send_files
from integration.conftest import Bed
from integration.tests.kubernetes.test_pods import GPUS, LOOK, PROBE, Look, expect_gpus, seen_in, uuids
from integration.tests.node.test_gpu_errors import raise_xid
from integration.tests.node.test_hotplug import PORT, plug, uuid_of, wait_for_gpus
from integration.tests.vendors.test_intel_amd import USER, links, wait_for_specs

pytestmark = pytest.mark.scenario("002")

NUMBER = len(GPUS)
INTEL_PLUGIN, INTEL_RESOURCE = "daemonset/intel-gpu-plugin", "gpu.intel.com/i915"
INTEL_ARCHIVE = "var/lib/unbounded-agent-bed/intel-gpu-plugin.tar"
PLUGIN_SPEC = "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json"
# Two of the three strategies give a pod its devices through CDI, whatever its runtime class. The plugin's default
# names them in a variable, which only NVIDIA's runtime reads.
STRATEGIES = {"cdi-cri": "", "cdi-annotations": "", "envvar": "nvidia"}
XID_DOUBLE_BIT_ECC = 48
"""Critical to the plugin, but the machine stays ready: 79 (off the bus) would end that for the following tests."""
FOURTH = "0000:04:00.0"


@pytest.fixture(scope="module")
def versions(cluster: Cluster) -> dict[str, str]:
    """Versions of the parts that run here."""
    return cluster.versions() | host_versions(cluster.host.guest) | machine_versions(cluster.node)


@pytest.fixture(autouse=True)
def _alone(
    cluster: Cluster, versions: dict[str, str], record_property: Callable[[str, object], None]
) -> Iterator[None]:
    """Record versions, and delete all pods after each test, because they hold GPUs."""
    for part, version in versions.items():
        record_property(part, version)
    yield
    cluster.kubectl("delete", "pods", "--all")


@pytest.fixture
def bed(cluster: Cluster) -> Bed:
    """The host of the cluster's node, without restoring a snapshot."""
    return Bed(cluster.host)


def expect_gpus_of(bed: Bed, seen: Look) -> list[str]:
    """Assert that of the host's GPUs only those open that nvidia-smi lists; return their UUIDs."""
    on_host = uuids(bed.run("nvidia-smi", "-L").stdout)
    expect_gpus(seen.probe, {on_host.index(uuid) for uuid in seen.uuids})
    return seen.uuids


def expect_one_gpu(bed: Bed, seen: Look) -> str:
    """Assert that exactly one of the host's GPUs opens, and that nvidia-smi lists only that one; return its UUID."""
    (uuid,) = expect_gpus_of(bed, seen)
    return uuid


def wait_condition(cluster: Cluster, bed: Bed, kind: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until `reached` accepts a condition, and return it. Runs the machine half without waiting for its timer.

    Ready must stay True: none of these changes may affect it.
    """
    found: dict[str, Any] = {}

    def look() -> bool:
        conditions = report(bed)
        assert conditions["Ready"]["status"] == "True", conditions
        found.update(conditions[kind])
        return reached(found)

    cluster.wait(f"condition {kind}", look)
    return found


def report(bed: Bed, seconds: float = 3) -> dict[str, dict[str, Any]]:
    """Run the machine half, and return the conditions by type once the service has had time to read its report."""
    bed.node.run("systemctl", "start", "unbounded-agent-gpu.service", check=False)
    time.sleep(seconds)
    return bed.last_conditions()


def test_the_node_offers_every_gpu(cluster: Cluster, bed: Bed) -> None:
    node = cluster.get("node", MACHINE)
    assert {each["type"]: each["status"] for each in node["status"]["conditions"]}["Ready"] == "True"
    assert cluster.allocatable() == NUMBER
    assert cluster.get("runtimeclass", "nvidia")["handler"] == "nvidia"
    advertised = wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] == "True")
    assert str(NUMBER) in advertised["message"]


def configure(bed: Bed, text: str) -> None:
    bed.guest.write("/etc/unbounded-agent/config.toml", text.encode())
    bed.run("systemctl", "reload", "unbounded-agent.service")


@pytest.mark.exhaustive
def test_a_ninth_gpu_is_offered(cluster: Cluster, bed: Bed) -> None:
    """A GPU is plugged into the running host. Only a restart of the device plugin offers it, and only if configured."""
    cluster.apply(pod("holder", "sleep", "infinity", gpus=1))
    cluster.wait("a pod holds a GPU", lambda: cluster.phase("holder") == "Running")
    holder = cluster.get("pod", "holder")["status"]["containerStatuses"]
    at_start = bed.starts()
    plug(bed)
    try:
        wait_for_gpus(bed, NUMBER + 1)
        needed = wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] != "True")
        assert (needed["status"], needed["reason"]) == ("False", "DevicePluginRestartNeeded")
        ninth = uuid_of(bed, PORT)
        assert ninth in needed["message"]
        assert cluster.allocatable() == NUMBER
        configure(bed, CONFIGURATION + "restart_device_plugin = true\n")
        cluster.wait("nine GPUs allocatable", lambda: cluster.allocatable() == NUMBER + 1)
        wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] == "True")
        # These are all that the first pod has left, so the ninth is among them.
        seen = uuids(cluster.run(pod("others", "nvidia-smi", "-L", gpus=NUMBER)))
        assert (len(set(seen)), ninth in seen) == (NUMBER, True)
        assert cluster.get("pod", "holder")["status"]["containerStatuses"] == holder
        assert bed.restarted(at_start) == "nothing"
    finally:
        configure(bed, CONFIGURATION)
        # The plugin has the GPU open, and the driver does not release a GPU in use.
        cluster.delete_plugin()
        bed.host.qemu.unplug(PORT)
    cluster.deploy_plugin(NUMBER)
    bed.wait_ready()


def unscheduled(cluster: Cluster, name: str) -> str:
    """Return the scheduler's message about why a pod has no node."""
    conditions = cluster.get("pod", name)["status"].get("conditions", [])
    return "".join(each.get("message", "") for each in conditions if each["type"] == "PodScheduled")


def share_gpus(cluster: Cluster, bed: Bed, shares: tuple[int, ...]) -> dict[str, list[str]]:
    """Run a pod for each of `shares`, which is its limit, and return the UUIDs by pod; together they have all GPUs."""
    names = [f"share-{index}" for index in range(len(shares))]
    command = ("sh", "-c", f"{LOOK}; {SHOW}")
    cluster.apply(*(pod(name, *command, gpus=share) for name, share in zip(names, shares, strict=True)))
    seen = [expect_gpus_of(bed, seen_in(each)) for each in cluster.shown(*names)]
    assert [len(each) for each in seen] == list(shares)
    assert len(set[str]().union(*seen)) == NUMBER
    return dict(zip(names, seen, strict=True))


@pytest.mark.parametrize("shares", [(1, 5, 2), pytest.param((1,) * NUMBER, marks=pytest.mark.exhaustive)])
def test_pods_get_all_gpus_and_one_more_waits(cluster: Cluster, bed: Bed, shares: tuple[int, ...]) -> None:
    """The last pod runs once the first ends."""
    held = share_gpus(cluster, bed, shares)
    cluster.apply(pod("last", "nvidia-smi", "-L", gpus=1))
    cluster.wait("the scheduler's words", lambda: "Insufficient nvidia.com/gpu" in unscheduled(cluster, "last"))
    assert cluster.phase("last") == "Pending"
    first = next(iter(held))
    cluster.delete_pods(first)
    assert uuids(cluster.finished("last")) == held[first]


@pytest.mark.exhaustive
def test_a_pod_without_a_limit_sees_nothing(cluster: Cluster) -> None:
    for runtime in ("", "nvidia"):
        found = json.loads(cluster.run(pod("no-limit", *PROBE, runtime=runtime)))
        assert set(found["open"].values()) == {"ENOENT"}, runtime
        assert all("error" in result for result in found["load"].values()), runtime


def test_a_node_whose_plugin_offers_a_fenced_gpu_is_cordoned(cluster: Cluster, bed: Bed) -> None:
    """The plugin's own health check sees a simulated Xid through NVML's events, and so no cordon is needed.

    A plugin that starts again forgets it, as its documentation says, and a new pod would get the GPU.
    """
    cluster.apply(pod("holder", "sleep", "infinity", gpus=1))
    cluster.wait("a pod holds a GPU", lambda: cluster.phase("holder") == "Running")
    holder = cluster.get("pod", "holder")["status"]["containerStatuses"]
    assert "Ignoring the following XIDs for health checks" in cluster.plugin_log()

    def is_cordoned() -> bool:
        return bool(cluster.get("node", MACHINE)["spec"].get("unschedulable"))

    def says(words: str) -> Callable[[dict[str, Any]], bool]:
        return lambda each: f"machine says: {words}" in each["message"]

    raise_xid(bed, 3, XID_DOUBLE_BIT_ECC)
    try:
        cluster.wait("one GPU is unhealthy", lambda: cluster.allocatable() == NUMBER - 1)
        unhealthy = uuids(bed.run("nvidia-smi", "-L").stdout)[3]
        assert f"Xid={XID_DOUBLE_BIT_ECC} on Device={unhealthy}" in cluster.plugin_log()
        wait_condition(cluster, bed, "GPUsHealthy", says("the node need not be cordoned: no device plugin offers"))
        assert not is_cordoned()
        cluster.restart_plugin(NUMBER)
        cluster.wait("the node is cordoned", is_cordoned)
        annotations = cluster.get("node", MACHINE)["metadata"]["annotations"]
        assert annotations[CORDONED_FOR] == f"{FOURTH}=Xid{XID_DOUBLE_BIT_ECC}"
        wait_condition(cluster, bed, "GPUsHealthy", says("the node is cordoned, because a device plugin offers"))
        cluster.apply(pod("late", "nvidia-smi", "-L", gpus=1))
        cluster.wait("the scheduler's words", lambda: "unschedulable" in unscheduled(cluster, "late"))
    finally:
        bed.agent("gpus", "attach", FOURTH)
    cluster.wait("the node is no longer cordoned", lambda: not is_cordoned())
    assert CORDONED_FOR not in cluster.get("node", MACHINE)["metadata"].get("annotations", {})
    assert len(uuids(cluster.finished("late"))) == 1
    assert cluster.get("pod", "holder")["status"]["containerStatuses"] == holder


@pytest.mark.scenario("001")
@pytest.mark.parametrize(
    "strategy",
    ["cdi-cri", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("cdi-annotations", "envvar"))],
)
def test_device_list_strategies(cluster: Cluster, bed: Bed, strategy: str) -> None:
    # Otherwise a file of the previous strategy could make this one pass.
    cluster.delete_plugin()
    bed.node.run("rm", "--force", PLUGIN_SPEC)
    cluster.deploy_plugin(NUMBER, DEVICE_LIST_STRATEGY=strategy)
    seen = seen_in(cluster.run(pod("strategy", "sh", "-c", LOOK, gpus=1, runtime=STRATEGIES[strategy])))
    expect_one_gpu(bed, seen)
    if strategy.startswith("cdi"):
        expect_whole_specification(bed)


def expect_whole_specification(bed: Bed) -> None:
    """Assert that the plugin's own specification, made through the machine's links, names the same libraries as ours.

    Except those that nvidia-ctk, whose code the plugin uses, leaves out and the agent adds.
    """
    found = json.loads(bed.node.run("cat", PLUGIN_SPEC).stdout)
    libraries = library_names(found)
    assert any(name.startswith("libcuda.so.") for name in libraries)
    added = bed.conditions()["CDISpecCurrent"]["message"].partition("leaves out: ")[2]
    assert not {name for name in library_names(bed.node.spec()) - libraries if name not in added}
    nodes = {node["path"] for device in found["devices"] for node in device["containerEdits"]["deviceNodes"]}
    nodes |= {node["path"] for node in found["containerEdits"]["deviceNodes"]}
    assert {*GPUS, "/dev/nvidiactl", "/dev/nvidia-uvm"} <= nodes


def library_names(specification: dict[str, Any]) -> set[str]:
    """Return the file names of the shared libraries that a CDI specification mounts."""
    names = (mount["hostPath"].rpartition("/")[2] for mount in specification["containerEdits"]["mounts"])
    return {name for name in names if ".so." in name}


@pytest.mark.scenario("000")
def test_pods_of_a_gaming_node(cluster: Cluster, versions: dict[str, str]) -> None:
    """With NVIDIA's default strategy, the first pod gets one GPU; the second names all, and finds graphics."""
    cluster.deploy_plugin(NUMBER, DEVICE_LIST_STRATEGY="envvar")
    cluster.apply("gpu-test", "gpu-opengl-test")
    table = cluster.finished("gpu-test")
    assert f"NVIDIA-SMI {versions['NVIDIA driver']}" in table
    assert table.count("NVIDIA H100") == 1
    graphics = cluster.finished("gpu-opengl-test")
    assert graphics.startswith("vendor nvidia\n")
    for library in ("libGLX_nvidia.so.0", "libEGL_nvidia.so.0"):
        assert f"{library} (libc6,x86-64) => " in graphics
    assert "renderD128" in graphics
    # A pod's own request overrides what was allocated to it.
    assert graphics.count("UUID: GPU-") == NUMBER


@pytest.mark.scenario("003")
def test_a_node_kept_for_gpu_pods(cluster: Cluster) -> None:
    """A taint, which the node itself may not set, admits only a pod that tolerates it, in a privileged namespace."""
    taint = ("taint", "node", MACHINE, "gpu=true:NoSchedule")
    with pytest.raises(CommandError, match="is not allowed to modify taints"):
        cluster.control_plane.kubectl(*taint, user=node_user(MACHINE))
    cluster.apply("gpu-namespace")
    cluster.kubectl("--namespace=nvidia", "wait", "serviceaccount/default", "--for=create", "--timeout=60s")
    cluster.kubectl(*taint)
    try:
        cluster.apply(pod("without-toleration", "true"), "gpu-workload")
        assert len(uuids(cluster.finished("gpu-workload", namespace="nvidia"))) == NUMBER
        assert "had untolerated taint" in unscheduled(cluster, "without-toleration")
    finally:
        cluster.kubectl("taint", "node", MACHINE, "gpu-")
        cluster.kubectl("delete", "namespace", "nvidia")
    cluster.finished("without-toleration")


@pytest.mark.scenario("000")
@pytest.mark.exhaustive
def test_time_slicing_multiplies_what_is_offered(cluster: Cluster, bed: Bed) -> None:
    cluster.apply("time-slicing")
    cluster.deploy_plugin(4 * NUMBER, CONFIG_FILE="/config/time-slicing.yaml")
    expect_one_gpu(bed, seen_in(cluster.run(pod("slice", "sh", "-c", LOOK, gpus=1))))
    slices = str(4 * NUMBER)
    wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] == "True" and slices in each["message"])


def plugin_process(bed: Bed, program: str = "nvidia-device-plugin") -> str:
    """Return the plugin's process ID on the host, or ""."""
    return bed.run("pgrep", "--full", program, check=False).stdout.strip()


def kill_plugin(bed: Bed, program: str = "nvidia-device-plugin") -> str:
    process = plugin_process(bed, program)
    bed.run("kill", "-KILL", process)
    return process


@pytest.mark.exhaustive
def test_gpus_advertised_follows_the_device_plugin(cluster: Cluster, bed: Bed) -> None:
    """The plugin is killed, removed and started, then the kubelet is restarted; Ready does not change."""
    ready = bed.wait_ready()["Ready"]
    # A killed plugin leaves its socket. The kubelet restarts the plugin at once, but the second time only after 10 s.
    killed = kill_plugin(bed)
    cluster.wait("the kubelet has started the plugin again", lambda: plugin_process(bed) not in ("", killed))
    kill_plugin(bed)
    dead = wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] != "True")
    assert (dead["status"], dead["reason"]) == ("False", "DevicePluginDown")
    wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] == "True")
    cluster.delete_plugin()
    down = wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] != "True")
    assert (down["status"], down["reason"]) == ("False", "DevicePluginDown")
    cluster.deploy_plugin(NUMBER)
    wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] == "True")
    bed.node.run("systemctl", "stop", "kubelet.service")
    stopped = wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] != "True")
    assert (stopped["status"], stopped["reason"]) == ("Unknown", "KubeletDown")
    bed.node.run("systemctl", "start", "kubelet.service")
    wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] == "True")
    after = bed.conditions()["Ready"]
    assert (after["status"], after["lastTransitionTime"]) == ("True", ready["lastTransitionTime"])


def test_the_condition_on_the_node_says_ready_or_why_not(cluster: Cluster, bed: Bed) -> None:
    """The condition on the Node follows: all is well, nvidia-ctk fails, recovers; then the condition is withdrawn.

    The kubelet's identity writes Events about it, also about a single GPU.
    """

    def told() -> list[tuple[str, str, str]]:
        found = cluster.get("events", "--field-selector=source=unbounded-agent", "--sort-by=.lastTimestamp")
        return [(each["type"], each["reason"], each["message"]) for each in found["items"]]

    def on_node() -> dict[str, Any]:
        conditions = cluster.get("node", MACHINE)["status"]["conditions"]
        return next((each for each in conditions if each["type"] == "GPUReady"), {})

    def is_on_node(status: str) -> Callable[[], bool]:
        def reached() -> bool:
            ready, found = report(bed)["Ready"], on_node()
            return ready["status"] == status and all(
                found.get(key) == ready[key] for key in ("status", "reason", "message")
            )

        return reached

    configure(bed, CONFIGURATION + "node_condition = true\n")
    cluster.wait("GPUReady on the Node", is_on_node("True"))
    bed.node.shell("mount --bind /bin/false /usr/bin/nvidia-ctk && rm /etc/cdi/nvidia.yaml")
    cluster.wait("GPUReady is False on the Node", is_on_node("False"))
    described = cluster.kubectl("describe", "node", MACHINE)
    assert "nvidia-ctk" in described.partition("GPUReady")[2].partition("\n")[0]
    bed.node.run("umount", "/usr/bin/nvidia-ctk")
    cluster.wait("GPUReady is True again", is_on_node("True"))
    raise_xid(bed, 3, XID_DOUBLE_BIT_ECC)
    cluster.wait("an Event names the GPU", lambda: any(FOURTH in each[2] for each in told()))
    bed.agent("gpus", "attach", FOURTH)
    cluster.wait("an Event says that all is well", lambda: told()[-1][0] == "Normal")
    warnings = [each for each in told() if each[0] == "Warning"]
    assert [each[1] == "SomeGPUsUnusable" for each in warnings] == [False, True]
    assert "nvidia-ctk" in warnings[0][2]
    assert warnings[1][2] in cluster.kubectl("describe", "node", MACHINE).partition("Events:")[2]
    configure(bed, CONFIGURATION)
    cluster.wait("GPUReady is withdrawn", lambda: not on_node())


@pytest.fixture
def intel(cluster: Cluster, bed: Bed, record_property: Callable[[str, object], None]) -> Iterator[str]:
    """The PCI address of an Intel GPU that was plugged in; the machine also has the image of Intel's device plugin."""
    record_property("Intel GPU device plugin", intel_plugin_version())
    send_files(bed.guest, {INTEL_ARCHIVE: intel_plugin_image()}, f"/var/lib/machines/{MACHINE}")
    bed.node.run("ctr", "--namespace", "k8s.io", "images", "import", f"/{INTEL_ARCHIVE}", timeout=180)
    drm_gpus.load_drivers(bed.host)
    try:
        address = drm_gpus.plug(bed.host, PORT, drm_gpus.INTEL)
        wait_for_specs(bed, "intel", "nvidia")
        yield address
    finally:
        cluster.kubectl("--namespace=kube-system", "delete", INTEL_PLUGIN, "--ignore-not-found")
        bed.host.qemu.unplug(PORT)
        # The plugin wrote a specification for the pod's GPU, and is removed before it can clean up.
        bed.node.shell("rm -f /var/run/cdi/intel.cdi.k8s.io-* /var/lib/kubelet/device-plugins/gpu.intel.com-*")
    wait_for_specs(bed, "nvidia")


@pytest.mark.scenario("004")
@pytest.mark.exhaustive
def test_intels_device_plugin(cluster: Cluster, bed: Bed, intel: str) -> None:
    """Next to NVIDIA's plugin, it offers Intel's GPU, and a pod gets only this GPU's nodes; then it is killed."""
    before = bed.conditions()["GPUsAdvertised"]
    assert (before["status"], INTEL_RESOURCE in before["message"]) == ("True", False), before
    cluster.apply("intel-gpu-plugin")
    cluster.wait("Intel's GPU allocatable", lambda: cluster.allocatable(INTEL_RESOURCE) == 1)
    offered = f"{INTEL_RESOURCE}: 1)"
    wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] == "True" and offered in each["message"])

    own = links(bed, intel)
    nodes = bed.node.shell("ls -d /dev/nvidia* /dev/dri/card* /dev/dri/renderD*").stdout.split()
    assert set(own) < set(nodes)
    groups = [int(group) for group in bed.node.run("stat", "-c", "%g", *own).stdout.split()]
    unprivileged = pod("intel", "gpu-probe", *nodes, gpus=1, resource=INTEL_RESOURCE)
    unprivileged["spec"]["securityContext"] = {"runAsUser": USER, "runAsGroup": USER, "supplementalGroups": groups}
    found = json.loads(cluster.run(unprivileged))["open"]
    assert {path for path, result in found.items() if result == "OK"} == set(own)
    assert {result for path, result in found.items() if path not in own} == {"ENOENT"}

    # Killed and then deleted, because the kubelet would restart it. It leaves its socket.
    kill_plugin(bed, "intel_gpu_device_plugin")
    cluster.delete_plugin(INTEL_PLUGIN)
    down = wait_condition(cluster, bed, "GPUsAdvertised", lambda each: each["status"] != "True")
    assert (down["status"], down["reason"]) == ("False", "DevicePluginDown")
    assert "gpu.intel.com" in down["message"]
