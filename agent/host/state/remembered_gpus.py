"""Reads the record of the GPUs that machines were last granted, from the first intact copy of two."""

from agent.model.errors import DocumentError
from agent.model.facts import Broken, Seen, Unseen
from agent.model.paths import REMEMBERED_GPUS
from agent.model.remembered import Remembered, parse_remembered
from agent.system.damage import count
from agent.system.files import System
from agent.system.seen import read_seen


def observe_remembered(system: System) -> tuple[Seen[Remembered], str]:
    """Return the record, and what is wrong with its copies (empty if nothing is).

    Without an intact copy, the record is Unseen if a copy could not be read, Broken if one is damaged, and empty if
    both are missing.
    """
    copies = [_copy(path, system) for path in REMEMBERED_GPUS]
    problems = "; ".join(each.why for each in copies if isinstance(each, Broken | Unseen))
    # The first copy is also written first: after a crash between the two writes, the first copy is the newer one.
    whole = next((each for each in copies if isinstance(each, Remembered)), None)
    if whole:
        return whole, f"{problems}; the other copy of this record is used" if problems else ""
    if any(isinstance(each, Unseen) for each in copies):
        return Unseen(problems), problems
    if problems:
        return Broken(problems), problems
    return Remembered(), ""


def _copy(path: str, system: System) -> Seen[Remembered]:
    data = read_seen(system.read, path)
    try:
        found = parse_remembered(path, data) if isinstance(data, bytes) else data
    except DocumentError as error:
        found = Broken(str(error))
    if isinstance(found, Broken):
        count(path, system)
    return found
