"""Prepares claims: returns the devices that the scheduler allocated to a claim, and checks that they may be used.

The scheduler allocates devices. This module is a second guard, and checks two things. It hands out only devices that
are granted and in a verified CDI specification. And if two claims may not have a device at the same time, the second
claim gets it only after the kubelet has unprepared the first claim, or if the first claim is gone.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agent.dra.allocation import Allocated, NotAllocatedError, allocated_devices
from agent.dra.checkpoint import Checkpoint
from agent.dra.devices import Device
from agent.dra.kubelet_state import mentions
from agent.dra.messages import ClaimReference, PreparedDevice
from agent.model.errors import AgentError
from agent.model.paths import ALLOCATABLE, DRA_DRIVER

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often to look again at the claims that have a wanted device, if they change meanwhile."""
PARTITION_INFIX = "-mig-"
"""Separates a GPU's name from the numbers of its partition (agent.dra.devices.device_name)."""

Fetch = Callable[[ClaimReference], Mapping[str, Any]]


class ClaimGoneError(AgentError):
    """The API server has no such claim (404), or no pod of this node has the claim (403)."""


class NodeClaims:
    """The claims of this node's pods. Threads may share it."""

    def __init__(
        self,
        node: str,
        fetch: Fetch,
        devices: Callable[[], Mapping[str, Device]],
        checkpoint: Checkpoint,
        kubelet_record: Callable[[], bytes],
    ) -> None:
        """`node` is the name of the node, and also of its pool of devices.

        `fetch` returns a claim as the API server has it, or raises ClaimGoneError or another AgentError. `devices`
        returns the devices that claims may get now, by name. `kubelet_record` returns the kubelet's own record of
        claims (agent.dra.kubelet_state), or raises OSError.
        """
        self._node, self._fetch, self._devices = node, fetch, devices
        self._checkpoint, self._kubelet_record = checkpoint, kubelet_record
        self._lock = threading.Lock()
        self._prepared = checkpoint.load()

    @property
    def prepared(self) -> Mapping[ClaimReference, tuple[PreparedDevice, ...]]:
        """The prepared claims with their devices."""
        # Each change makes a new dictionary, so no lock is needed to read it.
        return dict(self._prepared)

    def prepare(self, claim: ClaimReference) -> tuple[PreparedDevice, ...]:
        """Give a claim the devices that are allocated to it, and return them. Raises AgentError or OSError."""
        allocated = allocated_devices(claim, self._fetch(claim), self._node)
        for _ in range(ATTEMPTS):
            with self._lock:
                # Read the devices only now: a device that was withdrawn while the claim was fetched must not be handed
                # out.
                available = self._devices()
                prepared = tuple(_prepared_device(claim, each, available) for each in allocated)
                holders = self._holders(claim, prepared)
                if not holders:
                    # A new tuple, also of the same devices: `_replace` notices that the claim was prepared again.
                    self._keep({**self._prepared, claim: prepared}, save=self._prepared.get(claim) != prepared)
                    log.info("claim %s is prepared: %s", claim, ", ".join(each.device for each in prepared))
                    return prepared
            # Not under the lock: the API server may answer slowly, and other claims must not wait for that.
            for other, held in holders.items():
                self._replace(other, held, self._still_held(other, held, claim, prepared))
        raise AgentError(f"claim {claim}: other claims of its devices keep changing", "the kubelet tries again")

    def unprepare(self, claim: ClaimReference) -> None:
        """Take back the devices of a claim, if it has any. Raises OSError."""
        with self._lock:
            if claim in self._prepared:
                self._keep({each: devices for each, devices in self._prepared.items() if each != claim})
                log.info("claim %s is unprepared: its devices are free", claim)

    def _keep(self, prepared: dict[ClaimReference, tuple[PreparedDevice, ...]], *, save: bool = True) -> None:
        """Record what is prepared: first on disk, unless the file has it already, then in memory."""
        if save:
            self._checkpoint.save(prepared)
        self._prepared = prepared

    def _holders(
        self, claim: ClaimReference, wanted: tuple[PreparedDevice, ...]
    ) -> dict[ClaimReference, tuple[PreparedDevice, ...]]:
        """Return the other claims that have a device that conflicts with a wanted one, with their devices."""
        return {
            other: held
            for other, held in self._prepared.items()
            if other != claim and _conflicting_device(held, wanted)
        }

    def _replace(
        self, other: ClaimReference, held: tuple[PreparedDevice, ...], still_held: tuple[PreparedDevice, ...]
    ) -> None:
        """Replace a claim's devices, or forget the claim if it has none, unless it was prepared again meanwhile."""
        with self._lock:
            if self._prepared.get(other) is held:
                others = {each: devices for each, devices in self._prepared.items() if each != other}
                self._keep({**others, other: still_held} if still_held else others)

    def _still_held(
        self,
        other: ClaimReference,
        held: tuple[PreparedDevice, ...],
        claim: ClaimReference,
        wanted: tuple[PreparedDevice, ...],
    ) -> tuple[PreparedDevice, ...]:
        """Return what another claim, which is recorded with a wanted device, has, so that `claim` may have the device.

        That is nothing if the other claim is gone. If it only monitors the device (adminAccess), the device is marked
        so: both claims may have it. Raises AgentError if the other claim still has the device, or if that is unknown.
        """
        device = _conflicting_device(held, wanted)
        try:
            in_kubelet_record = mentions(self._kubelet_record(), other)
        except OSError as error:
            log.warning("the kubelet's record of claims is not readable: %s", error)
            in_kubelet_record = True
        if in_kubelet_record:
            monitoring = self._with_admin_access(other, held)
            if not _conflicting_device(monitoring, wanted):
                return monitoring
            raise AgentError(
                f"claim {claim} cannot have {device} yet: the kubelet has not unprepared claim {other}, which has it",
                "the kubelet tries again; if that lasts, see `journalctl -u kubelet` for the pod of that claim",
            )
        if self._is_allocated(other, wanted):
            raise AgentError(
                f"claim {claim} cannot have {device}: it is allocated to claim {other} too",
                "delete one of the claims and its pod",
            )
        log.warning("claim %s is gone, but the kubelet never unprepared it: claim %s gets %s", other, claim, device)
        return ()

    def _with_admin_access(self, other: ClaimReference, held: tuple[PreparedDevice, ...]) -> tuple[PreparedDevice, ...]:
        """Return another claim's devices, marked as `admin` if the API server says that they have adminAccess.

        The mark can be missing: if this driver's own record was lost, the claims were taken from the kubelet's record,
        which does not say which devices have adminAccess.
        """
        try:
            allocated = allocated_devices(other, self._fetch(other), self._node)
        except AgentError as error:
            log.info("cannot tell whether claim %s only monitors its devices: %s", other, error)
            return held
        admin = {each.device for each in allocated if each.admin}
        admin -= {each.device for each in allocated if not each.admin}
        return tuple(replace(each, admin=each.admin or each.device in admin) for each in held)

    def _is_allocated(self, other: ClaimReference, wanted: tuple[PreparedDevice, ...]) -> bool:
        """Return whether the API server says that another claim has one of the wanted devices. Raises AgentError."""
        try:
            allocated = allocated_devices(other, self._fetch(other), self._node)
        except (ClaimGoneError, NotAllocatedError):
            return False
        held = tuple(PreparedDevice((), each.pool, each.device, (), each.share, each.admin) for each in allocated)
        return bool(_conflicting_device(held, wanted))


def _prepared_device(claim: ClaimReference, allocated: Allocated, available: Mapping[str, Device]) -> PreparedDevice:
    """Return an allocated device with its CDI names. Raises AgentError unless it is available now."""
    device = available.get(allocated.device)
    if device is None or not device.cdi_names:
        raise AgentError(
            f"claim {claim}: {DRA_DRIVER} has no device {allocated.device[:80]} now: its GPU is not granted to this "
            "machine, or is in no verified CDI specification",
            f"see the conditions DevicesAllowed and CDISpecCurrent on the host, and {ALLOCATABLE}",
        )
    return PreparedDevice(
        (allocated.request,), allocated.pool, allocated.device, device.cdi_names, allocated.share, allocated.admin
    )


def _conflicting_device(held: tuple[PreparedDevice, ...], wanted: tuple[PreparedDevice, ...]) -> str:
    """Return the name of a wanted device that conflicts with a held one; empty if there is none."""
    return next((new.device for new in wanted for old in held if _conflict(old, new)), "")


def _conflict(old: PreparedDevice, new: PreparedDevice) -> bool:
    if old.admin or new.admin:
        return False
    if old.device == new.device:
        # Two claims may have the same device if each has a share of its own.
        return not (old.share and new.share and old.share != new.share)
    # A GPU and its partition are the same hardware.
    return old.device.startswith(new.device + PARTITION_INFIX) or new.device.startswith(old.device + PARTITION_INFIX)
