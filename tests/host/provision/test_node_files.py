"""The files of a node: formats that the kubelet, systemd and containerd read."""

import json
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.host.provision.node_files import BOOTSTRAP_KUBECONFIG, CONFIGURATION, UNITS, NodeInputs, node_files
from agent.host.provision.node_files import MAIN as CONTAINERD
from agent.machine.containerd_tables import CRI_2, Configuration, problems, render
from agent.model.node import NodeFile
from agent.vendors.machine_vendor import RuntimeHandler
from tests.fakes.golden import expect_golden
from tests.fakes.node_settings import CA, node_settings

INPUTS = NodeInputs("gpu-1", "10.0.0.7", CA, labels={"a": "the settings' value counts"})
OWN = NodeInputs("gpu-1", "", CA, own_network=True)


def made(inputs: NodeInputs = INPUTS, **settings: Any) -> Mapping[str, NodeFile]:  # noqa: ANN401
    return {file.path: file for file in node_files("gpu", node_settings(**settings), inputs)}


def kubelet_configuration(**settings: Any) -> dict[str, Any]:  # noqa: ANN401
    found: dict[str, Any] = json.loads(made(**settings)[CONFIGURATION].content)
    return found


def test_the_files_are_these() -> None:
    """What a node's kubelet and containerd may do is decided here.

    The kubelet does not ask for a server's certificate (serverTLSBootstrap): Kubernetes approves no such request by
    itself, and `kubectl logs` would fail until then.
    """
    settings = {
        "kubelet": {
            "labels": {"a": "b"},
            "taints": ["c=d:NoSchedule", "e:NoExecute"],
            "startup_taint": "readiness.k8s.io/gpu=:NoExecute",
        },
        "containerd": {"mirrors": {"docker.io": ["https://mirror.example.com"]}},
    }
    blocks = [
        f"==> {file.path} ({file.mode:04o})\n{file.content.decode().rstrip()}\n"
        for file in sorted(made(INPUTS, **settings).values(), key=lambda each: each.path)
    ]
    expect_golden("node-files.txt", "\n".join(blocks))


@pytest.mark.parametrize("argument", ["a b", "\U0001f3ae", "\\ud83c\\udfae", "\u65e5 \x7f \x85 \u2028 \ufeff \uffff"])
def test_a_program_gives_the_credential_and_the_kubelet_reads_its_files_as_yaml(argument: str) -> None:
    """YAML has neither JSON's pairs of escapes for characters above U+FFFF, nor all other characters as they are."""
    kubelet = {"configuration": {"x": argument}}
    files = made(exec_credential=["/usr/bin/login", argument], bootstrap_token="", kubelet=kubelet)
    (user,) = yaml.load(files[BOOTSTRAP_KUBECONFIG].content, yaml.CSafeLoader)["users"]
    assert (user["user"]["exec"]["command"], user["user"]["exec"]["args"]) == ("/usr/bin/login", [argument])
    assert yaml.load(files[CONFIGURATION].content, yaml.CSafeLoader)["x"] == argument
    assert json.loads(files[CONFIGURATION].content)["x"] == argument


@pytest.mark.processes
def test_the_unit_that_reports_the_join_has_limits_and_a_sandbox(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed (apt install systemd)")
    unit = tmp_path / "unbounded-agent-joined.service"
    unit.write_bytes(made()[f"{UNITS}/{unit.name}"].content)
    argv = [analyze, "security", "--offline=yes", "--no-pager", "--threshold=37", str(unit)]
    finished = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_only_a_network_of_its_own_needs_an_address_and_forwards() -> None:
    own, shared = made(OWN), made()
    for path, line in {
        f"{UNITS}/multi-user.target.d/50-network.conf": b"\nWants=systemd-networkd.service\n",
        "/etc/sysctl.d/90-unbounded-agent.conf": b"-net.ipv4.ip_forward = 1\n",
    }.items():
        assert line in own[path].content
        assert path not in shared


def test_fields_of_the_settings_are_laid_over_the_agents() -> None:
    authentication = {"webhook": {"cacheTTL": "1m"}, "anonymous": {"enabled": True}}
    overlay = {"maxPods": 42, "authentication": authentication, "evictionHard": {"memory.available": "1Gi"}}
    plain, found = kubelet_configuration(), kubelet_configuration(kubelet={"configuration": overlay})
    laid = {**plain["authentication"], **authentication, "webhook": {"enabled": True, "cacheTTL": "1m"}}
    assert found == {**plain, **overlay, "authentication": laid}


def test_mirrors_are_tried_before_the_registry() -> None:
    plain, proxy = "https://b.example.com", "https://harbor.example.com/v2/cache"
    mirrors = {
        "docker.io": [plain, proxy],
        "registry.example.com:5000": ["http://10.0.0.9"],
        "_default": ["https://a.example.com"],
    }
    files = made(containerd={"mirrors": mirrors, "sandbox_image": 'odd"name'})
    hosts = {
        path.split("/")[-2]: tomllib.loads(file.content.decode())
        for path, file in files.items()
        if path.endswith("/hosts.toml")
    }
    assert {name: each.get("server") for name, each in hosts.items()} == {
        "docker.io": "https://registry-1.docker.io",
        "registry.example.com:5000": "https://registry.example.com:5000",
        "_default": None,
    }
    found = hosts["docker.io"]["host"]
    assert list(found) == [plain, proxy]
    # Else containerd would ask for /v2/cache/v2/...
    assert [found[each].get("override_path") for each in found] == [None, True]
    main = tomllib.loads(files[CONTAINERD].content.decode())
    assert main["plugins"][CRI_2]["sandbox_image"] == 'odd"name'


def test_the_machine_half_keeps_every_setting_of_containerd() -> None:
    """Its drop-in repeats the whole table, because containerd 1.7 replaces the main file's by it."""
    files = made(containerd={"sandbox_image": "registry.example.com/pause:3", "cni_binaries": "/opt/cni/bin"})
    main = tomllib.loads(files[CONTAINERD].content.decode())
    handler = RuntimeHandler("gpu", "/usr/bin/gpu-runtime")
    dump = {"version": 2, "plugins": main["plugins"]}
    drop_in = render(Configuration({CONTAINERD: main}, dump), (1, 7, 24), handler, default=False)
    with_ours = {"version": 2, "plugins": {**dump["plugins"], **drop_in["plugins"]}}
    assert list(problems(dump, with_ours, drop_in, handler, default=False)) == []
    cri = drop_in["plugins"][CRI_2]
    assert cri["cni"]["bin_dir"] == "/opt/cni/bin"
    assert cri["containerd"]["runtimes"]["gpu"]["options"] == {"SystemdCgroup": True, "BinaryName": handler.binary}
