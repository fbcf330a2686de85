"""Writes the status of a Node as its kubelet does."""

import json
from collections.abc import Callable
from typing import Any

from integration.bed.cluster.control_plane import ControlPlane, node_user
from integration.bed.process import CommandError

ATTEMPTS = 6
CHANGED_MEANWHILE = ("(Conflict)", "is not allowed to modify")
"""What the API server answers if others changed the Node between our read and our write.

The admission plugin NodeRestriction takes the others' change for one that we make (admitNode of
plugin/pkg/admission/noderestriction/admission.go, Kubernetes 1.36).
"""


def change_node_status(cluster: ControlPlane, node: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` change the Node's status, and write it with its kubelet's identity.

    If somebody else changes the Node in between, as the lifecycle controller does to set taints, this tries again.
    """
    path, user = f"/api/v1/nodes/{node}", node_user(node)
    for left in reversed(range(ATTEMPTS)):
        content = json.loads(cluster.kubectl("get", f"--raw={path}", user=user))
        change(content.setdefault("status", {}))
        replace = ("replace", f"--raw={path}/status", "--filename=-")
        try:
            cluster.kubectl(*replace, stdin=json.dumps(content), user=user)
            return
        except CommandError as error:
            if not left or not any(each in str(error) for each in CHANGED_MEANWHILE):
                raise
