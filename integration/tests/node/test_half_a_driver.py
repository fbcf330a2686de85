"""Without a GPU, nothing is set up. With half a driver, a machine is not ready, with the reason and what to do next."""

import json
import re

import pytest

from integration.bed.drivers.host_roots import driver_version, host_root
from integration.bed.vm.kernel_modules import kernel_modules
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

OLDER = "535.261.03"
UNLOAD = "modprobe -r nvidia_drm nvidia_modeset nvidia_uvm nvidia && rm -rf /dev/nvidia*"


def doctor(bed: Bed) -> str:
    """Return what `doctor` prints about a faulty host, without its line breaks inside paragraphs."""
    finished = bed.agent("doctor", check=False)
    assert finished.status == 1
    return re.sub(r"\n {4,}(?!fix:|evidence:|symptoms:)", " ", finished.stdout)


def test_a_host_without_gpus_is_skipped_and_reported(installed: Bed) -> None:
    """No file is written."""
    remove = 'for gpu in /sys/bus/pci/devices/*; do [ "$(cat $gpu/vendor)" = 0x10de ] && echo 1 > $gpu/remove; done'
    installed.run(
        "sh", "-c", f"modprobe -r nvidia_drm nvidia_modeset nvidia_uvm nvidia; rm -rf /dev/nvidia*; {remove}; true"
    )
    planned = installed.agent("plan").stdout
    assert "gpu-node: no GPU on this host: nothing is set up" in planned
    applied = installed.agent("apply", check=False)
    assert applied.status == 1
    assert "gpu-node: not ready, NoGPU" in applied.stdout, "a driver is installed, so all GPUs may be dead"
    assert "machines.gpu-node.require_gpus" in applied.stdout
    assert "containerfiles/agent-ubuntu2404\n" in doctor(installed), "no toolkit is needed in its machines"
    assert installed.run("ls", "/etc/systemd/nspawn").stdout == ""


def test_libraries_without_the_module(installed: Bed) -> None:
    installed.run("sh", "-c", UNLOAD)
    conditions = installed.conditions()
    assert conditions["DriverLoaded"]["reason"] == "ModuleNotLoaded"
    assert "modprobe -a nvidia nvidia_uvm" in conditions["DriverLoaded"]["message"]
    assert conditions["Ready"]["status"] == "False"
    found = doctor(installed)
    assert "couldn't communicate with the NVIDIA driver" in found
    assert "containerfiles/agent-ubuntu2404-nvidia\n" in found
    installed.run("modprobe", "-a", "nvidia", "nvidia_uvm")
    assert installed.conditions()["DriverLoaded"]["status"] == "True"


def test_the_module_without_nodes(installed: Bed) -> None:
    """It is reported as a fault, because nvidia-ctk would make a CDI specification without devices."""
    installed.run("sh", "-c", "rm /dev/nvidia[0-9]*")
    assert installed.conditions()["DevicesPresent"]["reason"] == "NodesMissing"
    found = doctor(installed)
    assert "a CDI specification without devices" in found
    assert "fix: nvidia-smi nvidia-modprobe -c 0" in re.sub(r" +", " ", found)
    assert "kernel.panic is 0" in found, "the machine may have a kubelet"
    assert "systemctl enable --now unbounded-agent" in found, "the service was not started"
    for command in re.findall(r"nvidia-modprobe -c [0-9]+", found):
        installed.run(*command.split())
    assert installed.conditions()["DevicesPresent"]["status"] == "True"
    installed.run("systemctl", "enable", "--now", "unbounded-agent", timeout=240)
    assert "systemctl enable --now unbounded-agent" not in installed.agent("doctor", check=False).stdout


@pytest.mark.scenario("003")
def test_a_host_without_faults(ready: Bed) -> None:
    ready.run("sysctl", "-w", "vm.overcommit_memory=1", "kernel.panic=10", "kernel.panic_on_oops=1")
    ready.wait_ready()
    finished = ready.agent("doctor")
    assert finished.stdout.startswith("host: no fault found\ngpu-node: ready: AllConditionsTrue\n")
    assert "driver for pods: nvidia 550.163.01, CUDA 12.4\n" in finished.stdout, "the driver's real libcuda says it"
    ready.run("sysctl", "-w", "kernel.panic=0")
    assert ready.agent("doctor").stdout == finished.stdout, "the machine has no kubelet, which would refuse to start"
    assert json.loads(ready.agent("doctor", "--json", check=False).stdout)["machines"]["gpu-node"]["ready"] == "True"


def test_the_module_without_libraries(installed: Bed) -> None:
    """First the two that matter are missing, then all."""
    for reason, names in (
        ("LibrariesBroken", ("libcuda.so*", "libnvidia-ml.so*")),
        ("NotInstalled", ("*nvidia*", "libcuda*", "libnvcuvid*", "libnvoptix*")),
    ):
        for name in names:
            installed.run(
                "find",
                "/usr/lib/x86_64-linux-gnu",
                "-name",
                name,
                "(",
                "-type",
                "f",
                "-o",
                "-type",
                "l",
                ")",
                "-delete",
            )
        installed.run("ldconfig")
        conditions = installed.conditions()
        assert conditions["DriverLoaded"]["status"] == "True"
        assert conditions["LibrariesPresent"]["reason"] == reason
        assert "run ldconfig" in conditions["LibrariesPresent"]["message"]
        assert conditions["Ready"]["status"] == "False"
        assert "ERROR_LIBRARY_NOT_FOUND" in doctor(installed)


def test_a_module_of_another_version(installed: Bed) -> None:
    """The stand-in module has an older version than Debian 13's libraries."""
    installed.run("sh", "-c", UNLOAD)
    for module in ("nvidia", "nvidia-uvm", "nvidia-modeset"):
        content = (kernel_modules(OLDER) / f"{module}.ko").read_bytes()
        installed.guest.write(f"/root/{module}.ko", content)
        installed.run("insmod", f"/root/{module}.ko")
    installed.run("/usr/lib/simulated-gpu-host/make-nodes")
    conditions = installed.conditions()
    assert conditions["LibrariesPresent"]["reason"] == "VersionMismatch"
    for version in (OLDER, driver_version(host_root())):
        assert version in conditions["LibrariesPresent"]["message"]
    assert conditions["Ready"]["status"] == "False"
    found = doctor(installed)
    assert "CUDA error 803 (SYSTEM_DRIVER_MISMATCH)" in found
    for command in ("rmmod nvidia_modeset nvidia_uvm nvidia", "modprobe -a nvidia nvidia_uvm nvidia_modeset"):
        assert command in found
        installed.run(*command.split())
    assert installed.conditions()["LibrariesPresent"]["status"] == "True"


def test_a_machine_that_does_not_exist(installed: Bed) -> None:
    installed.guest.write("/etc/unbounded-agent/config.toml", b"[machines.elsewhere]\n")
    finished = installed.agent("apply", check=False)
    assert finished.status == 1
    assert "/var/lib/machines/elsewhere does not exist" in finished.stdout
    assert installed.run("ls", "/etc/systemd/nspawn").stdout == ""


def test_bad_configuration_changes_nothing(installed: Bed) -> None:
    for text, named in (
        ("[machines.gpu-node]\ngpuz = 1\n", "/etc/unbounded-agent/config.toml: machines.gpu-node.gpuz: unknown key"),
        ('[machines."a/b"]\n', "/etc/unbounded-agent/config.toml: machines.a/b: "),
        ('[machines.gpu-node]\nrequire_gpus = "yes"\n', "machines.gpu-node.require_gpus"),
    ):
        installed.guest.write("/etc/unbounded-agent/config.toml", text.encode())
        finished = installed.agent("apply", check=False)
        assert finished.status == 2
        assert named in finished.stderr
        assert installed.run("ls", "/etc/systemd/nspawn").stdout == ""


def test_a_foreign_settings_file_is_left_alone(installed: Bed) -> None:
    foreign = b"[Exec]\nBoot=yes\n"
    installed.guest.write("/etc/systemd/nspawn/gpu-node.nspawn", foreign)
    finished = installed.agent("apply", check=False)
    assert finished.status == 1
    assert "machines.gpu-node.nspawn" in finished.stdout
    assert installed.guest.read("/etc/systemd/nspawn/gpu-node.nspawn") == foreign


def test_plan_works_as_any_user_and_changes_nothing(installed: Bed) -> None:
    """apply needs root, and says so."""
    as_user = ("runuser", "-u", "nobody", "--", "unbounded-agent")
    planned = installed.run(*as_user, "plan").stdout
    assert "would write /etc/systemd/nspawn/gpu-node.nspawn" in planned
    assert "would stage nvidia driver 550.163.01 as driver root 0" in planned
    # /var/lib/machines has mode 0700: a user cannot see whether the machine exists, but can see whether it runs.
    assert "would start machine gpu-node" in planned
    refused = installed.run(*as_user, "apply", check=False)
    assert refused.status == 1
    assert "this command needs root rights" in refused.stderr
    assert installed.run("ls", "/etc/systemd/nspawn").stdout == ""
