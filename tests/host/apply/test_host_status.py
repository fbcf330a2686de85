"""The host half publishes its verdict where it is wanted, and takes it back where it is not."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from agent.host.apply.host_status import FRESH, publish_judgements
from agent.model.conditions import ConditionType, Status, true
from agent.model.host_status import Judgement, parse_judgement
from agent.model.paths import REMOVED, STATE, conditions_file, handoff_file
from agent.model.reasons import Reason
from agent.system.files import remains
from tests.fakes.gpu_host import MACHINE, reconciler, units
from tests.fakes.host import Host

FILE = conditions_file(MACHINE)
READY = true(ConditionType.READY, Reason.ALL_CONDITIONS_TRUE, "well")


def published(host: Host) -> Judgement:
    return parse_judgement(host.read(FILE))


def test_nothing_is_published_by_default(gpu_host: Host) -> None:
    reconciler(gpu_host).reconcile()
    assert not gpu_host.exists(FILE)


def test_each_pass_publishes_its_verdict_beside_the_handoff(gpu_host: Host) -> None:
    outcome = reconciler(gpu_host, node_condition=True).reconcile()
    assert published(gpu_host).ready == outcome.machines[0].conditions[-1]
    assert abs(published(gpu_host).judged - time.time()) < 60
    handoff = gpu_host.read(handoff_file(MACHINE))
    units(gpu_host, "active")
    outcome = reconciler(gpu_host, node_condition=True).reconcile()
    assert published(gpu_host).ready == outcome.machines[0].conditions[-1]
    assert gpu_host.read(handoff_file(MACHINE)) == handoff, "it is no part of the handoff"


def test_it_is_taken_back(gpu_host: Host) -> None:
    reconciler(gpu_host, node_condition=True).reconcile()
    assert gpu_host.exists(FILE)
    reconciler(gpu_host).reconcile()
    assert not gpu_host.exists(FILE)


def test_an_unchanged_verdict_is_dated_anew_by_the_next_timed_pass(gpu_host: Host) -> None:
    """Passes that follow each other do not wake the machine."""
    reconciler(gpu_host).reconcile()
    for now, judged in ((100.0, 100.0), (100.0 + FRESH - 1, 100.0), (100.0 + FRESH, 100.0 + FRESH), (50.0, 50.0)):
        assert publish_judgements(gpu_host, {MACHINE: READY}, now) == ()
        assert published(gpu_host).judged == judged
    changed = true(ConditionType.READY, Reason.ALL_CONDITIONS_TRUE, "well\nindeed")
    publish_judgements(gpu_host, {MACHINE: changed}, 51.0)
    assert (published(gpu_host).judged, published(gpu_host).ready.message) == (51.0, "well indeed")
    publish_judgements(gpu_host, {MACHINE: changed}, 52.0)
    assert published(gpu_host).judged == 51.0
    gpu_host.file(FILE, "damaged")
    publish_judgements(gpu_host, {MACHINE: READY}, 52.0)
    assert published(gpu_host).judged == 52.0


def test_a_link_that_the_machine_put_there_is_replaced_and_not_read(gpu_host: Host) -> None:
    """Root in it can remount its handoff directory writable."""
    reconciler(gpu_host).reconcile()
    elsewhere = "/var/tmp/conditions.json"
    publish_judgements(gpu_host, {MACHINE: READY}, 100.0)
    gpu_host.make_directory("/var/tmp")
    gpu_host.rename(FILE, elsewhere)
    gpu_host.link(FILE, elsewhere)
    publish_judgements(gpu_host, {MACHINE: READY}, 101.0)
    assert gpu_host.read_link(FILE) is None
    assert published(gpu_host).judged == 101.0


@pytest.fixture
def cleared(gpu_host: Host) -> Iterator[None]:
    """For a test that makes what pytest's own removal of old directories cannot remove."""
    yield
    subprocess.run(["rm", "-r", gpu_host.place(STATE)], check=True)


@pytest.mark.usefixtures("cleared")
def test_attack_a_deep_tree_in_the_way_ends_no_pass(gpu_host: Host) -> None:
    """Python's own removal of it raised RecursionError, with which the service ended, at each of its starts."""
    reconciler(gpu_host).reconcile()
    os.mkdir(gpu_host.place(FILE))
    with contextlib.chdir(gpu_host.place(FILE)):
        for _ in range(2000):
            os.mkdir("x")
            os.chdir("x")
    moved = f"{REMOVED}/machines-gpu-node-handoff-conditions.json"
    gpu_host.command("rm", "--recursive", "--force", "--one-file-system", "--", moved)
    for ready in ({}, {MACHINE: READY}):
        assert publish_judgements(gpu_host, ready, 1.0) == ()
    assert gpu_host.is_file(FILE)
    assert gpu_host.is_directory(moved)
    assert reconciler(gpu_host).reconcile().sentences[-1].endswith(moved), "the next pass clears it, bounded in time"


@pytest.mark.parametrize("path", [FILE, remains(FILE)], ids=["file", "remains"])
def test_attack_many_directories_in_the_way_cost_nothing(gpu_host: Host, path: str) -> None:
    """It is moved away, whatever is in it."""
    reconciler(gpu_host).reconcile()
    for number in range(1000):
        os.makedirs(gpu_host.place(f"{path}/{number}"))
    assert publish_judgements(gpu_host, {MACHINE: READY}, 1.0) == ()
    assert published(gpu_host).judged == 1.0
    (moved,) = gpu_host.entries(REMOVED)
    assert len(gpu_host.entries(f"{REMOVED}/{moved}")) == 1000


@pytest.mark.parametrize("path", [handoff_file(MACHINE), remains(handoff_file(MACHINE))], ids=["handoff", "remains"])
def test_attack_a_directory_in_the_handoffs_place_is_moved_away(gpu_host: Host, path: str) -> None:
    reconciler(gpu_host).reconcile()
    gpu_host.remove(handoff_file(MACHINE))
    gpu_host.make_directory(f"{path}/x")
    assert reconciler(gpu_host).reconcile().failures == ()
    assert gpu_host.is_file(handoff_file(MACHINE))


def test_a_stray_file_among_the_machines_directories(gpu_host: Host) -> None:
    reconciler(gpu_host).reconcile()
    gpu_host.file(f"{STATE}/machines/stray", "")
    assert publish_judgements(gpu_host, {}, 1.0) == ()


def test_failure_is_told_and_holds_up_no_other_machine(gpu_host: Host) -> None:
    """Such as a second directory in the way, while the first one is not cleared yet."""
    reconciler(gpu_host).reconcile()
    for failures in ([], [f"cannot update {conditions_file('another')}"]):
        gpu_host.remove(conditions_file("another"))
        gpu_host.make_directory(f"{conditions_file('another')}/in-the-way")
        found = publish_judgements(gpu_host, {"another": READY, MACHINE: READY}, 1.0)
        assert [each.partition(":")[0] for each in found] == failures
        assert published(gpu_host).judged == 1.0


def test_a_machine_without_gpus_gets_no_directory_for_it(host: Host) -> None:
    assert publish_judgements(host, {"gpu-node": READY}, 1.0) == ()
    assert not host.exists(f"{STATE}/machines")


def test_conditions_of_a_machine_that_is_not_asked(gpu_host: Host) -> None:
    """It is not applicable, whatever the machine is."""
    reconciler(gpu_host).reconcile()
    units(gpu_host, "active")
    kind = ConditionType.NODE_CONDITION_SET
    plain = {each.type: each for each in reconciler(gpu_host).reconcile().machines[0].conditions}
    asked = {each.type: each for each in reconciler(gpu_host, node_condition=True).reconcile().machines[0].conditions}
    assert (plain[kind].status, plain[kind].reason) == (Status.TRUE, "NotApplicable")
    assert (asked[kind].status, asked[kind].reason) == (Status.UNKNOWN, "NoReport")
