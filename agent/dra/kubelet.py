"""Serves the driver to the kubelet on two sockets: one for registration, one for claims and the devices' health.

Registration: the kubelet watches a directory for sockets (pkg/kubelet/pluginmanager of k8s.io/kubernetes). Within a
second after it sees a new socket, it calls GetInfo there. If the call fails, the kubelet tries again, with growing
pauses, as long as the socket exists. When the socket is removed, the kubelet forgets the driver.

Health: the kubelet puts each device's health into the status of the pods that have the device. It forgets a device's
health if no response has repeated it for TIMEOUT seconds. When the stream ends, for example because agent.dra restarts,
the kubelet forgets the health of all devices. 5 seconds later, it opens another stream, and gets the health again
(pkg/kubelet/cm/dra).

Who may connect: the sockets are in directories of the kubelet that pods may have as hostPath volumes, and root in such
a pod passes every check of modes and users. So a connection counts only if it comes from the process that is the
kubelet according to systemd (agent.system.kubelet_identity).
"""

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from google.protobuf.message import DecodeError, Message

from agent.dra import kubelet_pb2
from agent.dra.claims import ClaimReference, PreparedDevice
from agent.dra.grpc_server import REPEAT, Admit, Code, Limits, ListeningSocket, Method, RpcError, Server, Streaming
from agent.dra.inventory import Device
from agent.model.errors import AgentError
from agent.model.paths import DRA_DRIVER
from agent.model.text import one_line
from agent.system import opening

log = logging.getLogger(__name__)

SO_PEERPIDFD = 77
"""The option returns a pidfd of the process that connected (asm-generic/socket.h, Linux 6.5). socket has no name for it
yet."""
ENDED = (errno.ESRCH, errno.EINVAL)
"""The option's errors if the process has ended; EINVAL before Linux 6.15."""
CREDENTIALS = struct.Struct("=iII")
"""struct ucred of linux/socket.h: process id, user id, group id."""


class KubeletPeer:
    """The kubelet's process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process, self._pidfd = 0, -1

    def follow(self, process: int) -> None:
        """Let this process be the kubelet from now on, if it runs."""
        self.close()
        with self._lock, contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(process)
            self._process = process

    def is_followed(self, process: int) -> bool:
        """Return whether this process is the kubelet, and runs."""
        return self.pidfd >= 0 and process == self._process

    @property
    def pidfd(self) -> int:
        """A descriptor that becomes readable when the kubelet ends; -1 if it does not run."""
        with self._lock:
            return self._pidfd if self._runs() else -1

    def refusal(self, connection: socket.socket) -> str:
        """Return why the process that made a connection may not use it; empty if it is the kubelet. Raises OSError."""
        peer = _peer_process(connection)
        with self._lock:
            # While the kubelet runs, no other process can have its id.
            if not self._runs():
                return f"it is from process {peer}, and no kubelet runs as a service of this machine"
            if peer != self._process:
                return f"it is from process {peer}, and only the kubelet, process {self._process}, may connect"
        return ""

    def close(self) -> None:
        """Forget the kubelet: nobody may connect after that."""
        with self._lock:
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._process, self._pidfd = 0, -1

    def _runs(self) -> bool:
        if self._pidfd < 0:
            return False
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        return not ended.poll(0)


def _peer_process(connection: socket.socket) -> int:
    """Return the id of the process that connected; 0 if it has ended, or is outside this PID namespace. Raises OSError.

    Before Linux 6.5, the id of a process that has ended is returned too, although another process may have it by now.
    The server accepts connections within milliseconds, so such an id would have to be reused within that time.
    """
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in ENDED:
            return 0
        if error.errno != errno.ENOPROTOOPT:
            raise
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        process: int = CREDENTIALS.unpack(raw)[0]
        return process
    try:
        with opening.plain(f"/proc/self/fdinfo/{pidfd}") as file:
            lines = file.read().decode().splitlines()
    finally:
        os.close(pidfd)
    # -1 for a process that has ended (proc(5)).
    return max(0, *(int(line.split()[1]) for line in lines if line.startswith("Pid:")))


CLAIMS_LIMIT = 1024
"""The largest number of claims in one request. A request has the claims of one pod."""
ERROR_LIMIT = 2000
"""How many characters of an error are sent. The kubelet puts the error into an event of the pod."""
HEALTH_MESSAGE_LIMIT = 1024
"""Bytes of the longest health message (ResourceHealthMessageMaxLength of k8s.io/api/core/v1)."""

_READING = threading.Lock()
"""A request of many empty claims takes 40 times its size in memory while it is read, so one is read at a time."""


def decode_claims(data: bytes) -> tuple[ClaimReference, ...]:
    """Return the claims of a NodePrepareResourcesRequest or a NodeUnprepareResourcesRequest. Raises RpcError."""
    with _READING:
        request = kubelet_pb2.ClaimsRequest()
        _read(request, data)
        if len(request.claims) > CLAIMS_LIMIT:
            raise RpcError(Code.INTERNAL, f"a request has {len(request.claims)} claims, more than {CLAIMS_LIMIT}")
        claims = tuple(ClaimReference(each.namespace, each.name, each.uid) for each in request.claims)
        del request
    for each in claims:
        if not all(each):
            raise RpcError(Code.INTERNAL, f"a claim has no namespace, uid or name: {each!r}")
    return claims


def encode_health(pool: str, devices: Iterable[Device], now: int) -> bytes:
    """Return a NodeWatchResourcesResponse with the health of a pool's devices at `now` (seconds since the epoch)."""
    response = kubelet_pb2.NodeWatchResourcesResponse()
    for each in devices:
        message = each.health_message.encode(errors="replace")
        if len(message) > HEALTH_MESSAGE_LIMIT:
            # The kubelet might cut a longer message in the middle of a character.
            message = message[: HEALTH_MESSAGE_LIMIT - 3].decode(errors="ignore").encode() + b"..."
        response.devices.add(
            device=kubelet_pb2.DeviceIdentifier(pool_name=_valid(pool), device_name=_valid(each.name)),
            health=each.health.name,
            last_updated_time=now,
            health_check_timeout_seconds=TIMEOUT,
            message=message.decode(),
        )
    return response.SerializeToString()


def _read(message: Message, data: bytes) -> None:
    try:
        read = message.MergeFromString(data)
    except DecodeError as error:
        raise RpcError(Code.INTERNAL, f"the request is malformed: {error}") from error
    # Debian's runtime only warns of some damage, and leaves out the rest.
    if read != len(data):
        raise RpcError(Code.INTERNAL, f"the request is malformed: only {read} of {len(data)} bytes are a message")


def _valid(text: str) -> str:
    """Return a text that can be sent: surrogates, which the name of a file may have, become `?`."""
    return text.encode(errors="replace").decode()


TIMEOUT = 60
"""Seconds after which the kubelet considers the health unknown: several times REPEAT of agent.dra.grpc_server, as a
response may be late."""
METHODS = ("/v1.DRAResourceHealth/NodeWatchResources", "/v1alpha1.DRAResourceHealth/NodeWatchResources")
"""The paths of the same method in Kubernetes 1.37 and in 1.36."""
PLUGIN_TYPE = "DRAPlugin"
"""The kind of plugin (DRAPlugin of k8s.io/kubelet/pkg/apis/pluginregistration/v1/constants.go)."""
SERVICES = ("v1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""The served gRPC services, under the names that the kubelet expects (dra_plugin_manager.go of
pkg/kubelet/cm/dra/plugin). Kubernetes 1.36 uses v1alpha1 of the health service even if it is not listed; from 1.37 on,
the kubelet uses only listed services."""
REGISTRATION_SERVICE = "/pluginregistration.Registration"
SERVICE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
REGISTRATION_LIMITS = Limits(connections=4, calls=4, streams=0, message=1 << 16, memory=1 << 20)
"""Both servers together keep at most 16 MiB of requests and responses."""


class RegistrationStatus(NamedTuple):
    """What the kubelet reports about the driver's registration."""

    registered: bool
    error: str = ""


class DriverPlugin:
    """The driver's two servers."""

    def __init__(
        self,
        prepare: Callable[[ClaimReference], tuple[PreparedDevice, ...]],
        unprepare: Callable[[ClaimReference], None],
        pool: str,
        kubelet_root: str,
        admit: Admit,
        changed: Callable[[], None] = lambda: None,
        repeat: float = REPEAT,
    ) -> None:
        """Start serving. `pool` has all the devices. `kubelet_root` is the kubelet's root directory.

        `prepare` gives a claim the devices that are allocated to it, and `unprepare` takes them back. Both may be
        called several times for the same claim, and by several threads, and may raise AgentError or OSError. `admit`
        says who may connect.

        `changed` is called when the registration has changed, or a server has ended. `keep_serving` must be called
        then, and when a name in one of `directories` has changed. Raises AgentError.
        """
        self._prepare_claim, self._unprepare_claim, self._pool = prepare, unprepare, pool
        self._admit, self._changed, self._repeat = admit, changed, repeat
        self._devices: tuple[Device, ...] = ()
        self._status = RegistrationStatus(False)
        base, registry, endpoint = (
            f"{kubelet_root}/plugins",
            f"{kubelet_root}/plugins_registry",
            f"{DRA_DRIVER}/dra.sock",
        )
        self._endpoint = f"{base}/{endpoint}"
        self.directories = f"{base}/{DRA_DRIVER}", registry
        """The directories of the sockets."""
        driver: dict[str, Method] = {
            f"{SERVICE}/NodePrepareResources": self._prepare,
            f"{SERVICE}/NodeUnprepareResources": self._unprepare,
            **dict.fromkeys(METHODS, Streaming(self._health)),
        }
        registration: dict[str, Method] = {
            f"{REGISTRATION_SERVICE}/GetInfo": self._get_info,
            f"{REGISTRATION_SERVICE}/NotifyRegistrationStatus": self._notify,
        }
        # The endpoint is listed, and so served, first: the kubelet connects to it right after registration.
        self._sockets = (
            (base, endpoint, driver, Limits()),
            (registry, f"{DRA_DRIVER}-reg.sock", registration, REGISTRATION_LIMITS),
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
        connected = bool(self._servers) and self._servers[0].clients > 0
        return RegistrationStatus(self._status.registered and connected, self._status.error)

    def keep_serving(self) -> None:
        """Start both servers again if a server has failed or a socket was removed, for example by `kubeadm reset`.

        Raises AgentError if they cannot start. The process must then be restarted: if a directory of the kubelet was
        removed and made again, the unit's sandbox still has the removed directory, and cannot write to the new one.
        """
        if len(self._servers) == len(self._sockets) and all(server.healthy for server in self._servers):
            return
        log.warning("the DRA driver's sockets are gone or not served: serving them again")
        self.stop()
        self._start()

    def stop(self) -> None:
        """Stop serving, and remove the sockets, so that the kubelet no longer uses the driver."""
        # The last server, which is for registration, is stopped first, so that the kubelet does not connect to an
        # endpoint that is about to stop.
        while self._servers:
            self._servers.pop().stop()

    def publish_health(self, devices: Iterable[Device]) -> None:
        """Tell the kubelet the health of all devices, if it has changed. Before the first call, it knows of none."""
        before, self._devices = self._devices, tuple(devices)
        if self._devices != before and self._servers:
            self._servers[0].push()

    def _start(self) -> None:
        for base, relative, methods, limits in self._sockets:
            listener = ListeningSocket(base, relative)
            self._servers.append(Server(listener, methods, self._admit, limits, self._changed, self._repeat))

    def _health(self) -> bytes:
        return encode_health(self._pool, self._devices, int(time.time()))

    def _get_info(self, _: bytes) -> bytes:
        return kubelet_pb2.PluginInfo(
            type=PLUGIN_TYPE, name=DRA_DRIVER, endpoint=_valid(self._endpoint), supported_versions=SERVICES
        ).SerializeToString()

    def _notify(self, request: bytes) -> bytes:
        reported = kubelet_pb2.RegistrationStatus()
        _read(reported, request)
        before, self._status = self._status, RegistrationStatus(reported.plugin_registered, reported.error)
        if self._status != before:
            self._changed()
            if self._status.registered:
                log.info("the kubelet has registered the driver")
            else:
                why = one_line(self._status.error)
                log.error("the kubelet does not register the driver, and will try again: %s", why)
        return b""

    def _prepare(self, request: bytes) -> bytes:
        response = kubelet_pb2.NodePrepareResourcesResponse()
        for claim in decode_claims(request):
            answer = response.claims[claim.uid]
            with _told(answer, claim, "not prepared"):
                for each in self._prepare_claim(claim):
                    answer.devices.add(
                        request_names=map(_valid, each.requests),
                        pool_name=_valid(each.pool),
                        device_name=_valid(each.device),
                        cdi_device_ids=map(_valid, each.cdi_names),
                        share_id=_valid(each.share) or None,
                    )
        return response.SerializeToString()

    def _unprepare(self, request: bytes) -> bytes:
        response = kubelet_pb2.NodeUnprepareResourcesResponse()
        for claim in decode_claims(request):
            with _told(response.claims[claim.uid], claim, "still prepared"):
                self._unprepare_claim(claim)
        return response.SerializeToString()


@contextlib.contextmanager
def _told(
    answer: kubelet_pb2.NodePrepareResourceResponse | kubelet_pb2.NodeUnprepareResourceResponse,
    claim: ClaimReference,
    state: str,
) -> Iterator[None]:
    """Put an error into the answer for one claim: it must not fail the other claims of the pod."""
    try:
        yield
    except (AgentError, OSError) as error:
        log.warning("claim %s is %s: %s", claim, state, one_line(str(error)))
        answer.error = _valid(str(error))[:ERROR_LIMIT]
