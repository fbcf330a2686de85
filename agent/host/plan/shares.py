"""How machines share the host's GPUs if settings ask for a number of them (`count=N`). Pure.

GPUs that settings name are not available to `count=N`. A machine keeps what it has. `all` means all GPUs, even those
that other machines have. A machine with a fault is left as it is: no other machine gets what it has, unless the
settings of both ask for it.
"""

from collections.abc import Collection, Iterable, Iterator

from agent.config.settings import Config, MachineSettings
from agent.model.facts import Absent, Facts, MachineFacts, Unseen
from agent.model.goal import Grant, Share
from agent.model.granted import Granted
from agent.model.live import LiveSettings


def in_turn(config: Config) -> Iterator[tuple[str, MachineSettings]]:
    """Return machines in the order in which they get GPUs: by name, those whose settings name GPUs first."""
    return iter(sorted(config.machines.items(), key=lambda each: (not isinstance(each[1].gpus, list), each[0])))


class Shares:
    """Tracks which GPUs are left for the next machine."""

    def __init__(self, config: Config, facts: Facts, faulted: Collection[str] = ()) -> None:
        lists = [each.gpus for each in config.machines.values() if isinstance(each.gpus, list)]
        self._given = _named(facts, {gpu for each in lists for gpu in each})
        """GPUs that settings name, including those of machines that do not exist yet, and GPUs given so far."""
        self._draining = facts.draining
        machines = {each.name: each for each in facts.machines if each.name in config.machines}
        granted = {name: each.granted for name, each in machines.items()}
        self._holds = {name: _holds(each) for name, each in machines.items()}
        self._kept: dict[str, str] = {}
        for machine in (each for name, each in sorted(machines.items()) if name in faulted):
            self._kept |= _kept(machine, config.machines[machine.name].gpus, facts)
        self._had = {name: frozenset(each.gpus) for name, each in granted.items() if isinstance(each, Granted)}
        # Includes machines that name GPUs by UUID, which is unknown until the driver has initialised the GPU.
        self._has = {name: gpus for name, gpus in self._had.items() if config.machines[name].gpus != "all"}

    def of(self, machine: str) -> Share:
        """Return the share of the machine whose turn it is."""
        of_others = {gpu for name, gpus in self._has.items() if name != machine for gpu in gpus}
        has = self._had.get(machine, frozenset())
        # A fault in another machine takes no GPU from this one.
        kept = {gpu: why for gpu, why in self._kept.items() if gpu not in self._holds.get(machine, ())}
        return Share(taken=frozenset(self._given | of_others), has=has, draining=has & self._draining, kept=kept)

    def give(self, machine: str, settings: MachineSettings, grants: Iterable[Grant]) -> None:
        """Record what the machine was given, which replaces what it had before."""
        self._has.pop(machine, None)
        if settings.gpus != "all":
            self._given |= {gpu for grant in grants for gpu in (*grant.gpus, *grant.detached)}


def _named(facts: Facts, names: Collection[str]) -> set[str]:
    """Return the names (addresses or UUIDs), and the addresses of the GPUs with those UUIDs."""
    present = (gpu for vendor in facts.vendors for gpu in vendor.gpus)
    return {*names, *(gpu.pci_address for gpu in present if gpu.uuid in names)}


def _holds(machine: MachineFacts) -> set[str]:
    """Return what it was granted, and what it may still open. Facts of a machine with a fault may be nonsense."""
    granted = machine.granted.gpus if isinstance(machine.granted, Granted) else ()
    return {*granted, *(machine.live.owners.values() if isinstance(machine.live, LiveSettings) else ())}


def _kept(machine: MachineFacts, wanted: str | list[str], facts: Facts) -> dict[str, str]:
    """Return what a machine with a fault may have and its settings do not share; any GPU if that is unknown."""
    if wanted == "all":
        return {}
    holds, still = _holds(machine), f"still machine {machine.name}'s, in which something went wrong"
    if not isinstance(machine.granted, Granted | Absent):
        still = f"perhaps {still}"
        holds |= {gpu.pci_address for vendor in facts.vendors for gpu in vendor.gpus}
    shared = _named(facts, wanted) if isinstance(wanted, list) else set[str]()
    return dict.fromkeys(holds - shared, still)


def unknown_grants(config: Config, facts: Facts, faulted: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the machines whose share cannot be worked out, each with the reasons.

    A machine with `count=N` could get another's GPU, so it needs the grants of all machines, except those with `all`.
    Others need only their own, and only if their share depends on it, as it does while another machine has a fault.
    """
    # A machine gets such a GPU only if it already has it.
    unawaited = any(not gpu.driver for vendor in facts.vendors if not vendor.driver_awaited for gpu in vendor.gpus)
    unseen = {
        each.name: each.granted.why
        for each in facts.machines
        if each.name in config.machines and isinstance(each.granted, Unseen)
    }
    unknown = {}
    for name, settings in config.machines.items():
        counts = isinstance(settings.gpus, str) and settings.gpus != "all"
        own = {name} if counts or unawaited or faulted else set[str]()
        others = {other for other in unseen if counts and config.machines[other].gpus != "all"}
        if why := [unseen[each] for each in sorted((own | others) & unseen.keys())]:
            unknown[name] = why
    return unknown
