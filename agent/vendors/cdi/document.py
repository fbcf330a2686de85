"""Reads a CDI specification.

If the specification is malformed, all functions except `host_paths` raise DocumentError. The error names the malformed
part.
"""

from typing import Any

from agent.model.errors import DocumentError

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
