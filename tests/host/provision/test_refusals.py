"""What no node can have is refused before anything is made, with what to do instead."""

from typing import Any

import pytest

from agent.host.provision.preflight import may_set, refusals
from tests.fakes.node_settings import config

OWN = {"virtual_ethernet": True}


def messages(**nodes: dict[str, Any]) -> list[str]:
    return [f"{each.name}: {each.message} ({each.advice})" for each in refusals(config(**nodes))]


def test_a_plain_node_is_accepted() -> None:
    assert (
        messages(a={"kubelet": {"labels": {"example.com/rack": "7"}, "taints": ["a:NoSchedule", "a:NoExecute"]}}) == []
    )


@pytest.mark.parametrize(
    ("label", "allowed"),
    [
        ("rack", True),
        ("nvidia.com/gpu.present", True),
        ("example.com/role", True),
        ("notkubernetes.io/role", True),
        ("node.kubernetes.io/pool", True),
        ("a.node.kubernetes.io/pool", True),
        ("kubelet.kubernetes.io/pool", True),
        ("topology.kubernetes.io/zone", True),
        ("kubernetes.io/hostname", True),
        ("node-role.kubernetes.io/gpu", False),
        ("kubernetes.io/role", False),
        ("node-restriction.kubernetes.io/team", False),
        ("a.node-restriction.kubernetes.io/team", False),
        ("topology.kubernetes.io/rack", False),
        ("x-k8s.io/pool", True),
        ("a.k8s.io/pool", False),
        ("k8s.io/pool", False),
    ],
)
def test_labels_that_a_kubelet_may_give_itself(label: str, allowed: bool) -> None:
    assert may_set(label) is allowed


def test_a_forbidden_label_comes_with_the_command() -> None:
    (message,) = messages(a={"name": "gpu-1", "kubelet": {"labels": {"node-role.kubernetes.io/gpu": ""}}})
    assert "machines.a.node.kubelet.labels: no kubelet may give its own Node the label node-role" in message
    assert "`kubectl label node gpu-1 --overwrite node-role.kubernetes.io/gpu=`" in message


def test_a_taint_may_not_be_there_twice() -> None:
    (message,) = messages(a={"kubelet": {"taints": ["gpu=a:NoSchedule"], "startup_taint": "gpu=b:NoSchedule"}})
    assert "two taints have the key gpu and the effect NoSchedule" in message


@pytest.mark.parametrize(
    ("overlay", "field"),
    [
        ({"cgroupDriver": "cgroupfs"}, "cgroupDriver"),
        ({"authentication": {"x509": {"clientCAFile": "/x"}}}, "authentication.x509.clientCAFile"),
        ({"authentication": "none"}, "authentication.x509.clientCAFile"),
        ({"clusterDNS": ["10.0.0.10"]}, "clusterDNS"),
        ({"rotateCertificates": False}, "rotateCertificates"),
        ({"registerWithTaints": []}, "registerWithTaints"),
    ],
)
def test_fields_that_the_agent_needs_are_protected(overlay: dict[str, Any], field: str) -> None:
    (message,) = messages(a={"kubelet": {"configuration": overlay}})
    assert f"machines.a.node.kubelet.configuration: {field} must not be set" in message


def test_other_fields_are_free() -> None:
    overlay = {"maxPods": 200, "authentication": {"anonymous": {"enabled": False}}, "serverTLSBootstrap": True}
    assert messages(a={"kubelet": {"configuration": overlay}}) == []


@pytest.mark.parametrize("value", [float("nan"), __import__("datetime").date(2026, 1, 1)])
def test_a_value_that_json_does_not_have(value: object) -> None:
    (message,) = messages(a={"kubelet": {"configuration": {"maxPods": value}}})
    assert "JSON has no such value" in message


def test_two_kubelets_do_not_fit_on_the_hosts_network() -> None:
    (message,) = messages(a={"name": "a"}, b={"name": "b"})
    assert message.startswith("network: machines a, b are nodes on the host's network")
    assert "machines.b.nspawn.virtual_ethernet = true" in message
    assert messages(a={"name": "a"}, b={"name": "b", "nspawn": OWN}) == []
    assert messages(a={"name": "a"}, b={"name": "b", "nspawn": {"extra": {"Network": {"Bridge": "br0"}}}}) == []


def test_two_nodes_need_two_names() -> None:
    (unnamed,) = messages(a={}, b={"nspawn": OWN})
    assert "machines a and b would both have the host's name" in unnamed
    (same,) = messages(a={"name": "x"}, b={"name": "x", "nspawn": OWN})
    assert "machines a and b would both be the node x (set machines.b.node.name)" in same


def test_parameters_that_the_kubelet_needs_cannot_be_overridden() -> None:
    (message,) = messages(a={"host": {"sysctls": {"kernel/panic": "0"}}})
    assert "kernel.panic is 0, but no kubelet starts unless it is 10" in message
    assert messages(a={"host": {"sysctls": {"kernel.panic": "10", "vm.swappiness": "1"}}}) == []


def test_two_nodes_share_the_hosts_parameters() -> None:
    (message,) = messages(
        a={"name": "a", "host": {"sysctls": {"vm.swappiness": "1"}}},
        b={"name": "b", "host": {"sysctls": {"vm/swappiness": "2"}}, "nspawn": OWN},
    )
    assert "vm.swappiness is 2, but 1 for a" in message


def test_a_kubelet_needs_the_kernel_log() -> None:
    (message,) = messages(a={"nspawn": {"kmsg": False}})
    assert "machines.a.nspawn.kmsg" in message
