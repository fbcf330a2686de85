"""Publishes the node's ResourceSlices. Each change gives the node's pool of devices a new generation."""

import contextlib
import secrets
import time
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
from agent.model.errors import AgentError
from agent.model.paths import DRA_DRIVER

SELECTOR = "spec.nodeName={},spec.driver=" + DRA_DRIVER
"""A node may list slices only if the selector has the node's name (authorizeResourceSlice of node_authorizer.go)."""
ATTEMPTS = 3
"""How often to try to publish if others write the slices at the same time."""
TAINTS_CHECK = 300.0
"""Seconds after which to check whether an API server that dropped taints keeps them now, as it may after an upgrade."""


@dataclass(frozen=True, slots=True)
class Published:
    """What the API server has after a pass."""

    generation: int = 0
    """The pool's generation; 0 without slices."""
    devices: tuple[str, ...] = ()
    tainted: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    """Devices that are not offered: they need a taint, and the API server does not keep taints."""
    written: bool = False
    """Whether slices had to be written in this pass."""


class Publisher:
    """Publishes one node's devices."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._stored: dict[str, tuple[Object, Object]] = {}
        """The argument `stored` of `is_current`."""
        self._keeps_taints = True
        self._checked = 0.0
        """When the API server last dropped a taint, or was last checked for that, by time.monotonic()."""
        self._newest = 0
        """The newest generation that this process has written; 0 before the first."""
        self._suffix = ""
        """The end of new slices' names; empty until a name proves to be taken, perhaps by another node."""

    def publish(self, node: Node, devices: Sequence[Device]) -> Published:
        """Make the slices offer these devices.

        Raises AgentError, such as ConflictError if somebody else keeps writing the slices.
        """
        tainted = [each for each in devices if each.taints]
        if tainted and not self._keeps_taints and time.monotonic() - self._checked >= TAINTS_CHECK:
            self._check_taints(node, tainted[0])
        published = self._publish_with_retries(node, devices)
        if self._keeps_taints or not published.written:
            return published
        # The answers to the writes have shown that the server drops taints, so claims could get failed GPUs now.
        # Publish again, which withholds these GPUs.
        return self._publish_with_retries(node, devices)

    def _check_taints(self, node: Node, device: Device) -> None:
        """Find out by a dry run whether the API server keeps a device's taints now.

        A real slice is no way to find out: if it lost its taints, claims could get the failed GPU until the slice is
        corrected.
        """
        (item,) = make_slices(node, [device], self._newest)
        item["metadata"]["generateName"] = f"{item['metadata'].pop('name')}-"
        self._checked = time.monotonic()
        # After an error, the GPU stays withheld. If the server is not reachable, publishing fails too, and says so.
        with contextlib.suppress(AgentError):
            self._keeps_taints = not untainted(self._client.request("POST", f"{COLLECTION}?dryRun=All", item))

    def _publish_with_retries(self, node: Node, devices: Sequence[Device]) -> Published:
        """Publish, and try again if others change or delete the slices at the same time."""
        for _ in range(ATTEMPTS - 1):
            try:
                return self._publish(node, devices)
            except (ConflictError, NotFoundError):
                continue
        return self._publish(node, devices)

    def _publish(self, node: Node, devices: Sequence[Device]) -> Published:
        offered = [each for each in devices if self._keeps_taints or not each.taints]
        existing = own_slices(self._client.get(COLLECTION, fieldSelector=SELECTOR.format(node.name)), node.name)
        # If somebody has deleted all slices, consumers may still have the deleted slices in their caches. New slices
        # need a higher generation than the deleted ones, so the next generation follows the newest one that this
        # process has written.
        newest = max(self._newest, *map(generation, existing)) if existing else self._newest
        wanted = make_slices(node, offered, newest, existing, self._suffix)
        current = is_current(wanted, existing, self._stored)
        if not current:
            newest += 1
            wanted = make_slices(node, offered, newest, existing, self._suffix)
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
            answer = self._create(write.content)
        else:
            version = write.before["metadata"].get("resourceVersion")
            update = {**write.content, "metadata": {**write.content["metadata"], "resourceVersion": version}}
            answer = self._client.request("PUT", f"{COLLECTION}/{write.name}", update)
        self._stored[write.name] = (content(write.content), content(answer))
        if untainted(answer) and not untainted(write.content):
            self._keeps_taints, self._checked = False, time.monotonic()

    def _create(self, item: Object) -> Object:
        """Create a slice. If its name is taken, raise ConflictError; the next attempt uses another name.

        A node can list, and so replace, only its own slices, but NodeRestriction lets it create them under any name. So
        another node may have a slice with the name that this node needs. If this node used no other name, the other
        node could keep it from offering its GPUs.
        """
        try:
            return self._client.request("POST", COLLECTION, item)
        except ConflictError:
            self._suffix = f"-{secrets.token_hex(4)}"
            raise

    def _delete(self, write: Write) -> None:
        """Delete a slice. If it no longer exists, do nothing. If it has changed meanwhile, raise ConflictError."""
        before = write.before or {"metadata": {}}
        conditions = {key: before["metadata"].get(key) for key in ("uid", "resourceVersion")}
        options = {"apiVersion": "meta.k8s.io/v1", "kind": "DeleteOptions", "preconditions": conditions}
        try:
            self._client.request("DELETE", f"{COLLECTION}/{write.name}", options)
        except NotFoundError:
            pass
        finally:
            self._stored.pop(write.name, None)
