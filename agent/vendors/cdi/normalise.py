"""Gives a CDI specification the form that most container runtimes accept: no empty values, the lowest version. Pure.

A runtime refuses a version that it does not know, so the lowest one that has every feature in use is written.
"""

from typing import Any

from agent.vendors.cdi.version import lowest_version

EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values that the Go types of the Container Device Interface omit (`omitempty`)."""
LISTS = ("deviceNodes", "hooks", "mounts", "netDevices")
"""Lists of objects in containerEdits."""


def normalised(spec: object) -> object:
    """Return the specification without empty values, with the lowest version.

    If the list of devices is malformed, the specification is returned unchanged. A device without any edits, which is
    invalid, is kept. MachineVendor.verify reports both faults.
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
    """Remove additionalGids from a specification, and return the rest, normalised. The version may become lower."""
    if not isinstance(spec, dict) or not isinstance(listed := spec.get("devices"), list):
        return spec
    return normalised(_groupless(spec) | {"devices": [_groupless(device) for device in listed]})


def _groupless(holder: object) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return a specification or a device without its additionalGids."""
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
