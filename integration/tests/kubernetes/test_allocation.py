"""A live node with pods of both kinds is moved from the device plugin to Dynamic Resource Allocation, and back."""

import shlex
import time
from collections.abc import Iterator

import pytest

from integration.bed.cluster.cluster import Cluster, pod
from integration.bed.machine.node import MACHINE
from integration.bed.vm.guest import Completed
from integration.bed.vm.installation import CONFIGURATION
from integration.bed.vm.simulated_host import SimulatedHost
from integration.bed.vm.transfer import HOST_FROM_GUEST
from integration.conftest import READY, Bed
from integration.tests.kubernetes.test_cluster import configure
from integration.tests.kubernetes.test_dra import HOLD, NUMBER, holding, wait_for_devices

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

KUBECONFIG = "/root/admin.kubeconfig"
SECONDS = 900.0
"""The emulated host takes up to a minute for one run of the command, which calls kubectl and makes passes."""


@pytest.fixture
def cluster(simulated_host: SimulatedHost) -> Iterator[Cluster]:
    """A cluster whose node offers no GPUs yet; the host has kubectl and an administrator's kubeconfig."""
    simulated_host.restore(READY)
    simulated_host.guest.set_clock()
    bed = Bed(simulated_host)
    bed.node.run("systemctl", "start", "unbounded-agent-gpu.service")
    with Cluster(simulated_host) as cluster:
        bed.guest.write(KUBECONFIG, cluster.control_plane.kubeconfig(address=HOST_FROM_GUEST).encode(), 0o600)
        bed.run("ln", "-sf", f"/var/lib/machines/{MACHINE}/usr/local/bin/kubectl", "/usr/local/bin/kubectl")
        cluster.apply("runtime-class")
        yield cluster
    simulated_host.pause()


def move(bed: Bed, to: str) -> Completed:
    options = ("--node", MACHINE, "--kubeconfig", KUBECONFIG)
    return bed.agent("kube", "allocation", to, MACHINE, *options, timeout=600, check=False)


def stops_at(bed: Bed, to: str, words: str) -> list[str]:
    """Repeat the command until it stops at a step with these words; return the commands that it names."""
    deadline = time.monotonic() + SECONDS
    while True:
        ended = move(bed, to)
        assert ended.status == 1, ended.stdout
        todo = ended.stdout.partition("to do: ")[2]
        if words in todo.partition("\n")[0]:
            return [line.strip() for line in todo.splitlines()[1:] if line.startswith("     ")]
        assert time.monotonic() < deadline, ended.stdout
        time.sleep(2)


def finish(bed: Bed, to: str) -> None:
    """Repeat the command until nothing is left to do."""
    deadline = time.monotonic() + SECONDS
    while (ended := move(bed, to)).status:
        assert time.monotonic() < deadline, ended.stdout
        time.sleep(2)


def schedulable(cluster: Cluster) -> bool:
    return not cluster.get("node", MACHINE)["spec"].get("unschedulable")


def test_a_node_with_pods_is_moved_there_and_back(cluster: Cluster) -> None:
    """Users end only the pods that the command names. A pod without a GPU does not notice."""
    bed = Bed(cluster.host)
    cluster.deploy_plugin(NUMBER)
    cluster.apply(pod("by-plugin", "sh", "-c", HOLD, gpus=1), pod("plain", "sleep", "infinity"))
    assert holding(cluster, "by-plugin")
    cluster.wait("the other pod runs", lambda: cluster.phase("plain") == "Running")
    plain = cluster.get("pod", "plain")["status"]["containerStatuses"]

    assert stops_at(bed, "dra", "end the pods") == ["kubectl --namespace=default delete pod by-plugin"]
    assert not schedulable(cluster)
    cluster.delete_pods("by-plugin")
    stops_at(bed, "dra", "remove the vendor's device plugin")
    cluster.delete_plugin()
    for command in stops_at(bed, "dra", "make the kubelet forget the plugin"):
        # The rest is words: a line of the configuration.
        if command.startswith(("systemctl --machine", "systemd-run")):
            bed.run(*command.split())
        elif command.startswith("kubectl"):
            cluster.kubectl(*shlex.split(command)[1:])
    configure(bed, f'{CONFIGURATION}allocation = "dra"\n')
    finish(bed, "dra")
    assert schedulable(cluster)
    wait_for_devices(cluster, NUMBER)
    cluster.apply(pod("by-claim", "sh", "-c", HOLD, gpus=1))
    assert holding(cluster, "by-claim")

    assert stops_at(bed, "device-plugin", "end the pods") == ["kubectl --namespace=default delete pod by-claim"]
    cluster.delete_pods("by-claim")
    configure(bed, CONFIGURATION)
    stops_at(bed, "device-plugin", "deploy the vendor's device plugin")
    cluster.deploy_plugin(NUMBER)
    finish(bed, "device-plugin")
    assert schedulable(cluster)
    cluster.apply(pod("by-plugin-again", "sh", "-c", HOLD, gpus=1))
    assert holding(cluster, "by-plugin-again")
    assert cluster.get("pod", "plain")["status"]["containerStatuses"] == plain
