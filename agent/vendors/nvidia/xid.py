"""Parses Xid errors, with which NVIDIA's driver reports a GPU's faults in the kernel log. Pure."""

import re

from agent.vendors.host_vendor import GpuError

MESSAGE = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<address>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]{0,80}\): "
    r"(?P<number>[0-9]{1,3})\b"
)
"""The message of nvErrorLog_va in open-gpu-kernel-modules. Old drivers write no `PCI:`, and MIG adds ` GPU-I:NN` after
the address. The message counts only at the start of a line: elsewhere, the same text could be part of a USB device's
name, which anyone can choose."""
OFF_THE_BUS = 79
RECOVERY_ACTION = 154
ACTION = re.compile(r", GPU recovery action changed from 0x[0-9a-f]+ \([^)]{0,80}\) to 0x(?P<action>[0-9a-f]{1,8})\b")
"""The rest of the message of Xid 154 (gpuRefreshRecoveryAction_KERNEL in gpu.c). Drivers write it since 565."""

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
    140: "an ECC error that the driver could not contain; drain the node and reset the GPU; if this recurs, replace it",
}
"""Errors that need an administrator to act, from NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors)."""

FATAL = frozenset({48, 64, 74, 79, 95, 119, 120, 140})
"""Errors after which pods cannot rely on the GPU until it is reset or the host is rebooted. 63 and 94 are not in the
list: after them, the GPU goes on working, and can be reset when its work is done."""

ACTIONS = {
    0: "the driver needs no recovery of the GPU now",
    1: "the driver needs a reset of the GPU; drain the node and reset the GPU",
    2: "the driver needs a reboot; drain the node and reboot the host",
    3: "the driver needs an end of peer-to-peer traffic; end the programs that use several GPUs",
    4: "the GPU goes on working, but should get no new work; drain the node and reset the GPU",
    5: "the driver needs a recovery of the IMEX domain; see nvidia-imex on its hosts",
}
"""What each recovery action in the message of Xid 154 means, by NV2080_CTRL_GPU_RECOVERY_ACTION (ctrl2080gpu.h)."""
FATAL_ACTIONS = frozenset({1, 2, 4})
"""Actions that must be taken before a new pod gets the GPU. Action 0 does not end a fault that was recorded earlier: it
only says that the driver needs no recovery now. After a reset, the driver does not even log a change to action 0,
because the driver's state of the GPU is new. So whoever resets a GPU must run `gpus attach` to end the fault."""


def parse_xid(text: str) -> GpuError | None:
    """Return the error that a line of the kernel log reports; None for any other line."""
    match = MESSAGE.match(text)
    if match is None:
        return None
    number = int(match["number"])
    meaning = MEANINGS.get(number) or APPLICATION.get(number) or "see NVIDIA's Xid catalogue"
    fatal = number in FATAL
    if number == RECOVERY_ACTION and (changed := ACTION.match(text, match.end())):
        action = int(changed["action"], 16)
        meaning, fatal = ACTIONS.get(action, meaning), action in FATAL_ACTIONS
    # The message omits the PCI function; a GPU is function 0.
    address = f"{match['address'].lower()}.0"
    return GpuError(
        address,
        number,
        f"Xid {number}: {meaning}",
        number in APPLICATION,
        lost=number == OFF_THE_BUS,
        fault=f"Xid{number}" if fatal else "",
    )
