"""Finds outdated pods: their containers have driver roots or device numbers that are no longer those of the handoff.

The agent only names these pods: they keep what they were created with until their owner recreates them.
"""

import json
from collections.abc import Mapping
from typing import Any

from agent.machine.context import Context
from agent.model.conditions import Condition, ConditionType
from agent.model.handoff import GrantedDevice, with_remark
from agent.model.paths import MACHINE_HOST_NVIDIA
from agent.model.text import first_of, quoted
from agent.system.files import System

BUNDLES = "/run/containerd/io.containerd.runtime.v2.task/k8s.io"
"""containerd's bundles of the CRI's running containers: `<container id>/config.json` is the OCI specification.

Since containerd 1.2, they are below the directory `state` of containerd's configuration, by default /run/containerd.
"""
NAMESPACE, POD = "io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name"
"""Annotations that containerd's CRI plugin writes (pkg/cri/annotations)."""
LONGEST_INDEX = 9
"""Digits of the largest index of a driver root."""
SHOWN = 10
"""How many pods the message names, because its length is limited; the others are counted."""


def name_outdated(context: Context, conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """Return the conditions with the pods' names added to CDISpecCurrent's message. Status and reason stay.

    A long message, which may name each node of each GPU, is shortened.
    """
    pods = outdated_pods(context)
    if not pods:
        return conditions
    described = [f"{quoted(pod)} ({', '.join(sorted(outdated))})" for pod, outdated in sorted(pods.items())]
    remark = f"; PodsOutdated (recreate them: they keep what they were made with): {first_of(described, SHOWN)}"
    return with_remark(conditions, ConditionType.CDI_SPEC_CURRENT, remark)


def outdated_pods(context: Context) -> dict[str, set[str]]:
    """Return descriptions of the driver roots and device numbers that are outdated, by the pod's `namespace/name`."""
    requests, versions = context.handoff.requests, _driver_versions(context)
    granted = {device.path: device for request in requests for device in request.devices}
    current = {request.driver_root for request in requests}
    pods: dict[str, set[str]] = {}
    for container in _containers(context).values():
        outdated = {_describe_root(root, versions) for root in container.get("roots", ()) if root not in current}
        outdated |= set(_changed_numbers(container.get("devices", {}), granted))
        if outdated:
            pods.setdefault(container["pod"], set()).update(outdated)
    return pods


def _driver_versions(context: Context) -> dict[str, Any]:
    """Return the driver versions of all driver roots that handoffs have named since the machine's boot, by path."""
    versions, requests = context.notes.load("driver-versions"), context.handoff.requests
    versions |= {request.driver_root: request.driver_version for request in requests if request.driver_root}
    context.notes.save("driver-versions", versions)
    return versions


def _describe_root(root: str, versions: Mapping[str, Any]) -> str:
    version = f" with driver {versions[root]}" if root in versions else ""
    return f"driver root {root.rpartition('/')[2]}{version}"


def _changed_numbers(devices: Mapping[str, list[int]], granted: Mapping[str, GrantedDevice]) -> list[str]:
    return [
        f"{path} as {number[0]}:{number[1]}"
        for path, number in devices.items()
        if path in granted and number != [granted[path].major, granted[path].minor]
    ]


def _containers(context: Context) -> dict[str, dict[str, Any]]:
    """Return the containers by id. Each is read only once: its OCI specification never changes while it runs."""
    system, notes = context.system, context.notes
    noted = notes.load("containers")
    names = system.entries(BUNDLES) if system.is_directory(BUNDLES) else ()
    containers = {}
    for name in names:
        known = noted.get(name)
        container = known if isinstance(known, dict) else _container(system, name)
        if container is not None:
            containers[name] = container
    notes.save("containers", containers)
    return containers


def _container(system: System, name: str) -> dict[str, Any] | None:
    """Return a container's pod, driver roots and device numbers; None if they cannot be read, as during its removal.

    The result is empty for a container without driver roots and devices.
    """
    try:
        specification = json.loads(system.read(f"{BUNDLES}/{name}/config.json"))
        annotations = specification.get("annotations") or {}
        sources = [str(mount.get("source")) for mount in specification.get("mounts") or ()]
        devices = (specification.get("linux") or {}).get("devices") or ()
        numbers = {str(device["path"]): [int(device["major"]), int(device["minor"])] for device in devices}
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return None
    inside = f"{MACHINE_HOST_NVIDIA}/"
    places = {source.removeprefix(inside).partition("/")[0] for source in sources if source.startswith(inside)}
    # A pod's hostPath may be any path there, existing or not. A driver root is a number.
    indices = {place for place in places if place.isascii() and place.isdecimal() and len(place) <= LONGEST_INDEX}
    if not numbers and not indices:
        return {}
    pod = f"{annotations.get(NAMESPACE, '?')}/{annotations.get(POD, name)}"
    return {"pod": pod, "roots": sorted(inside + index for index in indices), "devices": numbers}
