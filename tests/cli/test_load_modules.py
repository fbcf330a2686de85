"""Loading a configured driver, with scripted modprobe, nvidia-modprobe and mknod on a synthetic host.

The tests simulate what these programs do to the host: module directories, GPUs' drivers and device nodes.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.config.settings import Config
from agent.host.reconcile import Reconciler
from agent.host.state.gpus import record_detached
from agent.model.errors import AgentError
from agent.model.facts import PciDevice, Unseen
from agent.system.process import Completed
from agent.vendors.nvidia.driver import Parameters, parse_parameters
from tests.fakes.command import command
from tests.fakes.host import PROC_DEVICES, Host, ScriptedRunner

MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
VERSION = "550.163.01"
GPU = "0000:01:00.0"
ALL_NODES = {
    "/dev/nvidiactl": (195, 255),
    "/dev/nvidia0": (195, 0),
    "/dev/nvidia-modeset": (195, 254),
    "/dev/nvidia-uvm": (511, 0),
    "/dev/nvidia-uvm-tools": (511, 1),
}
BY_OPTION = {
    ("-c", "255"): ("/dev/nvidiactl",),
    ("-c", "0"): ("/dev/nvidia0",),
    ("-m",): ("/dev/nvidia-modeset",),
    ("-u", "-c", "0"): ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
}


class Programs(ScriptedRunner):
    """modprobe, and programs that make device nodes."""

    host: Host

    def __init__(self) -> None:
        super().__init__()
        self.blacklisted: set[str] = set()
        self.missing: set[str] = set()
        """Modules that are not installed."""
        self.on_disk = VERSION
        self.broken = False
        """True if the programs that make device nodes do nothing."""
        self.meanwhile: dict[tuple[str, ...], Callable[[], None]] = {}
        """What happens once while a program runs, by its arguments."""

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        if argv in self.answers:
            return super().__call__(argv, timeout)
        self.calls.append(argv)
        self.meanwhile.pop(argv, lambda: None)()
        match argv:
            case ("modprobe", "--use-blacklist", "--", module):
                return self._modprobe(module)
            case ("modinfo", "--field=version", module):
                return Completed(0, f"{self.on_disk}\n".encode(), b"")
            case ("nvidia-modprobe", *options):
                self._nodes(*BY_OPTION[tuple(options)])
            case ("mknod", _, path, "c", major, minor):
                assert ALL_NODES[path] == (int(major), int(minor))
                self._nodes(path)
            case ("chown", _, _):
                pass
            case _:
                raise AssertionError(f"nobody expected {' '.join(argv)}")
        return Completed(0, b"", b"")

    def _nodes(self, *paths: str) -> None:
        for path in paths if not self.broken else ():
            self.host.node(path, *ALL_NODES[path])

    def _modprobe(self, module: str) -> Completed:
        if module in self.missing:
            return Completed(1, b"", f"modprobe: FATAL: Module {module} not found".encode())
        if module not in self.blacklisted:
            loaded(self.host, module)
        return Completed(0, b"", b"")


def loaded(host: Host, *modules: str) -> None:
    for module in modules:
        host.file(f"/sys/module/{module}/version", f"{VERSION}\n")
    if "nvidia" in modules:
        host.file("/proc/devices", PROC_DEVICES)
        host.file("/proc/driver/nvidia/params", "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileMode: 438\n")
        host.file(f"/proc/driver/nvidia/gpus/{GPU}/information", "Device Minor: \t 0\n")
        host.rebind(GPU, "nvidia")


@pytest.fixture
def programs() -> Programs:
    return Programs()


@pytest.fixture
def host(tmp_path: Path, programs: Programs) -> Host:
    host = Host(tmp_path, runner=programs)
    programs.host = host
    host.file("/proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n  8 sd\n")
    host.file("/proc/sys/kernel/osrelease", "6.12.0\n")
    host.file("/usr/bin/nvidia-modprobe", executable=True)
    host.pci = (PciDevice(GPU, 0x10DE, 0x030200),)
    return host


def load(host: Host, *, configured: bool = True) -> str:
    messages: list[str] = []
    config = Config.validated({"machines": {"a": {}}, "driver": {"load_modules": configured}})
    command(Reconciler(config, host, host, messages.append), "load-modules")
    return "\n".join(messages)


def nodes(host: Host) -> dict[str, tuple[int, int]]:
    found = {path: host.device(path) for path in ALL_NODES if host.exists(path)}
    return {path: (number.major, number.minor) for path, number in found.items() if number}


def modprobe_calls(host: Host) -> list[str]:
    return [call[3] for call in host.runner.calls if call[0] == "modprobe"]


def test_when_nothing_is_loaded(host: Host) -> None:
    """The administrator may be about to give a detached GPU to another driver."""
    assert "driver.load_modules is not set" in load(host, configured=False)
    host.symlink(f"/sys/bus/pci/devices/{GPU}", "../../../devices/pci0000:00/0000:00:01.0")
    assert record_detached(host, GPU, draining=False)
    assert f"while a GPU is detached ({GPU})" in load(host)
    host.pci = Unseen("/sys/bus/pci/devices: Permission denied")
    with pytest.raises(AgentError, match="/sys/bus/pci/devices: Permission denied"):
        load(host)
    host.pci = (PciDevice("0000:03:00.0", 0x8086, 0x030000, "i915"),)
    assert load(host) == "this host has no GPU for NVIDIA's driver"
    assert host.runner.calls == []


def test_modules_in_their_order_then_nodes(host: Host) -> None:
    messages = load(host)
    assert modprobe_calls(host) == list(MODULES)
    assert nodes(host) == ALL_NODES
    assert "loaded kernel module nvidia_uvm" in messages
    assert (
        "created /dev/nvidiactl, /dev/nvidia0, /dev/nvidia-modeset, /dev/nvidia-uvm, /dev/nvidia-uvm-tools" in messages
    )
    options = [call[1:] for call in host.runner.calls if call[0] == "nvidia-modprobe"]
    assert sorted(options) == sorted(BY_OPTION), "one call makes both nodes of nvidia_uvm"
    host.runner.calls.clear()
    assert (load(host), host.runner.calls) == ("", [])


def test_without_nvidia_modprobe_the_drivers_parameters_decide(host: Host) -> None:
    host.remove_file("/usr/bin/nvidia-modprobe")
    loaded(host, *MODULES)
    parameters = "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 44\nDeviceFileMode: 432\n"
    host.file("/proc/driver/nvidia/params", parameters)
    load(host)
    assert nodes(host) == ALL_NODES
    made = host.runner.calls.index(("mknod", "--mode=0660", "/dev/nvidia0", "c", "195", "0"))
    assert host.runner.calls[made + 1] == ("chown", "0:44", "/dev/nvidia0")


def test_a_node_from_before_a_reload_is_recreated(host: Host) -> None:
    """A dynamic major number may be different after the reload, or belong to another driver."""
    host.remove_file("/usr/bin/nvidia-modprobe")
    host.node("/dev/nvidia-uvm", 234, 0)
    host.node("/dev/nvidia0", 195, 7)
    load(host)
    assert nodes(host) == ALL_NODES


def test_a_file_that_is_not_a_device_is_not_replaced(host: Host) -> None:
    host.remove_file("/usr/bin/nvidia-modprobe")
    host.file("/dev/nvidiactl", "a file of somebody")
    with pytest.raises(AgentError, match="cannot create /dev/nvidiactl: /dev/nvidiactl is not a device"):
        load(host)
    assert host.read("/dev/nvidiactl") == b"a file of somebody"
    assert "/dev/nvidia0" in nodes(host), "the others are not held up"


def test_a_driver_whose_parameters_forbid_making_nodes(host: Host) -> None:
    loaded(host, *MODULES)
    host.file("/proc/driver/nvidia/params", "ModifyDeviceFiles: 0\n")
    assert "/proc/driver/nvidia/params forbids creating them" in load(host)
    assert nodes(host) == {}


def test_nodes_that_are_never_made(host: Host, programs: Programs) -> None:
    programs.broken = True
    with pytest.raises(AgentError, match=r"cannot create /dev/nvidiactl, .*: nvidia-modprobe reported no error"):
        load(host)


@pytest.mark.parametrize("module", ["nvidia", "nvidia_uvm"])
def test_a_module_that_is_blacklisted_or_not_installed(host: Host, programs: Programs, module: str) -> None:
    """modprobe prints nothing about a blacklisted one."""
    programs.blacklisted = {module}
    with pytest.raises(AgentError, match=f"kernel module {module} was not loaded: modprobe.d blacklists"):
        load(host)
    assert modprobe_calls(host)[-1] == module
    programs.missing = {module}
    with pytest.raises(AgentError, match=f"Module {module} not found"):
        load(host)


def test_modules_for_graphics_are_optional(host: Host, programs: Programs) -> None:
    """Driver packages for servers without a display have neither of the two."""
    programs.missing = {"nvidia_modeset", "nvidia_drm"}
    messages = load(host)
    assert "cannot load all of nvidia_modeset, nvidia_drm, which only graphics needs: " in messages
    assert nodes(host).keys() == ALL_NODES.keys() - {"/dev/nvidia-modeset"}


def test_a_blacklisted_module_is_not_loaded_as_a_dependency(host: Host, programs: Programs) -> None:
    """modprobe applies the blacklist to its arguments, not to their dependencies."""
    programs.blacklisted = {"nvidia_modeset"}
    assert "kernel module nvidia_modeset was not loaded: modprobe.d blacklists" in load(host)
    assert modprobe_calls(host) == list(MODULES[:3])


def test_a_module_of_another_version_on_disk(host: Host, programs: Programs) -> None:
    """The driver's upgrade is not finished."""
    loaded(host, "nvidia")
    programs.on_disk = "580.95.05"
    with pytest.raises(
        AgentError, match=r"nvidia 550\.163\.01 is loaded, but nvidia_uvm on disk has version 580\.95\.05"
    ):
        load(host)
    assert modprobe_calls(host) == []


@pytest.mark.parametrize(
    "device",
    [PciDevice(GPU, 0x10DE, 0x030200, "vfio-pci"), PciDevice(GPU, 0x10DE, 0x030200, override="vfio-pci")],
    ids=["bound", "reserved"],
)
def test_a_gpu_with_another_driver_is_left_to_that_driver(host: Host, device: PciDevice) -> None:
    """A GPU that is only reserved for another driver, and has none now, is left alone too."""
    host.pci = (device,)
    messages = load(host)
    assert f"GPU {GPU} is left to its driver vfio-pci" in messages
    assert "this host has no GPU for NVIDIA's driver" in messages
    assert host.runner.calls == []


def test_a_gpu_next_to_one_with_vfio(host: Host) -> None:
    assert isinstance(host.pci, tuple)
    host.pci = (*host.pci, PciDevice("0000:02:00.0", 0x10DE, 0x030200, "vfio-pci"))
    assert "GPU 0000:02:00.0 is left to its driver vfio-pci" in load(host)
    assert nodes(host) == ALL_NODES


@pytest.mark.parametrize(
    "program",
    [("modprobe", "--use-blacklist", "--", "nvidia"), ("nvidia-modprobe", "-u", "-c", "0")],
    ids=["load", "node"],
)
def test_a_gpu_that_is_plugged_in_meanwhile(
    host: Host, programs: Programs, monkeypatch: pytest.MonkeyPatch, program: tuple[str, ...]
) -> None:
    """systemd does not run the unit once more for it, because a start joins the run that it finds."""
    monkeypatch.setitem(ALL_NODES, "/dev/nvidia1", (195, 1))
    monkeypatch.setitem(BY_OPTION, ("-c", "1"), ("/dev/nvidia1",))

    def plug_in() -> None:
        assert isinstance(host.pci, tuple)
        host.pci = (*host.pci, PciDevice("0000:02:00.0", 0x10DE, 0x030200, "nvidia"))
        host.file("/proc/driver/nvidia/gpus/0000:02:00.0/information", "Device Minor: \t 1\n")

    programs.meanwhile[program] = plug_in
    load(host)
    assert programs.meanwhile == {}
    assert nodes(host) == ALL_NODES


def test_driver_535_has_one_name_for_all_devices(host: Host) -> None:
    loaded(host, *MODULES)
    host.file("/proc/devices", "Character devices:\n195 nvidia-frontend\n511 nvidia-uvm\n\nBlock devices:\n")
    load(host)
    assert nodes(host) == ALL_NODES


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("", Parameters()),
        ("DeviceFileMode: 438\n", Parameters()),
        (
            "ModifyDeviceFiles: 0\nDeviceFileUID: 1\nDeviceFileGID: 44\nDeviceFileMode: 432\n",
            Parameters(False, 1, 44, 0o660),
        ),
        ('DeviceFileMode: "x"\nRegistryDwords: ""\nno colon\n', Parameters()),
        ("DeviceFileMode: 4294967295\n", Parameters(mode=0o777)),
    ],
)
def test_parameters(text: str, parameters: Parameters) -> None:
    assert parse_parameters(text) == parameters
