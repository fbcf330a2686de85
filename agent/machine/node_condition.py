"""`python3 -m agent.machine.node_condition`: sets GPUReady, and perhaps GPUsTested, on this machine's Node; cordons it.

unbounded-agent-node-condition.service runs it separately from the GPU setup, which must never wait for an API server.
The result is noted, and the next run of the GPU setup reports it as NodeConditionSet and Report.cordon. The exit code
is 1 only if the result cannot be noted.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from agent.machine.node_cordon import settle_cordon
from agent.machine.node_events import tell
from agent.machine.notes import NODE_CONDITION, Notes, ages_in
from agent.model.conditions import Condition, ConditionType, Reason, false, not_applicable, true, unknown
from agent.model.contract import SILENT_AFTER, parse_host_status
from agent.model.device import FileIdentity
from agent.model.errors import AgentError, DocumentError
from agent.model.json_document import parse_object
from agent.model.paths import CONDITIONS_NAME, MACHINE_HANDOFF_DIRECTORY, NODE_CONDITION_MARK
from agent.model.text import rfc3339
from agent.system.api_server import ApiClient, ApiError, Credentials, NotFoundError
from agent.system.files import System
from agent.system.journal import ERROR, INFO, Ages, say, say_changes
from agent.system.kubelet_identity import Identity, Kubelet, Process
from agent.system.process import host_runner

KIND = ConditionType.NODE_CONDITION_SET
TYPE = "GPUReady"
"""The type of Ready on the Node, which also has the kubelet's conditions."""
TYPES = (TYPE, str(ConditionType.GPUS_TESTED))


def change_conditions(system: System, identity: Identity, changes: list[dict[str, str]]) -> Condition | None:
    """Change the agent's conditions on the Node.

    Returns None after a success, otherwise the machine's condition NodeConditionSet, which is False and says why.
    Raises AgentError if the kubeconfig is unusable.
    """
    if system.find_program("kubectl") is None:
        return false(KIND, Reason.NO_KUBECTL, "kubectl is not installed in this machine: install it in the image")
    # A strategic merge patch, as the kubelet sends it: the API server merges it with what others change at the same
    # time. Not server-side apply: when it removes our only condition, it also removes all conditions that have no field
    # manager.
    patch = {"status": {"conditions": changes}}
    try:
        client = ApiClient(Credentials(system, identity.kubeconfig))
        client.request("PATCH", f"/api/v1/nodes/{identity.node}/status", patch)
        return None
    except NotFoundError as error:
        message = f"the API server has no node {identity.node}: the kubelet has not registered yet"
        return false(KIND, Reason.NODE_NOT_REGISTERED, f"{message} ({error.message})")
    except ApiError as error:
        if error.unavailable:
            return false(KIND, Reason.API_UNREACHABLE, f"{identity.kubeconfig}: {error.message}")
        message = f"the API server does not let the kubelet of {identity.node} change {TYPE}: {error.message}"
        return false(KIND, Reason.REFUSED, message)


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
    """A condition as the API server last accepted it."""

    node: str
    status: str
    reason: str
    message: str
    transition: float
    """When the status last changed, in seconds since the epoch."""
    heartbeat: float
    """When the condition was last set, in seconds since the epoch."""

    def as_condition(self, kind: str) -> dict[str, str]:
        return {
            "type": kind,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "lastHeartbeatTime": rfc3339(self.heartbeat),
            "lastTransitionTime": rfc3339(self.transition),
        }


AllApplied = dict[str, Applied]
"""By the condition's type on the Node."""


def _removals(kinds: Iterable[str]) -> list[dict[str, str]]:
    return [{"$patch": "delete", "type": kind} for kind in kinds]


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
    """Set the conditions on the Node, or remove them if they are not configured, cordon it, and note the result.

    Raises OSError if the result cannot be noted.
    """
    notes, noted = Notes(system), dict[str, Any]()
    # If the note cannot be read, the condition is set again.
    with contextlib.suppress(OSError):
        noted = notes.load(NOTE)
    applied = {kind: Applied(**each) for kind, each in noted.get("conditions", {}).items()}
    kubelet = Kubelet(system, Process(**noted["service"]) if noted.get("service") else None)
    ages = ages_in(noted.get("ages", {}))
    # First: a new pod must not get a fenced GPU.
    cordon = settle_cordon(system, kubelet, ages, str(noted.get("cordon", "")))
    try:
        if _is_configured(system):
            applied, outcome = _set_condition(system, kubelet, applied, ages)
        else:
            applied, outcome = _remove_condition(system, kubelet, applied)
    except (AgentError, OSError) as error:
        outcome = false(KIND, Reason.FAILED, str(error))
    events = tell(system, kubelet, applied[TYPE][1:4] if TYPE in applied else (), noted.get("events", {}))
    kept = {
        "conditions": {kind: each._asdict() for kind, each in applied.items()},
        "told": say_changes(noted.get("told", {}), (outcome,)),
        "ages": ages.observations,
        "events": events,
        "cordon": cordon,
        "service": kubelet.service._asdict() if kubelet.service else None,
    }
    last_run = {"ran_at": time.monotonic(), "status": outcome.status, "reason": outcome.reason}
    notes.save(NOTE, {**kept, **last_run, "message": outcome.message})


def _is_configured(system: System) -> bool:
    """Return whether the host wants conditions. A document of another release may say so too."""
    try:
        return parse_object(HOST_STATUS, system.read(HOST_STATUS)).get("node_condition") is not False
    except FileNotFoundError:
        return False
    except DocumentError:
        return True


def _set_condition(system: System, kubelet: Kubelet, applied: AllApplied, ages: Ages) -> tuple[AllApplied, Condition]:
    """Set the conditions on the Node that have changed, or of which a heartbeat is due."""
    problem, others = None, dict[str, Condition]()
    try:
        host_status = parse_host_status(system.read(HOST_STATUS))
        wanted = host_status.ready
        others = {str(each.type): Condition(*each) for each in host_status.others if each.type in TYPES}
        if ages.of(HOST_STATUS, host_status.evaluated) > SILENT_AFTER:
            message = f"the host half has evaluated nothing since {rfc3339(host_status.evaluated)}: see "
            message += "`systemctl status unbounded-agent` on the host"
            wanted = unknown(ConditionType.READY, Reason.AGENT_SILENT, message)
            others = dict.fromkeys(others, wanted)
    except (DocumentError, OSError) as error:
        problem = false(KIND, Reason.BAD_DOCUMENT, f"{HOST_STATUS}: {error}")
        wanted = unknown(ConditionType.READY, Reason.BAD_DOCUMENT, str(error))
        others = {kind: wanted for kind in applied if kind != TYPE}
    identity = kubelet.find(KIND)
    if isinstance(identity, Condition):
        return applied, identity
    applied = {kind: each for kind, each in applied.items() if each.node == identity.node}
    now = time.time()
    targets = {
        kind: _target(identity, each, applied.get(kind), now) for kind, each in ({TYPE: wanted} | others).items()
    }
    if targets != applied:
        if _recorded_node(system) != identity.node:
            # The Node is recorded before its condition is first set, and on disk: the condition outlives a machine's
            # boot.
            system.write(NODE_CONDITION_MARK, f"{identity.node}\n".encode(), 0o600)
        # If nothing is noted, the Node may have conditions from before the machine's boot.
        removed = _removals(kind for kind in applied or TYPES if kind not in targets)
        changed = [each.as_condition(kind) for kind, each in targets.items() if each != applied.get(kind)]
        failure = change_conditions(system, identity, removed + changed)
        if failure and failure.reason == Reason.NODE_NOT_REGISTERED and applied:
            failure = false(KIND, Reason.NODE_DELETED, f"node {identity.node} was deleted: {RESTART}")
        if failure:
            return applied, failure
    done = true(KIND, Reason.SET, f"condition {TYPE} of node {identity.node} is {wanted.status} {wanted.reason}")
    return targets, problem or done


def _target(identity: Identity, wanted: Condition, applied: Applied | None, now: float) -> Applied:
    """Return the condition that the Node should have; `applied` itself if it is the same and no heartbeat is due."""
    # For the first condition that is set, the time of the transition is the host half's. For later transitions, such as
    # to Unknown, it is the time of the run that sets the condition.
    transition = now if applied else wanted.last_transition or now
    if applied and applied.status == wanted.status:
        transition = applied.transition
    new = Applied(identity.node, wanted.status, wanted.reason, wanted.message, transition, now)
    if applied and new._replace(heartbeat=applied.heartbeat) == applied and 0 <= now - applied.heartbeat < HEARTBEAT:
        return applied
    return new


def _remove_condition(system: System, kubelet: Kubelet, applied: AllApplied) -> tuple[AllApplied, Condition]:
    """Remove the agent's conditions from the Node, if the Node is recorded as having them.

    If the recorded Node is not this kubelet's, its conditions stay, because this kubelet may not change it; only the
    record is removed. Return two values: `applied`, which is empty if the record is gone; and NodeConditionSet.
    """
    done = not_applicable(KIND, "the Node has no condition of this agent, and none is configured")
    recorded = _recorded_node(system)
    if recorded is None:
        return {}, done
    identity = kubelet.find(KIND)
    if isinstance(identity, Condition):
        return applied, identity
    if identity.node == recorded:
        failure = change_conditions(system, identity, _removals(TYPES))
        # If the Node does not exist, its condition does not either.
        if failure and failure.reason != Reason.NODE_NOT_REGISTERED:
            return applied, failure
    else:
        why = f"this machine's kubelet is now that of node {identity.node}, and may not change another node"
        say(INFO, f"node {recorded} keeps its condition {TYPE}: {why}")
    system.remove(NODE_CONDITION_MARK)
    return {}, done


def _recorded_node(system: System) -> str | None:
    try:
        return system.read_text(NODE_CONDITION_MARK).strip()
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
