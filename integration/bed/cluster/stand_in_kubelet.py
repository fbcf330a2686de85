"""A stand-in for a node's kubelet: it writes the Node, and calls the DRA driver on the driver's socket. It runs no pod.

For the API server, it is the node's kubelet, with a client certificate.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from agent.dra.kubelet import SERVICE
from integration.bed.cluster.control_plane import CERTIFICATE_FILES, ControlPlane, node_user
from integration.bed.cluster.node_status import change_node_status
from integration.bed.machine.kubelet_relay import RELAY
from integration.bed.waiting import wait
from tests.fakes.dra_machine import DraMachine
from tests.fakes.kubelet_api import make, read

SECONDS = 240.0
"""The longest time that a test waits. It usually takes seconds, but more while the computer does other work."""
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
ROOM = {"cpu": "64", "memory": "64Gi", "pods": "110"}
CALL_LIMIT = 60.0


def until(what: str, holds: Callable[[], object]) -> None:
    """Wait until `holds()` is true."""
    wait(what, holds, SECONDS)


def listed(cluster: ControlPlane, kind: str) -> list[dict[str, Any]]:
    """Return the objects of a kind in all namespaces."""
    found: list[dict[str, Any]] = json.loads(cluster.kubectl("get", kind, "--all-namespaces", "--output=json"))["items"]
    return found


class StandInKubelet:
    """The kubelet of one node."""

    def __init__(self, cluster: ControlPlane, node: str) -> None:
        self._cluster, self._node, self._user = cluster, node, node_user(node)

    def create_node(self, resources: dict[str, str] = ROOM) -> None:
        """Create the Node object, which is ready and has these resources."""
        made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self._node}}
        self._cluster.kubectl("create", "--filename=-", stdin=json.dumps(made), user=self._user)
        self.set_resources(resources)

    def set_resources(self, resources: dict[str, str]) -> None:
        """Replace the status of the Node: it is ready and has these resources."""
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
        status = {"capacity": resources, "allocatable": resources, "conditions": [ready]}

        def change(current: dict[str, Any]) -> None:
            current.clear()
            current.update(status)

        change_node_status(self._cluster, self._node, change)

    def wipe(self) -> None:
        """Remove the node's slices (wipeResourceSlices of dra_plugin_manager.go)."""
        self._cluster.kubectl("delete", f"--raw={SLICES}?fieldSelector=spec.nodeName={self._node}", user=self._user)

    def kubeconfig(self, machine: DraMachine, directory: str = "/pki") -> str:
        """Put the kubelet's certificate and key into `directory` of the machine; return a kubeconfig that uses them."""
        content: dict[str, Any] = json.loads(self._cluster.kubelet_kubeconfig(self._node))
        user = content["users"][0]["user"]
        for key, end in CERTIFICATE_FILES.items():
            place = f"{directory}/{self._node}.{end}"
            machine.put(place, Path(user[key]).read_bytes())
            user[key] = place
        return json.dumps(content)


class DriverSocket:
    """The driver's socket in a kubelet's directory. The end of a `with` statement closes it.

    It is reached through the kubelet's process (kubelet_relay). A test that is the kubelet itself uses DRIVER directly.
    """

    def __init__(self, kubelet: str, socket: str = RELAY) -> None:
        self._channel = grpc.insecure_channel(f"unix:{kubelet}/{socket}")
        self._prepare, self._unprepare = (
            self._channel.unary_unary(f"{SERVICE}/Node{verb}Resources") for verb in ("Prepare", "Unprepare")
        )

    def __enter__(self) -> "DriverSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def prepare(self, claim: dict[str, Any]) -> Any:  # noqa: ANN401 (a class of Google's library)
        """Return what the driver answers for a claim: `devices` and `error`."""
        request = make("NodePrepareResourcesRequest", claims=[_reference(claim)])
        answer = read("NodePrepareResourcesResponse", self._prepare(request, timeout=CALL_LIMIT))
        return answer.claims[claim["metadata"]["uid"]]

    def unprepare(self, claim: dict[str, Any]) -> str:
        """Let the driver unprepare a claim; return its error, or an empty string."""
        request = make("NodeUnprepareResourcesRequest", claims=[_reference(claim)])
        answer = read("NodeUnprepareResourcesResponse", self._unprepare(request, timeout=CALL_LIMIT))
        return str(answer.claims[claim["metadata"]["uid"]].error)


def prepared(driver: DriverSocket, pod: dict[str, Any], claims: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Prepare the pod's claims, and return the CDI names that each container gets.

    If a container names one request of a claim, it gets the devices of that request; if it names only the claim, it
    gets the devices of all the claim's requests. The kubelet does the same (GetResources of
    pkg/kubelet/cm/dra/manager.go).
    Raises AssertionError with the driver's error.
    """
    status = pod["status"]
    names = {each["name"]: each.get("resourceClaimName", "") for each in pod["spec"].get("resourceClaims", ())}
    names |= {each["name"]: each["resourceClaimName"] for each in status.get("resourceClaimStatuses", ())}
    extended = status.get("extendedResourceClaimStatus")
    if extended:
        names[""] = extended["resourceClaimName"]
    devices: dict[str, list[Any]] = {}
    for name, claim_name in names.items():
        (claim,) = (
            each
            for each in claims
            if (each["metadata"]["namespace"], each["metadata"]["name"]) == (pod["metadata"]["namespace"], claim_name)
        )
        answer = driver.prepare(claim)
        assert not answer.error, answer.error
        devices[name] = list(answer.devices)
    result = {}
    for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
        wanted = [(each["name"], each.get("request", "")) for each in container["resources"].get("claims", ())]
        if extended:
            mine = [each for each in extended["requestMappings"] if each["containerName"] == container["name"]]
            wanted += [("", each["requestName"]) for each in mine]
        result[container["name"]] = {
            cdi
            for name, request in wanted
            for device in devices[name]
            if not request or request in device.request_names
            for cdi in device.cdi_device_ids
        }
    return result


def _reference(claim: dict[str, Any]) -> dict[str, str]:
    return {key: claim["metadata"][key] for key in ("namespace", "uid", "name")}
