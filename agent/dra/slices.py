"""Makes ResourceSlice objects from devices, and compares them with those at the API server. Pure.

The limits are from pkg/apis/resource/validation and staging/src/k8s.io/api/resource/v1/types.go of k8s.io/kubernetes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from agent.dra.devices import Device, Taint
from agent.model.digest import sha256
from agent.model.paths import DRA_DRIVER
from agent.model.text import rfc3339
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


@dataclass(frozen=True, slots=True)
class Node:
    """The Node object that the slices belong to."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Write:
    """One request: a POST if `before` is None, a DELETE if `content` is None, otherwise a PUT."""

    name: str
    content: Object | None
    before: Object | None = None


def slice_name(node: str, index: int) -> str:
    """Return the name of the node's slice number `index`.

    A number always gives the same name. So if the answer to a creation is lost, repeating the creation makes no second
    slice.
    """
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


def is_current(
    wanted: Sequence[Object], existing: Sequence[Object], stored: Mapping[str, tuple[Object, Object]]
) -> bool:
    """Return whether the server has the wanted slices, all of one generation.

    `wanted` was made for the slices in `existing` (`make_slices`), so the first slices of both have the same names, in
    the same order. `stored` has by name, for each slice that was written, the content that was written and the content
    that the server then stored. The two may differ: the server adds times, writes quantities in another form, and drops
    fields that its version does not know.
    """
    if len({generation(each) for each in existing}) > 1 or len(wanted) != len(existing):
        return False
    for want, have in zip(wanted, existing, strict=True):
        name = want["metadata"]["name"]
        if content(have) != content(want) and stored.get(name) != (content(want), content(have)):
            return False
    return True


def writes(wanted: Sequence[Object], existing: Sequence[Object]) -> list[Write]:
    """Return the requests that turn the existing slices into the wanted ones.

    Their order does not matter: consumers ignore a pool while slices of its newest generation are missing.
    """
    before = {each["metadata"].get("name"): each for each in existing}
    result = [Write(each["metadata"]["name"], each, before.pop(each["metadata"]["name"], None)) for each in wanted]
    return [*result, *(Write(str(name), None, item) for name, item in before.items())]


def untainted(item: Object) -> bool:
    """Return whether a slice has no device with a taint."""
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
        result["capacity"] = {name: _capacity(number, device.shared) for name, number in device.capacity.items()}
    if device.shared:
        result["allowMultipleAllocations"] = True
    if device.taints:
        result["taints"] = [_taint(each) for each in device.taints]
    return result


def _capacity(number: int, shared: bool) -> Object:
    """Return a capacity of `number` bytes. A claim for a shared device gets what it requests, by default all of it."""
    value = quantity(number)
    if not shared:
        return {"value": value}
    # Without a smallest part, a claim for 0 bytes could share a GPU that another claim has as a whole.
    return {"value": value, "requestPolicy": {"default": value, "validRange": {"min": quantity(SMALLEST_PART)}}}


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


def _taint(taint: Taint) -> Object:
    result: Object = {"key": taint.key, "effect": str(taint.effect)}
    if taint.value:
        result["value"] = taint.value
    if taint.since:
        result["timeAdded"] = rfc3339(taint.since)
    return result
