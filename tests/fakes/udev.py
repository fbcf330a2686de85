"""Events of udevd, and a simulation of pyudev's monitor."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Event:
    subsystem: str
    action: str
    device_path: str
    properties: Mapping[str, str] = field(default_factory=dict)


class Sent(list[Event]):
    """A monitor with events that have come."""

    def fileno(self) -> int:
        return 0

    def poll(self, timeout: float) -> Event | None:
        return self.pop(0) if self else None
