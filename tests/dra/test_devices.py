"""What a node offers, made of three documents."""

import re

import pytest

from agent.dra.inventory import PCI_BUS_ID, PCIE_ROOT, Device, Health, Taint, device_name, make_devices
from agent.model.allocatable import AllocatableDevice, AllocatableVendor
from agent.model.gpu_states import Effect, GpuState, GpuStatus
from agent.vendors.dra_vendor import DeviceFacts, Version, semantic_version

GPU = "0000:01:00.0"
WHOLE = AllocatableDevice(GPU, ("vendor.com/gpu=GPU-1",))
FIRST, SECOND = (AllocatableDevice(GPU, (f"vendor.com/gpu=MIG-{each}",), (each, 0)) for each in (7, 8))


def offered(state: GpuStatus | None = None, *devices: AllocatableDevice) -> dict[str, Device]:
    vendors = [AllocatableVendor("vendor", devices or (WHOLE,))]
    return make_devices(vendors, {state.pci_address: state} if state else {}, {})


def test_names_come_from_the_slot_and_are_labels() -> None:
    assert [device_name(each) for each in (WHOLE, FIRST)] == ["gpu-0000-01-00-0", "gpu-0000-01-00-0-mig-7-0"]
    longest = AllocatableDevice("ffffffff:ff:1f.7", ("v.com/c=n",), (65535, 65535, 65535, 65535))
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", device_name(longest))


def test_what_is_known_becomes_attributes() -> None:
    state = GpuStatus(GPU, "vendor", GpuState.HEALTHY, kernel_driver="drv", numa_node=0, pcie_root="pci0000:00")
    facts = DeviceFacts(
        {"uuid": "GPU-1", "driverVersion": Version("550.163.1"), "vendor": "false"}, {"memory": 1 << 30}
    )
    found = make_devices([AllocatableVendor("vendor", (WHOLE,))], {GPU: state}, {WHOLE: facts})
    assert found == {
        "gpu-0000-01-00-0": Device(
            "gpu-0000-01-00-0",
            "vendor",
            ("vendor.com/gpu=GPU-1",),
            GPU,
            {
                "uuid": "GPU-1",
                "driverVersion": Version("550.163.1"),
                "vendor": "vendor",
                "type": "gpu",
                PCI_BUS_ID: GPU,
                PCIE_ROOT: "pci0000:00",
                "kernelDriver": "drv",
                "resource.kubernetes.io/numaNode": 0,
            },
            {"memory": 1 << 30},
            (),
            Health.HEALTHY,
        )
    }


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
    (device,) = make_devices([AllocatableVendor("vendor", (source,))], {GPU: state}, {source: facts}).values()
    assert device.shared is expected


def test_what_is_unknown_is_left_out_and_the_gpu_is_offered_all_the_same() -> None:
    (device,) = offered().values()
    assert device.attributes == {"vendor": "vendor", "type": "gpu", PCI_BUS_ID: GPU}
    assert (device.taints, device.health) == ((), Health.UNKNOWN)
    (device,) = offered(GpuStatus(GPU, "vendor", GpuState.HEALTHY)).values()
    assert set(device.attributes) == {"vendor", "type", PCI_BUS_ID}


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


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("550.163.01", "550.163.1"),
        ("12.4", "12.4.0"),
        ("8", "8.0.0"),
        (" v1.2.3 ", "1.2.3"),
        ("", None),
        ("1.2.3.4", None),
        ("[N/A]", None),
        ("1.2-rc1", None),
    ],
)
def test_versions_are_made_comparable(text: str, version: str | None) -> None:
    found = semantic_version(text)
    assert (found.text if found else None) == version
