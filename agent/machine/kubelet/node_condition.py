"""`python3 -m agent.machine.kubelet.node_condition`: sets the condition GPUReady on this machine's own Node object.

Started by unbounded-agent-node-condition.service, apart from the GPU setup, which must never wait for an API server.
The result is noted, and the GPU setup's next run reports it as NodeConditionSet. Exit code 1 only if it cannot be
noted.
"""

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from agent.machine.journal import ERROR, INFO, say, say_changes
from agent.machine.kubelet.identity import Identity, find_identity
from agent.machine.notes import NODE_CONDITION, Notes
from agent.model.conditions import Condition, ConditionType, Status, false, not_applicable, true, unknown
from agent.model.errors import AgentError, CommandError, DocumentError
from agent.model.host_status import SILENT_AFTER, SIZE_LIMIT, parse_judgement
from agent.model.json_document import parse_object
from agent.model.paths import CONDITIONS_NAME, MACHINE_HANDOFF_DIRECTORY, MACHINE_STATE, NODE_CONDITION_MARK
from agent.model.reasons import Reason
from agent.model.text import rfc3339
from agent.system.files import System
from agent.system.spawn_runner import MachineRunner

KIND = ConditionType.NODE_CONDITION_SET
JUDGEMENT = f"{MACHINE_HANDOFF_DIRECTORY}/{CONDITIONS_NAME}"
TYPE = "GPUReady"
"""The condition's type on the Node, next to the kubelet's own."""
HEARTBEAT = 300.0
"""Seconds after which an unchanged condition is set again, as the kubelet does with its own."""
KUBECTL_LIMIT = 15
"""Seconds for one kubectl, which makes one request to the API server."""
NOTE = NODE_CONDITION
NODE = f"{MACHINE_STATE}/node.json"
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Applied:
    """The condition that the API server accepted last."""

    node: str
    status: str
    reason: str
    message: str
    transition: float
    """Seconds since the epoch, as `heartbeat`."""
    heartbeat: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run, as it was noted."""

    at: float
    """Seconds since the epoch."""
    status: Status
    reason: str
    message: str


def main() -> int:
    os.chdir("/")
    system = System(MachineRunner())
    try:
        run(system, time.time())
    except (AgentError, OSError) as error:
        say(ERROR, str(error))
        return 1
    return 0


def run(system: System, now: float) -> None:
    """Set the condition, or remove it once the host half no longer wants it. Raises OSError."""
    notes, noted = Notes(system), {}
    # Without the note, the condition is set once more.
    with contextlib.suppress(OSError):
        noted = notes.load(NOTE)
    applied = _applied(noted)
    try:
        if system.exists(JUDGEMENT):
            applied, outcome = _set(system, applied, now)
        else:
            applied, outcome = _take_back(system, applied)
    except (AgentError, OSError) as error:
        outcome = false(KIND, Reason.FAILED, str(error))
    told = noted.get("told")
    told = say_changes(told if isinstance(told, dict) else {}, (outcome,))
    kept = {"applied": asdict(applied) if applied else None, "told": told, "at": now}
    notes.save(NOTE, {**kept, "status": outcome.status, "reason": outcome.reason, "message": outcome.message})


def reported(system: System, notes: Notes, now: float) -> Condition | None:
    """Return NodeConditionSet as the last run left it; None if the host half does not ask for it."""
    if not system.exists(JUDGEMENT):
        return None
    try:
        last = _outcome(notes.load(NOTE))
    except OSError as error:
        return unknown(KIND, Reason.NOT_TRIED, f"cannot read the result of the last run: {error}")
    if last is None or abs(now - last.at) > SILENT_AFTER:
        unit = "unbounded-agent-node-condition"
        return unknown(
            KIND, Reason.NOT_TRIED, f"{unit}.service has not run lately: see `systemctl status {unit}.timer`"
        )
    return Condition(KIND, last.status, last.reason, last.message)


def _set(system: System, applied: Applied | None, now: float) -> tuple[Applied | None, Condition]:
    wanted, problem = _wanted(system, now)
    identity = find_identity(system)
    if isinstance(identity, Condition):
        return applied, identity
    if applied and applied.node != identity.node:
        applied = None
    due = _due(identity, wanted, applied, now)
    if due != applied:
        refusal = _claim_and_set(system, identity, due)
        if refusal:
            return applied, refusal
    done = true(KIND, Reason.SET, f"condition {TYPE} of node {identity.node} is {wanted.status} {wanted.reason}")
    return due, problem or done


def _wanted(system: System, now: float) -> tuple[Condition, Condition | None]:
    """Return the machine's Ready condition, and NodeConditionSet if the host half's document is unusable."""
    try:
        verdict = parse_judgement(system.read(JUDGEMENT, SIZE_LIMIT))
    except (DocumentError, OSError) as error:
        unreadable = false(KIND, Reason.BAD_DOCUMENT, f"{JUDGEMENT}: {error}")
        return unknown(ConditionType.READY, Reason.BAD_DOCUMENT, str(error)), unreadable
    # After the clock was set back, it comes from the future.
    if abs(now - verdict.judged) > SILENT_AFTER:
        message = f"the host half has evaluated nothing since {rfc3339(verdict.judged)}: see "
        message += "`systemctl status unbounded-agent` on the host"
        return unknown(ConditionType.READY, Reason.AGENT_SILENT, message), None
    return verdict.ready, None


def _due(identity: Identity, wanted: Condition, applied: Applied | None, now: float) -> Applied:
    """Return what the Node should have; `applied` itself while that says the same and is not due again."""
    same_status = applied is not None and applied.status == wanted.status
    # The host half dates its own changes of status; the change to Unknown for its silence is dated here.
    transition = applied.transition if applied and same_status else (now if applied else wanted.last_transition or now)
    new = Applied(identity.node, wanted.status, wanted.reason, wanted.message, transition, now)
    if applied and replace(new, heartbeat=applied.heartbeat) == applied and 0 <= now - applied.heartbeat < HEARTBEAT:
        return applied
    return new


def _claim_and_set(system: System, identity: Identity, wanted: Applied) -> Condition | None:
    """Set it on the Node; return why that failed, or None."""
    if _marked_node(system) != identity.node:
        # Before the first time, and on disk: the Node's condition outlives a boot of the machine.
        system.write(NODE_CONDITION_MARK, f"{identity.node}\n".encode())
    condition = {
        "type": TYPE,
        "status": wanted.status,
        "reason": wanted.reason,
        "message": wanted.message,
        "lastHeartbeatTime": rfc3339(wanted.heartbeat),
        "lastTransitionTime": rfc3339(wanted.transition),
    }
    return _change(system, identity, condition)


def _take_back(system: System, applied: Applied | None) -> tuple[Applied | None, Condition]:
    """Remove our condition from the Node, if the Node is known to have one."""
    done = not_applicable(KIND, "the Node has no condition of this agent, and none is configured")
    marked = _marked_node(system)
    if marked is None:
        return None, done
    identity = find_identity(system)
    if isinstance(identity, Condition):
        return applied, identity
    if identity.node == marked:
        refusal = _change(system, identity, None)
        # Without the Node there is no condition either.
        if refusal and refusal.reason != Reason.NODE_NOT_REGISTERED:
            return applied, refusal
    else:
        say(INFO, f"node {marked} keeps its condition {TYPE}: this kubelet is {identity.node}, and may not change it")
    system.remove(NODE_CONDITION_MARK)
    return None, done


def _change(system: System, identity: Identity, ours: dict[str, str] | None) -> Condition | None:
    """Set our condition on the Node, or remove it if `ours` is None; return why that failed, or None."""
    if system.find_program("kubectl") is None:
        return false(KIND, Reason.NO_KUBECTL, "kubectl is not installed in this machine: install it in the image")
    refusal = None
    for _ in range(ATTEMPTS):
        try:
            _replace(system, identity, ours)
            return None
        except (CommandError, DocumentError) as error:
            refusal = _refusal(identity, error)
            if "(Conflict)" not in refusal.message:
                break
    return refusal


def _replace(system: System, identity: Identity, ours: dict[str, str] | None) -> None:
    """Read the Node, and write its status with that one difference. Raises CommandError or DocumentError.

    The API server refuses the write (Conflict), by the object's resourceVersion, if others changed it in between.
    """
    # kubectl rather than a client of ours: it knows every form of a kubeconfig, and the kubelet chooses the form. Not
    # `kubectl patch`: it reads nodes/status first, which the Node authorizer refuses a kubelet. Not server-side apply:
    # removing its only condition, it also drops all conditions without a field manager.
    kubectl = ("kubectl", f"--kubeconfig={identity.kubeconfig}", "--request-timeout=10s")
    path = f"/api/v1/nodes/{identity.node}"
    node = parse_object(path, system.run(*kubectl, "get", f"--raw={path}", timeout=KUBECTL_LIMIT).encode())
    status = node.setdefault("status", {})
    others = [each for each in status.get("conditions", []) if each.get("type") != TYPE]
    if ours is None and len(others) == len(status.get("conditions", [])):
        return
    status["conditions"] = [*others, ours] if ours else others
    system.write(NODE, json.dumps(node).encode(), 0o600)
    system.run(*kubectl, "replace", f"--raw={path}/status", f"--filename={NODE}", timeout=KUBECTL_LIMIT)


def _refusal(identity: Identity, error: CommandError | DocumentError) -> Condition:
    """Judge by kubectl's message: most answers of the API server begin with `Error from server (REASON)`."""
    words = error.message
    if isinstance(error, CommandError):
        words = " ".join(error.stderr.split()) or words.removeprefix(f"{' '.join(error.argv)}: ")
    if "Error from server (NotFound)" in words:
        message = f"the API server has no node {identity.node}: the kubelet has not registered yet"
        return false(KIND, Reason.NODE_NOT_REGISTERED, f"{message} ({words})")
    if "Error from server" in words or "Unauthorized" in words:
        return false(
            KIND, Reason.REFUSED, f"the API server does not let the kubelet of {identity.node} set it: {words}"
        )
    return false(KIND, Reason.API_UNREACHABLE, f"kubectl --kubeconfig={identity.kubeconfig}: {words}")


def _marked_node(system: System) -> str | None:
    """Return the Node that has our condition; None without the mark."""
    try:
        return system.read_text(NODE_CONDITION_MARK).strip()
    except FileNotFoundError:
        return None


def _applied(noted: dict[str, Any]) -> Applied | None:
    try:
        last = noted["applied"]
        node, status, reason, message = (str(last[key]) for key in ("node", "status", "reason", "message"))
        return Applied(node, status, reason, message, float(last["transition"]), float(last["heartbeat"]))
    except (KeyError, TypeError, ValueError):
        return None


def _outcome(noted: dict[str, Any]) -> Outcome | None:
    try:
        words = str(noted["reason"]), str(noted["message"])
        return Outcome(float(noted["at"]), Status(noted["status"]), *words)
    except (KeyError, TypeError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
