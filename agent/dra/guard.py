"""Checks whether a device plugin offers GPUs on this node. Pure.

A device plugin and Dynamic Resource Allocation know nothing of each other, so together they would give one GPU to two
pods. Therefore no GPU of a vendor is offered while the node's status has a non-zero resource of the vendor's device
plugin. A count of zero does not matter: the kubelet keeps the resource even when the plugin is gone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agent.model.extended_resources import gives_gpus, is_zero

STEPS = "remove the device plugin from this node: on the host, `unbounded-agent kube allocation dra` prints the steps"


def plugin_resources(node: Mapping[str, Any], prefix: str, harmless: Sequence[str] = ()) -> dict[str, str]:
    """Return the Node object's resources with this prefix whose count is not zero, with their counts.

    `harmless` has patterns (fnmatch) of resources that are ignored.
    """
    resources = {}
    for key in ("capacity", "allocatable"):
        for name, count in _object(_object(node.get("status")).get(key)).items():
            # Capacity counts too: while a plugin is down, its allocatable count is zero although pods still have its
            # GPUs.
            if gives_gpus(name, prefix, harmless) and not is_zero(str(count)):
                resources[name] = str(count)
    return dict(sorted(resources.items()))


def blocked_message(resources: Mapping[str, str]) -> str:
    """Return why no GPU of the vendor is offered, and what to do next."""
    listed = ", ".join(f"{name}: {count}" for name, count in resources.items())
    effect = "so no GPU of this vendor is offered to claims, because one GPU could go to two pods"
    return f"the node's status has {listed} from a device plugin, {effect}; {STEPS}"


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
