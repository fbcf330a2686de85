"""The lists of PCI and DRM devices, from trees like the kernel's: each device is a directory, and buses have links."""

import errno
import os
from pathlib import Path

import pytest

from agent.host.vendors import HOST_VENDORS
from agent.model.facts import BRIDGE_OTHER, DrmDevice, PciDevice, Unseen
from agent.system.devices import Sysfs, listed
from agent.system.files import System
from tests.fakes.host import Host, ScriptedRunner

GPU, SWITCH, ACCELERATOR, NETWORK = "0000:41:00.0", "0000:42:00.0", "10000:43:00.0", "0000:44:00.0"
BRIDGE = "/sys/devices/pci0000:40/0000:40:01.1"
PCI, DRM = "/sys/bus/pci/devices", "/sys/class/drm"


def pci(host: Host, address: str, vendor: str, kind: str, driver: str = "") -> None:
    for name, value in (("vendor", vendor), ("class", kind)):
        host.file(f"{BRIDGE}/{address}/{name}", f"{value}\n")
    if driver:
        host.symlink(f"{BRIDGE}/{address}/driver", f"../../../../bus/pci/drivers/{driver}")
    host.symlink(f"{PCI}/{address}", f"../../..{BRIDGE.removeprefix('/sys')}/{address}")


def drm(host: Host, name: str, device: str, number: str = "226:0") -> None:
    host.file(f"{device}/drm/{name}/dev", f"{number}\n")
    host.symlink(f"{DRM}/{name}", f"../..{device.removeprefix('/sys')}/drm/{name}")


@pytest.fixture
def source(host: Host) -> Sysfs:
    """The list of an empty sysfs."""
    host.make_directory("/sys/class")
    return Sysfs(host)


def test_this_machine_can_be_listed() -> None:
    source, devices = Sysfs(System(ScriptedRunner())), Path("/sys/bus/pci/devices")
    addresses = {each.name for each in devices.glob("*") if (each / "class").read_text().startswith(("0x03", "0x12"))}
    found = source.pci_devices()
    assert isinstance(found, tuple)
    assert {each.address for each in found if each.class_id >> 8 != BRIDGE_OTHER} == addresses
    assert isinstance(source.drm_devices(), tuple)


def test_display_controllers_accelerators_and_switches_are_listed(host: Host, source: Sysfs) -> None:
    pci(host, ACCELERATOR, "0x1002", "0x120000")
    pci(host, SWITCH, "0x10de", "0x068000", "nvidia-nvswitch")
    pci(host, GPU, "0x10de", "0x030200", "nvidia")
    pci(host, NETWORK, "0x8086", "0x020000", "i40e")
    pci(host, "0000:40:01.1", "0x1022", "0x060400", "pcieport")
    assert source.pci_devices() == (
        PciDevice(GPU, 0x10DE, 0x030200, "nvidia"),
        PciDevice(SWITCH, 0x10DE, 0x068000, "nvidia-nvswitch"),
        PciDevice(ACCELERATOR, 0x1002, 0x120000, ""),
    )


def test_a_virtual_function_and_a_reserved_device_are_recognised(host: Host, source: Sysfs) -> None:
    for address, driver in ((GPU, "i915"), (NETWORK, ""), (ACCELERATOR, "")):
        pci(host, address, "0x8086", "0x038000", driver)
        override = "(null)" if address == NETWORK else "vfio-pci"
        host.file(f"{BRIDGE}/{address}/driver_override", f"{override}\n")
    host.symlink(f"{BRIDGE}/{NETWORK}/physfn", f"../{GPU}")
    assert source.pci_devices() == (
        PciDevice(GPU, 0x8086, 0x038000, "i915"),
        PciDevice(NETWORK, 0x8086, 0x038000, virtual=True),
        PciDevice(ACCELERATOR, 0x8086, 0x038000, override="vfio-pci"),
    )


def test_a_gpu_beside_the_security_processor_is_a_part_of_the_processor(host: Host, source: Sysfs) -> None:
    """Radeon 780M and a Radeon card, each behind a port; the card has functions for sound and USB."""
    own = [(f"0000:c1:00.{number}", kind) for number, kind in enumerate(("030000", "040300", "108000", "0c0330"))]
    card = [(f"0000:03:00.{number}", kind) for number, kind in enumerate(("030000", "040300", "0c0330", "0c8000"))]
    for address, kind in (*own, *card):
        pci(host, address, "0x1002", f"0x{kind}", "amdgpu" if kind == "030000" else "")
    found = source.pci_devices()
    assert isinstance(found, tuple)
    assert {each.address: each.integrated for each in found} == {"0000:03:00.0": False, "0000:c1:00.0": True}
    host.remove_file(f"{BRIDGE}/0000:c1:00.2/class")
    again = source.pci_devices()
    assert isinstance(again, tuple)
    assert len(again) == 2, "a function that was removed does not hide the GPU in its slot"


def test_every_class_of_a_vendor_s_gpus_is_listed() -> None:
    further = [kind for vendor in HOST_VENDORS for kind in vendor.further_classes]
    assert further
    assert all(listed(kind << 8) for kind in further)


def test_a_drm_node_belongs_to_the_pci_device_that_it_is_registered_with(host: Host, source: Sysfs) -> None:
    drm(host, "card1", f"{BRIDGE}/{GPU}")
    drm(host, "renderD128", f"{BRIDGE}/{GPU}")
    drm(host, "card1-DP-1", f"{BRIDGE}/{GPU}/drm/card1")
    drm(host, "card0", f"{BRIDGE}/{GPU}/simple-framebuffer.0")
    drm(host, "card2", f"{BRIDGE}/{NETWORK}/virtio3")
    drm(host, "card3", "/sys/devices/platform/vgem")
    host.file(f"{DRM}/version", "drm 1.1.0 20060810\n")
    assert source.drm_devices() == (
        DrmDevice("/dev/dri/card0", ""),
        DrmDevice("/dev/dri/card1", GPU),
        DrmDevice("/dev/dri/card2", ""),
        DrmDevice("/dev/dri/card3", ""),
        DrmDevice("/dev/dri/renderD128", GPU),
    )


def test_a_drm_node_is_listed_once_udevd_has_set_its_mode(host: Host, source: Sysfs) -> None:
    drm(host, "card1", f"{BRIDGE}/{GPU}", "226:1")
    assert source.drm_devices() == (DrmDevice("/dev/dri/card1", GPU),), "udevd does not run"
    host.make_directory("/run/udev/data")
    host.file("/run/udev/control")
    assert source.drm_devices() == ()
    host.file("/run/udev/data/c226:1")
    assert source.drm_devices() == (DrmDevice("/dev/dri/card1", GPU),)


def test_no_device_is_withdrawn_while_sysfs_is_not_mounted(host: Host, source: Sysfs) -> None:
    assert (source.pci_devices(), source.drm_devices()) == ((), ()), "a kernel without PCI and DRM"
    host.remove_tree("/sys/class")
    unmounted = Unseen("/sys/class: sysfs is not mounted")
    assert (source.pci_devices(), source.drm_devices()) == (unmounted, unmounted)


def test_a_device_that_is_removed_before_its_driver_is_read_is_left_out(host: Host, source: Sysfs) -> None:
    """It would be taken for a GPU without a driver."""
    pci(host, GPU, "0x10de", "0x030200", "nvidia")
    read_link = host.read_link

    def remove_before(path: str) -> str | None:
        if path.endswith("/driver"):
            host.remove_file(f"{PCI}/{GPU}")
        return read_link(path)

    host.read_link = remove_before  # type: ignore[method-assign]
    assert source.pci_devices() == ()
    host.symlink(f"{PCI}/{GPU}", "../gone")
    host.file(f"{DRM}/card1")
    assert (source.pci_devices(), source.drm_devices()) == ((), ())


@pytest.mark.parametrize("name", ["class", "vendor"])
def test_a_device_that_is_removed_between_open_and_read(host: Host, source: Sysfs, name: str) -> None:
    pci(host, GPU, "0x10de", "0x030200")
    pci(host, SWITCH, "0x10de", "0x068000")
    path = f"{PCI}/{GPU}/{name}"
    host.failing[path] = OSError(errno.ENODEV, os.strerror(errno.ENODEV), path)
    assert [each.address for each in source.pci_devices()] == [SWITCH]  # type: ignore[union-attr]
    host.failing[path] = OSError(errno.EIO, os.strerror(errno.EIO), path)
    assert source.pci_devices() == Unseen(f"{path}: Input/output error")


@pytest.mark.parametrize("content", ["", "display\n", None])
def test_an_attribute_that_cannot_be_understood_is_named(host: Host, source: Sysfs, content: str | None) -> None:
    pci(host, SWITCH, "0x10de", "0x068000")
    if content is None:
        host.remove_file(f"{BRIDGE}/{SWITCH}/vendor")
        host.make_directory(f"{BRIDGE}/{SWITCH}/vendor")
    else:
        host.file(f"{BRIDGE}/{SWITCH}/vendor", content)
    found = source.pci_devices()
    assert isinstance(found, Unseen)
    assert f"{SWITCH}/vendor: " in found.why
