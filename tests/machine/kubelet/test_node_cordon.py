"""The cordon of the Node while a device plugin offers a fenced GPU, on a simulated machine with an API server."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.machine import node_condition
from agent.machine.kubelet import CHECKPOINT
from agent.machine.node_condition import HOST_STATUS
from agent.machine.node_cordon import TRIES, decide
from agent.machine.notes import Notes
from agent.machine.run import HANDOFF, REPORT
from agent.machine.run import run as run_setup
from agent.model.contract import FencedGpu, render_host_status
from agent.model.handoff import Handoff, Report, render_handoff, render_report
from agent.model.paths import CORDONED_FOR, NODE_CONDITION_MARK, NODE_CORDON_MARK, NODE_FILES, spec_file
from tests.fakes.api_server import NODES, failure
from tests.fakes.kubelet import PLUGIN_SOCKET, UUIDS, Kubelet
from tests.fakes.machine import GPUS
from tests.fakes.mig import MIG_REQUEST, mig_spec
from tests.fakes.mig import UUIDS as PARTS
from tests.fakes.node import KUBECONFIG, KUBELET, NODE, READY, Node, joined_node

FIRST, SECOND = FencedGpu(GPUS[0], "Xid48"), FencedGpu(GPUS[1], "TestFailed")
WORD, OTHER = (f"{each.pci_address}={each.reason}" for each in (FIRST, SECOND))
PATH = f"{NODES}/{NODE}"
CORDONED = f"the node is cordoned, because a device plugin offers {WORD}"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return joined_node(tmp_path / "machine")


@pytest.fixture(autouse=True)
def kubelet(node: Node) -> Iterator[Kubelet]:
    with ExitStack() as stack:
        found = Kubelet(node, stack)
        found.serve()
        run_setup(node)
        yield found


def fence(node: Node, *fenced: FencedGpu, node_condition: bool = False) -> None:
    node.put(HOST_STATUS, render_host_status(READY, time.time(), node_condition=node_condition, fenced=fenced))


def run(node: Node) -> str:
    """Run once, and return what the report says of the cordon."""
    node_condition.run(node)
    return str(Notes(node).load("node-condition")["cordon"])


def state(node: Node) -> tuple[bool, str | None]:
    found = node.api.objects[PATH]
    return found.get("spec", {}).get("unschedulable", False), found["metadata"].get("annotations", {}).get(CORDONED_FOR)


def person(node: Node, *, cordons: bool) -> None:
    """Let somebody run kubectl cordon or uncordon."""
    found = node.api.objects[PATH]
    node.api.put(PATH, {**found, "spec": {"unschedulable": True} if cordons else {}})


def advertise(node: Node, *ids: str) -> None:
    names = {"nvidia.com/gpu": list(ids)}
    node.put(CHECKPOINT, json.dumps({"Data": {"PodDeviceEntries": None, "RegisteredDevices": names}, "Checksum": 1}))


def test_the_node_is_cordoned_by_the_kubelets_identity_until_no_gpu_is_fenced(node: Node) -> None:
    fence(node, FIRST)
    assert run(node) == CORDONED
    assert state(node) == (True, WORD)
    assert node.requests == [("GET", PATH, "Bearer good"), ("PATCH", PATH, "Bearer good")]
    assert run(node) == CORDONED
    assert len(node.patched) == 1, "only what changed is sent"
    fence(node)
    assert run(node) == ""
    assert state(node) == (False, None)
    assert not node.exists(NODE_CORDON_MARK)
    node.api.requests.clear()
    assert run(node) == ""
    assert node.requests == [], "a Node without a fenced GPU costs no request"


def test_it_ends_when_the_host_status_is_gone_even_after_a_reboot_of_the_machine(node: Node) -> None:
    fence(node, FIRST)
    run(node)
    node.drop(HOST_STATUS)
    node.drop("/run/unbounded-agent/state/node-condition.json")
    run(node)
    assert state(node) == (False, None)


def test_the_condition_is_set_only_if_it_is_configured(node: Node) -> None:
    fence(node, FIRST)
    run(node)
    assert [each["type"] for each in node.object["status"]["conditions"]] == ["Ready"]
    fence(node, FIRST, node_condition=True)
    run(node)
    assert node.on_node()["status"] == "True"
    fence(node, FIRST)
    run(node)
    assert [each["type"] for each in node.object["status"]["conditions"]] == ["Ready"]
    assert (state(node), node.exists(NODE_CONDITION_MARK)) == ((True, WORD), False)


def test_a_gpu_that_the_plugin_has_withdrawn_is_fenced_already(node: Node) -> None:
    fence(node, FIRST)
    advertise(node, UUIDS[1])
    assert run(node) == f"the node need not be cordoned: no device plugin offers {WORD}"
    assert state(node) == (False, None)
    advertise(node, *UUIDS)
    run(node)
    assert state(node) == (True, WORD), "a plugin that starts again offers it again"
    advertise(node, UUIDS[1])
    run(node)
    assert state(node) == (False, None)


@pytest.mark.parametrize("offered", ["nvidia0", f"{UUIDS[0]}::3", "GPU-99999999-2222-3333-4444-555555555550"])
def test_an_id_that_may_be_this_gpus_offers_it(node: Node, offered: str) -> None:
    fence(node, FIRST)
    advertise(node, UUIDS[1], offered)
    run(node)
    assert state(node) == (True, WORD)


def test_a_checkpoint_that_cannot_be_read_proves_nothing(node: Node) -> None:
    fence(node, FIRST)
    node.put(CHECKPOINT, "{")
    run(node)
    assert state(node) == (True, WORD)


def test_a_plugin_that_has_just_started_again_may_offer_everything(node: Node, kubelet: Kubelet) -> None:
    fence(node, FIRST)
    advertise(node, UUIDS[1])
    os.utime(node.full_path(CHECKPOINT), ns=(1, 1))
    kubelet.begin_later()
    os.utime(node.full_path(CHECKPOINT), ns=(1, 1))
    run(node)
    assert state(node) == (True, WORD)


def test_a_plugin_that_has_ended_counts_until_the_kubelet_forgets_it(node: Node, kubelet: Kubelet) -> None:
    fence(node, FIRST)
    kubelet.kill(PLUGIN_SOCKET)
    run(node)
    assert state(node) == (True, WORD)
    node.drop(PLUGIN_SOCKET)
    advertise(node)
    run(node)
    assert state(node) == (False, None)


def test_a_part_of_the_gpu_counts_like_the_gpu(node: Node) -> None:
    """A plugin names MIG devices, of which the specification says to which GPU they belong."""
    node.put(HANDOFF, render_handoff(Handoff("kube1", "x86_64", (MIG_REQUEST,))))
    node.put(spec_file("nvidia"), json.dumps(mig_spec()))
    names = tuple(each["name"] for each in mig_spec()["devices"])
    node.put(REPORT, render_report(Report("", (), names)))
    fence(node, SECOND)
    advertise(node, *PARTS)
    assert "need not be cordoned" in run(node)
    fence(node, FIRST)
    advertise(node, PARTS[1])
    assert run(node) == CORDONED


def test_a_machine_without_a_kubelet_or_a_plugin_is_left_alone(node: Node, kubelet: Kubelet) -> None:
    fence(node, FIRST)
    kubelet.kill(PLUGIN_SOCKET)
    node.drop(PLUGIN_SOCKET)
    node.drop(CHECKPOINT)
    assert "no device plugin offers" in run(node)
    node.drop("/proc/40/cmdline")
    node.api.requests.clear()
    assert (run(node), node.requests) == ("", [])
    node.remove_tree("/var/lib/kubelet")
    assert (run(node), node.requests) == ("", [])


# ---- who else cordons and uncordons


def test_a_cordon_of_somebody_else_is_never_lifted(node: Node) -> None:
    person(node, cordons=True)
    fence(node, FIRST)
    assert run(node) == "somebody else has cordoned the node, and has to uncordon it"
    advertise(node, UUIDS[1])
    run(node)
    assert state(node) == (True, None)
    fence(node)
    run(node)
    assert state(node) == (True, None)
    assert len(node.patched) == 1


def test_somebody_who_uncordons_the_node_is_respected_until_the_next_verdict(node: Node, kubelet: Kubelet) -> None:
    fence(node, FIRST)
    run(node)
    person(node, cordons=False)
    for ids in (UUIDS, UUIDS[1:], UUIDS):
        advertise(node, *ids)
        run(node)
        assert state(node) == (False, WORD)
    assert "somebody has uncordoned it although a device plugin offers" in run(node)
    fence(node, FIRST, SECOND)
    run(node)
    assert state(node) == (True, f"{WORD},{OTHER}")
    person(node, cordons=False)
    fence(node, SECOND)
    run(node)
    assert state(node) == (False, OTHER)
    fence(node, FIRST, SECOND)
    run(node)
    assert state(node) == (True, f"{WORD},{OTHER}"), "it had ended, and came again"


def test_a_node_that_somebody_has_uncordoned_loses_the_annotation_with_the_verdict(node: Node) -> None:
    fence(node, FIRST)
    run(node)
    person(node, cordons=False)
    fence(node)
    run(node)
    assert (state(node), node.exists(NODE_CORDON_MARK)) == ((False, None), False)


def test_a_cordon_that_start_has_handed_over_is_the_agents(node: Node) -> None:
    """`start` leaves its own cordon to the GPUs, with an annotation of another form."""
    person(node, cordons=True)
    found = node.api.objects[PATH]
    node.api.put(PATH, {**found, "metadata": {**found["metadata"], "annotations": {CORDONED_FOR: "start"}}})
    fence(node, FIRST)
    run(node)
    assert state(node) == (True, WORD)
    node.drop(HOST_STATUS)
    run(node)
    assert state(node) == (False, None)


def test_a_cordon_that_start_hands_over_just_before_the_gpu_recovers_is_lifted(node: Node) -> None:
    """Until then, it was somebody else's."""
    person(node, cordons=True)
    fence(node, FIRST)
    run(node)
    found = node.api.objects[PATH]
    node.api.put(PATH, {**found, "metadata": {**found["metadata"], "annotations": {CORDONED_FOR: "start"}}})
    node.drop(HOST_STATUS)
    assert run(node) == ""
    assert state(node) == (False, None)
    assert not node.exists(NODE_CORDON_MARK)


def test_the_version_keeps_a_cordon_that_somebody_made_meanwhile(node: Node) -> None:
    """Between the look at the Node and the change of it."""
    fence(node, FIRST)

    def meanwhile(method: str, path: str) -> None:
        node.api.answer = None
        if method == "PATCH":
            person(node, cordons=True)
        else:
            node.api.answer = meanwhile

    node.api.answer = meanwhile
    assert run(node) == "somebody else has cordoned the node, and has to uncordon it"
    assert state(node) == (True, None)


# ---- what may fail


def test_conflicts_are_tried_again_but_not_for_ever(node: Node) -> None:
    fence(node, FIRST)
    node.api.answer = lambda method, _: failure(409, "the object has been modified") if method == "PATCH" else None
    assert "cannot tell the Node which GPUs are fenced, and tries again: PATCH" in run(node)
    assert [method for method, *_ in node.requests] == ["GET", "PATCH"] * TRIES
    node.api.answer = None
    assert run(node) == CORDONED


def test_a_refusal_is_said_and_the_condition_is_set_all_the_same(node: Node) -> None:
    fence(node, FIRST, node_condition=True)
    refused = failure(403, "no")
    node.api.answer = lambda _, path: refused if path == PATH else None
    assert "403 Forbidden: no" in run(node)
    assert node.outcome() == ("True", "Set")


def test_a_kubeconfig_that_cannot_be_used_is_named(node: Node) -> None:
    fence(node, FIRST)
    node.put(KUBECONFIG, "{")
    assert f"tries again: {KUBECONFIG}: not JSON" in run(node)


def test_a_run_that_is_killed_after_the_cordon_leaves_it_to_the_next_one(node: Node) -> None:
    fence(node, FIRST)

    def killed(path: str) -> None:
        if path.endswith("node-condition.json"):
            raise KeyboardInterrupt

    node.before_write = killed
    with pytest.raises(KeyboardInterrupt):
        node_condition.run(node)
    assert state(node) == (True, WORD)
    node.before_write = lambda path: None
    node.drop(HOST_STATUS)
    run(node)
    assert state(node) == (False, None)


@pytest.mark.parametrize("damage", ["{", '{"version": 2, "node_condition": false}'])
def test_without_a_usable_host_status_nothing_changes(node: Node, damage: str) -> None:
    fence(node, FIRST)
    run(node)
    node.put(HOST_STATUS, damage)
    assert run(node) == CORDONED
    assert state(node) == (True, WORD)


def test_a_node_that_is_gone_or_another_ones_is_not_touched(node: Node) -> None:
    fence(node, FIRST)
    run(node)
    node.process(40, *KUBELET, "--hostname-override=other")
    node.drop(HOST_STATUS)
    node.api.requests.clear()
    assert run(node) == "the API server has no node other"
    assert [path for _, path, _ in node.requests] == [f"{NODES}/other"]
    assert (state(node), node.exists(NODE_CORDON_MARK)) == ((True, WORD), False)


def test_the_report_has_what_was_done(node: Node) -> None:
    fence(node, FIRST)
    run(node)
    run_setup(node)
    assert json.loads(node.read(REPORT))["cordon"] == CORDONED
    note = Notes(node).load("node-condition")
    Notes(node).save("node-condition", {**note, "ran_at": -1e9})
    run_setup(node)
    assert json.loads(node.read(REPORT))["cordon"] == ""


@pytest.mark.parametrize(
    ("before", "fenced", "offered", "after"),
    [
        ((False, None), "", "", (False, None)),
        ((False, None), "a", "", (False, None)),
        ((False, None), "a", "a", (True, "a")),
        ((True, None), "a", "a", (True, None)),
        ((True, None), "", "", (True, None)),
        ((True, "a"), "a", "a", (True, "a")),
        ((True, "a"), "ab", "b", (True, "b")),
        ((True, "a"), "a", "", (False, None)),
        ((True, "a"), "", "", (False, None)),
        ((True, ""), "", "", (False, None)),
        ((False, "a"), "a", "a", (False, "a")),
        ((False, "a"), "a", "", (False, "a")),
        ((False, "a"), "ab", "b", (True, "b")),
        ((False, "ab"), "b", "b", (False, "b")),
        ((False, "a"), "", "", (False, None)),
    ],
)
def test_each_state_of_the_node(
    before: tuple[bool, str | None], fenced: str, offered: str, after: tuple[bool, str | None]
) -> None:
    cordoned, annotation = before
    found = decide(cordoned, ",".join(annotation) if annotation is not None else None, [*fenced], [*offered])
    assert found[:2] == (after[0], ",".join(after[1]) if after[1] is not None else None)


@pytest.fixture
def rebuilt(node: Node) -> Node:
    """A machine that boots from a new root, after another one has cordoned its Node."""
    fence(node, FIRST)
    run(node)
    assert state(node) == (True, WORD)
    node.drop(NODE_CORDON_MARK)
    node.remove_tree("/run/unbounded-agent/state")
    node.put(NODE_FILES, "{}")
    return node


def test_a_new_root_ends_the_cordon_of_another_one(rebuilt: Node) -> None:
    fence(rebuilt)
    run_setup(rebuilt)
    assert run(rebuilt) == ""
    assert (state(rebuilt), rebuilt.exists(NODE_CORDON_MARK)) == ((False, None), False)
    run_setup(rebuilt)
    assert not rebuilt.exists(NODE_CORDON_MARK), "it looks once per boot"


def test_a_new_root_waits_for_its_kubelet_to_join_before_it_looks(rebuilt: Node) -> None:
    fence(rebuilt)
    run_setup(rebuilt)
    rebuilt.drop(KUBECONFIG)
    assert run(rebuilt) == ""
    rebuilt.put(KUBECONFIG, rebuilt.api.kubeconfig())
    rebuilt.api.answer = lambda method, path: failure(503, "starting")
    assert run(rebuilt) == ""
    rebuilt.api.answer = None
    run(rebuilt)
    assert state(rebuilt) == (False, None)


def test_a_new_root_keeps_the_cordon_until_its_plugin_runs(rebuilt: Node, kubelet: Kubelet) -> None:
    """Without a plugin, nothing offers the fenced GPU; but it is about to start."""
    rebuilt.drop(PLUGIN_SOCKET)
    rebuilt.drop(CHECKPOINT)
    run_setup(rebuilt)
    assert run(rebuilt) == f"the node stays cordoned for {WORD} until its device plugin runs"
    assert state(rebuilt) == (True, WORD)
    advertise(rebuilt, *UUIDS)
    assert run(rebuilt) == CORDONED
    advertise(rebuilt, UUIDS[1])
    run(rebuilt)
    assert state(rebuilt) == (False, None)


def test_a_new_root_whose_plugin_does_not_offer_the_gpu_needs_no_cordon(rebuilt: Node) -> None:
    """As of a GPU that has left the bus meanwhile: this plugin will never offer it."""
    advertise(rebuilt, UUIDS[1])
    run_setup(rebuilt)
    assert run(rebuilt) == f"the node need not be cordoned: no device plugin offers {WORD}"
    assert state(rebuilt) == (False, None)
