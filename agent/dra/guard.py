"""Finds out whether a device plugin offers GPUs on this node. Pure.

Device plugin and Dynamic Resource Allocation know nothing of each other: both at once give one GPU to two pods. So
nothing of a vendor is offered while the node's status has a resource of its device plugin that is not zero. Zero may
stay there: the kubelet never removes the resource of a plugin that is gone.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

STEPS = (
    "one GPU would go to two pods: remove the device plugin from this node, and see "
    "`unbounded-agent kube allocation dra` for the steps"
)


def plugin_resources(node: Mapping[str, Any], prefix: str, harmless: Sequence[str] = ()) -> dict[str, str]:
    """Return the resources with this prefix of which the Node object has any, with their counts."""
    found = {}
    for key in ("capacity", "allocatable"):
        for name, count in _object(_object(node.get("status")).get(key)).items():
            offered = name.startswith(prefix) and not any(fnmatch.fnmatchcase(name, each) for each in harmless)
            # While a plugin is down, its allocatable count is zero although pods still have its GPUs.
            if offered and not is_zero(str(count)):
                found[name] = str(count)
    return dict(sorted(found.items()))


def is_zero(count: str) -> bool:
    """Return whether a quantity such as `0`, `0k` or `8` is zero. Any digit but zero makes it something else."""
    return not any(each in "123456789" for each in count)


def in_words(resources: Mapping[str, str]) -> str:
    """Return the reason why nothing is offered, with what to do."""
    listed = ", ".join(f"{name}: {count}" for name, count in resources.items())
    return f"the node's status offers {listed} by a device plugin; {STEPS}"


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
