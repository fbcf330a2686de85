"""Makes ResourceSlices from devices, compares them with those at the API server, and publishes them.

Each change gives the node's pool of devices a new generation. The limits are from pkg/apis/resource/validation and
staging/src/k8s.io/api/resource/v1/types.go of k8s.io/kubernetes.
"""

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from agent.dra.inventory import Device
from agent.model.paths import DRA_DRIVER
from agent.model.text import rfc3339, sha256
from agent.system.api_server import ApiClient, ConflictError, NotFoundError
from agent.vendors.dra_vendor import Attribute, Version

API = "resource.k8s.io/v1"
COLLECTION = f"/apis/{API}/resourceslices"
DEVICES = 128
"""The largest number of devices in one slice (ResourceSliceMaxDevices)."""
DEVICES_WITH_TAINTS = 64
"""The largest number of devices in a slice if any of them has a taint (ResourceSliceMaxDevicesWithAdvancedFeatures)."""
TEXT_LIMIT = 64
"""Bytes of an attribute's longest string or version (DeviceAttributeMaxValueLength)."""
NODE_SHOWN = 180
"""A slice's name begins with at most this many characters of the node's name. It can have 253 characters in all."""
SMALLEST_PART = 1 << 20
"""Bytes of a shared device's capacity that a claim must get at least."""
BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
"""Suffixes of quantities (pkg/api/resource of apimachinery)."""

Object = dict[str, Any]


class Node(NamedTuple):
    """The Node object that the slices belong to."""

    name: str
    uid: str


def slice_name(node: str, index: int) -> str:
    """Return the name of slice number `index`. It never changes, so a repeated creation makes no second slice."""
    if len(node) > NODE_SHOWN:
        node = f"{node[:NODE_SHOWN].rstrip('-.')}-{sha256(node.encode())[:16]}"
    return f"{node}-{DRA_DRIVER}-{index}"


def make_slices(
    node: Node, devices: Sequence[Device], generation: int, existing: Sequence[Object] = (), suffix: str = ""
) -> list[Object]:
    """Return the slices that list the devices; no slice if there is no device.

    They take the names of the slices in `existing`, in the same order. If more names are needed, new names are made,
    which end with `suffix`.
    """
    # The API server allows fewer devices in a slice with a taint. As soon as one device has a taint, this lower limit
    # is used for all slices: then further taints move no device to another slice.
    size = DEVICES_WITH_TAINTS if any(each.taints for each in devices) else DEVICES
    ordered = sorted(devices, key=lambda each: each.name)
    parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    owner = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid, "controller": True}
    return [
        {
            "apiVersion": API,
            "kind": "ResourceSlice",
            "metadata": {"name": name, "ownerReferences": [owner]},
            "spec": {
                "driver": DRA_DRIVER,
                "nodeName": node.name,
                "pool": {"name": node.name, "generation": generation, "resourceSliceCount": len(parts)},
                "devices": [_device(each) for each in part],
            },
        }
        for name, part in zip(_names(node.name, existing, suffix), parts, strict=False)
    ]


def _names(node: str, existing: Sequence[Object], suffix: str) -> Iterator[str]:
    used = [str(each["metadata"].get("name")) for each in existing]
    yield from used
    yield from (name for index in count() if (name := slice_name(node, index) + suffix) not in used)


def own_slices(listed: Object, node: str) -> list[Object]:
    """Return the driver's slices of this node in a ResourceSliceList, in the order of their names."""
    items = [each for each in listed.get("items") or () if isinstance(each, dict)]
    own = [
        each
        for each in items
        if isinstance(each.get("metadata"), dict)
        and isinstance(spec := each.get("spec"), dict)
        and (spec.get("driver"), spec.get("nodeName")) == (DRA_DRIVER, node)
    ]
    # By length first: `...-10` comes after `...-9`, as make_slices numbers them.
    return sorted(own, key=lambda each: (len(str(each["metadata"].get("name"))), str(each["metadata"].get("name"))))


def content(item: Object) -> Object:
    """Return the part of a slice that the driver sets, except the pool's generation."""
    spec = {**item["spec"], "pool": {**item["spec"].get("pool", {}), "generation": 0}}
    return {"owner": item["metadata"].get("ownerReferences"), "spec": spec}


def generation(item: Object) -> int:
    """Return the generation of the slice's pool; 0 without one."""
    number = item["spec"].get("pool", {}).get("generation")
    return number if isinstance(number, int) else 0


def untainted(item: Object) -> bool:
    return not any(each.get("taints") for each in item["spec"].get("devices") or ())


def quantity(number: int) -> str:
    """Return a number of bytes as the API server writes it: with the largest suffix that leaves a whole number."""
    power = 0
    while number and number % 1024 == 0 and power + 1 < len(BINARY):
        number, power = number // 1024, power + 1
    return f"{number}{BINARY[power]}"


def _device(device: Device) -> Object:
    attributes = {name: value for name, each in device.attributes.items() if (value := _attribute(each))}
    result: Object = {"name": device.name, "attributes": attributes}
    if device.capacity:
        result["capacity"] = {name: {"value": quantity(number)} for name, number in device.capacity.items()}
    if device.shared:
        result["allowMultipleAllocations"] = True
        # A claim gets what it requests, by default all of it. Without a smallest part, a claim for 0 bytes could share
        # a GPU that another claim has as a whole.
        for each in result["capacity"].values():
            each["requestPolicy"] = {"default": each["value"], "validRange": {"min": quantity(SMALLEST_PART)}}
    if device.taints:
        result["taints"] = [
            {"key": each.key, "effect": str(each.effect)}
            | ({"value": each.value} if each.value else {})
            | ({"timeAdded": rfc3339(each.since)} if each.since else {})
            for each in device.taints
        ]
    return result


def _attribute(value: Attribute) -> Object:
    """Return the value by its type; an empty object for an empty string, or for a text that is too long."""
    match value:
        # A bool is an int too.
        case bool():
            return {"bool": value}
        case int():
            return {"int": value}
        case Version(text):
            return {"version": text} if len(text.encode()) <= TEXT_LIMIT else {}
        case _:
            return {"string": value} if 0 < len(value.encode()) <= TEXT_LIMIT else {}


SELECTOR = "spec.nodeName={},spec.driver=" + DRA_DRIVER
"""A node may list slices only if the selector has the node's name (authorizeResourceSlice of node_authorizer.go)."""
ATTEMPTS = 3
"""How often to try to publish if others write the slices at the same time."""


class Published(NamedTuple):
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
        """By name, for each slice that was written, the content that was written, and the content that the server then
        stored. They may differ: the server adds times, writes quantities in another form, and drops fields that its
        version does not know."""
        self._keeps_taints = True
        """Whether the API server has dropped no taint yet."""
        self._newest = 0
        """The newest generation that this process has written; 0 before the first."""
        self._suffix = ""
        """The end of new slices' names; empty until a name proves to be taken, perhaps by another node."""

    def publish(self, node: Node, devices: Sequence[Device]) -> Published:
        """Make the slices offer these devices, and try again if others change or delete them at the same time.

        Raises AgentError, such as ConflictError if somebody else keeps writing the slices.
        """
        attempt = 1
        while True:
            try:
                published = self._publish(node, devices)
            except (ConflictError, NotFoundError):
                attempt += 1
                if attempt > ATTEMPTS:
                    raise
                continue
            # If the answers to the writes have shown that the server drops taints, claims could get failed GPUs now.
            # Publish again, which withholds these GPUs.
            if self._keeps_taints or not published.written or not published.tainted:
                return published

    def _publish(self, node: Node, devices: Sequence[Device]) -> Published:
        offered = [each for each in devices if self._keeps_taints or not each.taints]
        existing = own_slices(self._client.get(COLLECTION, fieldSelector=SELECTOR.format(node.name)), node.name)
        # If somebody has deleted all slices, consumers may still have the deleted slices in their caches. New slices
        # need a higher generation than the deleted ones, so the next generation follows the newest one that this
        # process has written.
        newest = max(self._newest, *map(generation, existing)) if existing else self._newest
        wanted = make_slices(node, offered, newest, existing, self._suffix)
        # The first slices of both have the same names, in the same order.
        current = len({generation(each) for each in existing}) <= 1 and len(wanted) == len(existing)
        current = current and all(
            content(have) == content(want)
            or self._stored.get(want["metadata"]["name"]) == (content(want), content(have))
            for want, have in zip(wanted, existing, strict=True)
        )
        if not current:
            newest += 1
            # Their order does not matter: consumers ignore a pool while slices of its newest generation are missing.
            before = {each["metadata"].get("name"): each for each in existing}
            for item in make_slices(node, offered, newest, existing, self._suffix):
                self._write(item, before.pop(item["metadata"]["name"], None))
            for name, item in before.items():
                self._delete(str(name), item)
            self._newest = newest
        return Published(
            newest if wanted else 0,
            tuple(each.name for each in offered),
            tuple(each.name for each in offered if each.taints),
            tuple(each.name for each in devices if each not in offered),
            written=not current,
        )

    def _write(self, item: Object, before: Object | None) -> None:
        """Replace the slice `before`, or create one. If a name is taken, the next attempt uses another one.

        A node can list, and so replace, only its own slices, but NodeRestriction lets it create them under any name. So
        another node may have a slice with the name that this node needs. If this node used no other name, the other
        node could keep it from offering its GPUs.
        """
        name = item["metadata"]["name"]
        if before is None:
            try:
                answer = self._client.request("POST", COLLECTION, item)
            except ConflictError:
                self._suffix = f"-{secrets.token_hex(4)}"
                raise
        else:
            version = before["metadata"].get("resourceVersion")
            update = {**item, "metadata": {**item["metadata"], "resourceVersion": version}}
            answer = self._client.request("PUT", f"{COLLECTION}/{name}", update)
        self._stored[name] = (content(item), content(answer))
        if untainted(answer) and not untainted(item):
            self._keeps_taints = False

    def _delete(self, name: str, item: Object) -> None:
        """Delete a slice. If it no longer exists, do nothing. If it has changed meanwhile, raise ConflictError."""
        conditions = {key: item["metadata"].get(key) for key in ("uid", "resourceVersion")}
        options = {"apiVersion": "meta.k8s.io/v1", "kind": "DeleteOptions", "preconditions": conditions}
        self._stored.pop(name, None)
        with contextlib.suppress(NotFoundError):
            self._client.request("DELETE", f"{COLLECTION}/{name}", options)
