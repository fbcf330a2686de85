"""Registers the driver with the kubelet, which finds a socket, calls it, and reports whether it accepts the driver.

The kubelet watches a directory for sockets (pkg/kubelet/pluginmanager of k8s.io/kubernetes). Within a second after it
sees a new socket, it calls GetInfo there. If the call fails, the kubelet tries again, with growing pauses, as long as
the socket exists. When the socket is removed, the kubelet forgets the driver.
"""

import logging
import threading

from agent.dra.grpc_wire import Code, Method, RpcError, Unary
from agent.dra.messages import RegistrationStatus, decode_registration_status, encode_plugin_info
from agent.model.errors import DocumentError
from agent.model.text import one_line

log = logging.getLogger(__name__)

PLUGIN_TYPE = "DRAPlugin"
"""The kind of plugin (DRAPlugin of k8s.io/kubelet/pkg/apis/pluginregistration/v1/constants.go)."""
SERVICES = ("v1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""The served gRPC services, under the names that the kubelet expects (dra_plugin_manager.go of
pkg/kubelet/cm/dra/plugin). Kubernetes 1.36 uses v1alpha1 of the health service even if it is not listed; from 1.37 on,
the kubelet uses only listed services."""
SERVICE = "/pluginregistration.Registration"


class Registration:
    """The registration service, and the status that the kubelet last reported."""

    def __init__(self, driver: str, endpoint: str) -> None:
        """`endpoint` is the path of the socket that serves the driver."""
        self._info = encode_plugin_info(PLUGIN_TYPE, driver, endpoint, SERVICES)
        self._lock = threading.Lock()
        self._status = RegistrationStatus(False, "")

    @property
    def methods(self) -> dict[str, Method]:
        """The methods by path."""
        return {
            f"{SERVICE}/GetInfo": Unary(lambda _: self._info),
            f"{SERVICE}/NotifyRegistrationStatus": Unary(self._notify),
        }

    @property
    def status(self) -> RegistrationStatus:
        """The status that the kubelet last reported. Before its first report: not registered, and no error."""
        with self._lock:
            return self._status

    def _notify(self, request: bytes) -> bytes:
        try:
            status = decode_registration_status(request)
        except DocumentError as error:
            raise RpcError(Code.INTERNAL, f"RegistrationStatus: {error}") from error
        with self._lock:
            changed, self._status = status != self._status, status
        if changed and status.registered:
            log.info("the kubelet has registered the driver")
        elif changed:
            log.error("the kubelet does not register the driver, and will try again: %s", one_line(status.error))
        return b""
