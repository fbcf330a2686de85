"""What no node can have is refused before anything is made, with what to do instead."""

import copy
import re
from datetime import date
from typing import Any

import pytest

from agent.host.provision.preflight import refusals
from tests.fakes.node_settings import config

OWN = {"virtual_ethernet": True}


def messages(**nodes: dict[str, Any]) -> list[str]:
    return [f"{each.name}: {each.message} ({each.advice})" for each in refusals(config(**nodes))]


OWN_LABELS = (
    *("rack", "x.example.com/a", "notk8s.io/a", "topology.kubernetes.io/zone", "node.kubernetes.io/pool"),
    *("kubernetes.io/os", "beta.kubernetes.io/instance-type", "a.kubelet.kubernetes.io/b"),
    *("failure-domain.beta.kubernetes.io/region", "kubernetes.io/hostname"),
)
OF_ADMINISTRATORS = (
    *("a.k8s.io/x", "a.node-restriction.kubernetes.io/team", "beta.kubernetes.io/x", "k8s.io/x", "kubernetes.io/x"),
    *("kubernetes.io/hostnames", "node-role.kubernetes.io/x", "topology.kubernetes.io/rack"),
)


def test_a_kubelet_may_give_itself_some_labels_of_kubernetes() -> None:
    """Only an administrator may set the others."""
    refused = messages(a={"kubelet": {"labels": dict.fromkeys((*OWN_LABELS, *OF_ADMINISTRATORS), "")}})
    assert {each.partition(" the label ")[2].partition(" ")[0] for each in refused} == {*OF_ADMINISTRATORS}


LABEL = "node-role.kubernetes.io/gpu"
OVERLAY = "machines.a.node.kubelet.configuration"
REFUSED: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "label": (
        {"a": {"name": "gpu-1", "kubelet": {"labels": {LABEL: ""}}}},
        f"labels: no kubelet may give its own Node the label {LABEL} .*`kubectl label node gpu-1 --overwrite {LABEL}=`",
    ),
    "not JSON": ({"a": {"kubelet": {"configuration": {"maxPods": float("nan")}}}}, "JSON has no such value"),
    "a date": ({"a": {"kubelet": {"configuration": {"maxPods": date(2026, 1, 1)}}}}, "JSON has no such value"),
    "one network": (
        {"a": {"name": "a"}, "b": {"name": "b"}},
        r"network: machines a, b are nodes on the host's network.*machines\.b\.nspawn\.virtual_ethernet = true",
    ),
    "a needed parameter": (
        {"a": {"host": {"sysctls": {"kernel/panic": "0"}}}},
        "kernel.panic is 0, but no kubelet starts unless it is 10",
    ),
    "a shared parameter": (
        {
            "a": {"name": "a", "host": {"sysctls": {"vm.swappiness": "1"}}},
            "b": {"name": "b", "host": {"sysctls": {"vm/swappiness": "2"}}, "nspawn": OWN},
        },
        "vm.swappiness is 2, but 1 for a",
    ),
    "the kernel log": ({"a": {"nspawn": {"kmsg": False}}}, r"machines\.a\.nspawn\.kmsg"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_node_can_have(what: str) -> None:
    nodes, sentence = REFUSED[what]
    (message,) = messages(**copy.deepcopy(nodes))
    assert re.search(sentence, message), message


@pytest.mark.parametrize(
    "nodes",
    [
        {"a": {"name": "a"}, "b": {"name": "b", "nspawn": OWN}},
        {"a": {"name": "a"}, "b": {"name": "b", "nspawn": {"extra": {"Network": {"Bridge": "br0"}}}}},
        {"a": {"host": {"sysctls": {"kernel.panic": "10", "vm.swappiness": "1"}}}},
        {"a": {"kubelet": {"configuration": {"maxPods": 200, "serverTLSBootstrap": True}}}},
        {"a": {"kubelet": {"configuration": {"authentication": {"anonymous": {"enabled": False}}}}}},
    ],
)
def test_what_nodes_can_have(nodes: dict[str, dict[str, Any]]) -> None:
    assert messages(**nodes) == []


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
    assert f"{OVERLAY}: {field} must not be set" in message
