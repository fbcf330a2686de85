"""Devices other than GPUs, from the settings to the machine's report; the nodes are listed, and none is real."""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from agent.config.settings import Config, DeviceClassName, MachineSettings
from agent.host.plan.goal import plan
from agent.machine.run import run
from agent.model.conditions import ConditionType
from agent.model.device import DeviceKind
from agent.model.facts import DeviceNode, Facts, Unseen, VendorFacts
from agent.model.goal import MachineGoal
from agent.model.handoff import GrantedDevice, Request
from agent.vendors.other_devices import ADVICE, NODE_DIRECTORIES, NODE_NAMES, OTHER, RULES
from tests.fakes.facts import CONFIG, MACHINE, evaluated, facts, nvidia
from tests.fakes.host import PROC_DEVICES, Host
from tests.fakes.machine import EMPTY, REQUEST, Machine, gpu_machine
from tests.fakes.user_space import sources

MISC = "232 kvm\n122 rdma_cm\n200 tun\n  1 psaux\ngarbage\n\nx y\n"
DRIVERS = "231 infiniband_verbs\n234 kfd\n235 infiniband_verbs\n236 gdrdrv\n237 nvidia-fs\n261 accel\n"
REPOSITORY = Path(__file__).resolve().parents[3]
EVERY = [str(each) for each in get_args(DeviceClassName)]
NODES = {
    "/dev/kvm": (10, 232),
    "/dev/net/tun": (10, 200),
    "/dev/vhost-net": (10, 238),
    "/dev/vhost-vsock": (10, 241),
    "/dev/infiniband/uverbs0": (231, 192),
    "/dev/infiniband/uverbs32": (235, 0),
    "/dev/infiniband/rdma_cm": (10, 122),
    "/dev/gdrdrv": (236, 0),
    "/dev/nvidia-fs0": (237, 0),
    "/dev/nvidia-fs15": (237, 15),
    "/dev/accel/accel0": (261, 0),
}
"""One node for each pattern, and the second major that the kernel uses for InfiniBand adapters beyond the 32nd."""
KVM = GrantedDevice("/dev/kvm", "kvm", 10, 232)
WATCHDOG = GrantedDevice("/dev/watchdog", "extra", 10, 130)
OTHERS = Request("other-devices", (), (KVM, WATCHDOG))


@pytest.fixture
def devices(host: Host) -> Host:
    """A host with all device classes, and with nodes that belong to none of them."""
    host.file("/proc/devices", PROC_DEVICES.replace("\nBlock", f"{DRIVERS}\nBlock"))
    host.file("/proc/misc", MISC)
    for path, (major, minor) in NODES.items():
        host.node(path, major, minor)
    host.node("/dev/infiniband/umad0", 231, 0)
    host.node("/dev/fuse", 10, 229)
    return host


def look(host: Host, **settings: object) -> VendorFacts:
    machines = {"node": MachineSettings.validated(settings)}
    return OTHER.observe(replace(sources(host), machines=machines))


def paths(found: VendorFacts) -> list[str]:
    assert isinstance(found.devices, tuple)
    return [node.path for node in found.devices]


def with_others(seen: Facts, host: Host, **settings: object) -> Facts:
    return replace(seen, vendors=(*seen.vendors, look(host, **settings)))


def goal(settings: dict[str, object], seen: Facts) -> MachineGoal:
    (machine,) = plan(Config.validated({"machines": {MACHINE: settings}}), seen).goal.machines
    return machine


def test_each_device_class_grants_only_its_own_nodes(devices: Host) -> None:
    granted = paths(look(devices, devices=EVERY))
    assert granted == sorted(NODES)
    for rule in RULES:
        assert any(re.fullmatch(f"{rule.directory}/{rule.pattern}", path) for path in granted), rule
    assert paths(look(devices, devices=["kvm"])) == ["/dev/kvm"]
    assert {str(each.kind) for each in RULES} == {*map(str, ADVICE)} == {*EVERY}
    text = (REPOSITORY / "docs/hardware/devices.md").read_text()
    assert [each for each in EVERY if f"\n| `{each}` | " not in text] == []


def test_all_nodes_of_device_classes_are_watched() -> None:
    for path in NODES:
        assert path.rpartition("/")[0] in ("/dev", *NODE_DIRECTORIES)
        assert any(fnmatchcase(path.split("/")[2], pattern) for pattern in NODE_NAMES), path


def test_nothing_is_observed_unless_configured(host: Host) -> None:
    """There is no /proc/devices here."""
    assert look(host) == VendorFacts("other-devices")


@pytest.mark.parametrize(
    ("path", "number", "expected"),
    [
        ("/dev/kvm", (10, 5), "is 10:5, but the driver uses 10:232"),
        ("/dev/kvm", (195, 232), "is 195:232, but the driver uses 10:232"),
        ("/dev/gdrdrv", (195, 0), "is 195:0, but the driver uses major 236"),
        ("/dev/infiniband/rdma_cm", (10, 5), "is 10:5, but the driver uses 10:122"),
    ],
)
def test_a_node_with_another_drivers_number_is_refused(
    devices: Host, path: str, number: tuple[int, int], expected: str
) -> None:
    devices.node(path, *number)
    found = look(devices, devices=EVERY)
    assert path not in paths(found)
    assert any(problem.startswith(f"{path}: ") and expected in problem for problem in found.problems)


def test_a_miscellaneous_device_with_a_fixed_number_needs_no_module_yet(devices: Host) -> None:
    """systemd-tmpfiles makes such nodes at boot; the first open loads the module. rdma_cm has no such number."""
    devices.file("/proc/misc", "")
    assert "/dev/net/tun" in paths(look(devices, devices=EVERY))
    assert "/dev/infiniband/rdma_cm" not in paths(look(devices, devices=EVERY))


@pytest.mark.parametrize("number", [(195, 0), (511, 0), (226, 128), (234, 0)])
def test_no_path_leads_to_a_gpu(devices: Host, number: tuple[int, int]) -> None:
    """A GPU's own number under another name is refused, even if no machine has that GPU."""
    devices.node("/dev/harmless", *number)
    found = look(devices, extra_devices=[{"path": "/dev/harmless"}])
    assert (paths(found), len(found.problems)) == ([], 1)


def test_a_device_by_its_path(devices: Host) -> None:
    number = devices.device("/dev/fuse")
    assert number
    fuse = look(devices, extra_devices=[{"path": "/dev/fuse"}])
    assert fuse.devices == (DeviceNode("/dev/fuse", DeviceKind.EXTRA, number),)
    devices.symlink("/dev/link", "fuse")
    devices.symlink("/dev/loop", "loop")
    devices.file("/dev/file")
    places = ("/dev/link", "/dev/file", "/dev/fuse/below", "/dev/loop/below")
    found = look(devices, extra_devices=[{"path": path} for path in places])
    assert (paths(found), len(found.problems)) == ([], 3)


def test_a_failed_observation_withdraws_nothing(devices: Host) -> None:
    devices.failing["/dev"] = PermissionError(13, "no", "/dev")
    assert isinstance(look(devices, devices=["kvm"]).devices, Unseen)
    assert plan(CONFIG, with_others(facts(), devices, devices=["kvm"])).held.keys() == {MACHINE}


def test_a_machine_gets_what_its_settings_name(devices: Host) -> None:
    requested: dict[str, object] = {"devices": ["kvm"], "extra_devices": [{"path": "/dev/fuse", "mode": "r"}]}
    machine = goal(requested, with_others(facts(nvidia(1)), devices, **requested))
    another = goal({}, with_others(facts(), devices, devices=EVERY))
    assert another == goal({}, facts()), "another machine gets none of it"
    assert b"\nBindReadOnly=/dev/nvidia0\n" in machine.nspawn.content
    assert b"\nBind=/dev/kvm\n" in machine.nspawn.content
    assert b"\nBind=/dev/fuse\n" in machine.nspawn.content
    assert b"\nDeviceAllow=/dev/char/10:232 rw\n" in machine.drop_in.content
    assert b"\nDeviceAllow=/dev/char/10:229 r\n" in machine.drop_in.content
    assert machine.live.nodes["/dev/kvm"] == "10:232"
    (request,) = (each for each in machine.handoff.requests if each.vendor == "other-devices")
    assert request == Request("other-devices", (), (GrantedDevice("/dev/fuse", "extra", 10, 229), KVM))


def test_missing_devices_are_reported_and_stop_nothing(host: Host) -> None:
    host.file("/proc/devices", PROC_DEVICES)
    requested: dict[str, object] = {"devices": ["kvm"], "extra_devices": [{"path": "/dev/fuse"}]}
    seen = with_others(facts(), host, **requested)
    machine = goal(requested, seen)
    assert machine.handoff == goal({}, facts()).handoff
    settings = MachineSettings.validated(requested)
    found = evaluated(settings, machine, seen)
    (present,) = (each for each in found if each.type is ConditionType.DEVICES_PRESENT)
    missing = '; requested but missing: devices "kvm" (load the module kvm_intel or kvm_amd), /dev/fuse'
    assert present.message.endswith(missing)
    without = evaluated(settings, goal({}, facts()), facts())
    assert [(each.type, each.status) for each in found] == [(each.type, each.status) for each in without]


def test_a_host_without_gpus_grants_them_too(devices: Host) -> None:
    bare = facts(VendorFacts("nvidia"))
    seen = with_others(bare, devices, devices=["kvm"])
    machine = goal({"devices": ["kvm"]}, seen)
    assert "/dev/kvm" in machine.live.nodes
    found = {each.type: each.reason for each in evaluated(MachineSettings(cdi_modes=["management"]), machine, seen)}
    assert found[ConditionType.READY] == "NoGPU"
    assert found[ConditionType.DEVICES_ALLOWED] == found[ConditionType.CDI_SPEC_CURRENT] == "MachineNotRunning"
    assert plan(CONFIG, bare).skipped == {MACHINE: "no GPU on this host"}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"extra_devices": [{"path": path}]} for path in (
            "/dev", "/dev/", "dev/kvm", "/etc/shadow", "/dev/../etc/shadow", "/dev/./kvm", "/dev/a\nBind=/", "/dev/a ",
            "/dev/a\\", "/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-fs0", "/dev/dri/card0",
            "/dev//dri//x", f"/dev/{'x' * 256}", f"/dev{'/x' * 2050}",
            "/dev/kfd", "/dev/null", "/dev/pts/0", "/dev/char/195:0", "/dev/kmsg",
        )),
        {"devices": ["kvm", "kvm"]}, {"devices": ["usb"]}, {"devices": "kvm"},
        {"extra_devices": [{"path": "/dev/fuse"}, {"path": "/dev//fuse/"}]},
        {"extra_devices": [{"path": "/dev/fuse", "mode": "x"}]}, {"extra_devices": [{"mode": "rw"}]},
    ],
)  # fmt: skip
def test_settings_that_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        MachineSettings.validated(wrong)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = gpu_machine(tmp_path)
    for device in OTHERS.devices:
        machine.node(device.path, device.major, device.minor)
        machine.mounts.append(device.path)
    return machine


def test_the_machine_half_checks_nodes_but_never_opens_them(machine: Machine) -> None:
    """A watchdog that is opened reboots the host."""
    machine.hand(REQUEST, OTHERS)
    run(machine)
    opened = [path for call in machine.calls if any(each.endswith("open_nodes.py") for each in call) for path in call]
    assert "/dev/nvidia0" in opened
    assert not {"/dev/kvm", "/dev/watchdog"} & set(opened)
    assert machine.conditions()["DevicesAllowed"] == ("True", "Opened")
    assert machine.message("DevicesAllowed").endswith("; other devices: 2 nodes")
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")
    machine.hand(EMPTY, OTHERS)
    assert machine.verdict("DevicesAllowed") == ("True", "NodesPresent")
    assert machine.conditions()["CDISpecCurrent"] == ("True", "NotApplicable")


def test_a_node_is_requested_and_removed_with_its_link(machine: Machine) -> None:
    machine.hand(REQUEST, OTHERS)
    run(machine)
    assert machine.read_link("/dev/char/10:232") == "../kvm"
    machine.hand(REQUEST, OTHERS._replace(devices=(WATCHDOG,)))
    run(machine)
    assert not machine.exists("/dev/kvm")
    assert not machine.exists("/dev/char/10:232")
    assert machine.exists("/dev/watchdog")
    # None of them is configured now, so the handoff has no request for them.
    machine.hand(REQUEST)
    run(machine)
    assert not machine.exists("/dev/watchdog")
    assert machine.conditions()["DevicesAllowed"] == ("True", "Opened")
    machine.hand(REQUEST, OTHERS)
    machine.nodes.pop("/dev/kvm", None)
    assert machine.verdict("DevicesAllowed") == ("False", "WrongNode")
    assert machine.message("DevicesAllowed").startswith("/dev/kvm must be character device 10:232")


def test_a_node_that_was_withdrawn_before_any_run_saw_it_is_removed(machine: Machine) -> None:
    """The host withdrew it so soon that it replaced the handoff before a run read it: only the host knows the node."""
    machine.hand(REQUEST, withdrawn=("/dev/kvm", "/dev/absent"))
    assert machine.verdict("DevicesAllowed") == ("True", "Opened")
    assert not machine.exists("/dev/kvm")
    assert machine.exists("/dev/watchdog"), "somebody else bound it"
