"""What NVIDIA's catalogue, the drivers' sources and the kernel's documentation say of errors of GPUs.

It is written apart from the agent's parsers, and shares only NVIDIA's own table with them, of which it reads numbers
and actions. The words of the verdicts are those of docs/conditions.md.
"""

from pathlib import Path
from typing import NamedTuple

HEALTHY, DEGRADED, RESET, REBOOT, BROKEN = "healthy", "degraded", "needs-reset", "needs-reboot", "broken"
NO_DRIVER = "not-known"
FENCED = frozenset({RESET, REBOOT, BROKEN, NO_DRIVER})

CATALOGUE = Path(__file__).parents[2] / "agent/vendors/nvidia/xids.tsv"
KERNEL_LINES = Path(__file__).parents[2] / "tests/data"
CLASSES = {
    "RESET_GPU": RESET,
    "RESTART_BM": REBOOT,
    "RESTART_VM": REBOOT,
    "CHECK_MECHANICALS": BROKEN,
    "CONTACT_SUPPORT": DEGRADED,
    "UPDATE_SWFW": DEGRADED,
    "CHECK_UVM": DEGRADED,
    "RESTART_APP": HEALTHY,
    "IGNORE": HEALTHY,
    # An error without an action.
    "": HEALTHY,
    # The first steps of NVIDIA's workflows: drain and reset; drain and reset; restart the application.
    "WORKFLOW_XID_48": RESET,
    "WORKFLOW_NVLINK_ERR": RESET,
    "WORKFLOW_XID_45": HEALTHY,
}
"""Verdicts by the catalogue's column Immediate Action."""
UNLIKE_THE_CATALOGUE = {
    # NVIDIA's device plugin takes 109 for an application's.
    109: HEALTHY,
    # Row remapping and page retirement (GPU Memory Error Management): the GPU works on until its next reset, or loses
    # its spare rows.
    63: DEGRADED,
    92: DEGRADED,
    94: DEGRADED,
    157: DEGRADED,
    168: DEGRADED,
}
WITH_A_MESSAGE = frozenset({79, *range(144, 151), 154})
"""Errors of which the number alone does not say all."""


def xids() -> dict[str, list[int]]:
    """Return the numbers of each verdict, in their order."""
    found: dict[str, list[int]] = {}
    for line in CATALOGUE.read_text().splitlines():
        if not line.startswith("#"):
            number, _, action = line.split("\t")
            if int(number) not in WITH_A_MESSAGE:
                verdict = UNLIKE_THE_CATALOGUE.get(int(number)) or CLASSES[action]
                found.setdefault(verdict, []).append(int(number))
    return found


def of_applications() -> list[int]:
    """Return the numbers of the errors that programs cause."""
    rows = (line.split("\t") for line in CATALOGUE.read_text().splitlines() if not line.startswith("#"))
    return [int(number) for number, _, action in rows if action == "RESTART_APP"]


RECOVERY_ACTIONS = {
    1: ("GPU Reset Required", RESET),
    2: ("Node Reboot Required", REBOOT),
    3: ("Drain P2P", DEGRADED),
    4: ("Drain and Reset", RESET),
}
"""NV2080_CTRL_GPU_RECOVERY_ACTION_* (ctrl2080gpu.h), in the words of Xid 154."""


class Line(NamedTuple):
    """What a driver writes. `{}` stands for the GPU's address."""

    text: str
    verdict: str
    reason: str
    refused: bool = False
    """The driver did not take the GPU."""


_INSTALLED = "NVRM: The NVIDIA GPU {} (PCI ID: 10de:1db5)\\x0aNVRM: installed in this system "
REFUSED = (
    Line(f"{_INSTALLED}is not supported by open\\x0aNVRM: nvidia.ko because it", BROKEN, "NeedsProprietaryDriver"),
    Line(f"{_INSTALLED}is not supported by the\\x0aNVRM: NVIDIA 580.95.05 driver release.", BROKEN, "UnsupportedGPU"),
    Line(f"{_INSTALLED}has\\x0aNVRM: fallen off the bus and is not responding", REBOOT, "FallenOffBus"),
    Line("nvidia {}: probe with driver nvidia failed with error -1", RESET, "ProbeFailed"),
    Line(
        "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:\\x0aNVRM: BAR0 is 0M @ 0x0 (PCI:{})",
        BROKEN,
        "InvalidRegion",
    ),
)
AMD_LINES = (
    Line("amdgpu {}: amdgpu: GPU reset(1) failed", REBOOT, "ResetFailed"),
    Line("amdgpu {}: amdgpu: GPU Recovery Failed: -62", REBOOT, "ResetFailed"),
    Line("amdgpu {}: amdgpu: GPU recovery disabled.", RESET, "NotReset"),
    Line("amdgpu {}: amdgpu: uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!", RESET, "RASFatal"),
    Line("amdgpu {}: amdgpu: 2 uncorrectable hardware errors detected in umc block", DEGRADED, "RASUncorrectable"),
    Line("amdgpu {}: amdgpu: Saved bad pages 256 reaches threshold value 256", DEGRADED, "BadPages"),
    Line("amdgpu {}: amdgpu: ring gfx_0.0.0 timeout, signaled seq=1, emitted seq=3", HEALTHY, ""),
)
XE_LINES = (
    Line("xe {}: [drm] *ERROR* CRITICAL: Xe has declared device {} as wedged.\\x0aIOCTLs", RESET, "Wedged"),
    Line("xe {}: [drm] *ERROR* GT0: reset failed (-ETIMEDOUT)", RESET, "ResetFailed"),
    Line("xe {}: [drm] Tile0: GT0: Timedout job: seqno=4294967169", HEALTHY, ""),
)
I915_LINES = (
    Line("i915 {}: [drm] *ERROR* Failed to reset chip", RESET, "ResetFailed"),
    Line("i915 {}: [drm] *ERROR* Failed to initialize GPU, declaring it wedged!", RESET, "Wedged"),
    Line("i915 {}: [drm] GPU HANG: ecode 9:1:85dffffb, in Xorg", HEALTHY, ""),
)
WEDGED = {
    "rebind": RESET,
    "bus-reset": RESET,
    "rebind,bus-reset": RESET,
    "unknown": REBOOT,
    "cold-reset": REBOOT,
    "vendor-specific": BROKEN,
    "none": HEALTHY,
}
"""Recovery methods in Documentation/gpu/drm-uapi.rst; the first is the mildest. `cold-reset` is newer than 6.15."""
ASKED_FOR = {"Reset": RESET, "Reboot": REBOOT, "Drain and Reset": RESET, "Drain P2P": DEGRADED}
"""What nvidia-smi prints as gpu_recovery_action."""


def harmless() -> list[str]:
    """Return lines of kernel logs that say nothing of a GPU's health."""
    files = (KERNEL_LINES / "kernel_lines/harmless.txt", KERNEL_LINES / "harmless_drm_lines.txt")
    found = [line for file in files for line in file.read_text().splitlines()]
    return [line for line in found if line and not line.startswith("#")]
