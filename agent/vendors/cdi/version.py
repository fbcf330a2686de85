"""Finds the lowest version of the CDI format that has every feature that a specification uses. Pure.

A runtime refuses a version that it does not know. The rules are those of MinimumRequiredVersion in specs-go/version.go
of the Container Device Interface v1.1.0.
"""

from collections.abc import Mapping
from typing import Any

OLDEST = "0.3.0"


def lowest_version(spec: Mapping[str, Any]) -> str:
    """Return the lowest version with every feature that the specification uses. All its devices must have names."""
    devices = spec.get("devices", [])
    edits = [each for holder in (spec, *devices) if isinstance(each := holder.get("containerEdits"), dict)]
    rdt = [each["intelRdt"] for each in edits if isinstance(each.get("intelRdt"), dict)]
    if any(each.get("netDevices") for each in edits) or any(
        each.get("schemata") is not None or each.get("enableMonitoring") for each in rdt
    ):
        return "1.1.0"
    if rdt or any(each.get("additionalGids") for each in edits):
        return "0.7.0"
    # Since 0.6.0, the class in a kind (`vendor/class`) may contain dots. The vendor could contain dots before.
    dots = "." in str(spec.get("kind", "")).partition("/")[2]
    if dots or spec.get("annotations") or any(device.get("annotations") for device in devices):
        return "0.6.0"
    digits = any(device["name"][:1] in set("0123456789") for device in devices)
    if digits or any(node.get("hostPath") for each in edits for node in _objects(each, "deviceNodes")):
        return "0.5.0"
    return "0.4.0" if any(mount.get("type") for each in edits for mount in _objects(each, "mounts")) else OLDEST


def _objects(edits: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = edits.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
