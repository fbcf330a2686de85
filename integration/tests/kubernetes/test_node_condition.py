"""The condition on the Node, on a real API server: with a kubelet's identity, NodeRestriction and kubectl.

No virtual machine is needed: integration/bed/machine/node_namespace.py says what stands in for the machine.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.cli.doctor.machines import remedy
from agent.host.allocation import CORDONED, UNSCHEDULABLE
from agent.model.conditions import ConditionType, Reason, false, true
from agent.model.contract import FencedGpu
from agent.model.paths import CORDONED_FOR
from integration.bed.cluster.control_plane import ControlPlane, node_user
from integration.bed.machine.node_namespace import NodeNamespace
from integration.bed.process import CommandError

pytestmark = pytest.mark.scenario("002")

NODE, OTHER, GPU = "gpu-node", "other-node", "0000:01:00.0"
GOOD = true(ConditionType.READY, Reason.ALL_CONDITIONS_TRUE, "the machine can run GPU workloads")
BAD = false(
    ConditionType.READY,
    Reason.SPEC_REFUSED,
    "CDISpecCurrent: the new CDI specification from nvidia-ctk failed the check: “libcuda”",
)
KUBELETS_OWN = {
    "type": "Ready",
    "status": "True",
    "reason": "KubeletReady",
    "message": "kubelet is posting ready status",
}

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    with ControlPlane([NODE, OTHER], controllers=False) as control_plane:
        yield control_plane


@pytest.fixture
def nodes(control_plane: ControlPlane) -> Iterator[None]:
    """Two Nodes as kubelets register them, with fields that others have set."""
    for name in (NODE, OTHER):
        metadata = {"name": name, "labels": {"example.com/rack": "7"}, "annotations": {"example.com/note": "x"}}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": metadata,
            "spec": {"taints": [{"key": "example.com/gpu", "effect": "NoSchedule"}]},
            "status": {"conditions": [KUBELETS_OWN], "capacity": {"nvidia.com/gpu": "8"}},
        }
        control_plane.kubectl("create", "--filename=-", stdin=json.dumps(node))
    yield
    control_plane.kubectl("delete", "node", NODE, OTHER, "--ignore-not-found")


@pytest.fixture
def machine(control_plane: ControlPlane, tmp_path: Path) -> NodeNamespace:
    return NodeNamespace(tmp_path / "machine", control_plane.binaries / "kubectl")


@pytest.fixture
def kubeconfig(control_plane: ControlPlane, tmp_path: Path) -> str:
    """The option that names the kubeconfig of NODE's kubelet."""
    return f"--kubeconfig={control_plane.write_kubeconfig(node_user(NODE), tmp_path / 'kubelet.conf')}"


def look(control_plane: ControlPlane, name: str = NODE) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the Node without our condition and without what changes by itself; and our condition."""
    node: dict[str, Any] = json.loads(control_plane.kubectl("get", "node", name, "--output=json"))
    for key in ("managedFields", "resourceVersion"):
        node["metadata"].pop(key, None)
    conditions = node["status"]["conditions"]
    ours = [each for each in conditions if each["type"] == "GPUReady"]
    node["status"]["conditions"] = [each for each in conditions if each["type"] != "GPUReady"]
    return node, ours[0] if ours else None


@pytest.mark.usefixtures("nodes")
def test_condition_is_set_updated_and_removed_and_nothing_else_is_touched(
    control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str, record_property: Record
) -> None:
    version = json.loads(control_plane.kubectl("version", "--output=json"))["serverVersion"]["gitVersion"]
    record_property("Kubernetes", version.removeprefix("v"))
    before, none = look(control_plane)
    other_before = look(control_plane, OTHER)
    assert none is None
    machine.publish_status(GOOD)
    machine.run(kubeconfig)
    assert machine.reported()[:2] == ("True", "Set")
    node, ours = look(control_plane)
    assert node == before
    assert ours is not None
    assert (ours["status"], ours["reason"], ours["message"]) == ("True", GOOD.reason, GOOD.message)
    machine.publish_status(BAD)
    machine.run(kubeconfig)
    node, ours = look(control_plane)
    assert node == before
    assert ours is not None
    assert (ours["status"], ours["reason"], ours["message"]) == ("False", BAD.reason, BAD.message)
    described = control_plane.kubectl("describe", "node", NODE)
    assert BAD.message in next(line for line in described.splitlines() if "GPUReady" in line)
    machine.withdraw()
    machine.boot()
    machine.run(kubeconfig)
    assert look(control_plane) == (before, None)
    assert look(control_plane, OTHER) == other_before


@pytest.mark.usefixtures("nodes")
def test_events_of_the_node_say_what_happened_to_its_gpus(
    control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str
) -> None:
    """With the kubelet's identity, which may write Events, but not read them."""

    def events() -> list[tuple[str, str, str, int]]:
        selected = "--field-selector=source=unbounded-agent"
        found = control_plane.kubectl("get", "events", selected, "--sort-by=.firstTimestamp", "--output=json")
        ours = json.loads(found)["items"]
        assert {each["involvedObject"]["name"] for each in ours} <= {NODE}
        return [(each["type"], each["reason"], each["message"], each["count"]) for each in ours]

    # Those of other tests.
    control_plane.kubectl("delete", "events", "--all")
    for status in (GOOD, BAD, BAD, GOOD, BAD):
        machine.publish_status(status)
        machine.run(kubeconfig)
    refused = ("Warning", BAD.reason, f"GPUReady is False: {BAD.message}", 2)
    assert events() == [refused, ("Normal", GOOD.reason, f"GPUReady is True: {GOOD.message}", 1)]
    described = control_plane.kubectl("describe", "node", NODE).partition("Events:")[2]
    assert f"GPUReady is False: {BAD.message}" in described
    with pytest.raises(CommandError, match="cannot list resource"):
        control_plane.kubectl("get", "events", user=node_user(NODE))


@pytest.mark.usefixtures("nodes")
def test_the_nodes_identity_may_cordon_and_uncordon_its_own_node_and_no_more(
    control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str
) -> None:
    before, _ = look(control_plane)
    other_before = look(control_plane, OTHER)
    with pytest.raises(CommandError, match="is not allowed to modify taints"):
        control_plane.kubectl("taint", "node", NODE, "gpu=bad:NoSchedule", user=node_user(NODE))
    with pytest.raises(CommandError, match=r"is not allowed to modify node|cannot read"):
        control_plane.kubectl("cordon", OTHER, user=node_user(NODE))
    machine.offer(GPU)
    machine.publish_status(GOOD, fenced=(FencedGpu(GPU, "Xid48"),))
    machine.run(kubeconfig)
    assert control_plane.kubectl(*UNSCHEDULABLE, NODE).strip() == f"{CORDONED}{GPU}=Xid48"
    node, ours = look(control_plane)
    assert node["spec"].pop("unschedulable") is True
    assert node["metadata"]["annotations"].pop(CORDONED_FOR) == f"{GPU}=Xid48"
    assert (node, ours and ours["status"]) == (before, "True")
    # Somebody else's is not lifted.
    control_plane.kubectl("annotate", "node", NODE, f"{CORDONED_FOR}-")
    machine.run(kubeconfig)
    machine.publish_status(GOOD)
    machine.run(kubeconfig)
    assert control_plane.kubectl(*UNSCHEDULABLE, NODE).strip() == CORDONED
    control_plane.kubectl("annotate", "node", NODE, f"{CORDONED_FOR}=start")
    machine.publish_status(GOOD, fenced=(FencedGpu(GPU, "Xid48"),))
    machine.run(kubeconfig)
    machine.withdraw()
    machine.boot()
    machine.run(kubeconfig)
    assert look(control_plane) == (before, None)
    assert look(control_plane, OTHER) == other_before


@pytest.mark.usefixtures("nodes")
def test_unchanged_status_is_a_heartbeat_every_five_minutes(
    control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str
) -> None:
    machine.publish_status(GOOD)
    machine.run(kubeconfig)
    _, first = look(control_plane)
    # Kubernetes stores whole seconds.
    time.sleep(1.1)
    machine.publish_status(GOOD)
    machine.run(kubeconfig)
    assert look(control_plane)[1] == first, "nothing was sent"
    machine.age_notes(301)
    machine.run(kubeconfig)
    _, second = look(control_plane)
    assert first is not None
    assert second is not None
    assert second["lastHeartbeatTime"] > first["lastHeartbeatTime"]
    assert second["lastTransitionTime"] == first["lastTransitionTime"]


@pytest.mark.usefixtures("nodes")
def test_silent_host_makes_it_unknown(control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str) -> None:
    machine.publish_status(GOOD)
    machine.run(kubeconfig)
    # The notes would show that the status is newer than the last run.
    machine.boot()
    machine.publish_status(GOOD, evaluated=time.time() - 301)
    machine.run(kubeconfig)
    _, ours = look(control_plane)
    assert ours is not None
    assert (ours["status"], ours["reason"]) == ("Unknown", "AgentSilent")


@pytest.mark.usefixtures("nodes")
def test_what_others_set_meanwhile_stays(control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str) -> None:
    """The kubelet's patches and ours do not undo each other."""
    machine.publish_status(GOOD)
    machine.run(kubeconfig)
    kubelets = {**KUBELETS_OWN, "status": "False", "reason": "KubeletNotReady", "message": "PLEG is not healthy"}
    patch = json.dumps({"status": {"conditions": [kubelets]}})
    control_plane.kubectl("patch", "node", NODE, "--subresource=status", "--type=strategic", f"--patch={patch}")
    control_plane.kubectl("label", "node", NODE, "example.com/rack=8", "--overwrite")
    before, ours = look(control_plane)
    assert ours is not None, "the kubelet's patch leaves ours alone"
    machine.publish_status(BAD)
    machine.run(kubeconfig)
    after, ours = look(control_plane)
    assert after == before
    assert ours is not None
    assert ours["status"] == "False"


@pytest.mark.usefixtures("nodes")
def test_another_nodes_name_is_refused_and_reported(
    control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str
) -> None:
    """The kubelet's --hostname-override does not match its credentials."""
    before = look(control_plane, OTHER)
    machine.publish_status(GOOD)
    journal = machine.run(kubeconfig, f"--hostname-override={OTHER}")
    status, reason, message = machine.reported()
    assert (status, reason) == ("False", "Refused")
    assert f'node "{NODE}" is not allowed to modify node "{OTHER}"' in message
    assert message in journal
    assert look(control_plane, OTHER) == before
    machine.run(kubeconfig)
    assert machine.reported()[:2] == ("True", "Set")


def test_node_that_has_not_registered(control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str) -> None:
    """The kubelet creates its Node; the agent never does."""
    machine.publish_status(GOOD)
    machine.run(kubeconfig)
    assert machine.reported()[:2] == ("False", "NodeNotRegistered")
    assert control_plane.kubectl("get", "nodes", "--output=name") == ""
    machine.withdraw()
    journal = machine.run(kubeconfig)
    assert "NotApplicable" in journal, "without the Node there is nothing to withdraw"


@pytest.mark.usefixtures("nodes")
def test_wrong_credentials_and_addresses(control_plane: ControlPlane, machine: NodeNamespace, tmp_path: Path) -> None:
    text = control_plane.kubeconfig(node_user(NODE))
    token = json.loads(text)["users"][0]["user"]["token"]
    machine.publish_status(GOOD)
    for wrong, reason in (
        (text.replace(token, "0" * 32), "Refused"),
        # Nothing listens on the discard port.
        (text.replace(f":{control_plane.port}", ":9"), "APIUnreachable"),
        ("{", "Failed"),
    ):
        path = tmp_path / "wrong.conf"
        path.write_text(wrong)
        machine.run("--kubeconfig", str(path))
        assert machine.reported()[:2] == ("False", reason), machine.reported()
    assert look(control_plane)[1] is None


@pytest.mark.usefixtures("nodes")
def test_doctors_question_whether_the_kubelet_may_set_it(control_plane: ControlPlane) -> None:
    """The answer is yes for a kubelet's own Node, so a no shows the fault that `Refused` reports."""
    (command,) = remedy(ConditionType.NODE_CONDITION_SET, Reason.REFUSED)
    program, *arguments = command.format(node=NODE).split()
    assert program == "kubectl"
    assert control_plane.kubectl(*arguments).strip() == "yes"
    without_group = [each for each in arguments if not each.startswith("--as-group")]
    with pytest.raises(CommandError, match="no"):
        control_plane.kubectl(*without_group)
