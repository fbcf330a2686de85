"""What sysfs says about AMD's and Intel's GPUs."""

import errno
from pathlib import Path

import pytest

from agent.model.contract import AllocatableDevice
from agent.system.files import System
from agent.vendors.dra_vendor import DeviceFacts, DraVendor, Version
from agent.vendors.drm.dra import AMD, INTEL
from tests.fakes.machine import Machine

GPU = AllocatableDevice("0000:03:00.0", ("v.com/gpu=0000:03:00.0",))


def facts(tmp_path: Path, vendor: DraVendor, files: dict[str, str], driver_version: str = "") -> DeviceFacts:
    system = System(lambda *_: pytest.fail("no program runs"), str(tmp_path))
    for name, text in files.items():
        system.write(f"/sys/bus/pci/devices/{GPU.pci_address}/{name}", text.encode())
    return dict(vendor.read_facts(system, [GPU], driver_version))[GPU]


def test_what_sysfs_says(tmp_path: Path) -> None:
    files = {"product_name": "AMD Instinct MI210\n", "unique_id": "4f5e\n", "mem_info_vram_total": "68702699520\n"}
    assert facts(tmp_path, AMD, {**files, "device": "0x740f\n"}, "6.8.5") == DeviceFacts(
        {"driverVersion": Version("6.8.5"), "productName": "AMD Instinct MI210", "uuid": "4f5e", "pciDevice": "0x740f"},
        {"memory": 68702699520},
    )
    files = {"device": "0x56c0\n", "tile0/physical_vram_size_bytes": "17179869184\n"}
    assert facts(tmp_path / "intel", INTEL, files) == DeviceFacts({"pciDevice": "0x56c0"}, {"memory": 17179869184})


def test_facts_are_incomplete_while_the_driver_does_not_answer(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for name in ("device", "product_name", "unique_id"):
        machine.put(f"/sys/bus/pci/devices/{GPU.pci_address}/{name}", name)

    def fail(path: str) -> None:
        if path.endswith("unique_id"):
            raise OSError(errno.ETIMEDOUT, "no answer")

    machine.before_read = fail
    expected = DeviceFacts({"productName": "product_name", "pciDevice": "device"}, complete=False)
    assert AMD.read_facts(machine, [GPU], "")[GPU] == expected


@pytest.mark.parametrize("vendor", [AMD, INTEL])
def test_what_is_missing_or_strange_is_left_out(tmp_path: Path, vendor: DraVendor) -> None:
    assert facts(tmp_path, vendor, {}) == DeviceFacts()
    files = {"product_name": "\n", "mem_info_vram_total": "many\n", "tile0/physical_vram_size_bytes": "0x1\n"}
    assert facts(tmp_path, vendor, {**files, "unique_id": "\x1b[2J"}, "6.8.0-rc1") == DeviceFacts()
