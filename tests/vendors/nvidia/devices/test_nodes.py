"""NVIDIA's nodes against the kernel's majors, on synthetic hosts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import Absent, DeviceNode, DrmDevice, PciDevice, Unseen, VendorFacts
from agent.vendors.host_vendor import parse_majors
from agent.vendors.nvidia.devices import Information, parse_information
from agent.vendors.nvidia.host import observe_nvidia
from tests.fakes.host import PROC_DEVICES, Host
from tests.fakes.user_space import sources

CREATE_AGAIN, LOAD_AGAIN = (f"remove the node and {how} again" for how in ("create it", "load the driver"))


def observe(host: Host) -> VendorFacts:
    return observe_nvidia(sources(host))


def nodes(facts: VendorFacts) -> tuple[DeviceNode, ...]:
    assert isinstance(facts.devices, tuple), facts.devices
    return facts.devices


def paths(facts: VendorFacts, kind: DeviceKind | None = None) -> list[str]:
    return [node.path for node in nodes(facts) if kind in (None, node.kind)]


@pytest.mark.scenario("002")
def test_eight_gpus(host: Host) -> None:
    host.driver("550.163.01", gpus=8)
    facts = observe(host)
    assert facts.problems == ()
    assert paths(facts, DeviceKind.GPU) == [f"/dev/nvidia{minor}" for minor in range(8)]
    assert [node.pci_address for node in nodes(facts)[:8]] == [gpu.pci_address for gpu in facts.gpus]
    assert [gpu.minor for gpu in facts.gpus] == list(range(8))
    known = ("NVIDIA H100 80GB HBM3", "GPU-00000000-0000-4000-8000-000000000003")
    assert (facts.gpus[3].model, facts.gpus[3].uuid) == known
    assert len(paths(facts, DeviceKind.DRI_CARD)) == len(paths(facts, DeviceKind.DRI_RENDER)) == 8
    assert [(node.kind, node.path) for node in nodes(facts) if not node.pci_address] == [
        (DeviceKind.CONTROL, "/dev/nvidiactl"),
        (DeviceKind.MODESET, "/dev/nvidia-modeset"),
        (DeviceKind.UVM, "/dev/nvidia-uvm"),
        (DeviceKind.UVM_TOOLS, "/dev/nvidia-uvm-tools"),
    ]
    numbers = {node.path: node.number for node in nodes(facts)}
    assert numbers["/dev/dri/card1"] == DeviceNumber(226, 1)._replace(mode=0o660)


def test_minors_are_not_in_the_order_of_addresses(host: Host) -> None:
    host.driver("550.163.01")
    host.gpu("0000:01:00.0", 1)
    host.gpu("0000:02:00.0", 0)
    owners = {node.path: node.pci_address for node in nodes(observe(host)) if node.pci_address}
    assert owners["/dev/nvidia1"] == owners["/dev/dri/renderD129"] == "0000:01:00.0"
    assert owners["/dev/nvidia0"] == owners["/dev/dri/renderD128"] == "0000:02:00.0"


def test_driver_535_registers_one_name_for_gpus_control_and_modeset(host: Host) -> None:
    host.driver("535.261.03", gpus=1)
    old = PROC_DEVICES.replace("195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n", "195 nvidia-frontend\n")
    host.file("/proc/devices", old)
    facts = observe(host)
    assert facts.problems == ()
    assert {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-modeset"} < set(paths(facts))


@pytest.mark.scenario("002")
def test_optional_nodes(host: Host) -> None:
    host.driver("550.163.01", gpus=1)
    host.node("/dev/nvidia-caps-imex-channels/channel0", 509, 0)
    host.node("/dev/nvidia-nvswitchctl", 510, 255)
    host.node("/dev/nvidia-nvswitch1", 510, 1)
    host.node("/dev/nvidia-nvlink", 512, 0)
    host.node("/dev/nvidia-fs0", 505, 0)
    facts = observe(host)
    assert facts.problems == ()
    assert paths(facts, DeviceKind.IMEX_CHANNEL) == ["/dev/nvidia-caps-imex-channels/channel0"]
    assert paths(facts, DeviceKind.NVSWITCH) == ["/dev/nvidia-nvswitch1", "/dev/nvidia-nvswitchctl"]
    assert paths(facts, DeviceKind.NVLINK) == ["/dev/nvidia-nvlink"]
    assert "/dev/nvidia-fs0" not in paths(facts)


@pytest.mark.parametrize(
    ("path", "major", "minor", "expected"),
    [
        ("/dev/nvidia-uvm", 235, 0, f"/dev/nvidia-uvm: is 235:0, but the driver uses 511:0; {CREATE_AGAIN}"),
        ("/dev/nvidia0", 195, 3, f"/dev/nvidia0: is 195:3, but the driver uses 195:0; {CREATE_AGAIN}"),
        ("/dev/nvidiactl", 195, 254, f"/dev/nvidiactl: is 195:254, but the driver uses 195:255; {CREATE_AGAIN}"),
        ("/dev/nvidia7", 195, 7, "/dev/nvidia7: the driver has no GPU with minor 7; ignoring the leftover node"),
        ("/dev/dri/card1", 29, 1, f"/dev/dri/card1: is 29:1, but the driver uses major 226; {LOAD_AGAIN}"),
    ],
)
def test_nodes_with_wrong_numbers_are_refused(host: Host, path: str, major: int, minor: int, expected: str) -> None:
    host.driver("550.163.01", gpus=1)
    host.node(path, major, minor)
    facts = observe(host)
    assert facts.problems == (expected,)
    assert path not in paths(facts)


def test_nodes_of_an_unloaded_driver(host: Host) -> None:
    host.driver("550.163.01")
    host.node("/dev/nvidia0", 195, 0)
    host.file("/proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n195 nvidia\n511 nvidia-uvm\n")
    host.remove_file("/sys/module/nvidia/version")
    facts = observe(host)
    assert paths(facts) == []
    assert "/dev/nvidia0: its driver is not loaded (nvidia is not in /proc/devices)" in facts.problems
    assert facts.driver
    assert isinstance(facts.driver.module_version, Absent)


def test_something_else_in_a_nodes_place(host: Host) -> None:
    host.driver("550.163.01", gpus=1)
    host.file("/dev/nvidia-nvlink")
    host.node("/dev/nvidia0\nBind=", 195, 0)
    facts = observe(host)
    assert set(facts.problems) == {
        "/dev/nvidia-nvlink: not a character device",
        r"/dev/: unexpected characters in the device name 'nvidia0\nBind='",
    }
    assert paths(facts, DeviceKind.GPU) == ["/dev/nvidia0"]


def mig_host(host: Host) -> None:
    host.driver("550.163.01", gpus=1)
    host.capability("mig/config", 1, 0o400)
    host.capability("mig/monitor", 2)
    host.capability("gpu0/mig/gi1/access", 12)
    host.capability("gpu0/mig/gi1/ci0/access", 13)
    host.node("/dev/nvidia-caps/nvidia-cap21", 508, 21)


def capabilities(facts: VendorFacts) -> dict[int, str]:
    return {node.number.minor: node.capability for node in nodes(facts) if node.kind is DeviceKind.CAPABILITY}


@pytest.mark.scenario("002")
def test_mig_capabilities_are_named_and_destroyed_instances_left_out(host: Host) -> None:
    mig_host(host)
    named = {1: "mig/config", 2: "mig/monitor", 12: "gpu0/mig/gi1/access", 13: "gpu0/mig/gi1/ci0/access"}
    facts = observe(host)
    assert (facts.problems, capabilities(facts)) == ((), named)
    # Those that only root may read are known from the tables.
    host.file("/proc/driver/nvidia-caps/mig-minors", "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi1/access 12\n")
    for name in ("mig/config", "gpu0/mig/gi1/access"):
        path = f"/proc/driver/nvidia/capabilities/{name}"
        host.failing[path] = PermissionError(13, "Permission denied", path)
    assert capabilities(observe(host)) == named


@pytest.mark.parametrize(
    "path",
    [
        "/dev", "/proc/devices", "/dev/nvidia-caps", "/proc/driver/nvidia/capabilities/gpu0",
        "/proc/driver/nvidia/gpus", "/proc/driver/nvidia/gpus/0000:01:00.0/information",
    ],
)  # fmt: skip
def test_a_failed_observation_makes_all_devices_unseen(host: Host, path: str) -> None:
    mig_host(host)
    host.failing[path] = PermissionError(13, "Permission denied", path)
    facts = observe(host)
    assert isinstance(facts.devices, Unseen)
    assert path in facts.devices.why
    assert [gpu.pci_address for gpu in facts.gpus] == ["0000:01:00.0"]


@pytest.mark.parametrize("bus", ["pci", "drm"])
def test_an_unlisted_bus_does_not_make_gpus_disappear(host: Host, bus: str) -> None:
    host.driver("550.163.01", gpus=2)
    before = observe(host)
    setattr(host, bus, Unseen("/sys: Permission denied"))
    facts = observe(host)
    assert facts.gpus == before.gpus
    assert facts.devices == Unseen("/sys: Permission denied")


def test_a_gpu_that_is_removed_during_observation(host: Host) -> None:
    host.driver("550.163.01", gpus=2)
    gone = "/proc/driver/nvidia/gpus/0000:02:00.0/information"
    host.failing[gone] = FileNotFoundError(2, "No such file or directory", gone)
    facts = observe(host)
    assert paths(facts, DeviceKind.GPU) == ["/dev/nvidia0"]
    assert facts.gpus[1].minor is None


def test_other_drivers_and_other_vendors(host: Host) -> None:
    host.driver("550.163.01", gpus=2)
    host.rebind("0000:02:00.0", "vfio-pci")
    host.remove_file("/proc/driver/nvidia/gpus/0000:02:00.0/information")
    host.remove_file("/dev/nvidia1")
    assert isinstance(host.pci, tuple)
    assert isinstance(host.drm, tuple)
    host.pci += (
        PciDevice("0000:00:02.0", 0x8086, 0x030000, "i915"),
        PciDevice("0000:01:00.1", 0x10DE, 0x040300, "snd_hda_intel"),
    )
    host.node("/dev/dri/card0", 226, 0)
    host.drm += (DrmDevice("/dev/dri/card0", "0000:00:02.0"), DrmDevice("/dev/dri/card9", ""))
    facts = observe(host)
    assert facts.problems == ()
    assert {gpu.pci_address: gpu.driver for gpu in facts.gpus} == {"0000:01:00.0": "nvidia", "0000:02:00.0": "vfio-pci"}
    assert paths(facts, DeviceKind.DRI_CARD) == ["/dev/dri/card1"]


def test_no_gpu(host: Host) -> None:
    host.file("/proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n  8 sd\n")
    host.file("/dev/null")
    facts = observe(host)
    assert (facts.gpus, facts.devices, facts.problems) == ((), (), ())


@given(st.text())
def test_no_text_of_proc_raises_an_exception(text: str) -> None:
    parse_majors(text)
    parse_majors(f"Character devices:\n{text}")
    parse_information(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPU UUID: \t GPU-????????-????-????-????-????????????\n", Information()),
        ("Model: \t NVIDIA \x1b[31m\n", Information()),
        ("Device Minor: \t -1\n", Information()),
        ("Device Minor:\t247\r\n", Information(minor=247)),
        ("GPU Excluded:\t Yes\n", Information(excluded=True)),
        ("Blacklisted:\t Yes\n", Information(excluded=True)),
        ("Blacklisted:\t No\n", Information()),
        ("Model: \t NVIDIA A: B\n", Information(model="NVIDIA A: B")),
    ],
)
def test_information(text: str, expected: Information) -> None:
    assert parse_information(text) == expected
