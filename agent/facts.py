"""What was seen in one pass: frozen data without behaviour.

Absent, Broken and Unseen are three different facts: only the first may ever remove something (fail static).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from agent.granted import Granted
from agent.identity import DeviceKind, DeviceNumber
from agent.live import LiveSettings


@dataclass(frozen=True, slots=True)
class Absent:
    """Looked for in full and not there."""

    why: str


@dataclass(frozen=True, slots=True)
class Broken:
    """There, but it cannot be used as it is."""

    why: str


@dataclass(frozen=True, slots=True)
class Unseen:
    """Looking failed (permission, time limit, a tool's error): nothing is known."""

    why: str


T = TypeVar("T")
Seen: TypeAlias = T | Absent | Broken | Unseen


@dataclass(frozen=True, slots=True, order=True)
class DeviceNode:
    """One usable character device below /dev."""

    path: str
    kind: DeviceKind
    number: DeviceNumber
    pci_address: str = ""
    """Of the GPU that it belongs to, also of a partition of it; empty for nodes that all GPUs share."""
    capability: str = ""
    """For DeviceKind.CAPABILITY: its path below /proc/driver/nvidia/capabilities, such as `mig/config`."""


@dataclass(frozen=True, slots=True, order=True)
class HalfMade:
    """A partition of a GPU that exists and cannot be used: it is being made, or was left so. None of it is granted."""

    pci_address: str
    why: str
    """A sentence that begins with the partition's name."""


@dataclass(frozen=True, slots=True, order=True)
class PciDevice:
    """One device on the PCI bus, as sysfs shows it."""

    address: str
    """Domain, bus, device and function in the kernel's form: `0000:01:00.0`."""
    vendor_id: int
    device_id: int
    class_id: int
    """24 bits: 0x030200 is a 3D controller."""
    driver: str = ""
    """The bound kernel driver's name; empty when none is bound."""


@dataclass(frozen=True, slots=True, order=True)
class DrmDevice:
    """One DRM device node (cardN, renderDN) with the PCI device that it belongs to; connectors are left out."""

    path: str
    pci_address: str
    """Empty for a device that is not on the PCI bus (simpledrm, vgem)."""
    driver: str


@dataclass(frozen=True, slots=True, order=True)
class CacheEntry:
    """One line of `ldconfig -p`."""

    soname: str
    architecture: str
    """As `uname -m` prints it (x86_64, aarch64, i686); empty for another one."""
    path: str


@dataclass(frozen=True, slots=True, order=True)
class Gpu:
    """One display-class PCI device; its identity is the PCI address, never an index or minor."""

    pci_address: str
    vendor: str
    driver: str = ""
    model: str = ""
    uuid: str = ""
    """Empty until the driver has initialised the GPU."""
    minor: int | None = None
    lost: str = ""
    """What the kernel's log said when the GPU stopped answering, as long as that binding to its driver lasts."""
    detached: bool = False
    """An administrator takes it out of use: it is granted to no machine, until it has been removed."""


@dataclass(frozen=True, slots=True)
class GpuError:
    """An error of one GPU that its driver wrote into the kernel's log."""

    pci_address: str
    number: int
    """The driver's own; for NVIDIA the Xid, below 1000."""
    meaning: str
    """What the driver calls it and what it is, with what to do where something is to be done."""
    of_application: bool
    """A program's own fault: it says nothing of the GPU."""
    lost: bool
    """The GPU does not answer any more."""


@dataclass(frozen=True, slots=True, order=True)
class Library:
    """One driver library or companion file: where the host keeps it, and where it belongs below a driver root."""

    target: str
    """Relative path below the driver root, such as `usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01`."""
    source: str
    """Absolute real path on the host (no symbolic link in it); empty for a link."""
    link: str = ""
    """For a symbolic link: what it points to, relative to its own directory."""
    size: int = 0
    mtime_ns: int = 0
    executable: bool = False
    text: str = ""
    """What the copy holds instead of the source's content, which names paths that only the host has."""


@dataclass(frozen=True, slots=True, order=True)
class ServiceDirectory:
    """A directory in /run in which a daemon of the driver has its sockets."""

    service: str
    """The name that machines' settings have for it."""
    path: str
    inode: int
    """Another one after each start of some daemons."""
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Driver:
    """One vendor's kernel driver and its user space, as far as each could be seen."""

    module_version: Seen[str]
    library_version: Seen[str]
    files: Seen[tuple[Library, ...]]
    """The user-space files that belong into a driver root, of `library_version` only."""
    not_installed: tuple[str, ...] = ()
    """What drivers have beside that and this host lacks, in words; none of it is necessary."""
    other_version: tuple[str, ...] = ()
    """Paths of files that were left out, as they are of another version."""
    place: str = ""
    """Where the host keeps it, in words."""
    place_name: str = ""
    """The same in short: it stays when a new version goes to another directory of that place."""
    refused_places: tuple[str, ...] = ()
    """Names of places that hold no whole driver but for what is passed over."""
    other_places: tuple[str, ...] = ()
    """Further drivers on this host that are not used, with their places, in words."""
    passed_over: tuple[str, ...] = ()
    """Directories that were not looked into, with why, in words."""
    configured: str = ""
    """The key of the configuration that names the place, if one does."""
    fabric: Seen[str] = Absent("no NVSwitch")
    """Where NVSwitch exists: ActiveState of the fabric manager's unit (`active`, `failed`, `inactive`)."""
    persistence: Seen[str] = Absent("no persistence daemon")
    """ActiveState of the persistence daemon's unit."""


@dataclass(frozen=True, slots=True)
class VendorFacts:
    """Everything of one vendor on this host."""

    vendor: str
    gpus: tuple[Gpu, ...] = ()
    devices: Seen[tuple[DeviceNode, ...]] = ()
    driver: Driver | None = None
    services: tuple[ServiceDirectory, ...] = ()
    problems: tuple[str, ...] = ()
    """Nodes and entries that were refused or are broken, one sentence each."""
    half_made: tuple[HalfMade, ...] = ()
    driver_awaited: bool = True
    """Whether a GPU that no driver has is expected to get one, so that machines that do not name it wait for that."""


UNSTAGED = -1
"""Index of a driver root that has no place on disk yet."""


@dataclass(frozen=True, slots=True, order=True)
class StagedRoot:
    """A driver root of ours; as a fact, it is on disk, whole and unchanged since it was published."""

    index: int
    vendor: str
    version: str
    files: tuple[Library, ...]
    place: str = field(default="", compare=False)
    """Name of the place that the host had them in; empty where that was not recorded."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file that we would own: its content now, and whether the ownership record names it."""

    content: Seen[bytes]
    owned: bool


@dataclass(frozen=True, slots=True)
class MountSource:
    """What settings mount: its path without symbolic links, and each directory and link on the way that they name."""

    path: str
    way: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What the host sees of one machine, without ever following a path in the machine's root file system."""

    name: str
    root: Seen[str]
    """Path of its root directory; Unseen to whom /var/lib/machines (mode 0700) is closed."""
    unit_state: Seen[str]
    """ActiveState of `systemd-nspawn@NAME.service`."""
    has_run: bool = False
    """The unit was active in this boot and is not any more; while it is inactive, somebody stopped the machine."""
    unit_needs_reload: bool = False
    """NeedDaemonReload of that unit: its files changed since systemd read them."""
    device_allow: tuple[str, ...] = ()
    """DeviceAllow= of that unit as systemd has it, also from files of others."""
    granted: Seen[Granted] = Absent("nothing was granted to it yet")
    """By its present handoff."""
    granted_age: float = 0.0
    """Seconds since that was published, for the first time or once more."""
    live: LiveSettings | None = None
    """What the running machine has of its settings; None when unknown."""
    live_age: float = float("inf")
    """Seconds since that was changed."""
    handed_roots: Seen[tuple[int, ...]] = Absent("no record")
    """Indices of the driver roots that it was handed since it was started, but for its present handoff's."""
    report: Seen[bytes] = Absent("the machine has not reported")
    report_age: float = 0.0
    """Seconds since the report was written."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One pass over the host."""

    architecture: str
    """As `uname -m` prints it: x86_64 or aarch64."""
    systemd_version: Seen[int]
    template_device_allow: tuple[str, ...]
    """DeviceAllow= entries of the installed systemd-nspawn@.service, in their order."""
    vendors: tuple[VendorFacts, ...]
    machines: tuple[MachineFacts, ...]
    staged: tuple[StagedRoot, ...] = ()
    next_driver_root_index: int = 0
    """The lowest index that is above every driver root and manifest on disk, whole or not."""
    spoiled_roots: tuple[int, ...] = ()
    """Indices of driver roots that cannot be used: changed, half made, or without a manifest."""
    staging_remains: tuple[str, ...] = ()
    """Paths that an interrupted staging or removal left."""
    staged_unseen: str = ""
    """Why it cannot be told which driver roots are there; empty when it can be."""
    staged_problems: tuple[str, ...] = ()
    draining: frozenset[str] = frozenset()
    """PCI addresses of detached GPUs that processes may go on to open until the last one has ended."""
    mount_sources: Mapping[str, Seen[MountSource]] = field(default_factory=dict)
    """By the path that machines' settings name."""
    problems: tuple[str, ...] = ()
    """What of our own state had to be discarded, and what of the host's could not be understood; a sentence each."""
    reload_owed: bool = False
    """Files of units were changed by us, and systemd has not read them since."""
    files: dict[str, FileState] = field(default_factory=dict)
    """By absolute path: every file that the goal may want or the ownership record names."""

    def all_problems(self) -> tuple[str, ...]:
        """Everything that was refused, discarded or not understood in this pass, a sentence each."""
        of_vendors = tuple(problem for vendor in self.vendors for problem in vendor.problems)
        return (*of_vendors, *self.staged_problems, *self.problems)
