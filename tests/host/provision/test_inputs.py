"""What a node's files contain that is not in its settings."""

from collections.abc import Callable
from typing import Any

import pytest

from agent.host.provision.node_files import HOST_NAME, NodeInputs, changed_inputs, make_record, node_inputs, node_names
from agent.model.errors import AgentError, ConfigError
from agent.model.node import NodeImage
from tests.fakes.host import Host
from tests.fakes.node_settings import CA, CA_FILE, config


@pytest.fixture
def ready(host: Host) -> Host:
    host.file(HOST_NAME, "GPU-Host.example.com\n")
    host.file(CA_FILE, CA)
    return host


def no_route() -> str:
    raise AssertionError("nobody needs the route")


def inputs(host: Host, **settings: Any) -> NodeInputs:  # noqa: ANN401
    return node_inputs("a", config(a=settings), host, lambda: "10.0.0.7")


def test_a_node_has_the_hosts_name_and_address(ready: Host) -> None:
    assert inputs(ready) == NodeInputs("gpu-host.example.com", "10.0.0.7", CA)


@pytest.mark.parametrize(
    ("settings", "name", "address"),
    [
        ({"name": "gpu-1", "kubelet": {"node_ip": "10.0.0.9"}}, "gpu-1", "10.0.0.9"),
        ({"nspawn": {"virtual_ethernet": True}}, "gpu-host.example.com", ""),
    ],
)
def test_settings_and_an_own_network_come_first(ready: Host, settings: dict[str, Any], name: str, address: str) -> None:
    found = node_inputs("a", config(a=settings), ready, no_route)
    assert (found.name, found.address, found.own_network) == (name, address, not address)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no certificate in PEM format"),
        (CA + b"-----BEGIN EC PRIVATE KEY-----\n", "it has a private key, which no node may get"),
        (None, f"{CA_FILE}: cannot read it: No such file"),
    ],
)
def test_a_wrong_ca(ready: Host, content: bytes | None, why: str) -> None:
    ready.remove_file(CA_FILE)
    if content is not None:
        ready.file(CA_FILE, content)
    with pytest.raises(ConfigError, match=why):
        inputs(ready)


@pytest.mark.parametrize("name", ["localhost", "gpu_host", "-"])
def test_a_host_name_that_no_node_can_have(ready: Host, name: str) -> None:
    ready.file(HOST_NAME, name)
    with pytest.raises(ConfigError, match=r"set machines\.a\.node\.name"):
        inputs(ready)


def test_a_name_that_is_too_long_for_the_label_with_it(ready: Host) -> None:
    """A host's name may have 64 characters, and each part of a DNS name 63. Another machine's keeps no node."""
    name = f"{'a' * 40}.{'b' * 22}"
    ready.file(HOST_NAME, name)
    assert inputs(ready).name == name
    ready.file(HOST_NAME, f"{name}b")
    with pytest.raises(ConfigError, match=r"the name of the host, .* has 64 characters.*set machines\.a\.node\.name"):
        inputs(ready)
    wanted = config(a={"name": "gpu-1"}, b={"name": f"{name}b"})
    assert node_inputs("a", wanted, ready, lambda: "10.0.0.7").name == "gpu-1"
    with pytest.raises(ConfigError, match=r"machines\.b\.node\.name, .* has 64 characters"):
        node_inputs("b", wanted, ready, lambda: "10.0.0.7")


def test_a_name_may_not_be_the_hosts_by_chance(ready: Host) -> None:
    with pytest.raises(ConfigError, match="machines a and b would both be the node gpu-host"):
        node_names(config(a={}, b={"name": "gpu-host.example.com"}), ready)


def test_another_address_of_the_host_is_noticed(ready: Host) -> None:
    """From DHCP, for example. The kubelet's command line has the old one, and its Node keeps that."""

    def changed(*, has: bool, address: Callable[[], str] = lambda: "10.0.0.8", **settings: Any) -> tuple[str, ...]:  # noqa: ANN401
        wanted = config(a=settings)
        return changed_inputs(record, "a", wanted, ready, address, lambda _: has)

    def unknown() -> str:
        raise AgentError("no default route")

    made = config(a={}).machines["a"].node
    assert made
    record = make_record(made, inputs(ready), NodeImage("image", "digest", "amd64", 1), (), ())
    assert changed(has=False) == ("the host's address, now 10.0.0.8",)
    assert changed(has=True) == (), "the default route has another address, but the kubelet's is still there"
    assert changed(has=False, address=unknown) == (), "a host without a network has no new address"
    assert changed(has=False, kubelet={"node_ip": "10.0.0.9"}) == (), "that setting is reported itself"
