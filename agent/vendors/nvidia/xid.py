"""Parses Xid errors, with which NVIDIA's driver reports a GPU's faults in the kernel log. Pure."""

import re

from agent.vendors.host_vendor import GpuError

MESSAGE = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<address>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]{0,80}\): "
    r"(?P<number>[0-9]{1,3})\b"
)
"""The message of nvErrorLog_va in open-gpu-kernel-modules. Old drivers write no `PCI:`, and MIG adds ` GPU-I:NN` after
the address. It must be at the start of a line: elsewhere, it could be part of a USB device's name, which anyone can
choose."""
OFF_THE_BUS = 79

APPLICATION = {
    13: "an application's fault on the graphics engine",
    31: "an application's access to memory that it does not have",
    43: "a GPU that stopped processing for one application",
    45: "the end of an application whose channels were cleaned up",
    68: "a video processor error of one application",
    109: "a context switch of one application that timed out",
}
"""Errors that say nothing about the GPU's health: NVIDIA's device plugin ignores them too."""
MEANINGS = {
    48: "a double-bit ECC error; drain the node and reset the GPU",
    63: "a memory row to be remapped, or a page to be retired; reset the GPU when its work is done",
    64: "a memory row that could not be remapped, or a page not retired; reset the GPU; if this recurs, replace it",
    74: "an NVLink error; reset the GPU, and see nvidia-smi nvlink --status",
    79: "the GPU has fallen off the bus; drain the node and reboot the host; if this recurs, check power and seating",
    94: "a contained ECC error; restart the application that had it, and reset the GPU when its work is done",
    95: "an uncontained ECC error; drain the node and reset the GPU",
    119: "the GPU's system processor (GSP) does not answer; drain the node and reset the GPU",
    120: "an error of the GPU's system processor (GSP); drain the node and reset the GPU",
}
"""Errors that need an administrator to act, from NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors)."""

FATAL = frozenset({48, 64, 74, 79, 95, 119, 120})
"""Errors after which pods cannot rely on the GPU until it is reset or the host is rebooted. After 63 and 94, the GPU
goes on working, and can be reset when its work is done."""


def parse_xid(text: str) -> GpuError | None:
    """Return the error that a line of the kernel log reports; None for any other line."""
    match = MESSAGE.match(text)
    if match is None:
        return None
    number = int(match["number"])
    meaning = MEANINGS.get(number) or APPLICATION.get(number) or "see NVIDIA's Xid catalogue"
    # The message omits the PCI function; a GPU is function 0.
    address = f"{match['address'].lower()}.0"
    return GpuError(
        address,
        number,
        f"Xid {number}: {meaning}",
        number in APPLICATION,
        lost=number == OFF_THE_BUS,
        fault=f"Xid{number}" if number in FATAL else "",
    )
