"""The lists of PCI and DRM devices, from trees like the kernel's: each device is a directory, and buses have links."""

import errno
import os
from pathlib import Path

import pytest

from agent.host.vendors import HOST_VENDORS
from agent.model.facts import BRIDGE_OTHER, DrmDevice, PciDevice, Unseen
from agent.system.devices import Sysfs, listed
from agent.system.files import System
from tests.fakes.host import ScriptedRunner

GPU, SWITCH, ACCELERATOR, NETWORK = "0000:41:00.0", "0000:42:00.0", "10000:43:00.0", "0000:44:00.0"
BRIDGE = "devices/pci0000:40/0000:40:01.1"


class Removing(System):
    """A System in which a device is removed, or its attributes fail, after it was listed."""

    failing: OSError | None = None
    removed: Path | None = None
    """The device's link, which is removed before the device's driver is read."""

    def read_link(self, path: str) -> str | None:
        if self.removed and path.endswith("/driver"):
            self.removed.unlink()
        return super().read_link(path)

    def read_text(self, path: str) -> str:
        if self.failing and path.endswith(str(self.failing.filename)):
            raise OSError(self.failing.errno, self.failing.strerror, path)
        return super().read_text(path)


class Tree:
    """A synthetic /sys, and what udevd knows of it."""

    def __init__(self, root: Path) -> None:
        self.root, self.sys = root, root / "sys"
        (self.sys / "class").mkdir(parents=True)
        self.system = Removing(ScriptedRunner(), str(root))
        self.source = Sysfs(self.system)

    def pci(self, address: str, vendor: str, kind: str, driver: str = "") -> Path:
        place = self.sys / BRIDGE / address
        place.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("class", kind)):
            (place / name).write_text(f"{value}\n")
        if driver:
            (place / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
        return self.link("bus/pci/devices", f"{BRIDGE}/{address}")

    def drm(self, name: str, device: str, number: str = "226:0") -> Path:
        place = self.sys / device / "drm" / name
        place.mkdir(parents=True)
        (place / "dev").write_text(f"{number}\n")
        return self.link("class/drm", f"{device}/drm/{name}")

    def link(self, directory: str, target: str) -> Path:
        place = self.sys / directory / Path(target).name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to("../" * (directory.count("/") + 1) + target)
        return place


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_this_machine_can_be_listed() -> None:
    source, devices = Sysfs(System(ScriptedRunner())), Path("/sys/bus/pci/devices")
    addresses = {each.name for each in devices.glob("*") if (each / "class").read_text().startswith(("0x03", "0x12"))}
    found = source.pci_devices()
    assert isinstance(found, tuple)
    assert {each.address for each in found if each.class_id >> 8 != BRIDGE_OTHER} == addresses
    assert isinstance(source.drm_devices(), tuple)


def test_display_controllers_accelerators_and_switches_are_listed(tree: Tree) -> None:
    tree.pci(ACCELERATOR, "0x1002", "0x120000")
    tree.pci(SWITCH, "0x10de", "0x068000", "nvidia-nvswitch")
    tree.pci(GPU, "0x10de", "0x030200", "nvidia")
    tree.pci(NETWORK, "0x8086", "0x020000", "i40e")
    tree.pci("0000:40:01.1", "0x1022", "0x060400", "pcieport")
    assert tree.source.pci_devices() == (
        PciDevice(GPU, 0x10DE, 0x030200, "nvidia"),
        PciDevice(SWITCH, 0x10DE, 0x068000, "nvidia-nvswitch"),
        PciDevice(ACCELERATOR, 0x1002, 0x120000, ""),
    )


def test_a_virtual_function_and_a_reserved_device_are_recognised(tree: Tree) -> None:
    for address, driver in ((GPU, "i915"), (NETWORK, ""), (ACCELERATOR, "")):
        tree.pci(address, "0x8086", "0x038000", driver)
        (tree.sys / BRIDGE / address / "driver_override").write_text("(null)\n")
    (tree.sys / BRIDGE / NETWORK / "physfn").symlink_to(f"../{GPU}")
    for address in (GPU, ACCELERATOR):
        (tree.sys / BRIDGE / address / "driver_override").write_text("vfio-pci\n")
    assert tree.source.pci_devices() == (
        PciDevice(GPU, 0x8086, 0x038000, "i915"),
        PciDevice(NETWORK, 0x8086, 0x038000, virtual=True),
        PciDevice(ACCELERATOR, 0x8086, 0x038000, override="vfio-pci"),
    )


def test_a_gpu_beside_the_security_processor_is_a_part_of_the_processor(tree: Tree) -> None:
    """Radeon 780M and a Radeon card, each behind a port; the card has functions for sound and USB."""
    own = [(f"0000:c1:00.{number}", kind) for number, kind in enumerate(("030000", "040300", "108000", "0c0330"))]
    card = [(f"0000:03:00.{number}", kind) for number, kind in enumerate(("030000", "040300", "0c0330", "0c8000"))]
    for address, kind in (*own, *card):
        tree.pci(address, "0x1002", f"0x{kind}", "amdgpu" if kind == "030000" else "")
    found = tree.source.pci_devices()
    assert isinstance(found, tuple)
    assert {each.address: each.integrated for each in found} == {"0000:03:00.0": False, "0000:c1:00.0": True}
    (tree.sys / BRIDGE / "0000:c1:00.2/class").unlink()
    again = tree.source.pci_devices()
    assert isinstance(again, tuple)
    assert len(again) == 2, "a function that was removed does not hide the GPU in its slot"


def test_every_class_of_a_vendor_s_gpus_is_listed() -> None:
    further = [kind for vendor in HOST_VENDORS for kind in vendor.further_classes]
    assert further
    assert all(listed(kind << 8) for kind in further)


def test_a_drm_node_belongs_to_the_pci_device_that_it_is_registered_with(tree: Tree) -> None:
    tree.drm("card1", f"{BRIDGE}/{GPU}")
    tree.drm("renderD128", f"{BRIDGE}/{GPU}")
    tree.drm("card1-DP-1", f"{BRIDGE}/{GPU}/drm/card1")
    tree.drm("card0", f"{BRIDGE}/{GPU}/simple-framebuffer.0")
    tree.drm("card2", f"{BRIDGE}/{NETWORK}/virtio3")
    tree.drm("card3", "devices/platform/vgem")
    (tree.sys / "class/drm/version").write_text("drm 1.1.0 20060810\n")
    assert tree.source.drm_devices() == (
        DrmDevice("/dev/dri/card0", ""),
        DrmDevice("/dev/dri/card1", GPU),
        DrmDevice("/dev/dri/card2", ""),
        DrmDevice("/dev/dri/card3", ""),
        DrmDevice("/dev/dri/renderD128", GPU),
    )


def test_a_drm_node_is_listed_once_udevd_has_set_its_mode(tree: Tree) -> None:
    tree.drm("card1", f"{BRIDGE}/{GPU}", "226:1")
    assert tree.source.drm_devices() == (DrmDevice("/dev/dri/card1", GPU),), "udevd does not run"
    (tree.root / "run/udev/data").mkdir(parents=True)
    (tree.root / "run/udev/control").touch()
    assert tree.source.drm_devices() == ()
    (tree.root / "run/udev/data/c226:1").touch()
    assert tree.source.drm_devices() == (DrmDevice("/dev/dri/card1", GPU),)


def test_no_device_is_withdrawn_while_sysfs_is_not_mounted(tree: Tree) -> None:
    assert (tree.source.pci_devices(), tree.source.drm_devices()) == ((), ()), "a kernel without PCI and DRM"
    (tree.sys / "class").rmdir()
    unmounted = Unseen("/sys/class: sysfs is not mounted")
    assert (tree.source.pci_devices(), tree.source.drm_devices()) == (unmounted, unmounted)


def test_a_device_that_is_removed_before_its_driver_is_read_is_left_out(tree: Tree) -> None:
    """It would be taken for a GPU without a driver."""
    tree.system.removed = tree.pci(GPU, "0x10de", "0x030200", "nvidia")
    assert tree.source.pci_devices() == ()
    (tree.sys / "bus/pci/devices" / GPU).symlink_to("../gone")
    (tree.sys / "class/drm").mkdir(parents=True)
    (tree.sys / "class/drm/card1").touch()
    tree.system.removed = None
    assert (tree.source.pci_devices(), tree.source.drm_devices()) == ((), ())


@pytest.mark.parametrize("name", ["class", "vendor"])
def test_a_device_that_is_removed_between_open_and_read(tree: Tree, name: str) -> None:
    tree.pci(GPU, "0x10de", "0x030200")
    tree.pci(SWITCH, "0x10de", "0x068000")
    tree.system.failing = OSError(errno.ENODEV, os.strerror(errno.ENODEV), f"{GPU}/{name}")
    assert [each.address for each in tree.source.pci_devices()] == [SWITCH]  # type: ignore[union-attr]
    tree.system.failing = OSError(errno.EIO, os.strerror(errno.EIO), f"{GPU}/{name}")
    assert tree.source.pci_devices() == Unseen(f"/sys/bus/pci/devices/{GPU}/{name}: Input/output error")


@pytest.mark.parametrize("content", ["", "display\n", None])
def test_an_attribute_that_cannot_be_understood_is_named(tree: Tree, content: str | None) -> None:
    tree.pci(SWITCH, "0x10de", "0x068000")
    place = tree.sys / BRIDGE / SWITCH / "vendor"
    place.unlink()
    if content is None:
        place.mkdir()
    else:
        place.write_text(content)
    found = tree.source.pci_devices()
    assert isinstance(found, Unseen)
    assert f"/sys/bus/pci/devices/{SWITCH}/vendor: " in found.why or f"{BRIDGE}/{SWITCH}/vendor: " in found.why
