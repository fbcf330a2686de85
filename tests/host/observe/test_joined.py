"""What a machine says about its kubelet's join: root in the machine can write anything into the file."""

import pytest

from agent.host.observe.machine import observe_joined
from agent.model.paths import joined_file
from tests.fakes.host import Host


def test_the_name_of_the_node_is_read(host: Host) -> None:
    assert observe_joined("gpu-node", host) == "", "not joined yet"
    host.file(joined_file("gpu-node"), "node-1.example.com\n")
    assert observe_joined("gpu-node", host) == "node-1.example.com"


@pytest.mark.parametrize(
    "text", ["--kubeconfig=/evil", "-v9", "a b", "a;b", "../a", "pods/a", "A", "a\x1b[2J", "a" * 254]
)
def test_attack_any_other_text_would_reach_kubectl_and_advice(host: Host, text: str) -> None:
    host.file(joined_file("gpu-node"), text)
    assert observe_joined("gpu-node", host) == ""
