"""The status of agent.dra: what it offers to the cluster, or why it offers nothing.

The machine half reads this document for the condition GPUsAdvertised.
"""

import json
from typing import Any, NamedTuple

from agent.model.json_document import accept_version, get, objects, parse_object, strings, timestamp
from agent.model.paths import DRA_STATUS_NAME
from agent.model.text import one_line

VERSION = 1
SIZE_LIMIT = 1 << 18
"""Bytes of the largest document that is read."""
SILENT_AFTER = 120.0
"""Age in seconds at which a status is stale, because agent.dra writes it again every RENEWED_AFTER seconds."""
RENEWED_AFTER = 30.0


class VendorOffer(NamedTuple):
    """One vendor's devices that the cluster's API server knows."""

    vendor: str
    gpus: tuple[str, ...] = ()
    """PCI addresses of the GPUs that are offered, whole or in partitions, tainted or not."""
    devices: tuple[str, ...] = ()
    """Names of the devices in the node's ResourceSlices."""
    tainted: tuple[str, ...] = ()
    """Names of those devices that are tainted. New pods do not get them."""
    reason: str = ""
    """The Reason for which the offer is not as it should be; empty if it is."""
    message: str = ""
    """A sentence on that reason."""


class DraStatus(NamedTuple):
    """What agent.dra offers now, and what prevents it from offering more."""

    at: float
    """When the status was written, in seconds since the epoch."""
    node: str = ""
    """The name of the Node object; empty if unknown."""
    registered: bool = False
    """Whether the kubelet has accepted the driver. Without that, no pod can start with a GPU."""
    offers: tuple[VendorOffer, ...] = ()
    reason: str = ""
    """The Reason for which nothing can be offered at all, such as NoKubeconfig; empty if there is none."""
    message: str = ""
    """A sentence on that reason."""


def render_dra_status(status: DraStatus) -> bytes:
    """Return the document."""
    offers = [{**each._asdict(), "message": one_line(each.message)} for each in status.offers]
    document = {"version": VERSION, **status._asdict(), "offers": offers, "message": one_line(status.message)}
    return json.dumps(document, indent=1).encode() + b"\n"


def parse_dra_status(data: bytes) -> DraStatus:
    """Return the status in a document. Raises DocumentError, which names the key."""
    where = DRA_STATUS_NAME
    document = parse_object(where, data)
    accept_version(where, document, (VERSION,))
    return DraStatus(
        timestamp(where, document, "at"),
        get(where, document, "node", str),
        get(where, document, "registered", bool),
        objects(where, document, "offers", _offer),
        get(where, document, "reason", str),
        get(where, document, "message", str),
    )


def _offer(where: str, item: dict[str, Any]) -> VendorOffer:
    return VendorOffer(
        get(where, item, "vendor", str),
        strings(where, item, "gpus"),
        strings(where, item, "devices"),
        strings(where, item, "tainted"),
        get(where, item, "reason", str),
        get(where, item, "message", str),
    )
