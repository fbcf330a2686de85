"""Pods whose containers were made with another driver root, or other device numbers, than what is granted now.

They keep what they were made with, and only who made them can make them anew: all that is done here is to name them.
"""

import json
from collections.abc import Mapping
from typing import Any

from agent.conditions import Condition, ConditionType
from agent.handoff import GrantedDevice, Handoff, with_remark
from agent.inside.notes import Notes
from agent.paths import MACHINE_HOST_NVIDIA
from agent.system.files import System

BUNDLES = "/run/containerd/io.containerd.runtime.v2.task/k8s.io"
"""containerd's bundles `<container id>/` of the CRI's running containers, each with its OCI specification config.json.

Below `state` of containerd's configuration, which is /run/containerd unless it is set; there since containerd 1.2.
"""
NAMESPACE, POD = "io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name"
"""Annotations that containerd's CRI plug-in writes (pkg/cri/annotations)."""
SHOWN = 10
"""Pods in the message, which has an end; the others are counted."""


def name_outdated(
    conditions: tuple[Condition, ...], system: System, notes: Notes, handoff: Handoff
) -> tuple[Condition, ...]:
    """The conditions, with the pods' names added to CDISpecCurrent's message: neither status nor reason changes.

    A long message gives way: what keeps a spec from being published names each node of each GPU.
    """
    pods = outdated_pods(system, notes, handoff)
    if not pods:
        return conditions
    shown = [f"{pod} ({', '.join(sorted(why))})" for pod, why in sorted(pods.items())[:SHOWN]]
    more = f" and {len(pods) - SHOWN} more" if len(pods) > SHOWN else ""
    remark = f"; PodsOutdated (recreate them: they keep what they were made with): {', '.join(shown)}{more}"
    return with_remark(conditions, ConditionType.CDI_SPEC_CURRENT, remark)


def outdated_pods(system: System, notes: Notes, handoff: Handoff) -> dict[str, set[str]]:
    """By `namespace/name`: the driver roots and device numbers that the pod has and the handoff has not."""
    versions = _versions(notes, handoff)
    granted = {device.path: device for request in handoff.requests for device in request.devices}
    current = {request.driver_root for request in handoff.requests}
    pods: dict[str, set[str]] = {}
    for container in _containers(system, notes).values():
        why = {_root(root, versions) for root in container.get("roots", ()) if root not in current}
        why |= set(_other_numbers(container.get("devices", {}), granted))
        if why:
            pods.setdefault(container["pod"], set()).update(why)
    return pods


def _versions(notes: Notes, handoff: Handoff) -> dict[str, Any]:
    """Driver versions by driver root, of all handoffs since the machine's boot."""
    versions = notes.load("driver-versions")
    versions |= {request.driver_root: request.driver_version for request in handoff.requests if request.driver_root}
    notes.save("driver-versions", versions)
    return versions


def _root(root: str, versions: Mapping[str, Any]) -> str:
    version = f" with driver {versions[root]}" if root in versions else ""
    return f"driver root {root.rpartition('/')[2]}{version}"


def _other_numbers(devices: Mapping[str, list[int]], granted: Mapping[str, GrantedDevice]) -> list[str]:
    return [
        f"{path} as {number[0]}:{number[1]}"
        for path, number in devices.items()
        if path in granted and number != [granted[path].major, granted[path].minor]
    ]


def _containers(system: System, notes: Notes) -> dict[str, dict[str, Any]]:
    """By id. An OCI specification never changes while its container runs, so that each is read once."""
    noted = notes.load("containers")
    names = system.entries(BUNDLES) if system.is_directory(BUNDLES) else ()
    found = {}
    for name in names:
        known = noted.get(name)
        container = known if isinstance(known, dict) else _container(system, name)
        if container is not None:
            found[name] = container
    notes.save("containers", found)
    return found


def _container(system: System, name: str) -> dict[str, Any] | None:
    """What a container has of drivers; None while it cannot be read, as it is just being made or taken away."""
    try:
        specification = json.loads(system.read(f"{BUNDLES}/{name}/config.json"))
        annotations = specification.get("annotations") or {}
        sources = [str(mount.get("source")) for mount in specification.get("mounts") or ()]
        devices = (specification.get("linux") or {}).get("devices") or ()
        numbers = {str(device["path"]): [int(device["major"]), int(device["minor"])] for device in devices}
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return None
    inside = f"{MACHINE_HOST_NVIDIA}/"
    indices = {source.removeprefix(inside).partition("/")[0] for source in sources if source.startswith(inside)}
    if not numbers and not indices:
        return {}
    pod = f"{annotations.get(NAMESPACE, '?')}/{annotations.get(POD, name)}"
    return {"pod": pod, "roots": sorted(inside + index for index in indices), "devices": numbers}
