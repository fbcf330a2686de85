"""`gpus reset`: whole passes over a simulated host, whose nvidia-smi is simulated too."""

import io
import re
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.host.detach import Timing, attach
from agent.host.gpu_reset import prepare
from agent.host.state.gpus import GpuNotes, observe_gpus, record_detached, record_fault, record_resetting
from agent.host.state.gpus import Resetting as Progress
from agent.host.state.locks import detach_lock
from agent.model.contract import (
    Effect,
    LeaveAnswer,
    LeaveEnd,
    LeaveRequest,
    LeaveTask,
    parse_gpu_states,
    parse_leave_request,
    render_leave_answer,
)
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import GPU_TEST, GpuFault, Verdict
from agent.model.paths import MACHINED_STATE, gpu_states_file, leave_file, leaving_file
from tests.fakes.clock import Clock
from tests.fakes.command import Capture, command
from tests.fakes.detach_site import HOLDER, Interrupted, Site
from tests.fakes.gpu_host import MACHINE
from tests.fakes.processes import POD_GROUP, process
from tests.fakes.smi import DAEMON, FIRST, IN_USE, LINKED, SECOND, Smi

PRIMARY = "GPU Reset couldn't run because GPU 00000000:02:00.0 is the primary GPU.\n"
UNSTABLE = "1 device did not complete reset successfully, and may be in an unstable state. Please reboot your system.\n"


@pytest.fixture
def site(tmp_path: Path, clock: Clock) -> Site:
    site = Site(tmp_path / "host", clock)
    site.start()
    record_fault(site.host, SECOND, GpuFault("Xid48", "Xid 48: simulated", 1.0, Verdict.NEEDS_RESET, 1.0))
    return site


@pytest.fixture
def smi(site: Site) -> Smi:
    return Smi(site)


def notes(site: Site) -> GpuNotes:
    return observe_gpus(site.host)


def is_as_before(site: Site, smi: Smi, fault: bool = False) -> bool:
    assert any(each.fault or each.taint or each.resetting for each in notes(site).notes.values()) is fault
    assert (site.granted(), site.permitted()) == ((FIRST, SECOND), True)
    return smi.persistent == {FIRST: True, SECOND: True}


def test_it_is_taken_reset_and_given_back(site: Site, smi: Smi, capsys: Capture) -> None:
    """The other GPU, with its machine and its daemon, sees nothing of it. Fabric Manager takes part in resets."""
    process(Path(site.host.root), 901, opened=("/dev/nvidia1",), command=b"nv-fabricmanage")
    during: list[object] = []
    smi.before = lambda call: during.append((site.granted(), site.permitted()))
    assert command(site.agent, f"gpus reset {SECOND}") == 0
    plan, said = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert f"{SECOND} (NVIDIA H100 80GB HBM3) needs a reset: Xid 48: simulated\n" in plan
    assert f"run `nvidia-smi --gpu-reset -i {SECOND}`" in plan
    assert said == f"{SECOND} was reset, works, and was given back to {MACHINE}"
    assert smi.calls == [
        f"-i {SECOND} --query-gpu=persistence_mode --format=csv,noheader",
        f"-i {SECOND} -pm 0",
        f"--gpu-reset -i {SECOND}",
        f"-i {SECOND} --query-gpu=pci.bus_id,name --format=csv,noheader",
        f"-i {SECOND} -pm 1",
    ]
    assert during == [((FIRST,), False)] * 5
    assert is_as_before(site, smi)


def test_a_dry_run_changes_nothing_and_names_the_holders(site: Site, smi: Smi, capsys: Capture) -> None:
    site.hold(group=POD_GROUP, command=b"train")
    assert command(site.agent, f"gpus reset {SECOND} --dry-run --timeout=7") == 0
    shown = capsys.readouterr().out
    assert f"PID {HOLDER} (train), machine {MACHINE}" in shown
    assert "would wait up to 7 s until no process has it open, and take it from gpu-node" in shown
    assert smi.calls == []
    assert is_as_before(site, smi, fault=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "option", "goes_on"), [("y\n", "", True), ("\n", "", False), ("", "--yes", True)])
def test_a_person_is_asked(
    site: Site, smi: Smi, monkeypatch: pytest.MonkeyPatch, answer: str, option: str, goes_on: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    with nullcontext() if goes_on else pytest.raises(AgentError, match="nothing was changed"):
        assert command(site.agent, f"gpus reset {SECOND} {option}") == 0
    assert bool(smi.calls) is goes_on


def test_a_gpu_in_use_is_refused_with_its_holders(site: Site, smi: Smi, capsys: Capture) -> None:
    site.hold(group=POD_GROUP, command=b"nvidia-device-p")
    process(Path(site.host.root), 902, opened=("/dev/nvidia1",), command=b"nv-hostengine")
    assert command(site.agent, f"gpus reset {SECOND}") == 1
    shown = capsys.readouterr().out.partition("nothing was changed")[2]
    assert f"PID {HOLDER} (nvidia-device-p), machine {MACHINE}" in shown
    assert "PID 902 (nv-hostengine): /dev/nvidia1; to release it: `systemctl stop nvidia-dcgm`" in shown
    assert "nvidia-persiste" not in shown, "the command makes it release the GPU"
    assert smi.calls == []
    assert is_as_before(site, smi, fault=True)


def test_it_waits_for_the_holders_up_to_a_limit(site: Site, smi: Smi, capsys: Capture) -> None:
    site.hold()
    assert command(site.agent, f"gpus reset {SECOND} --timeout=5") == 1
    shown = capsys.readouterr().out
    assert "is withheld from new pods, but is still in use after 5 s" in shown
    assert f"`unbounded-agent gpus reset {SECOND}` goes on, `unbounded-agent gpus attach {SECOND}` gives it" in shown
    assert smi.calls == []
    assert attach(SECOND, site.agent).done
    assert is_as_before(site, smi)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (IN_USE, f"{SECOND}: PID {DAEMON} (nvidia-persiste): /dev/nvidia1; to release it: `nvidia-smi -i {SECOND} -pm"),
        (f"{LINKED}0\n", f"linked GPUs are reset together: run `unbounded-agent gpus reset {FIRST} {SECOND}`"),
        (f"{LINKED}GPU 0 (00000000:01:00.0)\n", f"run `unbounded-agent gpus reset {FIRST} {SECOND}`"),
        (f"{LINKED}17\n", "append the following device indexes to the command line and retry. 17"),
        (PRIMARY, "is the primary GPU."),
        (UNSTABLE, "may be in an unstable state. Please reboot your system."),
        ("  GPU 00000000:02:00.0: Not Supported\n", "Not Supported"),
    ],
)
def test_a_refusal_of_the_tool_is_shown(site: Site, smi: Smi, capsys: Capture, printed: str, shown: str) -> None:
    smi.refusal = printed

    def hold_again(call: int) -> None:
        if "--gpu-reset" in smi.calls[-1] and printed == IN_USE:
            (smi.descriptors / "2").symlink_to("/dev/nvidia1")

    smi.after = hold_again
    assert command(site.agent, f"gpus reset {SECOND}") == 1
    said = capsys.readouterr().out
    assert f"{SECOND} could not be reset: {' '.join(printed.split())[:100]}" in said
    assert shown in said
    assert f"`unbounded-agent gpus attach {SECOND}` gives it back" in said
    assert (site.granted(), smi.persistent[SECOND]) == ((FIRST,), False)
    assert notes(site).faults
    smi.refusal = ""
    assert command(site.agent, f"gpus reset {SECOND}") == 0
    assert "a reset was interrupted; this one goes on" in capsys.readouterr().out
    assert is_as_before(site, smi)


@pytest.mark.parametrize(
    ("verdict", "status", "words"), [(Verdict.NEEDS_RESET, 1, "needs a reset: later"), (Verdict.DEGRADED, 0, "works")]
)
def test_what_comes_after_the_reset_counts_in_place_of_what_was_before(
    site: Site, smi: Smi, capsys: Capture, verdict: Verdict, status: int, words: str
) -> None:
    """It hid behind the error that the reset had ended, and a lesser one kept that error alive."""

    def fail(call: int) -> None:
        if smi.calls[-1].endswith("-pm 1"):
            now = time.time() + 1
            record_fault(site.host, SECOND, GpuFault("Xid1", "later", now, verdict, now))

    smi.before = fail
    assert command(site.agent, f"gpus reset {SECOND}") == status
    assert words in capsys.readouterr().out
    (fault,) = notes(site).faults.values()
    assert (fault.reason, fault.verdict) == ("Xid1", verdict)


def test_a_group_is_reset_by_naming_every_member(site: Site, smi: Smi, capsys: Capture) -> None:
    smi.linked, smi.persistent[FIRST] = True, False
    assert command(site.agent, f"gpus reset {SECOND}") == 1
    found = re.search(r"run `unbounded-agent (gpus reset .*)`\n", capsys.readouterr().out)
    assert found
    assert command(site.agent, found[1]) == 0
    assert f"--gpu-reset -i {FIRST},{SECOND}" in smi.calls
    assert site.granted() == (FIRST, SECOND)
    assert not any(each.fault or each.taint or each.resetting for each in notes(site).notes.values())
    assert smi.persistent == {FIRST: False, SECOND: True}, "each as it was before"


@pytest.mark.parametrize(("after", "resume"), [(False, "reset"), (True, "reset"), (True, "attach")])
@pytest.mark.parametrize("killed", range(1, 6))
def test_a_reset_that_is_killed_goes_on_or_is_undone(
    site: Site, smi: Smi, killed: int, after: bool, resume: str
) -> None:
    """Killed before or after each call of nvidia-smi: the tool has worked, or not, and nothing of that is recorded."""

    def kill(call: int) -> None:
        if call == killed:
            raise Interrupted

    setattr(smi, "after" if after else "before", kill)
    with pytest.raises(Interrupted):
        command(site.agent, f"gpus reset {SECOND}")
    assert f"`unbounded-agent gpus reset {SECOND}` goes on" in site.messages[-1]
    site.agent.reconcile()
    assert (site.granted(), site.permitted()) == ((FIRST,), False), "until somebody decides"
    smi.after = smi.before = lambda call: None
    calls = len(smi.calls)
    assert command(site.agent, f"gpus {resume} {SECOND}") == 0
    assert any("--gpu-reset" in call for call in smi.calls[calls:]) is (resume == "reset" and killed < 5)
    assert is_as_before(site, smi)


@pytest.mark.parametrize("step", range(2))
def test_a_reset_that_is_killed_while_it_waits_goes_on(site: Site, smi: Smi, step: int) -> None:
    def kill() -> None:
        raise Interrupted

    site.meanwhile = [*[lambda: None] * step, kill]
    with pytest.raises(Interrupted):
        command(site.agent, f"gpus reset {SECOND} --timeout=60")
    assert command(site.agent, f"gpus reset {SECOND}") == 0
    assert is_as_before(site, smi)


def test_a_gpu_is_not_attached_during_its_reset(site: Site, smi: Smi) -> None:
    """nvidia-smi may be resetting it."""
    assert record_detached(site.host, SECOND, draining=False)
    record_resetting(site.host, SECOND, Progress(restore=True))
    with detach_lock(site.host, SECOND), pytest.raises(AgentError, match=f"of {SECOND} is still running"):
        attach(SECOND, site.agent)
    assert notes(site).detached == {SECOND}


@pytest.mark.parametrize("hangs", ["--gpu-reset", "pci.bus_id,name"])
def test_a_reset_that_hangs_ends_at_its_limit(site: Site, smi: Smi, capsys: Capture, hangs: str) -> None:
    smi.hangs = hangs
    assert command(site.agent, f"gpus reset {SECOND}") == 1
    shown = capsys.readouterr().out
    assert "stopped after its time limit" in shown
    assert "only a reboot of the host helps" in shown
    assert f"{SECOND} stays withheld" in shown
    assert (site.granted(), bool(notes(site).faults)) == ((FIRST,), True)


@pytest.mark.parametrize("hangs", ["persistence_mode", "-pm 0"])
def test_a_gpu_that_does_not_answer_any_more_is_reset_nevertheless(site: Site, smi: Smi, hangs: str) -> None:
    """Its persistence mode is unknown, but nvidia-persistenced runs."""
    smi.hangs = hangs
    site.host.file("/run/nvidia-persistenced/socket")
    smi.persistent[SECOND] = hangs != "-pm 0"
    (smi.descriptors / "2").unlink()
    assert command(site.agent, f"gpus reset {SECOND}") == 0
    assert smi.persistent[SECOND] is (hangs != "-pm 0")


def test_a_gpu_that_does_not_answer_after_its_reset_stays_withheld(site: Site, smi: Smi, capsys: Capture) -> None:
    smi.lost = True
    assert command(site.agent, f"gpus reset {SECOND}") == 1
    assert f"{SECOND} may not work: nvidia-smi -i {SECOND} --query-gpu=pci.bus_id,name" in capsys.readouterr().out
    smi.lost = False
    site.host.remove_file("/dev/nvidia1")
    with pytest.raises(AgentError, match="has no usable device node"):
        command(site.agent, f"gpus reset {SECOND}")
    assert (site.granted(), bool(notes(site).faults)) == ((FIRST,), True)


def test_persistence_mode_that_stays_off_is_told(site: Site, smi: Smi, capsys: Capture) -> None:
    smi.hangs = "-pm 1"
    assert command(site.agent, f"gpus reset {SECOND}") == 1
    shown = capsys.readouterr().out
    assert f"the driver does not keep {SECOND} initialised as before: nvidia-smi" in shown
    assert site.granted() == (FIRST, SECOND)


@pytest.mark.parametrize(
    ("verdict", "refused"), [(each, each in (Verdict.NEEDS_REBOOT, Verdict.BROKEN)) for each in Verdict]
)
def test_a_gpu_that_a_reset_does_not_help_is_refused(site: Site, smi: Smi, verdict: Verdict, refused: bool) -> None:
    record_fault(site.host, FIRST, GpuFault("Xid1", "simulated", 1.0, verdict, time.time()))
    with pytest.raises(AgentError, match="so a reset does not help: simulated") if refused else nullcontext():
        assert command(site.agent, f"gpus reset {FIRST}") == 0
    assert bool(smi.calls) is not refused


@pytest.mark.parametrize(
    ("vendor", "driver", "by_hand"),
    [
        (0x1002, "amdgpu", f"`echo 1 > /sys/bus/pci/devices/{FIRST}/reset`"),
        (0x8086, "xe", f"`echo {FIRST} > /sys/bus/pci/drivers/DRIVER/unbind`, then `echo {FIRST} > "),
    ],
)
def test_other_vendors_gpus_are_reset_by_hand(site: Site, smi: Smi, vendor: int, driver: str, by_hand: str) -> None:
    (first, second) = site.host.pci  # type: ignore[misc]
    site.host.pci = (type(first)(FIRST, vendor, 0x030200, driver), second)
    with pytest.raises(AgentError, match=re.escape(by_hand)):
        command(site.agent, f"gpus reset {FIRST}")
    assert smi.calls == []


def test_what_cannot_be_reset_is_refused(site: Site, smi: Smi) -> None:
    with pytest.raises(ConfigError, match="no GPU has this PCI address"):
        command(site.agent, "gpus reset 0000:ff:00.0")
    with pytest.raises(AgentError, match=r"a device plugin offers its GPUs.*stop the machine first"):
        command(site.agent, f"gpus reset {SECOND} --evict")
    site.host.remove_file("/usr/lib/nvidia/current/nvidia-smi")
    with pytest.raises(AgentError, match="nvidia-smi was not found"):
        command(site.agent, f"gpus reset {SECOND}")
    site.host.rebind(SECOND, "vfio-pci")
    with pytest.raises(AgentError, match="has kernel driver vfio-pci: only nvidia can reset it"):
        command(site.agent, f"gpus reset {SECOND}")
    assert smi.calls == []


def offering(tree: Path, clock: Clock) -> Site:
    """Return a site whose node offers its GPUs itself. A pod has one."""
    site = Site(tree, clock)
    site.configure(allocation="dra")
    site.start()
    site.host.file(f"{MACHINED_STATE}/{MACHINE}")
    return site


def asked(site: Site) -> LeaveRequest:
    """Return what the machine is asked to do. No new pod gets the GPU, and no pod is ended without the machine."""
    assert parse_gpu_states(site.host.read(gpu_states_file(MACHINE)))[SECOND].effect is Effect.NO_SCHEDULE
    return parse_leave_request(site.host.read(leave_file(MACHINE)))


def leaves(site: Site, end: LeaveEnd, message: str = "", waiting: tuple[str, ...] = ()) -> None:
    """Answer as the machine does."""
    answer = LeaveAnswer(asked(site).id, end, 1.0, message, len(waiting), waiting)
    site.host.write(leaving_file(MACHINE), render_leave_answer(answer))


def test_pods_are_evicted_only_on_request(tmp_path: Path, clock: Clock, capsys: Capture) -> None:
    """A node that offers its GPUs itself keeps new pods from the GPU. Then the machine evicts those that have it."""
    site = offering(tmp_path / "host", clock)
    smi, directory = Smi(site), site.hold(group=POD_GROUP)
    timing = Timing(poll=0, answer=20, taint=0, eviction=0)
    assert not prepare([SECOND], site.agent, evict=False, seconds=0, timing=timing).run().done
    assert not site.host.exists(leave_file(MACHINE))
    requests, said = list[LeaveRequest](), list[str]()
    site.agent.progress = said.append

    def end() -> None:
        shutil.rmtree(directory)
        leaves(site, LeaveEnd.DONE)

    site.meanwhile = [lambda: None, lambda: requests.append(asked(site)), end]
    assert command(site.agent, f"gpus reset {SECOND} --evict --timeout=50") == 0
    assert "and evict the pods that have it" in capsys.readouterr().out
    assert [each for each in said if "until no new pod gets" in each] == [f"waiting 5 s until no new pod gets {SECOND}"]
    assert [(each.task, each.gpus, 40 < each.seconds <= 50) for each in requests] == [
        (LeaveTask.EVICT, (SECOND,), True)
    ]
    assert is_as_before(site, smi)


def test_a_budget_that_keeps_a_pod_keeps_the_gpu_from_its_reset(tmp_path: Path, clock: Clock, capsys: Capture) -> None:
    site = offering(tmp_path / "host", clock)
    smi = Smi(site)
    site.hold(group=POD_GROUP)
    budget = ("default/web: The disruption budget web needs 2",)
    site.meanwhile = [lambda: None, lambda: leaves(site, LeaveEnd.FAILED, f"pods are left on {SECOND}", budget)]
    assert command(site.agent, f"gpus reset {SECOND} --evict") == 1
    shown = capsys.readouterr().out
    assert f"{SECOND} was not reset: machine {MACHINE}: machine says: pods are left on {SECOND}: {budget[0]}" in shown
    assert (
        f"`unbounded-agent gpus reset {SECOND} --evict` goes on, `unbounded-agent gpus attach {SECOND}` gives" in shown
    )
    assert smi.calls == []
    assert parse_gpu_states(site.host.read(gpu_states_file(MACHINE)))[SECOND].effect is Effect.NO_SCHEDULE
    assert attach(SECOND, site.agent).done
    assert is_as_before(site, smi)


def test_a_reset_alone_does_not_end_what_a_test_found(site: Site, smi: Smi, capsys: Capture) -> None:
    found = GpuFault("TestFailed", "its test failed", 1.0, Verdict.NEEDS_RESET, 1.0, GPU_TEST)
    assert record_fault(site.host, SECOND, found)
    assert command(site.agent, f"gpus reset {SECOND}") == 1
    shown = capsys.readouterr().out
    assert f"{SECOND} still needs a reset: its test failed" in shown
    assert "was reset, works" not in shown
    assert site.granted() == (FIRST, SECOND)


def test_a_reset_of_all_gpus_ends_an_error_that_concerned_all(site: Site, smi: Smi) -> None:
    switch = "0000:05:00.0"
    site.host.symlink(f"/sys/bus/pci/devices/{switch}", f"../../../devices/pci0000:00/{switch}")
    fault = GpuFault("SXid20034", "simulated", 1.0, Verdict.NEEDS_RESET, 1.0, vendor="nvidia")
    assert record_fault(site.host, switch, fault)
    assert command(site.agent, f"gpus reset {SECOND}") == 1
    assert notes(site).faults
    assert command(site.agent, f"gpus reset {FIRST} {SECOND}") == 0
    assert not notes(site).faults


def test_an_error_that_concerns_all_and_comes_after_the_reset_stays(site: Site, smi: Smi) -> None:
    switch, fault = "0000:05:00.0", GpuFault("SXid20034", "simulated", 1.0, Verdict.NEEDS_RESET, 1.0, vendor="nvidia")
    site.host.symlink(f"/sys/bus/pci/devices/{switch}", f"../../../devices/pci0000:00/{switch}")
    assert record_fault(site.host, switch, fault)

    def fail(call: int) -> None:
        if any(notes(site).resetting[each].done for each in notes(site).resetting):
            now = time.time()
            record_fault(site.host, switch, replace(fault, reason="SXid12028", verdict=Verdict.NEEDS_REBOOT, last=now))

    smi.before = fail
    assert command(site.agent, f"gpus reset {FIRST} {SECOND}") == 1
    assert notes(site).faults[switch].reason == "SXid12028"
