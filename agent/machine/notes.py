"""Keeps the machine half's records between its runs.

There are two kinds of records. Notes (`Notes`) are in MACHINE_STATE, below /run, so each boot of the machine clears
them; most notes only spare a later run some work. The ownership record (`Owned`) is on disk, because the files that the
agent writes into /etc outlive a boot.
"""

import contextlib
import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from agent import __version__
from agent.model.conditions import Condition, ConditionType, Reason, Status, false, unknown
from agent.model.contract import SILENT_AFTER
from agent.model.errors import AgentError
from agent.model.handoff import Handoff, Repair
from agent.model.json_document import parse_json
from agent.model.paths import (
    DRA_STATUS_NAME,
    GPU_STATES_NAME,
    HANDOFF_NAME,
    MACHINE_HANDOFF_DIRECTORY,
    MACHINE_STATE,
    OWNED,
)
from agent.model.text import json_digest, one_line
from agent.system.files import NEW, UNUSABLE, System
from agent.system.journal import WARNING, Ages, Observation, say

VERSION = 1
"""Version of all notes, and of the ownership record."""
NOTE_LIMIT = 16 << 20
"""Bytes of the largest note. That on other programs' specifications may have some MiB."""
NODE_CONDITION = "node-condition"
"""Name of the only note that another service writes (unbounded-agent-node-condition.service)."""
TEMPORARY_OF_OTHERS = (f".{NODE_CONDITION}.", f".{DRA_STATUS_NAME}")
"""Prefixes of temporary files that other services may be writing next to the notes: the service that sets the Node's
condition, and agent.dra."""
OWNED_COPY = f"{OWNED}.copy"


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
            content = self._system.read(path, NOTE_LIMIT)
        except FileNotFoundError:
            return {}
        except OSError as error:
            if error.errno not in UNUSABLE:
                raise
            content = b""
        match _parse(content):
            case {"version": 1, "digest": str(digest), "note": dict(note)} if digest == json_digest(note):
                return note
        say(WARNING, f"removed {path}, which was damaged or of another release; what it recorded is lost")
        self._system.remove_tree(path)
        return {}

    def save(self, name: str, value: dict[str, Any]) -> None:
        if self.load(name) != value:
            document = {"version": VERSION, "digest": json_digest(value), "note": value}
            path, content = f"{MACHINE_STATE}/{name}.json", json.dumps(document).encode()
            if len(content) > NOTE_LIMIT:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            self._system.write(path, content, 0o600)

    def may_have(self, name: str) -> bool:
        """Return whether a note has content; True if it cannot be read, so that a later step reports the error."""
        try:
            return bool(self.load(name))
        except OSError:
            return True


def ages_in(note: Mapping[str, Any]) -> Ages:
    """Return the ages that a note keeps in the form of `Ages.observations`."""
    return Ages({path: Observation(*each) for path, each in note.items()})


@contextlib.contextmanager
def noted_ages(notes: Notes) -> Iterator[Ages]:
    """Yield the ages as the last run knew them, and keep them for the next run."""
    ages = Ages()
    with contextlib.suppress(OSError):
        ages = ages_in(notes.load("ages"))
    yield ages
    with contextlib.suppress(OSError):
        notes.save("ages", ages.observations)


def remove_remains(system: System) -> None:
    """Remove temporary files that killed writers left next to notes. Raises OSError."""
    for name in system.entries(MACHINE_STATE) if system.is_directory(MACHINE_STATE) else ():
        if name.endswith(NEW) and not name.startswith(TEMPORARY_OF_OTHERS):
            system.remove(f"{MACHINE_STATE}/{name}")


class Owned:
    """The record of the agent's own files outside /run. In other programs' files, the agent changes only its own keys.

    There are two copies, because without the record, the agent would never change its own files again. Each has a
    digest of its paths, because a damaged copy may still be valid JSON. If both are missing, the record is empty. If at
    least one exists, but none can be read, the methods raise AgentError.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        copies = {path: _load_owned(system, path) for path in (OWNED, OWNED_COPY)}
        readable = [each for each in copies.values() if isinstance(each, set)]
        self._recorded = readable[0] if readable else set()
        self._fault = "" if readable else "; ".join(each for each in copies.values() if isinstance(each, str))
        if readable and any(each != readable[0] for each in copies.values()):
            # An error, such as that of a full or read-only disk, does not matter: the good copy can still be read.
            with contextlib.suppress(OSError):
                for path, copy in copies.items():
                    if isinstance(copy, str):
                        # The damaged copy may be a directory, which a rename cannot replace.
                        system.remove_tree(path)
                self._save(self._recorded)

    @property
    def paths(self) -> frozenset[str]:
        """All recorded paths, whether they exist or not."""
        if self._fault:
            raise AgentError(
                f"cannot tell which files in this machine the agent wrote: {self._fault}",
                "if both copies of the record stay unreadable, remove them, and then the files that CDISpecCurrent and "
                "RuntimeConfigured name at the next run; the run after that writes them again",
            )
        return frozenset(self._recorded)

    def has(self, path: str) -> bool:
        return path in self.paths

    def make_way(self, path: str) -> bool:
        """Return whether the agent may write this file: True if it is recorded as the agent's, or nothing is there.

        If something other than a regular file is at a recorded path, it is removed, even if it is a link to a regular
        file. A directory is moved aside instead, because its content may matter.
        """
        if not self.has(path):
            return not self._system.exists(path)
        mode = self._system.owner(path)[0] if self._system.exists(path) else stat.S_IFREG
        if stat.S_ISDIR(mode):
            aside = self._system.put_aside(path)
            say(WARNING, f"{path} is damaged: a directory was in its place; moved it to {aside}")
        elif not stat.S_ISREG(mode):
            say(WARNING, f"{path} is damaged: it was not a file; removed it")
            self._system.remove(path)
        return True

    def claim(self, path: str) -> None:
        """Record a path as the agent's. Call this before the first write: a crash must not leave an unrecorded file."""
        if not self.has(path):
            self._save(self._recorded | {path})

    def remove(self, path: str) -> bool:
        """If the path is recorded, remove the file and the record of it. Return whether a file was removed."""
        if not self.has(path):
            return False
        removed = self._system.exists(path)
        self.make_way(path)
        self._system.remove(path)
        self._save(self._recorded - {path})
        return removed

    def _save(self, paths: set[str]) -> None:
        document = {"version": VERSION, "paths": sorted(paths), "digest": json_digest(sorted(paths))}
        content = json.dumps(document).encode() + b"\n"
        self._system.write(OWNED, content)
        self._system.write(OWNED_COPY, content)
        # Set only after both writes. Otherwise, if they failed in `claim`, a second `claim` would find the path, and
        # succeed, although the path is not recorded on disk.
        self._recorded = paths


def _load_owned(system: System, path: str) -> set[str] | str | None:
    """Return one copy of the record. Return a sentence if the copy is unusable; None if it is missing."""
    try:
        value = _parse(system.read(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    match value:
        case {"version": version, "paths": [*paths], "digest": digest} if digest == json_digest(paths):
            return set(paths) if version == VERSION else f"{path} has version {version!r:.20}, which is unknown"
    return f"{path} is damaged"


def _parse(content: bytes) -> object:
    try:
        return parse_json(content)
    except ValueError:
        return None


class Context(NamedTuple):
    """What all steps that settle one handoff need."""

    system: System
    notes: Notes
    owned: Owned
    handoff: Handoff
    generation: str
    """The handoff's generation, a digest of its content. It is computed only once."""
    once: dict[str, Any]
    """Results that several steps use, by name."""
    unsynced: list[str]
    """Files that a crash of the kernel may still damage. They are synced only after the report has been written,
    because the report must not wait for that."""

    @classmethod
    def of(cls, system: System, handoff: Handoff) -> "Context":
        return cls(system, Notes(system), Owned(system), handoff, handoff.generation, {}, [])


ERROR_SHOWN = 200
"""The largest number of characters of an unexpected error that a condition or a remark shows."""


def in_words(error: Exception) -> str:
    if isinstance(error, AgentError | OSError):
        return str(error)
    return f"{type(error).__name__}: {one_line(str(error))[:ERROR_SHOWN]}"


def attempt(kind: ConditionType, step: Callable[[], Condition]) -> Condition:
    """Run a step and return its condition. An exception becomes a condition of type `kind` that is False."""
    try:
        return step()
    # Any exception: unexpected content of a file that a pod can write must not keep the report from being written. The
    # condition's message is also logged.
    except Exception as error:
        return false(kind, Reason.FAILED, in_words(error))


T = TypeVar("T")


class InBackground(Generic[T]):
    """A step that runs in a thread, in parallel with others. A thread suffices: steps mostly wait for programs.

    The step must not raise an exception.
    """

    def __init__(self, step: Callable[[], T]) -> None:
        results: list[T] = []
        self._results, self._thread = results, threading.Thread(target=lambda: results.append(step()))
        try:
            self._thread.start()
        except RuntimeError:
            # A pod may have used up the machine's processes and threads: run the step here and now.
            results.append(step())

    def ends_within(self, seconds: float) -> bool:
        """Return whether the step is done in so many seconds."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return bool(self._results)

    def result(self) -> T:
        """Wait until the step is done, and return its result."""
        if self._thread.ident is not None:
            self._thread.join()
        return self._results[0]


# A costly step that failed is tried again at once if something that it depends on has changed, and otherwise rarely: an
# attempt to make a CDI specification opens every GPU, several times if one has failed. A GPU whose driver has failed
# often hangs, writes to the kernel log, or leaves processes that cannot be killed. Neither should ldconfig write the
# loader cache each minute.

LONGEST = 600.0
"""The longest time in seconds between two attempts. Most recoveries need no time at all, because they change what a
failure depends on. But no event shows, for example, that somebody reset a GPU on the host: until `gpus attach`, nothing
changes here."""
EARLY = 30.0
"""Seconds by which a run may come too early for the next attempt. Otherwise it would wait for one more run."""


class Failure(NamedTuple):
    """What a failed attempt depended on. The failure holds, for a time, until any of that changes."""

    notes: Notes
    name: str
    """The name of the note about the failure."""
    state: str

    @classmethod
    def of(cls, context: Context, name: str, *inputs: object) -> "Failure":
        """Return the failure that an attempt with these inputs, which are JSON data, may have.

        It also depends on what the host publishes, and on the agent's release.
        """
        return cls(context.notes, name, json_digest([__version__, publications(context), *inputs]))

    def noted(self) -> Mapping[str, Any]:
        """Return the details of the last attempt if it failed and the next attempt has to wait; otherwise nothing."""
        noted = self.notes.load(self.name)
        if noted.get("state") != self.state or time.monotonic() >= noted["until"]:
            return {}
        details: Mapping[str, Any] = noted["details"]
        return details

    def save(self, **details: str | tuple[str, ...]) -> None:
        """Note that an attempt failed. The next run tries again; later waits are as long as the failure has lasted."""
        with contextlib.suppress(OSError):
            noted = self.notes.load(self.name)
            first = noted.get("since") if noted.get("state") == self.state else None
            since, until = next_attempt(first, time.monotonic())
            self.notes.save(self.name, {"state": self.state, "since": since, "until": until, "details": details})


def next_attempt(first: object, now: float) -> tuple[float, float]:
    """Return when the first of several failed attempts was, and when to try again, both by CLOCK_MONOTONIC.

    `first` is the noted time of the first one; any other type if the attempt that fails now is the first.
    """
    since = first if isinstance(first, float) else now
    return since, now + min(now - since, LONGEST) - EARLY


def publications(context: Context) -> list[list[int]]:
    """Return a value that changes whenever the host publishes the handoff or the GPU states.

    It publishes an unchanged handoff again after it has bound missing nodes, and after `gpus attach`, which says that a
    GPU was reset.
    """
    found: list[list[int]] = []
    for name in (HANDOFF_NAME, GPU_STATES_NAME):
        try:
            identity = context.system.identity(f"{MACHINE_HANDOFF_DIRECTORY}/{name}")
            found.append([identity.inode, identity.mtime_ns])
        except FileNotFoundError:
            found.append([])
    return found


REPAIRS = "repairs"
"""Name of the note that counts repairs: changes that somebody made in the machine, and that the agent has undone."""


def record_repair(notes: Notes, repair: Repair, problem: str) -> None:
    """Log and count a repair. `problem` says what was wrong."""
    say(WARNING, f"repaired: {problem}")
    # A count that cannot be written does not matter.
    with contextlib.suppress(OSError):
        counts = notes.load(REPAIRS)
        notes.save(REPAIRS, {**counts, repair: counts.get(repair, 0) + 1})


def repair_counts(notes: Notes) -> dict[str, int]:
    """Return the counts since the machine's boot; all 0 if they cannot be read, because the report must be written."""
    counts: dict[str, int] = {}
    with contextlib.suppress(OSError):
        counts = notes.load(REPAIRS)
    return {each.value: counts.get(each, 0) for each in Repair}


def node_condition_set(notes: Notes) -> Condition:
    """Return NodeConditionSet as the last run of its unit noted it. Call this only if the condition is configured."""
    kind, unit = ConditionType.NODE_CONDITION_SET, "unbounded-agent-node-condition"
    why = f"{unit}.service has not run lately: see `systemctl status {unit}.timer` in the machine"
    try:
        noted = notes.load(NODE_CONDITION)
        if time.monotonic() - float(noted["ran_at"]) <= SILENT_AFTER:
            return Condition(kind, Status(noted["status"]), str(noted["reason"]), str(noted["message"]))
    except OSError as error:
        why = f"cannot read the result of the last run: {error}"
    except (KeyError, TypeError, ValueError):
        # No run has been noted.
        pass
    return unknown(kind, Reason.NOT_TRIED, why)


def node_cordon(notes: Notes) -> str:
    """Return Report.cordon as the last run of the same unit noted it; empty if it has not run lately."""
    with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
        noted = notes.load(NODE_CONDITION)
        if time.monotonic() - float(noted["ran_at"]) <= SILENT_AFTER:
            return str(noted["cordon"])
    return ""
