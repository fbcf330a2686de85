"""Makes the kubelet's files for a node: its units, its configuration and its kubeconfig for the bootstrap. Pure.

The formats are systemd.unit(5), kubelet.config.k8s.io/v1beta1 and a kubeconfig. The last two are written as JSON, which
is also YAML.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from agent.config.kubernetes_names import split_taint
from agent.config.node import KubeletSettings, NodeSettings
from agent.model.json_document import json_for_yaml
from agent.model.node import NodeFile
from agent.model.paths import JOINED_NAME, MACHINE_HANDOFF_DIRECTORY, MACHINE_REPORT_DIRECTORY, TOKEN_NAME

CA_FILE = "/etc/kubernetes/pki/ca.crt"
CONFIGURATION = "/etc/kubernetes/kubelet.json"
KUBECONFIG = "/etc/kubernetes/kubelet.conf"
"""The kubelet writes this file before it has a certificate, so the file does not prove that the node has joined."""
BOOTSTRAP_KUBECONFIG = "/etc/kubernetes/bootstrap-kubelet.conf"
TOKEN_FILE = f"{MACHINE_HANDOFF_DIRECTORY}/{TOKEN_NAME}"
CERTIFICATE = "/var/lib/kubelet/pki/kubelet-client-current.pem"
"""The kubelet makes this file when the cluster has issued its certificate."""
CONTAINERD_SOCKET = "unix:///run/containerd/containerd.sock"
UNITS = "/etc/systemd/system"
NETWORK_WANTED = f"{UNITS}/multi-user.target.d/50-network.conf"
"""Only machines with a network of their own have this file."""
JOINED = "unbounded-agent-joined"


class NodeInputs(Struct, frozen=True):
    """What a node's files contain apart from its settings."""

    name: str
    """The name of the Node object."""
    address: str
    """IP addresses for --node-ip; empty if the kubelet should find its own."""
    ca: bytes
    """The CA certificate of the API server, in PEM format."""
    own_network: bool = False
    """Whether the machine has a network namespace of its own."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels in addition to those in the settings. If a label is in both, the value in the settings counts."""


def kubelet_files(settings: NodeSettings, inputs: NodeInputs, header: str) -> tuple[NodeFile, ...]:
    """Return the kubelet's files. `header` is the comment at the start of each file that can have one."""
    units = {
        "kubelet.service": UNIT,
        "kubelet.service.d/99-unbounded-agent.conf": _command(settings, inputs),
        "multi-user.target.d/50-kubelet.conf": WANTED,
        **({NETWORK_WANTED.removeprefix(f"{UNITS}/"): NETWORK} if inputs.own_network else {}),
        f"{JOINED}.path": JOINED_PATH,
        f"{JOINED}.service": JOINED_SERVICE + _report(inputs),
    }
    return (
        NodeFile(CA_FILE, inputs.ca),
        NodeFile(CONFIGURATION, json_for_yaml(kubelet_configuration(settings))),
        NodeFile(BOOTSTRAP_KUBECONFIG, json_for_yaml(_bootstrap(settings))),
        *(NodeFile(f"{UNITS}/{name}", (header + text).encode()) for name, text in units.items()),
    )


def kubelet_configuration(settings: NodeSettings) -> dict[str, Any]:
    """Return the KubeletConfiguration. Fields in node.kubelet.configuration override those that the agent sets."""
    kubelet = settings.kubelet
    defaults: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": CA_FILE},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "systemd",
        "clusterDNS": kubelet.cluster_dns,
        "clusterDomain": kubelet.cluster_domain,
        "containerRuntimeEndpoint": CONTAINERD_SOCKET,
        "failSwapOn": settings.host.swap == "off",
        # The kubelet needs certain values of kernel parameters, but cannot set them: /proc/sys is read-only in a
        # machine. With this field, it does not try to: if a parameter has another value, the kubelet ends with an error
        # that names the parameter.
        "protectKernelDefaults": True,
        "registerWithTaints": taints(kubelet),
        "rotateCertificates": True,
    }
    return _merged(defaults, kubelet.configuration)


def taints(kubelet: KubeletSettings) -> list[dict[str, str]]:
    """Return the taints with which the Node is registered, in the form of Kubernetes' API."""
    texts = [*kubelet.taints, *([kubelet.startup_taint] if kubelet.startup_taint else [])]
    return [dict(zip(("key", "value", "effect"), split_taint(text), strict=True)) for text in texts]


def _merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _bootstrap(settings: NodeSettings) -> dict[str, Any]:
    """Return the kubeconfig with which the kubelet asks for its certificate."""
    # The kubelet reads TOKEN_FILE again each minute, so a new token takes effect (client-go's
    # NewCachedFileTokenSource).
    user: dict[str, Any] = {"tokenFile": TOKEN_FILE}
    if settings.exec_credential:
        command, *arguments = settings.exec_credential
        user = {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1",
                "command": command,
                "args": arguments,
                "interactiveMode": "Never",
            }
        }
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "cluster", "cluster": {"server": settings.server, "certificate-authority": CA_FILE}}],
        "users": [{"name": "kubelet-bootstrap", "user": user}],
        "contexts": [{"name": "bootstrap", "context": {"cluster": "cluster", "user": "kubelet-bootstrap"}}],
        "current-context": "bootstrap",
    }


UNIT = """\
[Unit]
Description=Kubernetes node agent
Documentation=https://kubernetes.io/docs/
Wants=containerd.service unbounded-agent-gpu.service
# The GPUs are set up before the node registers. Whatever fails there, the kubelet starts.
After=containerd.service unbounded-agent-gpu.service
# The API server may be away for long.
StartLimitIntervalSec=0

[Service]
Restart=always
RestartSec=2
"""
"""The kubelet's unit, without its command line. The command line is in a drop-in that sorts last, because packages with
a kubelet bring drop-ins that would replace a command line in the unit."""

WANTED = """\
[Unit]
Wants=kubelet.service unbounded-agent-joined.path
"""
"""Enables kubelet.service and the path unit, without the links that `systemctl enable` makes."""

NETWORK = """\
[Unit]
# Asks for an address on host0 (80-container-host0.network). Images do not enable it: the host's network needs none.
Wants=systemd-networkd.service
"""

JOINED_PATH = f"""\
[Unit]
Description=Wait until this node has joined its cluster

[Path]
PathExists={CERTIFICATE}
"""
JOINED_SERVICE = """\
[Unit]
Description=This node has joined its cluster

StartLimitIntervalSec=0

[Service]
Type=oneshot
# Stays active until the next boot: the path unit would otherwise start it again and again.
RemainAfterExit=yes
# The kubelet registers the Node some seconds after it has its certificate.
Restart=on-failure
RestartSec=5s
# kubectl, a program in Go, starts a thread for every fourth processor.
MemoryMax=512M
TasksMax=1024
# It reads the kubelet's keys, asks the API server, and writes one file for the host.
CapabilityBoundingSet=
NoNewPrivileges=yes
DevicePolicy=closed
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@resources
SystemCallErrorNumber=EPERM
"""


def _command(settings: NodeSettings, inputs: NodeInputs) -> str:
    labels = {**inputs.labels, **settings.kubelet.labels}
    pairs = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    arguments = [
        f"--config={CONFIGURATION}",
        f"--kubeconfig={KUBECONFIG}",
        f"--bootstrap-kubeconfig={BOOTSTRAP_KUBECONFIG}",
        f"--hostname-override={inputs.name}",
        *([f"--node-ip={inputs.address}"] if inputs.address else []),
        *([f"--node-labels={pairs}"] if pairs else []),
    ]
    # No argument needs quotes (systemd.syntax(7)), because none can contain blanks, `$`, `%` or backslashes.
    command = " \\\n    ".join(("kubelet", *arguments))
    return f"[Service]\nExecStart=\nExecStart={command}\n"


def _report(inputs: NodeInputs) -> str:
    """Return the commands that report the join to the host, once the API server has the Node.

    After this report, the host removes the bootstrap token.
    """
    final, new = (f"{MACHINE_REPORT_DIRECTORY}/{name}" for name in (JOINED_NAME, f".{JOINED_NAME}"))
    ask = f"kubectl --kubeconfig={KUBECONFIG} --request-timeout=10s get --raw=/api/v1/nodes/{inputs.name} >/dev/null"
    return (
        # An image may have a kubelet but no kubectl. In that case, the kubelet's certificate is proof enough.
        f"ExecStartPre=/bin/sh -c 'command -v kubectl >/dev/null || exit 0; {ask}'\n"
        f"ExecStart=/bin/sh -c 'printf %%s {inputs.name} >{new} && mv {new} {final}'\n"
    )
