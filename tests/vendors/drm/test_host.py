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
from agent.model.facts import (
    Absent,
    DrmDevice,
    Facts,
    FileState,
    Granted,
    MachineFacts,
    PciDevice,
    Unseen,
    VendorFacts,
)
from agent.model.goal import Grant, Share
from agent.model.handoff import Report
from agent.model.paths import machine_files
from agent.vendors.host_vendor import FabricReport, Sources
from tests.fakes.facts import evaluated
from tests.fakes.host import PROC_DEVICES, Host
from tests.fakes.reports import IN_MACHINE

pytestmark = pytest.mark.scenario("004")

INTEL, AMD, NVIDIA, ASPEED, VIRTIO, QEMU = 0x8086, 0x1002, 0x10DE, 0x1A03, 0x1AF4, 0x1234
VGA, OTHER, ACCELERATOR, ETHERNET = 0x030000, 0x038000, 0x120000, 0x020000
IGPU, FLEX, INSTINCT, BMC = "0000:00:02.0", "0000:4d:00.0", "0000:83:00.0", "0000:03:00.0"
DISPLAY = "0000:2b:00.0"


class Cards(Host):
    """A host with DRM devices that a test lists, numbered in the order in which the kernel found them."""

    def __init__(self, tree: Path) -> None:
        super().__init__(tree)
        self.pci = self.drm = ()
        self.file("/proc/devices", PROC_DEVICES.replace("226 drm\n", "226 drm\n234 kfd\n"))

    def card(self, address: str, vendor: int, driver: str, kind: int = VGA, number: int | None = None) -> None:
        """Add a PCI device; with a number, also its DRM nodes."""
        assert isinstance(self.pci, tuple)
        assert isinstance(self.drm, tuple)
        self.pci = (*self.pci, PciDevice(address, vendor, kind, driver))
        if number is None:
            return
        nodes = {f"/dev/dri/card{number}": number}
        if driver != "ast":
            nodes[f"/dev/dri/renderD{128 + number}"] = 128 + number
        for path, minor in nodes.items():
            self.node(path, 226, minor, 0o660)
            self.drm = (*self.drm, DrmDevice(path, address))

    def virtual_gpu(self, number: int) -> None:
        """Add vgem's nodes, which belong to no PCI device."""
        assert isinstance(self.drm, tuple)
        for path, minor in ((f"/dev/dri/card{number}", number), (f"/dev/dri/renderD{128 + number}", 128 + number)):
            self.node(path, 226, minor)
            self.drm = (*self.drm, DrmDevice(path, ""))

    def look(self) -> tuple[VendorFacts, ...]:
        sources = Sources(self, "x86_64", self.pci, self.drm, lambda root: Absent("no cache"), {})
        return tuple(vendor.observe(sources) for vendor in HOST_VENDORS)


@pytest.fixture
def cards(tmp_path: Path) -> Cards:
    return Cards(tmp_path / "host")


def facts_of(vendors: tuple[VendorFacts, ...], *machines: str) -> Facts:
    names = machines or ("node",)
    return Facts(
        "x86_64",
        257,
        (),
        vendors,
        tuple(MachineFacts(name=name, root=f"/var/lib/machines/{name}", unit_state="inactive") for name in names),
        files={path: FileState(Absent("not there"), False) for name in names for path in machine_files(name)},
    )


def grants(vendors: tuple[VendorFacts, ...], gpus: object = "all") -> dict[str, Grant]:
    config = Config.validated({"machines": {"node": {"gpus": gpus}}})
    return {grant.vendor: grant for grant in plan(config, facts_of(vendors)).goal.machines[0].grants}


def paths(grant: Grant) -> list[str]:
    return [node.path for node in grant.nodes]


def conditions(vendors: tuple[VendorFacts, ...], name: str, gpus: object = "all") -> dict[ConditionType, Condition]:
    facts = next(each for each in vendors if each.vendor == name)
    return {
        each.type: each for each in host_vendor(name).conditions(facts, grants(vendors, gpus)[name], FabricReport())
    }


def test_each_node_goes_to_its_own_vendor(cards: Cards) -> None:
    cards.card(BMC, ASPEED, "ast", number=0)
    cards.card(INSTINCT, AMD, "amdgpu", ACCELERATOR, 1)
    cards.card(IGPU, INTEL, "i915", number=2)
    cards.card(FLEX, INTEL, "xe", OTHER, 3)
    cards.card("0000:00:03.0", VIRTIO, "virtio_gpu", number=4)
    cards.card("0000:00:04.0", QEMU, "bochs-drm", number=5)
    cards.card("0000:00:1f.6", INTEL, "e1000e", ETHERNET)
    cards.virtual_gpu(6)
    cards.node("/dev/kfd", 234, 0, 0o660)
    granted = grants(cards.look())
    assert granted["intel"].gpus == (IGPU, FLEX)
    assert paths(granted["intel"]) == [
        "/dev/dri/card2", "/dev/dri/card3", "/dev/dri/renderD130", "/dev/dri/renderD131",
    ]  # fmt: skip
    assert paths(granted["amd"]) == ["/dev/dri/card1", "/dev/dri/renderD129", "/dev/kfd"]
    assert granted["nvidia"].nodes == ()
    assert not granted["intel"].driver_files


def test_kfd_comes_only_with_a_gpu_of_its_vendor(cards: Cards) -> None:
    cards.node("/dev/kfd", 234, 0)
    cards.card(IGPU, INTEL, "i915", number=0)
    cards.card(INSTINCT, AMD, "amdgpu", number=1)
    assert [each.kind for each in grants(cards.look())["amd"].nodes] == [
        DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER, DeviceKind.KFD,
    ]  # fmt: skip
    granted = grants(cards.look(), [IGPU])
    assert granted["amd"].nodes == ()
    assert paths(granted["intel"]) == ["/dev/dri/card0", "/dev/dri/renderD128"]


def test_a_gpu_with_another_driver_is_left_alone(cards: Cards) -> None:
    """With vfio-pci and similar drivers, it was assigned to a virtual machine. If settings name it, it is missing."""
    cards.card(IGPU, INTEL, "vfio-pci")
    cards.card(FLEX, INTEL, "xe-vfio-pci")
    cards.card(INSTINCT, AMD, "radeon", number=0)
    for number, driver in enumerate(("vfio-pci", "nvgrace_gpu_vfio_pci", "pci-stub", "pciback")):
        cards.card(f"0000:2b:00.{number}", NVIDIA, driver)
    assert select(cards.look(), "all", Share()).wrong_driver == ()
    assert plan(Config.validated({"machines": {"node": {}}}), facts_of(cards.look())).goal.machines[0].grants
    assert all(not grant.gpus and not grant.problems for grant in grants(cards.look()).values())
    granted = grants(cards.look(), [IGPU, "0000:99:00.0"])
    assert [each for grant in granted.values() for each in grant.problems] == [
        f"GPU {IGPU} has kernel driver vfio-pci, not i915 or xe",
        "GPU 0000:99:00.0 is not on this host",
    ]


def reasons(vendors: tuple[VendorFacts, ...], gpus: object) -> dict[ConditionType, str]:
    config, facts = Config.validated({"machines": {"node": {"gpus": gpus}}}), facts_of(vendors)
    goal = plan(config, facts).goal.machines[0]
    return {each.type: each.reason for each in evaluated(config.machines["node"], goal, facts)}


def test_a_gpu_with_nouveau_is_a_fault_if_configured(cards: Cards) -> None:
    """A display's GPU on the host does not affect a machine that has another vendor's."""
    cards.card(DISPLAY, NVIDIA, "nouveau", number=1)
    alone = cards.look()
    for gpus in ("all", "count=1", [DISPLAY]):
        assert reasons(alone, gpus)[ConditionType.DRIVER_LOADED] == "WrongDriver"
        assert reasons(alone, gpus)[ConditionType.DEVICES_PRESENT] == "GPUNotFound"
    cards.card(INSTINCT, AMD, "amdgpu", ACCELERATOR, 0)
    for gpus in ("all", "count=1", [INSTINCT]):
        assert not any(grant.problems for grant in grants(cards.look(), gpus).values())
        assert reasons(cards.look(), gpus)[ConditionType.DRIVER_LOADED] == "Loaded"
        assert reasons(cards.look(), gpus)[ConditionType.DEVICES_PRESENT] == "Present"
    for gpus in ("count=2", [DISPLAY, INSTINCT]):
        granted = grants(cards.look(), gpus)
        assert granted["nvidia"].problems == (f"GPU {DISPLAY} has kernel driver nouveau, not nvidia",)
        assert reasons(cards.look(), gpus)[ConditionType.DRIVER_LOADED] == "WrongDriver"


def test_no_machine_gets_further_virtual_functions_unless_by_name(cards: Cards) -> None:
    """They are parts of a GPU on this host, made for virtual machines, which may be off.

    A machine keeps those that it has by their address, because its pods may use them.
    """
    functions = ("0000:4d:00.1", "0000:4d:00.2")
    cards.file("/sys/module/i915/refcnt", "0\n")
    for driver in ("", "i915"):
        cards = Cards(Path(cards.root))
        cards.card(FLEX, INTEL, "i915", OTHER, 0)
        for number, address in enumerate(functions, 1):
            cards.card(address, INTEL, driver, OTHER, number if driver else None)
        assert isinstance(cards.pci, tuple)
        cards.pci = tuple(replace(each, virtual=each.address in functions) for each in cards.pci)
        vendors = cards.look()
        assert grants(vendors)["intel"].gpus == (FLEX,)
        assert reasons(vendors, "all")[ConditionType.DEVICES_PRESENT] == "Present"
        assert select(vendors, "count=2", Share()).problems
        kept = select(vendors, "all", Share(current=frozenset(functions))).gpus
        assert [each.pci_address for each in kept] == [FLEX, *(functions if driver else ())]
        assert grants(vendors, [functions[1]])["intel"].gpus == functions[1:]
    assert paths(grants(cards.look(), [functions[1]])["intel"]) == ["/dev/dri/card2", "/dev/dri/renderD130"]


@pytest.mark.parametrize(("vendor", "own"), [(INTEL, "xe"), (NVIDIA, "nvidia")])
def test_a_gpu_without_a_driver_may_be_reserved_for_another_one(cards: Cards, vendor: int, own: str) -> None:
    """Virtual machines reserve a GPU by driver_override. It is no fault that the GPU has no driver while they are off.

    `none` is no driver's name: the kernel's documentation proposes it to keep all drivers away.
    """
    cards.file("/sys/module/xe/refcnt", "0\n")
    cards.card(IGPU, vendor, "")
    assert isinstance(cards.pci, tuple)
    (gpu,) = cards.pci
    for override in ("vfio-pci", "none"):
        cards.pci = (replace(gpu, override=override),)
        found = select(cards.look(), "all", Share())
        assert (found.gpus, found.problems, found.wrong_driver) == ((), (), ())
        assert select(cards.look(), [IGPU], Share()).gpus == ()
        (problem,) = select(cards.look(), [IGPU], Share()).problems
        assert problem.startswith(f"GPU {IGPU} has driver_override {override}, not ")
    cards.pci = (replace(gpu, override=own),)
    assert [each.pci_address for each in select(cards.look(), "all", Share()).gpus] == [IGPU]


def test_a_handoff_names_only_vendors_with_gpus(cards: Cards) -> None:
    cards.driver("550.163.01", gpus=1)
    assert set(grants(cards.look())) == {"nvidia"}
    cards.card(IGPU, INTEL, "i915", number=0)
    assert set(grants(cards.look())) == {"intel", "nvidia"}


def selected(vendors: tuple[VendorFacts, ...], count: int, *current: str) -> list[str]:
    return [gpu.pci_address for gpu in select(vendors, f"count={count}", Share(current=frozenset(current))).gpus]


def test_a_number_of_gpus_takes_the_processors_own_last(cards: Cards) -> None:
    """Also if the drivers of the others are late: what a machine got first stays with it."""
    cards.driver("550.163.01", gpus=1)
    cards.file("/proc/devices", PROC_DEVICES)
    assert isinstance(cards.pci, tuple)
    cards.pci += (PciDevice("0000:c1:00.0", AMD, VGA, "amdgpu", integrated=True),)
    cards.card(IGPU, INTEL, "i915", number=5)
    cards.card(INSTINCT, AMD, "amdgpu", number=6)
    cards.card(DISPLAY, NVIDIA, "")
    vendors = cards.look()
    assert selected(vendors, 1) == ["0000:01:00.0"]
    assert set(selected(vendors, 3)) == {"0000:01:00.0", DISPLAY, INSTINCT}
    assert IGPU in selected(vendors, 5)
    assert selected(vendors, 1, IGPU) == [IGPU], "the machine keeps what it has"
    problem = "the configuration asks for 6 GPUs, but the host has 5 usable GPUs"
    assert select(vendors, "count=6", Share()).problems == (problem,)
    config = Config.validated({"machines": {"a": {"gpus": "count=2"}, "b": {"gpus": "count=3"}}})
    machines = plan(config, facts_of(vendors, "a", "b")).goal.machines
    granted = [gpu for machine in machines for grant in machine.grants for gpu in grant.gpus]
    assert len(set(granted)) == len(granted) == 5


@pytest.mark.parametrize("late", [False, True])
def test_a_card_comes_before_the_processors_own_gpu_of_the_same_vendor(cards: Cards, late: bool) -> None:
    """Intel's UHD 770 has the lower address, and its driver may be there first (ollama-intel-gpu issue 7)."""
    arc = "0000:03:00.0"
    cards.card(IGPU, INTEL, "i915", number=0)
    cards.card(arc, INTEL, "" if late else "xe", number=None if late else 1)
    cards.make_directory("/sys/module/xe")
    vendors = cards.look()
    assert selected(vendors, 1) == [arc]
    assert selected(vendors, 2) == [arc, IGPU]
    assert selected(vendors, 1, IGPU) == [IGPU], "the machine keeps what it has"


def test_unlisted_devices_change_nothing(cards: Cards) -> None:
    cards.card(IGPU, INTEL, "i915", number=0)
    for name in ("pci", "drm"):
        broken = Cards(Path(cards.root))
        broken.pci, broken.drm = cards.pci, cards.drm
        setattr(broken, name, Unseen(f"the list of {name} devices: Permission denied"))
        config = Config.validated({"machines": {"node": {}}})
        assert plan(config, facts_of(broken.look())).held.keys() == {"node"}
    facts = cards.look()[2]
    found = replace(facts, devices=Unseen("/proc/devices: Input/output error"))
    kinds = {
        each.type: each.reason
        for each in host_vendor("intel").conditions(found, Grant("intel", (IGPU,)), FabricReport())
    }
    assert kinds[ConditionType.DRIVER_LOADED] == kinds[ConditionType.DEVICES_PRESENT] == "ObservationFailed"


def test_a_node_that_its_driver_does_not_have_is_refused(cards: Cards) -> None:
    cards.card(IGPU, INTEL, "i915", number=0)
    cards.node("/dev/dri/renderD128", 195, 128)
    cards.file("/dev/dri/card0", "no node")
    cards.device_numbers.pop("/dev/dri/card0")
    vendors = cards.look()
    assert vendors[2].devices == ()
    assert len(vendors[2].problems) == 2
    found = conditions(vendors, "intel")[ConditionType.DEVICES_PRESENT]
    assert found.reason == "NodesMissing"
    assert "195:128" in found.message


def test_a_gpu_without_a_driver_is_reported_with_advice(cards: Cards) -> None:
    cards.card(IGPU, INTEL, "")
    cards.file("/sys/module/i915/refcnt", "0\n")
    loaded = conditions(cards.look(), "intel")[ConditionType.DRIVER_LOADED]
    assert (loaded.reason, "`modprobe -a i915 xe`" in loaded.message) == ("ModuleNotLoaded", True)
    cards.card(FLEX, INTEL, "xe", number=0)
    found = conditions(cards.look(), "intel")
    assert found[ConditionType.DRIVER_LOADED].reason == "Loaded"
    present = found[ConditionType.DEVICES_PRESENT]
    assert (present.reason, IGPU in present.message, FLEX in present.message) == ("GPUWithoutDriver", True, False)
    # Its users are known by its nodes.
    facts = facts_of(cards.look())
    gpus = {gpu.pci_address: gpu for gpu in facts.vendors[2].gpus}
    assert why_unknown(gpus[FLEX], gpu_nodes(facts, FLEX)) == ""


def test_a_gpu_that_needs_no_driver_is_awaited_only_by_its_machine(cards: Cards) -> None:
    """An example is a processor's GPU on a host without a module for it."""
    cards.card(IGPU, AMD, "")
    cards.card(FLEX, INTEL, "xe", number=0)
    vendors = cards.look()
    assert grants(vendors)["amd"].gpus == ()
    assert reasons(vendors, "all")[ConditionType.DEVICES_PRESENT] == "Present"
    assert grants(vendors, "count=1")["intel"].gpus == (FLEX,)
    problem = "the configuration asks for 2 GPUs, but the host has 1 usable GPU"
    assert select(vendors, "count=2", Share()).problems == (problem,)
    assert grants(vendors, [IGPU])["amd"].gpus == (IGPU,)
    facts = facts_of(vendors)
    machine = facts.machines[0]
    for gpus in ("all", "count=1"):
        config = Config.validated({"machines": {"node": {"gpus": gpus}}})
        had = replace(facts, machines=(replace(machine, granted=Granted("", (IGPU,), {})),))
        assert IGPU in plan(config, had).goal.machines[0].granted.gpus
        unseen = Unseen("granted.json: Input/output error")
        assert plan(config, replace(facts, machines=(replace(machine, granted=unseen),))).held == {"node": unseen.why}


def test_a_gpu_whose_module_is_loaded_is_awaited_but_a_working_one_is_preferred(cards: Cards) -> None:
    cards.card(IGPU, INTEL, "")
    cards.file("/sys/module/xe/refcnt", "0\n")
    cards.card(FLEX, INTEL, "xe", number=0)
    assert grants(cards.look())["intel"].gpus == (IGPU, FLEX)
    assert grants(cards.look(), "count=1")["intel"].gpus == (FLEX,)


def test_a_host_whose_only_gpu_has_no_driver_says_so(cards: Cards) -> None:
    cards.card(IGPU, INTEL, "")
    config, facts = Config.validated({"machines": {"node": {}}}), facts_of(cards.look())
    goal = plan(config, facts).goal.machines[0]
    ready = evaluated(config.machines["node"], goal, facts)[-1]
    assert (ready.reason, "(drivers: none)" in ready.message) == ("NoGPUGranted", True)


def test_a_missing_kfd_is_reported_and_stops_nothing(cards: Cards) -> None:
    """Without it, a GPU still renders and decodes."""
    cards.card(INSTINCT, AMD, "amdgpu", number=0)
    found = conditions(cards.look(), "amd")[ConditionType.DEVICES_PRESENT]
    assert (found.reason, "no usable /dev/kfd" in found.message) == ("Present", True)
    # The driver makes the nodes of eight partitions in each mode, so they are no evidence.
    cards.node("/dev/kfd", 234, 0)
    mode = f"/sys/bus/pci/devices/{INSTINCT}/current_compute_partition"

    def problems() -> tuple[str, ...]:
        return next(each for each in cards.look() if each.vendor == "amd").problems

    cards.file(mode, "CPX\n")
    assert problems() == (), "no partition has nodes, so the attribute, which takes a lock of the driver, is not read"
    cards.virtual_gpu(1)
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
    sources = Sources(cards, "x86_64", cards.pci, cards.drm, lambda root: Absent(""), {}, detached=frozenset({IGPU}))
    vendors = tuple(vendor.observe(sources) for vendor in HOST_VENDORS)
    grant = grants(vendors)["intel"]
    assert (grant.gpus, grant.detached) == ((FLEX,), (IGPU,))
    assert paths(grant) == ["/dev/dri/card1", "/dev/dri/renderD129"]
    assert conditions(vendors, "intel")[ConditionType.DEVICES_PRESENT].reason == "GPUDetached"


def test_a_host_with_intel_alone_becomes_ready(cards: Cards) -> None:
    """The host needs no driver root, no libraries and no other vendor's driver."""
    cards.card(IGPU, INTEL, "i915", number=0)
    config = Config.validated({"machines": {"node": {"require_gpus": True}}})
    facts = facts_of(cards.look())
    goal = plan(config, facts).goal.machines[0]
    running = replace(facts, machines=(replace(facts.machines[0], unit_state="active", live=goal.live),))
    inside = (ConditionType.DEVICES_ALLOWED, *IN_MACHINE)
    fine = tuple(Condition(kind, Status.TRUE, "Fine", "simulated") for kind in inside)
    report = Report(goal.generation, fine)
    found = {each.type: each for each in evaluated(config.machines["node"], goal, running, report)}
    assert found[ConditionType.READY].reason == "AllConditionsTrue"
    assert found[ConditionType.DRIVER_LOADED].message == "kernel driver i915 for 1 GPU"
    assert found[ConditionType.DRIVER_ROOT_STAGED].reason == "NotApplicable"
    assert found[ConditionType.LIBRARIES_PRESENT].reason == "NotApplicable"
    assert plan(config, facts).goal.driver_roots == ()


def test_one_vendors_missing_driver_is_reported_with_anothers_loaded_one(cards: Cards) -> None:
    cards.driver("550.163.01", gpus=1)
    cards.card(IGPU, INTEL, "")
    cards.file("/sys/module/i915/refcnt", "0\n")
    found = reasons(cards.look(), "all")
    assert found[ConditionType.DRIVER_LOADED] == "ModuleNotLoaded"
    assert found[ConditionType.DEVICES_PRESENT] == "GPUWithoutDriver"
