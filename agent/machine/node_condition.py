"""`python3 -m agent.machine.node_condition`: sets the condition GPUReady on this machine's own Node object.

unbounded-agent-node-condition.service runs it separately from the GPU setup, which must never wait for an API server.
The result is noted, and the next run of the GPU setup reports it as NodeConditionSet. The exit code is 1 only if the
result cannot be noted.
"""

import contextlib
import json
import os
import sys
import time
from typing import Any, NamedTuple

from agent.machine.notes import NODE_CONDITION, Notes, ages_in
from agent.model.conditions import Condition, ConditionType, Reason, Status, false, not_applicable, true, unknown
from agent.model.contract import SILENT_AFTER, SIZE_LIMIT, parse_host_status
from agent.model.device import FileIdentity
from agent.model.errors import AgentError, CommandError, DocumentError
from agent.model.json_document import parse_object
from agent.model.paths import CONDITIONS_NAME, MACHINE_HANDOFF_DIRECTORY, MACHINE_STATE, NODE_CONDITION_MARK, NODE_NAME
from agent.model.text import rfc3339
from agent.system.files import System
from agent.system.journal import ERROR, INFO, Ages, say, say_changes
from agent.system.kubelet_identity import Identity, Kubelet, Process
from agent.system.process import host_runner

# Writes the agent's condition to this machine's Node object, with kubectl and the kubelet's identity.


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


HOST_STATUS = f"{MACHINE_HANDOFF_DIRECTORY}/{CONDITIONS_NAME}"
HEARTBEAT = 300.0
"""Seconds after which an unchanged condition is set again, as the kubelet does with its conditions."""
NOTE = NODE_CONDITION
AGAIN_WITHIN = 60.0
"""Seconds after the program's start during which it may begin another run."""
RESTART = (
    "a kubelet registers only when it starts: run `systemctl restart kubelet` in the machine, or remove the machine"
)


class Applied(NamedTuple):
    """The last condition that the API server accepted."""

    node: str
    status: str
    reason: str
    message: str
    transition: float
    """When the status last changed, in seconds since the epoch."""
    heartbeat: float
    """When the condition was last set, in seconds since the epoch."""


class LastRun(NamedTuple):
    """The noted result of the last run."""

    at: float
    """The time of the run by CLOCK_MONOTONIC."""
    status: Status
    reason: str
    message: str


def main() -> int:
    # Programs that are started here must not depend on the current directory.
    os.chdir("/")
    try:
        run_until_current(System(host_runner))
    except (AgentError, OSError) as error:
        say(ERROR, str(error))
        return 1
    return 0


def run_until_current(system: System) -> None:
    """Call `run` until the host status does not change during a run, but start no further run after AGAIN_WITHIN.

    systemd's path unit misses changes while the service runs (systemd issues 37667 and 5770). A change after the last
    check here is handled by the timer's next run. Raises OSError.
    """
    started, published = time.monotonic(), _published(system)
    while True:
        run(system)
        before, published = published, _published(system)
        if published == before or time.monotonic() - started > AGAIN_WITHIN:
            return


def _published(system: System) -> FileIdentity | None:
    try:
        return system.identity(HOST_STATUS)
    except OSError:
        # `run` reports what keeps the host status from being read.
        return None


def run(system: System) -> None:
    """Set the condition on the Node, or remove it if it is no longer configured, and note the result.

    Raises OSError if the result cannot be noted.
    """
    notes, noted = Notes(system), {}
    # If the note cannot be read, the condition is set again.
    with contextlib.suppress(OSError):
        noted = notes.load(NOTE)
    applied, ages = _last_applied(noted), ages_in(noted.get("ages", {}))
    kubelet = Kubelet(system, _known_service(noted))
    try:
        if system.exists(HOST_STATUS):
            applied, outcome = _set_condition(system, kubelet, applied, ages)
        else:
            applied, outcome = _remove_condition(system, kubelet, applied)
    except (AgentError, OSError) as error:
        outcome = false(KIND, Reason.FAILED, str(error))
    logged = say_changes(noted.get("told", {}), (outcome,))
    service = kubelet.service._asdict() if kubelet.service else None
    kept = {
        "applied": applied._asdict() if applied else None,
        "told": logged,
        "ages": ages.observations,
        "service": service,
    }
    last_run = {"ran_at": time.monotonic(), "status": outcome.status, "reason": outcome.reason}
    notes.save(NOTE, {**kept, **last_run, "message": outcome.message})


def reported(notes: Notes) -> Condition:
    """Return NodeConditionSet with the result of the last run. Call this only if the condition is configured."""
    try:
        last = _last_run(notes.load(NOTE))
    except OSError as error:
        return unknown(KIND, Reason.NOT_TRIED, f"cannot read the result of the last run: {error}")
    if last is None or time.monotonic() - last.at > SILENT_AFTER:
        unit = "unbounded-agent-node-condition"
        return unknown(
            KIND,
            Reason.NOT_TRIED,
            f"{unit}.service has not run lately: see `systemctl status {unit}.timer` in the machine",
        )
    return Condition(KIND, last.status, last.reason, last.message)


def _set_condition(
    system: System, kubelet: Kubelet, applied: Applied | None, ages: Ages
) -> tuple[Applied | None, Condition]:
    """Set the condition on the Node if it has changed or a heartbeat is due.

    Return the condition that the agent last set on this Node (None if none is noted), and NodeConditionSet.
    """
    wanted, problem = _wanted(system, ages)
    identity = kubelet.find(KIND)
    if isinstance(identity, Condition):
        return applied, identity
    if applied and applied.node != identity.node:
        applied = None
    target = _target(identity, wanted, applied, time.time())
    if target != applied:
        failure = _claim_and_set(system, identity, target)
        if failure and failure.reason == Reason.NODE_NOT_REGISTERED and applied:
            return applied, false(KIND, Reason.NODE_DELETED, f"node {identity.node} was deleted: {RESTART}")
        if failure:
            return applied, failure
    done = true(KIND, Reason.SET, f"condition {TYPE} of node {identity.node} is {wanted.status} {wanted.reason}")
    return target, problem or done


def _wanted(system: System, ages: Ages) -> tuple[Condition, Condition | None]:
    """Return Ready for the Node, and what NodeConditionSet says if the host status cannot be read (otherwise None).

    Ready is Unknown if the host status cannot be read or is too old.
    """
    try:
        host_status = parse_host_status(system.read(HOST_STATUS, SIZE_LIMIT))
    except (DocumentError, OSError) as error:
        unreadable = false(KIND, Reason.BAD_DOCUMENT, f"{HOST_STATUS}: {error}")
        return unknown(ConditionType.READY, Reason.BAD_DOCUMENT, str(error)), unreadable
    if ages.of(HOST_STATUS, host_status.evaluated) > SILENT_AFTER:
        message = f"the host half has evaluated nothing since {rfc3339(host_status.evaluated)}: see "
        message += "`systemctl status unbounded-agent` on the host"
        return unknown(ConditionType.READY, Reason.AGENT_SILENT, message), None
    return host_status.ready, None


def _target(identity: Identity, wanted: Condition, applied: Applied | None, now: float) -> Applied:
    """Return the condition that the Node should have; `applied` itself if it is the same and no heartbeat is due."""
    same_status = applied is not None and applied.status == wanted.status
    # For the first condition that is set, the time of the transition is the host half's. For later transitions, such as
    # to Unknown, it is the time of the run that sets the condition.
    transition = applied.transition if applied and same_status else (now if applied else wanted.last_transition or now)
    new = Applied(identity.node, wanted.status, wanted.reason, wanted.message, transition, now)
    if applied and new._replace(heartbeat=applied.heartbeat) == applied and 0 <= now - applied.heartbeat < HEARTBEAT:
        return applied
    return new


def _claim_and_set(system: System, identity: Identity, target: Applied) -> Condition | None:
    """Set the condition on the Node. Return None, or NodeConditionSet with the reason why that failed."""
    if _recorded_node(system) != identity.node:
        # The Node is recorded before its condition is first set, and on disk: the condition outlives a machine's boot.
        system.write(NODE_CONDITION_MARK, f"{identity.node}\n".encode(), 0o600)
    condition = {
        "type": TYPE,
        "status": target.status,
        "reason": target.reason,
        "message": target.message,
        "lastHeartbeatTime": rfc3339(target.heartbeat),
        "lastTransitionTime": rfc3339(target.transition),
    }
    return change_condition(system, identity, condition)


def _remove_condition(system: System, kubelet: Kubelet, applied: Applied | None) -> tuple[Applied | None, Condition]:
    """Remove the agent's condition from the Node, if the Node is recorded as having it.

    If the recorded Node is not this kubelet's, its condition stays, because this kubelet may not change it; only the
    record is removed. Return two values: `applied`, or None if the record is gone; and NodeConditionSet.
    """
    done = not_applicable(KIND, "the Node has no condition of this agent, and none is configured")
    recorded = _recorded_node(system)
    if recorded is None:
        return None, done
    identity = kubelet.find(KIND)
    if isinstance(identity, Condition):
        return applied, identity
    if identity.node == recorded:
        failure = change_condition(system, identity, None)
        # If the Node does not exist, its condition does not either.
        if failure and failure.reason != Reason.NODE_NOT_REGISTERED:
            return applied, failure
    else:
        why = f"this machine's kubelet is now that of node {identity.node}, and may not change another node"
        say(INFO, f"node {recorded} keeps its condition {TYPE}: {why}")
    system.remove(NODE_CONDITION_MARK)
    return None, done


def _recorded_node(system: System) -> str | None:
    """Return the name of the Node that is recorded as having the agent's condition; None without a record."""
    try:
        return system.read_text(NODE_CONDITION_MARK).strip()
    except FileNotFoundError:
        return None


def _last_applied(noted: dict[str, Any]) -> Applied | None:
    return Applied(**applied) if (applied := noted.get("applied")) else None


def _known_service(noted: dict[str, Any]) -> Process | None:
    return Process(**service) if (service := noted.get("service")) else None


def _last_run(noted: dict[str, Any]) -> LastRun | None:
    try:
        return LastRun(float(noted["ran_at"]), Status(noted["status"]), str(noted["reason"]), str(noted["message"]))
    except (KeyError, TypeError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
