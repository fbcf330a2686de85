"""One whole pass over a host: Debian's real packages, eight synthetic GPUs."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.config.settings import Config
from agent.host.observe.host import observe
from agent.host.observe.memory import Memory
from agent.host.vendors import HOST_VENDORS
from agent.model.device_allow import DeviceAllow
from agent.model.facts import Absent, DrmDevice, PciDevice, Seen, VendorFacts
from agent.model.paths import OWNED, machine_unit
from agent.system.files import System
from agent.system.udev import Udev
from tests.fakes.host import HOSTS, Host

CONFIG = Config.model_validate({"machines": {"node": {}}})
SERVICES = [service for vendor in HOST_VENDORS for service in vendor.services]


@pytest.fixture
def debian(host: Host) -> Host:
    host.load("debian-13-driver-550")
    host.driver("550.163.01", gpus=8)
    template = (HOSTS.parent / "units" / "systemd-nspawn-257.service").read_text()
    host.file("/usr/lib/systemd/system/systemd-nspawn@.service", template)
    host.make_directory("/var/lib/machines/node")
    for name in (machine_unit("node"), *SERVICES):
        host.bus.unit(name)
    host.bus.version("257.13-1~deb13u1")
    return host


@pytest.mark.scenario("002")
def test_a_whole_host(debian: Host) -> None:
    facts = observe(CONFIG, debian, debian, Memory())
    (nvidia,) = (each for each in facts.vendors if each.vendor == "nvidia")
    assert nvidia.problems == ()
    assert len(nvidia.gpus) == 8
    assert isinstance(nvidia.devices, tuple)
    assert len(nvidia.devices) == 8 + 4 + 16
    assert nvidia.driver
    assert nvidia.driver.module_version == nvidia.driver.user_space.version == "550.163.01"
    assert nvidia.driver.persistence == "active"
    assert isinstance(nvidia.driver.user_space.files, tuple)
    assert (facts.architecture, facts.systemd_version) == ("x86_64", 257)
    assert isinstance(facts.template_device_allow, tuple)
    assert facts.template_device_allow[2] == DeviceAllow("/dev/fuse", "rwm")
    assert [(machine.root, machine.unit_state) for machine in facts.machines] == [("/var/lib/machines/node", "active")]
    assert all(isinstance(each.content, Absent) and not each.owned for each in facts.files.values())
    assert facts.problems == ()


def test_a_second_pass_sees_the_same_and_reuses_only_the_loaders_listing(debian: Host) -> None:
    memory = Memory()
    first = observe(CONFIG, debian, debian, memory)
    debian.runner.calls.clear()
    assert observe(CONFIG, debian, debian, memory) == first
    assert debian.runner.calls == []


def test_devices_are_listed_while_pid_1_answers(debian: Host) -> None:
    """The two take equally long, and a new GPU waits for both."""
    all_three, met = threading.Barrier(3), list[int]()

    def answer(
        service: str, path: str, method: str, signature: str, arguments: tuple[object, ...], timeout: float
    ) -> tuple[object, ...]:
        if not met:
            met.append(all_three.wait(4))
        return debian.bus(service, path, method, signature, arguments, timeout)

    class Devices:
        def pci_devices(self) -> Seen[tuple[PciDevice, ...]]:
            all_three.wait(4)
            return debian.pci_devices()

        def drm_devices(self) -> Seen[tuple[DrmDevice, ...]]:
            all_three.wait(4)
            return debian.drm_devices()

    facts = observe(CONFIG, System(debian.runner, debian.root, answer), Devices(), Memory())
    assert met
    assert facts.machines[0].unit_state == "active"


def test_unusable_state_is_reported(debian: Host) -> None:
    debian.file(OWNED, "{")
    (problem,) = observe(CONFIG, debian, debian, Memory()).problems
    assert OWNED in problem


@pytest.mark.scenario("002")
def test_a_host_without_any_gpu_or_driver(debian: Host, tmp_path: Path) -> None:
    bare = Host(tmp_path / "bare")
    bare.runner.answers = debian.runner.answers
    bare.bus.units, bare.bus.properties = debian.bus.units, debian.bus.properties
    bare.file("/proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n  8 sd\n")
    bare.file("/dev/null")
    bare.file("/usr/lib/systemd/system/systemd-nspawn@.service", "[Service]\n")
    nvidia, *others = observe(CONFIG, bare, bare, Memory()).vendors
    assert others == [VendorFacts("amd"), VendorFacts("intel"), VendorFacts("other-devices")]
    assert (nvidia.gpus, nvidia.devices, nvidia.problems) == ((), (), ())
    assert nvidia.driver
    assert isinstance(nvidia.driver.module_version, Absent)
    assert isinstance(nvidia.driver.user_space.files, Absent)


def test_the_real_udev_lists_this_machine() -> None:
    udev = Udev()
    assert isinstance(udev.pci_devices(), tuple)
    assert isinstance(udev.drm_devices(), tuple)


UMOCKDEV = """\
P: /devices/pci0000:00/0000:00:01.0
E: SUBSYSTEM=pci
A: vendor=0x10de\\n
A: device=0x2330\\n
A: class=0x030200\\n
L: driver=../../../bus/pci/drivers/nvidia

P: /devices/pci0000:00/0000:00:01.0/drm/card1
N: dri/card1
E: SUBSYSTEM=drm
E: DEVNAME=/dev/dri/card1
E: DEVTYPE=drm_minor

P: /devices/pci0000:00/0000:00:01.0/drm/card1/card1-DP-1
E: SUBSYSTEM=drm
E: DEVTYPE=drm_connector

P: /devices/pci0000:00/0000:00:02.0
E: SUBSYSTEM=pci
A: vendor=0x8086\\n

P: /devices/platform/vgem/drm/renderD129
N: dri/renderD129
E: SUBSYSTEM=drm
E: DEVNAME=/dev/dri/renderD129
"""


@pytest.mark.skipif(not shutil.which("umockdev-run"), reason="umockdev-run is not installed (package umockdev)")
def test_udev_with_devices_that_this_machine_lacks(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text(UMOCKDEV)
    program = "from agent.system.udev import Udev; u = Udev(); print(u.pci_devices()); print(u.drm_devices())"
    done = subprocess.run(
        ["umockdev-run", "--device", str(tmp_path / "devices"), "--", sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[3],
    )
    pci, drm = done.stdout.splitlines()
    assert pci == repr((PciDevice("0000:00:01.0", 0x10DE, 0x2330, 0x030200, "nvidia"),))
    assert drm == repr((DrmDevice("/dev/dri/card1", "0000:00:01.0"), DrmDevice("/dev/dri/renderD129", "")))


CONTEXTS = """
import subprocess
from agent.system.udev import Udev
started = []
real = subprocess.Popen.__init__
def counted(self, *arguments, **named):
    started.append(arguments)
    real(self, *arguments, **named)
subprocess.Popen.__init__ = counted
udev = Udev()
udev.pci_devices(), udev.drm_devices()
first = len(started)
udev.pci_devices(), udev.drm_devices()
print(first, len(started) - first)
"""


def test_listing_devices_again_starts_no_process() -> None:
    """To find libudev, ctypes runs programs: once, there were two in each pass."""
    ended = subprocess.run((sys.executable, "-c", CONTEXTS), stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    first, again = ended.stdout.split()
    assert int(first) > 0, "the count sees none"
    assert int(again) == 0
