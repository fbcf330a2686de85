"""The host half publishes its verdict where it is wanted, and takes it back where it is not."""

import time

from agent.conditions import ConditionType, Status, true
from agent.judgement import Judgement, parse_judgement
from agent.node_condition import FRESH, publish_judgements
from agent.paths import STATE, conditions_file, handoff_file
from tests.gpu_host import MACHINE, reconciler, units
from tests.recorded import Host

FILE = conditions_file(MACHINE)
READY = true(ConditionType.READY, "AllConditionsTrue", "well")


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
    changed = true(ConditionType.READY, "AllConditionsTrue", "well\nindeed")
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


def test_what_is_in_the_way_is_removed(gpu_host: Host) -> None:
    """A directory in the file's place, and a stray file among the machines' directories."""
    reconciler(gpu_host).reconcile()
    gpu_host.make_directory(f"{FILE}/x")
    gpu_host.file(f"{STATE}/machines/stray", "")
    assert publish_judgements(gpu_host, {}, 1.0) == ()
    assert not gpu_host.exists(FILE)


def test_failure_is_told_and_holds_up_no_other_machine(gpu_host: Host) -> None:
    reconciler(gpu_host).reconcile()
    gpu_host.make_directory(f"{conditions_file('another')}/in-the-way")
    gpu_host.make_directory(FILE.rpartition("/")[0])
    failures = publish_judgements(gpu_host, {"another": READY, MACHINE: READY}, 1.0)
    assert [each.partition(":")[0] for each in failures] == [f"cannot update {conditions_file('another')}"]
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
