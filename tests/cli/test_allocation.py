"""`kube allocation`: which steps it prints, in which order, which ones it takes itself, and where it stops."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from agent import __version__
from agent.config.settings import Config
from agent.host.allocation import CLAIM_LINES, DIRECTORY, Node, to_dra
from agent.host.reconcile import Reconciler
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import ConfigError, DocumentError
from agent.model.handoff import Report, parse_handoff, render_report
from agent.model.paths import CORDONED_FOR, cordoned_file, handoff_file, report_directory
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, set_up, units
from tests.fakes.host import Host
from tests.fakes.reports import IN_MACHINE

ADMIN = "/root/.kube/config"
NODE = "kube1"
BOOT_ID = "11111111-2222-3333-4444-555555555555"
KUBECTL = ("kubectl", f"--kubeconfig={ADMIN}")
GET = (*KUBECTL, "get", "--output=json")


class Cluster:
    """What kubectl prints, and what the machine reports."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.cordoned = False
        self.annotations: dict[str, str] = {}
        self.capacity = {"cpu": "4", "nvidia.com/gpu": "2"}
        self.allocatable = {"cpu": "4", "nvidia.com/gpu": "2"}
        self.pods: list[dict[str, Any]] = []
        self.claims: list[dict[str, Any]] = []
        self.slices: list[str] = []
        self.advertised = "NoDevicePlugin"
        self.allocation = "device-plugin"

    def publish(self) -> None:
        host = self.host
        node = {
            "metadata": {"name": NODE, "annotations": self.annotations},
            "spec": {"unschedulable": True} if self.cordoned else {},
            "status": {"capacity": self.capacity, "allocatable": self.allocatable},
        }
        slices = {"items": [{"metadata": {"name": name}} for name in self.slices]}
        everywhere, here = "--all-namespaces", f"--field-selector=spec.nodeName={NODE}"
        host.command(*GET, "node", NODE, stdout=json.dumps(node))
        host.command(*GET, "pods", everywhere, here, stdout=json.dumps({"items": self.pods}))
        claims = "".join(map(as_line, self.claims))
        host.command(*KUBECTL, "get", f"--output={CLAIM_LINES}", "resourceclaims", everywhere, stdout=claims)
        driver = f"{here},spec.driver=gpu.unbounded-agent.io"
        host.command(*GET, "resourceslices", driver, stdout=json.dumps(slices))
        for verb in ("cordon", "uncordon"):
            host.command(*KUBECTL, verb, NODE)
        host.command(*KUBECTL, "annotate", "node", NODE, f"{CORDONED_FOR}-")
        host.command(*KUBECTL, "apply", f"--filename={DIRECTORY}/device-class-nvidia.yaml")

    def report(self, agent: Reconciler) -> None:
        agent.reconcile()
        units(self.host, "active")
        handoff = parse_handoff(self.host.read(handoff_file(MACHINE)))
        found = [
            Condition(kind, Status.TRUE, self.advertised if kind is ConditionType.GPUS_ADVERTISED else "Fine", "")
            for kind in (ConditionType.DEVICES_ALLOWED, *IN_MACHINE)
        ]
        report = render_report(Report(handoff.generation, tuple(found), (), BOOT_ID, __version__, {}))
        self.host.write(f"{report_directory(MACHINE)}/report.json", report)

    def run(self, to: str, *machine: str, kubeconfig: str = ADMIN, node: str = NODE) -> int:
        self.publish()
        config = Config.validated({"machines": {MACHINE: {"allocation": self.allocation}}})
        agent = Reconciler(config, self.host, self.host)
        self.report(agent)
        return command(agent, "kube allocation", to, *machine, f"--kubeconfig={kubeconfig}", f"--node={node}")

    def changes(self) -> list[tuple[str, ...]]:
        made = [argv[2:] for argv in self.host.runner.calls if argv[:1] == ("kubectl",) and argv[2] != "get"]
        self.host.runner.calls.clear()
        return made


def pod(name: str, resource: str = "nvidia.com/gpu", *, claim: bool = False, phase: str = "Running") -> dict[str, Any]:
    resources = {"limits": {resource: "1"}}
    status = {"phase": phase} | ({"extendedResourceClaimStatus": {"resourceClaimName": "x"}} if claim else {})
    return {
        "metadata": {"namespace": "team", "name": name},
        "spec": {"containers": [{"name": "main", "resources": resources}]},
        "status": status,
    }


def claim(node: str, driver: str = "gpu.unbounded-agent.io") -> dict[str, Any]:
    results = [{"driver": driver, "pool": node, "device": "gpu-0000-01-00-0", "request": "gpu"}]
    return {
        "metadata": {"namespace": "team", "name": "one"},
        "status": {"allocation": {"devices": {"results": results}}, "reservedFor": [{"resource": "pods", "name": "p"}]},
    }


def as_line(claim: dict[str, Any]) -> str:
    """Return a claim in the form of CLAIM_LINES, as kubectl prints it: a missing key is empty."""
    status = claim.get("status", {})
    results = status.get("allocation", {}).get("devices", {}).get("results", [])
    columns = [[each[key] for each in results] for key in ("driver", "pool")]
    columns.append([each["name"] for each in status.get("reservedFor", [])])
    return "\t".join([claim["metadata"]["namespace"], *map(" ".join, columns)]) + "\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(set_up(Host(tmp_path / "host")))


def last_to_do(capsys: Capture) -> str:
    return capsys.readouterr().out.partition(" to do: ")[2]


def test_without_a_kubeconfig_the_steps_are_printed(cluster: Cluster, capsys: Capture) -> None:
    assert cluster.run("dra", kubeconfig="") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines if line[0] != " "] == list("1234567")
    assert f"     systemctl --machine={MACHINE} stop kubelet" in lines
    assert any(line.endswith("/manifests/device-class-nvidia.yaml") for line in lines)
    assert [line for line in lines if "kubectl patch node" in line and '"RESOURCE":null' in line][1:]
    assert cluster.changes() == []
    assert cluster.run("device-plugin", kubeconfig="") == 0


def test_a_node_without_gpus_has_no_device_classes_to_make() -> None:
    """`kubectl apply` without a file fails."""
    node = Node(NODE, True, False, True, {}, {}, (), (), ())
    steps = to_dra(MACHINE, node, "dra", (), advertised=True)
    assert [step.what for step in steps if not step.done] == [steps[-1].what], "only to let new pods on the node"


def test_a_node_is_moved_step_by_step(cluster: Cluster, capsys: Capture) -> None:
    """Each run takes the steps that it can, and stops at the first one that the user must take."""
    cluster.pods = [pod("train"), pod("done", phase="Succeeded"), pod("web", "cpu"), pod("new", claim=True)]
    assert cluster.run("dra") == 1
    printed = capsys.readouterr().out
    assert "1. done: keep new pods off the node" in printed
    assert "kubectl --namespace=team delete pod train" in printed
    assert printed.count("delete pod") == 1
    assert cluster.changes() == [("cordon", NODE)]
    assert cluster.host.read_text(cordoned_file(MACHINE)) == f"{NODE}\n"
    assert cluster.host.mode(cordoned_file(MACHINE)) == 0o600
    cluster.cordoned, cluster.pods = True, []
    assert cluster.run("dra") == 1
    assert "remove the vendor's device plugin from the node (the node's status still" in last_to_do(capsys)
    # The plugin's pod has ended. The kubelet keeps the capacity for five minutes.
    cluster.allocatable["nvidia.com/gpu"] = "0"
    for cluster.capacity["nvidia.com/gpu"], cluster.allocation in (("2", "dra"), ("0", "device-plugin")):
        assert cluster.run("dra") == 1
        assert "make the kubelet forget the plugin" in (printed := last_to_do(capsys))
        assert patches(printed) == ([] if cluster.capacity["nvidia.com/gpu"] == "0" else [LEFTOVER])
    # A kubelet that was restarted without its checkpoint leaves both as they are.
    cluster.allocatable = cluster.capacity = {"nvidia.com/gpu": "2"}
    assert cluster.run("dra") == 1
    assert "remove the vendor's device plugin" in (printed := last_to_do(capsys))
    assert patches(printed) == [LEFTOVER]
    cluster.allocatable = cluster.capacity = {}
    cluster.allocation = "dra"
    assert cluster.run("dra") == 1
    assert "GPUsAdvertised" in last_to_do(capsys)
    cluster.advertised = "Advertised"
    assert cluster.run("dra") == 0
    assert cluster.changes()[-1] == ("uncordon", NODE)
    assert not cluster.host.exists(cordoned_file(MACHINE))


def test_a_cordon_for_a_gpu_becomes_that_of_the_move(cluster: Cluster) -> None:
    """With Dynamic Resource Allocation, the machine would end it in the middle of the move."""
    cluster.cordoned, cluster.annotations, cluster.pods = True, {CORDONED_FOR: "x"}, [pod("train")]
    assert cluster.run("dra") == 1
    assert cluster.changes() == [("cordon", NODE), ("annotate", "node", NODE, f"{CORDONED_FOR}-")]
    assert cluster.host.exists(cordoned_file(MACHINE))


LEFTOVER = {kind: {"nvidia.com/gpu": None} for kind in ("capacity", "allocatable")}


def patches(printed: str) -> list[object]:
    """Return the changes of a node's status that printed commands make, as a shell and kubectl read them."""
    found = [shlex.split(line)[-1] for line in printed.splitlines() if line.strip().startswith("kubectl patch")]
    return [json.loads(each.removeprefix("--patch="))["status"] for each in found]


@pytest.mark.parametrize("count", ["2k", "1500"])
def test_shared_gpus_may_have_any_count(cluster: Cluster, capsys: Capture, count: str) -> None:
    """The API server writes 2000 as `2k`."""
    cluster.capacity = cluster.allocatable = {"nvidia.com/gpu.shared": count}
    assert cluster.run("dra") == 1
    assert f"(the node's status still has nvidia.com/gpu.shared: {count})" in last_to_do(capsys)


def test_what_gives_no_gpu_stays(cluster: Cluster, capsys: Capture) -> None:
    """NVIDIA's Network Operator offers network devices. Helm charts ask for 0 GPUs."""
    zero = pod("zero")
    zero["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "0"}}
    cluster.pods = [zero, pod("rdma", "nvidia.com/hostdev")]
    cluster.capacity = cluster.allocatable = {"nvidia.com/gpu": "0", "nvidia.com/hostdev": "4"}
    cluster.allocation = "dra"
    assert cluster.run("dra") == 1
    assert "GPUsAdvertised" in last_to_do(capsys)


def test_a_node_that_somebody_else_cordoned_stays_so(cluster: Cluster) -> None:
    cluster.cordoned, cluster.capacity, cluster.allocatable, cluster.allocation = True, {}, {}, "dra"
    cluster.advertised = "Advertised"
    assert cluster.run("dra") == 0
    assert [argv[0] for argv in cluster.changes()] == ["apply"]


def test_a_node_is_moved_back(cluster: Cluster, capsys: Capture) -> None:
    cluster.cordoned, cluster.capacity, cluster.allocatable, cluster.allocation = True, {}, {}, "dra"
    cluster.claims = [claim(NODE), claim("other"), claim(NODE, "another.driver")]
    assert cluster.run("device-plugin") == 1
    assert "kubectl --namespace=team delete pod p" in capsys.readouterr().out
    cluster.claims = [claim("other"), claim(NODE, "another.driver")]
    assert cluster.run("device-plugin") == 1
    assert 'set allocation = "device-plugin"' in last_to_do(capsys)
    cluster.allocation, cluster.slices = "device-plugin", ["kube1-abc"]
    assert cluster.run("device-plugin") == 1
    assert "(it still has kube1-abc)" in last_to_do(capsys)
    cluster.slices = []
    assert cluster.run("device-plugin") == 1
    assert "deploy" in last_to_do(capsys)
    cluster.allocatable = {"nvidia.com/gpu": "2"}
    assert cluster.run("device-plugin") == 0


def test_a_large_cluster_has_many_claims(cluster: Cluster, capsys: Capture) -> None:
    """As JSON, those of a thousand nodes are longer than the output of a program may be."""
    cluster.cordoned, cluster.allocation = True, "dra"
    waiting: dict[str, Any] = {"metadata": {"namespace": "team", "name": "new"}, "status": {}}
    text = {"metadata": {"namespace": "a", "name": "b", "annotations": {"x": "y" * 2500}}, "status": {}}
    cluster.claims = [waiting, *([claim("other") | text] * 8000), claim(NODE)]
    assert cluster.run("device-plugin") == 1
    assert "kubectl --namespace=team delete pod p" in last_to_do(capsys)


def test_the_machine_and_its_node_must_be_known(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="machine other is not configured"):
        cluster.run("dra", "other")
    with pytest.raises(ConfigError, match="--node NODE"):
        cluster.run("dra", node="")
    cluster.pods = [{"metadata": {}, "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}]
    with pytest.raises(DocumentError, match="kubectl printed an object of an unexpected form"):
        cluster.run("dra")
