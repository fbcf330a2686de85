"""Publishes the devices that pods may get by claims, and checks whether agent.dra offers them: GPUsAdvertised.

agent.dra is a separate service (unbounded-agent-dra.service), because it talks to the kubelet and the API server, and
the GPU setup never waits for these. This module only reads its status.
"""

from collections.abc import Sequence

from agent.machine.cdi.allocatable import publish_allocatable
from agent.machine.context import Context
from agent.machine.kubelet.device_plugin import KUBELET_SOCKET, PLUGINS, in_words
from agent.machine.notes import Notes, noted_ages
from agent.model.allocatable import AllocatableVendor
from agent.model.conditions import Condition, ConditionType, Status, false, not_applicable, true, unknown
from agent.model.dra_status import SILENT_AFTER, SIZE_LIMIT, DraStatus, parse_dra_status
from agent.model.errors import DocumentError
from agent.model.paths import DRA_STATUS
from agent.model.reasons import Reason
from agent.model.text import counted, rfc3339
from agent.system.files import System

KIND = ConditionType.GPUS_ADVERTISED
UNIT = "unbounded-agent-dra"


def settle_offer(context: Context, vendors: Sequence[AllocatableVendor]) -> Condition:
    """Publish the allocatable devices, and return GPUsAdvertised. Raises OSError."""
    publish_allocatable(context, vendors)
    granted = {gpu for request in context.handoff.requests for gpu in request.gpus}
    allocatable = {device.pci_address for vendor in vendors for device in vendor.devices}
    if not granted:
        return not_applicable(KIND, "no GPU is granted to this machine")
    status = _status(context.system, context.notes)
    if isinstance(status, Condition):
        return status
    offered = {gpu for offer in status.offers for gpu in offer.gpus}
    return _compare(status, granted, allocatable, offered)._replace(advertised=len(granted & offered))


def _status(system: System, notes: Notes) -> DraStatus | Condition:
    """Return the status that agent.dra reports if agent.dra works; otherwise return the condition GPUsAdvertised.

    The condition is returned if the kubelet does not run or has not accepted agent.dra, if agent.dra has reported
    nothing readable lately, or if agent.dra reports that it can offer nothing at all.
    """
    if not system.is_directory(PLUGINS):
        return unknown(KIND, Reason.NO_KUBELET, f"{PLUGINS} does not exist: no kubelet has run in this machine")
    if system.listening_process(KUBELET_SOCKET) is None:
        return unknown(
            KIND,
            Reason.KUBELET_DOWN,
            f"{KUBELET_SOCKET} accepts no connection: see `systemctl status kubelet` in the machine",
        )
    try:
        status = parse_dra_status(system.read(DRA_STATUS, SIZE_LIMIT))
    except FileNotFoundError:
        return _silent("has reported nothing since the machine's start")
    except DocumentError as error:
        return _silent(f"wrote a status that cannot be read: {error}")
    with noted_ages(notes) as ages:
        age = ages.of(DRA_STATUS, status.at)
    if age > SILENT_AFTER:
        return _silent(f"has reported nothing since {rfc3339(status.at)}")
    if status.reason:
        return Condition(KIND, Status.FALSE, status.reason, status.message)
    if not status.registered:
        message = f"the kubelet has not accepted {UNIT}.service as a driver yet, so no pod can start with a GPU"
        why = status.message or "if that lasts, see the logs of both"
        return false(KIND, Reason.NOT_REGISTERED, f"{message}; {why}")
    return status


def _silent(what: str) -> Condition:
    effect = "no pod with a GPU can start or end, but running pods keep their GPUs"
    return false(
        KIND, Reason.DRA_DRIVER_DOWN, f"{UNIT}.service {what}; {effect}; see `systemctl status {UNIT}` in the machine"
    )


def _compare(status: DraStatus, granted: set[str], allocatable: set[str], offered: set[str]) -> Condition:
    """Return GPUsAdvertised.

    It is True only if agent.dra reports no fault of an offer, at least one GPU is allocatable, every allocatable GPU is
    offered, and every offered GPU is granted. All sets have PCI addresses. `allocatable` has the GPUs that CDI
    specifications name.
    """
    for offer in status.offers:
        if offer.reason:
            return Condition(KIND, Status.FALSE, offer.reason, offer.message)
    if not allocatable:
        return unknown(
            KIND, Reason.NOT_PUBLISHED, "no CDI specification names the granted GPUs yet, see CDISpecCurrent"
        )
    tainted = sorted(name for offer in status.offers for name in offer.tainted)
    where = f"the ResourceSlices of node {status.node}"
    if missing := allocatable - offered:
        message = f"not in {where} yet, although ready for pods: {in_words(missing)}"
        return false(KIND, Reason.GPUS_MISSING, f"{message}; if that lasts, see `journalctl -u {UNIT}` in the machine")
    if stale := offered - granted:
        message = f"in {where}, but not (or no longer) granted: {in_words(stale)}"
        return false(KIND, Reason.STALE_GPUS, f"{message}; if that lasts, see `journalctl -u {UNIT}` in the machine")
    remarks = [f"{len(tainted)} of them tainted, so new pods do not get them: {in_words(tainted)}"] if tainted else []
    if without := granted - allocatable:
        remarks.append(f"without {in_words(without)}, which no CDI specification names: see CDISpecCurrent")
    remarks += [status.message] if status.message else []
    count = sum(len(offer.devices) for offer in status.offers)
    return true(KIND, Reason.ADVERTISED, "; ".join([f"{where} have {counted(count, 'device')}", *remarks]))
