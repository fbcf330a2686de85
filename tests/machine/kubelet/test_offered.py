"""What pods may be given by claims is published, and GPUsAdvertised says what the cluster has of it."""

import json
import time

import pytest

from agent.machine.kubelet import KUBELET_SOCKET, PLUGINS
from agent.machine.run import run
from agent.model.contract import (
    DRA_STATUS_SILENT_AFTER,
    AllocatableDevice,
    AllocatableVendor,
    DraStatus,
    VendorOffer,
    parse_allocatable,
    render_dra_status,
)
from agent.model.handoff import DRA
from agent.model.paths import ALLOCATABLE, DRA_STATUS
from agent.vendors.drm.machine import AmdMachine
from agent.vendors.nvidia.machine import NvidiaMachine
from tests.fakes.kubelet import UUIDS, Kubelet
from tests.fakes.machine import DEVICES, EMPTY, GPUS, REQUEST, VERSION, Machine, nvidia_ctk, recorded_spec, systemctl
from tests.fakes.mig import MIG_REQUEST, mig_spec
from tests.fakes.mig import UUIDS as MIG_UUIDS

BOTH = tuple(AllocatableDevice(gpu, (f"nvidia.com/gpu={uuid}",)) for gpu, uuid in zip(GPUS, UUIDS, strict=True))
OFFER = VendorOffer("nvidia", GPUS, ("gpu-0000-01-00-0", "gpu-0000-02-00-0"))


@pytest.fixture
def machine(machine: Machine) -> Machine:
    machine.hand(REQUEST, allocation=DRA)
    return machine


@pytest.fixture
def kubelet(kubelet: Kubelet) -> Kubelet:
    kubelet.listen(KUBELET_SOCKET)
    return kubelet


def allocatable(machine: Machine) -> tuple[AllocatableVendor, ...]:
    return parse_allocatable(machine.read(ALLOCATABLE))


def tell(machine: Machine, status: DraStatus) -> None:
    machine.put(DRA_STATUS, render_dra_status(status))


def well() -> DraStatus:
    return DraStatus(time.time(), "kube1", registered=True, offers=(OFFER,))


def test_what_is_published_is_what_the_verified_specification_has(machine: Machine) -> None:
    run(machine)
    assert allocatable(machine) == (AllocatableVendor("nvidia", BOTH, "", VERSION),)
    assert machine.mode(ALLOCATABLE) == 0o600
    # agent.dra waits for changes of the file.
    run(machine)
    before = machine.identity(ALLOCATABLE)
    machine.program("systemctl", systemctl("active", time.monotonic_ns() // 1000))
    run(machine)
    assert machine.identity(ALLOCATABLE) == before
    for damaged in (b"", b"{}", b"\xff" * 100):
        machine.put(ALLOCATABLE, damaged)
        run(machine)
        assert allocatable(machine)[0].devices == BOTH


def test_nothing_is_published_for_a_device_plugin(machine: Machine) -> None:
    run(machine)
    machine.hand(REQUEST)
    run(machine)
    assert not machine.exists(ALLOCATABLE)
    assert machine.conditions()["GPUsAdvertised"] == ("Unknown", "NoKubelet")


def test_a_withdrawn_gpu_is_no_longer_allocatable(machine: Machine) -> None:
    run(machine)
    spec = recorded_spec()
    spec["devices"] = [each for each in spec["devices"] if each["name"] in ("0", UUIDS[0])]
    spec["devices"].append({"name": "all", "containerEdits": spec["devices"][0]["containerEdits"]})
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, spec))
    devices = tuple(each for each in DEVICES if each.pci_address != GPUS[1])
    machine.hand(REQUEST._replace(gpus=GPUS[:1], devices=devices), allocation=DRA)
    run(machine)
    assert allocatable(machine)[0].devices == BOTH[:1]
    machine.hand(EMPTY, allocation=DRA)
    run(machine)
    assert allocatable(machine) == (AllocatableVendor("nvidia"),)
    assert machine.conditions()["GPUsAdvertised"] == ("True", "NotApplicable")


def test_without_a_verified_specification_nothing_is_allocatable(machine: Machine) -> None:
    machine.program("nvidia-ctk", "", status=1, stderr="no NVML")
    run(machine)
    (vendor,) = allocatable(machine)
    assert vendor.devices == ()
    assert "no NVML" in vendor.problem
    assert machine.conditions()["CDISpecCurrent"] == ("False", "GenerationFailed")


def test_a_name_that_another_specification_takes_is_not_allocatable(machine: Machine) -> None:
    """Pods would get what that other specification has."""
    run(machine)
    machine.put("/var/run/cdi/other.json", json.dumps({"kind": "nvidia.com/gpu", "devices": [{"name": UUIDS[1]}]}))
    run(machine)
    assert allocatable(machine)[0].devices == BOTH[:1]


def test_identities_of_allocatable_gpus() -> None:
    names = {each["name"] for each in mig_spec()["devices"]}
    found = NvidiaMachine().allocatable(mig_spec(), MIG_REQUEST, names)
    partitions = {each.partition: each.cdi_names for each in found if each.pci_address == GPUS[0]}
    assert partitions == {
        numbers: (f"nvidia.com/gpu={uuid}",) for numbers, uuid in zip(((1, 0), (5, 0), (5, 1)), MIG_UUIDS, strict=True)
    }
    assert [each.partition for each in found if each.pci_address == GPUS[1]] == [()]
    whole = {"name": UUIDS[0], "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}
    both = {**mig_spec(), "devices": [*mig_spec()["devices"], whole]}
    assert NvidiaMachine().allocatable(both, MIG_REQUEST, {*names, UUIDS[0]}) == found, "never both"
    names = {"0", "0000:83:00.0", "all"}
    spec = {"kind": "amd.com/gpu", "devices": [{"name": name, "containerEdits": {}} for name in sorted(names)]}
    request = EMPTY._replace(vendor="amd", gpus=("0000:83:00.0", "0000:84:00.0"))
    assert AmdMachine().allocatable(spec, request, names) == (
        AllocatableDevice("0000:83:00.0", ("amd.com/gpu=0000:83:00.0",)),
    )


def test_every_gpu_is_offered(kubelet: Kubelet) -> None:
    tell(kubelet.machine, well())
    assert kubelet.condition() == ("True", "Advertised")
    assert kubelet.message() == "the ResourceSlices of node kube1 have 2 devices"
    assert kubelet.machine.report()["advertised_gpus"] == 2
    tell(kubelet.machine, well()._replace(offers=(OFFER._replace(tainted=("gpu-0000-02-00-0",)),)))
    assert kubelet.condition() == ("True", "Advertised")
    assert "1 of them tainted, so new pods do not get them: gpu-0000-02-00-0" in kubelet.message()
    tell(kubelet.machine, well()._replace(message="attributes are missing: no nvidia-smi"))
    assert kubelet.condition() == ("True", "Advertised")
    assert kubelet.message().endswith("2 devices; attributes are missing: no nvidia-smi")


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (None, "DRADriverDown", "nothing since the machine's start; no pod with a GPU can start or end"),
        (b"{", "DRADriverDown", "dra-status.json: not JSON"),
        ({"at": 0.0}, "DRADriverDown", "has reported nothing since 1970-01-01T00:00:00Z"),
        ({"at": time.time() + 86400}, "DRADriverDown", "has reported nothing since"),
        ({"reason": "NoKubeconfig", "message": "no file"}, "NoKubeconfig", "no file"),
        ({"registered": False}, "NotRegistered", "the kubelet has not accepted"),
        ({"registered": False, "message": "other type"}, "NotRegistered", "with a GPU; other type"),
        ({"offers": (OFFER._replace(reason="Refused", message="403"),)}, "Refused", "403"),
        ({"offers": (OFFER._replace(gpus=GPUS[:1]),)}, "GPUsMissing", f"although ready for pods: {GPUS[1]}"),
        ({"offers": (OFFER._replace(gpus=(*GPUS, "0000:09:00.0")),)}, "StaleGPUs", "no longer) granted: 0000:09:00.0"),
    ],
)
def test_what_keeps_gpus_from_pods_is_named(
    kubelet: Kubelet, change: dict[str, object] | bytes | None, reason: str, words: str
) -> None:
    """None stands for a service that has never reported."""
    if isinstance(change, bytes):
        kubelet.machine.put(DRA_STATUS, change)
    elif change is not None:
        tell(kubelet.machine, well()._replace(**change))  # type: ignore[arg-type]
    assert kubelet.condition() == ("False", reason)
    assert words in kubelet.message()


@pytest.mark.parametrize("jump", [-86400.0, 3600.0])
def test_a_clock_that_was_set(kubelet: Kubelet, jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(kubelet.machine, well())
    assert kubelet.condition() == ("True", "Advertised")
    wall, since_boot = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    assert kubelet.condition() == ("True", "Advertised")
    tell(kubelet.machine, well())
    assert kubelet.condition() == ("True", "Advertised")
    monkeypatch.setattr(time, "monotonic", lambda: since_boot() + DRA_STATUS_SILENT_AFTER + 1)
    assert kubelet.condition() == ("False", "DRADriverDown")


def test_the_service_is_not_blamed_for_a_missing_kubelet_or_specification(machine: Machine, kubelet: Kubelet) -> None:
    machine.program("nvidia-ctk", "", status=1)
    tell(machine, well()._replace(offers=()))
    assert kubelet.condition() == ("Unknown", "NotPublished")
    kubelet.kill(KUBELET_SOCKET)
    assert kubelet.condition() == ("Unknown", "KubeletDown")
    machine.remove_tree(PLUGINS)
    assert kubelet.condition() == ("Unknown", "NoKubelet")
