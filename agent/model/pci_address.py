"""PCI addresses: domain:bus:device.function, as sysfs names devices (PCI_DEVID and pci_setup_device in the kernel)."""

import re

PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""An address as sysfs writes it."""


def as_in_sysfs(text: str) -> str:
    """Return the address as sysfs writes it; empty if the text is not a PCI address.

    Some tools print upper-case letters and domains of eight digits. lspci leaves out domain 0.
    """
    text = text.lower()
    if text.count(":") == 1:
        text = f"0000:{text}"
    if not PCI_ADDRESS.fullmatch(text):
        return ""
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}"
