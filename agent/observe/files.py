"""The files that the goal may want, and the ownership record."""

from collections.abc import Iterable, Mapping

from agent.errors import DocumentError
from agent.facts import Absent, Broken, FileState, Seen, Unseen
from agent.ownership import is_ours, parse_owned
from agent.paths import OWNED, machine_files, set_device_allow
from agent.system.files import System
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
    wanted = {path for name in machines for path in (*machine_files(name), set_device_allow(name))}
    return {path: _state(path, owned.get(path), system) for path in sorted(wanted | set(owned))}


def _state(path: str, digest: str | None, system: System) -> FileState:
    content = _content(path, system)
    owned = digest is not None and (not isinstance(content, bytes) or is_ours(content, digest))
    return FileState(content, owned)


def _content(path: str, system: System) -> Seen[bytes]:
    # No link is followed: root in a machine can remount its handoff directory writable.
    found = look(system.read_untrusted, path)
    return found[0] if isinstance(found, tuple) else found
