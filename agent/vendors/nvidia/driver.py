"""Observes NVIDIA's driver on the host: the loaded module and the driver's services."""

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from functools import lru_cache

from msgspec import Struct

from agent.model.device import DeviceKind
from agent.model.errors import AgentError, CommandError
from agent.model.facts import (
    BRIDGE_OTHER,
    Absent,
    Broken,
    DeviceNode,
    Driver,
    FabricService,
    Gpu,
    PciDevice,
    Seen,
    ServiceDirectory,
    Unseen,
    UserSpace,
)
from agent.model.text import whole_number
from agent.system.deadlines import read_device_text, read_device_texts
from agent.system.devices import program_runs
from agent.system.files import System
from agent.system.modules import is_loaded, load_module
from agent.system.trust import classify_error, entries_if_present, read_seen
from agent.vendors.host_vendor import PROC_DEVICES, Sources, parse_majors
from agent.vendors.nvidia.contract import DIRECTORIES, WRITABLE
from agent.vendors.nvidia.devices import KERNEL_DRIVER, RULES, SWITCH_CONTROL, VENDOR_ID, observe_gpus
from agent.vendors.nvidia.places import HOST_CACHE

# NVSwitch and the Fabric Manager, without which GPUs of a host with NVSwitch cannot compute.

FABRIC_UNIT = "nvidia-fabricmanager.service"
FABRIC_MANAGER = "nv-fabricmanager"
PERSISTENCE_UNIT = "nvidia-persistenced.service"
RUNNING = "running"
"""The state of a daemon that runs without its unit. This word is not one of systemd's ActiveStates."""
ADAPTER_MODULES = ("mlx5_ib", "ib_umad")
"""Kernel modules by which the Fabric Manager reaches NVSwitches of the fourth generation (see MANAGES_SWITCH)."""
ADAPTERS = "/sys/class/infiniband"
MANAGES_SWITCH = "SW_MNG"
"""A mark in the vital product data of ConnectX-7 adapters that manage NVSwitches. NVSwitches of the fourth generation,
as in HGX B200, are found by this mark, because they are not PCI devices. NVIDIA's driver container looks for the mark
too (_assert_nvlink5_system)."""


def _observe_fabric(sources: Sources, nodes: Seen[tuple[DeviceNode, ...]]) -> tuple[Seen[str], FabricService]:
    """Return the Fabric Manager's state, and where to look if GPUs are not registered with their fabric.

    The state is Absent if the host has no NVSwitch, and so needs no Fabric Manager; Broken if the host has NVSwitch,
    but the Fabric Manager neither has a unit nor runs without one. This is an inference: whether a fabric works, only
    the GPUs themselves know.
    """
    system, unit = sources.system, _unit_state(sources, FABRIC_UNIT)
    listed = nodes if isinstance(nodes, tuple) else ()
    pci = sources.pci if isinstance(sources.pci, tuple) else ()
    # The control node is no evidence: the module makes it even without NVSwitches (nvswitch_init, linux_nvswitch.c).
    shown = any(node.kind is DeviceKind.NVSWITCH and node.path != SWITCH_CONTROL for node in listed) or any(
        each.vendor_id == VENDOR_ID and each.class_id >> 8 == BRIDGE_OTHER for each in pci
    )
    fabric: Seen[str] = unit
    if not shown and (without := _without_switches(sources)):
        fabric = without
    elif isinstance(unit, Absent | Broken) and program_runs(system, FABRIC_MANAGER):
        # The GPU Operator's driver container, for example, starts the Fabric Manager without a unit.
        fabric = RUNNING
    elif isinstance(unit, Absent):
        # Absent would mean that the host needs no Fabric Manager, but this host's GPUs are unusable without it.
        fabric = Broken(
            f"this host has NVSwitch, but {FABRIC_UNIT} is not installed; install the Fabric Manager in the driver's "
            "version"
        )
    missing = []
    for name in () if shown else ADAPTER_MODULES:
        # What cannot be read is not called missing.
        with contextlib.suppress(OSError):
            missing += [] if system.exists(f"/sys/module/{name}") else [name]
    state = RUNNING if fabric == RUNNING else unit
    started = sources.started(FABRIC_UNIT) if isinstance(state, str) else 0
    return fabric, FabricService(state, started, tuple(missing))


def _without_switches(sources: Sources) -> Absent | Unseen | None:
    """Return None if a network adapter of the host manages NVSwitches; Unseen if that could not be observed."""
    system, none = sources.system, Absent("no NVSwitch")
    if not isinstance(sources.pci, tuple):
        return Unseen(sources.pci.why)
    if not any(each.vendor_id == VENDOR_ID for each in sources.pci):
        return none
    try:
        links = [(name, system.read_link(f"{ADAPTERS}/{name}")) for name in entries_if_present(system, ADAPTERS)]
    except OSError as error:
        return Unseen(classify_error(ADAPTERS, error).why)
    return None if links and _shows_mark(system, tuple(links)) else none


# Reading an adapter's product data takes milliseconds. So the data are read again only if the links, which contain the
# adapters' PCI addresses, have changed.
@lru_cache(maxsize=1)
def _shows_mark(system: System, links: tuple[tuple[str, str | None], ...]) -> bool:
    # A file that cannot be read counts as a file without the mark: only root may read these files, and if an adapter is
    # broken or slow, the answer must not become unknown for a host without NVSwitch.
    return any(
        isinstance(text, str) and MANAGES_SWITCH in text
        for text in read_device_texts(system, [f"{ADAPTERS}/{name}/device/vpd" for name, _ in links])
    )


def fabric_cause(driver: Driver) -> str | None:
    """Return Grant.fabric_cause: empty without daemons, None if one's state could not be observed. Pure."""
    service, causes = driver.fabric_service, []
    daemons = (
        (FABRIC_UNIT, service.state, service.started),
        (PERSISTENCE_UNIT, driver.persistence, driver.persistence_started),
    )
    for unit, state, started in daemons:
        if isinstance(state, Unseen) or not isinstance(started, int):
            return None
        if not isinstance(state, Absent):
            causes.append(f"{unit} {state if isinstance(state, str) else 'unusable'}, started at {started}")
    missing = service.missing_modules if not isinstance(service.state, Absent) else ()
    return "; ".join((*causes, *(f"without {each}" for each in missing)))


def has_unit(service: FabricService) -> bool:
    """Return whether the Fabric Manager is known to have a unit on this host that can be started. Pure."""
    return isinstance(service.state, str) and service.state != RUNNING


def _unit_state(sources: Sources, unit: str) -> Seen[str]:
    return sources.units.get(unit, Unseen(f"{unit} was not observed"))


MODULE_VERSION = "/sys/module/nvidia/version"
PROC_VERSION = "/proc/driver/nvidia/version"
VERSION = re.compile(r"[0-9]{1,9}\.[0-9.]*[0-9]")
"""A driver's version. In PROC_VERSION, it is the first match in the first line; the text before it differs between the
open and the proprietary module."""

PERSISTENCE_DAEMON = "nvidia-persistenced"
SERVICES: tuple[str, ...] = (PERSISTENCE_UNIT, FABRIC_UNIT)
MODULE_NAMES: tuple[str, ...] = ("nvidia*",)
"""Pattern of nvidia, nvidia_uvm, nvidia_modeset, nvidia_drm, nvidia_peermem and nvidia_fs."""


def observe_driver(
    sources: Sources, module: Seen[str], user_space: UserSpace, nodes: Seen[tuple[DeviceNode, ...]]
) -> Driver:
    """Return the driver's facts: what is loaded, installed and running."""
    persistence = _unit_state(sources, PERSISTENCE_UNIT)
    # A driver from the host's packages includes the daemon's unit. If the driver is from elsewhere, such as a driver
    # container, the daemon may run without the unit. Only in that case are all processes searched for the daemon.
    elsewhere = user_space.place_name not in ("", HOST_CACHE)
    if isinstance(persistence, Absent | Broken) and elsewhere and program_runs(sources.system, PERSISTENCE_DAEMON):
        persistence = RUNNING
    started = sources.started(PERSISTENCE_UNIT) if isinstance(persistence, str) and persistence != RUNNING else 0
    fabric, service = _observe_fabric(sources, nodes)
    return Driver(module, user_space, fabric, persistence, started, service)


def observe_services(system: System) -> tuple[ServiceDirectory, ...]:
    """Return the existing directories for daemons' sockets.

    Symbolic links, and directories that could not be observed, are left out. A directory in which clients may write is
    also left out if it is not a mount point, because clients could then fill the host's /run.
    """
    found = []
    for name, path in DIRECTORIES.items():
        writable = name in WRITABLE
        with contextlib.suppress(OSError):
            real = system.is_directory(path, follow=False) and (not writable or system.is_mount(path))
            inode = system.link_inode(path)
            if real and inode is not None:
                found.append(ServiceDirectory(name, path, inode, writable))
    return tuple(found)


def observe_module(system: System) -> Seen[str]:
    """Return the loaded module's version; Absent if it is not loaded."""
    for path in (MODULE_VERSION, PROC_VERSION):
        text = read_seen(lambda each: read_device_text(system, each), path)
        if isinstance(text, str):
            whole = path == MODULE_VERSION
            match = VERSION.fullmatch(text.strip()) if whole else VERSION.search(text.partition("\n")[0])
            return match[0] if match else Broken(f"{path}: no version in {text[:80]!a}")
        if not isinstance(text, Absent):
            return text
    return Absent("the kernel module nvidia is not loaded")


# Makes the device nodes that NVIDIA's driver leaves to user space: the nodes of each GPU, and the shared nodes.
#
# The driver's program nvidia-modprobe makes them if it is installed. Otherwise mknod(1) makes them, with numbers from
# /proc/devices, and with mode and owner from the driver's parameters (modprobe-utils/nvidia-modprobe-utils.c).

PARAMETERS = "/proc/driver/nvidia/params"
MODESET = "/sys/module/nvidia_modeset"
NVIDIA_MODPROBE = "nvidia-modprobe"
LIMIT = 30.0
"""Seconds that one program may take."""
SETTLE = 5.0
"""Seconds to wait until the driver is bound to a newly plugged GPU."""
POLL = 0.5
"""Seconds between two checks."""


class Node(Struct, frozen=True):
    """A node that should exist."""

    path: str
    major: int
    minor: int
    option: tuple[str, ...]
    """The option with which nvidia-modprobe makes the node."""


class Parameters(Struct, frozen=True):
    """The parameters of the module nvidia for device nodes (DeviceFile...). The defaults are the driver's."""

    modify: bool = True
    """Whether user space may make and change nodes at all."""
    uid: int = 0
    gid: int = 0
    mode: int = 0o666


def parse_parameters(text: str) -> Parameters:
    """Parse the driver's parameters: lines of `Name: number`. DeviceFileMode is decimal (nv-procfs.c)."""
    fields = [line.partition(":") for line in text.splitlines()]
    values = {name.strip(): number for name, _, value in fields if (number := whole_number(value.strip())) is not None}
    default = Parameters()
    return Parameters(
        values.get("ModifyDeviceFiles", 1) != 0,
        values.get("DeviceFileUID", default.uid),
        values.get("DeviceFileGID", default.gid),
        values.get("DeviceFileMode", default.mode) & 0o777,
    )


def _make_nodes(system: System, list_gpus: Callable[[], Collection[Gpu]], report: Callable[[str], None]) -> None:
    """Make every node that is missing, or has a stale number from before the driver was reloaded.

    If the driver's parameters forbid user space to make nodes, only report which nodes are wrong. Raises AgentError or
    OSError.
    """
    # A GPU's minor becomes known when the driver is bound, some time after the GPU appears.
    deadline, gpus = time.monotonic() + SETTLE, list_gpus()
    while any(gpu.minor is None for gpu in gpus) and time.monotonic() < deadline:
        time.sleep(POLL)
        gpus = list_gpus()
    parameters = parse_parameters(system.read_text(PARAMETERS)) if system.exists(PARAMETERS) else Parameters()
    majors = parse_majors(system.read_text(PROC_DEVICES))
    missing = [each for each in _expected_nodes(majors, gpus, system.exists(MODESET)) if not _exists(system, each)]
    if missing and not parameters.modify:
        report(
            f"missing, or with a stale number: {_paths(missing)}; {PARAMETERS} forbids creating them "
            "(ModifyDeviceFiles: 0): use mknod, or load the module nvidia with NVreg_ModifyDeviceFiles=1"
        )
        return
    failures = []
    for node in missing:
        # This node may exist by now, because one run of nvidia-modprobe can make two nodes.
        if not _exists(system, node):
            try:
                _make(system, node, parameters)
            except AgentError as error:
                failures.append(str(error))
    not_made = [each for each in missing if not _exists(system, each)]
    if made := [each for each in missing if each not in not_made]:
        report(f"created {_paths(made)}")
    if not_made:
        why = "; ".join(failures) or f"{NVIDIA_MODPROBE} reported no error: see `dmesg`"
        raise AgentError(f"cannot create {_paths(not_made)}: {why}")


def _expected_nodes(majors: Mapping[str, int], gpus: Collection[Gpu], modeset: bool) -> Iterator[Node]:
    """Yield the nodes of the drivers registered in /proc/devices. `modeset` is whether nvidia_modeset is loaded."""
    minors = sorted(gpu.minor for gpu in gpus if gpu.minor is not None)
    for rule in RULES["/dev"]:
        major = rule.major(majors)
        if not rule.option or major is None or (rule.kind is DeviceKind.MODESET and not modeset):
            continue
        if rule.minor is not None:
            yield Node(f"/dev/{rule.name}", major, rule.minor, rule.option)
        else:
            yield from (Node(f"/dev/{rule.name}{each}", major, each, (*rule.option, str(each))) for each in minors)


def _exists(system: System, node: Node) -> bool:
    try:
        number = system.device(node.path)
    except FileNotFoundError:
        return False
    return number is not None and (number.major, number.minor) == (node.major, node.minor)


def _make(system: System, node: Node, parameters: Parameters) -> None:
    if system.find_program(NVIDIA_MODPROBE):
        system.run(NVIDIA_MODPROBE, *node.option, timeout=LIMIT)
        return
    if system.exists(node.path):
        if system.device(node.path) is None:
            raise AgentError(f"{node.path} is not a device", "remove it")
        # The number is wrong, because the node is from before the module was reloaded. Another driver may now have that
        # major number.
        system.remove(node.path)
    mode, numbers = f"--mode={parameters.mode:04o}", (str(node.major), str(node.minor))
    system.run("mknod", mode, node.path, "c", *numbers, timeout=LIMIT)
    if (parameters.uid, parameters.gid) != (0, 0):
        system.run("chown", f"{parameters.uid}:{parameters.gid}", node.path, timeout=LIMIT)


def _paths(nodes: Iterable[Node]) -> str:
    return ", ".join(node.path for node in nodes)


# Loads NVIDIA's kernel modules.

NEEDED = ("nvidia", "nvidia_uvm")
"""Modules without which no container can compute."""
WANTED = ("nvidia_modeset", "nvidia_drm")
"""Modules that graphics needs. Driver packages for servers may come without them."""
MODPROBE_LIMIT = 120.0
"""Seconds to load a module. A host with 16 GPUs probes them one after another."""
MODINFO_LIMIT = 10.0


def load(
    system: System,
    list_pci: Callable[[], Seen[tuple[PciDevice, ...]]],
    detached: Set[str],
    report: Callable[[str], None],
) -> None:
    """Load missing modules and make the device nodes. Raises AgentError or OSError.

    Nothing is loaded if there is no GPU, or if all GPUs have other drivers, such as vfio-pci for virtual machines.
    Nothing is loaded while a GPU is detached: an administrator may be about to unload the driver, or to bind the GPU
    to another driver.
    """
    gpus = _gpus(system, list_pci)
    drivers = {gpu.pci_address: gpu.driver or gpu.override for gpu in gpus}
    for_nvidia = _for_nvidia(gpus)
    for address in sorted(drivers.keys() - for_nvidia.keys()):
        report(f"GPU {address} is left to its driver {drivers[address]}")
    if detached_here := sorted(detached & drivers.keys()):
        names = ", ".join(detached_here)
        report(f"loading nothing while a GPU is detached ({names}); `unbounded-agent gpus attach` attaches it")
        return
    if not for_nvidia:
        report("this host has no GPU for NVIDIA's driver")
        return
    for module in NEEDED:
        _load(system, module, report)
    try:
        for module in WANTED:
            _load(system, module, report)
    except AgentError as error:
        # Do not try the modules after the one that failed: modprobe would load the failed module as their dependency,
        # even if the failed module is blacklisted.
        report(f"cannot load all of {', '.join(WANTED)}, which only graphics needs: {error}")
    make_nodes(system, list_pci, report)


def make_nodes(
    system: System, list_pci: Callable[[], Seen[tuple[PciDevice, ...]]], report: Callable[[str], None]
) -> None:
    """Make the nodes of all GPUs that have the driver. Raises AgentError or OSError."""
    # Repeat this until no GPU is new. If a GPU is plugged in during this run, udev starts the unit that runs this, but
    # systemd merges that start with the run in progress. So this run must make the new GPU's node.
    made: Set[str] | None = None
    while (present := _for_nvidia(_gpus(system, list_pci)).keys()) != made:
        _make_nodes(system, lambda: _for_nvidia(_gpus(system, list_pci)).values(), report)
        made = present


def _gpus(system: System, list_pci: Callable[[], Seen[tuple[PciDevice, ...]]]) -> tuple[Gpu, ...]:
    listed = observe_gpus(system, list_pci())
    if listed.unseen:
        # The GPUs' drivers are unknown: loading modules might interfere with them.
        raise AgentError(listed.unseen)
    return listed.gpus


def _for_nvidia(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    """Return the GPUs that have NVIDIA's driver or none, and are not reserved for another driver, by address."""
    return {gpu.pci_address: gpu for gpu in gpus if (gpu.driver or gpu.override) in ("", KERNEL_DRIVER)}


def _load(system: System, module: str, report: Callable[[str], None]) -> None:
    """Load one module, if it is not loaded. Raises CommandError if modprobe fails.

    Raises AgentError in two more cases: because of a line in modprobe.d, modprobe succeeds without loading the module;
    or the version of the module on disk differs from that of the loaded driver, so that it cannot work with it.
    """
    if is_loaded(module, system):
        return
    if system.exists(MODULE_VERSION):
        loaded = system.read_text(MODULE_VERSION).strip()
        try:
            on_disk = system.run("modinfo", "--field=version", module, timeout=MODINFO_LIMIT).strip()
        except CommandError:
            # modprobe will report a missing module.
            on_disk = ""
        if on_disk not in ("", loaded):
            raise AgentError(
                f"kernel module nvidia {loaded} is loaded, but {module} on disk has version {on_disk}",
                "the driver was upgraded: reload its modules, or reboot the host",
            )
    load_module(module, MODPROBE_LIMIT, system)
    report(f"loaded kernel module {module}")
