"""MIG instances and IMEX channels on the host: which nodes are granted, and how incomplete instances are reported."""

import pytest

from agent.config.settings import Config
from agent.host.plan.goal import select
from agent.model.device import DeviceKind
from agent.model.facts import VendorFacts
from agent.model.goal import DriverRoots, Grant, Share
from agent.vendors.nvidia.conditions import nvidia_conditions
from agent.vendors.nvidia.host import grant_nvidia, observe_nvidia
from tests.fakes.host import INFORMATION, Host
from tests.fakes.user_space import sources

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
GI, CI = "gpu0/mig/gi1/access", "gpu0/mig/gi1/ci0/access"


def observe(host: Host) -> VendorFacts:
    return observe_nvidia(sources(host))


def granted(facts: VendorFacts, **settings: object) -> Grant:
    machine = Config.validated({"machines": {"gpu-node": settings}}).machines["gpu-node"]
    return grant_nvidia(facts, machine, DriverRoots(()), select((facts,), machine.gpus, Share()).gpus)


def capabilities(grant: Grant) -> dict[str, str]:
    return {node.capability: node.pci_address for node in grant.nodes if node.kind is DeviceKind.CAPABILITY}


def devices_present(facts: VendorFacts, **settings: object) -> tuple[str, str]:
    found = nvidia_conditions(facts, granted(facts, **settings))[1]
    return f"{found.status}", found.message


@pytest.fixture
def mig(host: Host) -> Host:
    host.driver("550.163.01", gpus=2)
    host.node("/dev/nvidiactl", 195, 255)
    host.capability(GI, 12)
    host.capability(CI, 13)
    return host


def test_a_mig_device_comes_with_its_gpu_and_no_other(mig: Host) -> None:
    assert capabilities(granted(observe(mig))) == {GI: FIRST, CI: FIRST}
    assert capabilities(granted(observe(mig), gpus=[SECOND])) == {}
    assert observe(mig).incomplete == ()
    mig.capability("gpu7/mig/gi1/access", 957)
    mig.capability("gpu7/mig/gi1/ci0/access", 958)
    assert capabilities(granted(observe(mig))) == {GI: FIRST, CI: FIRST}
    mig.capability("gpu1/mig/gi2/access", 156)
    assert "gi2" not in devices_present(observe(mig), gpus=[FIRST])[1]


def test_instances_of_a_gpu_under_another_minor_belong_to_that_gpu(mig: Host) -> None:
    """The minors are swapped: `gpu0` is now the other GPU, which another machine may have."""
    for minor, address in ((1, FIRST), (0, SECOND)):
        text = INFORMATION.format(minor=minor, address=address)
        mig.file(f"/proc/driver/nvidia/gpus/{address}/information", text)
    assert capabilities(granted(observe(mig), gpus=[FIRST])) == {}
    assert capabilities(granted(observe(mig), gpus=[SECOND])) == {GI: SECOND, CI: SECOND}


@pytest.mark.parametrize("step", ["no compute instance", "no node of it", "no node of its GPU instance", "no node"])
def test_an_incomplete_instance_is_named_and_holds_up_nothing(mig: Host, step: str) -> None:
    """NVML makes an instance step by step; another, complete instance of the same GPU stays in use."""
    mig.capability("gpu0/mig/gi2/access", 21)
    if step == "no compute instance":
        expected = f"MIG instance gi2 of {FIRST} has no compute instance yet"
    else:
        mig.capability("gpu0/mig/gi2/ci0/access", 22)
        expected = f"MIG instance gi2/ci0 of {FIRST} is missing /dev/nvidia-caps/nvidia-cap"
    dropped = {"no node of it": (22,), "no node of its GPU instance": (21,), "no node": (21, 22)}.get(step, ())
    for minor in dropped:
        mig.remove_file(f"/dev/nvidia-caps/nvidia-cap{minor}")
    facts = observe(mig)
    assert capabilities(granted(facts)) == {GI: FIRST, CI: FIRST}
    assert [each.pci_address for each in facts.incomplete] == [FIRST]
    status, message = devices_present(facts)
    assert status == "True"
    assert expected in message
    assert ("nvidia-modprobe -f" in message) == (step != "no compute instance")


def test_a_destroyed_compute_instance_takes_its_gpu_instance_along(mig: Host) -> None:
    """The entry in procfs disappears. Both nodes stay in /dev, but they must not be granted."""
    mig.remove_file(f"/proc/driver/nvidia/capabilities/{CI}")
    assert capabilities(granted(observe(mig))) == {}


def test_a_node_with_another_number_counts_as_missing(mig: Host) -> None:
    mig.node("/dev/nvidia-caps/nvidia-cap13", 508, 14, 0o444)
    facts = observe(mig)
    assert capabilities(granted(facts)) == {}
    why = "is 508:14, but the driver uses 508:13; remove the node and create it again"
    assert f"/dev/nvidia-caps/nvidia-cap13: {why}" in facts.problems
    assert "is missing /dev/nvidia-caps/nvidia-cap13" in facts.incomplete[0].why
