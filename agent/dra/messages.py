"""The messages of the kubelet's APIs for drivers of Dynamic Resource Allocation (kubelet.proto)."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from agent.dra import kubelet_pb2 as kubelet
from agent.dra.devices import Health
from agent.model.errors import DocumentError

CLAIMS_LIMIT = 1024
"""The largest number of claims in one request. A request has the claims of one pod."""
ERROR_LIMIT = 2000
"""How many characters of an error are sent. The kubelet puts the error into an event of the pod."""
HEALTH_MESSAGE_LIMIT = 1024
"""Bytes of the longest health message (ResourceHealthMessageMaxLength of k8s.io/api/core/v1)."""

_READING = threading.Lock()
"""A request of many empty claims takes 40 times its size in memory while it is read, so one is read at a time."""


@dataclass(frozen=True, slots=True)
class ClaimReference:
    """Names a ResourceClaim. A claim that is deleted and made again has another uid."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class PreparedDevice:
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


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """The health of one device."""

    pool: str
    device: str
    health: Health
    message: str = ""
    """What is wrong with the device, or that it is detached or being detached. The kubelet puts this text into pods'
    status."""


@dataclass(frozen=True, slots=True)
class RegistrationStatus:
    """What the kubelet reports about a registration."""

    registered: bool
    error: str = ""


def encode_plugin_info(kind: str, name: str, endpoint: str, services: tuple[str, ...]) -> bytes:
    """Return a PluginInfo."""
    info = kubelet.PluginInfo(type=kind, name=name, endpoint=_valid(endpoint), supported_versions=services)
    return info.SerializeToString()


def decode_registration_status(data: bytes) -> RegistrationStatus:
    """Return a RegistrationStatus. Raises DocumentError."""
    status = kubelet.RegistrationStatus()
    _read(status, data)
    return RegistrationStatus(status.plugin_registered, status.error)


def decode_claims(data: bytes) -> tuple[ClaimReference, ...]:
    """Return the claims of a NodePrepareResourcesRequest or a NodeUnprepareResourcesRequest. Raises DocumentError."""
    with _READING:
        request = kubelet.ClaimsRequest()
        _read(request, data)
        if len(request.claims) > CLAIMS_LIMIT:
            raise DocumentError(f"a request has {len(request.claims)} claims, more than {CLAIMS_LIMIT}")
        claims = tuple(ClaimReference(each.namespace, each.name, each.uid) for each in request.claims)
        del request
    for each in claims:
        if not (each.namespace and each.uid and each.name):
            raise DocumentError(f"a claim has no namespace, uid or name: {each!r}")
    return claims


def encode_prepared(results: Mapping[str, tuple[PreparedDevice, ...] | str]) -> bytes:
    """Return a NodePrepareResourcesResponse.

    `results` has, by the claim's uid, the claim's devices, or a text that says why the claim was not prepared.
    """
    response = kubelet.NodePrepareResourcesResponse()
    for uid, result in results.items():
        claim = response.claims[uid]
        if isinstance(result, str):
            claim.error = _valid(result)[:ERROR_LIMIT]
            continue
        for each in result:
            claim.devices.add(
                request_names=map(_valid, each.requests),
                pool_name=_valid(each.pool),
                device_name=_valid(each.device),
                cdi_device_ids=map(_valid, each.cdi_names),
                share_id=_valid(each.share) or None,
            )
    return response.SerializeToString()


def encode_unprepared(results: Mapping[str, str]) -> bytes:
    """Return a NodeUnprepareResourcesResponse.

    `results` has, by the claim's uid, a text that says why the claim is still prepared. The text is empty if the claim
    was unprepared.
    """
    response = kubelet.NodeUnprepareResourcesResponse()
    for uid, error in results.items():
        response.claims[uid].error = _valid(error)[:ERROR_LIMIT]
    return response.SerializeToString()


def encode_health(devices: Iterable[DeviceHealth], now: int, timeout: int) -> bytes:
    """Return a NodeWatchResourcesResponse with the health of all devices at `now` (seconds since the epoch).

    If no newer response follows within `timeout` seconds, the kubelet considers the health unknown.
    """
    response = kubelet.NodeWatchResourcesResponse()
    for each in devices:
        response.devices.add(
            device=kubelet.DeviceIdentifier(pool_name=_valid(each.pool), device_name=_valid(each.device)),
            health=each.health.name,
            last_updated_time=now,
            health_check_timeout_seconds=timeout,
            message=shortened(each.message),
        )
    return response.SerializeToString()


def shortened(message: str) -> str:
    """Return at most HEALTH_MESSAGE_LIMIT bytes of a message.

    The kubelet might cut a longer message in the middle of a character.
    """
    raw = message.encode(errors="replace")
    if len(raw) > HEALTH_MESSAGE_LIMIT:
        return raw[: HEALTH_MESSAGE_LIMIT - 3].decode(errors="ignore") + "..."
    return raw.decode()


def _read(message: Message, data: bytes) -> None:
    """Fill an empty message. Raises DocumentError."""
    try:
        read = message.MergeFromString(data)
    except DecodeError as error:
        raise DocumentError(str(error)) from error
    # Debian's runtime only warns of some damage, and leaves out the rest.
    if read != len(data):
        raise DocumentError(f"only {read} of {len(data)} bytes are a message")


def _valid(text: str) -> str:
    """Return a text that can be sent: surrogates, which the name of a file may have, become `?`."""
    return text.encode(errors="replace").decode()
