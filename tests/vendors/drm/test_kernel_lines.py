"""Lines of amdgpu, i915 and xe in the kernel log: which say something of a GPU's health, and what is recorded of it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.host.daemon.gpu_errors import GpuErrors
from agent.host.state.gpus import observe_gpus
from agent.host.vendors import HOST_VENDORS
from agent.model.facts import GpuFault, Verdict
from agent.system.devices import KernelLog
from agent.vendors.host_vendor import GpuError
from tests.fakes.host import Host

AMD, XE, I915 = "0000:83:00.0", "0000:03:00.0", "0000:00:02.0"
HARMLESS = Path(__file__).parents[2] / "data/harmless_drm_lines.txt"


def errors(text: str) -> list[GpuError]:
    """Return what all vendors find in a line."""
    return [found for vendor in HOST_VENDORS if (found := vendor.parse_kernel_message(text))]


# Each line is in a report of a user or in a commit of Linux (lore.kernel.org, gitlab.freedesktop.org), or is made from
# the format string in Linux 6.12, with another address.
FAULTS = [
    # Commit "drm/amdgpu: add pcie device lost check"; github.com/ROCm/legacy-rocm-build/issues/2804.
    (f"amdgpu {AMD}: amdgpu: device lost from bus!", "LostFromBus", Verdict.NEEDS_REBOOT),
    (f"amdgpu {AMD}: amdgpu: GPU reset(1) failed", "ResetFailed", Verdict.NEEDS_REBOOT),
    (f"amdgpu {AMD}: amdgpu: GPU reset end with ret = -62", "ResetFailed", Verdict.NEEDS_REBOOT),
    (f"amdgpu {AMD}: GPU reset end with ret = -19", "ResetFailed", Verdict.NEEDS_REBOOT),
    (f"amdgpu {AMD}: amdgpu: GPU Recovery Failed: -62", "ResetFailed", Verdict.NEEDS_REBOOT),
    (f"amdgpu {AMD}: amdgpu: GPU recovery disabled.", "NotReset", Verdict.NEEDS_RESET),
    (
        f"amdgpu {AMD}: amdgpu: {{1}}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!",
        "RASFatal",
        Verdict.NEEDS_RESET,
    ),
    (
        f"amdgpu {AMD}: 1048560 uncorrectable hardware errors detected in umc block",
        "RASUncorrectable",
        Verdict.DEGRADED,
    ),
    (
        f"amdgpu {AMD}: amdgpu: {{7}}socket: 0, die: 1, 2 new uncorrectable hardware errors detected in umc block",
        "RASUncorrectable",
        Verdict.DEGRADED,
    ),
    (
        f"amdgpu {AMD}: amdgpu: socket: 0, die: 0 12 uncorrectable hardware errors detected in gfx block",
        "RASUncorrectable",
        Verdict.DEGRADED,
    ),
    (
        f"amdgpu {AMD}: amdgpu: RAS records:256 exceed threshold:256,GPU will not be initialized. Replace this GPU or",
        "BadPages",
        Verdict.BROKEN,
    ),
    (f"amdgpu {AMD}: amdgpu: RAS records:257 exceed threshold:256", "BadPages", Verdict.DEGRADED),
    (f"amdgpu {AMD}: amdgpu: Saved bad pages 256 reaches threshold value 256", "BadPages", Verdict.DEGRADED),
    # lore.kernel.org/linuxppc-dev/20251107161105.85999-1-gbatra@linux.ibm.com, siderolabs/pkgs.
    (f"amdgpu {AMD}: amdgpu: hw_init of IP block <psp> failed -22", "NotStarted", Verdict.NEEDS_REBOOT),
    (f"amdgpu {AMD}: [drm] *ERROR* hw_init of IP block <smu> failed -62", "NotStarted", Verdict.NEEDS_REBOOT),
    (f"amdgpu {AMD}: amdgpu: Fatal error during GPU init", "NotStarted", Verdict.NEEDS_REBOOT),
    (f"amdgpu {AMD}: probe with driver amdgpu failed with error -22", "NotStarted", Verdict.NEEDS_REBOOT),
    (f"amdgpu: probe of {AMD} failed with error -110", "NotStarted", Verdict.NEEDS_REBOOT),
    # Commit "drm/xe/guc: Fix GUC_{LOG,ADS}_... alignment"; github.com/intel/compute-runtime/issues/948. The kernel
    # writes the line breaks of a message as \x0a.
    (
        f"xe {XE}: [drm] *ERROR* CRITICAL: Xe has declared device {XE} as wedged.\\x0aIOCTLs and executions are",
        "Wedged",
        Verdict.NEEDS_RESET,
    ),
    (f"xe {XE}: [drm] device wedged, needs recovery", "Wedged", Verdict.NEEDS_RESET),
    (f"xe {XE}: [drm] *ERROR* GT0: reset failed (-ETIMEDOUT)", "ResetFailed", Verdict.NEEDS_RESET),
    (f"xe {XE}: [drm] *ERROR* Tile0: GT0: resume failed (-ETIMEDOUT)", "ResetFailed", Verdict.NEEDS_RESET),
    (
        f"xe {XE}: [drm] *ERROR* GT0: load failed: status = 0x800001EC, time = 3297ms, freq = 2400MHz, done = 0",
        "FirmwareNotLoaded",
        Verdict.NEEDS_RESET,
    ),
    (f"xe {XE}: Runtime Survivability mode enabled", "FirmwareDamaged", Verdict.BROKEN),
    (f"xe {XE}: In Survivability Mode", "FirmwareDamaged", Verdict.BROKEN),
    (f"xe {XE}: probe with driver xe failed with error -71", "NotStarted", Verdict.NEEDS_REBOOT),
    (f"i915 {I915}: [drm] *ERROR* GT0: Failed to reset chip", "ResetFailed", Verdict.NEEDS_RESET),
    (f"i915 {I915}: [drm] *ERROR* Failed to reset chip", "ResetFailed", Verdict.NEEDS_RESET),
    (
        f"i915 {I915}: [drm] *ERROR* GT0: Failed to initialise HW following reset (-5)",
        "ResetFailed",
        Verdict.NEEDS_RESET,
    ),
    (
        f"i915 {I915}: [drm] *ERROR* GT0: Failed to initialize GPU, declaring it wedged!",
        "Wedged",
        Verdict.NEEDS_RESET,
    ),
    (f"i915 {I915}: Failed to re-initialize GPU[0], declaring it wedged!", "Wedged", Verdict.NEEDS_RESET),
    (
        f"i915 {I915}: [drm] *ERROR* GT0: GuC initialization failed -ENOEXEC",
        "FirmwareNotLoaded",
        Verdict.NEEDS_RESET,
    ),
]


@pytest.mark.parametrize(("text", "reason", "verdict"), FAULTS)
def test_a_driver_that_cannot_use_its_gpu_gives_a_verdict(text: str, reason: str, verdict: Verdict) -> None:
    (found,) = errors(text)
    assert (found.reason, found.verdict, found.pci_address in text) == (reason, verdict, True)
    assert found.lost is (reason == "LostFromBus")
    assert (found.from_application, found.recovered, "{" in found.meaning) == (False, False, False)
    assert errors(f"usb 1-1: Product: {text}") == []


def test_no_line_of_a_healthy_gpu_gives_a_verdict() -> None:
    lines = [line for line in HARMLESS.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) > 100
    found = [each for line in lines for each in errors(line)]
    assert [each for each in found if each.verdict is not Verdict.HEALTHY or each.lost] == []
    assert {each.reason for each in found if each.from_application} == {"Hang", "Wedged"}
    assert [each.reason for each in found if each.recovered] == ["ResetSucceeded"]


class Log:
    """A simulated /dev/kmsg."""

    def __init__(self) -> None:
        self.records = [b"6,1,1,-;Linux version\n"]

    def open(self, path: str, after: int | None) -> KernelLog:
        return KernelLog(os.open(os.devnull, os.O_RDONLY), self._read, after)

    def _read(self, descriptor: int, limit: int) -> bytes:
        return self.records.pop(0) if self.records else b""


class Site:
    """A host with one GPU, whose driver writes into the kernel log."""

    def __init__(self, host: Host, address: str, driver: str) -> None:
        self.host, self.log, self.number, self.driver = host, Log(), 1, driver
        self.device = f"/sys/devices/pci0000:00/{address}"
        host.symlink(f"/sys/bus/pci/devices/{address}", f"../../../devices/pci0000:00/{address}")
        self.bind()
        self.errors = GpuErrors(host, open_log=self.log.open)
        self.errors.open()

    def bind(self) -> None:
        """Let the kernel bind the driver, perhaps again: sysfs does not soon reuse an inode number."""
        link = Path(self.host.root, f"{self.device}/driver".lstrip("/"))
        if link.is_symlink():
            link.rename(link.with_name("before"))
        self.host.symlink(f"{self.device}/driver", f"../../../bus/pci/drivers/{self.driver}")

    def writes(self, text: str) -> bool:
        """Write a line, and return whether it needs a pass."""
        self.number += 1
        self.log.records.append(f"3,{self.number},1,-;{text}\n SUBSYSTEM=pci\n".encode())
        return self.errors.needs_pass()

    def faults(self) -> Mapping[str, GpuFault]:
        return observe_gpus(self.host).faults


@pytest.mark.parametrize(("text", "reason", "verdict"), FAULTS)
def test_a_fault_is_recorded_once_until_the_driver_is_bound_again(
    host: Host, text: str, reason: str, verdict: Verdict
) -> None:
    address = next(each for each in (AMD, XE, I915) if each in text)
    site = Site(host, address, re.split(r"\W", text)[0])
    assert [site.writes(text), site.writes(text)] == [True, False]
    fault = site.faults()[address]
    assert (fault.reason, fault.verdict) == (reason, verdict)
    assert list(observe_gpus(host).lost) == ([address] if reason == "LostFromBus" else [])
    site.bind()
    assert (site.faults(), observe_gpus(host).lost) == ({}, {})


def test_a_reset_that_succeeds_ends_a_fault_of_the_same_gpu_only(host: Host) -> None:
    """After a fatal error, amdgpu resets the GPU by itself. So does it for another program after a failed reset."""
    site = Site(host, AMD, "amdgpu")
    for text in ("uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!", "GPU reset(1) failed"):
        assert site.writes(f"amdgpu {AMD}: amdgpu: {text}")
        assert site.faults()[AMD].verdict.fenced
        assert not site.writes("amdgpu 0000:84:00.0: amdgpu: GPU reset(2) succeeded!")
        assert site.faults()[AMD].verdict.fenced
        assert site.writes(f"amdgpu {AMD}: amdgpu: GPU reset(2) succeeded!")
        assert site.faults() == {}


def test_one_wedged_gpu_is_recorded_once(host: Host) -> None:
    """xe writes two lines, and then udevd sends an event: all three ask for the same."""
    site = Site(host, XE, "xe")
    assert site.writes(f"xe {XE}: [drm] *ERROR* CRITICAL: Xe has declared device {XE} as wedged.")
    fault = site.faults()[XE]
    assert f"`echo {XE} > /sys/bus/pci/devices/{XE}/driver/unbind`" in fault.meaning
    assert not site.writes(f"xe {XE}: [drm] device wedged, needs recovery")
    assert site.faults() == {XE: fault}
