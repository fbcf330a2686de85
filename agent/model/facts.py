"""What one pass observed, as frozen data. Only Absent may ever remove something; Broken and Unseen never do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.device_allow import DeviceAllow
from agent.model.granted import Granted
from agent.model.live import LiveSettings
from agent.model.remembered import Remembered


@dataclass(frozen=True, slots=True)
class Absent:
    """The search was complete and found nothing."""

    why: str


@dataclass(frozen=True, slots=True)
class Broken:
    """It exists but is unusable as it is."""

    why: str


@dataclass(frozen=True, slots=True)
class Unseen:
    """The observation failed (permission, time limit, a tool's error): nothing is known."""

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
    """Of the node's GPU, also for a node of a partition; empty for nodes that all GPUs share."""
    capability: str = ""
    """For DeviceKind.CAPABILITY: its path below /proc/driver/nvidia/capabilities, such as `mig/config`."""


@dataclass(frozen=True, slots=True, order=True)
class HalfMade:
    """A partition of a GPU that exists but is unusable: still being made, or left half made. None of it is granted."""

    pci_address: str
    why: str
    """A sentence that begins with the partition's name."""


@dataclass(frozen=True, slots=True, order=True)
class PciDevice:
    """One device on the PCI bus, as sysfs shows it; `driver` is empty if none is bound."""

    address: str
    """Domain, bus, device and function in the kernel's form: `0000:01:00.0`."""
    vendor_id: int
    device_id: int
    class_id: int
    """24 bits: 0x030200 is a 3D controller."""
    driver: str = ""


@dataclass(frozen=True, slots=True, order=True)
class DrmDevice:
    """One DRM device node (cardN, renderDN) with its PCI device; connectors are left out."""

    path: str
    pci_address: str
    """Empty for a device that is not on the PCI bus (simpledrm, vgem)."""
    driver: str


@dataclass(frozen=True, slots=True, order=True)
class CacheEntry:
    """One line of `ldconfig -p`."""

    soname: str
    architecture: str
    """As `uname -m` prints it (x86_64, aarch64, i686); empty for any other architecture."""
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
    """What the kernel log said when the GPU stopped answering; kept until its driver is bound again."""
    detached: bool = False
    """An administrator detached it: no machine is granted it until it has been removed."""


@dataclass(frozen=True, slots=True, order=True)
class Library:
    """One driver library or companion file: its place on the host, and its place below a driver root."""

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
    """Content of the copy, instead of the source's, which names paths that exist only on the host."""


@dataclass(frozen=True, slots=True, order=True)
class ServiceDirectory:
    """A directory in /run in which a daemon of the driver has its sockets."""

    service: str
    """Its name in the settings of machines."""
    path: str
    inode: int
    """Changes at each start of some daemons."""
    writable: bool = False


@dataclass(frozen=True, slots=True)
class UserSpace:
    """A driver's libraries and companion files, of one version."""

    version: Seen[str]
    files: Seen[tuple[Library, ...]]
    """The user-space files for a driver root, of `version` only."""
    problems: tuple[str, ...] = ()
    """Files and directories that were refused or are broken, one sentence each."""
    not_installed: tuple[str, ...] = ()
    """Optional parts of a driver that this host does not have, in words."""
    other_version: tuple[str, ...] = ()
    """Paths of files left out because they are of another version."""
    place: str = ""
    """Where the host keeps the files, in words."""
    place_name: str = ""
    """The same in short: it stays when a new version goes to another directory of that place."""
    refused_places: tuple[str, ...] = ()
    """Names of places where no driver was found after directories were passed over."""
    other_places: tuple[str, ...] = ()
    """Further drivers on this host that are not used, with their places, in words."""
    passed_over: tuple[str, ...] = ()
    """Directories that were not searched, with the reason, in words."""
    configured: str = ""
    """The key of the configuration that names the place, if one does."""


@dataclass(frozen=True, slots=True)
class Driver:
    """One vendor's kernel driver and user space, as far as each could be observed."""

    module_version: Seen[str]
    user_space: UserSpace
    fabric: Seen[str] = Absent("no NVSwitch")
    """With NVSwitch: ActiveState of the Fabric Manager's unit (`active`, `failed`, `inactive`)."""
    persistence: Seen[str] = Absent("no persistence daemon")


@dataclass(frozen=True, slots=True)
class VendorFacts:
    """All facts about one vendor on this host."""

    vendor: str
    gpus: tuple[Gpu, ...] = ()
    devices: Seen[tuple[DeviceNode, ...]] = ()
    driver: Driver | None = None
    services: tuple[ServiceDirectory, ...] = ()
    problems: tuple[str, ...] = ()
    """Refused or broken nodes and entries, one sentence each."""
    half_made: tuple[HalfMade, ...] = ()
    driver_awaited: bool = True
    """Whether machines wait for a GPU without a driver even if they do not name it, because it should get one."""


UNSTAGED = -1
"""Index of a driver root that is not on disk yet."""


@dataclass(frozen=True, slots=True, order=True)
class StagedRoot:
    """One of our driver roots; as a fact, complete and on disk."""

    index: int
    vendor: str
    version: str
    files: tuple[Library, ...]
    place: str = field(default="", compare=False)
    """Name of the host's place for them; empty if that was not recorded."""
    hidden: bool = field(default=False, compare=False)
    """Not mounted, so machines do not see it."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file that we may own: its current content, and whether the ownership record names it."""

    content: Seen[bytes]
    owned: bool


@dataclass(frozen=True, slots=True)
class MountSource:
    """A path that settings mount, without symbolic links, and each directory and link on the way to it."""

    path: str
    way: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What the host sees of one machine. The host never follows a path in the machine's root file system."""

    name: str
    root: Seen[str]
    """Path of its root directory; Unseen for users without access to /var/lib/machines (mode 0700)."""
    unit_state: Seen[str]
    """ActiveState of `systemd-nspawn@NAME.service`."""
    has_run: bool = False
    """The unit was active in this boot and is no longer; if it is inactive, the machine was stopped on purpose."""
    unit_needs_reload: bool = False
    """NeedDaemonReload of that unit: its files changed since systemd read them."""
    device_allow: tuple[DeviceAllow, ...] = ()
    """DeviceAllow= of that unit as systemd has it, including entries from files of others."""
    granted: Seen[Granted] = Absent("nothing was granted to it yet")
    granted_age: float = 0.0
    """Seconds since that was last published, changed or not."""
    live: LiveSettings | None = None
    """The settings that the running machine has; None when unknown, and `live_unseen` may say why."""
    live_unseen: str = ""
    live_age: float = float("inf")
    started: tuple[bytes, bytes] | None = None
    """The .nspawn file and drop-in at its start; read only if no record says with what settings it started."""
    handed_roots: Seen[tuple[int, ...]] = Absent("no record")
    """Indices of the driver roots that it was handed since its start, except the present handoff's."""
    report: Seen[bytes] = Absent("the machine has not reported")
    report_age: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that one pass observed on the host."""

    architecture: str
    systemd_version: Seen[int]
    template_device_allow: Seen[tuple[DeviceAllow, ...]]
    """DeviceAllow= entries of the installed systemd-nspawn@.service, in order; no machine starts without that unit."""
    vendors: tuple[VendorFacts, ...]
    machines: tuple[MachineFacts, ...]
    staged: tuple[StagedRoot, ...] = ()
    next_driver_root_index: int = 0
    """The lowest index above every driver root and manifest on disk, complete or not."""
    spoiled_roots: tuple[int, ...] = ()
    """Indices of unusable driver roots: half made, or without a manifest."""
    plain_roots: tuple[int, ...] = ()
    """Indices of driver roots that are plain directories: root in one machine can change them for all."""
    mounting_failed: bool = False
    """Driver roots could not be mounted in this boot."""
    staging_remains: tuple[str, ...] = ()
    staged_unseen: str = ""
    """Why the driver roots could not be listed; empty if they could."""
    notes_of_times: Mapping[str, bytes] = field(default_factory=dict)
    """Files to write, by path: for driver roots whose files on the host have other times but the same content."""
    staged_problems: tuple[str, ...] = ()
    remembered: Seen[Remembered] = Unseen("the record of granted GPUs was not read")
    draining: frozenset[str] = frozenset()
    """PCI addresses of detached GPUs that processes may still open until the last of them has ended."""
    mount_sources: Mapping[str, Seen[MountSource]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """State of ours that was discarded, and facts of the host that were not understood; a sentence each."""
    reload_owed: bool = False
    """We changed files of units, and systemd has not read them since."""
    files: dict[str, FileState] = field(default_factory=dict)
    """By absolute path: every file that the goal may want or the ownership record names."""

    def all_problems(self) -> tuple[str, ...]:
        """Return everything that was refused, discarded or not understood in this pass, a sentence each."""
        return (*(each for vendor in self.vendors for each in vendor.problems), *self.staged_problems, *self.problems)
