"""The condition on the Node, on a simulated machine with listed processes and an API server."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from agent.machine import node_condition
from agent.machine.node_condition import AGAIN_WITHIN, HEARTBEAT, HOST_STATUS, NOTE, TYPE, run_until_current
from agent.machine.notes import Notes
from agent.machine.run import run as run_setup
from agent.model.conditions import ConditionType, Reason, false, true, unknown
from agent.model.contract import SILENT_AFTER
from agent.model.paths import NODE_CONDITION_MARK
from agent.system import api_server
from agent.system.process import Completed
from tests.fakes.api_server import NODES, Object, failure
from tests.fakes.machine import SERVICE
from tests.fakes.node import KUBECONFIG, KUBELET, KUBELETS_OWN, NOW, READY, Node, joined_node

STATUS = f"{NODES}/gpu-node/status"
GOOD = ("PATCH", STATUS, "Bearer good")
"""The request of the kubelet that a unit has started."""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    machine = joined_node(tmp_path / "machine")
    machine.publish_status()
    return machine


def run(node: Node, now: float, *, set_by: float = 0.0) -> tuple[str, str]:
    """Run at this time of a clock that was set by so many seconds, and return the outcome."""
    since_boot = time.monotonic
    with pytest.MonkeyPatch.context() as clocks:
        clocks.setattr(time, "time", lambda: now)
        clocks.setattr(time, "monotonic", lambda: since_boot() + now - NOW - set_by)
        node_condition.run(node)
    return node.outcome()


def test_ready_is_set_with_the_kubelets_identity(node: Node) -> None:
    assert run(node, NOW) == ("True", "Set")
    assert node.requests == [GOOD]
    assert node.object["status"]["capacity"] == {"cpu": "2"}
    assert node.object["status"]["conditions"][:-1] == [KUBELETS_OWN]
    assert node.on_node() == {
        "type": TYPE,
        "status": "True",
        "reason": "AllConditionsTrue",
        "message": "the machine can run GPU workloads",
        "lastHeartbeatTime": "2027-01-15T08:00:00Z",
        "lastTransitionTime": "2027-01-15T07:43:20Z",
    }


def test_only_what_changed_or_is_due_is_sent(node: Node) -> None:
    """If everything were sent, each machine of a large cluster would send a request to the API server every minute."""
    run(node, NOW)
    node.publish_status(evaluated=NOW + 60)
    run(node, NOW + 60)
    assert len(node.patched) == 1
    broken = false(ConditionType.READY, Reason.SPEC_REFUSED, "CDISpecCurrent: no libcuda")
    node.publish_status(broken, NOW + 70, since=NOW + 65)
    run(node, NOW + 70)
    assert node.on_node()["status"] == "False"
    assert node.on_node()["lastTransitionTime"] == "2027-01-15T08:01:10Z"
    changed = node.on_node()["lastTransitionTime"]
    node.publish_status(false(ConditionType.READY, Reason.STOPPED, "another"), NOW + 80)
    run(node, NOW + 80)
    assert (node.on_node()["reason"], node.on_node()["lastTransitionTime"]) == ("Stopped", changed)
    node.publish_status(false(ConditionType.READY, Reason.STOPPED, "another"), NOW + 80 + HEARTBEAT)
    run(node, NOW + 79 + HEARTBEAT)
    assert len(node.patched) == 3
    run(node, NOW + 80 + HEARTBEAT)
    assert len(node.patched) == 4
    assert node.on_node()["lastTransitionTime"] == changed


TESTED = true(ConditionType.GPUS_TESTED, Reason.TESTED, "2 GPUs passed the test")
TESTING = unknown(ConditionType.GPUS_TESTED, Reason.TESTING, "being tested")


def test_that_gpus_were_tested_is_a_condition_of_its_own(node: Node) -> None:
    node.publish_status(READY, NOW, NOW - 1000, TESTING)
    assert run(node, NOW) == ("True", "Set")
    assert node.requests == [GOOD], "one request for both"
    assert (node.on_node()["status"], node.on_node("GPUsTested")["status"]) == ("True", "Unknown")
    node.publish_status(READY, NOW + 60, NOW + 50, TESTED)
    run(node, NOW + 60)
    assert node.on_node("GPUsTested") == {
        "type": "GPUsTested",
        "status": "True",
        "reason": "Tested",
        "message": "2 GPUs passed the test",
        "lastHeartbeatTime": "2027-01-15T08:01:00Z",
        "lastTransitionTime": "2027-01-15T08:01:00Z",
    }
    assert node.on_node()["lastHeartbeatTime"] == "2027-01-15T08:00:00Z", "it has not changed"
    # A host that says nothing, and one whose document is damaged.
    run(node, NOW + 61 + SILENT_AFTER)
    assert (node.on_node()["status"], node.on_node("GPUsTested")["status"]) == ("Unknown", "Unknown")
    assert node.on_node("GPUsTested")["reason"] == "AgentSilent"
    node.put(HOST_STATUS, "{")
    run(node, NOW + 62 + SILENT_AFTER)
    assert node.on_node("GPUsTested")["reason"] == "BadDocument"


@pytest.mark.parametrize("booted", [False, True])
def test_a_condition_that_is_no_longer_configured_is_removed_alone(node: Node, booted: bool) -> None:
    """Also one from before the machine's boot."""
    node.publish_status(READY, NOW, NOW - 1000, TESTED)
    run(node, NOW)
    if booted:
        Notes(node).save(NOTE, {})
    node.publish_status(evaluated=NOW + 60)
    assert run(node, NOW + 60) == ("True", "Set")
    assert [each["type"] for each in node.object["status"]["conditions"]] == ["Ready", TYPE]
    node.publish_status(READY, NOW + 70, NOW - 1000, TESTED)
    run(node, NOW + 70)
    node.drop(HOST_STATUS)
    run(node, NOW + 80)
    assert [each["type"] for each in node.object["status"]["conditions"]] == ["Ready"]


def test_a_change_while_the_condition_is_set_is_set_at_once(node: Node) -> None:
    """The path unit misses it: the timer would set it up to a minute later."""
    later = [false(ConditionType.READY, Reason.SPEC_REFUSED, "no libcuda"), READY]

    def slow(*_: str) -> None:
        if later:
            node.publish_status(later.pop(0), time.time())

    node.api.answer = slow
    node.publish_status(evaluated=time.time())
    run_until_current(node)
    statuses = [each["status"]["conditions"][-1]["status"] for each in node.patched]
    assert statuses == ["True", "False", "True"]


def test_a_host_that_publishes_all_the_time_ends_the_program(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 25.0 * len(node.patched))

    def endless(*_: str) -> tuple[int, Object] | None:
        if len(node.patched) >= 10:
            return failure(500, "it does not end")
        node.publish_status(false(ConditionType.READY, Reason.STOPPED, str(len(node.patched))), time.time())
        return None

    monkeypatch.setattr(api_server, "REQUEST_LIMIT", 1000.0)
    node.api.answer = endless
    node.publish_status(evaluated=time.time())
    run_until_current(node)
    assert len(node.patched) == 1 + AGAIN_WITHIN // 25


def test_a_silent_host_is_unknown_until_it_returns(node: Node) -> None:
    """The Node is never called ready because of old evidence."""
    run(node, NOW)
    run(node, NOW + SILENT_AFTER + 1)
    assert (node.on_node()["status"], node.on_node()["reason"]) == ("Unknown", "AgentSilent")
    assert "2027-01-15T08:00:00Z" in node.on_node()["message"]
    node.publish_status(evaluated=NOW + 400)
    run(node, NOW + 400)
    assert node.on_node()["status"] == "True"
    assert node.on_node()["lastTransitionTime"] == "2027-01-15T08:06:40Z", "it was Unknown in between"


@pytest.mark.parametrize("jump", [-86400.0, 3600.0, 86400.0])
def test_a_clock_that_was_set(node: Node, jump: float) -> None:
    run(node, NOW)
    run(node, NOW + jump + 30, set_by=jump)
    assert node.on_node()["status"] == "True"
    assert len(node.patched) == 2
    node.publish_status(evaluated=NOW + jump + 60)
    run(node, NOW + jump + 60, set_by=jump)
    assert node.on_node()["status"] == "True"
    run(node, NOW + jump + 61 + SILENT_AFTER, set_by=jump)
    assert node.on_node()["reason"] == "AgentSilent"


def test_a_status_from_the_future_proves_nothing(node: Node) -> None:
    node.publish_status(evaluated=NOW + 86400)
    run(node, NOW)
    assert node.on_node()["reason"] == "AgentSilent"


@pytest.mark.parametrize(
    ("document", "named"),
    [
        (b"", "not JSON"),
        (b"[]", "must be an object"),
        ({"version": 2}, "version 2 is unknown"),
        ({"evaluated": float("inf")}, "key evaluated must be a time"),
        ({"evaluated": -1}, "key evaluated must be a time"),
        ({"status": "Maybe"}, "must be one of 'True', 'False', 'Unknown', not 'Maybe'"),
    ],
)
def test_a_document_of_unknown_format(node: Node, document: bytes | dict[str, object], named: str) -> None:
    run(node, NOW)
    good = json.loads(node.read(HOST_STATUS))
    node.put(HOST_STATUS, document if isinstance(document, bytes) else json.dumps(good | document))
    run(node, NOW + 1)
    assert (node.on_node()["status"], node.on_node()["reason"]) == ("Unknown", "BadDocument")
    assert node.outcome() == ("False", "BadDocument")
    assert named in node.outcome_message()


def test_the_condition_is_withdrawn_when_no_longer_configured(node: Node) -> None:
    run(node, NOW)
    node.drop(HOST_STATUS)
    node.drop("/run/unbounded-agent/state/node-condition.json")
    run(node, NOW + 10)
    assert node.object["status"]["conditions"] == [KUBELETS_OWN]
    assert not node.exists(NODE_CONDITION_MARK)
    node.api.requests.clear()
    run(node, NOW + 70)
    assert node.requests == []
    node.publish_status(evaluated=NOW + 80)
    run(node, NOW + 80)
    assert node.on_node()["status"] == "True", "and is set again"


@pytest.mark.parametrize(("status", "removed"), [(404, True), (503, False)])
def test_withdrawal_is_retried_until_it_succeeds(node: Node, status: int, removed: bool) -> None:
    run(node, NOW)
    node.drop(HOST_STATUS)
    node.api.answer = lambda *_: failure(status, "no")
    run(node, NOW + 10)
    assert node.exists(NODE_CONDITION_MARK) is not removed
    assert removed or node.mode(NODE_CONDITION_MARK) == 0o600


def test_a_node_of_another_name_keeps_its_condition(node: Node) -> None:
    """The kubelet's identity has changed: it may not touch the other Node."""
    run(node, NOW)
    node.drop(HOST_STATUS)
    node.process(40, *KUBELET, "--hostname-override=other")
    run(node, NOW + 10)
    assert len(node.patched) == 1
    assert not node.exists(NODE_CONDITION_MARK)


# ---- who the kubelet is


@pytest.mark.parametrize(
    ("arguments", "name", "kubeconfig"),
    [
        (("kubelet", "--kubeconfig", "/a b", "--v=2"), "gpu-node", "/a b"),
        (("/usr/bin/hyperkube", "kubelet", "--kubeconfig=/k"), "gpu-node", "/k"),
        (("kubelet", "--kubeconfig=/old", "--kubeconfig=/k", "--hostname-override", "Worker.1"), "worker.1", "/k"),
        (("kubelet", "--bootstrap-kubeconfig=/b", "--hostname-override=", "--kubeconfig=/k"), "gpu-node", "/k"),
    ],
)
def test_arguments_of_the_kubelet(node: Node, arguments: tuple[str, ...], name: str, kubeconfig: str) -> None:
    node.put(kubeconfig, node.api.kubeconfig(token="another"))
    node.process(40, *arguments)
    run(node, NOW)
    assert node.requests == [("PATCH", f"{NODES}/{name}/status", "Bearer another")]


UNSUPPORTED, INSIDE = "UnsupportedDistribution", "runs in this machine (process 40), with a kubelet "
POD = "0::/kubepods.slice/kubepods-burstable.slice/cri-containerd-1.scope"


@pytest.mark.parametrize(
    "process",
    [
        {"cgroup": POD, "pids": "30\t1"},
        {"cgroup": POD},
        {"cgroup": "0::/kubepods.slice/x.slice/cri-containerd-1.scope/system.slice/kubelet.service"},
        {"cgroup": "0::/kubepods/burstable/pod1/1"},
        {"cgroup": "0::/k8s.io/1"},
        {"cgroup": "1:name=systemd:/kubepods/burstable/pod1/1\n0::/system.slice/containerd.service"},
        {"cgroup": "0::/node.slice/node-kubepods.slice/node-kubepods-pod1.slice"},
        {"cgroup": "0::/system.slice/app.service/libpod-payload-1"},
        {"pids": "30\t1"},
        # `nerdctl run --pid=host`: process ids are the machine's, and a container may name its cgroup as it likes.
        {"parent": 20},
        {"users": "1000\t1000\t1000\t1000"},
        # A setuid program with another name keeps the real user that started it.
        {"users": "1000\t0\t0\t0"},
        {"cgroup": "0::/user.slice/user-0.slice/user@0.service/app.slice/x.service"},
    ],
)
def test_a_kubelet_in_a_container_or_of_another_user_is_not_trusted(node: Node, process: dict[str, Any]) -> None:
    """A kubeconfig can name a program, which would run as root in the machine."""
    node.process(20, "/usr/bin/containerd-shim-runc-v2", cgroup="0::/system.slice/containerd.service")
    # Its parent is the main process of a service, like the parent of a container that a unit starts with podman.
    node.process(30, "kubelet", "--kubeconfig=/home/user/evil", **{"parent": 40, **process})
    run(node, NOW)
    assert node.requests == [GOOD]
    node.drop("/proc/40/cmdline")
    assert run(node, NOW + 1) == ("False", "KubeletNotRunning")


def test_systemd_is_asked_about_the_service_that_starts_the_kubelet_only_after_its_start(node: Node) -> None:
    started_by_k0s(node)
    node.put(KUBECONFIG, node.api.kubeconfig(token="another"))
    for second in (0, 60):
        node.process(30, *KUBELET, cgroup="0::/system.slice/other.service", parent=20)
        assert run(node, NOW + second) == ("True", "Set")
    assert node.requests == [("PATCH", STATUS, "Bearer another")]
    assert node.asked == [("k0sworker.service", "other.service")]
    # k0s has ended, and another process has its id.
    node.process(20, "sleep", cgroup="0::/user.slice")
    node.services()
    assert run(node, NOW + 120) == ("False", "KubeletNotRunning")


def started_by_k0s(node: Node) -> None:
    """RKE2's and k0s's main process starts the kubelet, which k0s puts into another service's cgroup."""
    node.drop("/proc/40/cmdline")
    node.process(20, "/usr/local/bin/k0s", "worker", cgroup="0::/system.slice/k0sworker.service")
    node.process(30, *KUBELET, cgroup="0::/system.slice/other.service", parent=20)
    node.services(20)


@pytest.mark.parametrize("pid", [40, 30], ids=["a kubelet", "a kubelet that a service started"])
def test_a_process_that_gets_the_id_of_the_kubelet_is_not_trusted(node: Node, pid: int) -> None:
    """The kubelet ends while systemd is asked."""
    if pid == 30:
        started_by_k0s(node)
    answer = node.programs["systemctl"]

    def slow(argv: tuple[str, ...]) -> Completed:
        node.process(pid, "kubelet", "--kubeconfig=/evil")
        return answer(argv)

    node.program("systemctl", slow)
    assert run(node, NOW) == ("False", "KubeletNotRunning")
    assert node.requests == []


def test_systemd_is_asked_about_the_kubelet_only_after_its_start(node: Node) -> None:
    """The question of all services made systemd read each of them, every minute.

    With --kubelet-cgroups, no cgroup names the kubelet's service.
    """
    run(node, NOW)
    assert node.asked == [("kubelet.service",)]
    calls = len(node.calls)
    run(node, NOW + 60)
    assert node.calls[calls:] == []
    node.process(40, *KUBELET, cgroup="0::/system.slice")
    run(node, NOW + 120)
    assert node.asked[1:] == [("*.service",)]
    node.process(40, *KUBELET, cgroup="0::/system.slice/other.service")
    run(node, NOW + 180)
    assert node.asked[2:] == [("other.service",), ("*.service",)]
    assert node.outcome() == ("True", "Set")


@pytest.mark.parametrize(
    "change", [{"cgroup": "0::/kubepods/burstable/pod1/1"}, {"users": "1000\t0\t0\t0"}, {"another": "process"}]
)
def test_a_known_kubelet_must_still_be_one(node: Node, change: dict[str, str]) -> None:
    run(node, NOW)
    stat = node.read("/proc/40/stat")
    if "another" in change:
        node.services()
        node.process(40, *KUBELET)
    else:
        node.process(40, *KUBELET, **change)  # type: ignore[arg-type]
        node.put("/proc/40/stat", stat)
    assert run(node, NOW + 60) == ("False", "KubeletNotRunning")


def test_no_process_is_trusted_without_an_answer_of_systemd(node: Node) -> None:
    node.program("systemctl", "", 1, "Failed to connect to bus")
    assert run(node, NOW) == ("False", "KubeletNotRunning")
    assert "Failed to connect to bus" in node.outcome_message()


@pytest.mark.parametrize("name", ["*.service", "--host=evil.service", "@.service"])
def test_a_cgroup_whose_name_a_container_chose_does_not_hide_the_kubelet(node: Node, name: str) -> None:
    node.process(30, *KUBELET, cgroup=f"0::/system.slice/{name}")
    assert run(node, NOW) == ("True", "Set")


@pytest.mark.parametrize("path", ["/etc/default/kubelet", "/usr/bin/kubelet", "./kubelet"])
def test_a_program_with_the_kubelets_name_as_argument_is_not_the_kubelet(node: Node, path: str) -> None:
    """The other program's process id is lower than the kubelet's, so that process is found first."""
    node.process(30, "vi", path, "--kubeconfig=/other")
    run(node, NOW)
    assert node.requests == [GOOD]


@pytest.mark.parametrize(
    ("arguments", "cgroup", "reason", "said"),
    [
        (("kubelet", "--config=/k"), SERVICE, "NoKubeconfig", "not set"),
        (("kubelet", "--kubeconfig=kubelet.conf"), SERVICE, "NoKubeconfig", "a relative path (kubelet.conf)"),
        (("kubelet", "--kubeconfig"), SERVICE, "NoKubeconfig", "not set"),
        (("kubelet", "--kubeconfig=/k", "--hostname-override=--all"), SERVICE, "BadNodeName", "'--all' is not valid"),
        (("kubelet", "--kubeconfig=/k", "--hostname-override=a/b"), SERVICE, "BadNodeName", "'a/b' is not valid"),
        (("sh", "-c", "kubelet --kubeconfig=/k"), SERVICE, "KubeletNotRunning", ""),
        # A kubelet inside another program: no arguments name a kubeconfig, and there is no unit of it to look at.
        # K3s overwrites its arguments with one title, because they may have a token.
        (("/usr/local/bin/k3s agent", "", ""), SERVICE, UNSUPPORTED, f"K3s {INSIDE}"),
        (("/usr/local/bin/k3s", "server"), SERVICE, UNSUPPORTED, f"K3s {INSIDE}"),
        (
            ("/snap/microk8s/7394/kubelite", "--scheduler-args-file=/a", "-b"),
            SERVICE,
            UNSUPPORTED,
            f"MicroK8s {INSIDE}",
        ),
        (("microshift", "run"), SERVICE, UNSUPPORTED, f"MicroShift {INSIDE}"),
        # Programs without one. K3s may also run in a pod: k3d and virtual clusters do that.
        (("/usr/local/bin/k3s", "kubectl", "get", "nodes"), SERVICE, "KubeletNotRunning", ""),
        (("vi", "k3s"), SERVICE, "KubeletNotRunning", ""),
        (("/usr/local/bin/k3s agent",), POD, "KubeletNotRunning", ""),
    ],
)
def test_what_is_no_usable_kubelet_is_named(
    node: Node, arguments: tuple[str, ...], cgroup: str, reason: str, said: str
) -> None:
    node.process(40, *arguments, cgroup=cgroup)
    assert run(node, NOW) == ("False", reason)
    assert said in node.outcome_message()
    assert node.requests == []


# ---- what the API server says


@pytest.mark.parametrize(
    ("answer", "said", "reason"),
    [
        (failure(404, 'nodes "gpu-node" not found'), 'nodes "gpu-node" not found', "NodeNotRegistered"),
        (failure(403, 'node "a" may not modify "x"'), 'node "a" may not modify "x"', "Refused"),
        (failure(400, 'admission webhook "nodes" denied it'), 'admission webhook "nodes" denied it', "Refused"),
        (failure(401, "Unauthorized"), "Unauthorized", "Refused"),
        (failure(409, "the object has been modified"), "the object has been modified", "Refused"),
        (failure(500, "etcdserver: request timed out"), "etcdserver: request timed out", "APIUnreachable"),
        (failure(503, "an error on the server"), "an error on the server", "APIUnreachable"),
        (failure(429, "too many requests"), "too many requests", "APIUnreachable"),
        ((200, b"[]"), "is not an object", "APIUnreachable"),
        ((200, b"<html>proxy</html>"), "is not JSON", "APIUnreachable"),
    ],
)
def test_refusals_are_quoted_and_retried(
    node: Node, answer: tuple[int, Object | bytes], said: str, reason: str
) -> None:
    node.api.answer = lambda *_: answer
    assert run(node, NOW) == ("False", reason)
    assert said in node.outcome_message()
    assert node.requests == [GOOD], "the run does not try again"
    node.api.answer = None
    assert run(node, NOW + 60) == ("True", "Set")


def test_a_deleted_node_is_named_so(node: Node) -> None:
    """The kubelet of a deleted Node does not register it again by itself."""
    run(node, NOW)
    node.api.drop(f"{NODES}/gpu-node")
    assert run(node, NOW + HEARTBEAT) == ("False", "NodeDeleted")
    assert "node gpu-node was deleted: a kubelet registers only when it starts" in node.outcome_message()
    node.register()
    assert run(node, NOW + HEARTBEAT + 60) == ("True", "Set")


def test_an_api_server_that_hangs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_server, "REQUEST_LIMIT", 0.3)

    def late(*_: str) -> tuple[int, Object]:
        time.sleep(1)
        # Not the change itself: by then, another test may look at its Node on this server.
        return failure(503, "late")

    node.api.answer = late
    assert run(node, NOW) == ("False", "APIUnreachable")
    assert node.outcome_message().startswith(f"{KUBECONFIG}: PATCH {STATUS}: no answer from https://127.0.0.1:")


def test_a_kubeconfig_that_cannot_be_used(node: Node) -> None:
    node.put(KUBECONFIG, node.api.kubeconfig(username="admin"))
    assert run(node, NOW) == ("False", "Failed")
    assert "no other kind is supported" in node.outcome_message()
    node.drop("/usr/local/bin/kubectl")
    assert run(node, NOW + 60) == ("False", "NoKubectl")


def test_only_changes_go_to_the_journal(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    run(node, NOW)
    assert "<6>NodeConditionSet True Set" in capsys.readouterr().err
    run(node, NOW + 60)
    assert capsys.readouterr().err == ""


# ---- in the report


LAST = {"ran_at": 1.0, "status": "True", "reason": "Set", "message": ""}
"""The note of a run long ago."""


@pytest.mark.parametrize(
    "changed",
    [{"ran_at": "x"}, {"ran_at": [1]}, {"ran_at": -math.inf}, {"ran_at": time.monotonic(), "status": "Maybe"}],
)
def test_a_damaged_note_counts_as_empty(node: Node, changed: dict[str, object]) -> None:
    Notes(node).save("node-condition", {**LAST, **changed})
    run_setup(node)
    assert node.conditions()["NodeConditionSet"] == ("Unknown", "NotTried")
    assert run(node, NOW) == ("True", "Set")


def test_the_report_has_the_outcome_of_the_last_run(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only if the condition is configured: a host half that does not know it would refuse the report."""
    node.drop(HOST_STATUS)
    run_setup(node)
    assert "NodeConditionSet" not in node.conditions()
    node.publish_status()
    run_setup(node)
    assert node.conditions()["NodeConditionSet"] == ("Unknown", "NotTried")
    node.api.answer = lambda *_: failure(403, "no")
    run(node, NOW)
    run_setup(node)
    assert node.conditions()["NodeConditionSet"] == ("False", "Refused")
    run(node, NOW - SILENT_AFTER - 10)
    run_setup(node)
    assert node.conditions()["NodeConditionSet"] == ("Unknown", "NotTried")
    node.api.answer = None
    node.publish_status(evaluated=time.time())
    node_condition.run(node)
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3600)
    run_setup(node)
    assert node.conditions()["NodeConditionSet"] == ("True", "Set")
