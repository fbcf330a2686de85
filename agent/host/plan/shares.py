"""Divides the host's GPUs among machines whose settings request a number of them (`count=N`). Pure.

GPUs that settings name are not available to `count=N`, nor are those of a machine that keeps its settings although it
is no longer configured. A machine keeps the GPUs that it has. `all` means all GPUs, even those that other machines
have. If the agent meets an unexpected error (a fault) in its work on a machine, that machine keeps its GPUs, and no
other machine gets one of them, except GPUs that may be shared (see _blocked_by_fault).
"""

from collections.abc import Collection, Iterable, Iterator

from agent.config.settings import Config, MachineSettings
from agent.model.driver_root import StagedRoot
from agent.model.facts import Absent, Driver, Facts, MachineFacts, Unseen
from agent.model.goal import Grant, Share
from agent.model.granted import Granted
from agent.model.live import LiveSettings
from agent.model.reasons import Reason


def in_turn(config: Config) -> Iterator[tuple[str, MachineSettings]]:
    """Return machines in the order in which they get GPUs: first those whose settings name GPUs, then the others.

    Within these two groups, machines are in the order of their names.
    """
    return iter(sorted(config.machines.items(), key=lambda each: (not isinstance(each[1].gpus, list), each[0])))


class Shares:
    """Keeps track of the GPUs that are left for the next machine."""

    def __init__(
        self, config: Config, facts: Facts, faulted: Collection[str] = (), former: Collection[str] = ()
    ) -> None:
        """Begin with all GPUs. `former` are the machines that keep their settings although they are not configured."""
        lists = [each.gpus for each in config.machines.values() if isinstance(each.gpus, list)]
        self._assigned = _with_addresses({gpu for each in lists for gpu in each}, facts)
        """GPUs that settings name, even for machines that do not exist yet, and GPUs that were assigned so far."""
        self._draining = facts.draining
        machines = {each.name: each for each in facts.machines if each.name in config.machines}
        granted = {name: each.granted for name, each in machines.items()}
        self._may_open = {name: _may_open(each) for name, each in machines.items()}
        self._blocked_by_fault: dict[str, str] = {}
        for machine in (each for name, each in sorted(machines.items()) if name in faulted):
            self._blocked_by_fault |= _blocked_by_fault(machine, config.machines[machine.name].gpus, facts)
        self._counts = {name for name, each in config.machines.items() if _counts(each)}
        self._held_by_former = {
            gpu: f"still held by machine {each.name}, which is no longer in the configuration{_until(each)}"
            for each in facts.machines
            if each.name in former
            for gpu in each.kept_gpus
        }
        """GPUs that the machines in `former` keep, each with the reason why machines with `count=N` do not get it."""
        self._granted_before = {
            name: frozenset(each.gpus) for name, each in granted.items() if isinstance(each, Granted)
        }
        # The GPUs that machines have, and that `count=N` must not give to others until these machines get new grants.
        # Machines whose settings name GPUs count too, although `_assigned` should have their GPUs already: if the
        # settings name a GPU by its UUID, its address is unknown until the driver has initialised the GPU.
        self._not_yet_replaced = {
            name: gpus for name, gpus in self._granted_before.items() if config.machines[name].gpus != "all"
        }

    def share(self, machine: str) -> Share:
        """Return the share of a machine, which must be the next one in turn."""
        others = {gpu for name, gpus in self._not_yet_replaced.items() if name != machine for gpu in gpus}
        current = self._granted_before.get(machine, frozenset())
        # A fault or a former machine must not cost this one a GPU that it already has.
        blocked = {**(self._held_by_former if machine in self._counts else {}), **self._blocked_by_fault}
        reserved = {gpu: why for gpu, why in blocked.items() if gpu not in self._may_open.get(machine, ())}
        return Share(
            taken=frozenset(self._assigned | others),
            current=current,
            draining=current & self._draining,
            reserved=reserved,
        )

    def record_grants(self, machine: str, settings: MachineSettings, grants: Iterable[Grant]) -> None:
        """Record the grants of a machine, which replace what it had before."""
        self._not_yet_replaced.pop(machine, None)
        if settings.gpus != "all":
            self._assigned |= {gpu for grant in grants for gpu in (*grant.gpus, *grant.detached)}


def _until(former: MachineFacts) -> str:
    """Return how long a machine keeps its GPUs although it does not run; empty if it may run."""
    boots = f" but starts when the host boots; `{former.kept_from_boot_by}` releases the GPU"
    return boots if former.stays_ended and former.kept_from_boot_by else ""


def _counts(settings: MachineSettings) -> bool:
    """Return whether the settings request a number of GPUs."""
    return isinstance(settings.gpus, str) and settings.gpus != "all"


def _with_addresses(names: Collection[str], facts: Facts) -> set[str]:
    """Return the names of GPUs (addresses or UUIDs), and for each known UUID also the GPU's address."""
    present = (gpu for vendor in facts.vendors for gpu in vendor.gpus)
    return {*names, *(gpu.pci_address for gpu in present if gpu.uuid in names)}


def _may_open(machine: MachineFacts) -> set[str]:
    """Return the GPUs that the machine was granted or may still open, as far as they are known.

    The paths of nodes that GPUs share may be among them. That does no harm, because no GPU's address equals a path.
    """
    granted = machine.granted.gpus if isinstance(machine.granted, Granted) else ()
    return {*granted, *(machine.live.owners.values() if isinstance(machine.live, LiveSettings) else ())}


def _blocked_by_fault(machine: MachineFacts, wanted: str | list[str], facts: Facts) -> dict[str, str]:
    """Return the GPUs that other machines must not get because a machine with a fault may have them, with the reason.

    `wanted` is the setting `gpus` of the machine with the fault. GPUs that it names are left out, because other
    machines may name them too. If it is `all`, the result is empty, because that machine shares every GPU. If the
    machine's grant is unknown, the machine may have any GPU.
    """
    if wanted == "all":
        return {}
    why = f"still held by machine {machine.name}, for which the agent had an unexpected error ({Reason.INTERNAL_ERROR})"
    may_open = _may_open(machine)
    if not isinstance(machine.granted, Granted | Absent):
        why = f"perhaps {why}"
        may_open |= {gpu.pci_address for vendor in facts.vendors for gpu in vendor.gpus}
    shared = _with_addresses(wanted, facts) if isinstance(wanted, list) else set[str]()
    return dict.fromkeys(may_open - shared, why)


def unknown_grants(config: Config, facts: Facts, faulted: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the machines whose share or driver root cannot be determined, each with the reasons.

    A machine with `count=N` could get another machine's GPU, so its share depends on the grants of all machines, except
    those with `all`. The share of a machine without `count=N` depends only on its own grant, and only in two cases: any
    machine has a fault, or a GPU has no driver and is not expected to get one. A machine's driver root depends on its
    own grant, unless exactly one root fits the loaded module.
    """
    # If a GPU has no driver and is not expected to get one, `all` and `count=N` select it only for a machine that
    # already has it.
    without_driver = any(
        not gpu.driver for vendor in facts.vendors if not vendor.driver_expected for gpu in vendor.gpus
    )
    several_roots = any(vendor.driver and _may_choose_root(vendor.driver, facts.staged) for vendor in facts.vendors)
    unseen = {
        each.name: each.granted.why
        for each in facts.machines
        if each.name in config.machines and isinstance(each.granted, Unseen)
    }
    unknown = {}
    for name, settings in config.machines.items():
        counts = _counts(settings)
        own = {name} if counts or without_driver or faulted or several_roots else set[str]()
        others = {other for other in unseen if counts and config.machines[other].gpus != "all"}
        if why := [unseen[each] for each in sorted((own | others) & unseen.keys())]:
            unknown[name] = why
    return unknown


def _may_choose_root(driver: Driver, staged: Collection[StagedRoot]) -> bool:
    """Return whether a machine may have any of several driver roots, or one that does not fit the loaded module."""
    return bool(staged) and sum(root.version == driver.module_version for root in staged) != 1
