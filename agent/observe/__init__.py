"""Look at the host: everything afresh in each pass, but for loaders' caches while their files are the same."""

from collections.abc import Callable
from typing import TypeVar

from agent.config import Config
from agent.facts import CacheEntry, Facts, Seen
from agent.observe.detached import observe_detached
from agent.observe.files import observe_files, read_owned
from agent.observe.loader_cache import Listing, LoaderCache
from agent.observe.lost_gpus import observe_lost
from agent.observe.machine import observe_machine
from agent.observe.mounts import observe_sources
from agent.observe.staged import observe_staged
from agent.observe.udev import DeviceSource
from agent.observe.units import observe_template, observe_units, observe_version, with_properties
from agent.paths import RELOAD_OWED, machine_of, machine_unit
from agent.system.deadlines import begin_asking_device
from agent.system.files import System
from agent.system.looking import why_not
from agent.vendors.host import HOST_VENDORS
from agent.vendors.protocols import Sources

D = TypeVar("D")


def observe(config: Config, system: System, devices: DeviceSource, loader_cache: LoaderCache) -> Facts:
    """One pass. Raises ObservationError where nothing can be planned without the answer; else facts say Unseen."""
    owned, discarded = read_owned(system)
    # With those that are not configured any more, whose settings are still there.
    names = sorted({*config.machines, *(name for path in owned if (name := machine_of(path)) is not None)})
    detached = observe_detached(system)
    # While PID 1 answers, which takes as long.
    wait_for_pci = _begin_list("the PCI devices in sysfs", devices.pci_devices)
    wait_for_drm = _begin_list("the DRM devices in sysfs", devices.drm_devices)
    services = [service for vendor in HOST_VENDORS for service in vendor.services]
    units = observe_units([*map(machine_unit, names), *services], system)
    of_machines = {name: with_properties(units[machine_unit(name)], system) for name in names}
    systemd_version = observe_version(system)
    sources = Sources(
        system=system,
        architecture=system.architecture(),
        pci=wait_for_pci(),
        drm=wait_for_drm(),
        loader_cache=lambda root: _entries(loader_cache.read(system, root)),
        driver=config.driver,
        machines=config.machines,
        units={service: units[service].state for service in services},
        lost=observe_lost(system),
        detached=detached.gpus,
    )
    staged = observe_staged(system)
    vendors = tuple(vendor.observe(sources) for vendor in HOST_VENDORS)
    return Facts(
        architecture=sources.architecture,
        systemd_version=systemd_version,
        template_device_allow=observe_template(system),
        vendors=vendors,
        machines=tuple(observe_machine(name, unit, system) for name, unit in of_machines.items()),
        staged=staged.roots,
        next_driver_root_index=staged.next_index,
        spoiled_roots=staged.spoiled,
        staging_remains=staged.remains,
        staged_unseen=staged.unseen,
        staged_problems=staged.problems,
        draining=detached.draining,
        mount_sources=observe_sources(config, system),
        problems=tuple(problem for problem in (discarded, *loader_cache.skipped(), detached.problem) if problem),
        reload_owed=system.exists(RELOAD_OWED),
        files=observe_files(names, owned, system),
    )


def _entries(listing: Seen[Listing]) -> Seen[tuple[CacheEntry, ...]]:
    return listing.entries if isinstance(listing, Listing) else listing


def _begin_list(what: str, listing: Callable[[], Seen[D]]) -> Callable[[], Seen[D]]:
    """In bounded time: libudev reads `uevent`, for which some kernels wait until a driver lets go of its device.

    (Those of 2024 with "driver core: Fix uevent_show() vs driver detach race", which was reverted since.)
    """
    try:
        wait = begin_asking_device(what, listing)
    except OSError as error:
        unseen = why_not(what, error)
        return lambda: unseen

    def listed() -> Seen[D]:
        try:
            return wait()
        except OSError as error:
            return why_not(what, error)

    return listed
