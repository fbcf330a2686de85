"""What one pass observed, as frozen data. Only Absent may lead to a removal; Broken and Unseen never do."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias, TypeVar

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from agent.model.conditions import Reason, Status
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.handoff import Publication, Report
from agent.model.paths import LIVE_NAME
from agent.model.typed_json import Format


class MountSource(Struct, frozen=True):
    """The source of a mount in the settings, with symbolic links resolved."""

    path: str
    components: tuple[str, ...]
    """Each directory and symbolic link that the configured path leads through, and the source itself."""


class DeviceAllow(Struct, frozen=True):
    """An entry of DeviceAllow= (systemd.resource-control(5)): what a unit may do with devices, as `/dev/nvidia0 rw`."""

    node: str
    """A path in /dev, or a group such as `char-pts`."""
    permissions: str = ""
    """Some of the letters `rwm`; empty means all of them."""

    @classmethod
    def parse(cls, text: str) -> "DeviceAllow":
        """Return the entry that `str()` turns back into this text. Any text is accepted: systemd validates it."""
        node, _, permissions = text.partition(" ")
        return cls(node, permissions)

    def __str__(self) -> str:
        return f"{self.node} {self.permissions}" if self.permissions else self.node


class Library(Struct, frozen=True, order=True):
    """One driver library or companion file of a driver root. A manifest must have all its keys, so none is optional."""

    target: Annotated[str, Meta(min_length=1)]
    """Relative path below the driver root, such as `usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01`."""
    source: str
    """Absolute real path on the host (no symbolic link in it); empty for a link."""
    link: str
    """For a symbolic link: what it points to, relative to its own directory; otherwise empty."""
    size: int
    mtime_ns: int
    executable: bool
    text: str
    """What the copy gets instead of a text that names paths of the host; otherwise empty."""


UNSTAGED = -1
"""Index of a driver root that is not on disk yet, until the plan gives it an index of its own."""


class StagedRoot(Struct, frozen=True, eq=False, omit_defaults=True):
    """One driver root. In facts, it is complete and on disk; in a goal, it may still have to be staged."""

    index: Annotated[int, Meta(ge=0)]
    vendor: str
    version: str = field(name="driver_version")
    files: tuple[Library, ...]
    place: str = ""
    """Name of the place on the host from which the files were copied; empty if that was not recorded. Not compared."""
    hidden: bool = False
    """The root is not mounted, so machines do not see it. Not compared."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StagedRoot) and self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    def __lt__(self, other: "StagedRoot") -> bool:
        return self._compared < other._compared

    @property
    def _compared(self) -> tuple[int, str, str, tuple[Library, ...]]:
        return self.index, self.vendor, self.version, self.files


class Verdict(StrEnum):
    """What is known of a GPU's health, from the best to the worst. docs/conditions.md says what follows from each."""

    HEALTHY = "healthy"
    UNKNOWN = "not-known"
    DEGRADED = "degraded"
    """It computes, but somebody should look at it."""
    NEEDS_RESET = "needs-reset"
    NEEDS_REBOOT = "needs-reboot"
    BROKEN = "broken"

    @property
    def severity(self) -> int:
        return list(Verdict).index(self)

    @property
    def in_words(self) -> str:
        """How a sentence about the GPU ends."""
        return {"needs-reset": "needs a reset", "needs-reboot": "needs a reboot of the host"}.get(self, f"is {self}")

    @property
    def fenced(self) -> bool:
        """Whether no new pod should get the GPU."""
        return self.severity > Verdict.DEGRADED.severity


KERNEL_LOG, THE_GPU, GPU_TEST = "kernel log", "the GPU", "gpus test"
"""Sources of GpuFault."""


class GpuFault(Struct, frozen=True, omit_defaults=True):
    """An error of a GPU."""

    reason: str
    """One word for the error, such as `Xid79`."""
    meaning: str
    since: float
    """When the service read the error, in seconds since the epoch; the kernel log's own clock drifts. It is also
    `timeAdded` of the GPU's taint: if it were earlier, pods with `tolerationSeconds` would be evicted too early."""
    verdict: Verdict
    last: float
    """When the service last read such an error. A degraded GPU counts as healthy again some time after that."""
    source: str = KERNEL_LOG
    """Who said so. What a test found, neither time nor the GPU's own word ends, but a test that passes does."""
    until_answer: bool = False
    """Any later answer of the GPU that names no error ends it."""
    vendor: str = ""
    """Set if the error is not of one GPU, but of something that all GPUs of this vendor on the host need."""
    own_word: bool = False
    """Whether the GPU or its driver itself has asked for a reset since the first error."""


class GpuTest(Struct, frozen=True, omit_defaults=True):
    """The last test of a GPU."""

    result: str
    """A GpuTestEnd; the worst one of the GPU's devices."""
    at: float
    """When the host read the result, in seconds since the epoch."""
    machine: str = ""
    """The machine that tested it."""
    driver: str = ""
    """The version of the kernel module; empty if that is unknown."""
    outdated: bool = False
    """Whether the GPU was reset, attached or bound to a driver again since, or the machine was made again."""


class Begun(Struct, frozen=True, omit_defaults=True):
    """A reset or a test of a GPU that the service begins by itself until it has ended."""

    what: Literal["reset", "test"]
    times: int
    at: float
    """When it was last begun, in seconds since the epoch."""
    why: str = ""
    """What stopped it the last time, in a sentence; empty if that is unknown."""


class Placement(Struct, frozen=True):
    """Where in the host a GPU is attached: -1 and empty if the platform does not say."""

    numa_node: int = -1
    pcie_root: str = ""
    """The root complex, such as `pci0000:00`."""


class Taint(Struct, frozen=True, omit_defaults=True):
    """A GPU that is detached, being detached or being tested. New pods must not get it."""

    evict: bool
    """Whether pods that have the GPU are evicted."""
    since: float
    detached: bool = False
    """False if the GPU is only tainted so far: machines still have it."""
    draining: bool = False
    """The GPU is detached, but processes may still use it until the last of them has exited."""
    testing: bool = False
    """Only `gpus test` has tainted it."""


class GpuFacts(Struct, frozen=True):
    """What decides how GPUs are offered by Dynamic Resource Allocation, by PCI address. Grants do not depend on it."""

    faults: Mapping[str, GpuFault] = field(default_factory=dict)
    """The worst error of each GPU, until the GPU has recovered; also of devices that all GPUs need (NVSwitches)."""
    tainted: Mapping[str, Taint] = field(default_factory=dict)
    attached: Mapping[str, float] = field(default_factory=dict)
    """When each GPU was last attached, or found bound again, in seconds since the epoch: what it said before is
    forgotten."""
    tests: Mapping[str, GpuTest] = field(default_factory=dict)
    begun: Mapping[str, Begun] = field(default_factory=dict)
    resetting: frozenset[str] = frozenset()
    """GPUs whose reset has begun, and has not ended."""
    outdated: bool = False
    """Whether the record of all this still has what no longer counts, such as from before a driver was bound again."""
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """Observed only if a machine uses Dynamic Resource Allocation."""


class Granted(Struct, frozen=True):
    """The last grant published to a machine, recorded where no machine can write.

    Root in a machine can rewrite its handoff, so the host half never reads a handoff to decide anything.
    """

    generation: str
    gpus: tuple[str, ...]
    """PCI addresses of the granted GPUs, and of detached GPUs that the machine's processes may use until they exit. The
    handoff does not have these detached GPUs."""
    driver_roots: Mapping[str, int]
    """Indices of the driver roots, by vendor."""


READ_ONLY, READ_WRITE = "ro:", "rw:"
FIXED_FORM = "2:"
"""The beginning of LiveSettings.fixed. It must change with each change of how the digest is formed: otherwise, an
upgrade of the agent would ask for a restart of each running machine."""


class LiveSettings(Struct, frozen=True):
    """The settings that a running machine has, or that it should have: those it started with, and later changes.

    The host half keeps this record in /run, and writes it again at each start of the machine.
    """

    fixed: str
    """Digest of the settings that only a restart can change; empty if they are only known to differ from the goal's, or
    if the digest was of another form than FIXED_FORM. Then the copies of the files at the machine's start decide."""
    allow: tuple[DeviceAllow, ...]
    """What the agent put into the DeviceAllow= list of the machine's unit, in order."""
    nodes: Mapping[str, str]
    """By path, what is bound: `major:minor` of a node (the same inode as on the host, so with its mode and owner); of a
    directory, READ_ONLY or READ_WRITE with the inode number."""
    rebound: str = ""
    """The generation of the handoff for which all nodes were bound again, because the machine reported some missing."""
    unsure: bool = False
    """The last change to `allow` may have failed and must be repeated. `allow` has every entry that may be in force."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """The owner of each device in `allow` when it was permitted: a GPU's PCI address, or the path of a shared node."""
    mounts: tuple[str, ...] = ()
    """Targets of the configured mounts whose sources existed when the machine started."""
    withdrawn: tuple[str, ...] = ()
    """Nodes that were bound since the machine's start and are no longer granted, sorted. They stay in this list: the
    host half does not learn when the machine half has removed them."""
    kept_since: float = 0.0
    """Since when `allow` has had a permission that is no longer granted, by CLOCK_MONOTONIC; 0 if it has none."""


_FORMAT = Format(LiveSettings, 1)


def render_live(live: LiveSettings) -> bytes:
    return _FORMAT.render(live)


def parse_live(data: bytes) -> LiveSettings:
    """Return the settings in a record. Raises DocumentError, which names the key."""
    live = _FORMAT.parse(LIVE_NAME, data)
    return live if live.fixed.startswith(FIXED_FORM) else replace(live, fixed="")


class RememberedGpu(Struct, frozen=True, order=True):
    """One GPU that machines were granted."""

    pci_address: str
    vendor: str
    model: str = ""
    uuid: str = ""
    """Empty if the UUID was never known. The agent cannot recognise such a GPU in another slot."""
    machines: tuple[str, ...] = ()
    """Machines that have the GPU, or had it when it disappeared."""
    lost: Annotated[float, Meta(ge=0, lt=1 << 36)] = 0.0
    """When the GPU was first missing, in seconds since the epoch; 0 while it is present."""

    def describe(self) -> str:
        names = " ".join(name for name in (self.model, self.uuid) if name)
        return f"{self.pci_address} ({names or self.vendor})"


class Remembered(Struct, frozen=True):
    """The record of the GPUs that machines were last granted. Those that are no longer on the PCI bus are lost.

    It is the only evidence of a lost GPU, so there are two synced copies, each with a digest. If both are damaged, a
    condition reports that until an administrator acknowledges it, as for a lost GPU.
    """

    gpus: tuple[RememberedGpu, ...] = ()
    damage: str = ""
    """Why an earlier record could not be read: GPUs that were lost before are unknown. Empty without such damage."""


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
    """Of the GPU that the node, or its partition, belongs to; empty for nodes that all GPUs share."""
    capability: str = ""
    """The path below /proc/driver/nvidia/capabilities, such as `mig/config`."""


class IncompletePartition(Struct, frozen=True, order=True):
    """A partition of a GPU that is unusable: still being created, or left incomplete. None of its nodes is granted."""

    pci_address: str
    why: str
    """A sentence that begins with the partition's name."""


class PciDevice(Struct, frozen=True, order=True):
    """One device on the PCI bus, as sysfs shows it; `driver` is empty if none is bound."""

    address: str
    vendor_id: int
    class_id: int
    """24 bits: 0x030200 is a 3D controller."""
    driver: str = ""
    override: str = ""
    """The only driver that may bind the device (driver_override). Observed only while none is bound."""
    virtual: bool = False
    """It is an SR-IOV virtual function of a physical function on this host."""
    integrated: bool = False
    """It shares a slot with the security processor of AMD's processors, so it is a part of the processor."""


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
    """What the kernel log said when the GPU stopped answering."""
    detached: bool = False
    """An administrator detached the GPU: no machine is granted it until it is attached or plugged in again."""
    excluded: bool = False
    """The driver has the GPU, but lets nobody open it, because a parameter of its module says so."""
    override: str = ""
    """As in PciDevice. A driver that is not the vendor's reserves the GPU, for example for a virtual machine."""
    virtual: bool = False
    integrated: bool = False
    """It is a part of the processor. In a virtual machine, this may be True for a card too."""
    modules: tuple[str, ...] | None = None
    """Of a driver that is not the vendor's: its kernel module, and those that load this one again. Empty if the driver
    is built into the kernel; None if that is unknown."""
    why_unbound: str = ""
    """Why it has no driver, if the kernel log says so."""


class ServiceDirectory(Struct, frozen=True, order=True):
    """A directory in /run in which a daemon of the driver has its sockets."""

    service: str
    path: str
    inode: int
    """Some daemons create a new directory at each start."""
    writable: bool = False


class UserSpace(Struct, frozen=True):
    """A driver's libraries and companion files, of one version."""

    version: Seen[str]
    files: Seen[tuple[Library, ...]]
    problems: tuple[str, ...] = ()
    """Files and directories that were refused or are broken, one sentence each."""
    not_installed: tuple[str, ...] = ()
    """Optional parts of a driver that this host does not have, in words."""
    other_version: tuple[str, ...] = ()
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


class Driver(Struct, frozen=True):
    """One vendor's kernel driver and user space, as far as each could be observed."""

    module_version: Seen[str]
    user_space: UserSpace
    fabric: Seen[str] = Absent("no NVSwitch")
    """With NVSwitch: ActiveState of the Fabric Manager's unit, or `running` without one."""
    persistence: Seen[str] = Absent("no persistence daemon")
    persistence_started: Seen[int] = 0
    fabric_service: FabricService = FabricService()


class VendorFacts(Struct, frozen=True):
    """All facts about one vendor on this host."""

    vendor: str
    gpus: tuple[Gpu, ...] = ()
    devices: Seen[tuple[DeviceNode, ...]] = ()
    driver: Driver | None = None
    services: tuple[ServiceDirectory, ...] = ()
    node_problems: Mapping[str, str] = field(default_factory=dict)
    """Why nodes must not be used, one sentence each, by path."""
    other_problems: tuple[str, ...] = ()
    incomplete: tuple[IncompletePartition, ...] = ()
    driver_expected: bool = True
    """Whether GPUs without a driver are expected to get one. If not, such a GPU goes only to machines whose settings
    name it, or that have it already."""

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.node_problems.values(), *self.other_problems)


class FileState(Struct, frozen=True):
    """A file that the agent may own: its current content, and whether it belongs to the agent."""

    content: Seen[bytes]
    owned: bool
    """Whether the agent wrote the file, according to the ownership record. The file's first line decides if the record
    cannot be read, or does not name the file of a machine that is no longer configured."""


class Unit(Struct, frozen=True):
    """The current state of one unit."""

    unit_state: Seen[str]
    """ActiveState."""
    path: str = ""
    """Path of the unit's object on the bus."""
    restarts: bool = False
    """The unit is a service that has ended, and systemd waits before it starts the service again."""
    starts: bool = False
    """A start of the unit is queued or under way. Until unbounded-agent-prepare@ has ended, a machine's unit is
    inactive."""
    unit_needs_reload: bool = False
    """Its files changed since systemd read them (NeedDaemonReload)."""
    masked: bool = False
    """The unit is masked. It may still run, or be stopping."""
    has_run: bool = False
    """The unit is not active, and since the host booted it has stopped, failed to start, or had a start cancelled. Also
    True if it is masked and inactive. If `has_run` is True and `unit_state` is `inactive`, somebody stopped it."""
    device_allow: tuple[DeviceAllow, ...] = ()
    """The DeviceAllow= list in force, from all files and set-property."""


class MachineFacts(Unit, frozen=True, kw_only=True):
    """What the host sees of one machine and its unit. It never follows a path in the machine's root file system."""

    name: str
    root: Seen[str]
    """Path of the machine's root directory; Unseen for users without access to /var/lib/machines (mode 0700)."""
    kept_from_boot_by: str = ""
    """The command after which the machine no longer starts whenever the host boots; empty if it does not do so now."""
    granted: Seen[Granted] = Absent("nothing was granted to it yet")
    granted_age: float = 0.0
    """Seconds since it was last published, changed or not."""
    live: LiveSettings | None = None
    """None if unknown. Then `live_unseen` may say why."""
    live_unseen: str = ""
    live_age: float = float("inf")
    started: tuple[bytes, bytes] | None = None
    """The .nspawn file and drop-in at the machine's start; observed only if `live` is None or has no `fixed`."""
    handed_roots: Seen[tuple[int, ...]] = Absent("no record")
    """Indices of driver roots that earlier handoffs since the machine's start have named."""
    publication: Publication | None = None
    """Of the handoff; None if there is none, or its file could not be observed."""
    report: Seen[Report] = Absent("the machine has not reported")
    report_age: float = 0.0
    """In seconds; also known of a malformed report."""

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


class StagedFacts(Struct, frozen=True, kw_only=True):
    """The driver roots on disk."""

    staged: tuple[StagedRoot, ...] = ()
    next_driver_root_index: int = 0
    """Index for the next driver root: above all indices in use or, if no index is left there, the lowest free one."""
    corrupt_roots: tuple[int, ...] = ()
    """Indices of driver roots that are incomplete or have no usable manifest; empty if a manifest could not be read."""
    plain_roots: tuple[int, ...] = ()
    """Indices of driver roots that are plain directories: the root user of one machine can change them for all."""
    roots_mounted: bool = False
    """HOST_NVIDIA is mounted, so published driver roots are mounts inside it."""
    stale_staging: tuple[str, ...] = ()
    """Directories that an interrupted staging or removal of a driver root left."""
    staged_unseen: str = ""
    """Why some driver roots could not be observed; empty if all were."""
    staged_problems: tuple[str, ...] = ()


class HostCheck(Struct, frozen=True):
    """What one of the administrator's own checks says: a condition of the host, which no machine's Ready needs."""

    type: str
    """The check's name."""
    status: Status
    reason: Reason
    message: str
    last_transition: float = 0.0
    """Seconds since the epoch; 0 if it is unknown."""

    @property
    def text(self) -> str:
        return f"{self.status}, {self.reason}: {self.message}"


class Facts(StagedFacts, frozen=True):
    """Everything that one pass observed on the host."""

    architecture: str
    systemd_version: Seen[int]
    template_device_allow: Seen[tuple[DeviceAllow, ...]]
    """DeviceAllow= entries of the installed systemd-nspawn@.service, in order. Without this unit no machine starts."""
    vendors: tuple[VendorFacts, ...]
    machines: tuple[MachineFacts, ...]
    mounting_failed: bool = False
    """The last attempt to mount HOST_NVIDIA, inside which driver roots are mounted, failed."""
    remembered: Seen[Remembered] = Unseen("the record of granted GPUs was not read")
    draining: frozenset[str] = frozenset()
    """PCI addresses of detached GPUs that processes may still use."""
    gpus: GpuFacts = field(default_factory=GpuFacts)
    mount_sources: Mapping[str, Seen[MountSource]] = field(default_factory=dict)
    nspawn_sources: Mapping[str, str] = field(default_factory=dict)
    """Real paths of the sources that `nspawn.extra` mounts, by the path in that setting."""
    problems: tuple[str, ...] = ()
    """State of the agent that was discarded, and facts about the host that were not understood; a sentence each."""
    went_back: str = ""
    """Which release failed after its installation, so that the former one runs; also one of `problems`."""
    stub_resolver: bool = False
    """Whether the host's programs query systemd-resolved on the loopback interface for DNS. Pods cannot reach it."""
    state_free: Seen[int] = Unseen("it was not observed")
    """Bytes of the file system of STATE."""
    reload_pending: bool = False
    """The agent changed unit files, and systemd has not read them since."""
    checks: tuple[HostCheck, ...] = ()
    files: dict[str, FileState] = field(default_factory=dict)
    """Every file that the goal may contain or the ownership record names, by absolute path."""

    def all_problems(self) -> tuple[str, ...]:
        """Return everything that was refused, discarded or not understood in this pass, a sentence each."""
        return (*(each for vendor in self.vendors for each in vendor.problems), *self.staged_problems, *self.problems)


# Classes of PCI devices (pci_ids.h in the kernel): base class, subclass and programming interface have 8 bits each.

DISPLAY = 0x03
"""Base class of display controllers. Their subclass varies: GPUs in processors are VGA controllers; those for data
centres are 3D controllers or other display controllers."""
ACCELERATOR = 0x12
"""Base class of processing accelerators."""
BRIDGE_OTHER = 0x0680
"""Base class and subclass of NVSwitches."""
ENCRYPTION = 0x1080
"""Base class and subclass of encryption controllers, such as the security processor of AMD's processors."""
