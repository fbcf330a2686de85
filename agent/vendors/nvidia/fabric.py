"""Observes NVSwitch and the Fabric Manager. GPUs of a host with NVSwitch cannot compute without the Fabric Manager."""

from agent.model.device import DeviceKind
from agent.model.facts import Absent, Broken, DeviceNode, Driver, FabricService, Seen, Unseen
from agent.system.deadlines import read_device_texts
from agent.system.files import System
from agent.system.processes import program_runs
from agent.system.seen import classify_error, entries_if_present
from agent.vendors.host_vendor import Sources
from agent.vendors.nvidia.devices.gpus import VENDOR_ID, has_nvswitch
from agent.vendors.nvidia.devices.nodes import SWITCH_CONTROL

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


def observe_fabric(sources: Sources, nodes: Seen[tuple[DeviceNode, ...]]) -> Seen[str]:
    """Return the Fabric Manager's state; Absent if the host has no NVSwitch, and so needs no Fabric Manager.

    If the host has NVSwitch, but the Fabric Manager neither has a unit nor runs without one, return Broken.

    This is an inference: whether a fabric works, only the GPUs themselves know.
    """
    if not _shows_nvswitch(sources, nodes):
        if not isinstance(sources.pci, tuple):
            return Unseen(sources.pci.why)
        managed = any(each.vendor_id == VENDOR_ID for each in sources.pci) and _manages_nvswitch(sources)
        if managed is not True:
            return managed or Absent("no NVSwitch")
    state = _unit_state(sources)
    if isinstance(state, Absent | Broken) and program_runs(sources.system, FABRIC_MANAGER):
        # The GPU Operator's driver container, for example, starts the Fabric Manager without a unit.
        return RUNNING
    if isinstance(state, Absent):
        # Absent would mean that the host needs no Fabric Manager, but this host's GPUs are unusable without it.
        return Broken(
            f"this host has NVSwitch, but {FABRIC_UNIT} is not installed; install the Fabric Manager in the driver's "
            "version"
        )
    return state


def observe_fabric_service(sources: Sources, nodes: Seen[tuple[DeviceNode, ...]], fabric: Seen[str]) -> FabricService:
    """Return where to look if GPUs are not registered with their fabric. `fabric` is from `observe_fabric`."""
    missing: tuple[str, ...] = ()
    if not _shows_nvswitch(sources, nodes):
        missing = tuple(name for name in ADAPTER_MODULES if not _is_loaded(sources.system, name))
    state = RUNNING if fabric == RUNNING else _unit_state(sources)
    return FabricService(state, sources.started(FABRIC_UNIT) if isinstance(state, str) else 0, missing)


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


def _unit_state(sources: Sources) -> Seen[str]:
    return sources.units.get(FABRIC_UNIT, Unseen(f"{FABRIC_UNIT} was not observed"))


def _is_loaded(system: System, module: str) -> bool:
    """Return whether a kernel module is loaded. If that cannot be read, it is not called missing."""
    try:
        return system.exists(f"/sys/module/{module}")
    except OSError:
        return True


def _shows_nvswitch(sources: Sources, nodes: Seen[tuple[DeviceNode, ...]]) -> bool:
    return _has_node(nodes) or has_nvswitch(sources.pci)


def _has_node(nodes: Seen[tuple[DeviceNode, ...]]) -> bool:
    # The control node is no evidence: the module makes it even without NVSwitches (nvswitch_init, linux_nvswitch.c).
    return isinstance(nodes, tuple) and any(
        node.kind is DeviceKind.NVSWITCH and node.path != SWITCH_CONTROL for node in nodes
    )


def _manages_nvswitch(sources: Sources) -> bool | Unseen:
    """Return whether a network adapter of the host manages NVSwitches; Unseen if the adapters could not be listed.

    Reading an adapter's product data takes milliseconds. So the data are read again only if the adapters have changed.
    """
    system = sources.system
    try:
        links = [(name, system.read_link(f"{ADAPTERS}/{name}")) for name in entries_if_present(system, ADAPTERS)]
    except OSError as error:
        return Unseen(classify_error(ADAPTERS, error).why)
    if not links:
        return False
    return sources.file_cache.get(
        "adapters of NVSwitch",
        # The links contain the adapters' PCI addresses, so they show whether the adapters have changed. The times of
        # the files would not show that: sysfs makes these times up.
        tuple(links),
        system,
        lambda _: _read(system, [f"{ADAPTERS}/{name}/device/vpd" for name, _ in links]),
        lambda _: True,
    )


def _read(system: System, paths: list[str]) -> bool:
    """Return whether one of these files contains MANAGES_SWITCH. The files have the adapters' product data.

    A file that cannot be read counts as a file without the mark. Only root may read these files. And if a network
    adapter is broken or slow, the answer must not become unknown for a host without NVSwitch.
    """
    return any(isinstance(text, str) and MANAGES_SWITCH in text for text in read_device_texts(system, paths))
