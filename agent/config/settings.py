"""The settings of the configuration. Pure.

docs/configuration.md is generated from these classes and their docstrings (`make docs`).
"""

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal

from msgspec import field

from agent.config.checks import (
    NAME_LIMIT,
    AbsolutePath,
    Check,
    IpAddress,
    LabelKey,
    LabelValue,
    NodeAddresses,
    NodeName,
    Range,
    StartupTaint,
    Table,
    Taint,
    absolute,
    host_name,
    is_below,
    once,
    plain,
    text,
    usable_url,
)
from agent.model.device import as_in_sysfs
from agent.model.paths import (
    CDI_DIRECTORIES,
    CONFIG_FILE,
    MACHINE_HOST_NVIDIA,
    MACHINE_ROOTS,
    RUNTIME,
    STATE,
    carried_name,
)

# Devices other than GPUs, and further CDI specifications and hooks.
DeviceClassName = Literal["kvm", "tun", "vhost", "infiniband", "gdrcopy", "nvidia-fs", "accel"]

CdiMode = Literal["gds", "mofed", "gdrcopy", "imex", "nvswitch", "management"]

CdiHook = Literal[
    "enable-cuda-compat", "disable-device-node-modification", "update-application-profile", "apply-cuda-memory-limits"
]

GPU_PREFIX, GPU_PATHS = "/dev/nvidia", ("/dev/dri", "/dev/kfd")
NSPAWN_PATHS = (
    *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx")),
    *(f"/dev/{name}" for name in ("pts", "shm", "mqueue", "char", "block", "fd", "stdin", "stdout", "stderr", "core")),
)
"""Nodes, directories and links that nspawn creates in each machine (src/nspawn/nspawn.c: copy_devnodes, setup_pts,
setup_dev_console)."""
KMSG = "/dev/kmsg"


def _allowed_path(value: str) -> str:
    if not value.startswith("/dev/"):
        raise ValueError(f"{value!r} is not below /dev")
    if value.startswith(GPU_PREFIX) or is_below(value, GPU_PATHS):
        raise ValueError(f"{value} belongs to GPUs or their driver: use `gpus` or `devices`")
    if is_below(value, NSPAWN_PATHS):
        raise ValueError(f"{value} cannot be given: each machine has its own")
    if value == KMSG:
        raise ValueError(f"{value} cannot be given here: use `nspawn.kmsg`")
    return value


class ExtraDevice(Table, frozen=True, kw_only=True):
    """One character device of the host. It has the same path in the machine."""

    path: Annotated[str, Check(absolute), Check(plain), Check(_allowed_path)]
    """Below `/dev`. A symbolic link is not followed."""
    mode: Literal["r", "rw", "rwm"] = "rw"
    """What the machine's cgroup permits: reading (`r`), writing (`w`), mknod (`m`)."""


CDI_MODES = {
    "gds": ("devices", "nvidia-fs"),
    "mofed": ("devices", "infiniband"),
    "gdrcopy": ("devices", "gdrcopy"),
    "imex": ("imex_channels", ""),
    "nvswitch": ("", ""),
    "management": ("", ""),
}
"""By mode, the setting that grants the mode's device nodes, and the value that this setting's list must contain. If the
setting is not a list, the value is empty. If the mode needs no other setting, both are empty."""


CdiModes = Annotated[list[CdiMode], once("mode", str)]
CdiHooks = Annotated[list[CdiHook], once("hook", str)]
DeviceClasses = Annotated[list[DeviceClassName], once("device", str)]
ExtraDevices = Annotated[list[ExtraDevice], once("device", attrgetter("path"))]


# Extra bind mounts.
#
# nspawn's own `Bind=` and `BindReadOnly=` accept any path. The paths that are refused here would keep a machine from
# starting, hide what the agent and systemd need in it, or let the machine take control of the host.
REFUSED_SOURCES = {
    "each machine has its own": ("/proc", "/sys"),
    "for device nodes use `devices` or `extra_devices`": ("/dev",),
    "unbounded-agent.service cannot see the host's files there": (
        "/root", "/run/user", "/tmp", "/var/tmp", "/lib/modules", "/usr/lib/modules",
    ),
}  # fmt: skip
"""By reason, the paths that cannot be a source. No path below them can be a source either."""
SETTINGS_PLACES = ("/etc", "/run", "/usr/lib", "/lib", "/usr/local/lib", "/usr/share", "/usr/local/share")
"""Where programs look for the directories in SETTINGS, one place after the other."""
SETTINGS = (
    # systemd's own, and what it and udevd run or set as root.
    *("systemd", "modprobe.d", "modules-load.d", "depmod.d", "tmpfiles.d", "sysctl.d", "sysusers.d", "binfmt.d"),
    *("environment.d", "credstore", "credstore.encrypted", "kernel"),
    # Who may do what, and what runs when.
    *("dbus-1", "polkit-1", "pam.d", "security", "ssh", "sudoers.d", "cron.d", "init.d", "profile.d"),
    # What packages, the initramfs, the network and container runtimes run.
    *("apt", "dpkg", "initramfs-tools", "dracut", "network", "NetworkManager", "networkd-dispatcher"),
    *("containers", "containerd", "docker", "cdi"),
)
"""Directories of settings, by their name in each of SETTINGS_PLACES, that make root's programs run a program, load a
library or change any file."""
CONTROL_NAMES = (
    # Files that decide who becomes root, what is mounted, and what root's programs run.
    *("passwd", "shadow", "group", "gshadow", "subuid", "subgid", "sudoers", "sudo.conf"),
    *("fstab", "crypttab", "inittab", "exports", "nsswitch.conf", "login.defs", "rc.local"),
    *("crontab", "anacrontab", "cron.hourly", "cron.daily", "cron.weekly", "cron.monthly"),
    *("ld.so.preload", "ld.so.conf", "ld.so.conf.d", "environment", "profile", "bash.bashrc"),
    *("logrotate.d", "logrotate.conf", "sysctl.conf", "modules", "default", "alternatives"),
    *("apparmor.d", "grub.d", "kubernetes", "nftables.conf", "rc.d", "acpi"),
)
"""Further names in /etc."""
CONTROL_PATHS = (
    *(STATE, RUNTIME, posixpath.dirname(CONFIG_FILE), MACHINE_ROOTS),
    *(f"{place}/{name}" for place in SETTINGS_PLACES for name in SETTINGS),
    # udevd's, except /run/udev/data. Its control socket serves any root user, even root in a machine.
    *("/etc/udev", "/usr/lib/udev", "/lib/udev", "/usr/local/lib/udev", "/run/udev/control", "/run/udev/rules.d"),
    # The agent itself, directories with programs, and the kernel. Mounted read-only, they are not protected: root in
    # the machine can remount them writable. Directories of libraries are not here: they may be mounted read-only, and
    # docs/security.md warns of that.
    *("/opt/unbounded-agent", "/usr/lib/unbounded-agent", "/boot", "/efi", "/usr/src", "/var/lib/dkms"),
    *("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/usr/libexec", "/usr/games"),
    *(f"/etc/{name}" for name in CONTROL_NAMES),
    *("/var/spool/cron", "/var/spool/anacron", "/var/lib/dpkg", "/var/lib/systemd", "/var/lib/polkit-1"),
    # Sockets through which a program starts containers, and their files.
    *("/run/docker.sock", "/run/crio", "/run/podman", "/var/lib/docker", "/var/lib/containerd", "/var/lib/containers"),
)
"""Paths that control the host and all machines. No source may be one of them, lie below one, or contain one."""
TRUSTED = ("/usr", "/etc", "/lib", "/lib32", "/lib64", "/libx32")
"""Directories with files that the host's root executes or reads. Machines may mount them, but only read-only."""
REFUSED_TARGETS = {
    "each machine has its own": ("/proc", "/sys", "/dev"),
    "the machine's systemd-tmpfiles removes old files there": ("/tmp", "/var/tmp"),
    "systemd in the machine has files there": ("/etc/systemd", "/lib/systemd", "/usr/lib/systemd", "/run/systemd"),
    "systemd-nspawn has files there": ("/run/host",),
    "the agent has files there": (
        MACHINE_HOST_NVIDIA, RUNTIME, STATE, *CDI_DIRECTORIES, "/run/cdi", "/lib/modules", "/usr/lib/modules",
        "/usr/lib/unbounded-agent", "/etc/containerd", "/etc/nvidia-container-runtime",
    ),
    "it is a link in the machine": ("/var/run", "/bin", "/sbin", "/lib", "/lib64"),
}  # fmt: skip
"""By reason, the paths that cannot be a target. No path below them can be a target either."""
LINK_DIRECTORIES = ("/usr/bin", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib/i386-linux-gnu")
"""Directories in which the machine half makes links. They cannot be targets themselves, but paths below them can."""


def mountable(value: str, *, read_only: bool, control_paths: Collection[str] = CONTROL_PATHS) -> str:
    """Return the path. Raises ValueError if it must not be the source of a mount.

    Some of CONTROL_PATHS may be links on the host. A caller that can read the host passes as `control_paths` both
    CONTROL_PATHS and the paths to which they lead.
    """
    for why, paths in REFUSED_SOURCES.items():
        if is_below(value, paths):
            raise ValueError(f"{value} cannot be mounted into a machine: {why}")
    if is_below(value, control_paths) or _is_above(value, control_paths):
        raise ValueError(
            f"{value} is, contains or lies below a path that controls the host or other machines: choose another source"
        )
    if not read_only and is_below(value, TRUSTED):
        raise ValueError(f"{value} is where the host keeps its own programs and settings: set read_only = true")
    return value


def _allowed_target(value: str) -> str:
    for why, paths in REFUSED_TARGETS.items():
        if is_below(value, paths):
            raise ValueError(f"nothing can be mounted at {value}: {why}")
    needed = (*(path for paths in REFUSED_TARGETS.values() for path in paths), *LINK_DIRECTORIES)
    if value in LINK_DIRECTORIES or _is_above(value, needed):
        raise ValueError(
            f"a mount at {value} would hide files that the machine needs: choose a path inside that directory"
        )
    return value


def _is_above(path: str, paths: Iterable[str]) -> bool:
    """Return whether one of `paths` lies below the path."""
    return any(each.startswith(f"{path.rstrip('/')}/") for each in paths)


class ExtraMount(Table, frozen=True, kw_only=True):
    """A directory or file of the host, with everything mounted below it, at a path in the machine."""

    source: Annotated[str, Check(absolute), Check(plain)]
    """Absolute path on the host."""
    target: Annotated[str, Check(absolute), Check(plain), Check(_allowed_target)]
    """Absolute path in the machine."""
    read_only: bool = True
    """Mount it read-only. This guards only against mistakes: root in the machine can remount it writable."""

    def __post_init__(self) -> None:
        mountable(self.source, read_only=self.read_only)


ExtraMounts = Annotated[list[ExtraMount], once("a mount at", attrgetter("target"))]


NODE_STATE = ("/etc/kubernetes", "/etc/cni", "/opt/cni", "/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni")


def _carriable(value: str) -> str:
    """Return the path of a directory that outlives the machine's root file system."""
    if is_below(value, ("/run", "/usr", "/boot")) and not is_below(value, ("/usr/local",)):
        raise ValueError(f"{value} belongs to the image, or ends with each boot: it cannot be carried")
    if is_below(value, NODE_STATE) or _is_above(value, NODE_STATE):
        raise ValueError(f"{value} has the state of the kubelet and its programs, which each root makes for itself")
    if len(carried_name(value).encode()) > NAME_LIMIT:
        raise ValueError(f"{value[:40]}... is too long to be carried")
    return value


CarriedPath = Annotated[str, Check(absolute), Check(plain), Check(_allowed_target), Check(_carriable)]


# The Kubernetes node in a machine.
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


ArchiveName = Annotated[
    str, text(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.tar", "the name of an archive, such as pause.tar", longest=128)
]


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
    pod_images: dict[ArchiveName, Sha256] = {}
    """Archives of pods' images in `bundle`, with their SHA-256 digests (docs/fleet.md#a-node-from-files)."""

    def __post_init__(self) -> None:
        if self.pod_images and not self.bundle:
            raise ValueError("pod_images needs bundle: the directory on the host with these archives")
        for name in self.sha256:
            key = f"{name}_version" if name in ARCHIVES else "version"
            if not getattr(self, key):
                raise ValueError(f"{key} is missing: set the version of the file that has the digest sha256.{name}")
        for name in ARCHIVES:
            if getattr(self, f"{name}_version") and name not in self.sha256:
                raise ValueError(f"sha256.{name} is missing: set the digest of the archive, or remove {name}_version")


GRACE_KEYS = ("shutdownGracePeriod", "shutdownGracePeriodCriticalPods", "shutdownGracePeriodByPodPriority")
"""The fields of KubeletConfiguration that say how long pods may take to end when the node shuts down."""
DEFAULT_GRACE = {"shutdownGracePeriod": "40s", "shutdownGracePeriodCriticalPods": "10s"}
"""What `up` writes unless one of GRACE_KEYS is configured: 30 s, a pod's default grace period, then 10 s for critical
pods. Without these fields, the kubelet ends no pod."""
DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(h|ms|us|µs|ns|m|s)")
SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}


def shutdown_grace(configuration: Mapping[str, Any]) -> float:
    """Return how many seconds a kubelet with this configuration gives its pods when the node shuts down.

    With shutdownGracePeriodByPodPriority, it gives each priority its own time, one after the other.
    """
    by_priority = configuration.get(GRACE_KEYS[2])
    if isinstance(by_priority, list):
        each = [row.get("shutdownGracePeriodSeconds") for row in by_priority if isinstance(row, dict)]
        return float(sum(seconds for seconds in each if isinstance(seconds, int)))
    text = str((configuration if {*GRACE_KEYS} & {*configuration} else DEFAULT_GRACE).get(GRACE_KEYS[0], ""))
    return sum(float(number) * SECONDS.get(unit, 0.001) for number, unit in DURATION.findall(text))


VariableName = Annotated[str, text(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable", longest=128)]
VariableValue = Annotated[str, text(r"[^\x00-\x1f\x7f]*", "one line of text", longest=1024, secret=True)]
"""One line of text. No driver's variable needs a line break, so one in the configuration is a mistake."""

ProviderName = Annotated[
    str, text(r"(?!\.{1,2}$)[A-Za-z0-9_.-]+", "the file name of a credential provider, such as ecr-credential-provider")
]
ImagePattern = Annotated[
    str,
    text(
        # Only the parts of the host may have globs (matchImages in CredentialProviderConfig).
        rf"{NO_DOTS}[A-Za-z0-9*?-]+(\.[A-Za-z0-9*?-]+)*(:[0-9]{{1,5}})?(/[A-Za-z0-9_./-]*)?",
        "a pattern of images without a scheme, such as *.dkr.ecr.*.amazonaws.com or registry.example.com/team",
        longest=512,
    ),
]
GoDuration = Annotated[str, text(r"0|([0-9]+(\.[0-9]+)?(h|m|s|ms))+", "a duration, such as 12h or 1h30m", longest=64)]
PlainDirectory = Annotated[
    str, text(r"(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+", "an absolute path of letters, digits, dots, hyphens and underscores")
]


def _some(patterns: list[str]) -> list[str]:
    if not patterns:
        raise ValueError("name at least one pattern: the kubelet would never ask this provider")
    return patterns


class CredentialProvider(Table, frozen=True, kw_only=True):
    """A program in the machine's image that gives the kubelet short-lived credentials for pods' images."""

    name: ProviderName
    """The program's file name."""
    match_images: Annotated[list[ImagePattern], Check(_some)]
    """The images for which the kubelet asks it."""
    cache_duration: GoDuration = "12h"
    """How long an answer counts that does not say so itself; `0`: not at all."""
    args: list[VariableValue] = []
    """Its arguments, without secrets."""
    env: dict[VariableName, VariableValue] = {}
    """Its environment variables, without secrets."""


class KubeletSettings(Table, frozen=True, kw_only=True):
    """The kubelet of the node."""

    labels: dict[LabelKey, LabelValue] = {}
    """Labels that the node has from its registration on."""
    gpu_labels: bool = False
    """Add labels for the machine's NVIDIA GPUs: `nvidia.com/gpu.present`, and the versions of driver and CUDA in
    `nvidia.com/cuda.driver-version.*` and `nvidia.com/cuda.runtime-version.*`, as GPU Feature Discovery names them. The
    versions are those at the node's registration (docs/bootstrap.md#startup-taint)."""
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
    image_credential_providers: Annotated[list[CredentialProvider], once("provider", attrgetter("name"))] = []
    """Programs that give credentials for images, such as
    `[{ name = "ecr-credential-provider", match_images = ["*.dkr.ecr.*.amazonaws.com"] }]`."""
    image_credential_provider_directory: PlainDirectory = "/usr/local/bin"
    """Their directory in the machine."""
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
    has turned swap off, `rm /etc/systemd/system/swap.target && systemctl daemon-reload && systemctl start swap.target`
    turns it on again."""


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
    carry: Annotated[list[CarriedPath], once("the directory", str)] = []
    """Directories in the machine that outlive its root file system, such as `["/srv/data"]`: the host keeps them. In a
    new node, they are empty at first; in one that exists, move their files first (docs/bootstrap.md#carry)."""
    keep_former: Annotated[int, Range(1, 8760)] = 168
    """Hours that a machine is ready with a new root file system until the former one is removed."""

    def __post_init__(self) -> None:
        for path in self.carry:
            if _is_above(path, self.carry):
                raise ValueError(f"carry: {path} has another carried directory in it")
        if bool(self.bootstrap_token) == bool(self.exec_credential):
            raise ValueError("set either bootstrap_token or exec_credential: how does the kubelet join?")
        if self.exec_credential and not self.exec_credential[0].startswith("/"):
            raise ValueError(f"exec_credential: {self.exec_credential[0]!r} is not an absolute path in the machine")


# Environment variables of pods.
#
# They go into the CDI specification, whose variables override those of a pod's manifest and image (container-edits.go
# of CDI's Go library). Therefore variables that other programs depend on are refused.
REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile("(NVIDIA|NVCT)_.*"), "the container runtime takes it for a request for devices, or sets it itself"),
    (re.compile("LD_.*|GLIBC_TUNABLES"), "the loader would obey it in each program of each image"),
    (re.compile("PATH"), "it would replace the image's own, with which its programs are found"),
    (re.compile("HOME|HOSTNAME|KUBERNETES_.*"), "each pod has its own"),
)
"""Patterns of names that are refused, and why."""


def _acceptable(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        for pattern, why in REFUSED:
            if pattern.fullmatch(name):
                raise ValueError(f"{name} may not be set for all pods: {why}")
    return variables


Variables = Annotated[dict[VariableName, VariableValue], Check(_acceptable)]
PodEnvironment = dict[Literal["nvidia"], Variables]
"""Variables by vendor. A pod gets only those of its device's vendor: another vendor's driver may misread them."""


# systemd-nspawn (systemd.nspawn(5)).
OneLine = Annotated[
    str,
    text(r"([^\x00-\x1f\x7f]*[^\x00-\x1f\x7f\\])?", "one line of text that does not end in a backslash", secret=True),
]
"""Text for one line of a unit file. A line break would start another setting; a backslash at the end would join the
next line."""
SectionName = Annotated[str, text(r"[A-Z][A-Za-z]*", "the name of a section, such as Files")]
KeyName = Annotated[str, text(r"[A-Z][A-Za-z0-9]*", "the name of a setting, such as Bind")]

MOUNT_PART = re.compile(r"(?:^|:)((?:\\.|[^:\\])*)")
"""Matches one part of a mount setting's value. Parts end at a colon, but not at `\\:`, an escaped colon
(systemd.nspawn(5), --bind= of systemd-nspawn(1))."""

NO_USER_NAMESPACE = (
    "a machine cannot have a user namespace: systemd could bind no device into it while it runs; the "
    "kubelet could not open /dev/kmsg; CNI could not create interfaces in the host's network; remove private_users and "
    "PrivateUsers (docs/security.md)"
)


class NspawnSettings(Table, frozen=True, kw_only=True):
    """Settings of systemd-nspawn, systemd.nspawn(5). Where a default weakens the machine's isolation, its description
    says why."""

    capability: OneLine = "CAP_BPF CAP_IPC_LOCK CAP_NET_ADMIN CAP_PERFMON CAP_SYSLOG"
    """Capabilities in addition to systemd-nspawn's own set (`--capability=` in systemd-nspawn(1)), which contains
    CAP_SYS_ADMIN and CAP_MKNOD. `"all"` gives every capability.

    CAP_NET_ADMIN is for CNI and kube-proxy, CAP_SYSLOG for the kubelet, which reads `/dev/kmsg`, and CAP_IPC_LOCK for
    pods that pin memory; pods may ask for the others. The default does not contain CAP_SYS_MODULE, CAP_SYS_RAWIO and
    CAP_SYS_TIME, which change the host's kernel, I/O ports and clock (docs/security.md).
    """
    private_users: bool = False
    """Always `false`: a machine cannot have a user namespace (docs/security.md)."""
    system_call_filter: OneLine = "@keyring bpf"
    """System calls to allow in addition to nspawn's own. runc joins a session keyring and loads BPF device programs;
    nspawn's own filter forbids both."""
    virtual_ethernet: bool = False
    """Give the machine a network of its own. By default the machine uses the host's network."""
    kmsg: bool = True
    """Bind `/dev/kmsg`. The kubelet watches it for out-of-memory kills and does not start without it."""
    modules: bool = True
    """Bind `/lib/modules` read-only. kube-proxy and CNI plugins read it."""
    environment: dict[VariableName, OneLine] = field(
        default_factory=lambda: {
            "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
            "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network",
        }
    )
    """Environment variables of systemd-nspawn itself. The defaults give the machine cgroup v2, and make `/proc/sys/net`
    writable for CNI."""
    extra: dict[SectionName, dict[KeyName, OneLine | list[OneLine]]] = {}
    """Any other settings of systemd.nspawn(5), by section, such as `extra.Files.Bind = ["/srv/data"]`. They are
    appended unchanged."""

    def __post_init__(self) -> None:
        if self.private_users or "PrivateUsers" in self.extra.get("Exec", {}):
            raise ValueError(NO_USER_NAMESPACE)

    def mounted_paths(self) -> Iterator[str]:
        """Yield the host paths in `extra` in which root in the machine can write. The paths have no escapes.

        Paths of BindReadOnly= are among them, because root in the machine can remount them writable. Of an overlay's
        paths, only the one that takes the overlay's changes is among them: the last path before the target. If Overlay=
        has only two paths, the second one takes the changes, and is the target too. OverlayReadOnly= has no path that
        takes changes.
        """
        files = self.extra.get("Files", {})
        for key in ("Bind", "BindReadOnly", "Overlay"):
            lines = files.get(key, [])
            for line in [lines] if isinstance(lines, str) else lines:
                # systemd removes blanks at the start.
                parts = [re.sub(r"\\(.)", r"\1", part) for part in MOUNT_PART.findall(line.strip())]
                path = parts[-2 if len(parts) > 2 else -1] if key == "Overlay" else parts[0].removeprefix("-")
                # Leave out empty paths, and paths that start with "+", which lie below the machine's own root.
                if path.startswith("/"):
                    yield path


GPU_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

MACHINE_NAME = r"[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?)*"
MachineName = Annotated[
    str, text(MACHINE_NAME, "a host name (letters, digits, hyphens and underscores, parts joined by dots)", longest=64)
]
"""A host name (machinectl(1)). It becomes part of unit names and paths, so it must not contain a slash."""
ADDRESS = text(
    r"(\[[0-9a-f:.]+\]|[0-9a-zA-Z.-]+):[0-9]{1,5}", "an address with a port, such as 127.0.0.1:9788 or [::1]:9788"
)
PORT_LIMIT = 65535

DropIn = Annotated[
    str,
    text(
        # config.toml is the main file of containerd or of nvidia-container-runtime, so it cannot be a drop-in.
        r"((?!.*/config\.toml$)(/[A-Za-z0-9][A-Za-z0-9_.-]*){2,}\.(toml|part))?",
        "an absolute path in the machine that ends in .toml or .part, such as /etc/cri/conf.d/20-gpu.part (letters, "
        "digits, dots, hyphens and underscores)",
    ),
]
"""A path for containerd's `imports`. The entries of `imports` are glob patterns, so the path must have no wildcards. No
name in the path may begin with a dot."""


GPUS_EXPECTED = 'must be "all", "count=N" or a list of PCI addresses and UUIDs'


def _gpus(value: str | list[str]) -> str | list[str]:
    if isinstance(value, str):
        if value != "all" and not re.fullmatch(r"count=[1-9][0-9]{0,3}", value):
            raise ValueError(GPUS_EXPECTED)
        return value
    if not value:
        raise ValueError("the list names no GPU")
    for each in value:
        if not as_in_sysfs(each) and not GPU_UUID.fullmatch(each):
            raise ValueError(f"{each!r} is neither a PCI address (0000:01:00.0) nor a UUID (GPU-...)")
    return [as_in_sysfs(each) or each for each in value]


def _host_and_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    host_name(host)
    if int(port) > PORT_LIMIT:
        raise ValueError(f"the highest port is {PORT_LIMIT}")
    return value


class MachineSettings(Table, frozen=True, kw_only=True):
    """The machine NAME, whose root file system is `/var/lib/machines/NAME`."""

    gpus: Annotated[OneLine | list[OneLine], Check(_gpus)] = "all"
    """Which GPUs the machine gets: `"all"`, `"count=N"`, or a list of PCI addresses and UUIDs.

    `"all"` means all GPUs of all vendors, even those that other machines have. Lists may also share a GPU: each machine
    gets the GPUs that its list names. `"count=2"` means two GPUs that no list names and no other machine with
    `"count=N"` has: NVIDIA's first, then AMD's, then Intel's; within each vendor, GPUs with a driver come first, and
    then the order is by PCI address. A machine keeps the GPUs that it has.

    `"all"` and `"count=N"` leave out SR-IOV virtual functions whose physical GPU is on this host too: such functions
    are meant for virtual machines. A machine gets one only if `gpus` lists its address. Write a PCI address as
    `0000:01:00.0`, or as `lspci` or `nvidia-smi` prints it.

    NVSwitch and NVLink nodes reach all GPUs of a host. Only a machine that has all GPUs, detached ones included, gets
    these nodes.
    """
    require_gpus: bool | None = None
    """Whether the machine counts as not ready while it gets no GPU (docs/conditions.md#ready): because the host has no
    GPU, an administrator detached the GPUs, or they have another kernel driver or none.

    Without this key, the machine counts as not ready only if the host has no GPU and something says that it is meant to
    have one: `gpus`, `mig_config`, `mig_monitor`, `imex_channels`, `sockets` or `min_healthy_gpus` is set, or NVIDIA's
    driver is installed.
    """
    min_healthy_gpus: Annotated[int, Range(0, 64)] = 0
    """How many GPUs that can serve pods the machine needs to be ready. 0: one. GPUs that a condition names as faulty do
    not count, such as those that need a reset (docs/conditions.md#gpushealthy)."""
    test_gpus: bool = False
    """Let each GPU pass `gpus test` before pods get it: when the machine is first ready, and after a reset, an attach
    or a change of the driver (docs/conditions.md#gpustested)."""
    driver_wait: Annotated[int, Range(0, 240)] = 120
    """How many seconds the machine's start waits at most for a driver that loads late when the host boots.

    A start waits for the driver of an Intel or AMD GPU only if `gpus` names that GPU, one of its vendor's kernel
    modules is loaded, or the machine already had the GPU (docs/hardware/intel-amd.md#without-a-driver).
    """
    on_detach: Literal["refuse", "drain-wait", "force"] = "refuse"
    """What `gpus detach` does with a GPU that processes have open (docs/gpu-hotplug.md)."""
    drain_wait: Annotated[int, Range(0, 86400)] = 600
    """How many seconds `on_detach = "drain-wait"` waits at most until no process has the GPU open."""
    device_mode: Literal["rw", "rwm"] = "rw"
    """What the machine's cgroup permits on GPU nodes. `"rwm"` adds mknod, which crun needs. runc does not need
    mknod, because it binds the nodes instead."""
    mig_config: bool = False
    """Grant the privilege to change the MIG layout of all GPUs of the host.

    MIG (Multi-Instance GPU) splits one GPU into several instances. A machine needs no privilege to use the
    instances of its own GPUs (docs/hardware/devices.md#mig).
    """
    mig_monitor: bool = False
    """Grant the privilege to monitor all MIG instances of all GPUs of the host."""
    imex_channels: bool = False
    """Grant the IMEX channels, through which GPUs of several hosts in one NVLink domain share memory
    (docs/hardware/devices.md#imex-channels)."""
    sockets: list[Literal["persistenced", "fabricmanager", "mps"]] = []
    """Driver daemons on the host whose sockets the machine, and all its pods with GPUs, get. Each daemon serves the
    whole host (docs/drivers.md#sockets-of-daemons)."""
    pod_environment: PodEnvironment = {}
    """Environment variables for every container that gets an NVIDIA GPU through the agent's CDI specification, in the
    table `nvidia`, the only one. For example: `pod_environment.nvidia = { __GLX_VENDOR_LIBRARY_NAME = "nvidia" }`
    (docs/graphics.md). The variables replace those of the same name in the pod's manifest. They are not
    secret: every user of the host can read them."""
    default_runtime: bool = False
    """Make `nvidia` containerd's default runtime. Pods then need no RuntimeClass."""
    containerd_drop_in: DropIn = ""
    """Where the agent's part of containerd's configuration is in the machine: an absolute path that ends in `.toml` or
    `.part`. Empty means `/etc/containerd/conf.d/99-nvidia.toml` (docs/drivers.md#containerd)."""
    allocation: Literal["device-plugin", "dra"] = "device-plugin"
    """Who offers the machine's GPUs to pods: a vendor's device plugin, or with `"dra"` the node itself, by Kubernetes'
    Dynamic Resource Allocation (docs/dra.md). To move a running node, use `kube allocation`."""
    share_gpus: bool = False
    """With `allocation = "dra"`, let pods share a GPU if their claims ask for a part of its memory. Nothing keeps a pod
    from using more than it asked for (docs/dra.md#share-a-gpu)."""
    restart_device_plugin: bool = False
    """Restart the container of NVIDIA's or AMD's device plugin when a GPU has appeared or disappeared without the
    plugin noticing, or when the plugin's own CDI specification is out of date. Needs `crictl` in the machine
    (docs/kubernetes.md)."""
    node_condition: bool = False
    """Set the condition `GPUReady` on the machine's Node object, with the identity of the machine's kubelet. Needs
    `kubectl` in the machine (docs/conditions.md#nodeconditionset)."""
    cordon_node: bool = True
    """Cordon the machine's Node while a device plugin offers a GPU that needs a reset or a reboot, or is broken
    (docs/conditions.md#the-cordon-for-a-gpu)."""
    validation_markers: bool = False
    """Make the files `driver-ready` and `toolkit-ready` in the machine's `/run/nvidia/validations`. Components of
    NVIDIA's GPU Operator wait for them. Leave it off if the Operator's own validator runs
    (docs/kubernetes.md#validation-markers)."""
    devices: DeviceClasses = []
    """Devices of the host other than GPUs. Each name stands for a set of device nodes
    (docs/hardware/devices.md#other-devices)."""
    extra_devices: ExtraDevices = []
    """Other character devices, each by its path, such as `[{ path = "/dev/fuse", mode = "rw" }]`
    (docs/hardware/devices.md#other-devices)."""
    cdi_modes: CdiModes = []
    """More CDI specifications that `nvidia-ctk` makes for the machine's pods
    (docs/hardware/devices.md#cdi-specifications)."""
    cdi_hooks: CdiHooks = []
    """More hooks of NVIDIA's toolkit, which run at the start of each container with a GPU
    (docs/drivers.md#hooks)."""
    extra_mounts: ExtraMounts = []
    """Directories and files of the host to mount, such as `[{ source = "/srv/models", target = "/srv/models" }]`. A
    change takes effect when the machine next starts (docs/hardware/devices.md#mounts)."""
    node: NodeSettings | None = None
    """The Kubernetes node in the machine, if `unbounded-agent up` makes it (docs/bootstrap.md)."""
    nspawn: NspawnSettings = NspawnSettings()
    """Settings of systemd-nspawn. The defaults are what a Kubernetes node needs."""

    @property
    def has_extras(self) -> bool:
        """Whether the machine gets devices, mounts or a node's settings even on a host without GPUs."""
        return bool(self.devices or self.extra_devices or self.extra_mounts or self.node)

    def __post_init__(self) -> None:
        carried, targets = self.node.carry if self.node else [], [mount.target for mount in self.extra_mounts]
        for path in carried:
            if is_below(path, targets) or _is_above(path, targets):
                raise ValueError(f"node.carry: {path} overlaps with an extra mount")
        for mode in self.cdi_modes:
            match CDI_MODES[mode]:
                case ("devices", name) if name not in self.devices:
                    raise ValueError(f'cdi_modes "{mode}" needs "{name}" in devices')
                case ("imex_channels", _) if not self.imex_channels:
                    raise ValueError(f'cdi_modes "{mode}" needs imex_channels = true')


class DriverSettings(Table, frozen=True, kw_only=True):
    """NVIDIA's driver on this host. If neither `root` nor `library_directories` is set, the agent searches the places
    in docs/drivers.md#where-the-agent-finds-it."""

    load_modules: bool = False
    """Load the driver's kernel modules and make its device nodes, if the host has not done so by itself
    (docs/drivers.md)."""
    root: AbsolutePath | Literal[""] = ""
    """A directory that holds a whole system with the driver, such as a driver container's root. `"/"` means that the
    agent searches only the host's own loader cache. Empty means that it searches other places too
    (docs/drivers.md#how-to-configure-the-place)."""
    library_directories: list[AbsolutePath] = []
    """Directories with the driver's libraries, if no loader cache lists them; relative to `root`, if that is set."""
    binary_directories: list[AbsolutePath] = []
    """Directories with the driver's programs, searched before the usual ones; relative to `root`, if that is set.
    Needs `root` or `library_directories`."""
    data_directories: list[AbsolutePath] = []
    """Directories that contain `vulkan`, `glvnd`, `egl`, `OpenCL` and `nvidia`, searched before the usual ones;
    relative to `root`, if that is set. Needs `root` or `library_directories`."""

    @property
    def place_key(self) -> str:
        """The key that says where the libraries are; empty if the agent has to search for them."""
        if self.library_directories:
            return "driver.library_directories"
        return "driver.root" if self.root else ""

    def __post_init__(self) -> None:
        if (self.binary_directories or self.data_directories) and not self.place_key:
            raise ValueError("binary_directories and data_directories need root or library_directories to be set too")


class MetricsSettings(Table, frozen=True, kw_only=True):
    """Metrics and health pages."""

    address: Annotated[str, ADDRESS, Check(_host_and_port)] = "127.0.0.1:9788"
    """Address and port of the metrics and health pages (docs/metrics.md)."""


class GpuHealthSettings(Table, frozen=True, kw_only=True):
    """What the GPUs themselves are asked about their health (docs/conditions.md#gpushealthy)."""

    interval: Annotated[int, Range(0, 86400)] = 300
    """Seconds between two questions to a GPU: from 60 on, because machines ask at most once a minute. 0: never. A GPU
    is asked only while it is in persistence mode or a pod has it open."""


class GpuRecoverySettings(Table, frozen=True, kw_only=True):
    """What the service does by itself about GPUs that do not work (docs/conditions.md#gpushealthy)."""

    policy: Literal["none", "reset"] = "none"
    """`"reset"`: reset a GPU that needs it, if the GPU or its driver itself asks for it (recovery action, Xid 154). The
    service evicts nothing: it waits until no process has the GPU open, also no device plugin."""
    attempts: Annotated[int, Range(1, 100)] = 2
    """How many times a GPU is reset at most within `hours`."""
    hours: Annotated[int, Range(1, 8760)] = 24
    """See `attempts`."""


class Config(Table, frozen=True, kw_only=True):
    """Everything that can be configured."""

    machines: dict[MachineName, MachineSettings]
    """Required, so that a missing file does not mean "no machines". A host without machines needs an empty table."""
    metrics: MetricsSettings = MetricsSettings()
    driver: DriverSettings = DriverSettings()
    gpu_health: GpuHealthSettings = GpuHealthSettings()
    gpu_recovery: GpuRecoverySettings = GpuRecoverySettings()
