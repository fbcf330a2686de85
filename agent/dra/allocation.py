"""Reads from a ResourceClaim which devices of this node are allocated to it. Pure.

Source: AllocationResult and DeviceRequestAllocationResult of k8s.io/api/resource/v1/types.go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent.dra.messages import ClaimReference
from agent.model.errors import AgentError
from agent.model.json_document import get, objects
from agent.model.paths import DRA_DRIVER


class NotAllocatedError(AgentError):
    """This claim has no device of this driver on this node."""


@dataclass(frozen=True, slots=True)
class Allocated:
    """A device that is allocated to one request of a claim."""

    driver: str
    pool: str
    device: str
    request: str
    """The request's name in the claim; only `REQUEST` if the API server has `REQUEST/ALTERNATIVE`."""
    share: str
    """If several claims may share the device, the uid of this claim's share; empty otherwise."""
    admin: bool
    """Whether the request has adminAccess. Such a request only monitors the device, which other claims may have at the
    same time."""


def allocated_devices(reference: ClaimReference, claim: Mapping[str, Any], node: str) -> tuple[Allocated, ...]:
    """Return this driver's devices that are allocated to a claim. `claim` is the object that the API server has.

    Raises NotAllocatedError in four cases: the object has another uid than `reference`, the claim is not allocated, it
    has no device of this driver, or it is allocated on another node than `node`. Raises another AgentError if the
    object is malformed, or has parameters for the driver.
    """
    where = f"claim {reference}"
    document = dict(claim)
    uid = get(where, get(where, document, "metadata", dict), "uid", str)
    if uid != reference.uid:
        raise NotAllocatedError(
            f"{where} was deleted and made again: its uid is {uid[:80]}, and the kubelet asks for {reference.uid[:80]}",
            "delete the pod if it waits for the old claim",
        )
    status = get(where, document, "status", dict) if document.get("status") is not None else {}
    if status.get("allocation") is None:
        raise NotAllocatedError(
            f"{where} is not allocated", "the kubelet tries again when the scheduler has allocated it"
        )
    devices = get(where, get(where, status, "allocation", dict), "devices", dict)
    allocated = tuple(each for each in objects(where, devices, "results", _result) if each.driver == DRA_DRIVER)
    if not allocated:
        raise NotAllocatedError(f"{where} has no device of the driver {DRA_DRIVER}", "see its status.allocation")
    if any(each == DRA_DRIVER for each in objects(where, {"config": devices.get("config") or []}, "config", _driver)):
        raise AgentError(
            f"{where} has parameters for the driver {DRA_DRIVER}, which takes none",
            "remove `config` from the claim or from its DeviceClass",
        )
    elsewhere = sorted({each.pool for each in allocated} - {node})
    if elsewhere:
        raise NotAllocatedError(
            f"{where} is allocated in the pool {elsewhere[0][:80]}, and this node's pool is {node}",
            "delete the pod, so that it is scheduled again",
        )
    return allocated


def _driver(where: str, item: dict[str, Any]) -> str:
    """Return the driver that an entry of `config` is for; empty if none is named."""
    return get(where, get(where, item, "opaque", dict), "driver", str) if item.get("opaque") else ""


def _result(where: str, item: dict[str, Any]) -> Allocated:
    return Allocated(
        driver=get(where, item, "driver", str),
        pool=get(where, item, "pool", str),
        device=get(where, item, "device", str),
        # If the request has alternatives, this key is `REQUEST/ALTERNATIVE`. Containers refer to the request alone, so
        # the alternative is cut off, as kubeletplugin of k8s.io/dynamic-resource-allocation does too.
        request=get(where, item, "request", str).partition("/")[0],
        share=get(where, item, "shareID", str) if item.get("shareID") else "",
        admin=get(where, item, "adminAccess", bool) if item.get("adminAccess") else False,
    )
