"""What the host tells a machine's offer of GPUs: fatal errors, detachments, losses, recovery."""

import errno
import os
import threading
from pathlib import Path

import pytest

from agent.host.apply.steps import publish_documents
from agent.host.detach import attach
from agent.host.state.gpus import (
    forget_detached,
    forget_fault,
    observe_gpus,
    record_detached,
    record_fault,
    record_lost,
    record_tainted,
)
from agent.host.state.locks import locked
from agent.model.conditions import ConditionType
from agent.model.contract import Effect, GpuState, GpuStatus, parse_gpu_states
from agent.model.errors import AgentError
from agent.model.facts import GpuFault, Unseen, Verdict
from agent.model.paths import GPUS, GPUS_LOCK, gpu_states_file, handoff_file
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
FILE = gpu_states_file(MACHINE)
XID48 = GpuFault("Xid48", "Xid 48: a double-bit ECC error", 1000.5, Verdict.NEEDS_RESET, 1000.5)


def bind(host: Host, address: str) -> None:
    """Let the kernel bind the GPU's driver again: sysfs makes a new link."""
    link = Path(host.root, f"sys/devices/pci0000:00/{address}/driver")
    if link.is_symlink():
        link.rename(link.with_name(f"before-{link.lstat().st_ino}"))
    host.symlink(f"/sys/devices/pci0000:00/{address}/driver", "../../../bus/pci/drivers/nvidia")


@pytest.fixture
def host(gpu_host: Host) -> Host:
    for address, node in ((FIRST, "1\n"), (SECOND, "-1\n")):
        gpu_host.file(f"/sys/devices/pci0000:00/{address}/numa_node", node)
        gpu_host.symlink(f"/sys/bus/pci/devices/{address}", f"../../../devices/pci0000:00/{address}")
        bind(gpu_host, address)
    return gpu_host


def states(host: Host) -> dict[str, GpuStatus]:
    reconciler(host, allocation="dra").reconcile()
    return parse_gpu_states(host.read(FILE))


def test_healthy_gpus_have_their_place_in_the_host_until_they_are_lost(host: Host) -> None:
    second = GpuStatus(SECOND, "nvidia", GpuState.HEALTHY, kernel_driver="nvidia", pcie_root="pci0000:00")
    first = second._replace(pci_address=FIRST, numa_node=1)
    assert states(host) == {FIRST: first, SECOND: second}
    host.unplug(SECOND)
    lost = states(host)[SECOND]
    assert (lost.state, lost.reason, lost.effect) == (GpuState.LOST, "GPULost", Effect.NO_SCHEDULE)
    assert "without `unbounded-agent gpus detach`" in lost.message
    host.gpu(SECOND, 1)
    assert states(host)[SECOND].state is GpuState.HEALTHY


def test_a_change_of_state_is_no_new_generation_and_no_change_is_no_write(host: Host) -> None:
    """Only machines that offer their GPUs get the document."""
    reconciler(host).reconcile()
    assert not host.exists(FILE)
    states(host)
    handoff, before = host.identity(handoff_file(MACHINE)), host.identity(FILE)
    states(host)
    assert host.identity(FILE) == before
    assert record_fault(host, FIRST, XID48)
    states(host)
    assert host.identity(FILE) != before
    reconciler(host, allocation="dra", share_gpus=True).reconcile()
    assert {each.shared for each in parse_gpu_states(host.read(FILE)).values()} == {True}
    assert host.identity(handoff_file(MACHINE)) == handoff
    reconciler(host).reconcile()
    assert not host.exists(FILE)


def test_a_fatal_error_lasts_until_the_driver_is_bound_again_or_somebody_attaches_the_gpu(host: Host) -> None:
    assert record_fault(host, FIRST, XID48)
    assert not record_fault(host, FIRST, XID48), "its repetitions change nothing"
    found = states(host)
    assert (found[FIRST].state, found[FIRST].reason, found[FIRST].since) == (GpuState.UNHEALTHY, "Xid48", 1000)
    assert found[FIRST].effect is Effect.NO_SCHEDULE
    assert found[FIRST].message.startswith("Xid 48: a double-bit ECC error; after a reset that neither")
    assert found[FIRST].message.endswith(f"`unbounded-agent gpus attach {FIRST}`")
    assert found[SECOND].state is GpuState.HEALTHY
    bind(host, FIRST)
    assert states(host)[FIRST].state is GpuState.HEALTHY
    assert record_fault(host, FIRST, XID48)
    agent = reconciler(host, allocation="dra")
    ending = attach(FIRST, agent)
    assert ending.done
    assert ending.sentences == (f"{FIRST} counts as healthy again: its last fatal error is forgotten",)
    assert parse_gpu_states(host.read(FILE))[FIRST].state is GpuState.HEALTHY
    assert attach(FIRST, agent).sentences == (f"{FIRST} is not detached: nothing to do",)


def test_only_the_pass_that_finds_a_driver_bound_again_waits_for_the_record(host: Host) -> None:
    """Each later pass did so too, for as long as the GPU was there."""
    assert record_fault(host, FIRST, XID48)
    bind(host, FIRST)
    states(host)
    with locked(host, GPUS_LOCK, 0.0, "simulated"):
        assert reconciler(host, allocation="dra").reconcile().failures == ()


def test_nobody_is_said_to_have_detached_a_gpu_that_is_being_reset(host: Host) -> None:
    assert record_tainted(host, FIRST, evict=False, reset=True)
    assert states(host)[FIRST].message == "it is being reset"
    assert record_detached(host, FIRST, draining=False)
    (machine,) = reconciler(host).reconcile().machines
    assert f"detached or being reset: {FIRST}" in machine.condition(ConditionType.DEVICES_PRESENT).message


def test_a_record_of_errors_that_cannot_be_read_is_not_an_empty_one(host: Host) -> None:
    """Otherwise, pods would get the failed GPU, and the next error would replace the record."""
    record_fault(host, FIRST, XID48)
    record_lost(host, FIRST, "gone")
    before = states(host)
    host.failing[GPUS] = OSError(errno.EMFILE, os.strerror(errno.EMFILE), GPUS)
    with pytest.raises(AgentError, match=f"{GPUS}: Too many open files"):
        states(host)
    assert parse_gpu_states(host.read(FILE)) == before

    def record_more() -> None:
        record_fault(host, SECOND, XID48)
        record_lost(host, SECOND, "gone")

    with pytest.raises(AgentError):
        record_more()
    del host.failing[GPUS]
    assert states(host)[FIRST] == before[FIRST]


def test_an_error_at_the_moment_of_an_attachment_is_kept(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service records it, and `gpus attach` forgets another one, each with the whole record."""
    record_fault(host, FIRST, XID48)
    service = threading.Thread(target=record_fault, args=(host, SECOND, XID48))
    rename = os.rename

    def rename_later(*paths: str) -> None:
        if threading.current_thread() is not service:
            service.start()
            service.join(0.2)
        rename(*paths)

    monkeypatch.setattr(os, "rename", rename_later)
    assert forget_fault(host, FIRST)
    service.join()
    assert observe_gpus(host).faults == {SECOND: XID48}


@pytest.mark.parametrize(("evict", "effect"), [(False, Effect.NO_SCHEDULE), (True, Effect.NO_EXECUTE)])
def test_a_gpu_that_is_being_detached_is_still_granted_at_first(host: Host, evict: bool, effect: Effect) -> None:
    before = states(host)
    handoff = host.read(handoff_file(MACHINE))
    assert record_tainted(host, FIRST, evict=evict)
    tainted = states(host)[FIRST]
    assert (tainted.state, tainted.reason, tainted.effect) == (GpuState.DRAINING, "Detaching", effect)
    assert tainted.since > 1_700_000_000
    assert host.read(handoff_file(MACHINE)) == handoff
    for draining in (True, False):
        record_detached(host, FIRST, draining=draining)
        assert states(host)[FIRST] == tainted, "the taint stays when the GPU is withdrawn"
        assert host.read(handoff_file(MACHINE)) != handoff
    forget_detached(host, FIRST)
    assert states(host) == before


def test_a_failed_gpu_that_is_detached_stays_unhealthy(host: Host) -> None:
    record_fault(host, FIRST, XID48)
    record_tainted(host, FIRST, evict=True)
    found = states(host)[FIRST]
    assert (found.state, found.reason, found.effect) == (GpuState.UNHEALTHY, "Xid48", Effect.NO_EXECUTE)


def test_a_machine_that_cannot_be_planned_keeps_its_document(host: Host) -> None:
    states(host)
    before = host.read(FILE)
    host.pci = Unseen("simulated")
    host.failing["/proc/driver/nvidia/gpus"] = OSError(errno.EIO, "Input/output error")
    agent = reconciler(host, allocation="dra")
    assert MACHINE in agent.preview()[1].held
    agent.reconcile()
    assert host.read(FILE) == before
    assert publish_documents(host, gpu_states_file, {}, (MACHINE,), unchanged={MACHINE}) == ()
    assert host.read(FILE) == before
    assert publish_documents(host, gpu_states_file, {}, (MACHINE,), unchanged=()) == ()
    assert not host.exists(FILE)
