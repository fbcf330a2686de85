"""Prepares claims: returns the devices that the scheduler allocated to a claim, and checks that they may be used.

Also evicts the pods of some claims whose devices are being detached.

The scheduler allocates devices. This module is a second guard, and checks two things. It hands out only devices that
are granted and in a verified CDI specification. And if two claims may not have a device at the same time, the second
claim gets it only after the kubelet has unprepared the first claim, or if the first claim is gone.

The record of prepared claims is a file, which is written before the kubelet gets the answer to its request. So if this
process crashes, the next one still knows every claim that the kubelet considers prepared.

The kubelet's own record has the claims of its pods, and claims that it has not unprepared yet. Its format is internal
(pkg/kubelet/cm/dra/state of k8s.io/kubernetes, checkpoint.dra.kubelet.k8s.io/v1), so it is used only where
nothing else has the answer. The kubelet writes it before it prepares a claim, and again after it has unprepared it.
"""

import contextlib
import fcntl
import json
import logging
import os
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from agent.dra.inventory import Device
from agent.dra.slices import API
from agent.model.contract import PARTITION_INFIX, Effect
from agent.model.errors import AgentError, DocumentError
from agent.model.json_document import (
    accept_version,
    decode,
    get,
    objects,
    parse_object,
    plain,
    require_object,
    strings,
)
from agent.model.paths import ALLOCATABLE, DRA_CLAIMS, DRA_DRIVER, DRA_STATE
from agent.model.text import json_digest, one_line
from agent.system.api_server import ApiClient, ApiError, NotFoundError
from agent.system.files import System

log = logging.getLogger(__name__)


class ClaimReference(NamedTuple):
    """Names a ResourceClaim. A claim that is deleted and made again has another uid."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class PreparedDevice(NamedTuple):
    """A device that the kubelet gives to those containers that refer to one of `requests`."""

    requests: tuple[str, ...]
    """Names of requests in the claim."""
    pool: str
    device: str
    cdi_names: tuple[str, ...]
    """Qualified names, which the container runtime looks up in the CDI specifications."""
    share: str = ""
    """If several claims may share the device, the uid of this claim's share; empty otherwise."""
    admin: bool = False
    """Whether the claim has adminAccess to the device: the claim only monitors it, and other claims may have it at the
    same time.

    Not sent to the kubelet."""


RECORD_NAME = "dra_manager_state"
"""Name of the file in the kubelet's root directory (draManagerStateFileName of pkg/kubelet/cm/dra/manager.go)."""
RECORD_LIMIT = 8 << 20
"""Bytes of the largest record that is read."""

Prepared = Mapping[ClaimReference, tuple[PreparedDevice, ...]]


def mentions(record: bytes, claim: ClaimReference) -> bool:
    """Return whether the kubelet's record has the claim.

    In a record of an unknown format, every occurrence of the uid counts, even where it is another claim's name.
    """
    try:
        return any(get(RECORD_NAME, each, "ClaimUID", str) == claim.uid for each in _recorded_claims(record))
    except DocumentError:
        return claim.uid.encode() in record


def prepared_claims(record: bytes) -> dict[ClaimReference, tuple[PreparedDevice, ...]]:
    """Return the prepared claims in the kubelet's record that have devices of this driver. Raises DocumentError."""
    where, claims = RECORD_NAME, {}
    for claim in _recorded_claims(record):
        drivers = get(where, claim, "DriverState", dict)
        driver = require_object(where, drivers.get(DRA_DRIVER, {}))
        devices = objects(where, {"Devices": driver.get("Devices") or []}, "Devices", _recorded_device)
        if devices:
            keys = ("Namespace", "ClaimName", "ClaimUID")
            claims[ClaimReference(*(get(where, claim, key, str) for key in keys))] = devices
    return claims


def _recorded_claims(record: bytes) -> tuple[dict[str, Any], ...]:
    """Return the claims in the kubelet's record; none for an empty record. Raises DocumentError."""
    if not record:
        return ()
    # The record is a JSON object, and its key Data is a string that is itself JSON. Go writes an empty list as null.
    where = RECORD_NAME
    data = parse_object(where, get(where, parse_object(where, record), "Data", str).encode(errors="replace"))
    if data.get("ClaimInfoStateList", ()) is None:
        return ()
    return objects(where, data, "ClaimInfoStateList", lambda _, item: item)


def _recorded_device(where: str, item: dict[str, Any]) -> PreparedDevice:
    # Go writes an empty list as null.
    present = {key: value for key, value in item.items() if value is not None}
    return PreparedDevice(
        strings(where, {"RequestNames": [], **present}, "RequestNames"),
        get(where, present, "PoolName", str),
        get(where, present, "DeviceName", str),
        strings(where, {"CDIDeviceIDs": [], **present}, "CDIDeviceIDs"),
        get(where, {"ShareID": "", **present}, "ShareID", str),
    )


class NotAllocatedError(AgentError):
    """This claim is gone, or has no device of this driver on this node."""


def allocated_devices(reference: ClaimReference, claim: Mapping[str, Any], node: str) -> tuple[PreparedDevice, ...]:
    """Return this driver's devices that are allocated to a claim, without their CDI names.

    `claim` is the object that the API server has. Raises NotAllocatedError, also if the object has another uid than
    `reference`. Raises another AgentError if the object is malformed, or has parameters for the driver.
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
    allocated = tuple(each for driver, each in objects(where, devices, "results", _result) if driver == DRA_DRIVER)
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


def _result(where: str, item: dict[str, Any]) -> tuple[str, PreparedDevice]:
    driver, pool, device, request = (get(where, item, key, str) for key in ("driver", "pool", "device", "request"))
    share = get(where, item, "shareID", str) if item.get("shareID") else ""
    admin = get(where, item, "adminAccess", bool) if item.get("adminAccess") else False
    # If the request has alternatives, its name is `REQUEST/ALTERNATIVE`. Containers refer to the request alone, so the
    # alternative is cut off, as kubeletplugin of k8s.io/dynamic-resource-allocation does too.
    return driver, PreparedDevice((request.partition("/")[0],), pool, device, (), share, admin)


def fetch_claim(client: ApiClient, claim: ClaimReference) -> Mapping[str, Any]:
    """Return a claim as the API server has it. Raises NotAllocatedError if it is gone, or another AgentError."""
    namespace, name = (urllib.parse.quote(each, safe="") for each in (claim.namespace, claim.name))
    try:
        return client.get(f"/apis/{API}/namespaces/{namespace}/resourceclaims/{name}")
    except ApiError as error:
        # The node authorizer answers 403 if no pod of this node has the claim (authorizeGet of node_authorizer.go).
        if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN):
            raise NotAllocatedError(error.message, error.hint) from error
        raise


CHECKPOINT = DRA_CLAIMS
LOCK = f"{DRA_STATE}/lock"
VERSION = 1
SIZE_LIMIT = 4 << 20
"""Bytes of the largest record that is read. A claim takes about 500."""


class Checkpoint:
    """The file with the prepared claims. Only one process at a time can use it."""

    def __init__(self, system: System, kubelet: str, changed: Callable[[], None] = lambda: None) -> None:
        """`kubelet` is the kubelet's root directory. `changed` is called when `sync` has something to do.

        Raises AgentError, also if another process uses the file.
        """
        self._system, self._kubelet, self._changed = system, kubelet, changed
        self._durable = True
        try:
            system.make_directory(DRA_STATE)
            self._lock = system.open_lock(LOCK)
            # Two processes would not know each other's claims, and would replace each other's sockets.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise AgentError(
                f"{LOCK}: another process offers this node's GPUs",
                "stop that process: only unbounded-agent-dra.service may offer them",
            ) from error
        except OSError as error:
            raise AgentError(f"{LOCK}: {error.strerror}", "check that root can write there") from error

    def close(self) -> None:
        """Make the file durable, and release it for other processes."""
        self.sync()
        os.close(self._lock)

    def kubelet_record(self) -> bytes:
        """Return the kubelet's own record; empty if there is none, because it then has no claim. Raises OSError."""
        try:
            return self._system.read(f"{self._kubelet}/{RECORD_NAME}", RECORD_LIMIT)
        except FileNotFoundError:
            return b""

    def load(self) -> dict[ClaimReference, tuple[PreparedDevice, ...]]:
        """Return the prepared claims: without a usable file, those in the kubelet's own record, or else none."""
        try:
            return parse_checkpoint(self._system.read(CHECKPOINT, SIZE_LIMIT))
        except FileNotFoundError:
            why = "is missing"
        except (DocumentError, OSError) as error:
            why = f"is not usable: {error}"
        try:
            claims = prepared_claims(self.kubelet_record())
        except (DocumentError, OSError) as error:
            # It is safe to start without any claim: the scheduler does not allocate a device to two claims, and the
            # file CHECKPOINT is only a second guard against two claims with one device.
            unusable = "the kubelet's record is not usable"
            log.warning("%s %s, and %s: %s; starting without prepared claims", CHECKPOINT, why, unusable, error)
            return {}
        if claims:
            log.warning("%s %s: %s claims are taken from the kubelet's record", CHECKPOINT, why, len(claims))
        return claims

    def save(self, claims: Prepared) -> None:
        """Replace the file without waiting for the disk. Raises OSError.

        If this process crashes, the file has the new content. If the kernel crashes, the new content may be lost, but
        then no pod is left running. The next call of `sync` makes the file durable.
        """
        self._system.stream(CHECKPOINT, (render_checkpoint(claims),), 0o600, durable=False)
        self._durable = False
        self._changed()

    def sync(self) -> None:
        """Make the file durable if it has changed. Errors are only logged."""
        if self._durable:
            return
        # Before the sync, because another thread may save during the sync. If the sync fails, that changes nothing:
        # another fsync(2) of the same data could succeed without writing them, so a second try would prove nothing.
        self._durable = True
        try:
            self._system.sync(CHECKPOINT)
        except OSError as error:
            log.error("cannot sync %s to disk: %s", CHECKPOINT, error.strerror)


def render_checkpoint(claims: Prepared) -> bytes:
    """Return the content of the file."""
    items = [
        {**claim._asdict(), "devices": plain(devices)}
        for claim, devices in sorted(claims.items(), key=lambda item: item[0].uid)
    ]
    document = {"version": VERSION, "digest": json_digest(items), "claims": items}
    return json.dumps(document).encode() + b"\n"


def parse_checkpoint(data: bytes) -> dict[ClaimReference, tuple[PreparedDevice, ...]]:
    """Return the claims in a document. Raises DocumentError if it is damaged."""
    document = parse_object(CHECKPOINT, data)
    accept_version(CHECKPOINT, document, VERSION)
    if get(CHECKPOINT, document, "digest", str) != json_digest(document.get("claims")):
        raise DocumentError(f"{CHECKPOINT}: the digest does not match")

    def prepared(where: str, item: dict[str, Any]) -> tuple[ClaimReference, tuple[PreparedDevice, ...]]:
        devices = objects(where, item, "devices", lambda where, each: decode(where, each, PreparedDevice))
        return decode(where, item, ClaimReference), devices

    return dict(objects(CHECKPOINT, document, "claims", prepared))


ATTEMPTS = 5
"""How often to look again at the claims that have a wanted device, if they change meanwhile."""


class NodeClaims:
    """The claims of this node's pods. Threads may share it."""

    def __init__(
        self,
        node: str,
        fetch: Callable[[ClaimReference], Mapping[str, Any]],
        devices: Callable[[], Mapping[str, Device]],
        checkpoint: Checkpoint,
    ) -> None:
        """`node` is the name of the node, and also of its pool of devices. `fetch` is `fetch_claim` of its client.

        `devices` returns the devices that claims may get now, by name.
        """
        self._node, self._fetch, self._devices, self._checkpoint = node, fetch, devices, checkpoint
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
                holders = {
                    other: held
                    for other, held in self._prepared.items()
                    if other != claim and _conflicting_device(held, prepared)
                }
                if not holders:
                    # A new tuple, also of the same devices: others notice below that it was prepared again.
                    self._keep({**self._prepared, claim: prepared}, save=self._prepared.get(claim) != prepared)
                    log.info("claim %s is prepared: %s", claim, ", ".join(each.device for each in prepared))
                    return prepared
            # Not under the lock: the API server may answer slowly, and other claims must not wait for that.
            for other, held in holders.items():
                still_held = self._still_held(other, held, claim, prepared)
                with self._lock:
                    if self._prepared.get(other) is held:
                        others = {each: devices for each, devices in self._prepared.items() if each != other}
                        self._keep({**others, other: still_held} if still_held else others)
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
            in_kubelet_record = mentions(self._checkpoint.kubelet_record(), other)
        except OSError as error:
            log.warning("the kubelet's record of claims is not readable: %s", error)
            in_kubelet_record = True
        allocated: tuple[PreparedDevice, ...] = ()
        try:
            allocated = allocated_devices(other, self._fetch(other), self._node)
        except NotAllocatedError:
            pass
        except AgentError as error:
            if not in_kubelet_record:
                raise
            log.info("cannot tell whether claim %s only monitors its devices: %s", other, error)
        if in_kubelet_record:
            # The mark `admin` is missing if the claims were taken from the kubelet's record, which does not have it.
            admin = {each.device for each in allocated if each.admin}
            admin -= {each.device for each in allocated if not each.admin}
            monitored = tuple(each._replace(admin=each.admin or each.device in admin) for each in held)
            if not _conflicting_device(monitored, wanted):
                return monitored
            raise AgentError(
                f"claim {claim} cannot have {device} yet: the kubelet has not unprepared claim {other}, which has it",
                "the kubelet tries again; if that lasts, see `journalctl -u kubelet` for the pod of that claim",
            )
        if _conflicting_device(allocated, wanted):
            raise AgentError(
                f"claim {claim} cannot have {device}: it is allocated to claim {other} too",
                "delete one of the claims and its pod",
            )
        log.warning("claim %s is gone, but the kubelet never unprepared it: claim %s gets %s", other, claim, device)
        return ()


def _prepared_device(
    claim: ClaimReference, allocated: PreparedDevice, available: Mapping[str, Device]
) -> PreparedDevice:
    """Return an allocated device with its CDI names. Raises AgentError unless it is available now."""
    device = available.get(allocated.device)
    if device is None or not device.cdi_names:
        raise AgentError(
            f"claim {claim}: {DRA_DRIVER} has no device {allocated.device[:80]} now: its GPU is not granted to this "
            "machine, or is in no verified CDI specification",
            f"see the conditions DevicesAllowed and CDISpecCurrent on the host, and {ALLOCATABLE}",
        )
    return allocated._replace(cdi_names=device.cdi_names)


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


EXTENDED = "resource.kubernetes.io/extended-resource-claim"
"""The annotation of a claim that the scheduler made for an extended resource (k8s.io/api/resource/v1/types.go)."""


class Pod(NamedTuple):
    """A pod that has a claim."""

    namespace: str
    name: str
    uid: str


class Evictions:
    """Evicts pods from GPUs that are being detached, where Kubernetes itself does not do so.

    When a device gets a taint with the effect NoExecute, Kubernetes evicts the pods that got the device through a claim
    (pkg/controller/devicetainteviction). But a pod may also have requested the device as an extended resource. The
    scheduler then makes the claim, and Kubernetes 1.36 does not evict the pod (kubernetes/kubernetes#141290), so this
    does. A kubelet's identity may evict the pods of its own node (admitPodEviction in
    plugin/pkg/admission/noderestriction). An eviction respects disruption budgets and grace periods.

    Each call of the method `make` is one attempt, for all pods whose claims the kubelet has not given back yet.
    """

    def __init__(
        self, fetch: Callable[[ClaimReference], Mapping[str, Any]], send: Callable[[str, str, object], object]
    ) -> None:
        """`fetch` returns a claim as the API server has it. `send` sends a request with method, path and content.

        Both raise AgentError.
        """
        self._fetch, self._send = fetch, send
        self._logged: set[tuple[Pod, str]] = set()
        """What was last logged about each pod. The same text is not logged again."""
        self._unanswered: ClaimReference | None = None
        """The claim at which the last attempt ended, because the API server did not answer; None if every request was
        answered. The next attempt begins with the claim that follows it, and comes to this claim last."""

    def make(
        self, devices: Iterable[Device], prepared: Mapping[ClaimReference, tuple[PreparedDevice, ...]]
    ) -> tuple[Pod, ...]:
        """Ask for the eviction of pods that got a device with a NoExecute taint as an extended resource.

        Return these pods. The attempt ends at the first request that the API server does not answer: each further one
        could take many seconds too.
        """
        names = {each.name for each in devices if any(taint.effect is Effect.NO_EXECUTE for taint in each.taints)}
        held = [
            claim
            for claim, claimed in prepared.items()
            if any(each.device in names and not each.admin for each in claimed)
        ]
        first = held.index(self._unanswered) + 1 if self._unanswered in held else 0
        pods: set[Pod] = set()
        # If the API server does not answer, an ApiError ends the attempt. The error has been logged already.
        with contextlib.suppress(ApiError):
            for claim in (*held[first:], *held[:first]):
                self._unanswered = claim
                try:
                    found = pods_of(claim, self._fetch(claim))
                except AgentError as error:
                    # If the claim is gone, so is its pod. If the API server does not answer, the next attempt finds it.
                    log.info("cannot tell which pods have claim %s: %s", claim, one_line(str(error)))
                    _raise_if_unanswered(error)
                    continue
                for pod in found:
                    if pod not in pods:
                        pods.add(pod)
                        self._evict(pod)
            self._unanswered = None
        return tuple(sorted(pods))

    def _evict(self, pod: Pod) -> None:
        namespace, name = (urllib.parse.quote(each, safe="") for each in (pod.namespace, pod.name))
        metadata = {"namespace": pod.namespace, "name": pod.name}
        # The uid keeps a new pod of the same name from being evicted.
        options = {"preconditions": {"uid": pod.uid}}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options}
        try:
            self._send("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", eviction)
            self._log(pod, "is evicted: its GPU is being detached")
        except NotFoundError:
            # The pod has ended. The kubelet gives the pod's claim back a little later.
            pass
        except AgentError as error:
            self._log(pod, f"cannot be evicted yet: {one_line(str(error))}")
            _raise_if_unanswered(error)

    def _log(self, pod: Pod, what: str) -> None:
        if (pod, what) not in self._logged:
            self._logged = {each for each in self._logged if each[0] != pod} | {(pod, what)}
            log.warning("pod %s/%s %s", pod.namespace, pod.name, what)


def _raise_if_unanswered(error: AgentError) -> None:
    if isinstance(error, ApiError) and not error.status:
        raise error


def pods_of(claim: ClaimReference, document: Mapping[str, Any]) -> tuple[Pod, ...]:
    """Return the pods of a claim that the scheduler made for an extended resource; none for any other claim. Pure.

    Raises DocumentError.
    """
    where = f"claim {claim}"
    metadata = require_object(where, document.get("metadata"))
    annotations = require_object(where, metadata.get("annotations") or {})
    if metadata.get("uid") != claim.uid or annotations.get(EXTENDED) != "true":
        return ()
    status = require_object(where, document.get("status") or {})

    def consumer(where: str, item: dict[str, Any]) -> tuple[str, Pod]:
        resource, name, uid = (get(where, item, key, str) for key in ("resource", "name", "uid"))
        if not (resource and name and uid):
            raise DocumentError(f"{where}: a consumer has an empty resource, name or uid")
        return resource, Pod(claim.namespace, name, uid)

    consumers = objects(where, {"reservedFor": status.get("reservedFor") or []}, "reservedFor", consumer)
    return tuple(pod for resource, pod in consumers if resource == "pods")
