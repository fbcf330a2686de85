"""A node that `up` made drains itself, with a real kubelet, scheduler and disruption controller.

It also says what another root would not have: on a node that has served pods and nothing else, that is nothing.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.model.paths import machine_root
from integration.bed.cluster.cluster import pod
from integration.bed.cluster.empty_host import NODE, EmptyHost, pod_network
from integration.bed.machine.node import MACHINE, Node
from integration.bed.vm.simulated_host import SimulatedHost
from integration.conftest import INSTALLED

pytestmark = [pytest.mark.scenario("003"), pytest.mark.exhaustive]

CALL = """
import sys
from agent.host.leave import {names}
from agent.model.errors import AgentError
from agent.system.files import System
from agent.system.process import host_runner
try:
    {call}
except AgentError as error:
    sys.exit(str(error))
"""


KILLED = f"""
unbounded-agent stop {MACHINE} >/var/tmp/stop.log 2>&1 & pid=$!
unit="--machine={MACHINE} unbounded-agent-leave.service"
for _ in $(seq 600); do grep -q 'pods* to leave' /var/tmp/stop.log && break; sleep 0.1; done
grep -q 'pods* to leave' /var/tmp/stop.log || {{ cat /var/tmp/stop.log; exit 3; }}
kill -KILL $pid; began=$(date +%s%N)
for _ in $(seq 300); do
    case $(systemctl show --property=ActiveState --value $unit) in inactive) break;; esac
    sleep 0.1
done
test "$(systemctl show --property=ActiveState --value $unit)" = inactive || exit 4
test -e /var/lib/unbounded-agent/machines/{MACHINE}/handoff/leave.json || exit 5
echo $(( ($(date +%s%N) - began) / 1000000 ))e-3
"""
"""Kills a command while its machine evicts pods, and waits until that ends."""


@pytest.fixture(scope="module")
def empty_host(simulated_host: SimulatedHost) -> Iterator[EmptyHost]:
    """The host that other tests have booted, with a node that `up` made, which has run a pod on a GPU."""
    simulated_host.restore(INSTALLED)
    # For the certificates.
    simulated_host.guest.set_clock()
    simulated_host.guest.run(["rm", "--recursive", machine_root(MACHINE)])
    with EmptyHost(running=simulated_host) as host:
        host.guest.run(["unbounded-agent", "up"], timeout=1500)
        host.apply(pod_network())
        host.wait("the node is Ready", host.nodes_are_ready)
        host.offer_gpus()
        host.run_gpu_pod()
        yield host
    simulated_host.pause()


@pytest.fixture(autouse=True)
def _alone(empty_host: EmptyHost) -> Iterator[None]:
    """Delete what a test has made."""
    yield
    empty_host.kubectl(
        "delete", "deployments,pods,poddisruptionbudgets,persistentvolumeclaims,persistentvolumes", "--all"
    )


def call(host: EmptyHost, names: str, text: str) -> str:
    """Run a line with these names of agent.host.leave on the host, and return what it prints, errors too."""
    python = '"$(dirname "$(readlink -f /usr/bin/unbounded-agent)")/python" -c "$0"'
    script = CALL.format(names=names, call=text)
    finished = host.guest.run(["sh", "-c", python, script], timeout=400, check=False)
    return finished.stdout + finished.stderr


def lost(host: EmptyHost) -> list[str]:
    line = f'for each in lines(what_is_lost("{MACHINE}", System(host_runner))): print(each)'
    return call(host, "lines, what_is_lost", line).splitlines()


def deployment(name: str) -> dict[str, Any]:
    labels = {"app": name}
    template = pod(name, "sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1; done", pull="IfNotPresent")
    spec = {**template["spec"], "restartPolicy": "Always"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}},
    }


def budget(name: str) -> dict[str, Any]:
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": name}}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name}, "spec": spec}


def phases(host: EmptyHost, namespace: str = "default") -> dict[str, str]:
    """Return the phase of each pod that nobody has asked to end, by the start of its name."""
    pods = json.loads(host.kubectl(f"--namespace={namespace}", "get", "pods", "--output=json"))["items"]
    alive = [each for each in pods if "deletionTimestamp" not in each["metadata"]]
    return {each["metadata"]["name"].partition("-")[0]: each["status"]["phase"] for each in alive}


def is_cordoned(host: EmptyHost) -> bool:
    return bool(host.get("node", NODE)["spec"].get("unschedulable"))


def test_a_new_node_has_nothing_that_another_root_would_not_have(
    empty_host: EmptyHost, measured: Callable[[str, object], None]
) -> None:
    before = time.monotonic()
    assert lost(empty_host) == []
    measured("seconds to look", f"{time.monotonic() - before:.1f}")


def test_files_and_volumes_that_another_root_would_not_have(empty_host: EmptyHost) -> None:
    node = Node(empty_host.guest)
    writes = pod("writes", "sh", "-c", "echo x >/data/x; echo y >/claimed/y", pull="IfNotPresent")
    writes["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "data", "mountPath": "/data"},
        {"name": "claimed", "mountPath": "/claimed"},
    ]
    writes["spec"]["volumes"] = [
        {"name": "data", "hostPath": {"path": "/var/log/app", "type": "DirectoryOrCreate"}},
        {"name": "claimed", "persistentVolumeClaim": {"claimName": "claimed"}},
    ]
    node.run("mkdir", "-p", "/srv/volume")
    size = {"storage": "1Mi"}
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [
        {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
    ]}]}}  # fmt: skip
    volume = {
        "capacity": size,
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "manual",
        "nodeAffinity": affinity,
    }
    claim = {"accessModes": ["ReadWriteOnce"], "storageClassName": "manual", "resources": {"requests": size}}
    for kind, name, spec in (
        ("PersistentVolume", "volume", {**volume, "local": {"path": "/srv/volume"}}),
        ("PersistentVolumeClaim", "claimed", claim),
    ):
        empty_host.apply({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec})
    empty_host.apply(writes)
    empty_host.wait("the pod has written", lambda: phases(empty_host).get("writes") == "Succeeded")
    node.shell("mkdir -p /root/notes && echo secret >/root/notes/key && chmod 700 /root/notes")
    assert lost(empty_host) == [
        "/root/notes: 1 file, 0.0 MB",
        "/srv/volume: 1 file, 0.0 MB (claim default/claimed)",
        "/var/log/app: 1 file, 0.0 MB (pod default/writes)",
    ]


def test_a_budget_keeps_the_node_and_then_lets_it_go(
    empty_host: EmptyHost, measured: Callable[[str, object], None]
) -> None:
    """The first drain ends at its limit, and the pod runs on. When the budget is gone, `restart` drains and returns."""
    alone = pod("alone", "sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1; done", pull="IfNotPresent")
    empty_host.apply(deployment("web"), budget("web"), alone)
    running = {"web": "Running", "alone": "Running"}
    empty_host.wait("the pods run", lambda: phases(empty_host) == running)
    drain = f'drain("{MACHINE}", System(host_runner), print, 30)'
    said = call(empty_host, "drain", drain)
    assert "machine gpu-node: machine says: pods are left on node simulated-gpu-host: default/web-" in said
    assert "The disruption budget web needs 1 healthy pods and has 1 currently" in said
    assert (is_cordoned(empty_host), phases(empty_host)) == (True, {"web": "Running"})
    before = time.monotonic()
    killed = empty_host.guest.run(["sh", "-c", KILLED], timeout=300, check=False)
    assert killed.status == 0, killed.stdout + killed.stderr
    measured("seconds from the kill of a drain to its end in the machine", killed.stdout.split()[-1])
    empty_host.kubectl("delete", "pdb", "web")
    time.sleep(15)
    assert phases(empty_host) == {"web": "Running"}, "the machine would have evicted it by now"
    before = time.monotonic()
    empty_host.guest.run(["unbounded-agent", "restart", MACHINE], timeout=900)
    measured("seconds to drain and restart", f"{time.monotonic() - before:.0f}")
    assert not is_cordoned(empty_host)
    empty_host.wait("the pod is back", lambda: phases(empty_host) == {"web": "Running"})
    assert phases(empty_host, "kube-system")["bed"] == "Running"


def test_files_are_moved_out_of_the_root_and_outlive_it(empty_host: EmptyHost) -> None:
    """`status` says how, and the commands are run as it says."""
    node, status = Node(empty_host.guest), ["unbounded-agent", "status", "--wide", MACHINE]
    node.shell("rm -rf /srv/volume /root/notes")
    node.shell("mkdir -p /srv/data/deep && echo kept >/srv/data/deep/file && chmod 750 /srv/data")
    config = empty_host.configuration(settings='carry = ["/srv/data", "/srv/new"]')
    empty_host.guest.write("/etc/unbounded-agent/config.toml", config.encode())
    empty_host.guest.run(["unbounded-agent", "apply"], timeout=300)
    said = " ".join(empty_host.guest.run(status, check=False).stdout.split())
    assert "/srv/data of node.carry (its files are still in the machine's root: run" in said, said
    commands = said.partition("/srv/data of node.carry")[2].partition("/srv/new of")[0].split("`")[1::2]
    assert [each.split()[0] for each in commands] == ["unbounded-agent", "mkdir", "systemd-nspawn", "unbounded-agent"]
    for each in commands:
        empty_host.guest.run(["sh", "-c", each], timeout=900)
    assert "node.carry (its files" in empty_host.guest.run(status, check=False).stdout, "of /srv/new"
    assert node.shell("cat /srv/data/deep/file; stat -c %a /srv/data").stdout.split() == ["kept", "750"]
    node.shell("echo new >/srv/data/new")
    assert lost(empty_host) == []
    kept = "/var/lib/unbounded-agent/carried/gpu-node/srv%2Fdata/new"
    assert empty_host.guest.read(kept) == b"new\n"
