"""CDI specifications with MIG devices: verified, freed from incomplete devices, and published.

The real nvidia-ctk 1.19.1 wrote the recorded specification for two simulated GPUs, the first with three MIG devices,
from a driver root with REQUEST's files; its nodes were all 1:3.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent.machine.cdi import UNPARTITIONED_FOR
from agent.machine.kubelet import KUBELET_SOCKET
from agent.machine.notes import Notes
from agent.machine.run import run
from agent.model.device import DeviceNumber
from agent.system.process import Completed
from agent.vendors.machine_vendor import Verdict
from agent.vendors.nvidia.verify import verify, without_incomplete
from tests.fakes.kubelet import PLUGIN_SOCKET, Kubelet
from tests.fakes.machine import GPUS, REQUEST, ROOT, Machine, gpu_machine, nvidia_ctk, smi_rows
from tests.fakes.mig import CAPS, DEVICES, MIG_REQUEST, UUIDS, Spec, live_mode, mig_spec

PATH = "/etc/cdi/nvidia.yaml"
ALL_NAMES = ("0:0", "0:1", "0:2", "1", "GPU-51000000-0000-4000-8000-000000000200", *UUIDS, "all")


LIVE = {each.path: DeviceNumber(1, 3, live_mode(each.path)) for each in DEVICES}
PRESENT = {f"{ROOT}/{file.target}" for file in REQUEST.files}


def without(*minors: int) -> Any:  # noqa: ANN401
    gone = {f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in minors}
    return MIG_REQUEST._replace(devices=tuple(each for each in DEVICES if each.path not in gone))


def check(spec: object) -> Verdict:
    return verify(spec, MIG_REQUEST, LIVE, PRESENT)


def edits(spec: Spec, name: str) -> Spec:
    found: Spec = next(each["containerEdits"] for each in spec["devices"] if each["name"] == name)
    return found


def drop_node(spec: Spec, minor: int, *names: str) -> None:
    for name in names:
        nodes = edits(spec, name)["deviceNodes"]
        edits(spec, name)["deviceNodes"] = [each for each in nodes if not each["path"].endswith(f"cap{minor}")]


def node(path: str | int) -> Spec:
    path = path if isinstance(path, str) else f"/dev/nvidia-caps/nvidia-cap{path}"
    return {"path": path, "major": 1, "minor": 3}


def add_node(spec: Spec, name: str, path: str | int) -> None:
    edits(spec, name)["deviceNodes"].append(node(path))


def change_node(spec: Spec, name: str, old: int, new: int) -> None:
    drop_node(spec, old, name)
    add_node(spec, name, new)


def drop_devices(spec: Spec, *names: str) -> None:
    spec["devices"] = [each for each in spec["devices"] if each["name"] not in names]


def test_the_recorded_spec_is_good_for_its_instances() -> None:
    """There is no whole-GPU entry for the GPU in MIG mode, which is served nevertheless."""
    verdict = check(mig_spec())
    assert (verdict.problems, verdict.missing, verdict.devices) == ((), frozenset(), ALL_NAMES)
    assert not [path for path in verdict.not_in_spec if "nvidia-cap" in path]
    # The destroyed instance's capabilities are no longer granted.
    problems = "; ".join(verify(mig_spec(), without(12, 13), LIVE, PRESENT).problems)
    assert "device 0:0: device node '/dev/nvidia-caps/nvidia-cap12' is not granted to this machine" in problems
    spec, _ = without_incomplete(mig_spec(), without(50))
    verdict = check(spec)
    assert (verdict.problems, verdict.missing_gpus) == ((), ())
    assert verdict.missing_partitions == {f"gi5/ci1 of {GPUS[0]}": GPUS[0]}


MUTATIONS: dict[str, tuple[Callable[[Spec], object], str]] = {
    "capability of another instance": (
        lambda s: add_node(s, "0:0", 49),
        "device 0:0 needs the capabilities of one GPU instance and one compute instance",
    ),
    "another instance's compute instance": (lambda s: change_node(s, "0:0", 13, 49), "but has gi1, gi5/ci0"),
    "no compute instance": (lambda s: drop_node(s, 13, "0:0", UUIDS[0]), "but has gi1"),
    "no GPU instance": (lambda s: drop_node(s, 12, "0:0", UUIDS[0]), "but has gi1/ci0"),
    "two compute instances": (lambda s: change_node(s, "0:1", 48, 50), "but has gi5/ci0, gi5/ci1"),
    "another GPU's node": (lambda s: add_node(s, "0:0", "/dev/nvidia1"), "device 0:0 has 2 GPU nodes"),
    "whole GPU with a capability": (
        lambda s: add_node(s, "1", 12),
        "device 1 is a whole GPU, but has the MIG capability gi1",
    ),
    "capability of another GPU": (
        lambda s: add_node(s, "1", 12),
        f"device 1 has /dev/nvidia-caps/nvidia-cap12, which belongs to GPU {GPUS[0]}",
    ),
    "capability for everybody": (
        lambda s: s["containerEdits"]["deviceNodes"].append(node(12)),
        "every container would get the capability node /dev/nvidia-caps/nvidia-cap12",
    ),
    "ungranted capability": (lambda s: add_node(s, "0:0", 21), "is not granted"),
    "one name missing": (lambda s: drop_devices(s, "0:1"), "differ"),
    "not in all": (lambda s: drop_node(s, 50, "all"), "differ"),
    "more in all": (lambda s: drop_devices(s, "0:2", UUIDS[2]), "differ"),
    "MIG name without MIG device": (lambda s: edits(s, "1") and s["devices"][3].update(name="1:0"), "but has none"),
    "foreign name": (lambda s: s["devices"][0].update(name="mig0:0"), "neither an index nor a UUID"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_refused(name: str) -> None:
    mutate, said = MUTATIONS[name]
    spec = mig_spec()
    mutate(spec)
    assert said in "; ".join(check(spec).problems)


@pytest.mark.parametrize(
    ("gone", "left_out"),
    [((13,), {"0:0", UUIDS[0]}), ((12, 13), {"0:0", UUIDS[0]}), ((48,), {"0:1", "0:2", *UUIDS[1:]})],
)
def test_an_incomplete_mig_device_is_left_out(gone: tuple[int, ...], left_out: set[str]) -> None:
    request = without(*gone)
    spec, names = without_incomplete(mig_spec(), request)
    assert set(names) == left_out
    kept = {each["name"]: each["containerEdits"] for each in spec["devices"]}
    assert kept.keys() == set(ALL_NAMES) - left_out
    assert all(kept[name] == edits(mig_spec(), name) for name in kept if name != "all")
    verdict = verify(spec, request, LIVE, PRESENT)
    assert (verdict.problems, verdict.missing_gpus) == ((), ())


def test_a_device_with_too_few_nodes_is_left_out() -> None:
    """nvidia-ctk warns of a node that it does not find, and continues. No recording has this, so the test makes it."""
    spec = mig_spec()
    drop_node(spec, 50, "0:2", UUIDS[2], "all")
    kept, names = without_incomplete(spec, MIG_REQUEST)
    assert names == ("0:2", UUIDS[2])
    verdict = check(kept)
    assert (verdict.problems, verdict.missing_partitions) == ((), {f"gi5/ci1 of {GPUS[0]}": GPUS[0]})


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with two GPUs, the first in MIG mode with three devices, before its first run."""
    machine = gpu_machine(tmp_path / "machine")
    for device in DEVICES:
        machine.node(device.path, 1, 3)
        machine.nodes[device.path] = LIVE[device.path]
    machine.hand(MIG_REQUEST)
    write(machine, mig_spec())
    return machine


def write(machine: Machine, spec: Spec) -> None:
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, spec))


def published(machine: Machine) -> set[str]:
    return {each["name"] for each in json.loads(machine.read(PATH))["devices"]}


def test_an_incomplete_mig_device_is_left_out_until_it_is_complete(machine: Machine) -> None:
    machine.hand(without(13))
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    assert f"not complete yet are left out: 0:0, {UUIDS[0]}" in machine.message("CDISpecCurrent")
    assert published(machine) == {*ALL_NAMES, "none"} - {"0:0", UUIDS[0]}
    machine.hand(MIG_REQUEST)
    run(machine)
    assert published(machine) == {*ALL_NAMES, "none"}


def test_an_instance_that_the_generator_does_not_list(machine: Machine) -> None:
    spec, _ = without_incomplete(mig_spec(), without(13))
    write(machine, spec)
    assert machine.verdict("CDISpecCurrent") == ("False", "PartitionMissing")
    assert f"gi1/ci0 of {GPUS[0]}" in machine.message("CDISpecCurrent")
    (condition,) = (each for each in machine.report()["conditions"] if each["type"] == "CDISpecCurrent")
    assert condition["gpus"] == [GPUS[0]], "the other GPU is whole"
    assert published(machine) == {*ALL_NAMES, "none"} - {"0:0", UUIDS[0]}
    write(machine, mig_spec())
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    assert published(machine) == {*ALL_NAMES, "none"}


def undivide(machine: Machine) -> Spec:
    """Take the instances from the GPU in MIG mode, and return the specification without them."""
    spec, _ = without_incomplete(mig_spec(), without(*CAPS))
    machine.hand(without(*CAPS))
    write(machine, spec)
    return spec


def with_whole_gpu(spec: Spec) -> Spec:
    """Return the specification with a device for the first GPU, made from the second one's."""
    (second,) = (each for each in spec["devices"] if each["name"] == "1")
    text = json.dumps(second)
    for old, new in (("nvidia1", "nvidia0"), ("card1", "card0"), ("renderD129", "renderD128"), GPUS[::-1]):
        text = text.replace(old, new)
    first = json.loads(text)["containerEdits"]
    (every,) = (each["containerEdits"] for each in spec["devices"] if each["name"] == "all")
    every = {**every, "deviceNodes": [*every["deviceNodes"], *first["deviceNodes"]]}
    others = [each for each in spec["devices"] if each["name"] != "all"]
    names = {"0": first, "GPU-51000000-0000-4000-8000-000000000100": first, "all": every}
    return {**spec, "devices": [*others, *({"name": name, "containerEdits": each} for name, each in names.items())]}


def test_a_gpu_in_mig_mode_without_instances_is_not_a_fault(machine: Machine) -> None:
    run(machine)
    spec = undivide(machine)
    machine.program("nvidia-smi", smi_rows(Enabled=GPUS[:1], Disabled=GPUS[1:]))
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    assert f"no pod can use GPU {GPUS[0]}: MIG mode is on" in machine.message("CDISpecCurrent")
    assert published(machine) == {"1", "GPU-51000000-0000-4000-8000-000000000200", "all", "none"}
    message, calls = machine.message("CDISpecCurrent"), len(machine.calls)
    run(machine)
    assert not [call for call in machine.calls[calls:] if "nvidia-" in call[0]], "nothing has changed"
    assert machine.message("CDISpecCurrent") == message
    notes = Notes(machine)
    noted = notes.load("spec-nvidia")
    notes.save("spec-nvidia", {**noted, "until": noted["until"] - UNPARTITIONED_FOR})
    write(machine, with_whole_gpu(spec))
    run(machine)
    assert "0" in published(machine), "MIG mode was switched off, which changes nothing else"


@pytest.mark.parametrize("answer", [smi_rows(Disabled=GPUS[:1]), "", "No devices were found\n"])
def test_a_gpu_that_is_missing_without_mig_mode_is_a_fault(machine: Machine, answer: str) -> None:
    undivide(machine)
    machine.program("nvidia-smi", answer)
    assert machine.verdict("CDISpecCurrent") == ("False", "GPUMissing")


def test_only_gpus_in_mig_mode_without_instances(machine: Machine) -> None:
    """nvidia-ctk then fails, because the device `all` is empty, with an error that does not name the cause."""
    machine.hand(without(*CAPS))
    failed = Completed(1, b"", b'invalid CDI Spec: failed add device "all": invalid device, empty device edits')
    machine.program("nvidia-ctk", lambda argv: failed if "generate" in argv else nvidia_ctk(machine, argv, mig_spec()))
    machine.program("nvidia-smi", smi_rows(Enabled=GPUS))
    assert machine.verdict("CDISpecCurrent") == ("False", "GenerationFailed")
    assert "MIG mode is on and there is no complete instance" in machine.message("CDISpecCurrent")


def test_mig_devices_are_compared_with_what_is_advertised(machine: Machine) -> None:
    """NVIDIA's plugin advertises them by UUID: under their profiles (MIG_STRATEGY=mixed), or not (none)."""
    gpu = "GPU-51000000-0000-4000-8000-000000000200"
    with ExitStack() as stack:
        run(machine)
        kubelet = Kubelet(machine, stack)
        kubelet.listen(KUBELET_SOCKET)
        kubelet.listen(PLUGIN_SOCKET)
        profiles = ("mig-1g.10gb", "mig-1c.3g.40gb", "mig-2c.3g.40gb")
        kubelet.advertise(gpu=[gpu], **{name: [uuid] for name, uuid in zip(profiles, UUIDS, strict=True)})
        assert kubelet.condition() == ("True", "Advertised")
        kubelet.advertise(gpu=[gpu])
        assert kubelet.condition() == ("False", "GPUsMissing")
        assert all(uuid in kubelet.message() for uuid in UUIDS)
