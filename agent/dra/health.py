"""Reports each device's health to the kubelet, which puts it into the status of the pods that have the device.

The kubelet forgets a device's health if no response has repeated it for TIMEOUT seconds. When the stream ends, for
example because agent.dra restarts, the kubelet forgets the health of all devices. 5 seconds later, it opens another
stream, and gets the health again (pkg/kubelet/cm/dra of k8s.io/kubernetes).
"""

import threading
import time
from collections.abc import Iterable, Iterator

from agent.dra.devices import Device
from agent.dra.grpc_wire import Method, Streaming
from agent.dra.messages import DeviceHealth, encode_health

REPEAT = 10.0
"""Seconds after which the same health is sent again."""
TIMEOUT = 60
"""Seconds after which the kubelet considers the health unknown: several times REPEAT, as a response may be late."""
METHODS = ("/v1.DRAResourceHealth/NodeWatchResources", "/v1alpha1.DRAResourceHealth/NodeWatchResources")
"""The paths of the same method in Kubernetes 1.37 and in 1.36."""


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
    def methods(self) -> dict[str, Method]:
        """The methods by path."""
        return {method: Streaming(self._watch) for method in METHODS}

    def publish(self, pool: str, devices: Iterable[Device]) -> None:
        """Replace the published health of all devices. `pool` is the pool to which all the devices belong."""
        health = tuple(DeviceHealth(pool, each.name, each.health, each.health_message) for each in devices)
        with self._changed:
            if health != self._devices:
                self._devices = health
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
            # A response without devices is sent too, because sending shows whether the client still listens.
            yield encode_health(devices or (), int(time.time()), TIMEOUT)
