"""The host's driver: the service loads it if that is configured, and machines see it, whatever network they have."""

import pytest

from integration.bed.measure.journal import messages
from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

UNLOAD = "modprobe -r nvidia_drm nvidia_modeset nvidia_uvm nvidia && rm -rf /dev/nvidia*"
LOADING = "unbounded-agent-modules.service"
CONFIGURATION = b"[driver]\nload_modules = true\n\n[machines.gpu-node]\n"
PRIVATE = b"[machines.gpu-node.nspawn]\nvirtual_ethernet = true\n"
MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
ALLOW = "sed -i '/^blacklist nvidia$/d' /etc/modprobe.d/simulated-driver.conf"
REPLUG = "gpu=/sys/bus/pci/devices/0000:01:00.0; echo 1 > $gpu/remove && echo 1 > /sys/bus/pci/rescan"


def loaded(bed: Bed) -> set[str]:
    names = {line.split()[0] for line in bed.run("cat", "/proc/modules").stdout.splitlines()}
    return names & set(MODULES)


@pytest.mark.scenario("003")
@pytest.mark.exhaustive
def test_an_installed_driver_is_loaded_if_configured(installed: Bed) -> None:
    """The service loads it without help, and the machine becomes ready."""
    installed.guest.write("/etc/unbounded-agent/config.toml", CONFIGURATION)
    installed.run("sh", "-ec", f"{UNLOAD}; {ALLOW}")
    installed.run("systemctl", "start", "unbounded-agent.service", timeout=240)
    conditions = installed.wait_ready()
    assert conditions["DevicesPresent"]["reason"] == "Present"
    assert loaded(installed) == set(MODULES)


def test_a_gpu_that_is_plugged_in_brings_its_driver(installed: Bed) -> None:
    """A blacklisted driver, however, is not loaded, and the log says why."""
    installed.guest.write("/etc/unbounded-agent/config.toml", CONFIGURATION)
    installed.run("sh", "-ec", UNLOAD)
    assert installed.run("systemctl", "start", LOADING, check=False).status != 0
    assert "kernel module nvidia was not loaded: modprobe.d blacklists" in messages(installed.run, LOADING)
    assert loaded(installed) == set()
    installed.run("sh", "-ec", f"{ALLOW}; {REPLUG}")
    node = "/dev/nvidia-uvm-tools"
    wait(node, lambda: installed.run("test", "-c", node, check=False).status == 0, 270,
         lambda: messages(installed.run, LOADING))  # fmt: skip
    assert loaded(installed) == set(MODULES)
    nodes = installed.run("find", "/dev", "-maxdepth", "1", "-name", "nvidia[0-9]*").stdout.split()
    assert len(nodes) == len(installed.host.gpus)


@pytest.mark.exhaustive
def test_nothing_is_loaded_unless_it_is_configured(installed: Bed) -> None:
    installed.run("sh", "-ec", f"{UNLOAD}; {ALLOW}")
    installed.run("systemctl", "start", LOADING)
    assert loaded(installed) == set()
    conditions = installed.conditions()
    assert conditions["DriverLoaded"]["reason"] == "ModuleNotLoaded"
    assert "driver.load_modules = true" in installed.agent("doctor", check=False).stdout


def expect_driver_seen(bed: Bed) -> None:
    """Assert that the files are present that NVML and container runtimes look for."""
    node = bed.node
    version = bed.run("cat", "/sys/module/nvidia/version").stdout
    assert node.run("cat", "/sys/module/nvidia/version").stdout == version
    look = "ls -d /sys/module/nvidia_uvm /sys/module/firmware_class/parameters /proc/driver/nvidia/gpus/0000:01:00.0"
    node.shell(look)
    links = node.shell("readlink -f /dev/char/195:0 /dev/char/195:255").stdout.split()
    assert links == ["/dev/nvidia0", "/dev/nvidiactl"]


@pytest.mark.exhaustive
def test_a_machine_with_its_own_network_sees_the_driver(installed: Bed) -> None:
    """With default settings, systemd-nspawn shows the machine a /sys with only a few directories."""
    installed.guest.write("/etc/unbounded-agent/config.toml", PRIVATE)
    installed.agent("apply")
    conditions = installed.conditions()
    assert conditions["Ready"]["status"] == "True", conditions
    interfaces = installed.node.run("cat", "/proc/net/dev").stdout
    assert "host0:" in interfaces, "a network of its own"
    expect_driver_seen(installed)
