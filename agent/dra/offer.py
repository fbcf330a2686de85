"""Makes one pass: reads the Node and what is allocatable, publishes what may be offered, returns what is offered."""

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.dra.api_client import ApiClient
from agent.dra.api_errors import ApiError, NotFoundError
from agent.dra.devices import Device
from agent.dra.guard import blocked_message, plugin_resources
from agent.dra.inventory import Inventory
from agent.dra.publisher import Published, Publisher
from agent.dra.slices import Node
from agent.dra.vendors import DRA_VENDORS, dra_vendor
from agent.model.dra_status import VendorOffer
from agent.model.errors import AgentError
from agent.model.reasons import Reason

NO_TAINTS = (
    "the API server drops device taints (feature gate DRADeviceTaints, on since Kubernetes 1.36), so unhealthy devices "
    "are not offered at all"
)


@dataclass(frozen=True, slots=True)
class Result:
    """What is offered after a pass, and why the pass failed, if it did."""

    offers: tuple[VendorOffer, ...] = ()
    published: Published = field(default_factory=Published)
    error: AgentError | None = None
    """Why the pass failed; None if it did not. If it failed, `offers` and `published` are those of the last pass that
    did not fail."""

    @property
    def reason(self) -> str:
        """The reason for a condition; empty if the pass did not fail."""
        match self.error:
            case None:
                return ""
            case NotFoundError() if "/nodes/" in self.error.message:
                return Reason.NODE_NOT_REGISTERED
            case ApiError():
                return self.error.reason
            case _:
                return Reason.FAILED


class Offer:
    """Offers one node's devices."""

    def __init__(self, node: str, client: ApiClient, inventory: Inventory) -> None:
        self._node, self._client, self._inventory = node, client, inventory
        self._publisher = Publisher(client)
        self.result = Result()
        """The result of the last pass."""

    def make(self) -> Result:
        """Make a pass, and return its result."""
        try:
            self._inventory.read_facts()
            node = self._client.get(f"/api/v1/nodes/{urllib.parse.quote(self._node, safe='')}")
            blocked = _blocked(node)
            # Do this before `publish`: while `publish` runs, other threads prepare claims, and claims may get only the
            # devices of vendors that are not blocked.
            self._inventory.allow({each.name for each in DRA_VENDORS} - blocked.keys())
            devices = self._inventory.devices()
            published = self._publisher.publish(_node(self._node, node), tuple(devices.values()))
            self.result = Result(self._offers(devices, published, blocked), published)
        except AgentError as error:
            self.result = Result(self.result.offers, self.result.published, error)
        return self.result

    def _offers(
        self, devices: Mapping[str, Device], published: Published, blocked: Mapping[str, str]
    ) -> tuple[VendorOffer, ...]:
        offers = []
        for vendor in self._inventory.vendors:
            own = [devices[name] for name in published.devices if devices[name].vendor == vendor.vendor]
            names = {each.name for each in own}
            withheld = [name for name in published.withheld if devices[name].vendor == vendor.vendor]
            reason, message = "", ""
            if vendor.vendor in blocked:
                reason, message = Reason.DEVICE_PLUGIN_ACTIVE, blocked[vendor.vendor]
            elif dra_vendor(vendor.vendor) is None:
                reason, message = Reason.UNKNOWN_VENDOR, f"this release does not know GPUs of {vendor.vendor}"
            elif withheld:
                reason, message = Reason.GPUS_MISSING, f"{', '.join(withheld)}: {NO_TAINTS}"
            offers.append(
                VendorOffer(
                    vendor.vendor,
                    tuple(sorted({each.pci_address for each in own})),
                    tuple(sorted(names)),
                    tuple(each for each in published.tainted if each in names),
                    reason,
                    message,
                )
            )
        return tuple(offers)


def _blocked(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the vendors whose GPUs must not be offered, each with the reason."""
    by_vendor = {
        each.name: plugin_resources(node, each.resource_prefix, each.harmless_resources) for each in DRA_VENDORS
    }
    return {name: blocked_message(resources) for name, resources in by_vendor.items() if resources}


def _node(name: str, document: Mapping[str, Any]) -> Node:
    metadata = document.get("metadata")
    uid = metadata.get("uid") if isinstance(metadata, dict) else None
    if not isinstance(uid, str) or not uid:
        raise ApiError(f"GET /api/v1/nodes/{name}", "the Node object has no uid")
    return Node(name, uid)
