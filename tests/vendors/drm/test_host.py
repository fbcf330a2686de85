"""Intel's and AMD's GPUs on synthetic hosts: whose a DRM node is, who gets it, and what is reported as missing."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.config.settings import Config
from agent.host.detach import gpu_nodes, why_unknown
from agent.host.plan.goal import plan, select
from agent.host.vendors import HOST_VENDORS, host_vendor
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.device import DeviceKind
from agent.model.facts import DrmDevice, Facts, Granted, PciDevice, Unseen, VendorFacts
from agent.model.goal import Grant, Share
from agent.model.handoff import Report
from agent.vendors.host_vendor import FabricReport
from tests.fakes.facts import CONFIG, MACHINE, evaluated, facts, running
from tests.fakes.host import PROC_DEVICES, Host
from tests.fakes.reports import IN_MACHINE
from tests.fakes.user_space import sources

pytestmark = pytest.mark.scenario("004")

INTEL, AMD, NVIDIA, ASPEED, VIRTIO, QEMU = 0x8086, 0x1002, 0x10DE, 0x1A03, 0x1AF4, 0x1234
VGA, OTHER, ACCELERATOR, ETHERNET = 0x030000, 0x038000, 0x120000, 0x020000
IGPU, FLEX, INSTINCT, BMC = "0000:00:02.0", "0000:4d:00.0", "0000:83:00.0", "0000:03:00.0"
DISPLAY = "0000:2b:00.0"


class Cards(Host):
    """A host with DRM devices that a test lists, numbered in the order in which the kernel found them."""

    def __init__(self, tree: Path) -> None:
        super().__init__(tree)
        self.file("/proc/devices", PROC_DEVICES.replace("226 drm\n", "226 drm\n234 kfd\n"))

    def add(self, device: PciDevice) -> None:
        assert isinstance(self.pci, tuple)
        self.pci += (device,)

    def card(self, address: str, vendor: int, driver: str, kind: int = VGA, number: int | None = None) -> None:
        """Add a PCI device; with a number, also its DRM nodes."""
        self.add(PciDevice(address, vendor, kind, driver))
        if number is not None:
            self.dri(number, address, render=driver != "ast")

    def dri(self, number: int, address: str = "", *, render: bool = True) -> None:
        """Add DRM nodes; without an address, vgem's, which belong to no PCI device."""
        assert isinstance(self.drm, tuple)
        for name, minor in (("card", number), *[("renderD", 128 + number)] * render):
            self.node(f"/dev/dri/{name}{minor}", 226, minor, 0o660)
            self.drm += (DrmDevice(f"/dev/dri/{name}{minor}", address),)

    def look(self, **instead: object) -> tuple[VendorFacts, ...]:
        seen = replace(sources(self), **instead)
        return tuple(vendor.observe(seen) for vendor in HOST_VENDORS)


@pytest.fixture
def cards(tmp_path: Path) -> Cards:
    return Cards(tmp_path / "host")


def facts_of(vendors: tuple[VendorFacts, ...]) -> Facts:
    return replace(facts(), vendors=vendors)


def asking(gpus: object) -> Config:
    return Config.validated({"machines": {MACHINE: {"gpus": gpus}}})


def grants(vendors: tuple[VendorFacts, ...], gpus: object = "all") -> dict[str, Grant]:
    return {grant.vendor: grant for grant in plan(asking(gpus), facts_of(vendors)).goal.machines[0].grants}


def paths(grant: Grant) -> list[str]:
    return [node.path for node in grant.nodes]


def conditions(vendors: tuple[VendorFacts, ...], gpus: object = "all") -> dict[ConditionType, Condition]:
    config, seen = asking(gpus), facts_of(vendors)
    goal = plan(config, seen).goal.machines[0]
    return {each.type: each for each in evaluated(config.machines[MACHINE], goal, seen)}


def reasons(vendors: tuple[VendorFacts, ...], gpus: object = "all") -> tuple[str, str]:
    """Return the reasons of DriverLoaded and DevicesPresent."""
    found = conditions(vendors, gpus)
    return found[ConditionType.DRIVER_LOADED].reason, found[ConditionType.DEVICES_PRESENT].reason


def test_each_node_goes_to_its_own_vendor(cards: Cards) -> None:
    cards.card(BMC, ASPEED, "ast", number=0)
    cards.card(INSTINCT, AMD, "amdgpu", ACCELERATOR, 1)
    cards.card(IGPU, INTEL, "i915", number=2)
    cards.card(FLEX, INTEL, "xe", OTHER, 3)
    cards.card("0000:00:03.0", VIRTIO, "virtio_gpu", number=4)
    cards.card("0000:00:04.0", QEMU, "bochs-drm", number=5)
    cards.card("0000:00:1f.6", INTEL, "e1000e", ETHERNET)
    cards.dri(6)
    cards.node("/dev/kfd", 234, 0, 0o660)
    granted = grants(cards.look())
    assert granted["intel"].gpus == (IGPU, FLEX)
    assert paths(granted["intel"]) == [
        "/dev/dri/card2", "/dev/dri/card3", "/dev/dri/renderD130", "/dev/dri/renderD131",
    ]  # fmt: skip
    assert paths(granted["amd"]) == ["/dev/dri/card1", "/dev/dri/renderD129", "/dev/kfd"]
    assert [each.kind for each in granted["amd"].nodes] == [DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER, DeviceKind.KFD]
    assert granted["nvidia"].nodes == ()
    assert not granted["intel"].driver_files
    # The node that a vendor's GPUs share comes only with one of them.
    granted = grants(cards.look(), [IGPU])
    assert granted["amd"].nodes == ()
    assert paths(granted["intel"]) == ["/dev/dri/card2", "/dev/dri/renderD130"]


def test_a_gpu_with_another_driver_is_left_alone(cards: Cards) -> None:
    """With vfio-pci and similar drivers, it was assigned to a virtual machine. If settings name it, it is missing."""
    cards.card(IGPU, INTEL, "vfio-pci")
    cards.card(FLEX, INTEL, "xe-vfio-pci")
    cards.card(INSTINCT, AMD, "radeon", number=0)
    for number, driver in enumerate(("vfio-pci", "nvgrace_gpu_vfio_pci", "pci-stub", "pciback")):
        cards.card(f"0000:2b:00.{number}", NVIDIA, driver)
    assert select(cards.look(), "all", Share()).wrong_driver == ()
    assert len(grants(cards.look())) == 3
    assert all(not grant.gpus and not grant.problems for grant in grants(cards.look()).values())
    granted = grants(cards.look(), [IGPU, "0000:99:00.0"])
    assert [each for grant in granted.values() for each in grant.problems] == [
        f"GPU {IGPU} has kernel driver vfio-pci, not i915 or xe",
        "GPU 0000:99:00.0 is not on this host",
    ]


def test_a_gpu_with_nouveau_is_a_fault_if_configured(cards: Cards) -> None:
    """A display's GPU on the host does not affect a machine that has another vendor's."""
    cards.card(DISPLAY, NVIDIA, "nouveau", number=1)
    for gpus in ("all", "count=1", [DISPLAY]):
        assert reasons(cards.look(), gpus) == ("WrongDriver", "GPUNotFound")
    cards.card(INSTINCT, AMD, "amdgpu", ACCELERATOR, 0)
    for gpus in ("all", "count=1", [INSTINCT]):
        assert not any(grant.problems for grant in grants(cards.look(), gpus).values())
        assert reasons(cards.look(), gpus) == ("Loaded", "Present")
    for gpus in ("count=2", [DISPLAY, INSTINCT]):
        granted = grants(cards.look(), gpus)
        assert granted["nvidia"].problems == (f"GPU {DISPLAY} has kernel driver nouveau, not nvidia",)
        assert reasons(cards.look(), gpus)[0] == "WrongDriver"


@pytest.mark.parametrize("driver", ["", "i915"])
def test_no_machine_gets_further_virtual_functions_unless_by_name(cards: Cards, driver: str) -> None:
    """They are parts of a GPU on this host, made for virtual machines, which may be off.

    A machine keeps those that it has by their address, because its pods may use them.
    """
    functions = ("0000:4d:00.1", "0000:4d:00.2")
    cards.file("/sys/module/i915/refcnt", "0\n")
    cards.card(FLEX, INTEL, "i915", OTHER, 0)
    for number, address in enumerate(functions, 1):
        cards.add(PciDevice(address, INTEL, OTHER, driver, virtual=True))
        if driver:
            cards.dri(number, address)
    vendors = cards.look()
    assert grants(vendors)["intel"].gpus == (FLEX,)
    assert reasons(vendors)[1] == "Present"
    assert select(vendors, "count=2", Share()).problems
    kept = select(vendors, "all", Share(current=frozenset(functions))).gpus
    assert [each.pci_address for each in kept] == [FLEX, *(functions if driver else ())]
    named = grants(vendors, [functions[1]])["intel"]
    assert (named.gpus, len(named.nodes)) == (functions[1:], 2 if driver else 0)


@pytest.mark.parametrize(("vendor", "own"), [(INTEL, "xe"), (NVIDIA, "nvidia")])
def test_a_gpu_without_a_driver_may_be_reserved_for_another_one(cards: Cards, vendor: int, own: str) -> None:
    """Virtual machines reserve a GPU by driver_override. It is no fault that the GPU has no driver while they are off.

    `none` is no driver's name: the kernel's documentation proposes it to keep all drivers away.
    """
    cards.file("/sys/module/xe/refcnt", "0\n")
    for override in ("vfio-pci", "none"):
        cards.pci = (PciDevice(IGPU, vendor, VGA, override=override),)
        found = select(cards.look(), "all", Share())
        assert (found.gpus, found.problems, found.wrong_driver) == ((), (), ())
        found = select(cards.look(), [IGPU], Share())
        assert found.gpus == ()
        (problem,) = found.problems
        assert problem.startswith(f"GPU {IGPU} has driver_override {override}, not ")
    cards.pci = (PciDevice(IGPU, vendor, VGA, override=own),)
    assert [each.pci_address for each in select(cards.look(), "all", Share()).gpus] == [IGPU]


def selected(vendors: tuple[VendorFacts, ...], count: int, *current: str) -> list[str]:
    return [gpu.pci_address for gpu in select(vendors, f"count={count}", Share(current=frozenset(current))).gpus]


def test_a_number_of_gpus_takes_the_processors_own_last(cards: Cards) -> None:
    """Also if the drivers of the others are late: what a machine got first stays with it.

    Intel's UHD 770 has a lower address than a card, and its driver may be there first (ollama-intel-gpu issue 7).
    """
    cards.driver("550.163.01", gpus=1)
    cards.make_directory("/sys/module/xe")
    cards.add(PciDevice("0000:c1:00.0", AMD, VGA, "amdgpu", integrated=True))
    cards.card(IGPU, INTEL, "i915", number=5)
    cards.card(FLEX, INTEL, "")
    cards.card(INSTINCT, AMD, "amdgpu", number=6)
    cards.card(DISPLAY, NVIDIA, "")
    vendors = cards.look()
    assert selected(vendors, 1) == ["0000:01:00.0"]
    assert set(selected(vendors, 4)) == {"0000:01:00.0", DISPLAY, INSTINCT, FLEX}
    assert IGPU in selected(vendors, 6)
    assert selected(vendors, 1, IGPU) == [IGPU], "the machine keeps what it has"
    problem = "the configuration asks for 7 GPUs, but the host has 6 usable GPUs"
    assert select(vendors, "count=7", Share()).problems == (problem,)


def test_unlisted_devices_change_nothing(cards: Cards) -> None:
    cards.card(IGPU, INTEL, "i915", number=0)
    for name in ("pci", "drm"):
        vendors = cards.look(**{name: Unseen(f"the list of {name} devices: Permission denied")})
        assert plan(CONFIG, facts_of(vendors)).held.keys() == {MACHINE}
    found = replace(cards.look()[2], devices=Unseen("/proc/devices: Input/output error"))
    loaded, present, *_ = host_vendor("intel").conditions(found, Grant("intel", (IGPU,)), FabricReport())
    assert loaded.reason == present.reason == "ObservationFailed"


def test_a_node_that_its_driver_does_not_have_is_refused(cards: Cards) -> None:
    cards.card(IGPU, INTEL, "i915", number=0)
    cards.node("/dev/dri/renderD128", 195, 128)
    cards.file("/dev/dri/card0", "no node")
    cards.device_numbers.pop("/dev/dri/card0")
    vendors = cards.look()
    assert (vendors[2].devices, len(vendors[2].problems)) == ((), 2)
    found = conditions(vendors)[ConditionType.DEVICES_PRESENT]
    assert found.reason == "NodesMissing"
    assert "195:128" in found.message


def test_a_gpu_without_a_driver_is_reported_with_advice(cards: Cards) -> None:
    cards.card(IGPU, INTEL, "")
    cards.file("/sys/module/i915/refcnt", "0\n")
    found = conditions(cards.look())
    loaded = found[ConditionType.DRIVER_LOADED]
    assert (loaded.reason, "`modprobe -a i915 xe`" in loaded.message) == ("ModuleNotLoaded", True)
    cards.driver("550.163.01", gpus=1)
    assert reasons(cards.look()) == ("ModuleNotLoaded", "GPUWithoutDriver"), "another vendor's driver is loaded"
    cards.card(FLEX, INTEL, "xe", number=5)
    found = conditions(cards.look())
    assert found[ConditionType.DRIVER_LOADED].reason == "Loaded"
    present = found[ConditionType.DEVICES_PRESENT]
    assert (present.reason, IGPU in present.message, FLEX in present.message) == ("GPUWithoutDriver", True, False)
    # Its users are known by its nodes.
    seen = facts_of(cards.look())
    (works,) = (gpu for gpu in seen.vendors[2].gpus if gpu.pci_address == FLEX)
    assert why_unknown(works, gpu_nodes(seen, FLEX)) == ""


def test_a_gpu_that_needs_no_driver_is_awaited_only_by_its_machine(cards: Cards) -> None:
    """An example is a processor's GPU on a host without a module for it."""
    cards.card(IGPU, AMD, "")
    ready = conditions(cards.look())[ConditionType.READY]
    assert (ready.reason, "(drivers: none)" in ready.message) == ("NoGPUGranted", True)
    cards.card(FLEX, INTEL, "xe", number=0)
    vendors = cards.look()
    assert grants(vendors)["amd"].gpus == ()
    assert reasons(vendors)[1] == "Present"
    assert grants(vendors, "count=1")["intel"].gpus == (FLEX,)
    problem = "the configuration asks for 2 GPUs, but the host has 1 usable GPU"
    assert select(vendors, "count=2", Share()).problems == (problem,)
    assert grants(vendors, [IGPU])["amd"].gpus == (IGPU,)
    seen = facts_of(vendors)
    for gpus in ("all", "count=1"):
        had = replace(seen, machines=(replace(seen.machines[0], granted=Granted("", (IGPU,), {})),))
        assert IGPU in plan(asking(gpus), had).goal.machines[0].granted.gpus
        unseen = replace(seen, machines=(replace(seen.machines[0], granted=Unseen("Input/output error")),))
        assert plan(asking(gpus), unseen).held == {MACHINE: "Input/output error"}
    # With its module loaded, each machine awaits it, but prefers one that works.
    cards.make_directory("/sys/module/amdgpu")
    assert grants(cards.look())["amd"].gpus == (IGPU,)
    assert grants(cards.look(), "count=1")["intel"].gpus == (FLEX,)


def test_a_missing_kfd_is_reported_and_stops_nothing(cards: Cards) -> None:
    """Without it, a GPU still renders and decodes."""
    cards.card(INSTINCT, AMD, "amdgpu", number=0)
    found = conditions(cards.look())[ConditionType.DEVICES_PRESENT]
    assert (found.reason, "no usable /dev/kfd" in found.message) == ("Present", True)


def test_a_divided_gpu_is_named(cards: Cards) -> None:
    """The driver makes the nodes of eight partitions in each mode, so they are no evidence."""
    cards.card(INSTINCT, AMD, "amdgpu", number=0)
    cards.node("/dev/kfd", 234, 0)
    mode = f"/sys/bus/pci/devices/{INSTINCT}/current_compute_partition"

    def problems() -> tuple[str, ...]:
        return cards.look()[1].problems

    cards.file(mode, "CPX\n")
    assert problems() == (), "no partition has nodes, so the attribute, which takes a lock of the driver, is not read"
    cards.dri(1)
    (problem,) = problems()
    assert problem.startswith(
        f"GPU {INSTINCT} is divided (current_compute_partition is 'CPX'): only its first partition"
    )
    assert paths(grants(cards.look())["amd"]) == ["/dev/dri/card0", "/dev/dri/renderD128", "/dev/kfd"]
    cards.file(mode, "SPX\n")
    assert problems() == ()
    cards.failing[mode] = PermissionError(1, "Operation not permitted", mode)
    assert problems() == (), "the GPU is being reset"
    cards.failing.clear()
    cards.remove_file(mode)
    assert problems() == ()


def test_a_detached_gpu_is_granted_to_nobody(cards: Cards) -> None:
    cards.card(IGPU, INTEL, "i915", number=0)
    cards.card(FLEX, INTEL, "i915", number=1)
    vendors = cards.look(detached=frozenset({IGPU}))
    grant = grants(vendors)["intel"]
    assert (grant.gpus, grant.detached) == ((FLEX,), (IGPU,))
    assert paths(grant) == ["/dev/dri/card1", "/dev/dri/renderD129"]
    assert reasons(vendors)[1] == "GPUDetached"


def test_a_host_with_intel_alone_becomes_ready(cards: Cards) -> None:
    """The host needs no driver root, no libraries and no other vendor's driver."""
    cards.card(IGPU, INTEL, "i915", number=0)
    config = Config.validated({"machines": {MACHINE: {"require_gpus": True}}})
    seen = facts_of(cards.look())
    goal = plan(config, seen).goal.machines[0]
    assert {each.vendor for each in goal.grants} == {"intel", "nvidia"}, "a handoff names only vendors with GPUs"
    fine = (Condition(kind, Status.TRUE, "Fine", "simulated") for kind in (ConditionType.DEVICES_ALLOWED, *IN_MACHINE))
    report, live = Report(goal.generation, tuple(fine)), running(seen, goal.live)
    found = {each.type: each for each in evaluated(config.machines[MACHINE], goal, live, report)}
    assert found[ConditionType.READY].reason == "AllConditionsTrue"
    assert found[ConditionType.DRIVER_LOADED].message == "kernel driver i915 for 1 GPU"
    assert found[ConditionType.DRIVER_ROOT_STAGED].reason == "NotApplicable"
    assert found[ConditionType.LIBRARIES_PRESENT].reason == "NotApplicable"
    assert plan(config, seen).goal.driver_roots == ()
