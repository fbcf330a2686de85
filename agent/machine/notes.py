"""Keeps the machine half's records between its runs.

There are two kinds of records. Notes (`Notes`) are in MACHINE_STATE, below /run, so each boot of the machine clears
them; most notes only spare a later run some work. The ownership record (`Owned`) is on disk, because the files that the
agent writes into /etc outlive a boot.
"""

import contextlib
import json
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from agent.model.digest import json_digest
from agent.model.errors import ApplyError
from agent.model.paths import DRA_STATUS_NAME, MACHINE_STATE, NODE_NAME, OWNED
from agent.system.ages import Ages, Observation
from agent.system.errnos import UNUSABLE
from agent.system.files import NEW, System
from agent.system.journal import WARNING, say

VERSION = 1
"""Version of all notes, and of the ownership record."""
NODE_CONDITION = "node-condition"
"""Name of the only note that another service writes (unbounded-agent-node-condition.service)."""
TEMPORARY_OF_OTHERS = (f".{NODE_CONDITION}.", f".{NODE_NAME}", f".{DRA_STATUS_NAME}")
"""Prefixes of temporary files that other services write next to the notes: the service that sets the Node's condition,
and agent.dra."""
OWNED_COPY = f"{OWNED}.copy"
AGES = "ages"
"""Name of the note about when some files last changed: files whose times are compared with each other, and files that
must be recent."""


class Notes:
    """Reads and writes notes: JSON objects by name. If there is no note of a name, `load` returns an empty object.

    Each note has a version, and a digest of its content. A note without the right ones, or one that is no regular file,
    is removed and counts as missing. So readers get only what a release of the agent with the same notes wrote. If a
    note cannot be read now, but may be intact, OSError is raised.
    """

    def __init__(self, system: System) -> None:
        self._system = system

    def load(self, name: str) -> dict[str, Any]:
        path = f"{MACHINE_STATE}/{name}.json"
        try:
            content = self._system.read(path)
        except FileNotFoundError:
            return {}
        except OSError as error:
            if error.errno not in UNUSABLE:
                raise
            content = b""
        value = _parse(content)
        match value:
            case {"version": version, "digest": str(digest), "note": dict(note)} if (
                version == VERSION and digest == json_digest(note)
            ):
                return note
            case _:
                pass
        say(WARNING, f"removed {path}, which was damaged or of another release; what it recorded is lost")
        self._system.remove_tree(path)
        return {}

    def save(self, name: str, value: dict[str, Any]) -> None:
        if self.load(name) != value:
            document = {"version": VERSION, "digest": json_digest(value), "note": value}
            self._system.write(f"{MACHINE_STATE}/{name}.json", json.dumps(document).encode(), 0o600)


def ages_in(note: Mapping[str, Any]) -> Ages:
    """Return the ages that a note keeps in the form of `Ages.observations`."""
    return Ages({path: Observation(*each) for path, each in note.items()})


@contextlib.contextmanager
def noted_ages(notes: Notes) -> Iterator[Ages]:
    """Yield the ages as the last run knew them, and keep them for the next run.

    If the note cannot be read or written, that is ignored: the note only matters if somebody sets the wall clock.
    """
    ages = Ages()
    with contextlib.suppress(OSError):
        ages = ages_in(notes.load(AGES))
    yield ages
    with contextlib.suppress(OSError):
        notes.save(AGES, ages.observations)


def remove_remains(system: System) -> None:
    """Remove temporary files that killed writers left next to notes. Raises OSError."""
    for name in system.entries(MACHINE_STATE) if system.is_directory(MACHINE_STATE) else ():
        # Other services' temporary files stay, because those services may be writing them now.
        if name.endswith(NEW) and not name.startswith(TEMPORARY_OF_OTHERS):
            system.remove(f"{MACHINE_STATE}/{name}")


class Owned:
    """The record of the agent's own files outside /run. In other programs' files, the agent changes only its own keys.

    There are two copies, because without the record, the agent would never change its own files again. If both are
    missing, the record is empty. If at least one exists, but none can be read, the methods raise ApplyError.

    Each copy has a digest of its paths, because a damaged copy may still be valid JSON.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        copies = [_load_owned(system, path) for path in (OWNED, OWNED_COPY)]
        readable = [each for each in copies if isinstance(each, frozenset)]
        faults = [each for each in copies if isinstance(each, str)]
        self._fault = "; ".join(faults) if not readable else ""
        self._paths = set(readable[0] if readable else ())
        if readable and copies != [readable[0]] * 2:
            # Repair the other copy. An error, such as that of a full or read-only disk, does not matter: the good copy
            # can still be read.
            with contextlib.suppress(OSError):
                for path, copy in zip((OWNED, OWNED_COPY), copies, strict=True):
                    if isinstance(copy, str):
                        # The damaged copy may be a directory, which a rename cannot replace.
                        system.remove_tree(path)
                self._save(self._paths)

    @property
    def paths(self) -> tuple[str, ...]:
        """All recorded paths, sorted, whether they exist or not."""
        return tuple(sorted(self._recorded()))

    def make_way(self, path: str) -> bool:
        """Return whether the agent may write this file: True if it is recorded as the agent's, or nothing is there.

        If something other than a regular file is at a recorded path, it is removed, even if it is a link to a regular
        file. A directory is moved aside instead, because its content may matter.
        """
        if path not in self._recorded():
            return not self._system.exists(path)
        mode = self._system.owner(path)[0] if self._system.exists(path) else stat.S_IFREG
        if not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode):
                aside = self._system.put_aside(path)
                say(WARNING, f"{path} is damaged: a directory was in its place; moved it to {aside}")
            else:
                say(WARNING, f"{path} is damaged: it was not a file; removed it")
                self._system.remove(path)
        return True

    def has(self, path: str) -> bool:
        return path in self._recorded()

    def claim(self, path: str) -> None:
        """Record a path as the agent's. Call this before the first write: a crash must not leave an unrecorded file."""
        if path not in self._recorded():
            self._save(self._paths | {path})

    def remove(self, path: str) -> bool:
        """If the path is recorded as the agent's, remove the file and the record of the path.

        Return whether a file was removed.
        """
        if path not in self._recorded():
            return False
        removed = self._system.exists(path)
        self.make_way(path)
        self._system.remove(path)
        self._save(self._paths - {path})
        return removed

    def _recorded(self) -> set[str]:
        """Return the recorded paths. Raises ApplyError if neither copy can be read."""
        if self._fault:
            raise ApplyError(
                f"cannot tell which files in this machine the agent wrote: {self._fault}",
                "if both copies of the record stay unreadable, remove them; at the next run, CDISpecCurrent and "
                "RuntimeConfigured name files (the specification in /etc/cdi, containerd's drop-in): remove those too, "
                "and the run after that writes them again",
            )
        return self._paths

    def _save(self, paths: set[str]) -> None:
        document = {"version": VERSION, "paths": sorted(paths), "digest": json_digest(sorted(paths))}
        content = json.dumps(document).encode() + b"\n"
        self._system.write(OWNED, content)
        self._system.write(OWNED_COPY, content)
        # Set only after both writes. Otherwise, if they failed in `claim`, a second `claim` would find the path in
        # `_paths` and succeed, although the path is not recorded on disk.
        self._paths = paths


def _load_owned(system: System, path: str) -> frozenset[str] | str | None:
    """Return one copy of the record. Return a sentence if the copy is unusable; None if it is missing."""
    try:
        value = _parse(system.read(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    match value:
        case {"version": version, "paths": [*paths], "digest": digest} if digest == json_digest(paths):
            return frozenset(paths) if version == VERSION else f"{path} has version {version!r:.20}, which is unknown"
    return f"{path} is damaged"


def _parse(content: bytes) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
