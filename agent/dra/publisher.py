"""Keeps the node's ResourceSlices at the API server as they should be, pool generation by generation."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent.dra.api_client import ApiClient
from agent.dra.api_errors import ConflictError, NotFoundError
from agent.dra.devices import Device
from agent.dra.slices import (
    COLLECTION,
    Node,
    Object,
    Write,
    content,
    generation,
    is_current,
    make_slices,
    own_slices,
    untainted,
    writes,
)
from agent.model.paths import DRA_DRIVER

SELECTOR = "spec.nodeName={},spec.driver=" + DRA_DRIVER
"""A node may list only slices with its own name in the selector (authorizeResourceSlice of node_authorizer.go)."""
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Published:
    """What the API server has now."""

    generation: int = 0
    """The pool's generation; 0 without slices."""
    devices: tuple[str, ...] = ()
    tainted: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    """Devices that should have a taint and are not offered, because the API server does not keep taints."""
    written: bool = False
    """Whether anything had to be written."""


class Publisher:
    """Publishes one node's devices."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._stored: dict[str, tuple[Object, Object]] = {}
        self._keeps_taints = True
        self._newest = 0

    def publish(self, node: Node, devices: Sequence[Device]) -> Published:
        """Make the slices those of the devices. Raises ApiError: ConflictError if somebody else keeps writing them."""
        published = self._tried_again(node, devices)
        if self._keeps_taints or not published.written:
            return published
        # It has just turned out that the server drops taints: without them, claims would get failed GPUs.
        return self._tried_again(node, devices)

    def _tried_again(self, node: Node, devices: Sequence[Device]) -> Published:
        """Publish. A wipe, or anybody else who writes at the same moment, is a reason to look again."""
        for _ in range(ATTEMPTS - 1):
            try:
                return self._publish(node, devices)
            except (ConflictError, NotFoundError):
                continue
        return self._publish(node, devices)

    def _publish(self, node: Node, devices: Sequence[Device]) -> Published:
        kept = self._keeps_taints
        offered = [each for each in devices if kept or not each.taints]
        existing = own_slices(self._client.get(COLLECTION, fieldSelector=SELECTOR.format(node.name)), node.name)
        # After a wipe the server has none, but caches may still have slices of the last one.
        newest = max(self._newest, *map(generation, existing)) if existing else self._newest
        wanted = make_slices(node, offered, newest)
        current = is_current(wanted, existing, self._stored)
        if not current:
            newest += 1
            wanted = make_slices(node, offered, newest)
            for write in writes(wanted, existing):
                self._write(write)
            self._newest = newest
        return Published(
            newest if wanted else 0,
            tuple(each.name for each in offered),
            tuple(each.name for each in offered if each.taints),
            tuple(each.name for each in devices if each not in offered),
            written=not current,
        )

    def _write(self, write: Write) -> None:
        if write.content is None:
            self._delete(write)
            return
        if write.before is None:
            answer = self._client.request("POST", COLLECTION, write.content)
        else:
            version = write.before["metadata"].get("resourceVersion")
            update = {**write.content, "metadata": {**write.content["metadata"], "resourceVersion": version}}
            answer = self._client.request("PUT", f"{COLLECTION}/{write.name}", update)
        self._stored[write.name] = (content(write.content), content(answer))
        if untainted(answer) and not untainted(write.content):
            self._keeps_taints = False

    def _delete(self, write: Write) -> None:
        """Remove a slice, unless it is gone or has changed meanwhile."""
        before = write.before or {"metadata": {}}
        conditions = {key: before["metadata"].get(key) for key in ("uid", "resourceVersion")}
        options = {"apiVersion": "meta.k8s.io/v1", "kind": "DeleteOptions", "preconditions": conditions}
        try:
            self._client.request("DELETE", f"{COLLECTION}/{write.name}", options)
        except NotFoundError:
            pass
        finally:
            self._stored.pop(write.name, None)
