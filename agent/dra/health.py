"""Tells the kubelet how the devices are. The kubelet puts that into the status of pods that have one.

The kubelet forgets a device's health when no response has repeated it for some time, and everything when the stream
ends; it then opens another stream after 5 seconds (pkg/kubelet/cm/dra of k8s.io/kubernetes).
"""

import threading
import time
from collections.abc import Iterable, Iterator

from agent.dra.devices import Device, Health
from agent.dra.grpc_wire import Service, Streaming
from agent.dra.messages import DeviceHealth, HealthStatus, encode_health

REPEAT = 10.0
"""Seconds after which the same health is sent again."""
TIMEOUT = 60
"""Seconds after which the kubelet considers the health unknown: no pod's status changes while agent.dra restarts."""
METHODS = ("/v1.DRAResourceHealth/NodeWatchResources", "/v1alpha1.DRAResourceHealth/NodeWatchResources")
"""The same method in Kubernetes 1.37 and 1.36."""

STATUSES = {
    Health.HEALTHY: HealthStatus.HEALTHY,
    Health.UNHEALTHY: HealthStatus.UNHEALTHY,
    Health.UNKNOWN: HealthStatus.UNKNOWN,
}


class HealthService:
    """The health service. Before the first `publish`, the kubelet knows no device's health."""

    def __init__(self, repeat: float = REPEAT) -> None:
        self._repeat = repeat
        self._changed = threading.Condition()
        self._devices: tuple[DeviceHealth, ...] | None = None
        self._edition = 0
        """How often the health has changed."""
        self._stopped = False

    @property
    def services(self) -> dict[str, Service]:
        """The methods by path."""
        return {method: Streaming(self._watch) for method in METHODS}

    def publish(self, pool: str, devices: Iterable[Device]) -> None:
        """Send the health of all devices of a pool to those who watch, if it has changed."""
        found = tuple(DeviceHealth(pool, each.name, STATUSES[each.health], each.health_message) for each in devices)
        with self._changed:
            if found != self._devices:
                self._devices = found
                self._edition += 1
                self._changed.notify_all()

    def stop(self) -> None:
        """End all streams."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _watch(self, _: bytes) -> Iterator[bytes]:
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self._stopped or self._edition != seen, self._repeat)  # type: ignore[misc]
                if self._stopped:
                    return
                devices, seen = self._devices, self._edition
            # An empty response, too: it shows whether the client still listens.
            yield encode_health(devices or (), int(time.time()), TIMEOUT)
