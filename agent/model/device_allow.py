"""An entry of a unit's DeviceAllow= list, systemd.resource-control(5)."""

from msgspec import Struct


class DeviceAllow(Struct, frozen=True):
    """What a unit may do with a device or a group of devices, written as `/dev/char/195:0 rw`."""

    node: str
    """A path in /dev, or a group such as `char-pts`."""
    permissions: str = ""
    """Some of the letters `rwm`; empty means all of them."""

    @classmethod
    def parse(cls, text: str) -> "DeviceAllow":
        """Return the entry that `str()` turns back into this text. Any text is accepted: systemd validates it."""
        node, _, permissions = text.partition(" ")
        return cls(node, permissions)

    def __str__(self) -> str:
        return f"{self.node} {self.permissions}" if self.permissions else self.node
