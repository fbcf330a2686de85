"""Verifies the CDI specification that NVIDIA's device plugin writes for itself. Pure, except for `exists`.

The plugin writes the file only when the plugin starts (internal/cdi/cdi.go of k8s-device-plugin). A new driver root, a
new major number, or a new or removed GPU makes the file outdated. The file may differ from the agent's specification,
for example in its hooks, or because it has annotations (the plugin's feature flags). A difference is a problem only if
it keeps pods from their GPUs.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.errors import DocumentError
from agent.model.handoff import Request
from agent.model.text import quoted
from agent.vendors.cdi.document import all_edits, devices, object_of, objects, strings
from agent.vendors.nvidia.device_plugin import SPEC_KIND


def plugin_spec_problems(
    spec: object,
    own: object,
    request: Request,
    live: Mapping[str, DeviceNumber],
    exists: Callable[[str], bool],
) -> tuple[str, ...]:
    """Return why pods would not get GPUs through this specification. The same problem is listed only once."""
    try:
        document = object_of(spec, "the specification")
        if document.get("kind") != SPEC_KIND:
            return (f"its kind is {quoted(str(document.get('kind')))}, not {SPEC_KIND}",)
        found = [
            problem for each in all_edits(document, foreign=True) for problem in _problems(each, request, live, exists)
        ]
        found += _missing(document, own, request)
    except DocumentError as error:
        return (error.message,)
    return tuple(dict.fromkeys(found))


def _problems(
    edits: dict[str, Any], request: Request, live: Mapping[str, DeviceNumber], exists: Callable[[str], bool]
) -> Iterator[str]:
    granted = {device.path for device in request.devices}
    for node in objects(edits, "deviceNodes"):
        path = node.get("hostPath") or node.get("path")
        if not isinstance(path, str):
            yield f"device node {quoted(str(path))} is not granted to this machine"
            continue
        number = live.get(path)
        if number is None:
            what = "is not in this machine" if path in granted else "is not granted to this machine"
            yield f"device node {quoted(path)} {what}"
        # If the major is omitted, the container runtime looks up the number. If only the minor is omitted, it is 0.
        elif node.get("major") and (node["major"], node.get("minor", 0)) != (number.major, number.minor):
            specified, is_now = quoted(f"{node['major']}:{node.get('minor', 0)}"), f"{number.major}:{number.minor}"
            yield f"device node {path} is {specified} in the specification, but {is_now} in this machine"
    for key, field in (("mounts", "hostPath"), ("hooks", "path")):
        for path in sorted(strings(edits, key, field)):
            if not exists(path):
                yield f"{quoted(path)} does not exist"


def _missing(document: dict[str, Any], own: object, request: Request) -> Iterator[str]:
    """Yield a problem for each GPU that `document` lacks, but `own`, the agent's specification, has.

    If `own` is malformed, yield nothing.
    """
    try:
        own_nodes = _gpu_nodes(object_of(own, "the specification"), request)
    except DocumentError:
        return
    for path in sorted(own_nodes - _gpu_nodes(document, request)):
        yield f"it has no device with {path}"


def _gpu_nodes(document: dict[str, Any], request: Request) -> set[str]:
    gpus = {device.path for device in request.devices if device.kind == DeviceKind.GPU}
    return gpus & {
        path for _, edits in devices(document, foreign=True) for path in strings(edits, "deviceNodes", "path")
    }
