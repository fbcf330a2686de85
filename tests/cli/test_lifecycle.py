"""`start`, `stop`, `restart`: pods are moved away first where a kubeconfig allows it, and may return. And `apply`."""

import errno
import io
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.allocation import UNSCHEDULABLE
from agent.host.apply.steps import apply
from agent.host.gpu_recovery import UNIT
from agent.host.provision.apply import performers
from agent.host.provision.plan import RemoveRoot
from agent.host.reconcile import Reconciler
from agent.host.state.gpus import record_fault, record_test
from agent.host.state.locks import machine_locks, pass_lock
from agent.model.contract import LeaveEnd
from agent.model.errors import AgentError, CommandError, ConfigError
from agent.model.facts import GpuFault, Verdict
from agent.model.paths import (
    CORDONED_FOR,
    MACHINED_STATE,
    PCI_DEVICES,
    cordoned_file,
    drained_file,
    joined_file,
    leave_file,
    machine_root,
    machine_unit,
    nspawn_file,
    report_directory,
)
from tests.fakes.clock import Clock
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, UNITS, reconciler, set_up, units, without_gpus
from tests.fakes.host import Host
from tests.fakes.node_host import NODE, NodeHost, answers, node_host, node_reconciler

ADMIN = "/root/.kube/config"
KUBECTL = ("kubectl", f"--kubeconfig={ADMIN}")
QUERY = (*KUBECTL, *UNSCHEDULABLE, NODE)
CORDON, UNCORDON = (*KUBECTL, "cordon", NODE), (*KUBECTL, "uncordon", NODE)
DRAIN = (*KUBECTL, "drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
STOP, START = ("systemctl", "stop", UNITS[0]), ("systemctl", "start", "--no-block", UNITS[0])


@pytest.fixture
def host(tmp_path: Path, clock: Clock) -> NodeHost:
    host = node_host(tmp_path / "host")
    assert command(node_reconciler(host), "up", network=host.network, ask=host.ask) == 0
    for argv in (QUERY, CORDON, UNCORDON, DRAIN):
        host.command(*argv)
    host.runner.calls.clear()
    clock.slept.clear()
    return host


@pytest.fixture
def gpu_host(tmp_path: Path) -> Host:
    """Another host, whose machine `up` did not make."""
    return set_up(Host(tmp_path / "host"))


@pytest.fixture
def agent(host: NodeHost) -> Reconciler:
    return node_reconciler(host)


def kubectl(host: NodeHost) -> list[tuple[str, ...]]:
    return [argv for argv in host.runner.calls if argv[0] == "kubectl" or argv == STOP]


def test_pods_are_moved_before_the_machine_stops_and_may_return(host: NodeHost, agent: Reconciler) -> None:
    assert command(agent, f"stop {MACHINE} --kubeconfig={ADMIN}") == 0
    assert kubectl(host) == [QUERY, CORDON, DRAIN, STOP]
    assert command(agent, f"start {MACHINE} --kubeconfig={ADMIN}") == 0
    assert kubectl(host)[-1] == UNCORDON
    assert not host.exists(cordoned_file(MACHINE))


@pytest.mark.parametrize("end", ["passed", "failed", ""])
def test_a_node_is_uncordoned_only_after_its_gpus_have_passed_their_test(
    host: NodeHost, clock: Clock, capsys: Capture, end: str
) -> None:
    """The service may not run: the command begins the test. Without an end, the command gives up."""
    agent = node_reconciler(host)
    machine = replace(agent.config.machines[MACHINE], test_gpus=True)
    agent.config = replace(agent.config, machines={MACHINE: machine})
    host.bus.unit(UNIT, "inactive")
    for number in (1, 2):
        address = f"0000:0{number}:00.0"
        host.symlink(f"/sys/bus/pci/devices/{address}", f"../../../devices/pci0000:00/{address}")
        host.symlink(f"/sys/devices/pci0000:00/{address}/driver", "../../../bus/pci/drivers/nvidia")
    assert command(agent, f"stop {MACHINE} --kubeconfig={ADMIN}") == 0

    def answer() -> None:
        if host.is_running():
            host.answer()
        if host.bus.started and end:
            assert UNCORDON not in kubectl(host)
            for address in ("0000:01:00.0", "0000:02:00.0"):
                record_test(host, address, end, ("TestFailed",) if end == "passed" else (), MACHINE, "550.163.01")
            host.bus.started.clear()

    clock.meanwhile, clock.least = answer, 60.0
    assert command(agent, f"start {MACHINE} --kubeconfig={ADMIN}") == (0 if end == "passed" else 1)
    assert (UNCORDON in kubectl(host)) is (end == "passed")
    assert host.exists(cordoned_file(MACHINE)) is (end != "passed")
    if end != "passed":
        assert "has a GPU that has not passed its test (GPUsTested)" in capsys.readouterr().err
    if not end:
        assert host.bus.started == [UNIT]
        assert 1200 <= clock.passed <= 1500


def test_a_node_that_somebody_cordoned_stays_cordoned(host: NodeHost, agent: Reconciler) -> None:
    host.command(*QUERY, stdout="true")
    assert command(agent, f"restart {MACHINE} --kubeconfig={ADMIN}") == 0
    assert kubectl(host) == [QUERY, DRAIN, STOP]


TAKE, HAND = (
    (*KUBECTL, "annotate", "node", NODE, f"{CORDONED_FOR}-"),
    (*(*KUBECTL, "annotate", "--overwrite", "node", NODE, f"{CORDONED_FOR}=start"),),
)


def test_a_node_that_is_cordoned_for_a_gpu_stays_cordoned_during_a_drain(host: NodeHost, agent: Reconciler) -> None:
    """Its machine would uncordon it if the GPU recovered meanwhile, and pods would come back."""
    host.command(*QUERY, stdout="true0000:01:00.0=Xid48")
    host.command(*TAKE)
    assert command(agent, f"stop {MACHINE} --kubeconfig={ADMIN}") == 0
    assert kubectl(host) == [QUERY, CORDON, TAKE, DRAIN, STOP]
    assert host.exists(cordoned_file(MACHINE))


def test_a_start_leaves_the_cordon_to_a_machine_with_a_fenced_gpu(
    host: NodeHost, agent: Reconciler, capsys: Capture
) -> None:
    """A new pod would get the GPU before the machine has cordoned the node again."""
    assert command(agent, f"stop {MACHINE} --kubeconfig={ADMIN}") == 0
    gpu = next(gpu.pci_address for vendor in agent.preview()[0].vendors for gpu in vendor.gpus)
    host.symlink(f"{PCI_DEVICES}/{gpu}", f"../../../devices/pci0000:00/{gpu}")
    host.symlink(f"/sys/devices/pci0000:00/{gpu}/driver", "../../../bus/pci/drivers/nvidia")
    assert record_fault(host, gpu, GpuFault("Xid48", "simulated", 1e9, Verdict.NEEDS_RESET, 1e9))
    host.command(*HAND, stderr="connection refused", status=1)
    assert command(agent, f"start {MACHINE} --kubeconfig={ADMIN}") == 1
    assert host.exists(cordoned_file(MACHINE))
    host.command(*HAND)
    assert command(agent, f"start {MACHINE} --kubeconfig={ADMIN}") == 1
    assert kubectl(host)[-1] == HAND
    assert UNCORDON not in host.runner.calls
    assert f"node {NODE} stays cordoned by its machine until {gpu} is healthy" in capsys.readouterr().err
    assert not host.exists(cordoned_file(MACHINE))
    settings = replace(agent.config.machines[MACHINE], cordon_node=False)
    agent.config = replace(agent.config, machines={MACHINE: settings})
    host.command(*QUERY)
    assert command(agent, f"restart {MACHINE} --kubeconfig={ADMIN}") == 0
    assert kubectl(host)[-1] == UNCORDON


@pytest.mark.parametrize("lost", [False, True])
def test_a_node_that_kubectl_could_not_cordon(host: NodeHost, agent: Reconciler, lost: bool) -> None:
    """The next `start` said that the agent had cordoned it, or uncordoned it after somebody else had. `lost` is whether
    only the answer got lost."""
    host.command(*CORDON, stderr="Error from server (Forbidden)", status=1)
    host.tools.before = lambda argv: host.command(*QUERY, stdout="true") if lost and argv == CORDON else None
    with pytest.raises(CommandError, match="Forbidden"):
        command(agent, f"stop {MACHINE} --kubeconfig={ADMIN}")
    assert kubectl(host) == [QUERY, CORDON, QUERY]
    assert host.exists(cordoned_file(MACHINE)) is lost


def asked(host: NodeHost) -> list[str]:
    """Return what the machine was asked for, and when it was stopped and started."""
    wanted = (*(("drain",), ("uncordon",)), STOP, START)
    return [argv[min(1, len(argv) - 1)] for argv in host.runner.calls if argv in wanted]


def test_without_a_kubeconfig_the_machine_drains_its_node(host: NodeHost, agent: Reconciler, clock: Clock) -> None:
    clock.meanwhile = answers(host)
    assert command(agent, f"stop {MACHINE}") == 0
    assert asked(host) == ["drain", "stop"]
    assert host.exists(drained_file(MACHINE))
    assert command(agent, f"start {MACHINE}") == 0
    assert asked(host) == ["drain", "stop", "start", "uncordon"]
    assert not host.exists(drained_file(MACHINE))
    assert not host.exists(leave_file(MACHINE))
    assert command(agent, f"restart {MACHINE}") == 0
    assert asked(host)[4:] == ["drain", "stop", "start", "uncordon"]
    assert command(agent, f"restart {MACHINE} --no-drain") == 0
    assert asked(host)[8:] == ["stop", "start"]


def test_a_machine_that_cannot_move_its_pods_runs_on(host: NodeHost, agent: Reconciler, clock: Clock) -> None:
    waits = ("default/web: The disruption budget web needs 2 healthy pods",)
    clock.meanwhile = answers(host, LeaveEnd.FAILED, message="pods are left on node node-1", pods=1, waiting=waits)
    with pytest.raises(AgentError, match=r"machine says: pods are left .* The disruption budget web needs") as error:
        command(agent, f"stop {MACHINE}")
    assert STOP not in host.runner.calls
    assert f"undo it: `unbounded-agent start {MACHINE}`" in error.value.hint
    clock.meanwhile = answers(host)
    assert command(agent, f"start {MACHINE}") == 0
    assert asked(host)[-1] == "uncordon"


def test_a_node_that_its_machine_cannot_uncordon_is_named(
    host: NodeHost, agent: Reconciler, clock: Clock, capsys: Capture
) -> None:
    clock.meanwhile = answers(host)
    command(agent, f"stop {MACHINE}")
    host.bus.unit(UNITS[0], "inactive", "masked")
    assert command(agent, f"start {MACHINE}") == 1
    assert "stays cordoned, because the machine is not ready" in capsys.readouterr().err
    host.bus.unit(UNITS[0], "inactive")
    clock.meanwhile = answers(host, LeaveEnd.FAILED, message="the API server says no")
    assert command(agent, f"start {MACHINE}") == 1
    assert "is still cordoned: machine gpu-node: machine says: the API server says no" in capsys.readouterr().err
    clock.meanwhile = answers(host, message="node node-1 stays cordoned for a GPU")
    assert command(agent, f"start {MACHINE}") == 1
    assert "node node-1 stays cordoned for a GPU; see GPUsHealthy" in capsys.readouterr().err
    assert not host.exists(drained_file(MACHINE))


def test_a_machine_that_does_not_answer_after_its_start_has_started(
    host: NodeHost, agent: Reconciler, clock: Clock
) -> None:
    """A `stop` was interrupted before the machine answered, or the image that boots now lacks the unit."""
    said: list[str] = []
    agent.progress = said.append
    host.file(f"{MACHINED_STATE}/{MACHINE}")
    host.write(drained_file(MACHINE), f"{MACHINE}\n".encode())
    clock.meanwhile = lambda: None
    assert command(agent, f"start {MACHINE}") == 0
    (remark,) = [each for each in said if "has not answered for 120 s" in each]
    assert f"if node {NODE} is still cordoned, run `kubectl uncordon {NODE}`" in remark
    assert host.exists(drained_file(MACHINE)), "a later image may answer"


def test_a_node_that_was_drained_and_whose_new_root_does_not_answer_is_reported_once(
    host: NodeHost, agent: Reconciler, clock: Clock, capsys: Capture
) -> None:
    """For example after a switch to an older image. Nobody says when the node was uncordoned by hand."""
    clock.meanwhile = answers(host)
    assert command(agent, f"stop {MACHINE}") == 0
    host.file(f"{MACHINED_STATE}/{MACHINE}")
    clock.meanwhile = lambda: None
    assert command(agent, f"start {MACHINE}") == 1
    assert f"node {NODE} is still cordoned: run `kubectl uncordon {NODE}`" in capsys.readouterr().err
    assert command(agent, f"start {MACHINE}") == 0


@pytest.mark.parametrize("why", ["does not run", "has not answered for 30 s", "machine says: no kubelet"])
def test_pods_end_with_a_machine_that_has_no_node_or_an_older_agent(
    host: NodeHost, agent: Reconciler, clock: Clock, why: str
) -> None:
    said: list[str] = []
    agent.progress = said.append
    if why != "does not run":
        host.file(f"{MACHINED_STATE}/{MACHINE}")
    if "says" in why:
        clock.meanwhile = answers(host, LeaveEnd.UNABLE, message="no kubelet")
    assert command(agent, f"stop {MACHINE}") == 0
    assert kubectl(host) == [STOP]
    (end,) = [each for each in said if "end with it" in each]
    assert why in end
    assert "--kubeconfig FILE" in end
    assert not host.exists(drained_file(MACHINE))
    assert command(agent, f"restart {MACHINE} --kubeconfig={ADMIN} --no-drain") == 0
    assert kubectl(host) == [STOP, STOP]


def test_a_dry_run_of_a_stop_only_prints_the_steps(host: NodeHost, agent: Reconciler, capsys: Capture) -> None:
    assert command(agent, f"stop {MACHINE} --dry-run --kubeconfig={ADMIN}") == 0
    assert capsys.readouterr().out.splitlines() == [f"would drain node {NODE}", f"would stop machine {MACHINE}"]
    assert command(agent, f"stop {MACHINE} --dry-run --no-drain --kubeconfig={ADMIN}") == 0
    assert capsys.readouterr().out.splitlines() == [f"would stop machine {MACHINE}"]
    assert command(agent, f"stop {MACHINE} --dry-run") == 0
    assert capsys.readouterr().out.splitlines() == ["would drain its node", f"would stop machine {MACHINE}"]
    assert kubectl(host) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "option", "stops"), [("y\n", "", True), ("\n", "", False), ("", " --yes", True)])
def test_a_person_is_asked_before_a_machine_stops(
    host: NodeHost, agent: Reconciler, monkeypatch: pytest.MonkeyPatch, answer: str, option: str, stops: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    with nullcontext() if stops else pytest.raises(AgentError, match="nothing was changed"):
        assert command(agent, f"stop {MACHINE} --no-drain{option}") == 0
    assert (kubectl(host) == [STOP]) is stops
    assert ("and its pods end with it. Continue? [y/N]" in shown.getvalue()) is not bool(option)


def test_a_machine_without_settings_is_neither_started_nor_stopped(gpu_host: Host) -> None:
    """On a host without GPUs, the agent writes none. `start` waited for 5 minutes, and `restart` stopped it first."""
    agent = reconciler(without_gpus(gpu_host, driver=False))
    with pytest.raises(AgentError, match=f"{MACHINE} was not started: no GPU on this host") as error:
        command(agent, f"start {MACHINE}")
    assert f"systemctl start {UNITS[0]}" in error.value.hint
    units(gpu_host, "active")
    with pytest.raises(AgentError, match=f"{MACHINE} was not stopped, .* no GPU on this host"):
        command(agent, f"restart {MACHINE} --no-drain")
    assert STOP not in gpu_host.runner.calls


@pytest.mark.parametrize(
    ("state", "hint"),
    [
        ("masked", f"run `systemctl unmask {UNITS[0]}` first"),
        ("without a root", ""),
        # A machine that cannot be observed is left as it is. systemd itself can restart these two.
        ("unobserved", f"`systemctl restart {UNITS[0]}` restarts it with the settings that it has"),
        ("with settings of others", f"`systemctl restart {UNITS[0]}` restarts it with the settings that it has"),
    ],
)
def test_a_restart_does_not_stop_a_machine_that_the_agent_would_not_start(
    host: NodeHost, agent: Reconciler, state: str, hint: str
) -> None:
    match state:
        case "masked":
            host.bus.unit(UNITS[0], "active", "masked")
        case "without a root":
            host.remove_tree(machine_root(MACHINE))
        case "unobserved":
            host.failing["/proc/driver/nvidia/gpus"] = OSError(errno.EIO, os.strerror(errno.EIO))
        case _:
            host.file(nspawn_file(MACHINE), "[Exec]\nBoot=yes\n")
    why = "Input/output error" if state == "unobserved" else ""
    with pytest.raises(AgentError, match=f"{MACHINE} was not stopped, .*{why}") as error:
        command(agent, f"restart {MACHINE} --kubeconfig={ADMIN}")
    assert (kubectl(host), error.value.hint) == ([], hint)


def test_pods_that_cannot_be_moved_keep_the_machine_running(host: NodeHost, agent: Reconciler) -> None:
    host.command(*DRAIN, stderr="Cannot evict pod as it would violate the pod's disruption budget.", status=1)
    with pytest.raises(CommandError, match="disruption budget") as error:
        command(agent, f"stop {MACHINE} --kubeconfig={ADMIN}")
    assert STOP not in host.runner.calls
    assert f"`unbounded-agent start {MACHINE} --kubeconfig FILE`" in error.value.hint
    assert command(agent, f"start {MACHINE} --kubeconfig={ADMIN}") == 0
    assert kubectl(host)[-1] == UNCORDON
    assert command(agent, f"start {MACHINE}") == 0


@pytest.mark.parametrize("kubeconfig", [ADMIN, ""])
def test_a_node_whose_machine_did_not_start_stays_cordoned(
    host: NodeHost, agent: Reconciler, capsys: Capture, kubeconfig: str
) -> None:
    """Pods would come to a node without GPUs. What cannot start is not waited for."""
    command(agent, f"stop {MACHINE} --kubeconfig={ADMIN}")
    host.bus.unit(UNITS[0], "inactive", "masked")
    assert command(agent, f"start {MACHINE} --kubeconfig={kubeconfig}") == 1
    said = capsys.readouterr().err
    assert not {UNCORDON, START} & {*host.runner.calls}
    assert "was not ready within" not in said
    assert f"`systemctl unmask {UNITS[0]}`" in said
    assert f"node {NODE} stays cordoned" in said
    assert f"`unbounded-agent start {MACHINE} --kubeconfig FILE`" in said
    host.bus.unit(UNITS[0], "inactive")
    assert command(agent, f"start {MACHINE} --kubeconfig={ADMIN}") == 0
    assert kubectl(host)[-1] == UNCORDON


def test_a_failed_step_for_another_machine_does_not_keep_the_node_cordoned(host: NodeHost, agent: Reconciler) -> None:
    assert command(agent, f"stop {MACHINE} --kubeconfig={ADMIN}") == 0
    host.make_directory("/var/lib/machines/other")
    host.bus.unit("systemd-nspawn@other.service", "inactive")
    others = {"other": MachineSettings(gpus=[])}
    agent.config = replace(agent.config, machines={**agent.config.machines, **others})
    host.full.append(nspawn_file("other"))
    assert command(agent, f"start {MACHINE} --kubeconfig={ADMIN}") == 0
    assert kubectl(host)[-1] == UNCORDON
    outcome = agent.reconcile()
    assert outcome.failures == outcome.failures_of(["other"]) != ()
    assert outcome.failures_of([MACHINE]) == ()


def test_a_node_that_was_not_uncordoned_is_named(host: NodeHost, agent: Reconciler, capsys: Capture) -> None:
    command(agent, f"stop {MACHINE} --kubeconfig={ADMIN}")
    assert command(agent, f"start {MACHINE}") == 1
    message = capsys.readouterr().err
    assert f"this agent cordoned node {NODE}, and has not uncordoned it" in message
    assert f"run `unbounded-agent start {MACHINE} --kubeconfig FILE`" in message
    host.command(*UNCORDON, stderr="connection refused", status=1)
    assert command(agent, f"start {MACHINE} --kubeconfig={ADMIN}") == 1
    assert "connection refused" in capsys.readouterr().err
    assert host.mode(cordoned_file(MACHINE)) == 0o600


def test_a_machine_without_a_root_is_not_waited_for(host: NodeHost, agent: Reconciler, capsys: Capture) -> None:
    command(agent, f"stop {MACHINE} --no-drain")
    host.remove_tree(machine_root(MACHINE))
    assert command(agent, f"start {MACHINE}") == 1
    said = capsys.readouterr().err
    assert "was not ready within" not in said
    assert machine_root(MACHINE) in said
    assert START not in host.runner.calls


def test_a_machine_starts_once_its_gpus_can_be_observed(host: NodeHost, agent: Reconciler, clock: Clock) -> None:
    """Nobody else would start it: a user stopped it."""
    command(agent, f"stop {MACHINE} --no-drain")
    path = "/proc/driver/nvidia/gpus"
    host.failing[path] = PermissionError(13, "Permission denied", path)
    starts: list[int] = []

    def sleep() -> None:
        starts.append(host.runner.calls.count(START))
        assert len(starts) < 5, "the machine was never ready"
        host.failing.pop(path, None)

    clock.meanwhile = sleep
    assert command(agent, f"start {MACHINE}") == 0
    assert (starts[0], host.runner.calls.count(START)) == (0, 1)


def test_a_restart_that_cannot_start_the_machine_says_that_it_was_stopped(host: NodeHost, agent: Reconciler) -> None:
    agent.wait_until = 0.0
    with pass_lock(host, agent.progress), pytest.raises(AgentError, match="another pass") as error:
        command(agent, f"restart {MACHINE} --kubeconfig={ADMIN} --no-drain")
    assert host.runner.calls[-1] == STOP
    assert f"machine {MACHINE} was stopped" in error.value.message
    assert f"`unbounded-agent start {MACHINE}`" in error.value.hint
    assert "fuser" in error.value.hint
    assert command(agent, f"start {MACHINE}") == 0


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (DRAIN, f"some pods of node {NODE} may have been moved; the machine still runs; repeat this, or"),
        (STOP, f"machine {MACHINE} is stopping; start it with `unbounded-agent start {MACHINE}`"),
        (START, f"machine {MACHINE} was stopped, and may not have started again: start it with `unbounded-agent start"),
    ],
)
def test_an_interrupted_restart_says_what_it_leaves(
    host: NodeHost, agent: Reconciler, program: tuple[str, ...], said: str
) -> None:
    def interrupt(argv: tuple[str, ...]) -> None:
        if argv == program:
            raise KeyboardInterrupt

    host.tools.before = interrupt
    messages: list[str] = []
    agent.progress = messages.append
    with pytest.raises(KeyboardInterrupt):
        command(agent, f"restart {MACHINE} --kubeconfig={ADMIN}")
    assert messages[-1].startswith(f"interrupted: {said}")


@pytest.mark.parametrize("state", ["inactive", "failed"])
def test_a_machine_that_stops_after_its_start_is_not_waited_for(
    host: NodeHost, agent: Reconciler, capsys: Capture, clock: Clock, state: str
) -> None:
    """systemd runs prepare@ first, and it, or somebody else, may start the machine again: only then has it stopped."""
    command(agent, f"stop {MACHINE} --no-drain")
    host.reports = False
    host.remove_tree(report_directory(MACHINE))
    states = ["restarted", "activating", "activating", "active", "restarted", "active", state]

    def sleep() -> None:
        now = states.pop(0)
        host.bus.jobs = {UNITS[0]: "start"} if now == "restarted" else {}
        units(host, now.replace("restarted", "inactive"), stopped_at=1)

    clock.meanwhile = sleep
    assert command(agent, f"start {MACHINE}") == 1
    assert f"machine {MACHINE} started and then stopped: see `journalctl -e -u {UNITS[0]}`" in capsys.readouterr().err
    assert not states


def test_a_machine_whose_start_fails_between_two_passes_is_not_waited_for(
    host: NodeHost, agent: Reconciler, capsys: Capture, clock: Clock
) -> None:
    """No pass saw it start. `start` waited for seven minutes."""
    command(agent, f"stop {MACHINE} --no-drain")
    host.tools.before = lambda argv: units(host, "failed", stopped_at=1) if argv == START else None
    host.command(*START)
    clock.least = 500.0
    assert command(agent, f"start {MACHINE}") == 1
    assert f"machine {MACHINE} started and then stopped" in capsys.readouterr().err


def test_a_machine_that_is_stopping_starts_when_it_has_stopped(host: NodeHost, agent: Reconciler, clock: Clock) -> None:
    """Its report is still there, so `start` did not wait, and started nothing."""
    units(host, "deactivating")

    def sleep() -> None:
        if len(clock.slept) == 3:
            host.tools(STOP, 0)

    clock.meanwhile = sleep
    assert command(agent, f"start {MACHINE}") == 0
    assert START in host.runner.calls


def test_the_wait_for_a_machine_that_fails_again_and_again_says_so(
    host: NodeHost, agent: Reconciler, clock: Clock
) -> None:
    command(agent, f"stop {MACHINE} --no-drain")
    host.reports = False
    host.remove_tree(report_directory(MACHINE))
    said: list[str] = []
    agent.progress = said.append
    clock.least = 100.0

    def sleep() -> None:
        units(host, "activating", stopped_at=1)
        host.bus.sub_states[UNITS[0]] = "auto-restart" if len(clock.slept) % 2 else "start-pre"

    clock.meanwhile = sleep
    assert command(agent, f"start {MACHINE}") == 1
    waiting = [sentence for sentence in said if "waiting:" in sentence]
    assert len(waiting) == 1
    assert f"it has failed, and systemd starts it again: see `journalctl -e -u {UNITS[0]}`" in waiting[0]


def test_the_wait_for_a_machine_without_gpus_does_not_name_the_gpus(
    tmp_path: Path, capsys: Capture, clock: Clock
) -> None:
    """Ready is True all the time."""
    host = node_host(tmp_path / "host")
    agent = node_reconciler(host)
    without_gpus(host, driver=False)
    assert command(agent, "up", network=host.network, ask=host.ask) == 0
    command(agent, f"stop {MACHINE} --no-drain")
    host.bus.unit(UNITS[0], "inactive", "masked")
    assert command(agent, f"start {MACHINE}") == 1
    assert f"its unit is masked: run `systemctl unmask {UNITS[0]}` first" in capsys.readouterr().err
    host.bus.unit(UNITS[0], "inactive")
    host.reports = False
    host.remove_tree(report_directory(MACHINE))
    clock.least = 500.0
    assert command(agent, f"start {MACHINE}") == 1
    assert "was not ready within 500 s: it does not run, or has not answered" in capsys.readouterr().err


@pytest.mark.parametrize("polls", [1, 3])
def test_a_machine_that_somebody_stops_is_not_started_again(
    host: NodeHost, agent: Reconciler, capsys: Capture, clock: Clock, polls: int
) -> None:
    host.remove(joined_file(MACHINE))

    def sleep() -> None:
        if len(clock.slept) == polls:
            host.tools(STOP, 0)

    clock.meanwhile = sleep
    assert command(agent, f"start {MACHINE}") == 1
    assert START not in host.runner.calls
    assert f"machine {MACHINE} started and then stopped" in capsys.readouterr().err
    assert len(clock.slept) == polls


def test_a_machine_that_was_stopped_before_its_first_start_stays_stopped(gpu_host: Host) -> None:
    """The service starts the machines that have not run since the boot. systemd knows nothing of such a stop."""
    gpu_host.command(*STOP)
    assert command(reconciler(gpu_host), f"stop {MACHINE} --no-drain") == 0
    reconciler(gpu_host).run_pass()
    assert START not in gpu_host.runner.calls
    reconciler(gpu_host).run_pass(by_hand=(MACHINE,))
    assert START in gpu_host.runner.calls


def test_a_machine_that_is_stopped_during_a_pass_is_not_started_at_its_end(gpu_host: Host) -> None:
    gpu_host.command(*STOP)
    service, stopped = reconciler(gpu_host), list[int]()

    def progress(_: str) -> None:
        if not stopped:
            stopped.append(command(reconciler(gpu_host), f"stop {MACHINE} --no-drain"))

    service.progress = progress
    service.run_pass()
    assert stopped == [0]
    assert START not in gpu_host.runner.calls


# ---- several commands


@pytest.mark.parametrize(
    "line",
    [
        *(f"start {MACHINE}", f"stop {MACHINE} --no-drain", f"restart {MACHINE} --no-drain", f"reset {MACHINE}"),
        *(f"up {MACHINE} --rebuild", f"kube allocation dra --kubeconfig {ADMIN}"),
    ],
)
def test_one_command_at_a_time_works_on_a_machine(host: NodeHost, agent: Reconciler, line: str) -> None:
    """`start`, while it waited, started the machine that `reset` had stopped and was about to remove."""
    network: dict[str, object] = {"network": host.network}
    services = {"reset": network, "up": {**network, "ask": host.ask}}
    said = rf"is working on machine {MACHINE}: `unbounded-agent stop` \(process {os.getpid()}\)"
    with machine_locks(host, (MACHINE,), "stop"), pytest.raises(AgentError, match=said):
        command(agent, line, **services.get(line.split()[0], {}))
    assert host.runner.calls == []


def test_commands_work_on_several_machines(host: NodeHost) -> None:
    with machine_locks(host, ("b", "a"), "up"), machine_locks(host, (MACHINE,), "start"):
        for machine, command in (("a", "up"), ("b", "up"), (MACHINE, "start")):
            busy = pytest.raises(AgentError, match=f"is working on machine {machine}: `unbounded-agent {command}`")
            with busy, machine_locks(host, (machine,), "stop"):
                pass
    with machine_locks(host, ("a", MACHINE), "up"), machine_locks(host, ("b",), "stop"):
        pass


def test_a_node_is_not_uncordoned_while_it_is_drained(host: NodeHost, agent: Reconciler) -> None:
    def start_too(argv: tuple[str, ...]) -> None:
        if argv == DRAIN:
            with pytest.raises(AgentError, match="`unbounded-agent stop`"):
                command(node_reconciler(host), f"start {MACHINE} --kubeconfig={ADMIN}")

    host.tools.before = start_too
    assert command(agent, f"stop {MACHINE} --kubeconfig={ADMIN}") == 0
    assert kubectl(host) == [QUERY, CORDON, DRAIN, STOP]
    assert host.mode(cordoned_file(MACHINE)) == 0o600


@pytest.mark.parametrize(
    ("state", "load", "job", "why"),
    [
        *(("inactive", load, job, "") for load in ("loaded", "masked") for job in ("", "stop", "verify-active")),
        *(("inactive", "loaded", job, "is about to start") for job in ("start", "restart")),
        # systemctl or `apply` may have started it after `reset` stopped it.
        *((state, "loaded", "", f"is {state}") for state in ("active", "activating", "deactivating")),
    ],
)
def test_only_the_root_of_a_machine_that_stays_stopped_is_removed(
    host: NodeHost, state: str, load: str, job: str, why: str
) -> None:
    """machined asks for another stop of a machine that systemd had to kill."""
    host.bus.unit(UNITS[0], state, load)
    host.bus.jobs[UNITS[0]] = job
    with pytest.raises(AgentError, match=f"{UNITS[0]} {why}") if why else nullcontext():
        apply((RemoveRoot(MACHINE),), host, performers=performers(host.network))
    assert host.exists(machine_root(MACHINE)) is bool(why)


def test_an_unknown_machine(agent: Reconciler) -> None:
    with pytest.raises(ConfigError, match="machine nowhere is not configured"):
        command(agent, "stop nowhere --no-drain")


# ---- `apply` waits only for machines that can report


def test_a_machine_that_has_ended_is_not_waited_for(gpu_host: Host, clock: Clock, capsys: Capture) -> None:
    """It cannot report. `apply` waited for five minutes."""
    clock.least = 100.0
    assert command(reconciler(gpu_host), "apply") == 1
    assert f"machine {MACHINE} started and then stopped: see `journalctl -e -u {UNITS[0]}`" in capsys.readouterr().err
    assert len(clock.slept) == 1


def test_a_machine_that_another_command_stopped_is_not_started(gpu_host: Host, clock: Clock, capsys: Capture) -> None:
    """`apply` started the machine that `reset` or `up --rebuild` had stopped in order to remove its root directory."""
    units(gpu_host, "inactive", stopped_at=4711)
    with machine_locks(gpu_host, (MACHINE,), "reset"):
        assert command(reconciler(gpu_host), "apply") == 1
    assert START not in gpu_host.runner.calls
    said = f"machine {MACHINE} was not started: another command is working on machine {MACHINE}: "
    assert f"{said}`unbounded-agent reset` (process {os.getpid()})" in " ".join(capsys.readouterr().err.split())
    assert clock.passed < 10, "it did not wait for the machine's report"


def test_a_command_that_works_on_all_machines_delays_apply_only_once(gpu_host: Host, clock: Clock) -> None:
    """`up` may work on every node of the host, for minutes."""
    names = ("a", "b", "c", MACHINE)
    for name in names:
        gpu_host.bus.unit(machine_unit(name), "inactive", stopped_at=4711)
    agent = Reconciler(Config.validated({"machines": {name: {} for name in names}}), gpu_host, gpu_host)
    with machine_locks(gpu_host, names, "up"):
        assert command(agent, "apply") == 1
    assert clock.passed < 10


def test_a_masked_machine_is_not_waited_for(gpu_host: Host, clock: Clock, capsys: Capture) -> None:
    """Neither the agent nor systemd would start it. Other commands may work on a machine that `apply` waits for."""

    def stop() -> None:
        with machine_locks(gpu_host, (MACHINE,), "stop"):
            units(gpu_host, "inactive", stopped_at=4711)

    clock.meanwhile = stop
    assert command(reconciler(gpu_host), "apply") == 1
    waited = len(clock.slept)
    gpu_host.bus.unit(UNITS[0], "inactive", "masked")
    assert command(reconciler(gpu_host), "apply") == 1
    assert f"`systemctl unmask {UNITS[0]}`" in " ".join(capsys.readouterr().out.split())
    assert len(clock.slept) == waited, "waited for a machine that cannot start"
