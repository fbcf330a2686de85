"""Makes the files that turn a root file system into a node, apart from its programs."""

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import tomlkit
from msgspec import NODEFAULT, Struct, field, to_builtins
from msgspec.structs import fields, replace

from agent.config.checks import is_subdomain, split_taint
from agent.config.settings import (
    DEFAULT_GRACE,
    GRACE_KEYS,
    Config,
    ContainerdSettings,
    KubeletSettings,
    NodeSettings,
    shutdown_grace,
)
from agent.host.plan.nspawn import own_network
from agent.host.provision.binaries import POD_IMAGES_DIRECTORY
from agent.host.provision.host_settings import FORWARDING, sysctl_lines
from agent.host.state.records import MARK, Durable
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import Absent, Seen
from agent.model.json_document import json_for_yaml
from agent.model.node import NodeBinary, NodeFile, NodeImage
from agent.model.paths import (
    JOINED_NAME,
    KUBELET_CERTIFICATES,
    MACHINE_HANDOFF_DIRECTORY,
    MACHINE_REPORT_DIRECTORY,
    TOKEN_NAME,
    candidate_of,
    machine_image,
    machine_root,
    node_record,
    root_records,
)
from agent.model.text import sha256
from agent.system.files import System
from agent.system.network import default_address, has_address
from agent.system.trust import settings_fault

# The kubelet's files: its units, its configuration and its kubeconfig for the bootstrap.
#
# The formats are systemd.unit(5), kubelet.config.k8s.io/v1beta1 and a kubeconfig. The last two are written as JSON,
# which is also YAML.


CA_FILE = "/etc/kubernetes/pki/ca.crt"
CONFIGURATION = "/etc/kubernetes/kubelet.json"
KUBECONFIG = "/etc/kubernetes/kubelet.conf"
"""The kubelet writes this file before it has a certificate, so the file does not prove that the node has joined."""
CREDENTIAL_PROVIDERS = "/etc/kubernetes/credential-providers.json"
BOOTSTRAP_KUBECONFIG = "/etc/kubernetes/bootstrap-kubelet.conf"
TOKEN_FILE = f"{MACHINE_HANDOFF_DIRECTORY}/{TOKEN_NAME}"
CERTIFICATE = f"{KUBELET_CERTIFICATES}/kubelet-client-current.pem"
"""The kubelet makes this file when the cluster has issued its certificate."""
CONTAINERD_SOCKET = "unix:///run/containerd/containerd.sock"
UNITS = "/etc/systemd/system"
NETWORK_WANTED = f"{UNITS}/multi-user.target.d/50-network.conf"
"""Only machines with a network of their own have this file."""


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


def taints(kubelet: KubeletSettings) -> list[dict[str, str]]:
    """Return the taints with which the Node is registered, in the form of Kubernetes' API."""
    texts = [*kubelet.taints, *([kubelet.startup_taint] if kubelet.startup_taint else [])]
    return [dict(zip(("key", "value", "effect"), split_taint(text), strict=True)) for text in texts]


def _kubelet_configuration(settings: NodeSettings) -> dict[str, Any]:
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
    if not {*GRACE_KEYS} & {*kubelet.configuration}:
        defaults |= DEFAULT_GRACE
    return _merged(defaults, kubelet.configuration)


def _credential_providers(kubelet: KubeletSettings) -> dict[str, Any]:
    """Return the CredentialProviderConfig (kubelet.config.k8s.io/v1)."""
    providers = [
        {
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "name": each.name,
            "matchImages": each.match_images,
            "defaultCacheDuration": each.cache_duration,
            "args": each.args,
            "env": [{"name": name, "value": value} for name, value in sorted(each.env.items())],
        }
        for each in kubelet.image_credential_providers
    ]
    return {"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig", "providers": providers}


def _merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _bootstrap(settings: NodeSettings) -> dict[str, Any]:
    # The kubelet reads TOKEN_FILE again each minute, so a new token takes effect (client-go's
    # NewCachedFileTokenSource).
    user: dict[str, Any] = {"tokenFile": TOKEN_FILE}
    if settings.exec_credential:
        command, *arguments = settings.exec_credential
        api = "client.authentication.k8s.io/v1"
        user = {"exec": {"apiVersion": api, "command": command, "args": arguments, "interactiveMode": "Never"}}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "cluster", "cluster": {"server": settings.server, "certificate-authority": CA_FILE}}],
        "users": [{"name": "kubelet-bootstrap", "user": user}],
        "contexts": [{"name": "bootstrap", "context": {"cluster": "cluster", "user": "kubelet-bootstrap"}}],
        "current-context": "bootstrap",
    }


def joined_kubeconfig(settings: NodeSettings) -> NodeFile:
    """Return the kubelet's kubeconfig as the kubelet writes it when it joins.

    A root file system that takes over a node gets it: without it, the kubelet would need a bootstrap token, although it
    finds its certificate.
    """
    user = {"client-certificate": CERTIFICATE, "client-key": CERTIFICATE}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "cluster", "cluster": {"server": settings.server, "certificate-authority": CA_FILE}}],
        "users": [{"name": "kubelet", "user": user}],
        "contexts": [{"name": "kubelet", "context": {"cluster": "cluster", "user": "kubelet"}}],
        "current-context": "kubelet",
    }
    return NodeFile(KUBECONFIG, json_for_yaml(content), 0o600)


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
JOIN_WATCH = 30
"""Seconds of one watch for the join."""
JOINED_SERVICE = """\
[Unit]
Description=This node has joined its cluster
# A node that boots again has its certificate: until its kubelet starts, to ask would only slow the boot.
After=kubelet.service
StartLimitIntervalSec=0

[Service]
# Not oneshot: until kubectl ends, the machine would count as still booting.
Type=exec
# Stays active until the next boot: the path unit would otherwise start it again and again.
RemainAfterExit=yes
# The API server may not answer yet.
Restart=on-failure
RestartSec=2s
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


POD_IMAGES_SERVICE = f"{UNITS}/unbounded-agent-pod-images.service"
POD_IMAGES = f"""\
[Unit]
Description=Import the pod images that came with this node
After=containerd.service
# Nothing is left to do once all are imported: containerd keeps them, and the archives are removed.
ConditionDirectoryNotEmpty={POD_IMAGES_DIRECTORY}

[Service]
Type=oneshot
TimeoutStartSec=1800
ExecStart=/bin/sh -c 'cd {POD_IMAGES_DIRECTORY} && failed=0 && for archive in *.tar; do \
    ctr --namespace=k8s.io images import "$$archive" && rm -f "$$archive" || failed=1; done; exit $$failed'
"""
POD_IMAGES_FIRST = """\
[Unit]
Wants=unbounded-agent-pod-images.service
# If an image cannot be imported, the kubelet starts all the same, and tries to pull it.
After=unbounded-agent-pod-images.service
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
        *(
            [
                f"--image-credential-provider-config={CREDENTIAL_PROVIDERS}",
                f"--image-credential-provider-bin-dir={settings.kubelet.image_credential_provider_directory}",
            ]
            if settings.kubelet.image_credential_providers
            else []
        ),
    ]
    # No argument needs quotes (systemd.syntax(7)), because none can contain blanks, `$`, `%` or backslashes.
    command = " \\\n    ".join(("kubelet", *arguments))
    return f"[Service]\nExecStart=\nExecStart={command}\n"


def _joined_service(node: str) -> str:
    """Return the unit that reports the join once the API server has the Node. The host then removes the token."""
    final, new = (f"{MACHINE_REPORT_DIRECTORY}/{name}" for name in (JOINED_NAME, f".{JOINED_NAME}"))
    report = f"printf %%s {node} >{new} && mv {new} {final}"
    # One watch, because each start of kubectl takes processor time that a kubelet that starts needs. A kubelet may
    # watch its own Node, by name (node_authorizer.go).
    watch = f"/api/v1/nodes?watch=true&fieldSelector=metadata.name={node}&timeoutSeconds={JOIN_WATCH}"
    script = (
        # An image may have a kubelet but no kubectl. In that case, the kubelet's certificate is proof enough.
        f"command -v kubectl >/dev/null || {{ {report}; exit; }}",
        # The Node may be from an earlier start or root file system. A kubelet that works says in which boot it is: each
        # start of a machine has an id of its own. The file is written in the pipeline: kubectl ends later.
        f'kubectl --kubeconfig={KUBECONFIG} --request-timeout={JOIN_WATCH + 10}s get --raw="{watch}"'
        f" | {{ grep --quiet --file=/proc/sys/kernel/random/boot_id && {report}; }}",
    )
    return f"{JOINED_SERVICE}ExecStart=/bin/sh -c '{'; '.join(script)}'\n"


# containerd's files: its configuration, and the mirrors of registries.
#
# The configuration has version 2, which containerd 1.7 and 2.x read. The machine half writes its drop-in in the same
# version (agent.machine.containerd_tables).


MAIN = "/etc/containerd/config.toml"
CERTS = "/etc/containerd/certs.d"
CNI_SETTINGS = "/etc/cni/net.d"
IMPORT = "/etc/containerd/conf.d/*.toml"
"""Drop-ins of the image and of the machine half. If the configuration did not import them, the machine half would add
this import to it."""
CRICTL = "/etc/crictl.yaml"
SERVERS = {"docker.io": "https://registry-1.docker.io"}
"""By registry: its server, if the server has another name than the registry."""
EVERY = "_default"
"""containerd's name for every registry without a directory of its own."""


def containerd_files(settings: ContainerdSettings, header: str) -> tuple[NodeFile, ...]:
    """Return containerd's files, and crictl's file. `header` is the comment at the start of each."""
    runc = {"runtime_type": "io.containerd.runc.v2", "options": {"SystemdCgroup": True}}
    cri: dict[str, Any] = {
        **({"sandbox_image": settings.sandbox_image} if settings.sandbox_image else {}),
        "cni": {"bin_dir": settings.cni_binaries, "conf_dir": CNI_SETTINGS},
        "containerd": {"default_runtime_name": "runc", "runtimes": {"runc": runc}},
        "registry": {"config_path": CERTS},
    }
    configuration = {"version": 2, "imports": [IMPORT], "plugins": {"io.containerd.grpc.v1.cri": cri}}
    texts = {MAIN: tomlkit.dumps(configuration), CRICTL: f"runtime-endpoint: {CONTAINERD_SOCKET}\n"}
    for registry, mirrors in settings.mirrors.items():
        # containerd tries the mirrors in this order, then the registry's own server.
        hosts: dict[str, Any] = {} if registry == EVERY else {"server": SERVERS.get(registry, f"https://{registry}")}
        hosts["host"] = {url: {"capabilities": ["pull", "resolve"]} for url in mirrors}
        for url in mirrors:
            if urlsplit(url).path.startswith("/v2/"):
                # The URL names a repository of a proxy (Harbor, Artifactory). Without this key, containerd would append
                # another /v2.
                hosts["host"][url]["override_path"] = True
        texts[f"{CERTS}/{registry}/hosts.toml"] = tomlkit.dumps(hosts)
    return tuple(NodeFile(path, (header + text).encode()) for path, text in texts.items())


HOSTS = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
"""Images have no /etc/hosts, and the kubelet needs one to start pods with hostNetwork."""
SYSCTLS = "/etc/sysctl.d/90-unbounded-agent.conf"
LOGIND = "/etc/systemd/logind.conf.d/90-unbounded-agent.conf"


def node_files(machine: str, settings: NodeSettings, inputs: NodeInputs) -> tuple[NodeFile, ...]:
    """Return the files of the node in a machine, sorted by path."""
    header = f"{MARK.decode()} on the host: `unbounded-agent up --rebuild {machine}` makes this machine again.\n"
    texts = {
        f"{UNITS}/kubelet.service": UNIT,
        f"{UNITS}/kubelet.service.d/99-unbounded-agent.conf": _command(settings, inputs),
        f"{UNITS}/multi-user.target.d/50-kubelet.conf": WANTED,
        f"{UNITS}/unbounded-agent-joined.path": JOINED_PATH,
        f"{UNITS}/unbounded-agent-joined.service": _joined_service(inputs.name),
        "/etc/hosts": HOSTS,
        # The kubelet would otherwise raise the limit itself, and needs logind to read it again for that.
        LOGIND: f"[Login]\nInhibitDelayMaxSec={math.ceil(shutdown_grace(settings.kubelet.configuration)) + 5}\n",
    }
    if inputs.own_network:
        # The parameters belong to a network. If the machine uses the host's, the host's own file sets them.
        texts |= {NETWORK_WANTED: NETWORK, SYSCTLS: sysctl_lines(FORWARDING)}
    files = [
        NodeFile(CA_FILE, inputs.ca),
        NodeFile(CONFIGURATION, json_for_yaml(_kubelet_configuration(settings))),
        NodeFile(BOOTSTRAP_KUBECONFIG, json_for_yaml(_bootstrap(settings))),
        *containerd_files(settings.containerd, header),
        *(NodeFile(path, (header + text).encode()) for path, text in texts.items()),
    ]
    if settings.kubelet.image_credential_providers:
        files.append(NodeFile(CREDENTIAL_PROVIDERS, json_for_yaml(_credential_providers(settings.kubelet)), 0o600))
    if settings.binaries and settings.binaries.pod_images:
        units = {POD_IMAGES_SERVICE: POD_IMAGES, f"{UNITS}/kubelet.service.d/50-pod-images.conf": POD_IMAGES_FIRST}
        files += [NodeFile(path, (header + text).encode()) for path, text in units.items()]
    return tuple(sorted(files, key=lambda file: file.path))


# The record of a node that `up` made: what its root file system was made from, and with which settings.


NOT_IN_ROOT = (
    "bootstrap_token",
    "carry",
    "keep_former",
    "image.credentials",
    "image.ca_directory",
    "image.mirror",
    "image.signature_policy",
    "binaries.mirror",
    "binaries.github_mirror",
    "binaries.bundle",
)
"""Settings that decide how a root file system is made, but not what is in it: a change of one needs no rebuild."""
OF_REGISTRATION = ("kubelet.gpu_labels", "kubelet.labels", "kubelet.startup_taint", "kubelet.taints")
"""Settings that a kubelet applies only when it registers a new Node (--node-labels in kubelet(1))."""
HOST_SETTINGS = "host."
"""The prefix of settings that are applied to the host. A change of one, other than SWAP, needs no rebuild either."""
SWAP = "host.swap"
"""The only setting of the host that the root file system also depends on: the kubelet's failSwapOn follows it."""


class NodeRecord(Struct, frozen=True):
    """The whole record."""

    node: str
    """Name of the Node object."""
    image: NodeImage
    inode: int
    """Inode number of the root directory. A directory with another number was not made by `up`; see `born`."""
    binaries: dict[str, str]
    """SHA-256 digests of the fetched files, which are programs or archives of programs, by path in the machine."""
    files: dict[str, str]
    """SHA-256 digests of the files that `up` wrote, by path in the machine."""
    settings: dict[str, str]
    """The settings that the root file system depends on, without defaults, as JSON by key."""
    made: float
    """When the root file system was complete, in seconds since the epoch."""
    born: int = 0
    """When the root directory was made, in nanoseconds since the epoch; 0 if unknown. The inode number alone proves
    nothing: once a directory is removed, a new one may get its number."""
    address: str = ""
    """The host's address that the kubelet uses; empty if the settings name one, or if the kubelet finds its own."""

    def made_from_the_same(self, other: "NodeRecord") -> bool:
        """Return whether both root file systems were made from the same image, programs, files and settings."""
        none: dict[str, object] = {"inode": 0, "born": 0, "made": 0.0}
        return replace(self, **none) == replace(other, **none)

    def is_of(self, inode: Seen[int], born: int) -> bool:
        """Return whether a directory is the one that `up` made. `born` is when the directory was made; 0 if unknown."""
        return inode == self.inode and (born == self.born or not born or not self.born)

    def is_at(self, path: str, system: System) -> bool:
        """Return whether the directory at a path is the one that `up` made."""
        inode = system.link_inode(path)
        return inode is not None and self.is_of(inode, system.birth(path))


NODE_RECORDS = Durable(NodeRecord)


def record_paths(machine: str) -> tuple[str, str]:
    """Return the paths of the two copies of a machine's record, in the order of writing."""
    path = node_record(machine)
    return path, f"{path.removesuffix('.json')}.copy.json"


def root_record(machine: str, which: str, system: System) -> Seen[NodeRecord]:
    """Return the record of a root file system of a switch: `next` or `former`."""
    return NODE_RECORDS.read(root_records(machine, which), system)


def is_others_candidate(machine: str, system: System) -> bool:
    """Return whether somebody else's machine has the name of the machine's candidate by now."""
    path, record = machine_root(candidate_of(machine)), root_record(machine, "next", system)
    if system.link_inode(path) is None:
        return system.exists(machine_image(candidate_of(machine)))
    return isinstance(record, Absent) or (isinstance(record, NodeRecord) and not record.is_at(path, system))


def make_record(
    settings: NodeSettings,
    inputs: NodeInputs,
    image: NodeImage,
    binaries: Iterable[NodeBinary],
    files: Iterable[NodeFile],
) -> NodeRecord:
    """Return the record of a root file system. Its `inode`, `made` and `born` are set when that is complete."""
    return NodeRecord(
        node=inputs.name,
        image=image,
        inode=0,
        binaries={each.path: each.sha256 for each in binaries},
        files={each.path: sha256(each.content) for each in files},
        settings=_settings_of_root(settings),
        made=0.0,
        address="" if settings.kubelet.node_ip else inputs.address,
    )


def changed_settings(record: NodeRecord, settings: NodeSettings) -> tuple[str, ...]:
    """Return the keys of settings whose values differ from those that the node was made with."""
    wanted, made = _settings_of_root(settings), record.settings
    return tuple(sorted(key for key in {*wanted, *made} if wanted.get(key) != made.get(key)))


def _settings_of_root(settings: NodeSettings) -> dict[str, str]:
    """Return the settings that the root file system depends on, without those that have their defaults, as JSON by key.

    So a later release that adds or drops a setting does not find that nodes were made with other settings.
    """
    return {
        key: json.dumps(to_builtins(value), sort_keys=True)
        for key, value in _chosen(settings)
        if key == SWAP or not (key in NOT_IN_ROOT or key.startswith(HOST_SETTINGS))
    }


def _chosen(table: Struct) -> Iterator[tuple[str, object]]:
    for each in fields(table):
        value = getattr(table, each.name)
        if isinstance(value, Struct):
            yield from ((f"{each.name}.{key}", inner) for key, inner in _chosen(value))
        elif value != (each.default if each.default_factory is NODEFAULT else each.default_factory()):
            yield each.name, value


# Collects what a node's files contain apart from its settings: the Node's name, its addresses, the CA.


HOST_NAME = "/proc/sys/kernel/hostname"
NAME_LIMIT = 63
"""Characters of a Node's name. The API allows more, but the kubelet also writes it into the label
kubernetes.io/hostname, whose value may have only so many."""
CERTIFICATE_MARK = b"-----BEGIN CERTIFICATE-----"


def node_inputs(
    machine: str, config: Config, system: System, address: Callable[[], str] = default_address
) -> NodeInputs:
    """Return the inputs of a machine's node, without the labels for its GPUs. Raises AgentError or OSError."""
    settings = config.machines[machine]
    node, own, name = settings.node, own_network(settings.nspawn), node_names(config, system)[machine]
    assert node, "the machine is a node"
    if len(name) > NAME_LIMIT:
        whose = f"machines.{machine}.node.name" if node.name else "the name of the host"
        raise ConfigError(
            f"{whose}, {name}, has {len(name)} characters, and no Node with more than {NAME_LIMIT} can register",
            f"set machines.{machine}.node.name to a shorter one",
        )
    return NodeInputs(name, node.kubelet.node_ip or ("" if own else address()), cluster_ca(node, system), own)


def changed_inputs(
    record: NodeRecord,
    machine: str,
    config: Config,
    system: System,
    address: Callable[[], str] = default_address,
    has_address: Callable[[str], bool] = has_address,
) -> tuple[str, ...]:
    """Return in words which of a node's inputs have changed since `up` made the node. Settings are not compared here.

    An input that cannot be observed now is left out.
    """
    settings = config.machines[machine]
    node, changed = settings.node, []
    assert node, "the machine is a node"
    with suppress(AgentError, OSError):
        if record.files.get(CA_FILE) not in (None, sha256(cluster_ca(node, system))):
            changed.append("the content of ca_file")
    with suppress(AgentError, OSError):
        if not node.name and record.node != (name := _host_name(machine, system)):
            changed.append(f"the host's name, now {name}")
    if own_network(settings.nspawn) != (NETWORK_WANTED in record.files):
        changed.append("whether the machine is on the host's network")
    elif record.address and not node.kubelet.node_ip:
        # If the host still has the recorded address, the address counts as unchanged, even if the default route now
        # uses another address.
        with suppress(AgentError, OSError):
            if not has_address(record.address):
                changed.append(f"the host's address, now {address()}")
    return tuple(changed)


def node_names(config: Config, system: System) -> dict[str, str]:
    """Return the names of Node objects, by the name of the machine that is the node.

    Raises ConfigError, for example if two machines would have the same Node.
    """
    names: dict[str, str] = {}
    for machine, settings in config.machines.items():
        if not settings.node:
            continue
        name = settings.node.name or _host_name(machine, system)
        if other := next((each for each, taken in names.items() if taken == name), ""):
            both = f"machines {other} and {machine} would both be the node {name}"
            raise ConfigError(both, f"set machines.{machine}.node.name")
        names[machine] = name
    return names


def _host_name(machine: str, system: System) -> str:
    name = system.read_text(HOST_NAME).strip().lower()
    if not is_subdomain(name) or name == "localhost":
        raise ConfigError(f"the host's name {name!r} cannot be a node's name", f"set machines.{machine}.node.name")
    return name


def cluster_ca(node: NodeSettings, system: System) -> bytes:
    """Return the CA certificate of the API server, in PEM format. Raises ConfigError."""
    path = node.ca_file
    try:
        content = system.read(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {error.strerror}", "write the cluster's CA there") from error
    if CERTIFICATE_MARK not in content:
        raise ConfigError(f"{path}: no certificate in PEM format", "write the cluster's CA certificate there")
    if b"PRIVATE KEY-----" in content:
        raise ConfigError(f"{path}: it has a private key, which no node may get", "remove the key from it")
    return content


# Finds and reads secrets: files that only root may read, and systemd credentials (systemd.exec(5)).
#
# No error, log or record contains a secret.


CREDENTIAL = "credential:"
DIRECTORY = "CREDENTIALS_DIRECTORY"
"""The variable in which systemd names the directory of a service's credentials."""
TOKEN = re.compile(r"[a-z0-9]{6}\.[a-z0-9]{16}")
"""A bootstrap token (BootstrapTokenPattern in k8s.io/cluster-bootstrap)."""
LIMIT = 1 << 16
"""Bytes of the largest secret that is read. A bootstrap token has 23."""


def secret_file(where: str, system: System) -> str:
    """Return the path of a secret's file. `where` is that path, or `credential:NAME`.

    Raises ConfigError if the file cannot be read, or if others may have read or written it.
    """
    if where.startswith(CREDENTIAL):
        name, directory = where.removeprefix(CREDENTIAL), os.environ.get(DIRECTORY, "")
        if not directory or name in (".", "..") or not system.is_file(f"{directory}/{name}"):
            run = f"run `systemd-run --pipe --wait --property=LoadCredential={name}:FILE unbounded-agent up`"
            raise ConfigError(f"{where}: systemd has not passed this credential to this command", run)
        return f"{directory}/{name}"
    try:
        real = system.real_path(where)
        mode = system.owner(real)[0]
        fault = settings_fault(system, where)
    except OSError as error:
        raise ConfigError(f"{where}: cannot read this secret: {error.strerror}", f"write it to {where}") from error
    if fault:
        what = f"refused, because somebody else could have written this secret: {fault}"
        raise ConfigError(f"{where}: {what}", "correct this, and replace the secret")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{where}: not a regular file", "write the secret to a file of mode 0600")
    if mode & 0o077:
        what = f"refused, because users other than root may have access to it (mode {stat.S_IMODE(mode):04o})"
        raise ConfigError(f"{where}: {what}", f"run `chmod 0600 {real}`, and replace the secret")
    return real


def read_token(where: str, system: System) -> str:
    """Return a bootstrap token. Raises ConfigError if the secret cannot be read, or is not a bootstrap token."""
    path = secret_file(where, system)
    try:
        token = system.read(path, LIMIT).decode(errors="replace").strip()
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot read this secret: {error.strerror}", f"write it to {where} again"
        ) from error
    if not TOKEN.fullmatch(token):
        what = "this is not a bootstrap token (6 characters, a dot, 16 characters)"
        raise ConfigError(f"{where}: {what}", "make one with `kubeadm token create`, and write it there")
    return token
