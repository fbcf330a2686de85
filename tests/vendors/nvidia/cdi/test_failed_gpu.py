"""CDI specifications while NVML cannot open one of the granted GPUs.

What the programs say is from the real nvidia-ctk 1.19.1 and nvidia-smi 550.163.01, with a simulated NVML that cannot
open a GPU.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.machine.run import run
from agent.model.device import DeviceNumber
from agent.system.process import Completed
from tests.fakes.machine import GPUS, Machine, gpu_machine, nvidia_ctk, recorded_spec, smi_rows, smi_uuid
from tests.fakes.mig import MIG_REQUEST, UUIDS, live_mode, mig_spec

SECOND = ("/dev/nvidia1", "/dev/dri/card1", "/dev/dri/renderD129")
PATH = "/etc/cdi/nvidia.yaml"
FAILED = b"""level=error msg="failed to generate CDI spec: failed to create device CDI specs: failed to construct \
device spec generators: failed to get full GPU device editors: error getting device handle for index '1': Unknown Error"
"""
LOST = b"Unable to determine the device handle for GPU1: GPU is lost.  Reboot the system to recover this GPU\n\n\n"


class Programs:
    """nvidia-ctk and nvidia-smi for a machine whose second GPU is lost."""

    def __init__(self, machine: Machine, spec: Any, *, in_mig_mode: bool = False, version: str = "1.19.1") -> None:  # noqa: ANN401
        self.machine, self.spec, self.in_mig_mode, self.version = machine, spec, in_mig_mode, version
        self.asked: list[str] = []
        """The devices that nvidia-ctk had to list last."""
        machine.program("nvidia-ctk", self.nvidia_ctk)
        machine.program("nvidia-smi", self.nvidia_smi)

    def nvidia_ctk(self, argv: tuple[str, ...]) -> Completed:
        if "generate" in argv:
            self.asked = [each.partition("=")[2] for each in argv if each.startswith("--device-id=")]
            if not self.asked:
                return Completed(1, b"", FAILED)
        return nvidia_ctk(self.machine, argv, self.spec, self.version)

    def nvidia_smi(self, argv: tuple[str, ...]) -> Completed:
        if argv[1:] == ("-L",):
            mig = "".join(f"  MIG 1g.10gb     Device  {i}: (UUID: {each})\n" for i, each in enumerate(UUIDS))
            return Completed(15, f"GPU 0: NVIDIA H100 (UUID: {smi_uuid(GPUS[0])})\n{mig}".encode() + LOST, b"")
        if argv[1] == "--id=0":
            mode = "Enabled" if self.in_mig_mode else "Disabled"
            return Completed(0, smi_rows(**{mode: GPUS[:1]}).encode(), b"")
        return Completed(15, LOST, b"")


def without_second(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the specification as nvidia-ctk writes it for what the first GPU offers."""
    kept = []
    for device in spec["devices"]:
        edits = device["containerEdits"]
        nodes = [each for each in edits["deviceNodes"] if each["path"] not in SECOND]
        if any(each["path"] == "/dev/nvidia0" for each in nodes):
            kept.append(device | {"containerEdits": edits | {"deviceNodes": nodes}})
    return spec | {"devices": kept}


def published(machine: Machine) -> set[str]:
    return {each["name"] for each in json.loads(machine.read(PATH))["devices"]}


def test_a_failed_gpu_does_not_keep_the_others_from_pods(tmp_path: Path) -> None:
    machine = gpu_machine(tmp_path)
    programs = Programs(machine, without_second(recorded_spec()))
    run(machine)
    assert programs.asked == [smi_uuid(GPUS[0])]
    assert machine.conditions()["CDISpecCurrent"] == ("False", "GPUMissing")
    run(machine)
    (condition,) = (each for each in machine.report()["conditions"] if each["type"] == "CDISpecCurrent")
    assert condition["gpus"] == [GPUS[1]], "also in a run that does not try again"
    assert f"so it ran again without {GPUS[1]}, which nvidia-smi cannot query" in machine.message("CDISpecCurrent")
    assert published(machine) == {"0", smi_uuid(GPUS[0]), "all", "none"}


def test_the_gpu_that_remains_is_in_mig_mode(tmp_path: Path) -> None:
    """nvidia-ctk would list the whole GPU if it got that one's UUID."""
    machine = gpu_machine(tmp_path)
    for device in MIG_REQUEST.devices:
        machine.node(device.path, device.major, device.minor)
        machine.nodes[device.path] = DeviceNumber(device.major, device.minor, live_mode(device.path))
    machine.hand(MIG_REQUEST)
    programs = Programs(machine, without_second(mig_spec()), in_mig_mode=True)
    run(machine)
    assert programs.asked == list(UUIDS)
    assert published(machine) == {"0:0", "0:1", "0:2", *UUIDS, "all", "none"}


@pytest.mark.parametrize("version", ["1.18.2", "1.19.1"])
def test_nothing_else_can_be_tried(tmp_path: Path, version: str) -> None:
    """The toolkit is too old to list only some devices, or no GPU answers."""
    machine = gpu_machine(tmp_path)
    Programs(machine, recorded_spec(), version=version)
    if version == "1.19.1":
        machine.program("nvidia-smi", LOST.decode(), status=15)
    assert machine.verdict("CDISpecCurrent") == ("False", "GenerationFailed")
    assert "error getting device handle for index '1'" in machine.message("CDISpecCurrent")
    assert not machine.exists(PATH)
