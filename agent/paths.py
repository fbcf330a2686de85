"""Where things are: on the host, in the machine, and in both. Pure strings, absolute unless said otherwise."""

CONFIG_FILE = "/etc/unbounded-agent/config.toml"
CONFIG_DIRECTORY = "/etc/unbounded-agent/config.d"

STATE = "/var/lib/unbounded-agent"
HOST_NVIDIA = f"{STATE}/host-nvidia"
"""Parent of the staged driver roots `<index>/`; bound read-only at MACHINE_HOST_NVIDIA."""
STAGING = f"{STATE}/staging"
"""Driver roots in the making: beside HOST_NVIDIA, so that one rename publishes and no machine sees them before."""
REMOVED = f"{STATE}/removed"
"""Driver roots on their way out: first renamed to where no machine sees them, then removed."""
MANIFESTS = f"{STATE}/driver-roots"
"""`<index>.json`, what was staged; outside of what machines see, so that none can spoil it. See `origin_file`."""
OWNED = f"{STATE}/owned.json"
MACHINES_STATE = f"{STATE}/machines"

RUNTIME = "/run/unbounded-agent"
INSTANCE_LOCK = f"{RUNTIME}/instance.lock"
STATUSZ_SOCKET = "statusz.sock"
"""In RUNTIME: what only root may ask the service."""
PASS_LOCK = f"{RUNTIME}/pass.lock"
MACHINES_RUNTIME = f"{RUNTIME}/machines"
RELOAD_OWED = f"{RUNTIME}/reload-owed"
"""There while files of units were changed and systemd has not read them: set-property hides that (NeedDaemonReload)."""
CONDITIONS = f"{RUNTIME}/conditions.json"
"""Last evaluated conditions, world-readable: where `status` finds the times of the last changes."""
LOST_GPUS = f"{RUNTIME}/lost-gpus.json"
"""GPUs that the kernel's log said to be lost, until their driver is bound anew."""
KERNEL_LOG_READ = f"{RUNTIME}/kernel-log.json"
"""How far the kernel's log was read: what comes while the service is down is not missed."""
DETACHED_GPUS = f"{RUNTIME}/detached-gpus.json"
"""GPUs that an administrator takes out of use, until they have gone from PCI."""

MACHINE_ROOTS = "/var/lib/machines"
NSPAWN = "/etc/systemd/nspawn"
UNITS = "/etc/systemd/system"
RUNTIME_PROPERTIES = "/run/systemd/system.control"
"""Where systemd keeps what `systemctl set-property --runtime` has set, until the host's reboot."""
UNIT_SETTINGS = (f"{UNITS}/", f"{RUNTIME_PROPERTIES}/")
"""What systemd reads again at a daemon-reload."""
MACHINED_STATE = "/run/systemd/machines"
"""A file for each machine that runs, by its name (systemd's src/machine/machine.c)."""

MACHINE_HOST_NVIDIA = "/run/host-nvidia"
MACHINE_HANDOFF_DIRECTORY = "/run/unbounded-agent/handoff"
MACHINE_REPORT_DIRECTORY = "/run/unbounded-agent/report"
MACHINE_STATE = "/run/unbounded-agent/state"
CDI_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
"""In the machine: where container runtimes look for CDI specs, the later one outranking (cdi.DefaultSpecDirs)."""
HANDOFF_NAME = "handoff.json"
CONDITIONS_NAME = "conditions.json"
REPORT_NAME = "report.json"
LIVE_NAME = "live.json"
GRANTED_NAME = "granted.json"
NODE_CONDITION_MARK = f"{STATE}/node-condition"
"""In the machine, on disk: the name of the Node object that has a condition of ours."""


def origin_file(index: int) -> str:
    """Beside a driver root's manifest: where the host had what it holds."""
    return f"{MANIFESTS}/{index}.origin.json"


def spec_file(vendor: str) -> str:
    """In the machine: where a vendor's CDI spec is published. In JSON, which is YAML as well."""
    return f"{CDI_DIRECTORIES[0]}/{vendor}.yaml"


def mode_spec_file(vendor: str, mode: str) -> str:
    """In the machine: the same for what its generator makes in another mode."""
    return spec_file(f"{vendor}-{mode}")


def spec_directory(vendor: str) -> str:
    """In the machine: where a vendor's generator writes, before its CDI spec is verified and published."""
    return f"{MACHINE_STATE}/cdi-{vendor}"


def nspawn_file(machine: str) -> str:
    """The machine's settings, systemd.nspawn(5); there are no drop-ins for it."""
    return f"{NSPAWN}/{machine}.nspawn"


def machine_unit(machine: str) -> str:
    """The unit that runs the machine; machine names are host names, which need no systemd-escape(1)."""
    return f"systemd-nspawn@{machine}.service"


def unit_drop_in(machine: str) -> str:
    """Sorts behind systemd's own 50-DeviceAllow.conf (systemctl set-property), so that ours wins."""
    return f"{UNITS}/{machine_unit(machine)}.d/90-unbounded-agent.conf"


def set_device_allow(machine: str) -> str:
    """What set-property makes of DeviceAllow=; it outlives the machine, and applies to its next start."""
    return f"{RUNTIME_PROPERTIES}/{machine_unit(machine)}.d/50-DeviceAllow.conf"


def handoff_directory(machine: str) -> str:
    """Bound read-only into the machine at MACHINE_HANDOFF_DIRECTORY."""
    return f"{MACHINES_STATE}/{machine}/handoff"


def handoff_file(machine: str) -> str:
    """What the machine half acts on."""
    return f"{handoff_directory(machine)}/{HANDOFF_NAME}"


def handed_roots_file(machine: str) -> str:
    """Names the driver roots that the machine was handed since it was started."""
    return f"{MACHINES_STATE}/{machine}/driver-roots.json"


def granted_file(machine: str) -> str:
    """What the machine was granted last; beside the directory that the machine sees, see agent.granted."""
    return f"{MACHINES_STATE}/{machine}/{GRANTED_NAME}"


def conditions_file(machine: str) -> str:
    """What the host half thinks of the machine, for its Node object; only there where that is configured."""
    return f"{handoff_directory(machine)}/{CONDITIONS_NAME}"


def machine_files(machine: str) -> tuple[str, str, str]:
    """Every file of ours that belongs to one machine."""
    return (nspawn_file(machine), unit_drop_in(machine), handoff_file(machine))


def machine_of(path: str) -> str | None:
    """The machine whose settings file a path is; None for any other path."""
    name = path.removeprefix(f"{NSPAWN}/").removesuffix(".nspawn")
    if path == nspawn_file(name):
        return name
    name = path.removeprefix(f"{UNITS}/systemd-nspawn@").partition(".service.d/")[0]
    return name if path == unit_drop_in(name) else None


def report_directory(machine: str) -> str:
    """A small tmpfs of its own, bound into the machine at MACHINE_REPORT_DIRECTORY."""
    return f"{MACHINES_RUNTIME}/{machine}/report"


def live_file(machine: str) -> str:
    """What the running machine has of its settings, see agent.live."""
    return f"{MACHINES_RUNTIME}/{machine}/{LIVE_NAME}"
