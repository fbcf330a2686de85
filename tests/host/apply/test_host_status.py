"""The host half publishes a machine's host status if configured, and otherwise removes it."""

import contextlib
import os
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping

import pytest

from agent.host.apply.steps import FRESH, publish_host_status
from agent.model.conditions import Condition, ConditionType, Reason, true
from agent.model.contract import HostStatus, parse_host_status, render_host_status
from agent.model.paths import REMOVED, STATE, conditions_file, handoff_file
from agent.system.copy import DOOR
from agent.system.files import temporary_path
from tests.fakes.gpu_host import MACHINE, reconciler, units
from tests.fakes.host import Host

FILE = conditions_file(MACHINE)
READY = true(ConditionType.READY, Reason.ALL_CONDITIONS_TRUE, "well")


def publish(host: Host, ready: Mapping[str, Condition], with_state: Collection[str], now: float) -> tuple[str, ...]:
    documents = {name: render_host_status(each, now) for name, each in ready.items()}
    return publish_host_status(host, documents, with_state)


def published(host: Host) -> HostStatus:
    return parse_host_status(host.read(FILE))


def test_each_pass_publishes_the_host_status_next_to_the_handoff_if_it_is_configured(gpu_host: Host) -> None:
    outcome = reconciler(gpu_host, node_condition=True).reconcile()
    assert published(gpu_host).ready == outcome.machines[0].conditions[-1]
    assert abs(published(gpu_host).evaluated - time.time()) < 60
    handoff = gpu_host.read(handoff_file(MACHINE))
    units(gpu_host, "active")
    outcome = reconciler(gpu_host, node_condition=True).reconcile()
    assert published(gpu_host).ready == outcome.machines[0].conditions[-1]
    assert gpu_host.read(handoff_file(MACHINE)) == handoff, "it is no part of the handoff"
    reconciler(gpu_host).reconcile()
    assert not gpu_host.exists(FILE)


def test_the_host_status_has_what_came_of_tests_if_gpus_must_pass_them(gpu_host: Host) -> None:
    assert published_others(gpu_host) == []
    assert published_others(gpu_host, test_gpus=True) == [("GPUsTested", "Unknown", "NotTested")]
    assert published_others(gpu_host, test_gpus=True, gpus="count=1") == [("GPUsTested", "Unknown", "NotTested")]


def published_others(host: Host, **settings: object) -> list[tuple[str, str, str]]:
    reconciler(host, node_condition=True, **settings).reconcile()
    return [each[:3] for each in published(host).others]


def test_the_next_timed_pass_renews_the_date_of_an_unchanged_status(gpu_host: Host) -> None:
    """A pass soon after another must not wake the machine."""
    reconciler(gpu_host).reconcile()
    for now, evaluated in ((100.0, 100.0), (100.0 + FRESH - 1, 100.0), (100.0 + FRESH, 100.0 + FRESH), (50.0, 50.0)):
        assert publish(gpu_host, {MACHINE: READY}, (MACHINE,), now) == ()
        assert published(gpu_host).evaluated == evaluated
    changed = true(ConditionType.READY, Reason.ALL_CONDITIONS_TRUE, "well\nindeed")
    publish(gpu_host, {MACHINE: changed}, (MACHINE,), 51.0)
    assert (published(gpu_host).evaluated, published(gpu_host).ready.message) == (51.0, "well indeed")
    publish(gpu_host, {MACHINE: changed}, (MACHINE,), 52.0)
    assert published(gpu_host).evaluated == 51.0
    gpu_host.file(FILE, "damaged")
    publish(gpu_host, {MACHINE: READY}, (MACHINE,), 52.0)
    assert published(gpu_host).evaluated == 52.0


def test_a_link_that_the_machine_put_there_is_replaced_and_not_read(gpu_host: Host) -> None:
    """Root in the machine can remount its handoff directory writable."""
    reconciler(gpu_host).reconcile()
    elsewhere = "/var/tmp/conditions.json"
    publish(gpu_host, {MACHINE: READY}, (MACHINE,), 100.0)
    gpu_host.make_directory("/var/tmp")
    gpu_host.rename(FILE, elsewhere)
    gpu_host.link(FILE, elsewhere)
    publish(gpu_host, {MACHINE: READY}, (MACHINE,), 101.0)
    assert gpu_host.read_link(FILE) is None
    assert published(gpu_host).evaluated == 101.0


@pytest.fixture
def cleared(gpu_host: Host) -> Iterator[None]:
    """Remove afterwards what pytest's own removal of old directories cannot remove."""
    yield
    subprocess.run(["rm", "-r", gpu_host.full_path(STATE)], check=True)


@pytest.mark.usefixtures("cleared")
def test_attack_a_deep_tree_in_the_way_ends_no_pass(gpu_host: Host) -> None:
    """Python's own removal raised RecursionError, which ended the service at each start."""
    reconciler(gpu_host).reconcile()
    os.mkdir(gpu_host.full_path(FILE))
    with contextlib.chdir(gpu_host.full_path(FILE)):
        for _ in range(1100):
            os.mkdir("x")
            os.chdir("x")
    moved = f"{REMOVED}/machines-gpu-node-handoff-conditions.json"
    gpu_host.command(*DOOR, moved)
    for ready in ({}, {MACHINE: READY}):
        assert publish(gpu_host, ready, (MACHINE,), 1.0) == ()
    assert gpu_host.is_file(FILE)
    assert gpu_host.is_directory(moved)
    assert reconciler(gpu_host).reconcile().sentences[-1].endswith(moved), "the next pass clears it, bounded in time"


@pytest.mark.parametrize("path", [FILE, temporary_path(FILE)], ids=["file", "temporary file"])
def test_attack_many_directories_in_the_way_cost_nothing(gpu_host: Host, path: str) -> None:
    """The directory is moved away, whatever is in it."""
    reconciler(gpu_host).reconcile()
    for number in range(1000):
        os.makedirs(gpu_host.full_path(f"{path}/{number}"))
    assert publish(gpu_host, {MACHINE: READY}, (MACHINE,), 1.0) == ()
    assert published(gpu_host).evaluated == 1.0
    (moved,) = gpu_host.entries(REMOVED)
    assert len(gpu_host.entries(f"{REMOVED}/{moved}")) == 1000


def test_a_failure_is_reported_and_holds_up_no_other_machine(gpu_host: Host) -> None:
    """For example, a second directory is in the way while the first one is not removed yet."""
    reconciler(gpu_host).reconcile()
    gpu_host.file(f"{STATE}/machines/stray", "")
    assert publish(gpu_host, {}, ("stray", MACHINE), 1.0) == ()
    assert publish(gpu_host, {"without-gpus": READY}, (MACHINE,), 1.0) == ()
    assert not gpu_host.exists(f"{STATE}/machines/without-gpus")
    for failures in ([], [f"cannot update {conditions_file('another')}"]):
        gpu_host.remove(conditions_file("another"))
        gpu_host.make_directory(f"{conditions_file('another')}/in-the-way")
        found = publish(gpu_host, {"another": READY, MACHINE: READY}, (MACHINE,), 1.0)
        assert [each.partition(":")[0] for each in found] == failures
        assert published(gpu_host).evaluated == 1.0
