"""Reads, validates and writes the JSON files in which the host half keeps its state."""

import posixpath
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import astuple

from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import DocumentError
from agent.model.facts import Absent, Broken, MachineFacts, Seen, StagedRoot, Unseen
from agent.model.json_document import NAME_SHOWN
from agent.model.paths import (
    AGES,
    CONDITIONS,
    MACHINES_STATE,
    REPORT_NAME,
    joined_file,
    report_directory,
    start_began_mark,
)
from agent.model.text import json_digest, sha256
from agent.model.typed_json import Format, convert, to_builtins
from agent.system.files import System
from agent.system.journal import STEP, Ages, Observation
from agent.system.trust import discard, read_seen, write_record

T = TypeVar("T")


class Record(Format[T]):
    """The format of a JSON file that keeps an object of type T."""

    def read_seen(self, path: str, system: System) -> Seen[T]:
        """Return the value in a file; Broken if the file is damaged, which the caller must report."""
        data = read_seen(system.read, path)
        try:
            return self.parse(path, data) if isinstance(data, bytes) else data
        except DocumentError as error:
            return Broken(str(error))

    def read(self, path: str, system: System) -> T | None:
        """Return the value in a file; None if the file is missing or unusable. A damaged file is discarded."""
        found = self.read_seen(path, system)
        if isinstance(found, Broken):
            discard(path, found.why, system)
        return None if isinstance(found, Absent | Broken | Unseen) else found

    def write(self, path: str, value: T, system: System, mode: int = 0o644) -> None:
        """Write a value to a file. Raises OSError."""
        write_record(system, path, self.render(value), mode)


class _Copy(Struct, frozen=True):
    digest: str
    content: dict[str, Any]


_COPY = Format(_Copy, 1)


class Digested(Record[T]):
    """The format of a copy of a record that must not be lost: an object of type T, with its digest."""

    def render(self, value: T) -> bytes:
        content = to_builtins(value)
        return _COPY.render(_Copy(json_digest(content), content))

    def parse(self, where: str, data: bytes) -> T:
        copy = _COPY.parse(where, data)
        value = convert(where, copy.content, self.kind)
        if copy.digest != json_digest(copy.content):
            raise DocumentError(f"{where}: the content does not match its digest")
        return value


class Durable(Generic[T]):
    """A record that must not be lost: two synced files in the format `Digested`, which only root may read.

    The first file is written first. So after a crash between the two writes, the first copy is the newer one. The next
    write replaces a damaged copy.
    """

    def __init__(self, kind: type[T]) -> None:
        self._copy = Digested(kind)

    def read(self, paths: tuple[str, str], system: System) -> Seen[T]:
        """Return the record as `first_intact` does. Without an intact copy, its owner must not guess what it was."""
        return first_intact([self._copy.read_seen(path, system) for path in paths])

    def write(self, paths: tuple[str, str], value: T, system: System) -> None:
        """Write both copies durably. Raises OSError."""
        for path in paths:
            self._copy.write(path, value, system, 0o600)

    def remove(self, paths: tuple[str, str], system: System) -> None:
        """Remove both copies, the second one first: the record can be read until both are removed. Raises OSError."""
        for path in reversed(paths):
            system.remove(path)


def first_intact(copies: Sequence[Seen[T]]) -> Seen[T]:
    """Return the first intact copy of a record.

    If there is none, return a copy that could not be read, otherwise a damaged one, and Absent if all are missing.
    """
    faults = (Unseen, Broken, Absent)
    return min(copies, key=lambda copy: faults.index(type(copy)) if isinstance(copy, faults) else -1)


class ServiceState(Struct, frozen=True):
    """What keeps the service from its work. An empty text stands for nothing."""

    unserved: str = ""
    """Why it serves no metrics."""
    unfinished: str = ""
    """Why its last pass did not finish."""
    failed: str = ""
    """What failed in its last pass, if that finished."""


SERVICE_STATES = Record(ServiceState)


# The last evaluated conditions, in /run, so that every command can show when each one last changed.
#
# All times are by the wall clock. If the clock was set after the times were written, they are corrected when they are
# read. Without this correction, on a host whose clock has no battery and is set after boot, conditions would look years
# old, and a start that has just begun would look overdue. A suspend moves the times from which waits are measured.


History = Mapping[str, tuple[Condition, ...]]
"""Conditions by machine."""
Time = Annotated[float, Meta(gt=-(2**36), lt=2**36)]
"""Seconds since the epoch. Numbers beyond these limits, as in a damaged file, could not be shown as a date."""


class _Condition(Struct, frozen=True):
    """A Condition up to `good_since`, with `gpus` and `said`."""

    type: ConditionType
    status: Status
    reason: str
    message: str
    last_transition: Time
    losses: tuple[Time, ...]
    good_since: Time
    booted: Time
    """When the host booted, by the wall clock as it was set when the times above were written."""
    gpus: tuple[str, ...]
    said: tuple[tuple[str, str, str], ...] | None
    suspended: Time = 0.0
    """How long the host had been suspended since it booted, when the times above were written."""


_HISTORY = Record(dict[str, tuple[_Condition, ...]])


def read_history(system: System) -> History:
    """Return the history; empty if it is missing or unreadable, because it is only a cache."""
    booted, suspended = _booted(), _suspended()

    def corrected(found: _Condition) -> Condition:
        *condition, recorded, gpus, said, before = astuple(found)
        read = Condition(*condition)._replace(gpus=gpus, said=said)
        set_by, paused = (0.0 if abs(each) < STEP else each for each in (booted - recorded, suspended - before))
        # Users see since when a condition is True or False. Unknown is a wait.
        since = set_by + (paused if read.status is Status.UNKNOWN else 0.0)
        return read._replace(
            last_transition=read.last_transition and read.last_transition + since,
            losses=tuple(at + set_by + paused for at in read.losses),
            good_since=read.good_since and read.good_since + set_by + paused,
        )

    found = _HISTORY.read(CONDITIONS, system) or {}
    return {machine: tuple(map(corrected, conditions)) for machine, conditions in found.items()}


def write_history(system: System, history: History) -> tuple[str, ...]:
    """Write the history, world-readable for `status`. Return the failure, one sentence, if there is one."""
    try:
        before, booted, suspended = _HISTORY.read_seen(CONDITIONS, system), _booted(), _suspended()
        # Both are a little different in each pass. With the recorded ones, unless the clock was set or the host was
        # suspended since, the file does not change as long as the history does not change.
        known = [each for found in before.values() for each in found] if isinstance(before, dict) else []
        booted = next((each.booted for each in known if abs(each.booted - booted) < STEP), booted)
        suspended = next((each.suspended for each in known if abs(each.suspended - suspended) < STEP), suspended)
        content = {
            machine: tuple(_Condition(*each[:7], booted, each.gpus, each.said, suspended) for each in conditions)
            for machine, conditions in history.items()
        }
        if before != content:
            _HISTORY.write(CONDITIONS, content, system)
    except OSError as error:
        return (
            f"cannot write {CONDITIONS}: {error.strerror or error}; commands may then show wrong times of changes: "
            "see `df /run`",
        )
    return ()


def _booted() -> float:
    """Return when the host booted, by the wall clock. The result changes only if somebody sets the clock."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _suspended() -> float:
    """Return how long the host has been suspended since it booted.

    Exactly 0 if it never was, so that the same history is the same file.
    """
    return max(0.0, round(time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic(), 3))


class Handed(Struct, frozen=True):
    """The driver roots that handoffs have named since the machine's start."""

    indices: tuple[Annotated[int, Meta(ge=0)], ...]


MANIFEST = Record(StagedRoot, 1, advice="the driver root is ignored, and staged again")
"""The format of a driver root's manifest, `MANIFESTS/<index>.json`."""
HANDED = Record(Handed, 1, advice="no driver root is removed until the machine's next start")


# How old files are, in /run, so that the next process knows these ages even if the wall clock was set.


_AGES = Record(dict[str, Observation])


def read_ages(system: System) -> Ages:
    """Return the ages as the last pass knew them. Without a record, each file's first age depends on the wall clock."""
    return Ages(_AGES.read(AGES, system))


def write_ages(system: System, ages: Ages) -> None:
    """Write the ages if a file has changed. Ignores failures: the record only matters once the clock is set."""
    now, before = ages.observations, _AGES.read_seen(AGES, system)
    known = {path: each.changed for path, each in before.items()} if isinstance(before, dict) else None
    if known != {path: each.changed for path, each in now.items()}:
        with suppress(OSError):
            _AGES.write(AGES, now, system)


# The files that the agent wrote, with digests of their content.


MARK = b"# Written by unbounded-agent"
"""The first bytes of every settings file that the agent writes on the host. Its JSON files do not have them."""


def is_ours(content: bytes, digest: str) -> bool:
    """Return whether a recorded file is still the agent's.

    A file is the agent's if it is unchanged, or still begins with the agent's first line, which warns that edits are
    overwritten. An empty or zeroed file, which some file systems leave after a loss of power, is the agent's too. Any
    other content means that somebody has replaced the file.
    """
    no_content = not content.strip(b"\0")
    return no_content or sha256(content) == digest or content.startswith(MARK)


class Owned(Struct, frozen=True):
    """The whole record."""

    files: dict[str, Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]]
    """SHA-256 digests in hexadecimal, by path."""


class _OwnedFiles(Record[Owned]):
    def parse(self, where: str, data: bytes) -> Owned:
        owned = super().parse(where, data)
        # Recorded files may be removed later, so only paths are accepted that cannot lead to a different file.
        for path in owned.files:
            if not path.startswith("/") or posixpath.normpath(path) != path or not path.isprintable():
                raise DocumentError(f"{where}: key files[{path[:NAME_SHOWN]!a}] must be a normal absolute path", ADVICE)
        return owned


ADVICE = "discarding it; the agent recognises its settings files by their first line"
OWNED_FILES = _OwnedFiles(Owned, 1, advice=ADVICE)


# Marks of the machines that have started, or that a command has stopped, since the host booted: systemd forgets the
# start of a unit when it unloads the unit, and does not record the stop of a unit that did not run.


def mark_start(machine: str, system: System) -> None:
    """Mark a machine whose start has begun, or that is about to be stopped.

    Ignores failures: if the machine runs, the next pass marks it.
    """
    # The mark is a directory, because one call makes it. A file would be written by way of a temporary file.
    with suppress(OSError):
        system.make_directory(start_began_mark(machine))


def mark_starts(machines: Iterable[MachineFacts], system: System) -> None:
    """Mark those machines that run. A machine may have started before the agent was installed."""
    for machine in machines:
        if isinstance(machine.unit_state, str) and not machine.ended:
            mark_start(machine.name, system)


def has_started(machine: str, system: System) -> bool:
    """Return whether the machine is marked."""
    return system.is_directory(start_began_mark(machine))


# What earlier runs left.


def machines_with_state(system: System) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the machines that the agent has files for, also those no longer configured, and failures in sentences."""
    try:
        return system.entries(MACHINES_STATE), ()
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        return (), (f"{MACHINES_STATE}: cannot remove outdated conditions for Nodes: {error.strerror}",)


def clear_report(system: System, machine: str) -> None:
    """Before the machine starts, remove its old report, and the file that says that its kubelet has joined.

    Both files are from the machine's last run, or from an earlier machine of this name.
    """
    for path in (f"{report_directory(machine)}/{REPORT_NAME}", joined_file(machine)):
        with suppress(OSError):
            system.remove(path)
