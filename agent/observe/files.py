"""The files that the goal may want, and the ownership record."""

from collections.abc import Iterable, Mapping

from agent.errors import DocumentError
from agent.facts import Absent, Broken, FileState, Unseen
from agent.ownership import parse_owned
from agent.paths import HANDOFF_NAME, OWNED, handoff_directory, nspawn_file, unit_drop_in
from agent.system import System
from agent.system.looking import look


def read_owned(system: System) -> tuple[dict[str, str], str]:
    """Digests by path, and a problem or an empty string: a record that cannot be used is discarded, never fatal."""
    data = look(system.read, OWNED)
    if isinstance(data, Absent):
        return {}, ""
    if isinstance(data, Broken | Unseen):
        return {}, f"{data.why}; the ownership record is discarded"
    try:
        return parse_owned(data), ""
    except DocumentError as error:
        return {}, str(error)


def observe_files(machines: Iterable[str], owned: Mapping[str, str], system: System) -> dict[str, FileState]:
    """Every file of the configured machines' goals and every file in the record."""
    wanted = {
        path
        for name in machines
        for path in (nspawn_file(name), unit_drop_in(name), f"{handoff_directory(name)}/{HANDOFF_NAME}")
    }
    return {path: FileState(look(system.read, path), path in owned) for path in sorted(wanted | set(owned))}
