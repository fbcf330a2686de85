"""How machines share the host's GPUs where their settings ask for a number of them. Pure.

Those that are named in a machine's settings are nobody's to count; what a machine has it keeps; and `all` are all,
whoever else has some of them.
"""

from collections.abc import Iterable, Iterator

from agent.config import Config, MachineSettings
from agent.errors import DocumentError
from agent.facts import Facts
from agent.goal import Grant, Share
from agent.handoff import parse_handoff
from agent.paths import handoff_file


def in_turn(config: Config) -> Iterator[tuple[str, MachineSettings]]:
    """Machines in the order in which they are given GPUs: by name, those whose settings name GPUs first."""
    return iter(sorted(config.machines.items(), key=lambda each: (not isinstance(each[1].gpus, list), each[0])))


class Shares:
    """What is left for the next machine."""

    def __init__(self, config: Config, facts: Facts) -> None:
        counting = [name for name, settings in config.machines.items() if _counts(settings)]
        self._has = {name: _handed(facts, name) for name in counting}
        self._given: set[str] = set()

    def of(self, machine: str) -> Share:
        """For a machine whose turn it is."""
        of_others = {gpu for name, gpus in self._has.items() if name != machine for gpu in gpus}
        return Share(taken=frozenset(self._given | of_others), has=self._has.get(machine, frozenset()))

    def give(self, machine: str, settings: MachineSettings, grants: Iterable[Grant]) -> None:
        """Note what it was given, which says more than what it has had."""
        self._has.pop(machine, None)
        if settings.gpus != "all":
            self._given |= {gpu for grant in grants for gpu in grant.gpus}


def _counts(settings: MachineSettings) -> bool:
    return isinstance(settings.gpus, str) and settings.gpus != "all"


def _handed(facts: Facts, machine: str) -> frozenset[str]:
    """GPUs of the machine's present handoff."""
    state = facts.files.get(handoff_file(machine))
    if state is None or not isinstance(state.content, bytes):
        return frozenset()
    try:
        return frozenset(gpu for request in parse_handoff(state.content).requests for gpu in request.gpus)
    except DocumentError:
        return frozenset()
