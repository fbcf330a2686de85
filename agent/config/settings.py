"""The settings of the configuration. Pure.

docs/configuration.md is generated from these classes and their docstrings (`make docs`).
"""

import re
from typing import Annotated, Literal

from agent.config.devices import CDI_MODES, CdiHooks, CdiModes, DeviceClasses, ExtraDevices
from agent.config.mounts import ExtraMounts
from agent.config.node import NodeSettings
from agent.config.nspawn_settings import NspawnSettings, OneLine
from agent.config.pod_environment import PodEnvironment
from agent.config.table import Check, Range, Table, text
from agent.config.values import AbsolutePath, host_name
from agent.model.pci_address import as_in_sysfs

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

DROP_IN = re.compile(r"(/[A-Za-z0-9][A-Za-z0-9_.-]*){2,}\.(toml|part)")
"""Matches a path for containerd's `imports`. The entries of `imports` are glob patterns, so the path must have no
wildcards. No name in the path may begin with a dot."""


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


def _drop_in(value: str) -> str:
    # config.toml is the main file of containerd or of nvidia-container-runtime, so it cannot be a drop-in.
    if value and (not DROP_IN.fullmatch(value) or value.endswith("/config.toml")):
        raise ValueError(
            f"{value!r} is not an absolute path in the machine that ends in .toml or .part, such as "
            "/etc/cri/conf.d/20-gpu.part (letters, digits, dots, hyphens and underscores)"
        )
    return value


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
    have one: `gpus`, `mig_config`, `mig_monitor`, `imex_channels` or `sockets` is set, or NVIDIA's driver is installed.
    """
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
    containerd_drop_in: Annotated[str, Check(_drop_in)] = ""
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


class Config(Table, frozen=True, kw_only=True):
    """Everything that can be configured."""

    machines: dict[MachineName, MachineSettings]
    """Required, so that a missing file does not mean "no machines". A host without machines needs an empty table."""
    metrics: MetricsSettings = MetricsSettings()
    driver: DriverSettings = DriverSettings()
