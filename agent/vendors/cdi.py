"""Reads CDI specifications, and gives them the version that most container runtimes accept. Pure.

If one is malformed, all functions except `host_paths` and `narrowed` raise DocumentError. The error names the malformed
part. `host_paths` raises it for too many paths.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from agent.model.errors import DocumentError
from agent.model.handoff import Request
from agent.model.json_document import parse_json

DEVICE_KEYS = frozenset({"name", "containerEdits"})
PATHS = 1024
"""How many paths of one specification are looked up. A whole driver has far fewer files."""


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


def few(paths: set[str]) -> set[str]:
    """Return the paths, which are looked up. A pod that can write the specification may choose slow ones."""
    if len(paths) > PATHS:
        raise DocumentError(f"it names more than {PATHS} files")
    return paths


def host_paths(spec: object) -> set[str]:
    """Return the `hostPath`s of all mounts. Malformed parts are passed over."""
    holders = [spec, *_list(spec, "devices")]
    mounts = [mount for each in holders for mount in _list(_member(each, "containerEdits"), "mounts")]
    return few({path for mount in mounts if isinstance(path := _member(mount, "hostPath"), str)})


def with_nodes(spec: object, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the specification with only the wanted nodes, and only devices that have any."""

    def narrow(edits: dict[str, Any]) -> dict[str, Any]:
        kept = [each for each in objects(edits, "deviceNodes") if wanted(each)]
        others = {key: value for key, value in edits.items() if key != "deviceNodes"}
        return others | ({"deviceNodes": kept} if kept else {})

    document = object_of(spec, "the specification")
    listed = [(name, narrow(edits)) for name, edits in devices(document)]
    return document | {
        "devices": [{"name": name, "containerEdits": edits} for name, edits in listed if "deviceNodes" in edits],
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


def lowest_version(spec: object) -> str:
    """Return the version for a specification of the agent: 0.7.0 has additionalGids, 0.5.0 has all other parts of it.

    A runtime refuses a version that it does not know. Every containerd with CDI knows 0.5.0 (specs-go/version.go of the
    Container Device Interface v1.1.0 has the version of each part). Parts that need another version are never published
    (MachineVendor.verify).
    """
    edits = [_member(each, "containerEdits") for each in (spec, *_list(spec, "devices"))]
    return "0.7.0" if any(_member(each, "additionalGids") for each in edits) else "0.5.0"


def normalised(spec: object) -> object:
    """Return the specification with the version that it needs, whatever a generator has written."""
    return spec | {"cdiVersion": lowest_version(spec)} if isinstance(spec, dict) else spec


def without_groups(spec: object) -> object:
    """Remove additionalGids from a specification, and return the rest, normalised."""

    def groupless(holder: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
        if not isinstance(edits := _member(holder, "containerEdits"), dict):
            return holder
        return holder | {"containerEdits": {key: value for key, value in edits.items() if key != "additionalGids"}}

    if not isinstance(spec, dict):
        return spec
    listed = spec.get("devices")
    devices = {"devices": [groupless(each) for each in listed]} if isinstance(listed, list) else {}
    return normalised(groupless(spec) | devices)


VERSION = re.compile(r"v?[0-9]+\.[0-9]+\.[0-9]+")
KIND = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
"""See ValidateVendorName and ValidateClassName in pkg/parser/parser.go of CDI's Go library."""
LONGEST_KIND = 256
"""Characters of the longest kind that is accepted. Real ones have some twenty."""


def device_names(text: str) -> tuple[str, ...]:
    """Return the qualified names of a specification's devices; none if it has no kind or no list of devices.

    There are none either if all runtimes skip the file because of its version or kind. Raises DocumentError if the text
    is neither JSON nor plain YAML, if two keys differ only in case, or if the text is YAML and PyYAML is missing.
    """
    try:
        document = parse_json(text)
    except ValueError:
        document = _parse_yaml(text)
    version, kind, devices = (_names_member(document, key) for key in ("cdiversion", "kind", "devices"))
    if not isinstance(kind, str) or not isinstance(devices, list):
        return ()
    # Each device's qualified name begins with the kind: a long one would take its length times the number of devices.
    if len(kind) > LONGEST_KIND:
        raise DocumentError(f"its kind has more than {LONGEST_KIND} characters", "shorten it, or remove the file")
    if not KIND.fullmatch(kind) or (isinstance(version, str) and not VERSION.fullmatch(version)):
        return ()
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
