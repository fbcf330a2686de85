"""What one pass observed, as frozen data. Only Absent may lead to a removal; Broken and Unseen never do."""

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

from msgspec import Struct, field

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.device_allow import DeviceAllow
from agent.model.driver_root import Library, StagedRoot
from agent.model.gpu_facts import GpuFacts
from agent.model.granted import Granted
from agent.model.handoff import Publication
from agent.model.live import LiveSettings
from agent.model.mount_source import MountSource
from agent.model.remembered import Remembered


class Absent(Struct, frozen=True):
    """The search was complete and found nothing."""

    why: str


class Broken(Struct, frozen=True):
    """The thing exists but is unusable as it is."""

    why: str


class Unseen(Struct, frozen=True):
    """The observation failed (permission, time limit, a tool's error): nothing is known."""

    why: str


T = TypeVar("T")
Seen: TypeAlias = T | Absent | Broken | Unseen


class DeviceNode(Struct, frozen=True, order=True):
    """One usable character device below /dev."""

    path: str
    kind: DeviceKind
    number: DeviceNumber
    pci_address: str = ""
    """The PCI address of the GPU that the node, or its partition, belongs to; empty for nodes that all GPUs share."""
    capability: str = ""
    """For DeviceKind.CAPABILITY: the path below /proc/driver/nvidia/capabilities, such as `mig/config`."""


class IncompletePartition(Struct, frozen=True, order=True):
    """A partition of a GPU that is unusable: still being created, or left incomplete. None of its nodes is granted."""

    pci_address: str
    why: str
    """A sentence that begins with the partition's name."""


class PciDevice(Struct, frozen=True, order=True):
    """One device on the PCI bus, as sysfs shows it; `driver` is empty if none is bound."""

    address: str
    """Domain, bus, device and function in the kernel's form: `0000:01:00.0`."""
    vendor_id: int
    class_id: int
    """24 bits: 0x030200 is a 3D controller."""
    driver: str = ""
    override: str = ""
    """The only driver that may bind the device (driver_override). Observed only while none is bound."""
    virtual: bool = False
    """It is an SR-IOV virtual function, and its physical function is on this host. False in a virtual machine that has
    only the virtual function."""
    integrated: bool = False
    """It is in one slot with the security processor of AMD's processors, so it is a part of the processor."""


class DrmDevice(Struct, frozen=True, order=True):
    """One DRM device node (cardN, renderDN) with its PCI device; connectors are left out."""

    path: str
    pci_address: str
    """Empty for a device that is not a PCI device's own (simpledrm, vgem, virtio-gpu)."""


class CacheEntry(Struct, frozen=True, order=True):
    """One line of `ldconfig -p`."""

    soname: str
    architecture: str
    """As `uname -m` prints it (x86_64, aarch64, i686); empty for any other architecture."""
    path: str


class Gpu(Struct, frozen=True, order=True):
    """One GPU, with or without a driver; its identity is the PCI address, never an index or minor."""

    pci_address: str
    vendor: str
    driver: str = ""
    model: str = ""
    uuid: str = ""
    """Empty until the driver has initialised the GPU."""
    minor: int | None = None
    why_lost: str = ""
    """What the kernel log said when the GPU stopped answering; kept until its driver is unbound."""
    detached: bool = False
    """An administrator detached the GPU: no machine is granted it until it is attached or plugged in again."""
    excluded: bool = False
    """The driver has the GPU, but lets nobody open it, because a parameter of its module says so."""
    override: str = ""
    """As in PciDevice. If it names a driver that is not the vendor's, the GPU is reserved, for example for a virtual
    machine that is off."""
    virtual: bool = False
    """As in PciDevice."""
    integrated: bool = False
    """It is a part of the processor. In a virtual machine, this may be True for a card too."""
    modules: tuple[str, ...] | None = None
    """Of a driver that is not the vendor's: its kernel module, and those that load this one again. Empty if the driver
    is built into the kernel; None if that is unknown."""


class ServiceDirectory(Struct, frozen=True, order=True):
    """A directory in /run in which a daemon of the driver has its sockets."""

    service: str
    """The daemon's name in the settings of machines."""
    path: str
    inode: int
    """The directory's inode number. Some daemons create a new directory at each start."""
    writable: bool = False


class UserSpace(Struct, frozen=True):
    """A driver's libraries and companion files, of one version."""

    version: Seen[str]
    files: Seen[tuple[Library, ...]]
    """The user-space files of `version`, for a driver root."""
    problems: tuple[str, ...] = ()
    """Files and directories that were refused or are broken, one sentence each."""
    not_installed: tuple[str, ...] = ()
    """Optional parts of a driver that this host does not have, in words."""
    other_version: tuple[str, ...] = ()
    """Paths of files that are left out, because they belong to another version."""
    place: str = ""
    """Where the host keeps the files, in words."""
    place_name: str = ""
    """A short name of `place`. An upgrade does not change the name, even if it installs into another directory."""
    refused_places: tuple[str, ...] = ()
    """Names of places where no driver was found and some directories were skipped."""
    other_places: tuple[str, ...] = ()
    """Further drivers on this host that are not used, with their places, in words."""
    skipped_directories: tuple[str, ...] = ()
    """Directories that were not searched, with the reason, in words."""
    place_key: str = ""
    """The key of the configuration that names the place; empty if the agent searched for the files."""


class FabricService(Struct, frozen=True):
    """What registers GPUs with the NVLink fabric, whether this host is known to have one or not."""

    state: Seen[str] = Absent("it was not looked for")
    """ActiveState of the Fabric Manager's unit. On a host with NVSwitch also `running`: it runs without a unit."""
    started: Seen[int] = 0
    """When the unit last became active, in microseconds since the host booted; 0 if it has not."""
    missing_modules: tuple[str, ...] = ()
    """Kernel modules that the Fabric Manager may need, and that are not loaded."""


class Driver(Struct, frozen=True):
    """One vendor's kernel driver and user space, as far as each could be observed."""

    module_version: Seen[str]
    user_space: UserSpace
    fabric: Seen[str] = Absent("no NVSwitch")
    """With NVSwitch: ActiveState of the Fabric Manager's unit (`active`, `failed`). If the Fabric Manager runs without
    a unit: `running`."""
    persistence: Seen[str] = Absent("no persistence daemon")
    persistence_started: Seen[int] = 0
    """When the daemon's unit last became active, as FabricService.started."""
    fabric_service: FabricService = FabricService()


class VendorFacts(Struct, frozen=True):
    """All facts about one vendor on this host."""

    vendor: str
    gpus: tuple[Gpu, ...] = ()
    devices: Seen[tuple[DeviceNode, ...]] = ()
    driver: Driver | None = None
    services: tuple[ServiceDirectory, ...] = ()
    problems: tuple[str, ...] = ()
    """Refused or broken nodes and entries, one sentence each."""
    incomplete: tuple[IncompletePartition, ...] = ()
    driver_expected: bool = True
    """Whether GPUs without a driver are expected to get one. If not, such a GPU goes only to machines whose settings
    name it, or that have it already."""


class FileState(Struct, frozen=True):
    """A file that the agent may own: its current content, and whether it belongs to the agent."""

    content: Seen[bytes]
    owned: bool
    """Whether the agent wrote the file, according to the ownership record. If the record cannot be read, the file's
    first line decides."""


class MachineFacts(Struct, frozen=True):
    """What the host sees of one machine. The host never follows a path in the machine's root file system."""

    name: str
    root: Seen[str]
    """Path of the machine's root directory; Unseen for users without access to /var/lib/machines (mode 0700)."""
    unit_state: Seen[str]
    """ActiveState of `systemd-nspawn@NAME.service`."""
    kept_from_boot_by: str = ""
    """The command after which the machine no longer starts whenever the host boots; empty if it does not do so now."""
    masked: bool = False
    """The machine's unit is masked. The machine may still run, or be stopping."""
    starts: bool = False
    """A start of the machine's unit is queued or under way. Until unbounded-agent-prepare@ has ended, the unit is
    inactive."""
    restarts: bool = False
    """The machine has ended, and systemd waits before it starts it again."""
    has_run: bool = False
    """The machine's unit is not active, and since the host booted it has stopped, failed to start, or had a start
    cancelled. Also True if the unit is masked and inactive. If `has_run` is True and `unit_state` is `inactive`,
    somebody stopped the machine."""
    unit_needs_reload: bool = False
    """NeedDaemonReload of the machine's unit: its files changed since systemd read them."""
    device_allow: tuple[DeviceAllow, ...] = ()
    """DeviceAllow= of the machine's unit in systemd, including entries from files that the agent did not write."""
    granted: Seen[Granted] = Absent("nothing was granted to it yet")
    granted_age: float = 0.0
    """Seconds since the grant was last published, changed or not."""
    live: LiveSettings | None = None
    """The settings that the running machine has; None if they are unknown. Then `live_unseen` may say why."""
    live_unseen: str = ""
    live_age: float = float("inf")
    started: tuple[bytes, bytes] | None = None
    """The .nspawn file and drop-in at the machine's start; observed only if `live` is None or has no `fixed`."""
    handed_roots: Seen[tuple[int, ...]] = Absent("no record")
    """Indices of driver roots that handoffs have named since the machine's start. The record may lack the roots that
    the current handoff names."""
    publication: Publication | None = None
    """The last publication of the handoff; None if there is none, or its file could not be observed."""
    report: Seen[bytes] = Absent("the machine has not reported")
    report_age: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether no process runs in the machine, by the ActiveState of its unit."""
        return self.unit_state in ("inactive", "failed")

    @property
    def stays_ended(self) -> bool:
        """Whether no process runs in the machine, and no start is under way."""
        return self.ended and not self.starts

    @property
    def may_run(self) -> bool:
        """Whether the machine runs, or whether it runs is unknown."""
        return self.unit_state == "active" or isinstance(self.unit_state, Unseen)

    @property
    def kept_gpus(self) -> tuple[str, ...]:
        """PCI addresses of the GPUs that the machine keeps if this pass must not change it; empty if unknown."""
        return self.granted.gpus if isinstance(self.granted, Granted) else ()


class Facts(Struct, frozen=True):
    """Everything that one pass observed on the host."""

    architecture: str
    systemd_version: Seen[int]
    template_device_allow: Seen[tuple[DeviceAllow, ...]]
    """DeviceAllow= entries of the installed systemd-nspawn@.service, in order. Without this unit no machine starts."""
    vendors: tuple[VendorFacts, ...]
    machines: tuple[MachineFacts, ...]
    staged: tuple[StagedRoot, ...] = ()
    next_driver_root_index: int = 0
    """Index for the next driver root: above all indices in use or, if no index is left there, the lowest free one."""
    corrupt_roots: tuple[int, ...] = ()
    """Indices of unusable driver roots: incomplete, or without a manifest."""
    plain_roots: tuple[int, ...] = ()
    """Indices of driver roots that are plain directories: the root user of one machine can change them for all."""
    mounting_failed: bool = False
    """The last attempt to mount HOST_NVIDIA, inside which driver roots are mounted, failed."""
    stale_staging: tuple[str, ...] = ()
    """Directories that an interrupted staging or removal of a driver root left."""
    staged_unseen: str = ""
    """Why the driver roots could not be listed; empty if they could."""
    time_records: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of files to write, by path. They record newer times of host files whose content is still as staged."""
    staged_problems: tuple[str, ...] = ()
    remembered: Seen[Remembered] = Unseen("the record of granted GPUs was not read")
    draining: frozenset[str] = frozenset()
    """PCI addresses of detached GPUs that processes may still use. A GPU is in this set until the last of these
    processes has exited."""
    gpus: GpuFacts = field(default_factory=GpuFacts)
    mount_sources: Mapping[str, Seen[MountSource]] = field(default_factory=dict)
    nspawn_sources: Mapping[str, str] = field(default_factory=dict)
    """Real paths of the sources that `nspawn.extra` mounts, by the path in that setting. Observed only if a machine has
    extra mounts."""
    problems: tuple[str, ...] = ()
    """State of the agent that was discarded, and facts about the host that were not understood; a sentence each."""
    stub_resolver: bool = False
    """Whether the host's programs query systemd-resolved on the loopback interface for DNS. Pods cannot reach it."""
    state_free: Seen[int] = Unseen("it was not observed")
    """Free bytes of the file system of STATE."""
    reload_pending: bool = False
    """The agent changed unit files, and systemd has not read them since."""
    files: dict[str, FileState] = field(default_factory=dict)
    """Every file that the goal may contain or the ownership record names, by absolute path."""

    def all_problems(self) -> tuple[str, ...]:
        """Return everything that was refused, discarded or not understood in this pass, a sentence each."""
        return (*(each for vendor in self.vendors for each in vendor.problems), *self.staged_problems, *self.problems)
