"""Observes the host. Each pass reads everything again, except files that are known to be unchanged (Memory)."""

from collections.abc import Mapping

from agent.config.settings import Config
from agent.host.observe.driver_roots import observe_staged
from agent.host.observe.loader_cache import Listing
from agent.host.observe.machine import ignored_settings, observe_machine, unseen_machine
from agent.host.observe.memory import Memory
from agent.host.observe.mount_sources import observe_nspawn_sources, observe_sources
from agent.host.observe.owned_files import observe_files, read_owned
from agent.host.observe.placements import observe_placements
from agent.host.observe.resolver import uses_stub_resolver
from agent.host.observe.same_content import with_times
from agent.host.observe.units import (
    Unit,
    observe_start,
    observe_template,
    observe_units,
    observe_version,
    with_properties,
)
from agent.host.state.detached_gpus import observe_detached
from agent.host.state.gpu_faults import observe_faults
from agent.host.state.lost_gpus import observe_lost
from agent.host.state.remembered_gpus import observe_remembered
from agent.host.vendors import HOST_VENDORS
from agent.model.facts import CacheEntry, Facts, MachineFacts, Seen, Unseen
from agent.model.faults import fault
from agent.model.gpu_facts import GpuFacts
from agent.model.paths import HOST_NVIDIA, RELOAD_PENDING, STATE, machine_of, machine_unit, mount_unit
from agent.system.ages import Ages
from agent.system.files import System
from agent.system.seen import read_seen
from agent.system.sysfs import DeviceSource
from agent.vendors.host_vendor import Sources


def observe(config: Config, system: System, devices: DeviceSource, memory: Memory) -> Facts:
    """Return the facts of one pass. In these facts, whatever could not be observed is Unseen.

    Raises ObservationError if one of these three records cannot be read: the record of detached GPUs, the record of
    lost GPUs, or the record of GPUs with a fatal error.
    """
    owned, discarded = read_owned(system)
    recorded = () if isinstance(owned, Unseen) else tuple(owned)
    # Include machines that are no longer configured but still have the agent's settings.
    names = sorted({*config.machines, *(name for path in recorded if (name := machine_of(path)) is not None)})
    detached = observe_detached(system)
    services = [service for vendor in HOST_VENDORS for service in vendor.services]
    parent_mount = mount_unit(HOST_NVIDIA)
    units = observe_units([*map(machine_unit, names), *services, parent_mount], system)
    machine_units = {name: with_properties(name, units[machine_unit(name)], system) for name in names}
    nodes = [name for name, settings in config.machines.items() if settings.node]
    services_units = {service: units[service] for service in services}
    sources = _sources(config, system, devices, memory, services_units, detached.gpus)
    template = observe_template(system)
    template_problem = "" if isinstance(template, tuple) else template.why
    staged = observe_staged(system)
    remembered, damage = observe_remembered(system)
    vendors = tuple(vendor.observe(sources) for vendor in HOST_VENDORS)
    ignored = (each for name in names for each in ignored_settings(name, system))
    roots, time_records = with_times(staged.roots, vendors, system)
    problems = (template_problem, discarded, *memory.loader_cache.skipped(), detached.problem, damage, *ignored)
    return Facts(
        architecture=sources.architecture,
        systemd_version=observe_version(system),
        template_device_allow=template,
        vendors=vendors,
        machines=tuple(
            _machine(name, unit, system, memory.ages, is_node=name in nodes) for name, unit in machine_units.items()
        ),
        staged=roots,
        next_driver_root_index=staged.next_index,
        corrupt_roots=staged.corrupt,
        plain_roots=staged.plain,
        mounting_failed=units[parent_mount].state == "failed",
        stale_staging=staged.leftovers,
        staged_unseen=staged.unseen,
        time_records=time_records,
        staged_problems=staged.problems,
        remembered=remembered,
        draining=detached.draining,
        gpus=GpuFacts(observe_faults(system), detached.tainted, observe_placements(config, vendors, system)),
        mount_sources=observe_sources(config, system),
        nspawn_sources=observe_nspawn_sources(config, system),
        problems=tuple(filter(None, problems)),
        state_free=read_seen(system.free_bytes, STATE),
        stub_resolver=uses_stub_resolver(system),
        # If this cannot be observed, assume a pending reload: at worst, systemd reloads its units once too often.
        reload_pending=read_seen(system.exists, RELOAD_PENDING) is not False,
        files=observe_files(names, owned, system),
    )


def _sources(
    config: Config,
    system: System,
    devices: DeviceSource,
    memory: Memory,
    units: Mapping[str, Unit],
    detached: frozenset[str],
) -> Sources:
    """Return the sources of the vendors' facts. Raises ObservationError if the record of lost GPUs cannot be read."""
    return Sources(
        system=system,
        architecture=system.architecture(),
        pci=devices.pci_devices(),
        drm=devices.drm_devices(),
        loader_cache=lambda root: _entries(memory.loader_cache.read(system, root)),
        driver=config.driver,
        machines=config.machines,
        units={name: unit.state for name, unit in units.items()},
        started=lambda name: observe_start(units[name], system),
        lost=observe_lost(system),
        detached=detached,
        file_cache=memory.file_cache,
    )


def _machine(name: str, unit: Unit, system: System, ages: Ages, *, is_node: bool = False) -> MachineFacts:
    """Return the machine's facts. If an unexpected error occurs, return only the facts about its unit."""
    try:
        return observe_machine(name, unit, system, ages, is_node=is_node)
    except Exception as error:
        return unseen_machine(name, unit, fault("observe it", error))


def _entries(listing: Seen[Listing]) -> Seen[tuple[CacheEntry, ...]]:
    return listing.entries if isinstance(listing, Listing) else listing
