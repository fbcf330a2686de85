"""The messages of the kubelet's APIs for drivers of Dynamic Resource Allocation. Pure.

Sources, each in k8s.io/kubelet/pkg/apis: pluginregistration/v1/api.proto, dra/v1/api.proto, and
dra-health/v1alpha1/api.proto. dra-health/v1 of Kubernetes 1.37 has the same messages. The numbers in the functions
below are the field numbers of these files.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.dra.devices import Health
from agent.dra.protobuf import decode, encode_entry, encode_integer, encode_message, encode_text, encode_texts
from agent.dra.protobuf import flag as flag_of
from agent.dra.protobuf import message as message_of
from agent.dra.protobuf import text as text_of
from agent.model.errors import DocumentError

CLAIMS_LIMIT = 1024
"""The largest number of claims in one request. A request has the claims of one pod."""
ERROR_LIMIT = 2000
"""How many characters of an error are sent. The kubelet puts the error into an event of the pod."""
HEALTH_MESSAGE_LIMIT = 1024
"""Bytes of the longest health message (ResourceHealthMessageMaxLength of k8s.io/api/core/v1)."""


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
    return encode_text(1, kind) + encode_text(2, name) + encode_text(3, endpoint) + encode_texts(4, services)


def decode_registration_status(data: bytes) -> RegistrationStatus:
    """Return a RegistrationStatus. Raises DocumentError."""
    registered, error = False, ""
    for number, value in decode(data):
        if number == 1:
            registered = flag_of(number, value)
        elif number == 2:
            error = text_of(number, value)
    return RegistrationStatus(registered, error)


def decode_claims(data: bytes) -> tuple[ClaimReference, ...]:
    """Return the claims of a NodePrepareResourcesRequest or a NodeUnprepareResourcesRequest. Raises DocumentError."""
    claims = [_claim(message_of(number, value)) for number, value in decode(data) if number == 1]
    if len(claims) > CLAIMS_LIMIT:
        raise DocumentError(f"a request has {len(claims)} claims, more than {CLAIMS_LIMIT}")
    return tuple(claims)


def _claim(data: bytes) -> ClaimReference:
    fields = dict.fromkeys((1, 2, 3), "")
    for number, value in decode(data):
        if number in fields:
            fields[number] = text_of(number, value)
    claim = ClaimReference(namespace=fields[1], uid=fields[2], name=fields[3])
    if not (claim.namespace and claim.uid and claim.name):
        raise DocumentError(f"a claim has no namespace, uid or name: {claim!r}")
    return claim


def encode_prepared(results: Mapping[str, tuple[PreparedDevice, ...] | str]) -> bytes:
    """Return a NodePrepareResourcesResponse.

    `results` has, by the claim's uid, the claim's devices, or a text that says why the claim was not prepared.
    """
    return b"".join(encode_entry(1, uid, _prepared(result)) for uid, result in results.items())


def _prepared(result: tuple[PreparedDevice, ...] | str) -> bytes:
    if isinstance(result, str):
        return encode_text(2, result[:ERROR_LIMIT])
    return b"".join(encode_message(1, _device(each)) for each in result)


def _device(device: PreparedDevice) -> bytes:
    return (
        encode_texts(1, device.requests)
        + encode_text(2, device.pool)
        + encode_text(3, device.device)
        + encode_texts(4, device.cdi_names)
        + encode_text(5, device.share)
    )


def encode_unprepared(results: Mapping[str, str]) -> bytes:
    """Return a NodeUnprepareResourcesResponse.

    `results` has, by the claim's uid, a text that says why the claim is still prepared. The text is empty if the claim
    was unprepared.
    """
    return b"".join(encode_entry(1, uid, encode_text(1, error[:ERROR_LIMIT])) for uid, error in results.items())


def encode_health(devices: Iterable[DeviceHealth], now: int, timeout: int) -> bytes:
    """Return a NodeWatchResourcesResponse with the health of all devices at `now` (seconds since the epoch).

    If no newer response follows within `timeout` seconds, the kubelet considers the health unknown.
    """
    return b"".join(encode_message(1, _health(each, now, timeout)) for each in devices)


def _health(device: DeviceHealth, now: int, timeout: int) -> bytes:
    return (
        encode_message(1, encode_text(1, device.pool) + encode_text(2, device.device))
        + encode_integer(2, device.health)
        + encode_integer(3, now)
        + encode_integer(4, timeout)
        + encode_text(5, shortened(device.message))
    )


def shortened(message: str) -> str:
    """Return at most HEALTH_MESSAGE_LIMIT bytes of a message.

    The kubelet might cut a longer message in the middle of a character.
    """
    raw = message.encode(errors="replace")
    if len(raw) <= HEALTH_MESSAGE_LIMIT:
        return message
    return raw[: HEALTH_MESSAGE_LIMIT - 3].decode(errors="ignore") + "..."
