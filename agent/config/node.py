"""Settings of the Kubernetes node in a machine, for `unbounded-agent up`. Pure."""

from typing import Annotated, Any, Literal

from msgspec import field

from agent.config.kubernetes_names import IpAddress, LabelKey, LabelValue, NodeAddresses, NodeName, StartupTaint, Taint
from agent.config.table import Check, Table, text
from agent.config.values import AbsolutePath, usable_url

# Names become parts of URLs and paths: no part of one is `.` or `..`.
NO_DOTS = r"(?!.*/\.{1,2}(?:[/:@]|$))"
ImageName = Annotated[
    str,
    text(
        rf"{NO_DOTS}(docker://[^\s@]+(@sha256:[0-9a-f]{{64}})?|(oci|docker-archive):/[^\s]+)",
        "an image: docker://REGISTRY/NAME:TAG, oci:/DIRECTORY:TAG or docker-archive:/FILE:TAG",
        longest=512,
    ),
]
"""An image in a transport of containers-transports(5): a registry, an OCI layout, or an archive."""
Repository = Annotated[
    str,
    text(
        rf"{NO_DOTS}docker://[^\s@]+[^\s@/:]", "a repository, such as docker://registry.example.com/nodes", longest=400
    ),
]
Tag = Annotated[str, text(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", "a tag of an image")]
"""A tag as in the grammar of the OCI distribution specification."""
Version = Annotated[str, text(r"[0-9]+\.[0-9]+\.[0-9]+", "a version, such as 1.36.3")]
Sha256 = Annotated[str, text(r"[0-9a-f]{64}", "a SHA-256 digest: 64 hexadecimal digits in lower case")]
Url = Annotated[
    str,
    text(
        r"https?://[^\s/@]+(/[^\s]*)?", "a URL with http or https, and without a user name", longest=1024, secret=True
    ),
    Check(usable_url),
]
"""Without a user name and password, because the configuration must not contain secrets."""
ServerUrl = Annotated[
    str,
    Check(lambda value: value.rstrip("/")),
    text(r"https://[^\s/@]+", "an API server without a path, such as https://10.0.0.1:6443", longest=300),
    Check(usable_url),
]
Registry = Annotated[
    str,
    text(
        r"(_default|[A-Za-z0-9]([A-Za-z0-9-]|\.(?=[A-Za-z0-9]))*(:[0-9]{1,5})?)",
        "a registry, such as docker.io or registry.example.com:5000",
        longest=253,
    ),
]
"""A registry's host name with its port, or `_default` for every registry without mirrors of its own."""
SysctlName = Annotated[
    str, text(r"[a-z0-9_]+([./][A-Za-z0-9_-]+)+", "the name of a kernel parameter, such as vm.overcommit_memory")
]
SysctlValue = Annotated[str, text(r"[\x21-\x7e]+([ \t][\x21-\x7e]+)*", "one line of text", longest=1024)]
KernelModule = Annotated[str, text(r"[A-Za-z0-9_][A-Za-z0-9_-]*", "the name of a kernel module", longest=63)]
SecretFile = Annotated[
    str,
    text(
        r"(/[^\s]+|credential:[A-Za-z0-9_-][A-Za-z0-9_.-]*)",
        "an absolute path, or credential:NAME; the secret itself must not be here",
        longest=1024,
        secret=True,
    ),
]
"""Where a secret is: a file that only root may read, or `credential:NAME`, a systemd credential (systemd.exec(5),
LoadCredential=). The secret itself is never in the configuration."""


ARCHIVES: tuple[Literal["crictl", "cni_plugins"], ...] = ("crictl", "cni_plugins")
"""Programs whose projects publish them in archives, not as single files."""


class ImageSettings(Table, frozen=True, kw_only=True):
    """The OCI image from which the machine's root file system is made."""

    name: ImageName | Literal[""] = ""
    """An image: `docker://REGISTRY/NAME:TAG` (with `@sha256:...` to pin it), `oci:/DIRECTORY:TAG` or
    `docker-archive:/FILE:TAG`. Either `name` or `repository` is required; `name` overrides `repository`."""
    repository: Repository | Literal[""] = ""
    """A repository such as `docker://registry.example.com/nodes`. If the machine gets an NVIDIA GPU, its image is
    `agent-ubuntu2404-nvidia` in this repository; otherwise, it is `agent-ubuntu2404`."""
    tag: Tag = "latest"
    """The tag of the image in `repository`."""
    credentials: SecretFile | Literal[""] = ""
    """The registry's user names and passwords, in the format of containers-auth.json(5): the path of a file that only
    root may read, or `credential:NAME` (docs/bootstrap.md#secrets)."""
    ca_directory: AbsolutePath | Literal[""] = ""
    """A directory with the registry's CA certificates, in files `*.crt`. It may also have a client's certificate in
    `*.cert` with its key in `*.key` (containers-certs.d(5))."""
    mirror: Repository | Literal[""] = ""
    """Where to pull the image from instead of its own registry: with `docker://mirror.example.com/nodes`, the image
    `docker://REGISTRY/PATH/NAME:TAG` is pulled from `docker://mirror.example.com/nodes/NAME`, by its digest. If the
    image's name contains no digest, the agent asks the image's own registry for it."""
    signature_policy: AbsolutePath | Literal[""] = ""
    """A signature policy, containers-policy.json(5). Without one, the host's `/etc/containers/policy.json` applies. If
    that is missing too, only the digest is verified."""

    def __post_init__(self) -> None:
        if not self.name and not self.repository:
            raise ValueError("name or repository is missing: which image is the machine made from?")


class BinariesSettings(Table, frozen=True, kw_only=True):
    """Programs of a node, if the image does not contain them."""

    version: Version | Literal[""] = ""
    """Kubernetes' version, such as `1.36.3`, for the kubelet and `kubectl`."""
    mirror: Url = "https://dl.k8s.io"
    """The URL below which `release/vVERSION/bin/linux/ARCHITECTURE/kubelet` is."""
    crictl_version: Version | Literal[""] = ""
    """The version of `crictl`, from cri-tools."""
    cni_plugins_version: Version | Literal[""] = ""
    """The version of the standard CNI plugins. They replace the image's plugins in `containerd.cni_binaries`."""
    github_mirror: Url = "https://github.com"
    """The URL below which `kubernetes-sigs/cri-tools` and `containernetworking/plugins` are, with the archives of their
    releases, for `crictl` and the CNI plugins."""
    bundle: AbsolutePath | Literal[""] = ""
    """A directory on the host that contains the same files under their base names. It is used instead of the mirrors,
    for hosts without a network (docs/fleet.md#a-node-from-files)."""
    sha256: dict[Literal["kubelet", "kubectl", "crictl", "cni_plugins"], Sha256]
    """The SHA-256 digests of the files to fetch: of the programs `kubelet` and `kubectl`, and of the archives with
    `crictl` and `cni_plugins`. Only files with a digest are fetched."""

    def __post_init__(self) -> None:
        for name in self.sha256:
            key = f"{name}_version" if name in ARCHIVES else "version"
            if not getattr(self, key):
                raise ValueError(f"{key} is missing: set the version of the file that has the digest sha256.{name}")
        for name in ARCHIVES:
            if getattr(self, f"{name}_version") and name not in self.sha256:
                raise ValueError(f"sha256.{name} is missing: set the digest of the archive, or remove {name}_version")


class KubeletSettings(Table, frozen=True, kw_only=True):
    """The kubelet of the node."""

    labels: dict[LabelKey, LabelValue] = {}
    """Labels that the node has from its registration on."""
    gpu_labels: bool = False
    """Add labels for the machine's NVIDIA GPUs: `nvidia.com/gpu.present`, and the versions of driver and CUDA in
    `nvidia.com/cuda.driver-version.*` and `nvidia.com/cuda.runtime-version.*`, as GPU Feature Discovery names them. The
    versions are those at the node's registration: after that, only GPU Feature Discovery or an administrator changes
    them (docs/bootstrap.md#startup-taint)."""
    taints: list[Taint] = []
    """Taints, as `KEY=VALUE:EFFECT`, that the node has from its registration on."""
    startup_taint: StartupTaint = ""
    """A further taint, in the same form, that somebody else removes when the node's GPUs are ready
    (docs/bootstrap.md#startup-taint)."""
    node_ip: NodeAddresses = ""
    """The node's address. Empty means the host's address on the default route. If the machine has a network of its own,
    empty means the address that the kubelet finds in the machine."""
    cluster_dns: list[IpAddress] = field(default_factory=lambda: ["10.96.0.10"])
    """Addresses of the cluster's DNS service."""
    cluster_domain: NodeName = "cluster.local"
    """The cluster's DNS domain."""
    configuration: dict[str, Any] = {}
    """Fields of KubeletConfiguration (kubelet.config.k8s.io/v1beta1), which override the agent's. Tables are merged;
    other values replace the agent's."""


class ContainerdSettings(Table, frozen=True, kw_only=True):
    """containerd in the node."""

    sandbox_image: str = ""
    """The image of pods' sandboxes. Empty means containerd's default."""
    mirrors: dict[Registry, list[Url]] = {}
    """Mirrors by registry, such as `{ "docker.io" = ["https://mirror.example.com"] }`."""
    cni_binaries: AbsolutePath = "/usr/lib/cni"
    """The directory with the CNI plugins, in the machine."""


class HostNodeSettings(Table, frozen=True, kw_only=True):
    """Settings of the host that a node needs."""

    sysctls: dict[SysctlName, SysctlValue] = {}
    """Kernel parameters, in addition to those that the kubelet and CNI need (docs/bootstrap.md#host-settings)."""
    kernel_modules: list[KernelModule] = field(default_factory=lambda: ["overlay", "br_netfilter", "nf_conntrack"])
    """Kernel modules that are loaded now and at each boot."""
    swap: Literal["off", "keep"] = "off"
    """Whether swap is turned off, as the kubelet requires by default. `"keep"` leaves swap as it is. If an earlier `up`
    has turned swap off, the next `up` says how to turn it on again."""


class NodeSettings(Table, frozen=True, kw_only=True):
    """The Kubernetes node in the machine. Only `unbounded-agent up` uses these settings (docs/bootstrap.md)."""

    name: NodeName | Literal[""] = ""
    """The name of the Node object. Empty means the host's name, which only one node on a host can have."""
    server: ServerUrl
    """The API server, such as `https://10.0.0.1:6443`."""
    ca_file: AbsolutePath
    """A file with the CA certificate of the API server, in PEM format."""
    bootstrap_token: SecretFile | Literal[""] = ""
    """The path of a file with the bootstrap token (`ID.SECRET`) that only root may read, or `credential:NAME`
    (docs/bootstrap.md#secrets). After the node has joined, the token is removed from the machine. Required, except with
    `exec_credential`."""
    exec_credential: list[str] = []
    """Instead of a bootstrap token: a program that prints an ExecCredential, as an absolute path in the machine, and
    its arguments."""
    image: ImageSettings
    """What the machine's root file system is made from."""
    binaries: BinariesSettings | None = None
    """Kubernetes' programs to put into the machine, if the image does not contain them."""
    kubelet: KubeletSettings = KubeletSettings()
    """Settings of the kubelet."""
    containerd: ContainerdSettings = ContainerdSettings()
    """Settings of containerd."""
    host: HostNodeSettings = HostNodeSettings()
    """Settings of the host."""

    def __post_init__(self) -> None:
        if bool(self.bootstrap_token) == bool(self.exec_credential):
            raise ValueError("set either bootstrap_token or exec_credential: how does the kubelet join?")
        if self.exec_credential and not self.exec_credential[0].startswith("/"):
            raise ValueError(f"exec_credential: {self.exec_credential[0]!r} is not an absolute path in the machine")
