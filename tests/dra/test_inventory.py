"""What may be offered now, by the documents of both halves."""

import re
import time

import pytest

from agent.dra import inventory as module
from agent.dra.inventory import (
    GPU_STATES,
    PCI_BUS_ID,
    PCIE_ROOT,
    Device,
    Health,
    Inventory,
    Taint,
    make_devices,
)
from agent.model.contract import AllocatableDevice, AllocatableVendor, Effect, GpuState, GpuStatus, slice_name
from agent.model.paths import ALLOCATABLE
from agent.system.process import Completed
from agent.vendors.dra_vendor import Attribute, DeviceFacts, Version, semantic_version
from tests.fakes.dra_machine import GPUS, DraMachine, healthy, whole

GPU = "0000:01:00.0"
WHOLE = AllocatableDevice(GPU, ("vendor.com/gpu=GPU-1",))
FIRST, SECOND = (AllocatableDevice(GPU, (f"vendor.com/gpu=MIG-{each}",), (each, 0)) for each in (7, 8))


def offered(state: GpuStatus | None = None, *devices: AllocatableDevice) -> dict[str, Device]:
    vendors = [AllocatableVendor("vendor", devices or (WHOLE,))]
    return make_devices(vendors, {state.pci_address: state} if state else {}, {})


def test_names_come_from_the_slot_and_are_labels() -> None:
    assert [slice_name(each.pci_address, each.partition) for each in (WHOLE, FIRST)] == [
        "gpu-0000-01-00-0",
        "gpu-0000-01-00-0-mig-7-0",
    ]
    longest = AllocatableDevice("ffffffff:ff:1f.7", ("v.com/c=n",), (65535, 65535, 65535, 65535))
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", slice_name(longest.pci_address, longest.partition))


def test_what_is_known_becomes_attributes() -> None:
    state = GpuStatus(GPU, "vendor", GpuState.HEALTHY, kernel_driver="drv", numa_node=0, pcie_root="pci0000:00")
    facts = DeviceFacts(
        {"uuid": "GPU-1", "driverVersion": Version("550.163.1"), "vendor": "false"}, {"memory": 1 << 30}
    )
    name = "gpu-0000-01-00-0"
    known = {"vendor": "vendor", "type": "gpu", PCI_BUS_ID: GPU, PCIE_ROOT: "pci0000:00", "kernelDriver": "drv"}
    attributes = {**facts.attributes, **known, "resource.kubernetes.io/numaNode": 0}
    device = Device(name, "vendor", ("vendor.com/gpu=GPU-1",), GPU, attributes, facts.capacity, (), Health.HEALTHY)
    assert make_devices([AllocatableVendor("vendor", (WHOLE,))], {GPU: state}, {(WHOLE, ""): facts}) == {name: device}


@pytest.mark.parametrize(
    ("shared", "source", "capacity", "expected"),
    [
        (True, WHOLE, {"memory": 1 << 30}, True),
        (False, WHOLE, {"memory": 1 << 30}, False),
        (True, WHOLE, {}, False),
        (True, FIRST, {"memory": 1 << 30}, False),
    ],
)
def test_only_whole_gpus_with_known_memory_are_shared(
    shared: bool, source: AllocatableDevice, capacity: dict[str, int], expected: bool
) -> None:
    """Without a known capacity, there would be no limit to the number of claims."""
    state = GpuStatus(GPU, "vendor", GpuState.HEALTHY, shared=shared)
    facts = DeviceFacts({}, capacity)
    (device,) = make_devices([AllocatableVendor("vendor", (source,))], {GPU: state}, {(source, ""): facts}).values()
    assert device.shared is expected


def test_what_is_unknown_is_left_out_and_the_gpu_is_offered_all_the_same() -> None:
    (device,) = offered().values()
    assert device.attributes == {"vendor": "vendor", "type": "gpu", PCI_BUS_ID: GPU}
    assert (device.taints, device.health) == ((), Health.UNKNOWN)
    (known,) = offered(GpuStatus(GPU, "vendor", GpuState.HEALTHY)).values()
    assert known.attributes == device.attributes


def test_a_gpu_with_partitions_is_offered_only_by_them() -> None:
    found = offered(None, WHOLE, FIRST, SECOND)
    assert list(found) == ["gpu-0000-01-00-0-mig-7-0", "gpu-0000-01-00-0-mig-8-0"]
    attributes = found["gpu-0000-01-00-0-mig-7-0"].attributes
    assert (attributes["type"], attributes["gpuInstance"], attributes["computeInstance"]) == ("partition", 7, 0)


@pytest.mark.parametrize(
    ("state", "effect", "taint", "health"),
    [
        (GpuState.UNHEALTHY, Effect.NO_SCHEDULE, "unhealthy", Health.UNHEALTHY),
        (GpuState.UNHEALTHY, Effect.NONE, "unhealthy", Health.UNHEALTHY),
        (GpuState.LOST, Effect.NO_EXECUTE, "lost", Health.UNHEALTHY),
        (GpuState.DRAINING, Effect.NO_SCHEDULE, "draining", Health.HEALTHY),
    ],
)
def test_what_is_not_healthy_is_tainted(state: GpuState, effect: Effect, taint: str, health: Health) -> None:
    (device,) = offered(GpuStatus(GPU, "vendor", state, "Why", "what it means", effect, 7)).values()
    wanted = Taint(f"gpu.unbounded-agent.io/{taint}", "Why", effect or Effect.NO_SCHEDULE, 7)
    assert (device.taints, device.health, device.health_message) == ((wanted,), health, "what it means")


def test_versions_are_made_comparable() -> None:
    versions = {"550.163.01": "550.163.1", "12.4": "12.4.0", "8": "8.0.0", " v1.2.3 ": "1.2.3"}
    assert {text: semantic_version(text) for text in versions} == {t: Version(v) for t, v in versions.items()}
    assert not any(map(semantic_version, ("", "1.2.3.4", "[N/A]", "1.2-rc1")))


@pytest.fixture
def inventory(machine: DraMachine) -> Inventory:
    found = Inventory(machine)
    found.allow(["nvidia"])
    return found


def look_up(inventory: Inventory) -> None:
    inventory.refresh()
    inventory.read_facts()


def test_documents_are_read_again_when_they_change(machine: DraMachine, inventory: Inventory) -> None:
    assert (inventory.devices(), inventory.problems) == ({}, ())
    machine.grant(*GPUS[:2])
    assert inventory.refresh()
    assert not inventory.refresh()
    assert list(inventory.devices()) == ["gpu-0000-01-00-0", "gpu-0000-02-00-0"]
    machine.grant(GPUS[0])
    assert list(inventory.devices()) == ["gpu-0000-01-00-0"], "also for a claim before the service has looked"
    assert inventory.refresh(), "the slices have to follow"
    machine.change(GpuStatus(GPUS[0], "nvidia", GpuState.UNHEALTHY, "Xid48"))
    assert inventory.devices()["gpu-0000-01-00-0"].health is Health.UNHEALTHY
    machine.remove(ALLOCATABLE)
    assert inventory.devices() == {}


@pytest.mark.parametrize("path", [ALLOCATABLE, GPU_STATES])
@pytest.mark.parametrize("why", ["version 99 is unknown", "cannot be read: Too many open files"])
def test_a_document_that_cannot_be_read_changes_nothing_until_it_can(
    machine: DraMachine, inventory: Inventory, path: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine.grant(GPUS[0])
    assert inventory.refresh()
    before = inventory.devices()
    if "version" in why:
        machine.put(path, '{"version": 99}')
    else:
        machine.unreadable.add(path)
    assert inventory.devices() == before
    assert inventory.refresh()
    assert not inventory.refresh(), "each change causes a pass"
    (problem,) = caplog.messages
    assert (path in problem, why in problem, inventory.problems) == (True, True, (problem,))
    machine.states([GpuStatus(GPUS[0], "nvidia", GpuState.UNHEALTHY, "Xid48"), healthy(GPUS[1])])
    machine.allocate(map(whole, GPUS[:2]))
    if path in machine.unreadable:
        # It is read without another change, for which the taint of a failed GPU might wait forever.
        assert inventory.refresh(), "the other document has changed"
        machine.unreadable.clear()
    assert inventory.refresh()
    assert inventory.problems == ()
    devices = inventory.devices()
    assert list(devices) == ["gpu-0000-01-00-0", "gpu-0000-02-00-0"]
    assert devices["gpu-0000-01-00-0"].health is Health.UNHEALTHY


def test_nothing_is_offered_until_the_node_is_known(machine: DraMachine) -> None:
    machine.grant(GPUS[0])
    inventory = Inventory(machine)
    inventory.refresh()
    assert inventory.devices() == {}
    assert list(inventory.all_devices()) == ["gpu-0000-01-00-0"], "pods may have it already"
    inventory.allow(["amd"])
    assert inventory.devices() == {}
    inventory.allow(["amd", "nvidia"])
    assert list(inventory.devices()) == ["gpu-0000-01-00-0"]
    machine.allocate([AllocatableDevice(GPUS[0], ("v.com/c=n",))], vendor="other")
    look_up(inventory)
    assert inventory.all_devices()["gpu-0000-01-00-0"].vendor == "other", "which has no facts"


def test_tools_run_once_for_each_change(machine: DraMachine, inventory: Inventory) -> None:
    machine.grant(*GPUS[:2])
    look_up(inventory)
    count = len(machine.calls)
    inventory.read_facts()
    machine.change(GpuStatus(GPUS[0], "nvidia", GpuState.UNHEALTHY, "Xid48"))
    look_up(inventory)
    machine.grant(GPUS[0])
    look_up(inventory)
    assert len(machine.calls) == count > 0
    assert inventory.devices()["gpu-0000-01-00-0"].attributes["uuid"] == "GPU-01"
    machine.grant(*GPUS[:2])
    look_up(inventory)
    assert len(machine.calls) > count, "another GPU may be in that slot"


def test_complete_facts_are_looked_up_again_after_an_hour(
    machine: DraMachine, inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ECC was switched on. The first answer had no CUDA version, as those of old drivers."""
    cuda, memory, later, real = "", "24576", 0.0, time.monotonic

    def answer(argv: tuple[str, ...], timeout: float) -> Completed:
        machine.calls.append(argv)
        text = cuda if "--version" in argv else f"00000000:01:00.0, GPU-01, A10, {memory}, 550.163.01, 8.6\n"
        return Completed(0, text.encode(), b"")

    def known() -> tuple[dict[str, int], Attribute | None]:
        inventory.read_facts()
        (device,) = inventory.devices().values()
        return dict(device.capacity), device.attributes.get("cudaDriverVersion")

    machine.program_runner = answer
    monkeypatch.setattr(time, "monotonic", lambda: real() + later)
    machine.grant(GPUS[0])
    inventory.refresh()
    assert known() == ({"memory": 24576 << 20}, None)
    cuda, memory, later = "CUDA Version        : 12.4\n", "23028", module.REFRESH - 60
    assert known() == ({"memory": 24576 << 20}, None)
    later = module.REFRESH
    assert known() == ({"memory": 23028 << 20}, Version("12.4.0"))
    cuda, memory, later = "", "[Unknown Error]", 2 * module.REFRESH
    assert known() == ({"memory": 23028 << 20}, Version("12.4.0")), "a poor answer takes nothing away"
    assert inventory.problems == ()


def test_facts_of_a_partition_are_not_those_of_the_next_one(machine: DraMachine, inventory: Inventory) -> None:
    for uuid in (f"MIG-00000000-0000-4000-8000-00000000000{number}" for number in (1, 2)):
        machine.states([])
        machine.allocate([AllocatableDevice(GPUS[0], (f"nvidia.com/gpu={uuid}",), (7, 0))])
        look_up(inventory)
        assert inventory.devices()["gpu-0000-01-00-0-mig-7-0"].attributes["uuid"] == uuid


def test_a_tool_that_fails_costs_the_attributes_and_is_run_again_later(
    machine: DraMachine, inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(argv: tuple[str, ...], timeout: float) -> Completed:
        machine.calls.append(argv)
        raise FileNotFoundError(argv[0])

    machine.program_runner = missing
    machine.grant(GPUS[0])
    inventory.refresh()
    for _ in range(3):
        inventory.read_facts()
    assert len(machine.calls) == 1
    assert "uuid" not in inventory.devices()["gpu-0000-01-00-0"].attributes
    assert "nvidia-smi" in inventory.problems[0]
    machine.program_runner = machine.answer
    monkeypatch.setattr(module, "RETRY", 0.0)
    time.sleep(0.01)
    inventory.read_facts()
    assert inventory.devices()["gpu-0000-01-00-0"].attributes["driverVersion"] == Version("550.163.1")
    assert inventory.problems == ()


def test_facts_that_are_found_one_after_the_other_are_all_kept(
    machine: DraMachine, inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver answers for another file at each attempt."""
    monkeypatch.setattr(module, "RETRY", 0.0)
    machine.allocate([AllocatableDevice(GPUS[0], ("amd.com/gpu=1",))], vendor="amd")
    inventory.refresh()
    for readable in ("", "product_name", "unique_id"):
        for name in ("product_name", "unique_id"):
            path = f"/sys/bus/pci/devices/{GPUS[0]}/{name}"
            machine.remove(path)
            if name == readable:
                machine.put(path, name)
            else:
                # A link to itself cannot be read, but it exists.
                machine.link(path, name)
        inventory.read_facts()
    found = inventory.all_devices()["gpu-0000-01-00-0"].attributes
    assert (found["productName"], found["uuid"]) == ("product_name", "unique_id")
    assert GPUS[0] in inventory.problems[0]
