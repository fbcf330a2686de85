"""Serves the driver to the kubelet on two sockets: one for registration, one for claims and the devices' health."""

import logging
from typing import Protocol

from agent.dra.grpc_server import Admit, Limits, Server
from agent.dra.grpc_wire import Code, Method, RpcError, Unary
from agent.dra.health import HealthService
from agent.dra.messages import (
    ClaimReference,
    PreparedDevice,
    RegistrationStatus,
    decode_claims,
    encode_prepared,
    encode_unprepared,
)
from agent.dra.registration import Registration
from agent.dra.unix_socket import ListeningSocket
from agent.model.errors import AgentError, DocumentError

log = logging.getLogger(__name__)

SERVICE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
REGISTRATION_LIMITS = Limits(connections=4, calls=4, streams=0, message=1 << 16, memory=1 << 20)
"""Both servers together keep at most 16 MiB of requests and responses."""


class Claims(Protocol):
    """Prepares claims. Both methods may be called several times for the same claim, and by several threads."""

    def prepare(self, claim: ClaimReference) -> tuple[PreparedDevice, ...]:
        """Give a claim the devices that are allocated to it, and return them. Raises AgentError or OSError."""

    def unprepare(self, claim: ClaimReference) -> None:
        """Take back the devices of a claim, if it has any. Raises AgentError or OSError."""


class DriverPlugin:
    """The driver's two servers. `keep_serving` must be called regularly."""

    def __init__(self, driver: str, claims: Claims, health: HealthService, kubelet_root: str, admit: Admit) -> None:
        """Start serving. `kubelet_root` is the kubelet's root directory. `admit` says who may connect.

        Raises AgentError.
        """
        self._claims, self._health, self._admit = claims, health, admit
        base, endpoint = f"{kubelet_root}/plugins", f"{driver}/dra.sock"
        self._registration = Registration(driver, f"{base}/{endpoint}")
        # The endpoint is listed, and so served, first: the kubelet connects to it right after registration.
        self._sockets = (
            (base, endpoint, self._methods | health.methods, Limits()),
            (
                f"{kubelet_root}/plugins_registry",
                f"{driver}-reg.sock",
                self._registration.methods,
                REGISTRATION_LIMITS,
            ),
        )
        self._servers: list[Server] = []
        try:
            self._start()
        except AgentError:
            self.stop()
            raise

    @property
    def registration(self) -> RegistrationStatus:
        """Whether the kubelet has registered the driver and is connected. `error` says why the kubelet refuses it."""
        status = self._registration.status
        connected = bool(self._servers) and self._servers[0].clients > 0
        return RegistrationStatus(status.registered and connected, status.error)

    def keep_serving(self) -> None:
        """Start both servers again if a server has failed or a socket was removed, for example by `kubeadm reset`.

        Raises AgentError if they cannot start. The process must then be restarted: if a directory of the kubelet was
        removed and made again, the unit's sandbox still has the removed directory, and cannot write to the new one.
        """
        if len(self._servers) == len(self._sockets) and all(server.healthy for server in self._servers):
            return
        log.warning("the DRA driver's sockets are gone or not served: serving them again")
        self._close()
        self._start()

    def stop(self) -> None:
        """Stop serving, and remove the sockets, so that the kubelet no longer uses the driver."""
        self._health.stop()
        self._close()

    def _start(self) -> None:
        for base, relative, methods, limits in self._sockets:
            self._servers.append(Server(ListeningSocket(base, relative), methods, self._admit, limits))

    def _close(self) -> None:
        # The last server, which is for registration, is stopped first, so that the kubelet does not connect to an
        # endpoint that is about to stop.
        while self._servers:
            self._servers.pop().stop()

    @property
    def _methods(self) -> dict[str, Method]:
        return {
            f"{SERVICE}/NodePrepareResources": Unary(self._prepare),
            f"{SERVICE}/NodeUnprepareResources": Unary(self._unprepare),
        }

    def _prepare(self, request: bytes) -> bytes:
        results: dict[str, tuple[PreparedDevice, ...] | str] = {}
        for claim in _claims_in(request):
            try:
                results[claim.uid] = self._claims.prepare(claim)
            except (AgentError, OSError) as error:
                log.warning("claim %s is not prepared: %s", claim, error)
                results[claim.uid] = str(error)
        return encode_prepared(results)

    def _unprepare(self, request: bytes) -> bytes:
        results: dict[str, str] = {}
        for claim in _claims_in(request):
            try:
                self._claims.unprepare(claim)
                results[claim.uid] = ""
            except (AgentError, OSError) as error:
                log.warning("claim %s is still prepared: %s", claim, error)
                results[claim.uid] = str(error)
        return encode_unprepared(results)


def _claims_in(request: bytes) -> tuple[ClaimReference, ...]:
    try:
        return decode_claims(request)
    except DocumentError as error:
        raise RpcError(Code.INTERNAL, f"the request is malformed: {error}") from error
