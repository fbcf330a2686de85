"""A Kubernetes cluster with a real kubelet and control plane. Its one node is the simulated host's machine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from agent.host.allocation import CHECKPOINT
from integration.bed.cache import REPOSITORY, step
from integration.bed.cluster.control_plane import CLUSTER_LIMIT, ControlPlane, node_user
from integration.bed.cluster.kubernetes import RELEASE
from integration.bed.free_ports import free_ports
from integration.bed.lifetime import Lifetime
from integration.bed.machine.node import MACHINE, Node
from integration.bed.machine.pod_images import CUDA_TEST, DEVICE_PLUGIN, device_plugin_image
from integration.bed.process import Argument, CommandError, run
from integration.bed.vm.simulated_host import SimulatedHost
from integration.bed.vm.transfer import HOST_FROM_GUEST, send_files
from integration.bed.waiting import wait

# Files that an administrator adds to a node's root file system: the kubelet's unit and the pod network.
CLUSTER_FILES = Path(__file__).with_name("cluster_files")
# A kubelet that cannot set these does not start. In a machine, /proc/sys is read-only; so they are set on the host.
KERNEL_SETTINGS = b"vm.overcommit_memory = 1\nkernel.panic = 10\nkernel.panic_on_oops = 1\n"
SYSCTL = "/etc/sysctl.d/90-kubelet.conf"
# Manifests that users deploy, and those that only the tests need.
MANIFESTS = (REPOSITORY / "agent" / "manifests", Path(__file__).with_name("manifests"))
EVICTION_SIGNALS = (
    "memory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
)
PLUGIN = "daemonset/nvidia-device-plugin"
PLUGIN_LOG = ("--namespace=kube-system", PLUGIN)
RESOURCE = "nvidia.com/gpu"
SHOW = "echo; echo shown; sleep infinity"
"""The end of a pod's shell script: the pod runs, and keeps its GPUs, until it is deleted; see `Cluster.shown`."""
SHOWN = "\n\nshown"
PLUGIN_ARCHIVE = "var/lib/unbounded-agent-bed/device-plugin.tar"


def manifest(name: str) -> str:
    """Return the text of the manifest of that name. Raises FileNotFoundError if no directory has it."""
    for directory in MANIFESTS:
        if (directory / f"{name}.yaml").exists():
            return (directory / f"{name}.yaml").read_text()
    raise FileNotFoundError(f"{name}.yaml is in none of {', '.join(map(str, MANIFESTS))}")


class ClusterError(Exception):
    """A pod failed; the text has its status and log."""


class Administered(Lifetime):
    """Base class of what has a control plane, with methods for what the cluster's administrator does there."""

    control_plane: ControlPlane

    def kubectl(self, *arguments: Argument, stdin: str = "") -> str:
        """Run kubectl as the cluster's administrator and return its standard output."""
        return self.control_plane.kubectl(*arguments, stdin=stdin)

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return the object or list that `kubectl get` finds."""
        found: dict[str, Any] = json.loads(self.kubectl("get", "-o", "json", *arguments))
        return found

    def apply(self, *objects: str | dict[str, Any]) -> None:
        """Apply objects, and manifests by their names in MANIFESTS."""
        for each in objects:
            text = manifest(each) if isinstance(each, str) else json.dumps(each)
            self.kubectl("apply", "-f", "-", stdin=text)

    def wait(self, what: str, reached: Callable[[], bool]) -> None:
        """Wait until `reached()`. Raises NotReachedError with the evidence."""
        wait(what, self.control_plane.checked(reached), CLUSTER_LIMIT, self.evidence)

    def evidence(self) -> str:
        """Return the cluster's pods and nodes, and its latest events."""
        objects = self.kubectl("get", "pods,nodes", "--all-namespaces", "-o", "wide")
        events = self.kubectl("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp").splitlines()[-25:]
        return "\n".join([objects, *events])


class Cluster(Administered):
    """A cluster on `host`, whose machine and containerd run already. `release` is as in ControlPlane."""

    def __init__(self, host: SimulatedHost, release: str = RELEASE) -> None:
        self.host = host
        self.node = Node(host.guest)
        self.control_plane = ControlPlane([MACHINE], release=release)
        (self._kubelet_port,) = free_ports(1)

    def start(self) -> None:
        """Start the cluster and wait until its node is Ready."""
        self.control_plane.start()
        self.host.qemu.forward_port(self._kubelet_port)
        with step("make the machine a node of the cluster"):
            self._provision()
            self.wait("node Ready", self._node_is_ready)

    def close(self) -> None:
        """Stop the control plane. The kubelet stays until a snapshot is restored, or the virtual machine ends."""
        self.control_plane.close()
        self.host.qemu.stop_forwarding(self._kubelet_port)

    def allocatable(self, resource: str = RESOURCE) -> int:
        """Return how many of a resource the node offers to pods."""
        return int(self.get("node", MACHINE)["status"]["allocatable"].get(resource, 0))

    def devices(self) -> dict[str, dict[str, Any]]:
        """Return the devices in the newest ResourceSlices, by name."""
        slices = [each["spec"] for each in self.get("resourceslices")["items"]]
        newest = max((each["pool"]["generation"] for each in slices), default=0)
        found = [each for each in slices if each["pool"]["generation"] == newest]
        return {device["name"]: device for each in found for device in each.get("devices", [])}

    def deploy_plugin(self, gpus: int, **environment: str) -> None:
        """Deploy NVIDIA's device plugin with the users' manifest, and wait until the node offers that many GPUs.

        `environment` overrides the manifest's variables. The image is local: the virtual machine has no network.
        """
        plugin = yaml.safe_load(manifest("device-plugin"))
        (container,) = plugin["spec"]["template"]["spec"]["containers"]
        container |= {"image": DEVICE_PLUGIN, "imagePullPolicy": "Never"}
        variables = {each["name"]: each["value"] for each in container["env"]} | environment
        container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
        self.apply(plugin)
        self.wait_plugin(gpus)

    def restart_plugin(self, gpus: int) -> None:
        """Replace the device plugin's pod, and wait until the node offers that many GPUs."""
        self.kubectl("--namespace=kube-system", "rollout", "restart", PLUGIN)
        self.wait_plugin(gpus)

    def delete_plugin(self, plugin: str = PLUGIN) -> None:
        """Delete a device plugin and wait until its pod is gone."""
        self.kubectl("--namespace=kube-system", "delete", plugin, "--cascade=foreground")

    def forget_plugin(self) -> None:
        """Delete NVIDIA's device plugin and the kubelet's record of it, as `unbounded-agent kube allocation` says."""
        self.delete_plugin()
        self.node.shell(f"systemctl stop kubelet; rm -f {CHECKPOINT}; systemctl start kubelet")
        nothing = {"nvidia.com/gpu": None}
        patch = json.dumps({"status": {"capacity": nothing, "allocatable": nothing}})
        self.kubectl("patch", "node", MACHINE, "--subresource=status", "--type=merge", f"--patch={patch}")

    def plugin_log(self) -> str:
        """Return the log of the device plugin's current pod."""
        return self.kubectl("logs", *PLUGIN_LOG)

    def wait_plugin(self, gpus: int) -> None:
        """Wait until the current device plugin has registered and the node offers that many GPUs."""
        self.kubectl("--namespace=kube-system", "rollout", "status", PLUGIN)
        # The number of GPUs alone could still be that of the previous plugin.
        self.wait("the device plugin registered", lambda: "Registered device plugin" in self._log(*PLUGIN_LOG))
        self.wait(f"{gpus} GPUs allocatable", lambda: self.allocatable() == gpus)

    def run(self, pod: dict[str, Any]) -> str:
        """Run a pod to its end, delete it and return its log. Raises ClusterError if it fails."""
        name = pod["metadata"]["name"]
        self.apply(pod)
        try:
            return self.finished(name)
        finally:
            self.delete_pods(name)

    def finished(self, name: str, namespace: str = "default") -> str:
        """Wait until a pod ends by itself, and return its log. Raises ClusterError if it fails."""
        self.wait(f"pod {name} ended", lambda: self.phase(name, namespace) in ("Succeeded", "Failed"))
        log = self.kubectl(f"--namespace={namespace}", "logs", name)
        if self.phase(name, namespace) == "Failed":
            raise ClusterError(
                f"pod {name} failed: {self.get('pod', name, f'--namespace={namespace}')['status']}\n{log}"
            )
        return log

    def shown(self, *names: str) -> list[str]:
        """Wait until each pod has written an empty line and `shown`; return what each wrote before that.

        The logs of pods that do not run yet are not read: each attempt takes time from the emulated processor.
        """
        logs: dict[str, str] = {}

        def has_shown(name: str) -> bool:
            if name not in logs and (log := self._log(name)).endswith(SHOWN):
                logs[name] = log.removesuffix(SHOWN)
            return name in logs

        self.wait(f"{', '.join(names)} run", lambda: all(self.phase(name) == "Running" for name in names))
        self.wait(f"{', '.join(names)} have shown", lambda: all(has_shown(name) for name in names))
        return [logs[name] for name in names]

    def _log(self, *which: str) -> str:
        """Return a log, or nothing if it cannot be read now: the emulated kubelet may be too slow to answer."""
        try:
            return self.kubectl("logs", *which)
        except CommandError:
            return ""

    def versions(self) -> dict[str, str]:
        """Return the versions of the running parts, by name."""
        kubelet = self.get("node", MACHINE)["status"]["nodeInfo"]["kubeletVersion"]
        etcd = run([self.control_plane.binaries / "etcd", "--version"]).splitlines()[0]
        return {
            "Kubernetes": kubelet.removeprefix("v"),
            "etcd": etcd.partition(": ")[2],
            "NVIDIA device plugin": self.kubectl(
                "--namespace=kube-system", "exec", PLUGIN, "--", "nvidia-device-plugin", "--version"
            ).split()[-1],
        }

    def phase(self, name: str, namespace: str = "default") -> str:
        """Return a pod's phase: Pending, Running, Succeeded or Failed."""
        phase: str = self.get("pod", name, f"--namespace={namespace}")["status"]["phase"]
        return phase

    def delete_pods(self, *names: str) -> None:
        """Delete pods and wait until their containers have stopped."""
        self.kubectl("delete", "pod", *names)

    def evidence(self) -> str:
        """Return what Administered returns, and the ends of the journals of the kubelet and the DRA driver."""
        journals = [
            self.node.run("journalctl", f"--unit={unit}", "--no-pager", "--lines=25", check=False).stdout
            for unit in ("kubelet", "unbounded-agent-dra")
        ]
        return "\n".join([super().evidence(), *journals])

    def _provision(self) -> None:
        binaries = self.control_plane.binaries
        files: dict[str, Path | bytes] = {
            str(path.relative_to(CLUSTER_FILES)): path for path in CLUSTER_FILES.rglob("*") if path.is_file()
        }
        files |= {f"usr/local/bin/{name}": binaries / name for name in ("kubelet", "kubectl")}
        files[PLUGIN_ARCHIVE] = device_plugin_image()
        kubeconfig = self.control_plane.kubeconfig(node_user(MACHINE), HOST_FROM_GUEST)
        files["etc/kubernetes/kubelet.conf"] = kubeconfig.encode()
        files["etc/kubernetes/ca.crt"] = self.control_plane.certificate_authority.encode()
        files["etc/kubernetes/kubelet.json"] = json.dumps(self._kubelet_configuration()).encode()
        self.host.guest.write(SYSCTL, KERNEL_SETTINGS)
        self.host.guest.run(["sysctl", "--quiet", "--load", SYSCTL])
        send_files(self.host.guest, files, f"/var/lib/machines/{MACHINE}")
        self.node.run("systemctl", "enable", "--now", "kubelet.service")
        self.node.run("ctr", "--namespace", "k8s.io", "images", "import", f"/{PLUGIN_ARCHIVE}", timeout=180)

    def _kubelet_configuration(self) -> dict[str, Any]:
        """Return a KubeletConfiguration (kubelet.config.k8s.io/v1beta1)."""
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"x509": {"clientCAFile": "/etc/kubernetes/ca.crt"}, "anonymous": {"enabled": False}},
            "cgroupDriver": "systemd",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "failSwapOn": False,
            # 0% means that there is no threshold. Without one, the kubelet does not read all statistics each 10 s.
            "evictionHard": dict.fromkeys(EVICTION_SIGNALS, "0%"),
            # With the default of 10 s, the API server would learn later of changed resources.
            "nodeStatusUpdateFrequency": "5s",
            # The default is the value above, at which the kubelet would write its status even if nothing has changed.
            "nodeStatusReportFrequency": "5m",
            # QEMU forwards this port of 127.0.0.1, where the API server runs, to the kubelet.
            "port": self._kubelet_port,
        }

    def _node_is_ready(self) -> bool:
        nodes = self.get("nodes")["items"]
        return any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for node in nodes
            for condition in node["status"]["conditions"]
        )


def pod(
    name: str, *command: str, gpus: int = 0, resource: str = RESOURCE, runtime: str = "", pull: str = "Never"
) -> dict[str, Any]:
    """Return a pod of the bed's image with one container, which runs `command` once; `pull` is imagePullPolicy."""
    container: dict[str, Any] = {
        "name": "main",
        "image": CUDA_TEST,
        "imagePullPolicy": pull,
        "command": list(command),
    }
    if gpus:
        container["resources"] = {"limits": {resource: str(gpus)}}
    # No service account token: to mount one, the kubelet would start systemd-run and mount, which take long here.
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "containers": [container],
    }
    if runtime:
        spec["runtimeClassName"] = runtime
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
