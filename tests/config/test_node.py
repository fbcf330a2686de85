"""Settings of a node: each error names the key, and no error repeats a secret."""

from pathlib import Path

import pytest

from agent.config.load import load_config
from agent.config.settings import NodeSettings
from agent.model.errors import ConfigError
from tests.fakes.config_files import system_with

NODE = """
[machines.gpu.node]
server = "https://10.0.0.1:6443/"
ca_file = "/etc/kubernetes/ca.crt"
{node}
[machines.gpu.node.image]
repository = "docker://registry.example.com/nodes"
{image}
"""
TOKEN = 'bootstrap_token = "/etc/unbounded-agent/token"\n'


def settings(root: Path, node: str = "", image: str = "", tables: str = "") -> NodeSettings:
    text = NODE.format(node=TOKEN + node, image=image) + tables
    found = load_config(system_with(root, main=text)).machines["gpu"].node
    assert found
    return found


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kubelet.labels", '{ "gpu/" = "x" }', "'gpu/' is not a key: its name must have 1 to 63 letters"),
        ("kubelet.labels", '{ "GPU.example.com/a" = "x" }', "what precedes the slash must be a DNS subdomain"),
        ("kubelet.labels", '{ "a" = "x y" }', "'x y' is not a value"),
        ("kubelet.labels", '{ "a" = 1 }', "must be a string"),
        ("kubelet.taints", '["gpu"]', "'gpu' is not a taint: write KEY=VALUE:EFFECT"),
        ("kubelet.taints", '["gpu=yes:Never"]', "with one of NoSchedule, PreferNoSchedule, NoExecute"),
        ("kubelet.startup_taint", '"gpu:PreferNoSchedule"', "keeps no pod away"),
        ("kubelet.cluster_dns", '["dns.local"]', "'dns.local' is not an IP address"),
        ("kubelet.node_ip", '"10.0.0.1,10.0.0.2"', "a node has one address, or one of IPv4 and one of IPv6"),
        ("kubelet.cluster_domain", '"Cluster"', "is not a DNS name"),
        ("containerd.mirrors", '{ "a/b" = [] }', "'a/b' is not a registry"),
        ("host.sysctls", '{ "vm" = "1" }', "'vm' is not the name of a kernel parameter"),
        ("host.sysctls", '{ "vm.x" = "1\\n2" }', "is not one line of text"),
        ("host.kernel_modules", '["../x"]', "'../x' is not the name of a kernel module"),
        ("host.kernel_modules", '["--remove"]', "'--remove' is not the name of a kernel module"),
        ("containerd.mirrors", '{ ".." = [] }', "'..' is not a registry"),
        ("containerd.mirrors", '{ "-x" = [] }', "'-x' is not a registry"),
        ("containerd.mirrors", '{ "a..b:5000" = [] }', "'a..b:5000' is not a registry"),
        ("image.name", '"docker://../etc"', "is not an image"),
        ("image.name", '"docker://r.example/../x:1"', "is not an image"),
        ("image.name", '"docker://r.example/..@sha256:' + "0" * 64 + '"', "is not an image"),
        ("image.repository", '"docker://r.example/.."', "is not a repository"),
        ("image.mirror", '"docker://.."', "is not a repository"),
        ("bootstrap_token", '"credential:.."', "it is not an absolute path, or credential:NAME"),
        ("host.swap", '"on"', "Input should be 'off' or 'keep'"),
        ("name", '"Node_1"', "'Node_1' is not a DNS name"),
        ("server", '"http://10.0.0.1"', "'http://10.0.0.1' is not an API server"),
        ("server", '"https://10.0.0.1/k8s"', "'https://10.0.0.1/k8s' is not an API server without a path, such as"),
        ("server", '"https://10.0.0..1:6443"', "no request can be sent there"),
        ("server", '"https://[fd00::1:6443"', "no request can be sent there"),
        ("server", '"https://10.0.0.1:6443?x=1"', "no request can be sent there"),
        ("exec_credential", '["/usr/bin/login"]', "set either bootstrap_token or exec_credential"),
        ("exec_credential", '["login"]\nbootstrap_token = ""', "'login' is not an absolute path in the machine"),
        ("image.name", '"nodes:latest"', "is not an image: docker://REGISTRY/NAME:TAG"),
        ("image.repository", '"nodes"', "is not a repository"),
        ("image.tag", '"a b"', "is not a tag"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, key: str, value: str, message: str) -> None:
    table, _, name = key.rpartition(".")
    place = f"[machines.gpu.node.{table}]\n" if table else "[machines.gpu.node]\n"
    system = system_with(tmp_path, main=NODE.format(node=TOKEN, image=""), z=f"{place}{name} = {value}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(system)
    assert f"machines.gpu.node{'' if key == 'exec_credential' else '.' + key}" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("binaries", "message"),
    [
        (f'sha256.kubelet = "{"a1" * 32}"', "binaries: version is missing: set the version"),
        (f'sha256.crictl = "{"a1" * 32}"', "binaries: crictl_version is missing: set the version"),
        ('cni_plugins_version = "1.9.1"\nsha256 = {}', "binaries: sha256.cni_plugins is missing"),
        ('version = "1.36"\nsha256 = {}', "binaries.version: "),
    ],
)
def test_a_version_and_a_digest_belong_together(tmp_path: Path, binaries: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"machines.gpu.node.{message}"):
        settings(tmp_path, tables=f"[machines.gpu.node.binaries]\n{binaries}\n")


@pytest.mark.parametrize(
    ("node", "table", "message"),
    [
        ('bootstrap_token = "s3cret.0123456789abcdef"', "", "bootstrap_token: it is not an absolute path, or cred"),
        ('bootstrap_token = "s3cret token"', "", "bootstrap_token: it is not an absolute path, or credential:NAME"),
        (TOKEN, '{ "docker.io" = ["https://user:s3cret@mirror.example.com"] }', "without a user name"),
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(tmp_path: Path, node: str, table: str, message: str) -> None:
    """A token in the place of a path, and a password in a URL."""
    mirrors = f"[machines.gpu.node.containerd]\nmirrors = {table}\n" if table else ""
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(system_with(tmp_path, main=NODE.format(node=node, image="") + mirrors))
    assert "s3cret" not in str(caught.value)


def test_values_of_each_kind_are_accepted(tmp_path: Path) -> None:
    found = settings(
        tmp_path,
        node='name = "gpu-1.example.com"\n',
        tables="""
[machines.gpu.node.kubelet]
labels = { "example.com/rack" = "r-1", "pool" = "" }
taints = ["nvidia.com/gpu=present:NoSchedule", "a:PreferNoSchedule"]
startup_taint = "example.com/gpus-not-ready:NoSchedule"
node_ip = "10.0.0.7,fd00::7"
configuration = { maxPods = 42, evictionHard = { "memory.available" = "1Gi" } }
[machines.gpu.node.containerd.mirrors]
"_default" = ["http://10.0.0.9:5000"]
"registry.example.com:5000" = ["https://mirror.example.com/v2/cache"]
""",
    )
    assert found.server == "https://10.0.0.1:6443"
    assert found.kubelet.node_ip == "10.0.0.7,fd00::7"
    assert set(found.containerd.mirrors) == {"_default", "registry.example.com:5000"}
