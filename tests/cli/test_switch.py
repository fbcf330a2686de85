"""`switch`: a node gets another root file system, and the former one again if that is not ready."""

import errno
import json
import os
import posixpath
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from agent.host.allocation import UNSCHEDULABLE
from agent.host.leave import was_drained
from agent.host.provision.node_files import NODE_RECORDS, NodeRecord, record_paths
from agent.host.state.gpus import observe_gpus, record_test
from agent.host.state.locks import machine_locks
from agent.host.state.records import read_history, write_history
from agent.host.state.switches import RECORDS, Switch
from agent.host.switching import UNIT, begin, work
from agent.model.conditions import ConditionType
from agent.model.contract import (
    LeaveAnswer,
    LeaveEnd,
    LeaveRequest,
    LeaveTask,
    Lost,
    parse_leave_request,
    render_leave_answer,
    render_leave_request,
)
from agent.model.errors import AgentError
from agent.model.paths import (
    KUBELET_CERTIFICATES,
    MACHINE_ROOTS,
    MACHINES_STATE,
    NODES,
    SWITCHES,
    identity_directory,
    images_pipe,
    leave_file,
    leave_lock_file,
    leaving_file,
    machine_root,
    machine_unit,
    nspawn_file,
    other_root,
    switch_record,
    token_file,
)
from agent.system.process import Completed
from tests.fakes.clock import Clock
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, UNITS
from tests.fakes.node_host import CANDIDATE, NODE, NodeHost, answers, node_host, node_reconciler

ADMIN = "/root/.kube/config"
KUBECTL = ("kubectl", f"--kubeconfig={ADMIN}")
ROOT, OTHER = machine_root(MACHINE), other_root(MACHINE)
CHANGED = {"kubelet": {"node_ip": "192.0.2.10", "labels": {"new": "yes"}}}
LABEL = b"--node-labels=new=yes"


@pytest.fixture
def host(tmp_path: Path, clock: Clock) -> NodeHost:
    """A host with a node, whose kubelet keeps its certificates on the host."""
    host = node_host(tmp_path / "host")
    host.bus.unit(machine_unit(CANDIDATE), "inactive")
    assert command(node_reconciler(host), "up", network=host.network, ask=host.ask) == 0
    host.write(f"{identity_directory(MACHINE)}/kubelet-client-current.pem", b"certificate")
    for words in (("cordon", NODE), ("uncordon", NODE), (*UNSCHEDULABLE, NODE)):
        host.command(*KUBECTL, *words)
    host.command(*KUBECTL, "drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
    clock.meanwhile = answers(host)
    host.runner.calls.clear()
    return host


def switch(host: NodeHost, options: str = "", /, **node: object) -> int:
    agent = node_reconciler(host, **(node or CHANGED))
    return command(agent, f"switch {MACHINE} {options}", network=host.network, ask=host.ask)


def is_new(host: NodeHost, root: str = ROOT) -> bool:
    return LABEL in host.read(f"{root}/etc/systemd/system/kubelet.service.d/99-unbounded-agent.conf")


def state(host: NodeHost) -> str:
    found = RECORDS.read(switch_record(MACHINE), host)
    return found.state if found else ""


def assert_consistent(host: NodeHost) -> None:
    """The record of the node is that of the root file system with its name, and nothing of the candidate is left."""
    record = NODE_RECORDS.read(record_paths(MACHINE), host)
    assert isinstance(record, NodeRecord)
    assert record.is_of(host.link_inode(ROOT) or 0, host.birth(ROOT))
    node_reconciler(host).reconcile()
    assert not host.exists(machine_root(CANDIDATE))
    assert not host.exists(nspawn_file(CANDIDATE))
    assert not host.exists(f"{MACHINES_STATE}/{CANDIDATE}")


def test_a_node_gets_another_root_file_system(host: NodeHost, capsys: Capture) -> None:
    before, gpu = host.link_inode(ROOT), "0000:02:00.0"
    host.symlink(f"/sys/bus/pci/devices/{gpu}", f"../../../devices/pci0000:00/{gpu}")
    host.symlink(f"/sys/devices/pci0000:00/{gpu}/driver", "../../../bus/pci/drivers/nvidia")
    record_test(host, gpu, "passed", (), MACHINE, "550.163.01")
    assert switch(host, "--dry-run") == 0
    said = capsys.readouterr().out
    passes = f"would pass the images of machine {MACHINE}'s containers to machine {CANDIDATE}\n"
    ready = f"would start machine {CANDIDATE}, and wait until it is ready\n"
    tries = f"would run the programs of a node in machine {CANDIDATE}, without an effect\n"
    assert f"{ready}{tries}{passes}would stop machine {CANDIDATE}\n" in said
    assert host.link_inode(ROOT) == before
    assert not host.exists(SWITCHES)
    assert switch(host, f"--kubeconfig {ADMIN}") == 0
    assert is_new(host)
    assert host.link_inode(OTHER) == before, "the former one is kept"
    assert state(host) == "done"
    assert observe_gpus(host).tests[gpu].outdated, "the GPUs are tested again, if tests are configured"
    assert_consistent(host)
    programs = [argv[2] for argv in host.runner.calls if argv[0] == "kubectl"]
    assert [each for each in programs if each != "get"] == ["cordon", "drain", "uncordon"]
    order = [argv[-1] for argv in host.runner.calls if argv[:2] == ("systemctl", "stop") or "drain" in argv]
    assert order.index("--timeout=600s") < order.index(UNITS[0]), "the pods leave first"
    assert not host.exists(token_file(MACHINE)), "it needs no token"
    assert b"kubelet-client-current.pem" in host.read(f"{ROOT}/etc/kubernetes/kubelet.conf")
    assert switch(host) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_candidate_is_no_node(host: NodeHost, capsys: Capture) -> None:
    """Its kubelet is masked, it has no network and none of the kubelet's certificates, and its GPUs are the node's."""
    seen = dict[str, str]()

    def look(argv: tuple[str, ...]) -> None:
        if argv == ("systemctl", "stop", machine_unit(CANDIDATE)) and host.exists(nspawn_file(CANDIDATE)):
            seen["nspawn"] = host.read_text(nspawn_file(CANDIDATE))
            agent = node_reconciler(host)
            command(agent, "status --json")
            seen["status"] = capsys.readouterr().out
            command(agent, "status")
            seen["lines"] = capsys.readouterr().out
            outcome = agent.run_pass()
            seen["machines"] = " ".join(each.name for each in outcome.machines)

    host.tools.before = look
    assert switch(host) == 0
    lines = seen["nspawn"].splitlines()
    masks = next(each for each in lines if each.startswith("Parameters="))
    for unit in ("kubelet.service", "unbounded-agent-dra.service", "unbounded-agent-node-condition.service"):
        assert f"systemd.mask={unit}" in masks.removeprefix("Parameters=").split()
    assert "Private=yes" in lines
    assert not any(KUBELET_CERTIFICATES in each for each in lines)
    assert f"Bind={identity_directory(MACHINE)}:{KUBELET_CERTIFICATES}" in host.read_text(nspawn_file(MACHINE))
    machines = json.loads(seen["status"])["machines"]
    assert machines[CANDIDATE]["gpus"] == machines[MACHINE]["gpus"] != []
    assert (machines[CANDIDATE]["ready"], machines[CANDIDATE]["candidateFor"]) == ("True", MACHINE)
    assert "candidateFor" not in machines[MACHINE]
    assert f"{CANDIDATE} (candidate for {MACHINE}): ready" in seen["lines"]
    assert seen["machines"] == MACHINE, "metrics, health pages and the log know only the node"


def test_a_candidate_that_is_not_ready_changes_nothing(host: NodeHost) -> None:
    before, host.sick = host.link_inode(ROOT), lambda root: root == machine_root(CANDIDATE)
    assert switch_fails(host).startswith(f"machine {MACHINE} was not switched, and serves on: its candidate: ")
    assert host.link_inode(ROOT) == before
    assert ("systemctl", "stop", UNITS[0]) not in host.runner.calls
    assert state(host) == "failed"
    assert_consistent(host)
    host.sick = lambda root: False
    host.runner.calls.clear()
    assert switch(host) == 0
    assert not any("copy" in argv for argv in host.runner.calls), "the image is not pulled again"
    assert is_new(host)


def test_another_machine_with_the_name_of_a_candidate_is_left_alone(host: NodeHost) -> None:
    host.file(f"{machine_root(CANDIDATE)}/etc/kept", "text")
    assert switch_fails(host).startswith(f"the candidate of machine {MACHINE} would be named {CANDIDATE}")
    assert host.read(f"{machine_root(CANDIDATE)}/etc/kept") == b"text"
    assert not any("systemctl" in argv for argv in host.runner.calls)


def test_an_image_file_with_the_name_of_a_candidate_is_left_alone(host: NodeHost) -> None:
    """systemd-nspawn boots it as the machine of that name."""
    image = f"{machine_root(CANDIDATE)}.raw"
    kill_at(host, ("systemctl", "start", "--no-block", machine_unit(CANDIDATE)))
    with pytest.raises(KilledError):
        switch(host)
    host.tools.before = lambda argv: None
    host.rename(machine_root(CANDIDATE), OTHER)
    host.file(image, "text")
    host.runner.calls.clear()
    assert switch_fails(host).startswith(
        f"the candidate of machine {MACHINE} would be named {CANDIDATE}, as {image} is"
    )
    assert work(node_reconciler(host), host.network) == ()
    assert host.read(image) == b"text"
    assert ("systemctl", "stop", machine_unit(CANDIDATE)) not in host.runner.calls


def test_a_rebuild_forgets_the_switch(host: NodeHost) -> None:
    assert switch(host) == 0
    assert command(node_reconciler(host), f"up {MACHINE} --rebuild", network=host.network, ask=host.ask) == 0
    assert host.entries(MACHINE_ROOTS) == (MACHINE,)
    assert not is_new(host)
    assert host.entries(identity_directory(MACHINE)) == (), "it joins with its token"
    assert state(host) == ""
    assert_consistent(host)


def switch_fails(host: NodeHost) -> str:
    with pytest.raises(AgentError) as error:
        switch(host)
    return error.value.message


def test_a_candidate_runs_the_programs_and_gets_the_images_before_the_pods_are_moved(host: NodeHost) -> None:
    assert switch(host) == 0
    asked = [argv[0] for argv in host.runner.calls if argv[0] in [*LeaveTask]]
    assert [*dict.fromkeys(asked)] == ["look", "try programs", "take images", "give images", "drain", "uncordon"]


@pytest.mark.parametrize("tries", [True, False])
def test_a_kubelet_that_does_not_run_costs_no_pod_anything(host: NodeHost, clock: Clock, tries: bool) -> None:
    """An image with an older agent does not try it: the switch goes on."""
    answer, before = answers(host), host.link_inode(ROOT)

    def refuse() -> None:
        if host.exists(leave_file(CANDIDATE)):
            request = parse_leave_request(host.read(leave_file(CANDIDATE)))
            if request.task is LeaveTask.TRY_PROGRAMS:
                why = "kubelet: exec format error"
                said = render_leave_answer(LeaveAnswer(request.id, LeaveEnd.FAILED, 1.0, message=why))
                return host.write(leaving_file(CANDIDATE), said) if tries else None
        return answer()

    clock.meanwhile = refuse
    with pytest.raises(AgentError, match=r"its candidate: .*exec format error") if tries else nullcontext():
        assert switch(host) == 0
    assert (host.link_inode(ROOT) == before) is tries
    assert ((LeaveTask.DRAIN,) in host.runner.calls) is not tries


def test_nothing_is_left_to_do_for_the_candidate_while_the_machine_is_down(host: NodeHost) -> None:
    left = list[bool]()

    def look(argv: tuple[str, ...]) -> None:
        if argv == ("systemctl", "stop", UNITS[0]):
            left.append(host.exists(nspawn_file(CANDIDATE)))

    host.tools.before = look
    assert switch(host) == 0
    assert left == [False]


def test_a_node_that_is_not_ready_goes_back_by_itself(host: NodeHost, capsys: Capture) -> None:
    before, host.sick = host.link_inode(ROOT), lambda root: root == ROOT and is_new(host)
    assert switch(host) == 1
    assert "the former root file system serves again" in capsys.readouterr().err
    assert host.link_inode(ROOT) == before
    assert state(host) == "failed"
    assert_consistent(host)
    command(node_reconciler(host), "status")
    assert f"machine {MACHINE} was not switched to " in capsys.readouterr().err
    assert host.bus.properties[host.bus.units[UNITS[0]], "org.freedesktop.systemd1.Unit", "ActiveState"][1] == "active"


def test_a_node_is_uncordoned_only_when_its_gpus_are_offered_again(host: NodeHost, clock: Clock) -> None:
    """Meanwhile, the API server has the former count, and a pod would start without its GPU."""
    late, uncordon = list[float](), (*KUBECTL, "uncordon", NODE)

    def offers() -> None:
        late.append(clock.passed)
        assert uncordon not in host.runner.calls
        if len(late) == 5:
            host.silent.clear()
            host.answer()

    def look(argv: tuple[str, ...]) -> None:
        if argv == ("systemctl", "start", "--no-block", UNITS[0]):
            host.silent.add(ConditionType.GPUS_ADVERTISED)
            clock.meanwhile = offers

    host.tools.before = look
    assert switch(host, f"--kubeconfig {ADMIN}") == 0
    assert len(late) >= 5
    assert uncordon in host.runner.calls


def test_a_kubelet_that_does_not_work_is_not_waited_for_long(host: NodeHost, clock: Clock) -> None:
    """The candidate has shown how fast the root file system boots. `start` waits for seven minutes."""

    def look(argv: tuple[str, ...]) -> None:
        host.joins = not is_new(host)

    host.tools.before, clock.least = look, 10.0
    before = clock.passed
    assert switch(host) == 1
    assert 180 <= clock.passed - before < 300
    assert not is_new(host)
    assert state(host) == "failed"


class KilledError(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def test_wherever_it_is_killed_the_machine_serves_again_and_a_switch_goes_on(
    host: NodeHost, tmp_path: Path, clock: Clock
) -> None:
    assert switch(host) == 0
    # What the machine was asked for is no program.
    steps, ends = sum(argv[0] not in [*LeaveTask] for argv in host.runner.calls), set[tuple[str, bool]]()
    for number in range(steps):
        again = made(tmp_path / f"host-{number}", clock)
        kill_at(again, (), number + 1)
        with pytest.raises(KilledError):
            switch(again)
        again.tools.before = lambda argv: None
        ends.add(recovered(again))
    assert ends == {("", False), ("failed", False), ("done", True)}


def recovered(host: NodeHost) -> tuple[str, bool]:
    """Let the unit end an interrupted switch, then switch again. Return how the unit left it."""
    assert work(node_reconciler(host), host.network) == ()
    assert_consistent(host)
    assert host.is_running()
    end = state(host), is_new(host)
    assert switch(host) == 0
    assert is_new(host)
    assert_consistent(host)
    return end


def test_a_kill_between_any_two_changes_of_records_and_roots_is_recovered_from(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two root file systems have changed places, and the node's record has not followed, for example."""
    cut, ends = cuts(monkeypatch), set[tuple[str, bool]]()
    for number in range(1, 50):
        host = made(tmp_path / f"host-{number}", clock)
        cut(number)
        try:
            switch(host)
            break
        except KilledError:
            cut(0)
        ends.add(recovered(host))
    assert number > 12
    assert ends == {("", False), ("failed", False), ("done", True)}


def cuts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what lets the command be killed at the so manieth change of records and roots from then on; 0: never."""
    real, left = os.rename, [0]

    def rename(old: str, new: str, **options: int | None) -> None:
        if any(f"{place}/" in new for place in (MACHINE_ROOTS, SWITCHES, NODES)):
            left[0] -= 1
            if left[0] == 0:
                raise KilledError
        real(old, new, **options)

    def cut(at: int) -> None:
        left[0] = at

    monkeypatch.setattr(os, "rename", rename)
    return cut


def made(tree: Path, clock: Clock) -> NodeHost:
    host = node_host(tree)
    host.bus.unit(machine_unit(CANDIDATE), "inactive")
    assert command(node_reconciler(host), "up", network=host.network, ask=host.ask) == 0
    clock.meanwhile = answers(host)
    host.runner.calls.clear()
    return host


def kill_at(host: NodeHost, program: tuple[str, ...], times: int = 1) -> None:
    """Kill the command before it runs this program, or any, for the so manieth time."""
    seen = list[tuple[str, ...]]()

    def kill(argv: tuple[str, ...]) -> None:
        seen.extend([argv] if argv[: len(program)] == program else [])
        if len(seen) == times:
            raise KilledError

    host.tools.before = kill


def test_the_kubelet_keeps_its_certificates_even_if_they_were_in_the_root_file_system(host: NodeHost) -> None:
    """Root in the machine may have put links there: no file of the host is read or written through them."""
    host.remove_tree(identity_directory(MACHINE))
    host.file("/etc/shadow", "secret")
    directory = f"{ROOT}{KUBELET_CERTIFICATES}"
    host.file(f"{directory}/kubelet-client-1.pem", "certificate")
    host.symlink(f"{directory}/kubelet-client-current.pem", f"{KUBELET_CERTIFICATES}/kubelet-client-1.pem")
    host.symlink(f"{directory}/kubelet.key", "/etc/shadow")
    host.symlink(f"{directory}/kubelet.crt", "../../../../../../etc/shadow")
    host.make_directory(f"{directory}/directory")
    assert switch(host) == 0
    kept = identity_directory(MACHINE)
    assert host.entries(kept) == ("kubelet-client-1.pem", "kubelet-client-current.pem")
    assert host.read_link(f"{kept}/kubelet-client-current.pem") == "kubelet-client-1.pem"
    assert host.mode(f"{kept}/kubelet-client-1.pem") == 0o600
    assert_closed(host)


def test_a_former_root_that_nobody_could_look_through_is_kept(host: NodeHost, clock: Clock) -> None:
    answer, unable = answers(host), answers(host, LeaveEnd.UNABLE, message="the kubelet does not run")

    def looks() -> None:
        drained = (LeaveTask.DRAIN,) in host.runner.calls and (LeaveTask.UNCORDON,) not in host.runner.calls
        looked = host.exists(leave_file(MACHINE)) and b"look" in host.read(leave_file(MACHINE))
        (unable if drained and looked else answer)()

    clock.meanwhile = looks
    assert switch(host) == 0
    found = RECORDS.read(switch_record(MACHINE), host)
    assert found
    assert (found.state, found.keep) == ("done", True)


def test_what_pods_write_until_they_are_moved_keeps_the_former_root(host: NodeHost, clock: Clock) -> None:
    nothing, more = answers(host), answers(host, lost=(Lost("/srv", 1, 1),))

    def writes() -> None:
        (more if (LeaveTask.DRAIN,) in host.runner.calls else nothing)()

    clock.meanwhile = writes
    assert switch(host) == 0
    found = RECORDS.read(switch_record(MACHINE), host)
    assert found
    assert (found.state, found.keep) == ("done", True)


@pytest.mark.parametrize("keep", [False, True])
def test_a_former_root_file_system_is_removed_after_its_time(host: NodeHost, keep: bool) -> None:
    """The service starts a unit for it. One with files that the present one lacks stays."""
    assert switch(host) == 0
    host.bus.unit(UNIT, "inactive")
    agent, before = node_reconciler(host, keep_former=1), RECORDS.read(switch_record(MACHINE), host)
    assert before

    def passes(hours: float) -> None:
        """Let the machine be ready for so long."""
        since = before.since - hours * 3600
        RECORDS.write(switch_record(MACHINE), Switch("done", before.image, since, keep=keep), host)
        history = read_history(host)[MACHINE]
        write_history(host, {MACHINE: tuple(each._replace(last_transition=since) for each in history)})
        begin(agent.config, host, agent.reconcile())
        assert work(agent, host.network) == ()

    passes(0.9)
    assert host.exists(OTHER)
    assert host.bus.started == []
    passes(1.1)
    assert host.exists(OTHER) == keep
    assert host.bus.started == [UNIT] * (not keep)


def test_a_switch_that_is_due_waits_for_the_command_that_has_the_machine(host: NodeHost) -> None:
    """The unit would fail, and alerts would tell of it, while `driver upgrade` or `restart` works on the machine."""
    kill_at(host, ("systemctl", "stop", machine_unit(CANDIDATE)), 2)
    with pytest.raises(KilledError):
        switch(host)
    host.tools.before = lambda argv: None
    host.bus.unit(UNIT, "inactive")
    agent = node_reconciler(host)
    with machine_locks(host, (MACHINE,), "driver upgrade"):
        begin(agent.config, host, agent.reconcile())
        assert host.bus.started == []
    begin(agent.config, host, agent.reconcile())
    assert host.bus.started == [UNIT]


def test_reset_removes_all_root_file_systems(host: NodeHost) -> None:
    """Also if the command was killed while the candidate ran."""
    kill_at(host, ("systemctl", "stop", machine_unit(CANDIDATE)), 2)
    with pytest.raises(KilledError):
        switch(host)
    host.tools.before = lambda argv: None
    assert host.exists(machine_root(CANDIDATE))
    assert command(node_reconciler(host), "reset", MACHINE, network=host.network) == 0
    assert host.entries(MACHINE_ROOTS) == ()
    assert not host.exists(nspawn_file(CANDIDATE))
    assert not host.exists(f"{SWITCHES}/{MACHINE}")


def test_wherever_the_way_back_is_cut_the_former_root_file_system_serves(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the roots have changed places again, and the node's record has not followed."""
    cut, number, seen = cuts(monkeypatch), 9, 0
    while True:
        number += 1
        host = made(tmp_path / f"host-{number}", clock)
        host.sick = partial(serves_new, host)
        cut(number)
        try:
            assert switch(host) == 1
            break
        except KilledError:
            cut(0)
            seen += 1
        work(node_reconciler(host), host.network)
        assert_consistent(host)
        assert host.is_running()
        assert not is_new(host)
    assert seen > 6


def serves_new(host: NodeHost, root: str) -> bool:
    return root == ROOT and is_new(host)


def test_a_full_disk_does_not_keep_the_machine_down(host: NodeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """No record can be written from the moment on when the machine has stopped."""
    real, full = os.rename, [False]

    def rename(old: str, new: str, **options: int | None) -> None:
        if full[0] and any(f"{place}/" in new for place in (SWITCHES, NODES)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), new)
        real(old, new, **options)

    def look(argv: tuple[str, ...]) -> None:
        full[0] = full[0] or argv == ("systemctl", "stop", UNITS[0])

    monkeypatch.setattr(os, "rename", rename)
    host.tools.before = look
    assert switch(host) == 1
    assert host.bus.properties[host.bus.units[UNITS[0]], "org.freedesktop.systemd1.Unit", "ActiveState"][1] == "active"
    assert not is_new(host)
    host.tools.before, full[0] = lambda argv: None, False
    work(node_reconciler(host), host.network)
    assert_consistent(host)
    assert state(host) == "failed"


def test_files_that_are_needed_are_not_removed_after_a_way_back_that_failed(host: NodeHost) -> None:
    """The machine did not stop, so the former root file system is still aside, with files that only it has."""
    host.sick = partial(serves_new, host)
    stop = ("systemctl", "stop", UNITS[0])

    def look(argv: tuple[str, ...]) -> None:
        if argv == stop and stop in host.runner.calls:
            host.runner.answers[stop] = Completed(1, b"", b"it does not stop")

    host.tools.before = look
    assert switch(host, "--give-up /srv") == 1
    assert is_new(host), "going back has failed"
    host.tools.before, host.sick = lambda argv: None, lambda root: False
    del host.runner.answers[stop]
    former = host.link_inode(OTHER)
    with pytest.raises(AgentError, match="has files that the present one lacks"):
        switch(host, kubelet={"node_ip": "192.0.2.10", "labels": {"other": "yes"}})
    assert host.link_inode(OTHER) == former


@pytest.mark.parametrize("command_line", ["reset", "switch"])
def test_a_machine_that_later_got_the_name_of_a_candidate_is_left_alone(host: NodeHost, command_line: str) -> None:
    """The record of the last candidate is still there. Its root file system is the machine's now."""
    assert switch(host) == 0
    host.file(f"{machine_root(CANDIDATE)}/etc/kept", "text")
    host.file(f"{identity_directory(CANDIDATE)}/kubelet-client-current.pem", "certificate")
    if command_line == "switch":
        found = RECORDS.read(switch_record(MACHINE), host)
        assert found
        RECORDS.write(switch_record(MACHINE), Switch("trying", found.image, found.since), host)
    host.runner.calls.clear()
    if command_line == "reset":
        assert command(node_reconciler(host), "reset", MACHINE, network=host.network) == 0
    else:
        work(node_reconciler(host), host.network)
        assert state(host) == "failed"
    assert ("systemctl", "stop", machine_unit(CANDIDATE)) not in host.runner.calls
    assert host.exists(f"{machine_root(CANDIDATE)}/etc/kept")
    assert host.exists(f"{identity_directory(CANDIDATE)}/kubelet-client-current.pem")


def assert_closed(host: NodeHost) -> None:
    """Whatever root in the machine makes of the directory that is bound: no user of the host comes to its programs."""
    directory = identity_directory(MACHINE)
    os.chmod(host.full_path(directory), 0o777)
    assert host.mode(posixpath.dirname(directory)) == 0o700


def test_users_of_the_host_do_not_reach_what_a_machine_puts_next_to_its_certificates(host: NodeHost) -> None:
    assert_closed(host)


def test_a_new_root_file_system_has_no_certificates_of_an_old_one(host: NodeHost) -> None:
    """A rebuild was killed after it had removed the root file system, and before it removed the certificates."""
    remove = next(number for number, argv in enumerate(rebuilt(host)) if argv[-1:] == (identity_directory(MACHINE),))
    host.write(f"{identity_directory(MACHINE)}/kubelet-client-current.pem", b"certificate")
    kill_at(host, (), remove + 1)
    with pytest.raises(KilledError):
        rebuilt(host)
    host.tools.before = lambda argv: None
    assert not host.exists(ROOT)
    assert host.entries(identity_directory(MACHINE)) == ("kubelet-client-current.pem",)
    assert command(node_reconciler(host), f"up {MACHINE}", network=host.network, ask=host.ask) == 0
    assert host.entries(identity_directory(MACHINE)) == ()


def rebuilt(host: NodeHost) -> list[tuple[str, ...]]:
    """Rebuild the machine, and return which programs ran."""
    host.runner.calls.clear()
    assert command(node_reconciler(host), f"up {MACHINE} --rebuild", network=host.network, ask=host.ask) == 0
    return [*host.runner.calls]


def test_an_interrupted_switch_ends_with_a_node_that_is_uncordoned(host: NodeHost) -> None:
    """The machine has cordoned its node itself. Nobody else would uncordon it."""
    kill_at(host, ("systemctl", "stop", UNITS[0]))
    with pytest.raises(KilledError):
        switch(host)
    host.tools.before = lambda argv: None
    assert was_drained(MACHINE, host)
    assert work(node_reconciler(host), host.network) == ()
    assert (LeaveTask.UNCORDON,) in host.runner.calls
    assert not was_drained(MACHINE, host)
    host.runner.calls.clear()
    assert work(node_reconciler(host), host.network) == ()
    assert (LeaveTask.UNCORDON,) not in host.runner.calls


def test_an_interrupted_switch_leaves_nothing_in_the_handoff(host: NodeHost) -> None:
    """Killed while it passes images, it leaves requests and a pipe. Nothing that looks at them opens the pipe."""
    kill_at(host, ("systemctl", "stop", machine_unit(CANDIDATE)), 2)
    with pytest.raises(KilledError):
        switch(host)
    host.tools.before = lambda argv: None
    left = [each(name) for each in (leave_file, images_pipe) for name in (MACHINE, CANDIDATE)]
    host.make_pipe(*left[2:])
    for path in left[:2]:
        host.write(path, render_leave_request(LeaveRequest("ab", LeaveTask.GIVE_IMAGES, 900.0)))
    before = node_reconciler(host).reconcile()
    assert before.failures == ()
    assert all(host.exists(path) for path in left)
    assert work(node_reconciler(host), host.network) == ()
    assert not any(host.exists(path) for path in left)
    assert state(host) == "failed"


def test_a_switch_ends_even_if_what_it_has_left_cannot_be_looked_for(host: NodeHost) -> None:
    """For example because no file can be made in a full /run."""
    kill_at(host, ("systemctl", "start", "--no-block", UNITS[0]))
    with pytest.raises(KilledError):
        switch(host)
    host.tools.before = lambda argv: None
    lock, pipe = leave_lock_file(CANDIDATE), images_pipe(MACHINE)
    host.remove(lock)
    host.make_directory(lock)
    host.make_pipe(pipe)
    assert work(node_reconciler(host), host.network) == ()
    assert host.bus.properties[host.bus.units[UNITS[0]], "org.freedesktop.systemd1.Unit", "ActiveState"][1] == "active"
    assert state(host) in ("done", "failed")
    assert not host.exists(pipe)


def test_a_former_root_file_system_is_not_forgotten_before_an_interrupted_switch_has_ended(host: NodeHost) -> None:
    before = host.link_inode(ROOT)
    kill_at(host, ("systemctl", "start", "--no-block", UNITS[0]))
    with pytest.raises(KilledError):
        switch(host)
    host.tools.before, host.sick = lambda argv: None, partial(serves_new, host)
    assert host.link_inode(OTHER) == before
    with pytest.raises(AgentError, match="was not switched"):
        switch(host, "--forget")
    assert host.link_inode(ROOT) == before


def test_a_rebuild_ends_a_candidate_that_still_runs(host: NodeHost) -> None:
    """It is not refused when the root file system is gone already."""
    kill_at(host, ("systemctl", "stop", machine_unit(CANDIDATE)), 2)
    with pytest.raises(KilledError):
        switch(host)
    host.tools.before = lambda argv: None
    assert host.exists(machine_root(CANDIDATE))
    rebuilt(host)
    assert host.entries(MACHINE_ROOTS) == (MACHINE,)
    assert_consistent(host)
