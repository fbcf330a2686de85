"""Fixtures: a machine whose kubelet uses an API server, and a client with its identity."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.system.api_server import ApiClient, Credentials
from tests.fakes.api_server import ApiServer
from tests.fakes.dra_machine import KUBECONFIG, NODE, DraMachine


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    """An API server with one Node."""
    directory = tmp_path / "api"
    directory.mkdir()
    server = ApiServer(directory, NODE)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[DraMachine]:
    """A machine without a kubelet."""
    tree = tmp_path / "machine"
    tree.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    found = DraMachine(tree)
    yield found
    found.stop()
    assert len(os.listdir("/proc/self/fd")) <= before + 8, "descriptors are left open"


@pytest.fixture
def joined(machine: DraMachine, api: ApiServer) -> DraMachine:
    """A machine whose kubelet uses the API server."""
    machine.put("/etc/ca.crt", api.certificate.read_bytes())
    machine.run_kubelet(api.kubeconfig())
    return machine


@pytest.fixture
def client(joined: DraMachine) -> ApiClient:
    """A client with the kubelet's identity."""
    return ApiClient(Credentials(joined, KUBECONFIG))
