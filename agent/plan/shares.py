"""How machines share the host's GPUs where their settings ask for a number of them. Pure.

Those that are named in a machine's settings are nobody's to count; what a machine has it keeps; and `all` are all,
whoever else has some of them.
"""

from collections.abc import Iterable, Iterator

from agent.config import Config, MachineSettings
from agent.facts import Facts, Unseen
from agent.goal import Grant, Share
from agent.granted import Granted


def in_turn(config: Config) -> Iterator[tuple[str, MachineSettings]]:
    """Machines in the order in which they are given GPUs: by name, those whose settings name GPUs first."""
    return iter(sorted(config.machines.items(), key=lambda each: (not isinstance(each[1].gpus, list), each[0])))


class Shares:
    """What is left for the next machine."""

    def __init__(self, config: Config, facts: Facts) -> None:
        lists = [each.gpus for each in config.machines.values() if isinstance(each.gpus, list)]
        named = {gpu for each in lists for gpu in each}
        present = [gpu for vendor in facts.vendors for gpu in vendor.gpus]
        self._given = named | {gpu.pci_address for gpu in present if gpu.uuid in named}
        """With the names themselves, as some are addresses: also of GPUs whose machine is not there yet."""
        self._draining = facts.draining
        granted = {each.name: each.granted for each in facts.machines if each.name in config.machines}
        self._had = {name: frozenset(each.gpus) for name, each in granted.items() if isinstance(each, Granted)}
        # Of one that names its GPUs by UUID, which are unknown until the driver has initialised them.
        self._has = {name: gpus for name, gpus in self._had.items() if config.machines[name].gpus != "all"}

    def of(self, machine: str) -> Share:
        """For a machine whose turn it is."""
        of_others = {gpu for name, gpus in self._has.items() if name != machine for gpu in gpus}
        has = self._had.get(machine, frozenset())
        return Share(taken=frozenset(self._given | of_others), has=has, draining=has & self._draining)

    def give(self, machine: str, settings: MachineSettings, grants: Iterable[Grant]) -> None:
        """Note what it was given, which says more than what it has had."""
        self._has.pop(machine, None)
        if settings.gpus != "all":
            self._given |= {gpu for grant in grants for gpu in (*grant.gpus, *grant.detached)}


def unknown_grants(config: Config, facts: Facts) -> str:
    """Why it cannot be told which GPUs are taken; empty when it can be, or need not be."""
    counted = any(isinstance(each.gpus, str) and each.gpus != "all" for each in config.machines.values())
    # What a machine has of these it keeps.
    unawaited = any(not gpu.driver for vendor in facts.vendors if not vendor.driver_awaited for gpu in vendor.gpus)
    if not counted and not unawaited:
        return ""
    return "; ".join(each.granted.why for each in facts.machines if isinstance(each.granted, Unseen))
