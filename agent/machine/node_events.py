"""Writes Kubernetes Events about this machine's own Node, for people: GPUReady is no longer True, or is True again.

The kubelet's identity may create and change Events, but not read them (NodeRules in Kubernetes' bootstrappolicy); so
what was said is noted. They have the form of the kubelet's own, which `kubectl describe node` finds: the namespace is
`default`, and the Node's UID is its name (nodeRef in pkg/kubelet/kubelet.go).
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from agent.model.conditions import Condition, ConditionType, Reason, Status
from agent.model.errors import AgentError
from agent.model.text import rfc3339
from agent.system.api_server import ApiClient, Credentials, NotFoundError
from agent.system.files import System
from agent.system.journal import WARNING, say
from agent.system.kubelet_identity import Kubelet

EVENTS = "/api/v1/namespaces/default/events"
HOUR = 3600.0
MOST = 12
"""How many requests are made in an hour. What is still true is said later."""
REMEMBERED = 8
"""How many Events are counted on when their reason comes again."""
MESSAGE_LIMIT = 1000


def tell(system: System, kubelet: Kubelet, ready: Sequence[str], noted: dict[str, Any]) -> dict[str, Any]:
    """Say in an Event what has changed, unless it was said. Return what the next run has to pass as `noted`.

    `ready` are status, reason and message that the Node has now; or nothing. Unknown is no news: it is no fault of a
    GPU, and the Node says it. A failure is only logged, and tried again: nothing depends on Events.
    """
    said, now = noted.get("said", []), time.time()
    status, reason, message = ready or (Status.UNKNOWN, "", "")
    is_partial = reason == Reason.SOME_GPUS_UNUSABLE
    good = status == Status.TRUE and not is_partial
    # Only this message names the GPUs; those of other reasons may change although nothing has.
    new = [] if good else [status, reason, message if is_partial else ""]
    requests = [at for at in noted.get("requests", ()) if 0 <= now - at < HOUR]
    if status == Status.UNKNOWN or new == said or len(requests) >= MOST:
        return {**noted, "requests": requests}
    noted = {**noted, "requests": [*requests, now]}
    try:
        identity = kubelet.find(ConditionType.NODE_CONDITION_SET)
        if isinstance(identity, Condition):
            return noted
        last = dict(noted.get("events", {}))
        event = {
            "type": "Normal" if good else "Warning",
            "reason": reason,
            "message": f"GPUReady is {status}: {message}"[:MESSAGE_LIMIT],
            "lastTimestamp": rfc3339(now),
        }
        client = ApiClient(Credentials(system, identity.kubeconfig))
        written = _write(client, identity.node, event, *last.pop(reason, ()))
    except (AgentError, OSError) as error:
        say(WARNING, f"cannot write an Event, and tries again: {error}")
        return noted
    return {**noted, "said": new, "events": dict([*last.items(), (reason, written)][-REMEMBERED:])}


def _write(client: ApiClient, node: str, event: dict[str, Any], name: str = "", count: int = 0) -> tuple[str, int]:
    """Count on the Event of this name, or make one. Return the Event's name and count."""
    # The API server keeps Events for an hour (--event-ttl).
    with contextlib.suppress(NotFoundError):
        if name.startswith(f"{node}."):
            client.request("PATCH", f"{EVENTS}/{name}", {**event, "count": count + 1})
            return name, count + 1
    name = f"{node}.{time.time_ns():x}"
    about = {
        "metadata": {"name": name, "namespace": "default"},
        "involvedObject": {"kind": "Node", "name": node, "uid": node},
        "source": {"component": "unbounded-agent", "host": node},
        "firstTimestamp": event["lastTimestamp"],
    }
    client.request("POST", EVENTS, {**about, **event, "count": 1})
    return name, 1
