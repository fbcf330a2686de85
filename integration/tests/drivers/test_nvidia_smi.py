"""NVIDIA's nvidia-smi of three drivers asks for the health of simulated GPUs, and resets them.

There is no virtual machine. Simulation: the GPUs, NVML, and the health file of the stand-in kernel module, which here
is a plain file. So the test itself says how many descriptors of a GPU are open.
"""

import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest

from agent.vendors.nvidia.nvidia_ctk import parse_link_errors
from integration.bed import ubuntu
from integration.bed.drivers.generator import INFORMATION
from integration.bed.drivers.host_roots import driver_version, host_root
from integration.bed.drivers.nvml import library_name, nvml
from integration.bed.process import complete

pytestmark = pytest.mark.scenario("002")

FIRST, SECOND = GPUS = ("0000:01:00.0", "0000:02:00.0")
# Arguments: the host's root, the stand-in library, the path of NVIDIA's, the directory that becomes /proc/driver, then
# the arguments of nvidia-smi.
NAMESPACE = """
set -e
root=$1 library=$2 original=$3 driver=$4
shift 4
mount --bind "$library" "$original"
mount -t proc proc "$root/proc"
mount --bind "$driver" "$root/proc/driver"
mount -t tmpfs tmpfs "$root/dev"
for name in null nvidiactl nvidia0 nvidia1; do mknod -m 666 "$root/dev/$name" c 1 3; done
exec chroot "$root" nvidia-smi "$@"
"""


class Value(NamedTuple):
    """A line of the health file without the GPU, a field, and what it says before and after."""

    line: str
    field: str
    healthy: str
    faulty: str


VALUES = (
    Value("ecc_uncorrected 3", "ecc.errors.uncorrected.volatile.total", "0", "3"),
    Value("rows_correctable 2", "remapped_rows.correctable", "0", "2"),
    Value("rows_pending 1", "remapped_rows.pending", "No", "Yes"),
    Value("rows_failed 1", "remapped_rows.failure", "No", "Yes"),
    Value("clock_reasons 136", "clocks_event_reasons.hw_power_brake_slowdown", "Not Active", "Active"),
    Value("clock_reasons 136", "clocks_throttle_reasons.hw_power_brake_slowdown", "Not Active", "Active"),
    Value("persistence 1", "persistence_mode", "Disabled", "Enabled"),
    Value("recovery_action 1", "gpu_recovery_action", "None", "Reset"),
    Value("recovery_action 1", "reset_status.reset_required", "No", "Yes"),
    Value("recovery_action 4", "reset_status.drain_and_reset_recommended", "No", "Yes"),
    Value("fabric_state 3", "fabric.state", "[N/A]", "Completed"),
    # Only a GPU with a fabric has these.
    Value("fabric_health 2", "fabric.health.summary", "Healthy", "Unhealthy"),
    Value("fabric_health 2", "fabric.health.route_unhealthy", "False", "True"),
    Value("answer 16", "ecc.errors.uncorrected.volatile.total", "0", "[GPU requires reset]"),
)
# Drivers before 565 know no recovery action, later ones no reset status; those of Debian 12 and 13 have rows and the
# fabric's health only in `nvidia-smi -q`.
NOT_IN_ALL = ("remapped_rows.", "fabric.health.", "gpu_recovery_action", "reset_status.")


class NvidiaSmi:
    """nvidia-smi on a host with two GPUs. Its health file lasts from one command to the next."""

    def __init__(self, root: Path, work: Path) -> None:
        version = driver_version(root)
        (self._original,) = (path for path in root.glob(f"usr/lib/**/{library_name(version)}") if not path.is_symlink())
        self._root, self._library, self._driver = root, nvml(self._original, version), work / "driver"
        for minor, gpu in enumerate(GPUS):
            information = self._driver / "nvidia/gpus" / gpu / "information"
            information.parent.mkdir(parents=True)
            text = INFORMATION.format(uuid=f"GPU-00000000-0000-4000-8000-00000000000{minor}", gpu=gpu)
            information.write_text(re.sub("Minor: .*", f"Minor: \t {minor}", text))
        (self._driver / "nvidia/version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  x\n")
        self._health = self._driver / "nvidia/simulated_health"
        self.heal()

    def heal(self) -> None:
        self._health.write_text("")

    def say(self, gpu: str, *lines: str) -> None:
        """Write these lines about the GPU to the health file."""
        with self._health.open("a") as file:
            file.writelines(f"{GPUS.index(gpu)} {line}\n" for line in lines)

    def run(self, *arguments: str) -> CompletedProcess[str]:
        namespace = ("unshare", "--mount", "sh", "-c", NAMESPACE, "sh", self._root, self._library, self._original)
        return complete((*namespace, self._driver, *arguments), timeout=60)

    def field(self, gpu: str, field: str) -> str:
        """Return what a field says. Release 550 prints `state  Completed` for `Completed`."""
        query = f"--query-gpu=pci.bus_id,{field}"
        result = self.run(f"--id={gpu}", query, "--format=csv,noheader,nounits")
        address, _, value = result.stdout.strip().partition(", ")
        assert address == f"0000{gpu}", result
        return value.removeprefix("state  ")

    def knows(self, field: str) -> bool:
        return f'"{field}"' in self.run("--help-query-gpu").stdout

    def reset(self, *gpus: str) -> tuple[int, str]:
        result = self.run("--gpu-reset", "-i", ",".join(gpus))
        return result.returncode, result.stdout


@pytest.fixture(params=["trixie", "bookworm", ubuntu.UBUNTU])
def smi(request: pytest.FixtureRequest, tmp_path: Path) -> NvidiaSmi:
    return NvidiaSmi(host_root(suite=request.param), tmp_path)


def test_a_gpu_is_asked_for_its_health_by_its_address(smi: NvidiaSmi) -> None:
    """By default, it is healthy. Each value is that of one GPU."""
    known = {value.field for value in VALUES if smi.knows(value.field)}
    assert {value.field for value in VALUES if not value.field.startswith(NOT_IN_ALL)} <= known
    for value in (value for value in VALUES if value.field in known):
        smi.heal()
        for gpu in GPUS:
            smi.say(gpu, "fabric_state 3" if value.line.startswith("fabric_health") else "fabric_state 0")
        assert smi.field(SECOND, value.field) == value.healthy, value
        smi.say(SECOND, value.line)
        assert (smi.field(FIRST, value.field), smi.field(SECOND, value.field)) == (value.healthy, value.faulty), value
    smi.heal()
    assert smi.field(SECOND, "retired_pages.pending") == "[N/A]", "Hopper remaps rows"
    smi.say(SECOND, "architecture 6", "pages_pending 1")
    assert smi.field(SECOND, "retired_pages.pending") == "Yes"
    assert (
        smi.run("--id=0000:09:00.0", "--query-gpu=pci.bus_id", "--format=csv").stdout.strip() == "No devices were found"
    )


def test_the_errors_of_nvlinks_are_read(smi: NvidiaSmi) -> None:
    uuid = "GPU-00000000-0000-4000-8000-000000000001"
    assert parse_link_errors(smi.run("nvlink", "-e", "-i", "1").stdout) == {}, "without links, it prints nothing"
    smi.say(SECOND, "nvlinks 2", "link_replay 3", "link_crc 70000")
    printed = [smi.run("nvlink", "-e", "-i", index) for index in ("0", "1")]
    assert [each.returncode for each in printed] == [0, 0]
    assert [parse_link_errors(each.stdout) for each in printed] == [
        {},
        {uuid: {"Replay": 3, "Recovery": 0, "CRC": 70000}},
    ]


def test_a_reset_ends_the_faults_that_a_reset_ends(smi: NvidiaSmi) -> None:
    for gpu in GPUS:
        smi.say(gpu, "ecc_uncorrected 3", "recovery_action 1", "rows_pending 1", "answer 16", "clock_reasons 136")
    assert smi.reset(SECOND) == (0, f"GPU 0000{SECOND} was successfully reset.\nAll done.\n")
    assert smi.field(SECOND, "ecc.errors.uncorrected.volatile.total") == "0"
    assert smi.field(FIRST, "ecc.errors.uncorrected.volatile.total") == "[GPU requires reset]"
    assert smi.field(SECOND, "clocks_throttle_reasons.hw_power_brake_slowdown") == "Active", "the power is as before"
    if not smi.knows("gpu_recovery_action"):
        return
    assert (smi.field(SECOND, "gpu_recovery_action"), smi.field(SECOND, "remapped_rows.pending")) == ("None", "No")
    smi.say(SECOND, "recovery_action 2", "rows_failed 1")
    assert smi.reset(*GPUS)[0] == 0
    assert (smi.field(SECOND, "gpu_recovery_action"), smi.field(SECOND, "remapped_rows.failure")) == ("Reboot", "Yes")
    assert smi.field(FIRST, "gpu_recovery_action") == "None"


def test_a_reset_is_refused_as_the_manual_says(smi: NvidiaSmi) -> None:
    """nvidia-smi(1) of release 550: no program may use the GPU, and which GPUs must be reset with it."""
    for gpu in GPUS:
        smi.say(gpu, "linked 1", "recovery_action 1")
    in_use = f"The following GPUs could not be reset:\n  GPU 0000{SECOND}: In use by another client\n"
    assert smi.run("-i", SECOND, "-pm", "1").returncode == 0
    assert (smi.field(FIRST, "persistence_mode"), smi.field(SECOND, "persistence_mode")) == ("Disabled", "Enabled")
    code, output = smi.reset(*GPUS)
    assert (code, output.startswith(in_use)) == (255, True), output
    assert smi.run("-i", SECOND, "-pm", "0").returncode == 0
    assert smi.field(SECOND, "persistence_mode") == "Disabled"
    smi.say(SECOND, "opens 2")
    code, output = smi.reset(SECOND)
    assert (code, output.startswith(in_use)) == (255, True), output
    smi.say(SECOND, "opens 1")
    assert smi.reset(SECOND)[0] == 0, "a Hopper GPU is reset alone"
    for gpu in GPUS:
        smi.say(gpu, "architecture 7")
    code, output = smi.reset(SECOND)
    assert code == 2
    assert "do not meet the reset criterion" in output
    assert output.splitlines()[-1] == f"GPU 0 (0000{FIRST})"
    assert smi.reset(*GPUS)[0] == 0
    smi.say(SECOND, "fabric_manager 1")
    assert smi.reset(SECOND)[0] == 0
    for gpu in GPUS:
        smi.say(gpu, "architecture 6")
    assert smi.reset(SECOND)[0] == 2, "before Ampere, the Fabric Manager separates no GPU from the others"
