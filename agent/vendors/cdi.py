"""Reads CDI specifications, and gives them the form that most container runtimes accept. Pure.

If one is malformed, all functions except `host_paths` and `narrowed` raise DocumentError. The error names the malformed
part.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from agent.model.errors import DocumentError
from agent.model.handoff import Request
from agent.model.json_document import parse_json

DEVICE_KEYS = frozenset({"name", "containerEdits"})


def devices(document: dict[str, Any], *, foreign: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the containerEdits of each device. Names must be unique.

    With `foreign`, the specification is another program's, whose devices may have further keys, such as annotations.
    """
    found = []
    for index, device in enumerate(objects(document, "devices")):
        name = device.get("name")
        if not isinstance(name, str) or (not foreign and set(device) - DEVICE_KEYS):
            raise DocumentError(
                f"devices[{index}] has no name, or has keys other than {', '.join(sorted(DEVICE_KEYS))}"
            )
        found.append((name, object_of(device.get("containerEdits"), f"device {name}: containerEdits")))
    if len({name for name, _ in found}) != len(found):
        raise DocumentError("two devices have the same name")
    return found


def all_edits(document: dict[str, Any], *, foreign: bool = False) -> list[dict[str, Any]]:
    """Return the containerEdits of the specification, and those of each device. `foreign` is as in `devices`."""
    common = object_of(document.get("containerEdits", {}), "containerEdits")
    return [common, *(edits for _, edits in devices(document, foreign=foreign))]


def host_paths(spec: object) -> tuple[str, ...]:
    """Return the `hostPath`s of all mounts. Malformed parts are passed over."""
    holders = [spec, *_list(spec, "devices")]
    mounts = [mount for each in holders for mount in _list(_member(each, "containerEdits"), "mounts")]
    return tuple(path for mount in mounts if isinstance(path := _member(mount, "hostPath"), str))


def with_nodes(spec: object, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the specification with only the wanted nodes, and only devices that have any."""

    def narrow(edits: dict[str, Any]) -> dict[str, Any]:
        return edits | {"deviceNodes": [each for each in objects(edits, "deviceNodes") if wanted(each)]}

    document = object_of(spec, "the specification")
    listed = [(name, narrow(edits)) for name, edits in devices(document)]
    return document | {
        "devices": [{"name": name, "containerEdits": edits} for name, edits in listed if edits["deviceNodes"]],
        "containerEdits": narrow(object_of(document.get("containerEdits", {}), "containerEdits")),
    }


def narrowed(spec: object, request: Request) -> object:
    """Return a published specification without the nodes that are not in the request.

    Return None if no device is left, or if the specification is malformed.
    """
    numbers = {device.path: (device.major, device.minor) for device in request.devices}

    def granted(node: dict[str, Any]) -> bool:
        # The number must match too, because containers get the number in the specification, even if the node now has
        # another number.
        path = str(node.get("path"))
        written = (node["major"], node.get("minor", 0)) if "major" in node else numbers.get(path)
        return path in numbers and written == numbers[path] and node.get("hostPath", path) == path

    try:
        remaining = with_nodes(spec, granted)
    except DocumentError:
        return None
    return remaining if remaining["devices"] else None


def _member(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, dict) else None


def _list(value: object, key: str) -> list[object]:
    return found if isinstance(found := _member(value, key), list) else []


def object_of(value: object, where: str) -> dict[str, Any]:
    """Return the value, which must be an object. `where` names the value in the error."""
    if not isinstance(value, dict):
        raise DocumentError(f"{where} is not an object")
    return value


def objects(container: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the list at `key`, all of whose items must be objects; an empty list if the key is missing."""
    return [object_of(item, f"{key}[{index}]") for index, item in enumerate(items(container, key))]


def strings(container: dict[str, Any], key: str, field: str) -> set[str]:
    """Return the strings at `field` in the objects of the list at `key`. Values of other types are left out."""
    return {value for item in objects(container, key) if isinstance(value := item.get(field), str)}


def items(container: dict[str, Any], key: str) -> list[Any]:
    """Return the list at `key`; an empty list if the key is missing."""
    value = container.get(key, [])
    if not isinstance(value, list):
        raise DocumentError(f"{key} is not a list")
    return value


OLDEST = "0.3.0"


def lowest_version(spec: Mapping[str, Any]) -> str:
    """Return the lowest version with every feature that the specification uses. All its devices must have names.

    A runtime refuses a version that it does not know. The rules are those of MinimumRequiredVersion in
    specs-go/version.go of the Container Device Interface v1.1.0.
    """
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
    if digits or any(_member(node, "hostPath") for each in edits for node in _list(each, "deviceNodes")):
        return "0.5.0"
    return "0.4.0" if any(_member(mount, "type") for each in edits for mount in _list(each, "mounts")) else OLDEST


EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values that the Go types of the Container Device Interface omit (`omitempty`)."""


def normalised(spec: object) -> object:
    """Return the specification without empty values, with the lowest version.

    If the list of devices is malformed, the specification is returned unchanged. A device without any edits, which is
    invalid, is kept. MachineVendor.verify reports both faults.
    """
    if not isinstance(spec, dict) or not isinstance(listed := spec.get("devices"), list):
        return spec
    if not all(isinstance(device, dict) and isinstance(device.get("name"), str) for device in listed):
        return spec
    document = _dense({key: value for key, value in spec.items() if key != "containerEdits"})
    document["devices"] = [
        device | {"containerEdits": _edits(device["containerEdits"])} if "containerEdits" in device else device
        for device in listed
    ]
    document |= _dense({"containerEdits": _edits(spec.get("containerEdits", {}))})
    return document | {"cdiVersion": lowest_version(document)}


def without_groups(spec: object) -> object:
    """Remove additionalGids from a specification, and return the rest, normalised. The version may become lower."""

    def groupless(holder: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
        if not isinstance(edits := _member(holder, "containerEdits"), dict):
            return holder
        return holder | {"containerEdits": {key: value for key, value in edits.items() if key != "additionalGids"}}

    if not isinstance(spec, dict) or not isinstance(listed := spec.get("devices"), list):
        return spec
    return normalised(groupless(spec) | {"devices": [groupless(device) for device in listed]})


def _edits(edits: object) -> object:
    if not isinstance(edits, dict):
        return edits
    return _dense(
        {key: [_dense(each) for each in value] if isinstance(value, list) else value for key, value in edits.items()}
    )


def _dense(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return an object without its empty members, and any other value as it is."""
    return {key: each for key, each in value.items() if each not in EMPTY} if isinstance(value, dict) else value


LONGEST_KIND = 256
"""Characters of the longest kind that is accepted. Real ones have some twenty."""


def device_names(text: str) -> tuple[str, ...]:
    """Return the qualified names of a specification's devices; none if it has no kind or no list of devices.

    Raises DocumentError if the text is neither JSON nor plain YAML, if two keys differ only in case, or if the text is
    YAML and PyYAML is missing.
    """
    try:
        document = parse_json(text)
    except ValueError:
        document = _parse_yaml(text)
    kind, devices = (_names_member(document, key) for key in ("kind", "devices"))
    if not isinstance(kind, str) or not isinstance(devices, list):
        return ()
    # Each device's qualified name begins with the kind: a long one would take its length times the number of devices.
    if len(kind) > LONGEST_KIND:
        raise DocumentError(f"its kind has more than {LONGEST_KIND} characters", "shorten it, or remove the file")
    names = (_names_member(each, "name") for each in devices)
    return tuple(
        f"{kind}={name if isinstance(name, str) else json.dumps(name)}" for name in names if isinstance(name, str | int)
    )


def _parse_yaml(text: str) -> object:
    # Imported here, because few machines have other specifications in YAML, and importing PyYAML takes a third of the
    # time of all other imports.
    try:
        from agent.vendors.cdi_yaml import parse
    except ImportError as error:
        raise DocumentError(
            f"not JSON, and PyYAML cannot be loaded: {error}", "install python3-yaml in this machine's image"
        ) from error
    return parse(text)


def _names_member(document: Any, key: str) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return a member; None if it is missing. The key's case is ignored, because Go's decoder in runtimes ignores it.

    Raises DocumentError if two keys differ only in case: which of them counts depends on the parser.
    """
    if not isinstance(document, dict):
        return None
    found = [each for each in document if each.casefold() == key]
    if len(found) > 1:
        raise DocumentError(f"the keys {found[0]!a} and {found[1]!a} differ only in case", "remove one, or the file")
    return document[found[0]] if found else None
