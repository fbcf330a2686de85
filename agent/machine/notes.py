"""Keeps the machine half's records between its runs.

There are two kinds of records. Notes (`Notes`) are in MACHINE_STATE, below /run, so each boot of the machine clears
them; most notes only spare a later run some work. The ownership record (`Owned`) is on disk, because the files that the
agent writes into /etc outlive a boot.
"""

import contextlib
import json
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

from agent.model.digest import json_digest
from agent.model.errors import ApplyError
from agent.model.paths import DRA_STATUS_NAME, MACHINE_STATE, NODE_NAME, OWNED
from agent.system.ages import Ages, Observation
from agent.system.errnos import UNUSABLE
from agent.system.files import NEW, System
from agent.system.journal import WARNING, say

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

    Each note has a digest of its content. A note without the right digest, or one that is no regular file, is removed
    and counts as missing. So readers get only what some release of the agent wrote. If a note cannot be read now, but
    may be intact, OSError is raised.
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
            case {"digest": str(digest), "note": dict(note)} if digest == json_digest(note):
                return note
            case _:
                pass
        say(WARNING, f"removed {path}, which was damaged; what it recorded is lost")
        self._system.remove_tree(path)
        return {}

    def save(self, name: str, value: dict[str, Any]) -> None:
        if self.load(name) != value:
            document = {"digest": json_digest(value), "note": value}
            self._system.write(f"{MACHINE_STATE}/{name}.json", json.dumps(document).encode(), 0o600)


def ages_in(note: object) -> Ages:
    """Return the ages that a note keeps in the form of `Ages.observations`. Ignores entries of another form."""
    observations = {}
    for path, each in note.items() if isinstance(note, dict) else ():
        match each:
            case [float(), float(), float()]:
                observations[path] = Observation(*each)
            # Another release may have noted something else since the boot of the machine.
            case _:
                pass
    return Ages(observations)


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

    Each copy has a digest of its paths, because a damaged copy may still be valid JSON. A copy without a digest is an
    earlier release's. It counts only if the other copy has no digest either, or is unusable.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        copies = [_load_owned(system, path) for path in (OWNED, OWNED_COPY)]
        readable = sorted((each for each in copies if isinstance(each, _Copy)), key=lambda each: not each.proven)
        faults = [each for each in copies if isinstance(each, str)]
        self._fault = "; ".join(faults) if not readable else ""
        self._paths = set(readable[0].paths if readable else ())
        if readable and copies != [_Copy(readable[0].paths, proven=True)] * 2:
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
        content = json.dumps({"paths": sorted(paths), "digest": json_digest(sorted(paths))}).encode() + b"\n"
        self._system.write(OWNED, content)
        self._system.write(OWNED_COPY, content)
        # Set only after both writes. Otherwise, if they failed in `claim`, a second `claim` would find the path in
        # `_paths` and succeed, although the path is not recorded on disk.
        self._paths = paths


class _Copy(NamedTuple):
    """The content of one copy of the record."""

    paths: frozenset[str]
    proven: bool
    """Whether the copy has a digest of its paths."""


def _load_owned(system: System, path: str) -> _Copy | str | None:
    """Return one copy of the record. Return a sentence if the copy is unusable; None if it is missing."""
    try:
        value = _parse(system.read(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    if isinstance(value, dict) and isinstance(paths := value.get("paths"), list):
        proven = value.get("digest") == json_digest(sorted(map(str, paths)))
        if all(isinstance(each, str) for each in paths) and (proven or "digest" not in value):
            return _Copy(frozenset(paths), proven)
    return f"{path} is damaged"


def _parse(content: bytes) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
