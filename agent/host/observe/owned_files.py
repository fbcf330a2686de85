"""Observes the files that a goal may contain, and the ownership record."""

from collections.abc import Iterable, Mapping

from agent.host.state.owned_files import MARK, OWNED_FILES, is_ours
from agent.model.facts import Absent, Broken, FileState, Seen, Unseen
from agent.model.paths import OWNED, REMEMBERED_GPUS, device_allow_drop_in, machine_files
from agent.system.damage import discard
from agent.system.files import System
from agent.system.seen import read_seen


def read_owned(system: System) -> tuple[dict[str, str] | Unseen, str]:
    """Return the ownership record (digests by path), and a problem with it; the problem is empty if there is none.

    A damaged record is discarded and counts as empty. The record is Unseen if it cannot be read now.
    """
    found = OWNED_FILES.read_seen(OWNED, system)
    if isinstance(found, Absent):
        return {}, ""
    if isinstance(found, Unseen):
        return found, found.why
    if isinstance(found, Broken):
        # `discard` also logs the damage. That is needed because this pass replaces the damaged file, and then observes
        # again: the facts at the end of the pass no longer show the damage.
        discard(OWNED, found.why, system)
        return {}, found.why
    return found.files, ""


def observe_files(machines: Iterable[str], owned: Mapping[str, str] | Unseen, system: System) -> dict[str, FileState]:
    """Return the states of these files: the machines' files, both copies of the GPU record, and all recorded files."""
    of_machines = (path for name in machines for path in (*machine_files(name), device_allow_drop_in(name)))
    wanted = {*REMEMBERED_GPUS, *of_machines}
    if isinstance(owned, Unseen):
        contents = {path: _content(path, system) for path in sorted(wanted)}
        # Without the record, only the first line of a file shows whether the agent wrote it.
        return {
            path: FileState(each, isinstance(each, bytes) and each.startswith(MARK)) for path, each in contents.items()
        }
    return {path: _state(path, owned.get(path), system) for path in sorted(wanted | set(owned))}


def _state(path: str, digest: str | None, system: System) -> FileState:
    """Return the state of a file. `digest` is the recorded one; None if the ownership record does not name the file."""
    content = _content(path, system)
    owned = digest is not None and (not isinstance(content, bytes) or is_ours(content, digest))
    return FileState(content, owned)


def _content(path: str, system: System) -> Seen[bytes]:
    # Directories are not trusted: root in a machine can remount the machine's handoff directory writable, and put
    # anything in a file's place.
    found = read_seen(system.read_untrusted, path)
    return found[0] if isinstance(found, tuple) else found
