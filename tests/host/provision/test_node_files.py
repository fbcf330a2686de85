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

from agent.host.provision.node_files import (
    BOOTSTRAP_KUBECONFIG,
    CA_FILE,
    CERTIFICATE,
    CONFIGURATION,
    KUBECONFIG,
    UNITS,
    NodeInputs,
    node_files,
)
from agent.host.provision.node_files import MAIN as CONTAINERD
from agent.machine.containerd_tables import CRI_2, Configuration, problems, render
from agent.model.node import NodeFile
from agent.vendors.machine_vendor import RuntimeHandler
from tests.fakes.golden import expect_golden
from tests.fakes.node_settings import CA, node_settings

COMMAND = f"{UNITS}/kubelet.service.d/99-unbounded-agent.conf"
INPUTS = NodeInputs("gpu-1", "10.0.0.7", CA)


def made(inputs: NodeInputs = INPUTS, **settings: Any) -> Mapping[str, NodeFile]:  # noqa: ANN401
    return {file.path: file for file in node_files("gpu", node_settings(**settings), inputs)}


def kubelet_configuration(**settings: Any) -> dict[str, Any]:  # noqa: ANN401
    found: dict[str, Any] = json.loads(made(**settings)[CONFIGURATION].content)
    return found


def arguments(files: Mapping[str, NodeFile]) -> list[str]:
    command = files[COMMAND].content.decode().partition("ExecStart=kubelet")[2]
    return command.replace("\\\n", "").split()


def test_the_files_are_these() -> None:
    """What a node's kubelet and containerd may do is decided here."""
    settings = {
        "kubelet": {
            "labels": {"a": "b"},
            "taints": ["c=d:NoSchedule"],
            "startup_taint": "readiness.k8s.io/gpu=:NoExecute",
        },
        "containerd": {"mirrors": {"docker.io": ["https://mirror.example.com"]}},
    }
    blocks = [
        f"==> {file.path} ({file.mode:04o})\n{file.content.decode().rstrip()}\n"
        for file in sorted(made(INPUTS, **settings).values(), key=lambda each: each.path)
    ]
    expect_golden("node-files.txt", "\n".join(blocks))


def test_the_bootstrap_kubeconfig_names_server_ca_and_token() -> None:
    kubeconfig = json.loads(made()[BOOTSTRAP_KUBECONFIG].content)
    (cluster,), (user,) = kubeconfig["clusters"], kubeconfig["users"]
    assert cluster["cluster"] == {"server": "https://10.0.0.1:6443", "certificate-authority": CA_FILE}
    # The host puts it there, and takes it away after the join: the root file system never has it.
    assert user["user"] == {"tokenFile": "/run/unbounded-agent/handoff/bootstrap-token"}
    assert made()[CA_FILE].content == CA


def test_a_program_gives_the_credential_instead_of_a_token() -> None:
    files = made(NodeInputs("gpu-1", "", CA), exec_credential=["/usr/bin/login", "--node", "a b"])
    (user,) = json.loads(files[BOOTSTRAP_KUBECONFIG].content)["users"]
    assert user["user"]["exec"]["command"] == "/usr/bin/login"
    assert user["user"]["exec"]["args"] == ["--node", "a b"]


@pytest.mark.parametrize("argument", ["\U0001f3ae", "\\ud83c\\udfae", "\u65e5 \x7f \x85 \u2028 \ufeff \uffff"])
def test_the_kubelet_reads_its_files_as_yaml(argument: str) -> None:
    """YAML has neither JSON's pairs of escapes for characters above U+FFFF, nor all other characters as they are."""
    kubelet = {"configuration": {"x": argument}}
    files = made(exec_credential=["/usr/bin/login", argument], bootstrap_token="", kubelet=kubelet)
    (user,) = yaml.load(files[BOOTSTRAP_KUBECONFIG].content, yaml.CSafeLoader)["users"]
    assert user["user"]["exec"]["args"] == [argument]
    assert yaml.load(files[CONFIGURATION].content, yaml.CSafeLoader)["x"] == argument
    assert json.loads(files[CONFIGURATION].content)["x"] == argument


def test_the_certificate_shows_that_a_node_has_joined() -> None:
    """The kubeconfig does not show that a kubelet has joined: it writes that before it has a certificate."""
    files = made()
    service = files[f"{UNITS}/unbounded-agent-joined.service"].content.decode()
    first, then = (line for line in service.splitlines() if line.startswith("ExecStart"))
    # The kubelet registers the Node after it has the certificate.
    assert first.startswith("ExecStartPre=")
    assert "get --raw=/api/v1/nodes/" in first
    assert then.startswith("ExecStart=")
    assert f"PathExists={CERTIFICATE}" in files[f"{UNITS}/unbounded-agent-joined.path"].content.decode()
    assert "unbounded-agent-joined.path" in files[f"{UNITS}/multi-user.target.d/50-kubelet.conf"].content.decode()


@pytest.mark.processes
def test_the_unit_that_reports_the_join_has_limits_and_a_sandbox(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed (apt install systemd)")
    unit = tmp_path / "unbounded-agent-joined.service"
    unit.write_bytes(made()[f"{UNITS}/{unit.name}"].content)
    assert "\nMemoryMax=" in unit.read_text()
    assert "\nTasksMax=" in unit.read_text()
    argv = [analyze, "security", "--offline=yes", "--no-pager", "--threshold=37", str(unit)]
    finished = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_the_command_of_the_kubelet() -> None:
    files = made(kubelet={"labels": {"b": "2", "example.com/a": "1"}})
    assert arguments(files) == [
        f"--config={CONFIGURATION}",
        f"--kubeconfig={KUBECONFIG}",
        f"--bootstrap-kubeconfig={BOOTSTRAP_KUBECONFIG}",
        "--hostname-override=gpu-1",
        "--node-ip=10.0.0.7",
        "--node-labels=b=2,example.com/a=1",
    ]


def test_settings_override_the_labels_that_the_host_knows() -> None:
    inputs = NodeInputs("gpu-1", "", CA, labels={"gpu": "yes", "rack": "unknown"})
    assert arguments(made(inputs, kubelet={"labels": {"rack": "7"}}))[-1] == "--node-labels=gpu=yes,rack=7"


def test_a_kubelet_without_a_known_address_finds_its_own() -> None:
    assert not [each for each in arguments(made(NodeInputs("gpu-1", "", CA))) if "node-ip" in each]


def test_only_a_network_of_its_own_needs_an_address() -> None:
    unit = f"{UNITS}/multi-user.target.d/50-network.conf"
    own = made(NodeInputs("gpu-1", "", CA, own_network=True))
    assert b"\nWants=systemd-networkd.service\n" in own[unit].content
    assert unit not in made()


def test_the_whole_configuration_of_the_kubelet() -> None:
    """As the kubelet spells it, whatever our own names for it are."""
    assert kubelet_configuration() == {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": "/etc/kubernetes/pki/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "systemd",
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "failSwapOn": True,
        "protectKernelDefaults": True,
        "registerWithTaints": [],
        "rotateCertificates": True,
    }


def test_certificates_are_rotated_and_taints_are_registered() -> None:
    found = kubelet_configuration(
        kubelet={"taints": ["a=b:NoSchedule", "c:NoExecute"], "startup_taint": "example.com/not-ready:NoSchedule"}
    )
    assert found["rotateCertificates"]
    # Kubernetes approves no request for a server's certificate by itself, and `kubectl logs` would fail until then.
    assert "serverTLSBootstrap" not in found
    assert found["registerWithTaints"] == [
        {"key": "a", "value": "b", "effect": "NoSchedule"},
        {"key": "c", "value": "", "effect": "NoExecute"},
        {"key": "example.com/not-ready", "value": "", "effect": "NoSchedule"},
    ]


def test_fields_of_the_settings_are_laid_over_the_agents() -> None:
    overlay = {
        "maxPods": 42,
        "authentication": {"webhook": {"cacheTTL": "1m"}, "anonymous": {"enabled": True}},
        "evictionHard": {"memory.available": "1Gi"},
    }
    found = kubelet_configuration(kubelet={"configuration": overlay})
    assert found["maxPods"] == 42
    assert found["authentication"]["webhook"] == {"enabled": True, "cacheTTL": "1m"}
    assert found["authentication"]["anonymous"] == {"enabled": True}
    assert found["authentication"]["x509"] == {"clientCAFile": CA_FILE}
    assert found["evictionHard"] == {"memory.available": "1Gi"}


def test_the_kubelet_accepts_swap_only_if_the_host_keeps_it() -> None:
    assert kubelet_configuration()["failSwapOn"]
    assert not kubelet_configuration(host={"swap": "keep"})["failSwapOn"]


def test_mirrors_are_tried_before_the_registry() -> None:
    mirrors = {
        "docker.io": ["https://b.example.com", "https://harbor.example.com/v2/cache"],
        "registry.example.com:5000": ["http://10.0.0.9"],
        "_default": ["https://a.example.com"],
    }
    files = made(containerd={"mirrors": mirrors, "sandbox_image": 'odd"name'})
    hosts = {
        path.split("/")[-2]: tomllib.loads(file.content.decode())
        for path, file in files.items()
        if path.endswith("/hosts.toml")
    }
    assert hosts["docker.io"]["server"] == "https://registry-1.docker.io"
    assert list(hosts["docker.io"]["host"]) == ["https://b.example.com", "https://harbor.example.com/v2/cache"]
    # Else containerd would ask for /v2/cache/v2/...
    assert hosts["docker.io"]["host"]["https://harbor.example.com/v2/cache"]["override_path"]
    assert "override_path" not in hosts["docker.io"]["host"]["https://b.example.com"]
    assert hosts["registry.example.com:5000"]["server"] == "https://registry.example.com:5000"
    assert "server" not in hosts["_default"]
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


def test_a_machine_with_its_own_network_forwards_in_it() -> None:
    own = NodeInputs("gpu-1", "", CA, own_network=True)
    path = "/etc/sysctl.d/90-unbounded-agent.conf"
    assert b"-net.ipv4.ip_forward = 1" in made(own)[path].content
    assert path not in made()
