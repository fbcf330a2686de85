"""What nvidia-smi says about GPUs and MIG devices. The texts are from the real program, 550.163.01."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.model.contract import AllocatableDevice
from agent.model.errors import AgentError
from agent.system.files import System
from agent.system.process import Completed, TimeLimitError
from agent.vendors.dra_vendor import Attribute, DeviceFacts, Version
from agent.vendors.nvidia.dra import NVIDIA

Run = Callable[[tuple[str, ...], float], Completed]
UUID, MIG = "GPU-00000000-1111-2222-3333-444444444444", "MIG-11111111-1111-2222-3333-444444444444"
ROW = f"00000000:01:00.0, {UUID}, NVIDIA A100-SXM4-80GB, 81920, 550.163.01, 8.0\n"
VERSION = "NVIDIA-SMI version  : 550.163.01\nNVML version        : 550.163\nCUDA Version        : 12.4\n"
VERSION_610 = """\
NVIDIA-SMI version  : 610.57.04
NVML version        : 610.57
DRIVER version      : Deprecated, see "KMD version" instead
CUDA version        : Deprecated, see "CUDA UMD version" instead
KMD version         : 610.57.04
CUDA UMD version    : 13.3
"""
"""From reports of users of driver 610, not measured here."""
LISTED = f"""\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: {UUID})
  MIG 1g.10gb     Device  0: (UUID: {MIG})
  MIG 1c.3g.40gb  Device  1: (UUID: MIG-22222222-1111-2222-3333-444444444444)
"""
GPU = AllocatableDevice("0000:01:00.0", (f"nvidia.com/gpu={UUID}",))
PART = AllocatableDevice("0000:01:00.0", (f"nvidia.com/gpu={MIG}",), (7, 0))
COMMON: dict[str, Attribute] = {
    "driverVersion": Version("550.163.1"),
    "cudaDriverVersion": Version("12.4.0"),
    "cudaComputeCapability": Version("8.0.0"),
    "productName": "NVIDIA A100-SXM4-80GB",
}


def facts(tmp_path: Path, run: Run, *devices: AllocatableDevice) -> dict[AllocatableDevice, DeviceFacts]:
    return dict(NVIDIA.read_facts(System(run, str(tmp_path)), devices, "550.163.01"))


def answers(query: str = ROW, listed: str = LISTED, version: str = VERSION) -> Run:
    def run(argv: tuple[str, ...], timeout: float) -> Completed:
        assert argv[0] == "nvidia-smi"
        assert timeout <= 5
        text = {"--version": version, "-L": listed}.get(argv[1], query)
        return Completed(0, text.encode(), b"")

    return run


def test_a_gpu_has_what_claims_select_by(tmp_path: Path) -> None:
    assert facts(tmp_path, answers(), GPU) == {GPU: DeviceFacts({**COMMON, "uuid": UUID}, {"memory": 80 << 30})}
    assert facts(tmp_path, answers(version=VERSION_610), GPU)[GPU].attributes["cudaDriverVersion"] == Version("13.3.0")
    mig = DeviceFacts({**COMMON, "uuid": MIG, "profile": "1g.10gb", "parentUUID": UUID})
    assert facts(tmp_path, answers(), PART) == {PART: mig}
    row = f"00000000:01:00.0, {UUID}, [Unknown Error], [N/A], 550.163.01, [GPU is lost]\n"
    found = facts(tmp_path, answers(row, version="no"), GPU)[GPU]
    assert found == DeviceFacts({"driverVersion": Version("550.163.1"), "uuid": UUID})


@pytest.mark.parametrize("query", ["", "\n", "No devices were found\n", "x" * 100, '"' * 100])
def test_any_other_text_costs_only_the_attributes(tmp_path: Path, query: str) -> None:
    found = facts(tmp_path, answers(query, listed=query, version=query), GPU, PART)
    assert found[GPU] == DeviceFacts({"driverVersion": Version("550.163.1")}, complete=False)
    assert found[PART].attributes["uuid"] == MIG


def test_one_failed_gpu_does_not_hide_the_others(tmp_path: Path) -> None:
    other = AllocatableDevice("0000:02:00.0", ("nvidia.com/gpu=1",))

    def run(argv: tuple[str, ...], timeout: float) -> Completed:
        if argv[1].startswith("--query") or "--id=0000:02:00.0" in argv or argv[1] == "--version":
            return Completed(15, b"Unable to determine the device handle for GPU0: GPU is lost.", b"")
        return answers()(argv, timeout)

    found = facts(tmp_path, run, GPU, other)
    assert found[GPU].attributes["uuid"] == UUID
    assert "uuid" not in found[other].attributes
    assert (found[GPU].complete, found[other].complete) == (True, False)


def test_one_failed_gpu_does_not_hide_the_mig_devices_of_others(tmp_path: Path) -> None:
    """`nvidia-smi -L` lists them, and then fails."""
    lost = "Unable to determine the device handle for gpu 1: GPU is lost.  Reboot the system"

    def run(argv: tuple[str, ...], timeout: float) -> Completed:
        failed = Completed(15, f"{LISTED}{lost}\n\n".encode(), b"")
        return failed if argv[1] == "-L" else answers()(argv, timeout)

    found = facts(tmp_path, run, PART)[PART]
    assert (found.attributes["profile"], found.complete) == ("1g.10gb", True)


def test_only_an_unknown_field_is_left_out(tmp_path: Path) -> None:
    """255 is an internal error of the driver: the next attempt may find all fields."""

    def run(argv: tuple[str, ...], timeout: float) -> Completed:
        if any("compute_cap" in each for each in argv):
            return Completed(255, b"", b"")
        return answers(ROW.replace(", 8.0", ""))(argv, timeout)

    assert not facts(tmp_path, run, GPU)[GPU].complete


def test_a_program_that_hangs_is_stopped_in_time(tmp_path: Path) -> None:
    def run(argv: tuple[str, ...], timeout: float) -> Completed:
        raise TimeLimitError

    with pytest.raises(AgentError, match="stopped after its time limit"):
        facts(tmp_path, run, GPU)


def test_a_query_of_all_gpus_has_all_the_time(tmp_path: Path) -> None:
    """It opens each GPU, which takes seconds on a host with eight if no process keeps them open."""

    def run(argv: tuple[str, ...], timeout: float) -> Completed:
        if argv[1].startswith("--query") and timeout < 4:
            raise TimeLimitError
        return answers()(argv, timeout)

    assert facts(tmp_path, run, GPU)[GPU].complete
