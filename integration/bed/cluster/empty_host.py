"""A simulated host with a driver but no nspawn machine, and all that `unbounded-agent up` needs to make a node there.

The host is a virtual machine. Outside it run a Kubernetes control plane, a registry with the node's image (it has TLS
and wants a login), another registry with the pods' images, and a mirror of Kubernetes' programs.
"""

import hashlib
import shutil
import threading
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from integration.bed import debian, wheels
from integration.bed.cache import step
from integration.bed.cluster.cluster import RESOURCE, Administered, manifest, pod
from integration.bed.cluster.control_plane import ControlPlane
from integration.bed.cluster.kubernetes import KUBERNETES, MODULE
from integration.bed.drivers.host_roots import PYTHON
from integration.bed.free_ports import free_ports
from integration.bed.lifetime import Lifetime
from integration.bed.machine.machine_image import CONTAINERFILE, empty_disk, machine_image
from integration.bed.machine.node import MACHINE
from integration.bed.machine.pod_images import CUDA_TEST, DEVICE_PLUGIN, PAUSE, device_plugin_image, pod_images
from integration.bed.process import run
from integration.bed.registry import Registry, credentials
from integration.bed.run_directory import run_directory
from integration.bed.tools import pinned
from integration.bed.vm.guest import Guest
from integration.bed.vm.host_image import host_image
from integration.bed.vm.installation import install
from integration.bed.vm.simulated_host import SimulatedHost
from integration.bed.vm.transfer import HOST_FROM_GUEST

NODE = "simulated-gpu-host"
"""The host's name, which the node takes."""
TOKEN = "/etc/unbounded-agent/bootstrap-token"
CLUSTER_CA = "/etc/unbounded-agent/cluster-ca.crt"
REGISTRY_LOGIN = "/etc/unbounded-agent/registry.json"
REGISTRY_CA = "/etc/unbounded-agent/registry-ca"
PROGRAMS = ("kubelet", "kubectl")


class _Files(SimpleHTTPRequestHandler):
    """Serves a directory, without a log line for each request."""

    def log_message(self, *_: object) -> None:
        pass


class Mirror(Lifetime):
    """Serves Kubernetes' programs as https://dl.k8s.io does, but without TLS: the agent checks their digests."""

    def __init__(self, binaries: Path) -> None:
        self.version = pinned(MODULE, KUBERNETES)
        self.digests = {name: hashlib.sha256((binaries / name).read_bytes()).hexdigest() for name in PROGRAMS}
        self.directory = run_directory("kubernetes-mirror")
        place = self.directory / f"release/v{self.version}/bin/linux/amd64"
        place.mkdir(parents=True)
        for name in PROGRAMS:
            (place / name).symlink_to(binaries / name)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(self.directory)))

    @property
    def url(self) -> str:
        """Return the mirror's URL for the guest."""
        return f"http://{HOST_FROM_GUEST}:{self._server.server_port}"

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self.directory, ignore_errors=True)


class EmptyHost(Administered):
    """The host, with the agent installed and configured, and the servers around it; nodes named in `nodes` may join.

    If `running` is given, that host is used: it has the agent, and no machine. Otherwise, a new host boots.
    """

    def __init__(
        self, *nodes: str, memory_mib: int = 4096, suite: str = debian.SUITE, running: SimulatedHost | None = None
    ) -> None:
        self._nodes = nodes or (NODE,)
        self._memory_mib, self._suite, self._running = memory_mib, suite, running
        self._stack = ExitStack()
        (self.kubelet_port,) = free_ports(1)

    def start(self) -> None:
        """Start everything; `unbounded-agent up` is the next step."""
        enter = self._stack.enter_context
        # Builds come first: the virtual machine would slow them.
        image = None if self._running else host_image(wheels.dependencies(PYTHON[self._suite]), suite=self._suite)
        self.control_plane = enter(ControlPlane(self._nodes))
        self.mirror = enter(Mirror(self.control_plane.binaries))
        self.registry, self.pod_registry = enter(Registry(login=True)), enter(Registry(tls=False))
        with step("push images to the registries"):
            self.digest = self.registry.push(machine_image(), f"nodes/{CONTAINERFILE}")
            self._push_pod_images()
        self.host = self._running or enter(SimulatedHost(image, empty_disk(), memory_mib=self._memory_mib))
        self.host.qemu.forward_port(self.kubelet_port)
        with step("install and configure the host half"):
            if self._running:
                self._stack.callback(self._running.qemu.stop_forwarding, self.kubelet_port)
                self.guest.write("/etc/unbounded-agent/config.toml", self.configuration().encode())
            else:
                install(self.guest, self.configuration())
            self._write_secrets()

    def close(self) -> None:
        """Stop everything."""
        self._stack.close()

    @property
    def guest(self) -> Guest:
        return self.host.guest

    def nodes_are_ready(self) -> bool:
        """Return whether all nodes have registered and are Ready."""
        nodes = {node["metadata"]["name"]: node for node in self.get("nodes")["items"]}
        conditions = [each for node in nodes.values() for each in node["status"].get("conditions", ())]
        ready = [each for each in conditions if each["type"] == "Ready" and each["status"] == "True"]
        return set(nodes) == set(self._nodes) and len(ready) == len(nodes)

    def offer_gpus(self, gpus: int = 8) -> None:
        """Deploy NVIDIA's device plugin with the users' manifests, and wait until each node offers that many GPUs."""
        plugin = yaml.safe_load(manifest("device-plugin"))
        plugin["spec"]["template"]["spec"]["containers"][0]["image"] = DEVICE_PLUGIN
        self.apply("runtime-class", plugin)

        def offered() -> bool:
            return all(self.allocatable(node) == gpus for node in self._nodes)

        self.wait(f"each node offers {gpus} GPUs", offered)

    def allocatable(self, node: str = NODE) -> int:
        """Return how many GPUs a node offers to pods."""
        return int(self.get("node", node)["status"].get("allocatable", {}).get(RESOURCE, 0))

    def run_gpu_pod(self) -> str:
        """Run a pod with one GPU to its end and return what nvidia-smi lists in it."""
        name = "gpu-list"
        self.apply(pod(name, "nvidia-smi", "-L", gpus=1, pull="IfNotPresent"))
        self.wait(f"pod {name} ended", lambda: self.get("pod", name)["status"]["phase"] in ("Succeeded", "Failed"))
        log = self.kubectl("logs", name)
        self.kubectl("delete", "pod", name)
        return log

    def deployment_runs(self) -> bool:
        """Return whether the pod of `deployment` runs."""
        return int(self.get("deployment", "works")["status"].get("readyReplicas", 0)) == 1

    def configuration(self, machine: str = MACHINE, settings: str = "") -> str:
        """Return a configuration of the agent with one node; `settings` become the first lines of the node's table."""
        sha256 = ", ".join(f'{name} = "{digest}"' for name, digest in self.mirror.digests.items())
        return f"""[machines.{machine}.node]
{settings}
server = "https://{HOST_FROM_GUEST}:{self.control_plane.port}"
ca_file = "{CLUSTER_CA}"
bootstrap_token = "{TOKEN}"

[machines.{machine}.node.image]
repository = "docker://{HOST_FROM_GUEST}:{self.registry.port}/nodes"
credentials = "{REGISTRY_LOGIN}"
ca_directory = "{REGISTRY_CA}"

[machines.{machine}.node.binaries]
version = "{self.mirror.version}"
mirror = "{self.mirror.url}"
sha256 = {{ {sha256} }}

[machines.{machine}.node.kubelet]
configuration = {{ port = {self.kubelet_port}, nodeStatusUpdateFrequency = "2s" }}
# A kubelet with a configuration or a program that it does not accept would not start.
image_credential_providers = [{{ name = "true", match_images = ["*.private.invalid"], args = ["a"], env.B = "c" }}]
image_credential_provider_directory = "/usr/bin"

[machines.{machine}.node.containerd]
sandbox_image = "{PAUSE}"
mirrors = {{ "registry.invalid" = ["{self.pod_registry.url(HOST_FROM_GUEST)}"] }}
"""

    def push_again(self) -> str:
        """Push the machine's image by another name, and return that as a node's settings have it."""
        repository = f"nodes/{CONTAINERFILE}-next"
        self.registry.push(machine_image(), repository)
        return f"docker://{self.registry.name(repository, address=HOST_FROM_GUEST)}"

    def _write_secrets(self) -> None:
        token = self.control_plane.bootstrap_token()
        self.guest.write(TOKEN, token.encode(), 0o600)
        self.guest.write(CLUSTER_CA, self.control_plane.certificate_authority.encode())
        self.guest.write(REGISTRY_LOGIN, credentials(self.registry, HOST_FROM_GUEST), 0o600)
        self.guest.write(f"{REGISTRY_CA}/ca.crt", self.registry.authority)

    def _push_pod_images(self) -> None:
        archives = [pod_images() / "pause.tar", pod_images() / "cuda-test.tar", device_plugin_image()]
        for archive in archives:
            name = f"{archive.stem}:local"
            target = f"docker://{self.pod_registry.name(archive.stem, 'local')}"
            source = f"docker-archive:{archive}:registry.invalid/{name}"
            run(["skopeo", "copy", "--quiet", "--dest-tls-verify=false", source, target])


def pod_network() -> dict[str, Any]:
    """Return a DaemonSet that writes the pod network's settings to each node, as network plugins do."""
    conflist = (Path(__file__).parent / "cluster_files/etc/cni/net.d/10-bed.conflist").read_text()
    script = 'printf %s "$CONFLIST" >/net.d/.new && mv /net.d/.new /net.d/10-bed.conflist && exec sleep 2147483647'
    container = {
        "name": "network",
        "image": CUDA_TEST,
        "command": ["sh", "-c", script],
        "env": [{"name": "CONFLIST", "value": conflist}],
        "volumeMounts": [{"name": "net", "mountPath": "/net.d"}],
    }
    spec = {
        "hostNetwork": True,
        "terminationGracePeriodSeconds": 0,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "net", "hostPath": {"path": "/etc/cni/net.d", "type": "DirectoryOrCreate"}}],
    }
    labels = {"app": "bed-network"}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "bed-network", "namespace": "kube-system"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def deployment() -> dict[str, Any]:
    """Return a Deployment with one pod. It does not end before it is killed, after as many seconds as by default."""
    labels, lasts = {"app": "works"}, {"restartPolicy": "Always", "terminationGracePeriodSeconds": 30}
    spec = pod("works", "sleep", "2147483647", pull="IfNotPresent")["spec"] | lasts
    template = {"metadata": {"labels": labels}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "works"},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }
