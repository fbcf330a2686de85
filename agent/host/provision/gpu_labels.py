"""Finds the labels that a Node gets for its GPUs when it registers."""

from collections.abc import Iterable

from agent.host.vendors import host_vendor
from agent.model.facts import Facts
from agent.model.goal import Grant
from agent.system.files import System


def gpu_labels(grants: Iterable[Grant], facts: Facts, system: System) -> dict[str, str]:
    """Return the labels of a Node whose machine gets these grants.

    The kubelet never changes these labels later, so they keep the versions that the driver and CUDA had when the Node
    registered.
    """
    granted = {grant.vendor for grant in grants if grant.gpus}
    labels: dict[str, str] = {}
    for each in facts.vendors:
        if each.vendor in granted:
            vendor = host_vendor(each.vendor)
            labels |= vendor.node_labels(vendor.driver_for_pods(each, system))
    return labels
