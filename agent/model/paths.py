"""Paths on the host, in the machine, and in both. They are absolute, except names (`*_NAME`, units, sockets)."""

PCI_DEVICES = "/sys/bus/pci/devices"
"""A directory of links to all PCI devices, by address (Documentation/ABI/testing/sysfs-bus-pci in the kernel)."""
CONFIG_FILE = "/etc/unbounded-agent/config.toml"
CONFIG_DIRECTORY = "/etc/unbounded-agent/config.d"
CHECKS = "/etc/unbounded-agent/checks.d"
"""Has the administrator's own checks of the host."""

STATE = "/var/lib/unbounded-agent"
HOST_NVIDIA = f"{STATE}/host-nvidia"
"""Parent of the published driver roots `<index>/`; bound read-only at MACHINE_HOST_NVIDIA."""
TREES = f"{STATE}/trees"
"""Has the files of each driver root in `<index>/`. Machines see them only through mounts in HOST_NVIDIA."""
MOUNT_POINTS = f"{STATE}/mount-points"
"""Has an empty directory for each possible `<index>`. HOST_NVIDIA shows them, and driver roots are mounted on them."""
NOTHING = f"{STATE}/nothing"
"""An empty directory: a read-only overlay mount needs two lower layers, and this is the second one."""
STAGING = f"{STATE}/staging"
"""Driver roots that are being copied. Once a root is complete, it is renamed to TREES, on the same file system."""
REMOVED = f"{STATE}/removed"
"""Driver roots that are being removed. They are moved here first, where nothing searches for driver roots."""
MANIFESTS = f"{STATE}/driver-roots"
"""Has a manifest `<index>.json` for each driver root: what was staged. Machines do not see this directory."""
OWNED = f"{STATE}/owned.json"
MACHINES_STATE = f"{STATE}/machines"
LAST_GOOD_CONFIG = f"{STATE}/last-good-config.json"
REMEMBERED_GPUS = (f"{STATE}/granted-gpus.json", f"{STATE}/granted-gpus.copy.json")
"""Two copies of the record of the last granted GPUs, in the order of writing."""
AS_FOUND = (f"{STATE}/as-found.json", f"{STATE}/as-found.copy.json")
"""Two copies of the record of the host as it was before `up` first changed it, in the order of writing."""
NODES = f"{STATE}/nodes"
"""Has a record `<machine>.json` for each node that `up` made: what its root file system was made from."""
NODE_FILES = f"{STATE}/node-files.json"
"""In a machine: what `up` put into its root file system."""
CARRIED = f"{STATE}/carried"
"""Has the directories that machines keep outside of their root file systems. Only root may enter it."""
SWITCHES = f"{STATE}/switches"
"""Has a directory for each machine that was switched to another root file system, with the record of that."""
BINARIES = f"{STATE}/binaries"
"""Programs of nodes, and archives of programs, that were fetched and verified, by digest."""

TRIAL = "/usr/lib/unbounded-agent/former/trial"
"""Exists while a release is on trial after an upgrade: if it fails, the former one runs again (deploy/debian/trial)."""
WENT_BACK = "/usr/lib/unbounded-agent/former/went-back"
"""A sentence: which release failed so, why, and which one runs. Until the next upgrade."""

RUNTIME = "/run/unbounded-agent"
INSTANCE_LOCK = f"{RUNTIME}/instance.lock"
STATUSZ_SOCKET = "statusz.sock"
"""A socket in RUNTIME that serves the service's status to root only."""
PASS_LOCK = f"{RUNTIME}/pass.lock"
PROVISION_LOCK = f"{RUNTIME}/provision.lock"
"""Held by `up` and `reset`: only one of them changes the host at a time."""
CHAINS_REMOVAL = f"{RUNTIME}/remove-chains"
"""Input for iptables-restore, with which `reset` removes chains. The file exists only while that program runs."""
MACHINES_RUNTIME = f"{RUNTIME}/machines"
RELOAD_PENDING = f"{RUNTIME}/reload-owed"
"""Exists until systemd has read changed unit files. NeedDaemonReload is not enough: after `systemctl set-property`, it
no longer shows that they have changed."""
CONDITIONS = f"{RUNTIME}/conditions.json"
"""The last evaluated conditions, world-readable."""
AGES = f"{RUNTIME}/ages.json"
"""When the files on which time limits depend last changed, by CLOCK_MONOTONIC."""
GPUS = f"{RUNTIME}/gpus.json"
"""What is known of single GPUs until they leave the PCI bus: detached, lost, or failed."""
CHECK_RESULTS = f"{RUNTIME}/checks.json"
"""What the administrator's checks found last. systemd opens it for their unit (StandardOutput=)."""
DRIVER_UPGRADE = f"{STATE}/driver-upgrade.json"
"""How far `driver upgrade` has got. The file exists only while something is left to do."""
DRIVER_PACKAGES = f"{STATE}/driver-packages"
"""Has the packages of that upgrade: `new`, and `old` for the way back."""
GPU_RESETS = f"{STATE}/gpu-resets.json"
"""When the agent reset GPUs by itself."""
SERVICE_STATE = f"{RUNTIME}/service.json"
"""What keeps the service from its work (agent.host.state.records), world-readable for `doctor`."""
LAST_GOOD_LOCK = f"{RUNTIME}/last-good-config.lock"
DRIVER_UPGRADE_LOCK = f"{RUNTIME}/driver-upgrade.lock"
"""Held by `driver upgrade`."""
GPUS_LOCK = f"{RUNTIME}/gpus.lock"
GPU_TEST_LOCK = f"{RUNTIME}/gpu-test.lock"
"""Held by `gpus test`: a machine works on one request at a time."""
KERNEL_LOG_READ = f"{RUNTIME}/kernel-log.json"
"""How far the service has read the kernel log."""
WAKE = f"{RUNTIME}/wake"
"""A change of this file makes the service make a pass."""

MACHINE_ROOTS = "/var/lib/machines"
PARTIAL = ".partial"
"""Added to the path of a staged root file system, it gives the directory in which the image is pulled and unpacked."""
LOADER_CACHE = "/etc/ld.so.cache"
"""The cache of the dynamic loader, ld.so(8), on the host and in a machine."""
NSPAWN = "/etc/systemd/nspawn"
NSPAWN_RUNTIME = "/run/systemd/nspawn"
UNITS = "/etc/systemd/system"
RUNTIME_PROPERTIES = "/run/systemd/system.control"
"""Where systemd keeps the results of `systemctl set-property --runtime` until the host's reboot."""
UNIT_SETTINGS = (f"{UNITS}/", f"{RUNTIME_PROPERTIES}/")
"""Directories that systemd reads again at a daemon-reload."""
DRIVER_ROOTS_TARGET = "unbounded-agent-driver-roots.target"
"""The unit that wants the mounts of all driver roots."""
MACHINED_STATE = "/run/systemd/machines"
"""A directory with one file for each running machine, named after it (systemd's src/machine/machine.c)."""

MACHINE_HOST_NVIDIA = "/run/host-nvidia"
MACHINE_HANDOFF_DIRECTORY = "/run/unbounded-agent/handoff"
MACHINE_REPORT_DIRECTORY = "/run/unbounded-agent/report"
MACHINE_STATE = "/run/unbounded-agent/state"
KUBELET_CERTIFICATES = "/var/lib/kubelet/pki"
"""Where a machine's kubelet keeps its certificates and their keys (--cert-dir)."""
CDI_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
"""Where container runtimes look for CDI specifications. The last one takes precedence (cdi.DefaultSpecDirs)."""
HANDOFF_NAME = "handoff.json"
HANDOFF_VERSION = 1
CONDITIONS_NAME = "conditions.json"
REPORT_NAME = "report.json"
TOKEN_NAME = "bootstrap-token"
"""A file next to the handoff: the bootstrap token, until the kubelet has joined the cluster. Only root may read it."""
JOINED_NAME = "joined"
"""A file next to the report: the kubelet has joined the cluster. It contains the name of the Node object."""
GPU_STATES_NAME = "gpus.json"
"""A file next to the handoff: the states of the granted GPUs."""
FABRIC_NAME = "fabric"
"""A file next to the handoff: what the GPUs' registration with their fabric depends on (Grant.fabric_cause). Whenever
it changes, the machine half asks the GPUs again."""
HEALTH_NAME = "gpu-health.json"
"""A file next to the handoff: how often the machine half asks GPUs for their health, and which GPUs it must not ask."""
GPU_TEST_NAME = "gpu-test.json"
"""A file next to the handoff: which GPUs the machine tests now. It exists while `gpus test` waits for the results."""
GPU_TESTS_NAME = "gpu-tests.json"
"""A file next to the report: the results so far."""
ALLOCATABLE_NAME = "allocatable.json"
ALLOCATABLE = f"{MACHINE_STATE}/{ALLOCATABLE_NAME}"
"""The devices in the machine that pods may be given by claims."""
DRA_STATUS_NAME = "dra-status.json"
DRA_STATUS = f"{MACHINE_STATE}/{DRA_STATUS_NAME}"
"""What agent.dra offers to the cluster."""
DRA_STATE = f"{STATE}/dra"
"""A directory in the machine, on disk: which claims agent.dra has prepared."""
DRA_CLAIMS = f"{DRA_STATE}/claims.json"
DRA_DRIVER = "gpu.unbounded-agent.io"
"""The name of the driver for Dynamic Resource Allocation, by which DeviceClasses select."""
LEAVE_NAME = "leave.json"
"""A file next to the handoff: what the machine does before it stops, or after it has started. It exists while a command
on the host waits for the answer, which keeps it locked (agent.machine.requests)."""
LEAVING_NAME = "leaving.json"
"""A file next to the report: how far that is."""
IMAGES_NAME = "images"
"""A pipe next to the handoff, through which a machine gives images to its candidate while `switch` waits for that."""
STOP_NAME = "stop"
"""A directory next to the handoff: the host stops the machine, and the machine half shuts it down by its logind."""
STOPPING_NAME = "stopping"
"""A link next to the report: the machine half shuts the machine down."""
LIVE_NAME = "live.json"
GRANTED_NAME = "granted.json"
NODE_CONDITION_MARK = f"{STATE}/node-condition"
"""A file in the machine, on disk. It contains the name of the Node object that has the agent's condition."""
NODE_CORDON_MARK = f"{STATE}/node-cordon"
"""The same for a Node that the machine has cordoned. It is empty if another root of the machine may have done that."""
CORDONED_FOR = "unbounded-agent.io/cordoned-for-gpus"
"""The annotation of such a Node: GPUs and why they are fenced."""
CORDONED_TO_LEAVE = "unbounded-agent.io/cordoned-to-leave"
"""The annotation of a Node that its machine has cordoned because the machine is about to stop."""


def detach_lock_file(address: str) -> str:
    return f"{RUNTIME}/detach-{address}.lock"


def machine_lock_file(machine: str) -> str:
    """Return the lock of the command that starts, stops, makes or removes the machine."""
    return f"{RUNTIME}/machine-{machine}.lock"


def leave_lock_file(machine: str) -> str:
    """Return the lock of whoever waits for leaving_file: a machine works on one request at a time."""
    return f"{RUNTIME}/leave-{machine}.lock"


def driver_root(index: int) -> str:
    """Return the published driver root. Machines see it in MACHINE_HOST_NVIDIA, under the same index."""
    return f"{HOST_NVIDIA}/{index}"


def mount_unit(path: str) -> str:
    """Return the unit that mounts at a path of letters, digits and hyphens, by the rule of systemd-escape(1)."""
    return path.strip("/").replace("-", "\\x2d").replace("/", "-") + ".mount"


def spec_file(vendor: str) -> str:
    """Return where, in the machine, a vendor's CDI specification is published: JSON, which is also YAML."""
    return f"{CDI_DIRECTORIES[0]}/{vendor}.yaml"


def mode_spec_file(vendor: str, mode: str) -> str:
    return spec_file(f"{vendor}-{mode}")


def spec_directory(vendor: str) -> str:
    """Return where, in the machine, a vendor's generator writes its CDI specification before it is verified."""
    return f"{MACHINE_STATE}/cdi-{vendor}"


def nspawn_file(machine: str) -> str:
    """Return the machine's settings file, systemd.nspawn(5); it has no drop-ins."""
    return f"{NSPAWN}/{machine}.nspawn"


def rewritten_nspawn(machine: str) -> str:
    """Return the file to which the machine's unit first writes new settings. nspawn reads only NAME.nspawn."""
    return f"{NSPAWN}/.{machine}.nspawn.before-start"


def machine_root(machine: str) -> str:
    return f"{MACHINE_ROOTS}/{machine}"


def machine_image(machine: str) -> str:
    """Return the path of the image file that systemd-nspawn boots if the machine has no root directory."""
    return f"{machine_root(machine)}.raw"


def staged_prefix(machine: str) -> str:
    """Return the start of the paths of unfinished root file systems. systemd ignores names that begin with a dot."""
    return f"{MACHINE_ROOTS}/.{machine}.unbounded-agent-"


def staged_root(machine: str, digest: str) -> str:
    """Return where a root file system is until it gets its final name.

    While the root file system has only the image's files, `digest` is the image's. After programs and files were added,
    `digest` is computed from the image, the programs and the files.
    """
    return f"{staged_prefix(machine)}{digest.removeprefix('sha256:')[:16]}"


def candidate_of(machine: str) -> str:
    """Return the name under which a machine's next root file system boots, next to the machine that still serves."""
    return f"{machine}-next"


def other_root(machine: str) -> str:
    """Return where a machine's second root file system is while it is not booted: the next one, later the former."""
    return f"{staged_prefix(machine)}other"


def switch_directory(machine: str) -> str:
    """Return the directory with the records of the machine's last switch to another root file system."""
    return f"{SWITCHES}/{machine}"


def switch_record(machine: str) -> str:
    return f"{switch_directory(machine)}/switch.json"


def root_records(machine: str, which: str) -> tuple[str, str]:
    """Return both copies of the record of one of the root file systems of a switch: `next` or `former`."""
    directory = switch_directory(machine)
    return f"{directory}/{which}.json", f"{directory}/{which}.copy.json"


def identity_directory(machine: str) -> str:
    """Return the directory of the host that has the kubelet's certificates, bound at KUBELET_CERTIFICATES.

    Root in the machine may let anybody enter it, and put setuid programs there. Only root may enter its parent.
    """
    return f"{identity_door(machine)}/certificates"


def identity_door(machine: str) -> str:
    return f"{MACHINES_STATE}/{machine}/identity"


def node_record(machine: str) -> str:
    # The copy of machine x's record is x.copy.json. So the record of a machine named x.copy gets a second dot, and is
    # x.copy..json. No machine's name ends in a dot.
    return f"{NODES}/{machine}{'.' if machine.endswith('.copy') else ''}.json"


def cordoned_file(machine: str) -> str:
    """Return the file that exists if the agent cordoned the machine's node. It contains the Node object's name."""
    return f"{NODES}/{machine}.cordoned"


def carried_directory(machine: str, path: str) -> str:
    """Return the host's directory that a machine has at a path, whatever root file system it has.

    Its name stands for the whole path: root in the machine can put links into what it is given, and the way to another
    directory must not lead through there.
    """
    return f"{CARRIED}/{machine}/{carried_name(path)}"


def carried_name(path: str) -> str:
    return path[1:].replace("%", "%25").replace("/", "%2F")


def drained_file(machine: str) -> str:
    """Return the file that exists from when the machine is asked to drain its node until it has uncordoned it."""
    return f"{NODES}/{machine}.drained"


def machine_unit(machine: str) -> str:
    """Return the unit that runs the machine; machine names are host names, which need no systemd-escape(1)."""
    return f"systemd-nspawn@{machine}.service"


def unit_drop_in(machine: str) -> str:
    """Return the agent's drop-in. It sorts after, and so overrides, 50-DeviceAllow.conf of `systemctl set-property`."""
    return f"{UNITS}/{machine_unit(machine)}.d/90-unbounded-agent.conf"


def device_allow_drop_in(machine: str) -> str:
    """Return the drop-in that `systemctl set-property` writes for DeviceAllow=. It also applies to the next start."""
    return f"{RUNTIME_PROPERTIES}/{machine_unit(machine)}.d/50-DeviceAllow.conf"


def handoff_directory(machine: str) -> str:
    return f"{MACHINES_STATE}/{machine}/handoff"


def handoff_file(machine: str) -> str:
    return f"{handoff_directory(machine)}/{HANDOFF_NAME}"


def handed_roots_file(machine: str) -> str:
    """Return the record of the driver roots that handoffs have named since the machine's start."""
    return f"{MACHINES_STATE}/{machine}/driver-roots.json"


def granted_file(machine: str) -> str:
    """Return the record of the last grant, outside the directory that the machine sees."""
    return f"{MACHINES_STATE}/{machine}/{GRANTED_NAME}"


def conditions_file(machine: str) -> str:
    return f"{handoff_directory(machine)}/{CONDITIONS_NAME}"


def token_file(machine: str) -> str:
    """Return the machine's bootstrap token. It exists only until the machine's kubelet has joined."""
    return f"{handoff_directory(machine)}/{TOKEN_NAME}"


def gpu_states_file(machine: str) -> str:
    """Return the file with the states of the machine's GPUs. It exists only if the machine allocates by claims."""
    return f"{handoff_directory(machine)}/{GPU_STATES_NAME}"


def fabric_file(machine: str) -> str:
    """Return the file that says what the machine's GPUs' fabric depends on. It exists only if there is something."""
    return f"{handoff_directory(machine)}/{FABRIC_NAME}"


def gpu_health_file(machine: str) -> str:
    """Return the file that makes the machine half ask GPUs for their health. It exists only if it should."""
    return f"{handoff_directory(machine)}/{HEALTH_NAME}"


def gpu_test_file(machine: str) -> str:
    """Return the file that makes the machine test GPUs. It exists only while `gpus test` waits for the results."""
    return f"{handoff_directory(machine)}/{GPU_TEST_NAME}"


def leave_file(machine: str) -> str:
    return f"{handoff_directory(machine)}/{LEAVE_NAME}"


def images_pipe(machine: str) -> str:
    return f"{handoff_directory(machine)}/{IMAGES_NAME}"


def leaving_file(machine: str) -> str:
    return f"{report_directory(machine)}/{LEAVING_NAME}"


def stop_mark(machine: str) -> str:
    """Return the directory that makes the machine half shut the machine down."""
    return f"{handoff_directory(machine)}/{STOP_NAME}"


def machine_files(machine: str) -> tuple[str, str, str]:
    """Return the files of one machine that the agent owns according to its ownership record."""
    return (nspawn_file(machine), unit_drop_in(machine), handoff_file(machine))


def machine_of(path: str) -> str | None:
    """Return the machine whose .nspawn file or drop-in this path is; None for any other path."""
    name = path.removeprefix(f"{NSPAWN}/").removesuffix(".nspawn")
    if path == nspawn_file(name):
        return name
    name = path.removeprefix(f"{UNITS}/systemd-nspawn@").partition(".service.d/")[0]
    return name if path == unit_drop_in(name) else None


def report_directory(machine: str) -> str:
    """Return the small tmpfs for this machine, which is bound into the machine at MACHINE_REPORT_DIRECTORY."""
    return f"{MACHINES_RUNTIME}/{machine}/report"


def joined_file(machine: str) -> str:
    """Return the file that says that the machine's kubelet has joined. The machine can write anything there."""
    return f"{report_directory(machine)}/{JOINED_NAME}"


def live_file(machine: str) -> str:
    return f"{MACHINES_RUNTIME}/{machine}/{LIVE_NAME}"


def start_began_mark(machine: str) -> str:
    """Return the directory that says that a start of the machine has begun since the host booted."""
    return f"{MACHINES_RUNTIME}/{machine}/start-began"


def started_nspawn(machine: str) -> str:
    """Return the copy of the .nspawn file that the machine was started with. The machine's unit makes the copy."""
    return f"{MACHINES_RUNTIME}/{machine}/started.nspawn"


def started_drop_in(machine: str) -> str:
    """Return the copy of the drop-in that the machine was started with. The machine's unit makes the copy."""
    return f"{MACHINES_RUNTIME}/{machine}/started.conf"
