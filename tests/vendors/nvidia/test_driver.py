"""The loaded module's version and the services, on synthetic hosts."""

from collections.abc import Mapping

import pytest

from agent.model.facts import Absent, Broken, PciDevice, Seen, Unseen
from agent.vendors.host_vendor import Sources
from agent.vendors.nvidia.driver import FABRIC_UNIT, PERSISTENCE_UNIT, observe_module
from agent.vendors.nvidia.observe import observe_nvidia
from tests.fakes.host import Host

PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025\nGCC version: 14\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release Build  (x@y)  1\n"


@pytest.mark.parametrize(("text", "version"), [(PROPRIETARY, "550.163.01"), (OPEN, "595.45.04")])
def test_version_of_both_flavours(host: Host, text: str, version: str) -> None:
    host.file("/proc/driver/nvidia/version", text)
    assert observe_module(host) == version


def test_sysfs_comes_first(host: Host) -> None:
    host.file("/proc/driver/nvidia/version", PROPRIETARY)
    host.file("/sys/module/nvidia/version", "580.178.04\n")
    assert observe_module(host) == "580.178.04"


def test_absent_broken_and_unseen_are_different_facts(host: Host) -> None:
    assert isinstance(observe_module(host), Absent)
    host.file("/proc/driver/nvidia/version", "NVRM version: none\nGCC version: 14.2.0\n")
    assert isinstance(observe_module(host), Broken)
    path = "/sys/module/nvidia/version"
    host.failing[path] = PermissionError(13, "Permission denied", path)
    assert isinstance(observe_module(host), Unseen)


def fabric(host: Host, units: Mapping[str, Seen[str]]) -> Seen[str]:
    facts = observe_nvidia(Sources(host, "x86_64", host.pci, host.drm, lambda _: Absent("no cache"), units))
    assert facts.driver
    return facts.driver.fabric


def test_without_nvswitch_the_fabric_manager_does_not_matter(host: Host) -> None:
    host.driver("550.163.01", gpus=1)
    assert isinstance(fabric(host, {FABRIC_UNIT: "failed"}), Absent)


def test_the_control_node_alone_is_not_an_nvswitch(host: Host) -> None:
    """The module makes it without hardware too, and Fabric Manager could do nothing for it."""
    host.driver("550.163.01", gpus=1)
    host.node("/dev/nvidia-nvswitchctl", 510, 255)
    units: dict[str, Seen[str]] = {FABRIC_UNIT: Absent("not installed")}
    assert isinstance(fabric(host, units), Absent)
    host.node("/dev/nvidia-nvswitch0", 510, 0)
    assert isinstance(fabric(host, units), Broken)


def test_with_nvswitch_the_fabric_managers_state_counts(host: Host) -> None:
    host.driver("550.163.01", gpus=1)
    assert isinstance(host.pci, tuple)
    host.pci += (PciDevice("0000:80:00.0", 0x10DE, 0x068000, "nvidia-nvswitch"),)
    assert fabric(host, {FABRIC_UNIT: "failed"}) == "failed"
    assert isinstance(fabric(host, {FABRIC_UNIT: Absent("not installed")}), Broken)
    assert isinstance(fabric(host, {FABRIC_UNIT: Unseen("timeout")}), Unseen)


def test_persistence(host: Host) -> None:
    units: dict[str, Seen[str]] = {PERSISTENCE_UNIT: "active"}
    facts = observe_nvidia(Sources(host, "x86_64", (), (), lambda _: Absent("no cache"), units))
    assert facts.driver
    assert facts.driver.persistence == "active"
