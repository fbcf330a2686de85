"""Brings a CDI spec into the form that most container runtimes take: nothing empty, no newer than it has to be. Pure.

A runtime refuses a spec of a version that it does not know, so the lowest that has all that the spec uses is written.
Which one that is: MinimumRequiredVersion, specs-go/version.go of the Container Device Interface v1.1.0.
"""

from collections.abc import Iterator, Mapping
from typing import Any

OLDEST = "0.3.0"
EMPTY: tuple[object, ...] = (None, "", [], {})
"""What the Container Device Interface itself leaves out (`omitempty`)."""
LISTS = ("deviceNodes", "hooks", "mounts", "netDevices")
"""Of objects, in containerEdits."""


def settled(spec: object) -> object:
    """The spec without what is empty, and with the lowest version; one that has not its form is left to the verdict.

    A device without any edits keeps its empty ones: such a spec is not valid, which nothing may hide.
    """
    if not isinstance(spec, dict) or not isinstance(listed := spec.get("devices"), list):
        return spec
    if not all(isinstance(device, dict) and isinstance(device.get("name"), str) for device in listed):
        return spec
    document = {key: value for key, value in spec.items() if value not in EMPTY}
    document["devices"] = [
        device | {"containerEdits": _edits(device["containerEdits"])} if "containerEdits" in device else device
        for device in listed
    ]
    common = _edits(spec.get("containerEdits", {}))
    document.pop("containerEdits", None)
    if common not in EMPTY:
        document["containerEdits"] = common
    return document | {"cdiVersion": lowest_version(document)}


def lowest_version(spec: Mapping[str, Any]) -> str:
    """Of a spec whose devices have names."""
    edits = list(_all_edits(spec))
    rdt = [each["intelRdt"] for each in edits if isinstance(each.get("intelRdt"), dict)]
    if any(each.get("netDevices") for each in edits) or any(
        each.get("schemata") is not None or each.get("enableMonitoring") for each in rdt
    ):
        return "1.1.0"
    if rdt or any(each.get("additionalGids") for each in edits):
        return "0.7.0"
    # The class of a kind may have dots since then, its vendor always had.
    dots = "." in str(spec.get("kind", "")).partition("/")[2]
    if dots or spec.get("annotations") or any(device.get("annotations") for device in spec["devices"]):
        return "0.6.0"
    digits = any(device["name"][:1] in set("0123456789") for device in spec["devices"])
    if digits or any(node.get("hostPath") for each in edits for node in _objects(each, "deviceNodes")):
        return "0.5.0"
    return "0.4.0" if any(mount.get("type") for each in edits for mount in _objects(each, "mounts")) else OLDEST


def _edits(edits: object) -> object:
    if not isinstance(edits, dict):
        return edits
    kept = {key: [_entry(each) for each in value] if _is_list(key, value) else value for key, value in edits.items()}
    return {key: value for key, value in kept.items() if value not in EMPTY}


def _entry(entry: object) -> object:
    return {key: value for key, value in entry.items() if value not in EMPTY} if isinstance(entry, dict) else entry


def _is_list(key: str, value: object) -> bool:
    return key in LISTS and isinstance(value, list)


def _all_edits(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for holder in (spec, *spec["devices"]):
        edits = holder.get("containerEdits")
        if isinstance(edits, dict):
            yield edits


def _objects(edits: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = edits.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
