"""Pods with an old driver root or old device numbers, found in containerd's bundles on a simulated machine.

The bundles' specifications are cut down from one that containerd 1.7 wrote.
"""

import pytest

from agent.machine.cdi import BUNDLES, STATE, outdated_pods, outdated_remark
from agent.machine.containerd_tables import MAIN
from agent.machine.notes import Context
from agent.machine.run import run
from agent.model.conditions import ConditionType, Reason, false, true
from agent.model.handoff import with_remark
from agent.model.text import MESSAGE_LIMIT
from tests.fakes.containerd_files import MAIN_2
from tests.fakes.machine import EMPTY, REQUEST, Machine
from tests.fakes.pod_bundles import UVM, bundle, specification


def test_pods_of_another_root_or_other_numbers_are_named(machine: Machine) -> None:
    run(machine)
    bundle(machine, "a", specification("work/old-root"))
    bundle(machine, "b", specification("work/old-root"))
    bundle(machine, "c", specification("work/both", uvm=243))
    bundle(machine, "d", specification("kube-system/new", root="/run/host-nvidia/1"))
    bundle(machine, "e", {"annotations": {}, "mounts": [], "linux": {}})
    machine.programs.pop("nvidia-ctk")
    handoff = machine.hand(REQUEST._replace(driver_root="/run/host-nvidia/1", driver_version="580.95.05"))
    assert outdated_pods(Context.of(machine, handoff)) == {
        "work/old-root": {"driver root 0 with driver 550.163.01"},
        "work/both": {"driver root 0 with driver 550.163.01", f"{UVM.path} as 243:0"},
    }


def test_containerd_may_have_its_state_elsewhere(machine: Machine) -> None:
    machine.put(MAIN, f'state = "/srv/state"\n{MAIN_2}')
    bundle(machine, "a", specification("work/cuda", uvm=243), "/srv/state")
    run(machine)
    assert "work/cuda" in machine.message("CDISpecCurrent")


@pytest.mark.parametrize("place", ["all is well; ignore this", "7\u3164", "\u0667", "7" * 300, "", "x7"])
def test_attack_the_text_of_a_host_path_is_not_repeated(machine: Machine, place: str) -> None:
    """Any pod may name a path there that does not exist, and the kubelet makes it. A pod's name is quoted."""
    run(machine)
    before = machine.message("CDISpecCurrent")
    bundle(machine, "a", specification("work/pod", root=f"/run/host-nvidia/{place}"))
    run(machine)
    assert machine.message("CDISpecCurrent") == before
    bundle(machine, "b", specification("work/x), all is well (", root="/run/host-nvidia/7"))
    run(machine)
    assert "'work/x), all is well (' (driver root 7)" in machine.message("CDISpecCurrent")


def test_the_condition_keeps_its_status(machine: Machine) -> None:
    """Each specification is read once. Neither pods with the current driver are named, nor any without GPUs."""
    bundle(machine, "a", specification("work/cuda", uvm=243))
    bundle(machine, "b", specification("work/current"))
    for _ in range(2):
        assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
        assert machine.message("CDISpecCurrent").endswith(
            "; PodsOutdated (recreate them: they keep what they were made with): work/cuda (/dev/nvidia-uvm as 243:0)"
        )
        bundle(machine, "a", b"not read again")
    machine.hand(EMPTY)
    run(machine)
    assert "PodsOutdated" not in machine.message("CDISpecCurrent")
    machine.hand(REQUEST)
    run(machine)
    machine.drop(f"{STATE}/{BUNDLES}/a/config.json")
    (machine.tree / f"{STATE}/{BUNDLES}/a".lstrip("/")).rmdir()
    run(machine)
    assert "PodsOutdated" not in machine.message("CDISpecCurrent")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"[" * 100_000, b'{"mounts": 1}', b'{"linux": {"devices": [{"path": "/dev/x"}]}}']
)
def test_a_bundle_that_cannot_be_read_hides_no_other(machine: Machine, content: bytes) -> None:
    """A container is just being made: the next run reads its bundle again."""
    bundle(machine, "0", content)
    bundle(machine, "a", specification("work/cuda", uvm=243))
    run(machine)
    assert "work/cuda" in machine.message("CDISpecCurrent")
    bundle(machine, "0", specification("work/late", uvm=243))
    run(machine)
    assert "work/late" in machine.message("CDISpecCurrent")


def test_many_pods_are_counted(machine: Machine) -> None:
    for index in range(30):
        bundle(machine, f"{index}", specification(f"work/cuda-{index:02}", root="/run/host-nvidia/7"))
    run(machine)
    message = machine.message("CDISpecCurrent")
    assert "work/cuda-09 (driver root 7) and 20 more" in message
    assert "work/cuda-10" not in message


def test_long_messages_and_remarks_are_shortened(machine: Machine) -> None:
    """When all nodes have new numbers, the refusal of the new specification names each of them."""
    bundle(machine, "a", specification("work/cuda", uvm=243))
    handoff = machine.hand(REQUEST)
    long = false(
        ConditionType.CDI_SPEC_CURRENT, Reason.SPEC_REFUSED, "refused: " + "a node is not in this machine; " * 200
    )
    (named,) = with_remark((long,), long.type, outdated_remark(Context.of(machine, handoff)))
    assert len(named.message) == MESSAGE_LIMIT
    assert named.message.startswith("refused: ")
    assert named.message.endswith("work/cuda (/dev/nvidia-uvm as 243:0)")
    said = true(ConditionType.DEVICES_PRESENT, Reason.PRESENT, "m" * MESSAGE_LIMIT)
    (remarked,) = with_remark((said,), ConditionType.DEVICES_PRESENT, "; " + "r" * 3 * MESSAGE_LIMIT)
    assert len(remarked.message) == MESSAGE_LIMIT
    assert remarked.message.startswith("m" * (MESSAGE_LIMIT // 2) + "; r")
    assert remarked.message.endswith("r…")
