"""The drain of the Node by the machine, and the look for what another root would not have, with an API server."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from agent.dra.claims import ClaimReference, PreparedDevice, render_checkpoint
from agent.machine import leave
from agent.machine.leave import ANSWER, PIPE, REQUEST, fold, is_volume, must_leave
from agent.machine.notes import Owned
from agent.machine.run import run
from agent.model.contract import (
    LOST_LIMIT,
    Effect,
    FencedGpu,
    GpuState,
    GpuStatus,
    LeaveRequest,
    LeaveTask,
    render_gpu_states,
    render_host_status,
    render_leave_request,
)
from agent.model.paths import (
    CONDITIONS_NAME,
    CORDONED_FOR,
    CORDONED_TO_LEAVE,
    DRA_CLAIMS,
    GPU_STATES_NAME,
    MACHINE_HANDOFF_DIRECTORY,
    NODE_CORDON_MARK,
    NODE_FILES,
)
from agent.system.process import Completed
from tests.fakes.api_server import NODES, failure
from tests.fakes.clock import Clock
from tests.fakes.machine import GPUS
from tests.fakes.node import KUBECONFIG, KUBELET, NODE, READY, Node, joined_node

PATH = f"{NODES}/{NODE}"
BUDGET = {"causes": [{"reason": "DisruptionBudget", "message": "The disruption budget web needs 2 healthy pods"}]}


@pytest.fixture
def waiting() -> Iterator[ExitStack]:
    """The command on the host, which waits until this ends."""
    with ExitStack() as until:
        yield until


def publish(node: Node, waiting: ExitStack, task: LeaveTask = LeaveTask.DRAIN, request: str = "ab") -> None:
    """Let the host ask for something."""
    node.stream(REQUEST, (render_leave_request(LeaveRequest(request, task, 60.0)),), until=waiting)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = joined_node(tmp_path / "machine")
    yield node
    for path in [path for path in node.api.objects if path.startswith("/api/v1/namespaces/")]:
        node.api.drop(path)
    node.api.budgets.clear()
    node.api.lingers = False


def pod(node: Node, name: str, *, volumes: tuple[dict[str, Any], ...] = (), on: str = NODE, **metadata: object) -> str:
    """Store a pod, and return its path."""
    about = {"name": name, "namespace": "default", "uid": f"uid-{name}", **metadata}
    path = f"/api/v1/namespaces/default/pods/{name}"
    spec = {"nodeName": on, "volumes": [{"name": f"v{number}", **each} for number, each in enumerate(volumes)]}
    node.api.put(path, {"metadata": about, "spec": spec, "status": {"phase": "Running"}})
    return path


def ask(
    node: Node,
    task: LeaveTask = LeaveTask.DRAIN,
    seconds: float = 60.0,
    request: str = "ab",
    gpus: tuple[str, ...] = (),
) -> Any:  # noqa: ANN401
    """Let the machine work on a request, and return its answer."""
    with ExitStack() as waiting:
        document = render_leave_request(LeaveRequest(request, task, seconds, gpus))
        node.stream(REQUEST, (document,), until=waiting)
        assert leave.run(node) == 0
    return json.loads(node.read(ANSWER))


def evicted(node: Node) -> list[str]:
    return [path.split("/")[-2] for method, path, _, _ in node.api.requests if method == "POST"]


def state(node: Node) -> tuple[bool, dict[str, str]]:
    found = node.api.objects[PATH]
    return found.get("spec", {}).get("unschedulable", False), found["metadata"].get("annotations", {})


def test_the_node_is_cordoned_before_its_pods_are_evicted(node: Node, clock: Clock) -> None:
    names = [f"web-{number:03}" for number in range(120)]
    for name in names:
        pod(node, name)
    pod(node, "elsewhere", on="other")
    node.api.requests.clear()
    answer = ask(node)
    assert (answer["id"], answer["end"], answer["pods"]) == ("ab", "done", 0)
    assert evicted(node) == names
    assert state(node) == (True, {CORDONED_TO_LEAVE: "drain"})
    assert [method for method, *_ in node.api.requests[:3]] == ["GET", "PATCH", "GET"]


@pytest.mark.parametrize(
    ("leaves", "item"),
    [
        (True, {"metadata": {"name": "alone"}}),
        (True, {"metadata": {"ownerReferences": [{"kind": "ReplicaSet", "controller": True}]}}),
        (True, {"metadata": {"ownerReferences": [{"kind": "DaemonSet"}]}}),
        (False, {"metadata": {"ownerReferences": [{"kind": "DaemonSet", "controller": True}]}}),
        (False, {"metadata": {"annotations": {"kubernetes.io/config.mirror": "1"}}}),
        (False, {"metadata": {}, "status": {"phase": "Succeeded"}}),
        (False, {"metadata": {}, "status": {"phase": "Failed"}}),
        (True, {"metadata": {}, "status": {"phase": "Pending"}}),
    ],
)
def test_pods_that_belong_to_the_node_or_have_ended_need_not_leave(leaves: bool, item: dict[str, Any]) -> None:
    assert must_leave(item) is leaves


def test_a_budget_is_asked_again_until_the_limit_and_is_named(node: Node, clock: Clock) -> None:
    pod(node, "web")
    pod(node, "free")
    node.api.budgets["web"] = BUDGET
    answer = ask(node, seconds=21)
    assert (answer["end"], answer["pods"]) == ("failed", 1)
    assert answer["waiting"] == ["default/web: The disruption budget web needs 2 healthy pods"]
    assert answer["message"] == f"pods are left on node {NODE}"
    assert evicted(node).count("free") == 1
    # At 0, 6, 12, 18 s, or later on a busy computer: it is due after 5 s, and pods are looked at every 2 s.
    assert evicted(node).count("web") in (3, 4)
    assert 15 < clock.passed < 26
    node.api.budgets.clear()
    assert ask(node, request="cd")["end"] == "done"


def test_the_server_says_when_to_try_again(node: Node, clock: Clock) -> None:
    pod(node, "web")
    node.api.budgets["web"] = {**BUDGET, "retryAfterSeconds": 10}
    ask(node, seconds=15)
    assert evicted(node) == ["web", "web"]
    node.api.requests.clear()
    # Nobody waits longer than a minute because of it.
    node.api.budgets["web"] = {**BUDGET, "retryAfterSeconds": 3600}
    ask(node, seconds=100, request="cd")
    assert evicted(node) == ["web", "web"]


def test_a_pod_that_ends_is_waited_for_and_not_evicted_again(node: Node, clock: Clock) -> None:
    path = pod(node, "slow")
    node.api.lingers = True
    answer = ask(node, seconds=10)
    assert (answer["end"], answer["waiting"]) == ("failed", ["default/slow: it is ending"])
    assert evicted(node) == ["slow"]
    clock.meanwhile = lambda: node.api.drop(path) if path in node.api.objects else None
    assert ask(node, request="cd")["end"] == "done"


@pytest.mark.parametrize("killed", [False, True])
def test_a_request_that_the_host_withdraws_ends_the_drain(
    node: Node, clock: Clock, waiting: ExitStack, killed: bool
) -> None:
    """So does a command that is killed, and can withdraw nothing: systemd starts the service again, which ends then."""
    pod(node, "web")
    node.api.budgets["web"] = BUDGET
    clock.meanwhile = waiting.close if killed else lambda: node.drop(REQUEST) if node.exists(REQUEST) else None
    publish(node, waiting)
    assert leave.run(node) == 1
    assert clock.passed < 5
    assert state(node)[0], "the host uncordons it"
    assert node.exists(REQUEST) is killed
    node.api.requests.clear()
    assert leave.run(node) == 0
    assert node.api.requests == []


def test_a_request_of_a_command_that_is_gone_is_not_begun(node: Node, waiting: ExitStack) -> None:
    publish(node, waiting)
    waiting.close()
    assert leave.run(node) == 0
    assert not node.exists(ANSWER)
    assert state(node) == (False, {})


def test_a_request_that_is_written_again_goes_on(node: Node, clock: Clock, waiting: ExitStack) -> None:
    """The host does that until it hears that the machine has begun."""
    pod(node, "web")
    node.api.budgets["web"] = BUDGET
    publish(node, waiting)
    clock.meanwhile = lambda: publish(node, waiting) if clock.passed < 20 else node.api.budgets.clear()
    assert leave.run(node) == 0
    assert json.loads(node.read(ANSWER))["end"] == "done"


def test_a_request_that_is_withdrawn_before_it_is_begun_changes_nothing(node: Node, waiting: ExitStack) -> None:
    """The host looks for an answer after that: if there is none, it says that nothing was changed."""
    publish(node, waiting)
    node.before_write = lambda path: node.drop(REQUEST) if path == ANSWER and node.exists(REQUEST) else None
    assert leave.run(node) == 1
    assert json.loads(node.read(ANSWER))["end"] == "working"
    assert state(node) == (False, {})


def test_an_answered_request_is_not_worked_on_again(node: Node) -> None:
    assert ask(node)["end"] == "done"
    pod(node, "late")
    node.api.requests.clear()
    ask(node)
    assert node.api.requests == []


def test_the_answer_says_that_the_work_goes_on(node: Node, clock: Clock) -> None:
    """The host gives up on a machine that says nothing."""
    pod(node, "web")
    node.api.budgets["web"] = BUDGET
    seen = []
    clock.meanwhile = lambda: seen.append(json.loads(node.read(ANSWER))["seconds"])
    ask(node, seconds=30)
    assert len(set(seen)) > 5


def test_without_a_node_nothing_is_changed(node: Node) -> None:
    node.put(KUBECONFIG, "{}")
    assert ask(node)["end"] == "unable"
    node.put(KUBECONFIG, node.api.kubeconfig())
    node.api.answer = lambda method, path: failure(404, "not found") if path == PATH else None
    assert ask(node, request="bc")["end"] == "unable"
    node.api.answer = None
    node.remove_tree("/proc/40")
    answer = ask(node, request="cd")
    assert (answer["end"], answer["message"].split(":")[0]) == (
        "unable",
        "no kubelet is running as a service in this machine",
    )
    assert state(node) == (False, {})


@pytest.mark.parametrize("part", ["/nodes/", "/pods"])
def test_a_server_that_does_not_answer_for_a_time_does_not_end_the_drain(node: Node, clock: Clock, part: str) -> None:
    pod(node, "web")
    node.api.answer = lambda method, path: failure(503, "starting") if clock.passed < 10 and part in path else None
    assert ask(node)["end"] == "done"
    assert clock.passed >= 10
    assert (evicted(node)[-1], state(node)[0]) == ("web", True)


def test_a_refusal_ends_the_drain_at_once(node: Node, clock: Clock) -> None:
    node.api.answer = lambda method, path: failure(403, "not allowed") if "pods" in path else None
    answer = ask(node)
    assert (answer["end"], clock.passed) == ("failed", 0.0)
    assert "not allowed" in answer["message"]


def test_somebody_who_changes_the_node_meanwhile_does_not_end_the_drain(node: Node) -> None:
    refusals = iter([failure(409, "modified")] * 2)
    node.api.answer = lambda method, path: next(refusals, None) if method == "PATCH" else None
    assert ask(node)["end"] == "done"
    assert state(node)[0]


def test_the_cordon_ends_when_the_host_asks_for_it(node: Node) -> None:
    ask(node)
    assert ask(node, LeaveTask.UNCORDON, request="bc")["end"] == "done"
    assert state(node) == (False, {})
    assert not node.exists(NODE_CORDON_MARK)


def test_a_cordon_of_somebody_else_stays(node: Node) -> None:
    node.api.put(PATH, {**node.api.objects[PATH], "spec": {"unschedulable": True}})
    assert ask(node)["end"] == "done"
    assert ask(node, LeaveTask.UNCORDON, request="bc")["end"] == "done"
    assert state(node) == (True, {})


def test_a_cordon_for_a_gpu_does_not_end_during_the_drain_and_follows_it(node: Node) -> None:
    found = node.api.objects[PATH]
    about = {**found["metadata"], "annotations": {CORDONED_FOR: f"{GPUS[0]}=Xid48"}}
    node.api.put(PATH, {**found, "metadata": about, "spec": {"unschedulable": True}})
    ask(node)
    assert state(node) == (True, {CORDONED_TO_LEAVE: "drain"})
    fenced = (FencedGpu(GPUS[0], "Xid48"),)
    node.put(f"{MACHINE_HANDOFF_DIRECTORY}/{CONDITIONS_NAME}", render_host_status(READY, 1e9, fenced=fenced))
    answer = ask(node, LeaveTask.UNCORDON, request="bc")
    assert "stays cordoned for a GPU" in answer["message"]
    assert state(node) == (True, {CORDONED_FOR: "start"})
    assert node.exists(NODE_CORDON_MARK)


def test_a_kubelet_that_is_not_there_yet_is_waited_for(node: Node, clock: Clock) -> None:
    ask(node)
    node.api.answer = lambda method, path: failure(503, "starting") if clock.passed < 10 else None
    assert ask(node, LeaveTask.UNCORDON, request="bc")["end"] == "done"
    assert state(node) == (False, {})
    node.api.answer = lambda method, path: failure(503, "starting")
    assert ask(node, LeaveTask.UNCORDON, 10, request="cd")["end"] == "failed"


# The eviction of the pods that were given some GPUs.

GPU, OTHER_GPU = GPUS[:2]
DEVICE, OTHER_DEVICE = (f"gpu-0000-0{number}-00-0" for number in (1, 2))
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"


def give(node: Node, **claims: tuple[str, ...]) -> None:
    """Give devices to a pod of each name. The device of a monitor begins with `+`."""
    prepared = {}
    for name, devices in claims.items():
        pod(node, name)
        made = [PreparedDevice(("gpu",), NODE, each.lstrip("+"), ("x/y=z",), admin=each[0] == "+") for each in devices]
        prepared[ClaimReference("default", name, f"uid-of-{name}")] = tuple(made)
        consumers = [{"resource": "pods", "name": name, "uid": f"uid-{name}"}, {"resource": "others", "uid": "uid-web"}]
        about = {"name": name, "uid": f"uid-of-{name}"}
        node.api.put(f"{CLAIMS}/{name}", {"metadata": about, "status": {"reservedFor": consumers}})
    node.put(DRA_CLAIMS, render_checkpoint(prepared))
    fence(node, Effect.NO_SCHEDULE)


def fence(node: Node, effect: Effect) -> None:
    states = [GpuStatus(gpu, "nvidia", GpuState.DRAINING, "Detaching", "", effect) for gpu in (GPU, OTHER_GPU)]
    node.put(f"{MACHINE_HANDOFF_DIRECTORY}/{GPU_STATES_NAME}", render_gpu_states(states))


def test_only_pods_that_were_given_the_gpu_are_evicted(node: Node, clock: Clock) -> None:
    parts = (f"{DEVICE}-mig-7-0",)
    give(
        node, whole=(DEVICE,), part=parts, ds=(DEVICE,), web=(OTHER_DEVICE,), monitor=("+" + DEVICE, "+" + OTHER_DEVICE)
    )
    pod(node, "ds", ownerReferences=[{"kind": "DaemonSet", "controller": True}])
    pod(node, "none")
    node.api.requests.clear()
    answer = ask(node, LeaveTask.EVICT, gpus=(GPU,))
    assert (answer["end"], answer["message"], answer["pods"]) == ("done", f"no pod has {GPU}", 0), answer
    assert sorted(evicted(node)) == ["ds", "part", "whole"]
    assert state(node) == (False, {}), "the node is not cordoned"


def test_a_budget_keeps_the_pod_with_the_gpu_until_the_limit(node: Node, clock: Clock) -> None:
    give(node, web=(DEVICE,), free=(DEVICE,))
    node.api.budgets["web"] = BUDGET
    answer = ask(node, LeaveTask.EVICT, 12.0, gpus=(GPU,))
    assert (answer["end"], answer["message"]) == ("failed", f"pods are left on {GPU}")
    assert answer["waiting"] == ["default/web: The disruption budget web needs 2 healthy pods"]
    assert evicted(node).count("free") == 1
    node.api.budgets.clear()
    assert ask(node, LeaveTask.EVICT, request="cd", gpus=(GPU,))["end"] == "done"


def test_no_pod_is_evicted_from_a_gpu_that_new_pods_may_get(node: Node, clock: Clock) -> None:
    """`gpus attach` gives the GPU back although a killed `gpus reset` has left its request."""
    give(node, web=(DEVICE,), free=(DEVICE,))
    node.api.budgets["web"] = BUDGET
    clock.meanwhile = lambda: fence(node, Effect.NONE)
    answer = ask(node, LeaveTask.EVICT, 600.0, gpus=(GPU,))
    assert (answer["end"], answer["message"]) == ("failed", f"new pods may get {GPU}: no more pods are evicted")
    assert clock.passed < 5
    node.api.requests.clear()
    assert ask(node, LeaveTask.EVICT, request="cd", gpus=(GPU,))["end"] == "failed"
    assert evicted(node) == []


@pytest.mark.parametrize("status", [404, 403])
def test_a_claim_that_is_gone_has_no_pods(node: Node, clock: Clock, status: int) -> None:
    give(node, web=(DEVICE,))
    node.api.answer = lambda method, path: failure(status, "no") if path.startswith(CLAIMS) else None
    assert ask(node, LeaveTask.EVICT, gpus=(GPU,))["end"] == "done"
    assert evicted(node) == []


def test_a_claim_that_was_made_again_is_another_one(node: Node, clock: Clock) -> None:
    give(node, web=(DEVICE,))
    found = node.api.objects[f"{CLAIMS}/web"]
    node.api.put(f"{CLAIMS}/web", {**found, "metadata": {**found["metadata"], "uid": "another"}})
    assert ask(node, LeaveTask.EVICT, gpus=(GPU,))["end"] == "done"
    assert evicted(node) == []


# What another root would not have.


@pytest.fixture
def made(node: Node) -> Node:
    """A machine of which `up` made the root, with files of the image."""
    mounts = ("8:1 /machines/x /", "0:2 / /mnt/a\\040disk", "8:1 /machines/x/root /root", "8:1 /carried/x /carried")
    lines = (f"{number} 1 {each} rw,relatime shared:1 - ext4 x rw\n" for number, each in enumerate(mounts))
    node.put("/proc/self/mountinfo", "".join(lines))
    for path in ("/srv/image", "/etc/fstab", "/root/.bashrc", "/mnt/a disk/of/image"):
        node.put(path, "image")
    node.put(NODE_FILES, "{}")
    return node


def lost(node: Node, request: str = "ab") -> list[tuple[str, int, int, str]]:
    answer = ask(node, LeaveTask.LOOK, request=request)
    assert answer["end"] == "done", answer
    return [(each["path"], each["files"], each["size"], each["volume"]) for each in answer["lost"]]


def write(node: Node, path: str, size: int) -> None:
    """Write a file that is newer than the root, whatever the clock's steps."""
    made, number = node.identity(NODE_FILES).ctime_ns, 0
    while not number or node.identity(path).ctime_ns <= made:
        number += 1
        node.put(path, "x" * size)


def test_new_files_are_lost_unless_somebody_makes_them_again(made: Node) -> None:
    write(made, "/srv/data/one", 10)
    write(made, "/srv/data/two", 20)
    write(made, "/srv/image", 7)
    write(made, "/usr/local/bin/tool", 5)
    for path in ("/usr/bin/tool", "/var/lib/kubelet/pki/x", "/var/log/syslog", "/etc/machine-id", "/tmp/x"):
        write(made, path, 3)
    write(made, "/mnt/a disk/data", 100)
    write(made, "/carried/data", 100)
    # The sandbox of the service binds this directory onto itself.
    write(made, "/root/notes/key", 4)
    write(made, "/etc/nvidia-container-runtime/config.toml", 3)
    write(made, KUBECONFIG, 3)
    made.put(KUBECONFIG, made.api.kubeconfig())
    Owned(made).claim("/etc/containerd/conf.d/99-nvidia.toml")
    write(made, "/etc/containerd/conf.d/99-nvidia.toml", 3)
    assert lost(made) == [
        ("/root/notes", 1, 4, ""),
        ("/srv", 1, 7, ""),
        ("/srv/data", 2, 30, ""),
        ("/usr/local/bin", 1, 5, ""),
    ]


def test_volumes_of_pods_are_named_also_where_other_files_do_not_count(made: Node) -> None:
    for path in ("/srv/pv/a/b", "/srv/pv/c", "/var/log/app/x", "/var/log/pods/x", "/data/y"):
        write(made, path, 1)
    paths = ("/", "/var/log", "/var/log/app", "/var/log/pods", "/var/lib/kubelet/plugins", "/mnt/a disk", "/etc")
    pod(made, "web", volumes=tuple({"hostPath": {"path": each}} for each in paths))
    claims: tuple[dict[str, Any], ...] = ({"persistentVolumeClaim": {"claimName": "pv"}}, {"ephemeral": {}})
    pod(made, "db", volumes=(*claims, {"emptyDir": {}}, {"persistentVolumeClaim": {"claimName": "pending"}}))
    claim, volume = "/api/v1/namespaces/default/persistentvolumeclaims/", "/api/v1/persistentvolumes/"
    made.api.put(f"{claim}pv", {"metadata": {}, "spec": {"volumeName": "pv-1"}})
    made.api.put(f"{claim}db-v1", {"metadata": {}, "spec": {"volumeName": "pv-2"}})
    made.api.put(f"{claim}pending", {"metadata": {}, "spec": {}})
    made.api.put(f"{volume}pv-1", {"metadata": {}, "spec": {"local": {"path": "/srv/pv"}}})
    made.api.put(f"{volume}pv-2", {"metadata": {}, "spec": {"csi": {}}})
    assert lost(made) == [
        ("/data", 1, 1, ""),
        ("/srv/pv", 2, 2, "claim default/pv"),
        ("/var/log/app", 1, 1, "pod default/web"),
    ]


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("/srv/data", True),
        ("/usr/local/data", True),
        ("/usr/share/zoneinfo", False),
        ("/var/log/app", True),
        ("/var/log/journal/x", False),
        ("/var", False),
        ("/", False),
        ("/disk/data", False),
        ("/diskette", True),
    ],
)
def test_what_counts_as_a_volume(path: str, counts: bool) -> None:
    assert is_volume(path, frozenset({"/disk"})) is counts


def test_many_directories_become_few(made: Node) -> None:
    for number in range(12 * LOST_LIMIT):
        write(made, f"/srv/data/{number}/x", 2)
    write(made, "/root/x", 1)
    assert lost(made) == [("/root", 1, 1, ""), ("/srv/data", 12 * LOST_LIMIT, 24 * LOST_LIMIT, "")]
    assert fold({"/a": (1, 1), "/b/c/d": (2, 2)}, 2) == {"/a": (1, 1), "/b/c/d": (2, 2)}


def test_a_look_that_does_not_see_all_fails(made: Node) -> None:
    write(made, "/srv/data/one", 10)
    answer = ask(made, LeaveTask.LOOK, seconds=0)
    assert (answer["end"], answer["lost"]) == ("failed", [])
    assert "not all were looked at" in answer["message"]


def test_a_root_of_somebody_else_is_not_looked_at(made: Node) -> None:
    made.drop(NODE_FILES)
    assert ask(made, LeaveTask.LOOK)["end"] == "unable"


# The programs of a node, in its candidate.


@pytest.mark.parametrize(
    ("status", "programs", "end", "message"),
    [
        (0, ("kubelet", "kubectl"), "done", ""),
        (0, ("kubelet",), "done", ""),
        (0, ("kubectl",), "failed", "its root file system has no kubelet"),
        (1, ("kubelet", "kubectl"), "failed", "kubelet --version"),
    ],
)
def test_a_candidate_runs_the_programs_of_a_node(
    node: Node, status: int, programs: tuple[str, ...], end: str, message: str
) -> None:
    node.drop("/usr/local/bin/kubectl")
    for name in programs:
        node.put(f"/usr/local/bin/{name}")
        node.program(name, "x v1.36.3", status)
    node.calls.clear()
    answer = ask(node, LeaveTask.TRY_PROGRAMS)
    assert (answer["end"], message in answer["message"]) == (end, True), answer
    tried = [call for call in node.calls if "systemctl" not in call[0]]
    every = [("kubelet", "--version"), ("kubectl", "version", "--client")]
    assert tried == ([call for call in every if call[0] in programs] if end == "done" else every[:status])


# The images of its containers, for its candidate.

DIGEST = "sha256:" + "ab" * 32
PULLED = "/var/lib/kubelet/image_manager/pulled"
CONTAINERS = "CONTAINER    IMAGE    RUNTIME\n0a    registry.invalid/web:1    io.containerd.runc.v2\n0b    -    x\n"
IMAGES = f"""REF TYPE DIGEST STATUS SIZE UNPACKED
registry.invalid/web:1 application/x {DIGEST} complete (2/2) 8.9 MiB/8.9 MiB true
registry.invalid/web@{DIGEST} application/x {DIGEST} complete (2/2) 8.9 MiB/8.9 MiB true
sha256:{"cd" * 32} application/x {DIGEST} complete (2/2) 8.9 MiB/8.9 MiB true
registry.invalid/unused:1 application/x sha256:{"12" * 32} complete (2/2) 8.9 MiB/8.9 MiB true
"""
WITHOUT_CONTENT = IMAGES.replace("complete (2/2) 8.9 MiB", "incomplete (1/2) 0.1 MiB")


def containerd(
    node: Node, images: str = IMAGES, through_pipe: Callable[[], int] = lambda: 0, options: str = ""
) -> list[str]:
    """Let containerd have these images. Return the commands that use the pipe."""
    used = list[str]()

    def ctr(argv: tuple[str, ...]) -> Completed:
        assert argv[1] == "--namespace=k8s.io"
        said = {"containers": CONTAINERS, "check": images, "export": options}
        return Completed(0, said[argv[2] if argv[2] in said else argv[3]].encode(), b"")

    def shell(argv: tuple[str, ...]) -> Completed:
        used.append(" ".join((argv[2], *argv[4:])))
        return Completed(through_pipe(), b"", b"no space")

    node.program("ctr", ctr)
    node.program("sh", shell)
    return used


def test_the_images_of_containers_go_through_the_pipe_by_all_their_names(node: Node) -> None:
    used = containerd(node)
    answer = ask(node, LeaveTask.GIVE_IMAGES)
    assert (answer["end"], answer["message"]) == ("done", "its candidate has 2 image names of its containers")
    names = f"registry.invalid/web:1 registry.invalid/web@{DIGEST}"
    assert used == [f'exec "$@" >{PIPE} ctr --namespace=k8s.io images export - {names}']


def test_ctr_writes_all_before_it_ends(node: Node) -> None:
    used = containerd(node, options="   --local      Run export locally rather than through transfer API\n")
    assert ask(node, LeaveTask.GIVE_IMAGES)["end"] == "done"
    assert "images export --local - registry.invalid/web:1" in used[0]


def test_a_candidate_takes_what_comes_through_the_pipe(node: Node) -> None:
    used = containerd(node)
    assert ask(node, LeaveTask.TAKE_IMAGES)["end"] == "done"
    assert used == [f'exec "$@" <{PIPE} ctr --namespace=k8s.io images import -']


def test_images_without_content_are_not_waited_for(node: Node) -> None:
    used = containerd(node, WITHOUT_CONTENT)
    answer = ask(node, LeaveTask.GIVE_IMAGES)
    assert answer["end"] == "unable"
    assert "1 image without content (discard_unpacked_layers)" in answer["message"]
    assert not used
    both = f"registry.invalid/old:1 application/x sha256:{'34' * 32} unavailable (0/?) 0.0 B/? false\n"
    containers = f"{CONTAINERS}0c    registry.invalid/old:1    x\n"
    names = ["registry.invalid/web:1", f"registry.invalid/web@{DIGEST}"]
    assert leave.images_of_containers(containers, IMAGES + both, ()) == (names, 1, 0)


@pytest.mark.parametrize(
    ("mapping", "end"),
    [
        ({"registry.invalid/web": {"nodePodsAccessible": True}}, "done"),
        ({"registry.invalid/web": {"kubernetesSecrets": [{"name": "pull"}]}}, "unable"),
        ({"registry.invalid/web": {"nodePodsAccessible": True}, "private.invalid/web": {}}, "unable"),
        (None, "unable"),
    ],
)
def test_an_image_that_needs_a_secret_does_not_become_one_for_all_pods(
    node: Node, mapping: dict[str, object] | None, end: str
) -> None:
    """The candidate's kubelet has no record of it, so it would take it for one that came with the machine."""
    used = containerd(node)
    record = {"kind": "ImagePulledRecord", "imageRef": f"sha256:{'cd' * 32}", "credentialMapping": mapping}
    node.put(f"{PULLED}/sha256-ab", json.dumps(record))
    node.put(f"{PULLED}/sha256-cd.tmp", "{")
    answer = ask(node, LeaveTask.GIVE_IMAGES)
    assert (answer["end"], len(used)) == (end, int(end == "done")), answer
    assert ("1 image that not all pods may use" in answer["message"]) is (end == "unable")


@pytest.mark.parametrize(("root", "end"), [("/data/kubelet", "unable"), ("", "failed")])
def test_the_record_of_who_may_use_an_image_is_the_running_kubelets(node: Node, root: str, end: str) -> None:
    used = containerd(node)
    record = {"kind": "ImagePulledRecord", "imageRef": f"sha256:{'cd' * 32}", "credentialMapping": {}}
    node.put("/data/kubelet/image_manager/pulled/sha256-ab", json.dumps(record))
    # At the default place, a former kubelet's.
    node.put(f"{PULLED}/sha256-ab", "{")
    node.process(40, *KUBELET, f"--root-dir={root}")
    assert ask(node, LeaveTask.GIVE_IMAGES)["end"] == end
    assert not used


def test_without_a_kubelet_nobody_knows_who_may_use_an_image(node: Node) -> None:
    used = containerd(node)
    node.remove_tree("/proc/40")
    assert ask(node, LeaveTask.GIVE_IMAGES)["end"] == "unable"
    assert not used


def test_without_the_record_of_who_may_use_an_image_none_is_passed_on(node: Node) -> None:
    used = containerd(node)
    node.put(f"{PULLED}/sha256-ab", "{")
    assert ask(node, LeaveTask.GIVE_IMAGES)["end"] == "failed"
    assert not used


def test_an_image_without_ctr_passes_nothing_on(node: Node) -> None:
    containerd(node)
    node.drop("/usr/bin/ctr")
    assert ask(node, LeaveTask.GIVE_IMAGES)["message"] == "its image has no ctr"


def test_why_images_were_not_taken_is_said(node: Node) -> None:
    containerd(node, through_pipe=lambda: 1)
    answer = ask(node, LeaveTask.TAKE_IMAGES)
    assert (answer["end"], "no space" in answer["message"]) == ("failed", True)


def test_a_pipe_that_was_left_in_the_handoff_makes_nothing_wait(node: Node) -> None:
    """Nobody may ever write to it."""
    os.mkfifo(node.full_path(PIPE))
    run(node)
    assert ask(node)["end"] == "done"


def test_a_machine_whose_images_are_not_read_says_so(node: Node) -> None:
    """Seen with ctr 1.6.20 and a candidate with a full disk: ctr is killed by SIGPIPE, and prints nothing."""
    containerd(node, through_pipe=lambda: -signal.SIGPIPE)
    answer = ask(node, LeaveTask.GIVE_IMAGES)
    assert (answer["end"], answer["message"]) == ("failed", "its candidate stopped reading its images")


def test_images_do_not_fill_the_disk(node: Node) -> None:
    over = Event()
    containerd(node, through_pipe=lambda: int(over.wait(20)))
    node.free = 0.1
    answer = ask(node, LeaveTask.TAKE_IMAGES)
    over.set()
    assert (answer["end"], answer["message"]) == ("failed", "less than 20% of the disk would be free")


@pytest.mark.parametrize("killed", [False, True])
def test_a_wait_at_the_pipe_ends_when_the_host_withdraws_its_request(
    node: Node, waiting: ExitStack, killed: bool
) -> None:
    """Otherwise, nothing could drain the machine meanwhile."""
    over = Event()

    def waits() -> int:
        waiting.close() if killed else node.drop(REQUEST)
        return int(over.wait(20))

    containerd(node, through_pipe=waits)
    publish(node, waiting, LeaveTask.GIVE_IMAGES)
    assert leave.run(node) == 1
    over.set()


@pytest.mark.parametrize(("task", "name"), [(LeaveTask.GIVE_IMAGES, "ctr"), (LeaveTask.TRY_PROGRAMS, "kubelet")])
def test_a_program_that_hangs_keeps_no_drain_waiting(
    node: Node, waiting: ExitStack, task: LeaveTask, name: str
) -> None:
    """The machine says that it works, and ends when the host withdraws its request."""
    over, ended = Event(), Event()

    def hangs(argv: tuple[str, ...]) -> Completed:
        node.drop(REQUEST)
        over.wait(10)
        ended.set()
        return Completed(0, b"", b"")

    containerd(node)
    node.put(f"/usr/local/bin/{name}")
    node.program(name, hangs)
    publish(node, waiting, task)
    try:
        assert leave.run(node) == 1
        assert not ended.is_set()
    finally:
        over.set()
