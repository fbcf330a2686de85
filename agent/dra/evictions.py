"""Evicts pods from GPUs that are being detached, where Kubernetes itself does not do so.

When a device gets a taint with the effect NoExecute, Kubernetes evicts the pods that got the device through a claim
(pkg/controller/devicetainteviction). But a pod may also have requested the device as an extended resource. The
scheduler then makes the claim, and Kubernetes 1.36 does not evict the pod (kubernetes/kubernetes#141290), so this
module does. A kubelet's identity may evict the pods of its own node (admitPodEviction in
plugin/pkg/admission/noderestriction). An eviction respects disruption budgets and grace periods.
"""

import contextlib
import logging
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from agent.dra.claims import ClaimReference, PreparedDevice
from agent.dra.inventory import Device
from agent.model.contract import Effect
from agent.model.errors import AgentError, DocumentError
from agent.model.json_document import get, objects, require_object
from agent.model.text import one_line
from agent.system.api_server import ApiError, NotFoundError

log = logging.getLogger(__name__)

EXTENDED = "resource.kubernetes.io/extended-resource-claim"
"""The annotation of a claim that the scheduler made for an extended resource (k8s.io/api/resource/v1/types.go)."""


class Pod(NamedTuple):
    """A pod that has a claim."""

    namespace: str
    name: str
    uid: str


class Evictions:
    """Evicts pods.

    Each call of the method `make` is one attempt, for all pods whose claims the kubelet has not given back yet.
    """

    def __init__(
        self, fetch: Callable[[ClaimReference], Mapping[str, Any]], send: Callable[[str, str, object], object]
    ) -> None:
        """`fetch` returns a claim as the API server has it. `send` sends a request with method, path and content.

        Both raise AgentError.
        """
        self._fetch, self._send = fetch, send
        self._logged: set[tuple[Pod, str]] = set()
        """What was last logged about each pod. The same text is not logged again."""
        self._unanswered: ClaimReference | None = None
        """The claim at which the last attempt ended, because the API server did not answer; None if every request was
        answered. The next attempt begins with the claim that follows it, and comes to this claim last."""

    def make(
        self, devices: Iterable[Device], prepared: Mapping[ClaimReference, tuple[PreparedDevice, ...]]
    ) -> tuple[Pod, ...]:
        """Ask for the eviction of pods that got a device with a NoExecute taint as an extended resource.

        Return these pods. The attempt ends at the first request that the API server does not answer: each further one
        could take many seconds too.
        """
        names = {each.name for each in devices if any(taint.effect is Effect.NO_EXECUTE for taint in each.taints)}
        held = [
            claim
            for claim, claimed in prepared.items()
            if any(each.device in names and not each.admin for each in claimed)
        ]
        first = held.index(self._unanswered) + 1 if self._unanswered in held else 0
        pods: set[Pod] = set()
        # If the API server does not answer, an ApiError ends the attempt. The error has been logged already.
        with contextlib.suppress(ApiError):
            for claim in (*held[first:], *held[:first]):
                self._unanswered = claim
                try:
                    found = pods_of(claim, self._fetch(claim))
                except AgentError as error:
                    # If the claim is gone, so is its pod. If the API server does not answer, the next attempt finds it.
                    log.info("cannot tell which pods have claim %s: %s", claim, one_line(str(error)))
                    _raise_if_unanswered(error)
                    continue
                for pod in found:
                    if pod not in pods:
                        pods.add(pod)
                        self._evict(pod)
            self._unanswered = None
        return tuple(sorted(pods))

    def _evict(self, pod: Pod) -> None:
        namespace, name = (urllib.parse.quote(each, safe="") for each in (pod.namespace, pod.name))
        metadata = {"namespace": pod.namespace, "name": pod.name}
        # The uid keeps a new pod of the same name from being evicted.
        options = {"preconditions": {"uid": pod.uid}}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options}
        try:
            self._send("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", eviction)
            self._log(pod, "is evicted: its GPU is being detached")
        except NotFoundError:
            # The pod has ended. The kubelet gives the pod's claim back a little later.
            pass
        except AgentError as error:
            self._log(pod, f"cannot be evicted yet: {one_line(str(error))}")
            _raise_if_unanswered(error)

    def _log(self, pod: Pod, what: str) -> None:
        if (pod, what) not in self._logged:
            self._logged = {each for each in self._logged if each[0] != pod} | {(pod, what)}
            log.warning("pod %s/%s %s", pod.namespace, pod.name, what)


def _raise_if_unanswered(error: AgentError) -> None:
    if isinstance(error, ApiError) and not error.status:
        raise error


def pods_of(claim: ClaimReference, document: Mapping[str, Any]) -> tuple[Pod, ...]:
    """Return the pods of a claim that the scheduler made for an extended resource; none for any other claim. Pure.

    Raises DocumentError.
    """
    where = f"claim {claim}"
    metadata = require_object(where, document.get("metadata"))
    annotations = require_object(where, metadata.get("annotations") or {})
    if metadata.get("uid") != claim.uid or annotations.get(EXTENDED) != "true":
        return ()
    status = require_object(where, document.get("status") or {})

    def consumer(where: str, item: dict[str, Any]) -> tuple[str, Pod]:
        resource, name, uid = (get(where, item, key, str) for key in ("resource", "name", "uid"))
        if not (resource and name and uid):
            raise DocumentError(f"{where}: a consumer has an empty resource, name or uid")
        return resource, Pod(claim.namespace, name, uid)

    consumers = objects(where, {"reservedFor": status.get("reservedFor") or []}, "reservedFor", consumer)
    return tuple(pod for resource, pod in consumers if resource == "pods")
