"""One whole pass over a host: Debian's real packages, eight synthetic GPUs."""

from pathlib import Path

import pytest

from agent.config.settings import Config
from agent.host.observe.host import Memory, observe
from agent.host.vendors import HOST_VENDORS
from agent.model.facts import Absent, DeviceAllow, VendorFacts
from agent.model.paths import WENT_BACK, machine_unit
from tests.fakes.host import HOSTS, Host

CONFIG = Config.validated({"machines": {"node": {}}})
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


def test_a_release_that_went_back_is_a_problem_of_the_host(debian: Host) -> None:
    """So the log, `status` and `doctor` say it."""
    debian.file(WENT_BACK, "release 1.1 failed, and 1.0 runs again\n")
    facts = observe(CONFIG, debian, debian, Memory())
    assert facts.went_back == "release 1.1 failed, and 1.0 runs again"
    assert facts.went_back in facts.all_problems()


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
