"""Writes the agent's condition to this machine's Node object, with kubectl and the kubelet's identity."""

import json

from agent.model.conditions import Condition, ConditionType, false
from agent.model.errors import CommandError, DocumentError
from agent.model.json_document import parse_object
from agent.model.paths import MACHINE_STATE, NODE_NAME
from agent.model.reasons import Reason
from agent.system.files import System
from agent.system.kubelet_identity import Identity

KIND = ConditionType.NODE_CONDITION_SET
TYPE = "GPUReady"
"""The condition's type on the Node, which also has the kubelet's conditions."""
KUBECTL_LIMIT = 15
"""Seconds for one run of kubectl, which makes one request to the API server."""
NODE = f"{MACHINE_STATE}/{NODE_NAME}"
ATTEMPTS = 6
"""How many times to try to change the Node if others change it at the same time."""
CHANGED_MEANWHILE = (
    "(Conflict)",
    "is not allowed to modify taints",
    "is not allowed to modify ownerReferences",
    "is not allowed to modify labels",
)
"""What the API server answers if others changed the Node between our read and our write.

The admission plugin NodeRestriction compares our copy with the current Node before the API server compares
resourceVersions. So it takes the others' change for one that we make (admitNode of
plugin/pkg/admission/noderestriction/admission.go, Kubernetes 1.36).
"""

UNAVAILABLE = (
    "Error from server:",
    "Error from server (InternalError):",
    "Error from server (ServerTimeout):",
    "Error from server (ServiceUnavailable):",
    "Error from server (Timeout):",
    "Error from server (TooManyRequests):",
)
"""How kubectl's message begins if the API server cannot answer now (StatusReason of apimachinery's meta/v1).

The first one is for an answer with the HTTP status 500 and no reason, as after an error of etcd.
"""
DENIED = "denied the request"
"""What the API server says of an admission webhook that refuses (ToStatusErr of k8s.io/apiserver). Such an answer may
have no reason, so it may begin like the first one in UNAVAILABLE."""


def change_condition(system: System, identity: Identity, condition: dict[str, str] | None) -> Condition | None:
    """Set the agent's condition on the Node, or remove it if `condition` is None.

    Tries again if others change the Node at the same time. Returns None after a success. After a failure, returns the
    machine's condition NodeConditionSet, which is False and says why. Raises OSError.
    """
    if system.find_program("kubectl") is None:
        return false(KIND, Reason.NO_KUBECTL, "kubectl is not installed in this machine: install it in the image")
    answer = ""
    for _ in range(ATTEMPTS):
        try:
            _change_once(system, identity, condition)
            return None
        except (CommandError, DocumentError) as error:
            answer = _answer(error)
        if not any(each in answer for each in CHANGED_MEANWHILE):
            return _failure(identity, answer)
    changed = f"others changed node {identity.node} during each of {ATTEMPTS} attempts to write {TYPE}"
    return false(KIND, Reason.REFUSED, f"{changed}: the next run tries again ({answer})")


def _change_once(system: System, identity: Identity, condition: dict[str, str] | None) -> None:
    """Read the Node, and write its status with this one condition changed.

    If others changed the Node in between, the API server refuses the write (CHANGED_MEANWHILE). Raises CommandError,
    DocumentError or OSError.
    """
    # kubectl, because it can read every kind of kubeconfig. Not `kubectl patch`: it reads nodes/status first, which the
    # Node authorizer does not let a kubelet do. Not server-side apply: when it removes our only condition, it also
    # removes all conditions that have no field manager.
    kubectl = ("kubectl", f"--kubeconfig={identity.kubeconfig}", "--request-timeout=10s")
    path = f"/api/v1/nodes/{identity.node}"
    node = parse_object(path, system.run(*kubectl, "get", f"--raw={path}", timeout=KUBECTL_LIMIT).encode())
    status = node.setdefault("status", {})
    others = [each for each in status.get("conditions", []) if each.get("type") != TYPE]
    if condition is None and len(others) == len(status.get("conditions", [])):
        return
    status["conditions"] = [*others, condition] if condition else others
    system.write(NODE, json.dumps(node).encode(), 0o600)
    system.run(*kubectl, "replace", f"--raw={path}/status", f"--filename={NODE}", timeout=KUBECTL_LIMIT)


def _answer(error: CommandError | DocumentError) -> str:
    """Return, on one line, the error that kubectl printed, or how it ended, or what is wrong with its output."""
    if not isinstance(error, CommandError):
        return error.message
    return " ".join(error.stderr.split()) or error.ended


def _failure(identity: Identity, answer: str) -> Condition:
    """Return NodeConditionSet for what kubectl printed.

    Most errors that the API server returns begin with `Error from server (REASON)`.
    """
    if "Error from server (NotFound)" in answer:
        message = f"the API server has no node {identity.node}: the kubelet has not registered yet"
        return false(KIND, Reason.NODE_NOT_REGISTERED, f"{message} ({answer})")
    unavailable = DENIED not in answer and any(each in answer for each in UNAVAILABLE)
    if not unavailable and ("Error from server" in answer or "Unauthorized" in answer):
        return false(
            KIND, Reason.REFUSED, f"the API server does not let the kubelet of {identity.node} change {TYPE}: {answer}"
        )
    return false(KIND, Reason.API_UNREACHABLE, f"kubectl --kubeconfig={identity.kubeconfig}: {answer}")
