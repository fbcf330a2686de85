"""Two machines on one host join as two nodes, the second with a network of its own, each with half of the GPUs."""

import json
from collections.abc import Iterator

import pytest

from integration.bed.cluster.empty_host import NODE, EmptyHost, pod_network
from integration.bed.machine.node import MACHINE, Node

pytestmark = [pytest.mark.scenario("003"), pytest.mark.exhaustive]

SECOND_MACHINE, SECOND = "gpu-node-2", "second-node"
CONFIG = "/etc/unbounded-agent/config.toml"
GPUS = 4
NETWORK = f"[machines.{SECOND_MACHINE}.nspawn]\nvirtual_ethernet = true\n"


@pytest.fixture(scope="module")
def empty_host() -> Iterator[EmptyHost]:
    with EmptyHost(NODE, SECOND, memory_mib=6144) as host:
        # It gives the second machine an address, and translates it to the host's (80-container-ve.network).
        host.guest.run(["systemctl", "unmask", "systemd-networkd.service"])
        host.guest.run(["systemctl", "start", "systemd-networkd.service"])
        yield host


def configured(host: EmptyHost, network: str) -> bytes:
    first, second = (f'[machines.{name}]\ngpus = "count={GPUS}"\n' for name in (MACHINE, SECOND_MACHINE))
    tables = (first, host.configuration(), second, network, host.configuration(SECOND_MACHINE, f'name = "{SECOND}"'))
    return "\n".join(tables).encode()


def test_two_kubelets_on_the_hosts_network_are_refused(empty_host: EmptyHost) -> None:
    empty_host.guest.write(CONFIG, configured(empty_host, ""))
    refused = empty_host.guest.run(["unbounded-agent", "up"], timeout=300, check=False)
    assert refused.status == 1
    assert "their kubelets would need the same ports" in refused.stdout
    assert f"machines.{SECOND_MACHINE}.nspawn.virtual_ethernet = true" in refused.stdout
    assert MACHINE not in empty_host.guest.run(["ls", "-A", "/var/lib/machines"]).stdout


def test_two_machines_join_as_two_nodes(empty_host: EmptyHost) -> None:
    empty_host.guest.write(CONFIG, configured(empty_host, NETWORK))
    made = empty_host.guest.run(["unbounded-agent", "up", "--json"], timeout=2400)
    result = json.loads(made.stdout.splitlines()[-1])
    names = {name: machine["node"] for name, machine in result["machines"].items()}
    assert names == {MACHINE: NODE, SECOND_MACHINE: SECOND}
    empty_host.apply(pod_network())
    empty_host.wait("both nodes are Ready", empty_host.nodes_are_ready)
    empty_host.offer_gpus(GPUS)


def test_the_second_node_has_an_address_of_its_own(empty_host: EmptyHost) -> None:
    addresses = {
        node: {each["address"] for each in empty_host.get("node", node)["status"]["addresses"]} - {NODE, SECOND}
        for node in (NODE, SECOND)
    }
    assert all(addresses.values())
    assert not addresses[NODE] & addresses[SECOND]
    servers = Node(empty_host.guest, SECOND_MACHINE).run("cat", "/etc/resolv.conf").stdout
    assert "nameserver" in servers
    assert "127.0.0.53" not in servers


def test_one_node_can_go_while_the_other_stays(empty_host: EmptyHost) -> None:
    """The host keeps its settings until the last one is gone."""
    empty_host.guest.run(["unbounded-agent", "reset", SECOND_MACHINE], timeout=600)
    assert empty_host.guest.read("/proc/sys/vm/overcommit_memory").strip() == b"1"
    assert Node(empty_host.guest).run("systemctl", "is-active", "kubelet").stdout.strip() == "active"
    empty_host.kubectl("delete", "node", SECOND)
    assert empty_host.allocatable() == GPUS
