"""Brings a CDI spec into the form that most container runtimes take: nothing empty, no newer than it has to be. Pure.

A runtime refuses a spec of a version that it does not know, so the lowest that has all that the spec uses is written.
"""

from typing import Any

from agent.vendors.cdi_version import lowest_version

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


def without_groups(spec: object) -> object:
    """The spec, which is settled, without additionalGids and with the version that this takes."""
    if not isinstance(spec, dict) or not isinstance(listed := spec.get("devices"), list):
        return spec
    return settled(_groupless(spec) | {"devices": [_groupless(device) for device in listed]})


def _groupless(holder: object) -> Any:  # noqa: ANN401 - whatever JSON holds
    """A spec or a device of it."""
    if not isinstance(holder, dict) or not isinstance(edits := holder.get("containerEdits"), dict):
        return holder
    return holder | {"containerEdits": {key: value for key, value in edits.items() if key != "additionalGids"}}


def _edits(edits: object) -> object:
    if not isinstance(edits, dict):
        return edits
    kept = {key: [_entry(each) for each in value] if _is_list(key, value) else value for key, value in edits.items()}
    return {key: value for key, value in kept.items() if value not in EMPTY}


def _entry(entry: object) -> object:
    return {key: value for key, value in entry.items() if value not in EMPTY} if isinstance(entry, dict) else entry


def _is_list(key: str, value: object) -> bool:
    return key in LISTS and isinstance(value, list)
