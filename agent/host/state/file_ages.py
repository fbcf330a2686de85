"""Keeps in /run how old files are, so that the next process knows these ages even if the wall clock was set."""

from contextlib import suppress

from agent.host.state.record import Record
from agent.model.paths import AGES
from agent.system.ages import Ages, Observation
from agent.system.files import System

_RECORD = Record(dict[str, Observation])


def read_ages(system: System) -> Ages:
    """Return the ages as the last pass knew them. Without a record, each file's first age depends on the wall clock."""
    return Ages(_RECORD.read(AGES, system))


def write_ages(system: System, ages: Ages) -> None:
    """Write the ages if a file has changed. Ignores failures: the record only matters once the clock is set."""
    now, before = ages.observations, _RECORD.read_seen(AGES, system)
    known = {path: each.changed for path, each in before.items()} if isinstance(before, dict) else None
    if known != {path: each.changed for path, each in now.items()}:
        with suppress(OSError):
            _RECORD.write(AGES, now, system)
