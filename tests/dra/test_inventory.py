"""What may be offered now, by the documents of both halves."""

import time

import pytest

from agent.dra import inventory as module
from agent.dra.inventory import GPU_STATES, Health, Inventory
from agent.model.allocatable import AllocatableDevice
from agent.model.gpu_states import GpuState, GpuStatus
from agent.model.paths import ALLOCATABLE
from agent.system.process import Completed
from agent.vendors.dra_vendor import Attribute, Version
from tests.fakes.dra_machine import GPUS, MEMORY, SMI_LINE, DraMachine, healthy, whole


@pytest.fixture
def inventory(machine: DraMachine) -> Inventory:
    found = Inventory(machine)
    found.allow(["nvidia"])
    return found


def test_without_documents_there_is_nothing(inventory: Inventory) -> None:
    assert inventory.devices() == {}
    assert inventory.problems == ()


def test_documents_are_read_again_when_they_change(machine: DraMachine, inventory: Inventory) -> None:
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
def test_a_document_that_cannot_be_read_changes_nothing(machine: DraMachine, inventory: Inventory, path: str) -> None:
    machine.grant(GPUS[0])
    machine.change(GpuStatus(GPUS[0], "nvidia", GpuState.UNHEALTHY, "Xid48"))
    before = inventory.devices()
    machine.put(path, '{"version": 99}')
    assert inventory.devices() == before
    (problem,) = inventory.problems
    assert path in problem
    assert "version 99 is unknown" in problem
    machine.grant(GPUS[0])
    assert inventory.devices() != before
    assert inventory.problems == ()


@pytest.mark.parametrize("path", [ALLOCATABLE, GPU_STATES])
def test_a_document_that_cannot_be_read_now_is_read_later(
    machine: DraMachine, inventory: Inventory, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without another change, for which the taint of a failed GPU might wait forever."""
    machine.grant(GPUS[0])
    assert inventory.refresh()
    machine.unreadable.add(path)
    machine.states([GpuStatus(GPUS[0], "nvidia", GpuState.UNHEALTHY, "Xid48"), healthy(GPUS[1])])
    machine.allocate(map(whole, GPUS[:2]))
    assert inventory.refresh()
    assert not inventory.refresh(), "each change causes a pass"
    assert caplog.messages == [*inventory.problems] == [f"{path}: cannot be read: Too many open files"]
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


def test_tools_run_once_for_each_change(machine: DraMachine, inventory: Inventory) -> None:
    machine.grant(*GPUS[:2])
    inventory.refresh()
    inventory.read_facts()
    count = len(machine.calls)
    inventory.read_facts()
    machine.change(GpuStatus(GPUS[0], "nvidia", GpuState.UNHEALTHY, "Xid48"))
    inventory.refresh()
    inventory.read_facts()
    machine.grant(GPUS[0])
    inventory.refresh()
    inventory.read_facts()
    assert len(machine.calls) == count > 0
    assert inventory.devices()["gpu-0000-01-00-0"].attributes["uuid"] == "GPU-01"
    machine.grant(*GPUS[:2])
    inventory.refresh()
    inventory.read_facts()
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

    monkeypatch.setattr(machine, "_runner", answer)
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
        inventory.refresh()
        inventory.read_facts()
        assert inventory.devices()["gpu-0000-01-00-0-mig-7-0"].attributes["uuid"] == uuid


def test_a_tool_that_fails_costs_the_attributes_and_is_run_again_later(
    machine: DraMachine, inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(argv: tuple[str, ...], timeout: float) -> None:
        machine.calls.append(argv)
        raise FileNotFoundError(argv[0])

    monkeypatch.setattr(machine, "_runner", missing)
    machine.grant(GPUS[0])
    inventory.refresh()
    for _ in range(3):
        inventory.read_facts()
    assert len(machine.calls) == 1
    assert "uuid" not in inventory.devices()["gpu-0000-01-00-0"].attributes
    assert "nvidia-smi" in inventory.problems[0]
    monkeypatch.setattr(machine, "_runner", machine._run)
    monkeypatch.setattr(module, "RETRY", 0.0)
    time.sleep(0.01)
    inventory.read_facts()
    assert inventory.devices()["gpu-0000-01-00-0"].attributes["driverVersion"] == Version("550.163.1")
    assert inventory.problems == ()


def test_what_a_tool_did_not_say_is_looked_up_later(
    machine: DraMachine, inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY", 0.0)
    machine.states([])
    machine.allocate(map(whole, GPUS[:2]))
    inventory.refresh()
    inventory.read_facts()
    assert GPUS[1] in inventory.problems[0]
    machine.gpus = {each: healthy(each) for each in GPUS[:2]}
    inventory.read_facts()
    assert inventory.problems == ()
    assert inventory.devices()["gpu-0000-02-00-0"].attributes["uuid"] == "GPU-02"
    count = len(machine.calls)
    inventory.read_facts()
    assert len(machine.calls) == count
    machine.gpus.pop(GPUS[0])
    machine.allocate(map(whole, GPUS[:3]))
    inventory.refresh()
    inventory.read_facts()
    assert inventory.devices()["gpu-0000-01-00-0"].attributes["uuid"] == "GPU-01", "what is known stays"


def test_only_what_is_unknown_is_looked_up_again(
    machine: DraMachine, inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead GPU makes each query of all GPUs fail. The other seven must not be queried one by one each minute."""

    def answer(argv: tuple[str, ...], timeout: float) -> Completed:
        if argv[1].startswith("--query") or f"--id={GPUS[0]}" in argv:
            machine.calls.append(argv)
            return Completed(15, b"Unable to determine the device handle for GPU0: GPU is lost.", b"")
        if argv[1].startswith("--id="):
            machine.calls.append(argv)
            return Completed(0, SMI_LINE.format(bus=argv[1][10:12], memory=MEMORY).encode(), b"")
        return machine._run(argv, timeout)

    monkeypatch.setattr(machine, "_runner", answer)
    monkeypatch.setattr(module, "RETRY", 0.0)
    machine.grant(*GPUS)
    inventory.refresh()
    inventory.read_facts()
    first = len(machine.calls)
    inventory.read_facts()
    assert sum(argv[1].startswith("--id=") for argv in machine.calls[:first]) == len(GPUS)
    assert [argv[1] for argv in machine.calls[first:] if argv[1].startswith("--id=")] == [f"--id={GPUS[0]}"]
    assert GPUS[0] in inventory.problems[0]
    monkeypatch.setattr(machine, "_runner", machine._run)
    inventory.read_facts()
    assert inventory.devices()["gpu-0000-01-00-0"].attributes["uuid"] == "GPU-01"
    assert inventory.problems == ()


def test_a_gpu_may_leave_while_another_one_is_looked_up_again(
    machine: DraMachine, inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim reads the documents meanwhile, and the facts of the GPU that left are forgotten."""

    def answer(argv: tuple[str, ...], timeout: float) -> Completed:
        if argv[1].startswith("--query") or f"--id={GPUS[0]}" in argv:
            machine.grant(GPUS[0], *left)
            inventory.devices()
            return Completed(15, b"Unable to determine the device handle for GPU0: GPU is lost.", b"")
        if argv[1] == f"--id={GPUS[1]}":
            return Completed(0, SMI_LINE.format(bus="02", memory=MEMORY).encode(), b"")
        return machine._run(argv, timeout)

    left = [GPUS[1]]
    monkeypatch.setattr(machine, "_runner", answer)
    monkeypatch.setattr(module, "RETRY", 0.0)
    machine.grant(*GPUS[:2])
    inventory.refresh()
    inventory.read_facts()
    left.clear()
    inventory.read_facts()
    assert list(inventory.devices()) == ["gpu-0000-01-00-0"]
    assert GPUS[0] in inventory.problems[0]
    assert GPUS[1] not in inventory.problems[0]


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


def test_a_vendor_that_is_not_known_has_no_facts(machine: DraMachine, inventory: Inventory) -> None:
    machine.allocate([AllocatableDevice(GPUS[0], ("v.com/c=n",))], vendor="other")
    inventory.refresh()
    inventory.read_facts()
    assert inventory.all_devices()["gpu-0000-01-00-0"].vendor == "other"
