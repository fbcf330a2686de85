"""The status of agent.dra: what it offers to the cluster, or why it offers nothing.

The machine half reads this document for the condition GPUsAdvertised.
"""

from typing import NamedTuple

from agent.model.json_document import Seconds, parse_document, render_document
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

    at: Seconds
    """When the status was written."""
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
    offers = tuple(each._replace(message=one_line(each.message)) for each in status.offers)
    return render_document(VERSION, status._replace(offers=offers, message=one_line(status.message)))


def parse_dra_status(data: bytes) -> DraStatus:
    """Return the status in a document. Raises DocumentError, which names the key."""
    return parse_document(DRA_STATUS_NAME, data, DraStatus, VERSION)
