"""Performs the steps that `agent.host.plan.diff` returns, in their order."""

from collections.abc import Callable, Sequence
from typing import assert_never

from msgspec import Struct

from agent.host.apply.driver_roots import LEFTOVERS_LIMIT, make_way, protect, remove_root, stage
from agent.host.apply.live_devices import change_devices
from agent.host.apply.publishing import publish
from agent.host.state.owned_files import OWNED_FILES, Owned
from agent.model.actions import (
    Action,
    ChangeDevices,
    Cleanup,
    ProtectDriverRoots,
    PublishDriverRoot,
    Publishing,
    ReloadUnits,
    RemoveDriverRoot,
    RemoveFile,
    RemoveStaleStaging,
    StageDriverRoot,
    WriteFile,
)
from agent.model.digest import sha256
from agent.model.errors import AgentError, ApplyError, reason
from agent.model.facts import Absent, Broken, Unseen
from agent.model.faults import in_words
from agent.model.paths import (
    MACHINES_STATE,
    OWNED,
    RELOAD_PENDING,
    RUNTIME_PROPERTIES,
    STATE,
    UNIT_SETTINGS,
    live_file,
    machine_of,
    started_drop_in,
    started_nspawn,
)
from agent.system.clearing import clear
from agent.system.files import System


class Applied(Struct, frozen=True):
    """The results of the steps."""

    done: tuple[Action, ...]
    failures: tuple[str, ...]
    """Sentences that name the steps that failed."""
    concerned: dict[str, str]
    """As in agent.host.outcome.Outcome."""
    failed_cleanups: dict[Cleanup, str]
    """Removals that failed, with the reason. They are not failures of the pass, because no machine waits for them."""


def apply(actions: Sequence[Action], system: System, progress: Callable[[str], None] = lambda _: None) -> Applied:
    """Perform the steps. A step that fails does not stop the others, except steps that depend on it.

    Calls `progress` with a sentence before each step, and with an empty text during a long one.
    """
    done: list[Action] = []
    failed_cleanups: dict[Cleanup, str] = {}
    failed: list[Action] = []
    failures, concerned = list[str](), dict[str, str]()
    record_failures: tuple[str, ...] | None = None
    for action in actions:
        # The ownership record is updated only now, because the disk takes milliseconds, and a new GPU of a running
        # machine needs no settings. If the record cannot be updated, no settings are written.
        if record_failures is None and isinstance(action, WriteFile) and _needs_record(action):
            record_failures = _update_record(actions, system, finished=False)
            failures += record_failures
        if _must_skip(action, failed, recorded=not record_failures):
            continue
        progress(action.describe())
        try:
            perform(action, system, lambda: progress(""))
            done.append(action)
        except Exception as error:
            failed.append(action)
            if isinstance(action, Cleanup):
                failed_cleanups[action] = str(_failure(action, error))
            else:
                failures.append(str(_failure(action, error)))
                if (machine := _machine(action)) is not None:
                    concerned[failures[-1]] = machine
    if any(isinstance(action, RemoveFile) for action in done):
        failures += _update_record(done, system, finished=True)
    return Applied(tuple(done), tuple(failures), concerned, failed_cleanups)


def _machine(action: Action) -> str | None:
    """Return the only machine that a step concerns; None if it may concern any machine."""
    match action:
        case ChangeDevices(machine):
            return machine
        case WriteFile(path) | RemoveFile(path) if path.startswith(f"{MACHINES_STATE}/"):
            return path.removeprefix(f"{MACHINES_STATE}/").partition("/")[0]
        case WriteFile(path) | RemoveFile(path):
            return machine_of(path)
        case _:
            return None


def _must_skip(action: Action, failed: Sequence[Action], *, recorded: bool) -> bool:
    """Return whether a step must be skipped.

    A step must be skipped if it depends on a step that failed. `recorded` is False if the ownership record could not be
    updated: steps that need the record must be skipped then.
    """
    match action:
        case WriteFile(path) if path.startswith(f"{MACHINES_STATE}/"):
            # The handoff may name a driver root that could not be published.
            return any(isinstance(each, Publishing) for each in failed)
        case StageDriverRoot():
            # If plain directories could not be replaced, they stay in use: do not stage roots in their place.
            return any(isinstance(each, ProtectDriverRoots) for each in failed)
        case WriteFile():
            return not recorded and _needs_record(action)
        case RemoveFile():
            # If systemd's drop-in with a machine's device permissions could not be removed, the machine's settings
            # files must stay: without them, later passes would not find that drop-in.
            return any(
                isinstance(each, RemoveFile) and each.path.startswith(f"{RUNTIME_PROPERTIES}/") for each in failed
            )
        case _:
            return False


def perform(action: Action, system: System, report_progress: Callable[[], None] = lambda: None) -> None:
    """Perform one step. Raises OSError or an AgentError."""
    match action:
        case WriteFile():
            _write(action, system)
        case RemoveFile(path):
            _record_pending_reload(path, system)
            system.remove(path)
            _forget_start(path, system)
        case StageDriverRoot(root):
            stage(root, system, report_progress)
            publish(root.index, system)
        case PublishDriverRoot(root):
            publish(root.index, system)
        case ProtectDriverRoots(indices):
            protect(indices, system)
        case ChangeDevices():
            change_devices(action, system, report_progress)
        case RemoveDriverRoot(index):
            remove_root(index, system)
        case RemoveStaleStaging(paths):
            clear(paths, system, LEFTOVERS_LIMIT)
        case ReloadUnits():
            system.run("systemctl", "daemon-reload", timeout=60)
            system.remove(RELOAD_PENDING)
        case _:
            assert_never(action)


def _forget_start(path: str, system: System) -> None:
    """If the path is a machine's settings file, remove the records of the machine's last start with settings.

    If the machine is then started without the agent's settings, that start makes no new records. Once the machine is
    configured again, the old records would be taken for records of that start.
    """
    if (machine := machine_of(path)) is not None:
        for record in (live_file(machine), started_nspawn(machine), started_drop_in(machine)):
            system.remove(record)


def _write(action: WriteFile, system: System) -> None:
    _record_pending_reload(action.path, system)
    if action.path.startswith(f"{STATE}/"):
        make_way(action.path, system)
    system.write(action.path, action.content, action.mode)


def _needs_record(write: WriteFile) -> bool:
    """Return whether the ownership record must name the file. Files in STATE are the agent's even without a record."""
    return not write.path.startswith(f"{STATE}/")


def _record_pending_reload(path: str, system: System) -> None:
    """Record, before a unit file changes, that systemd must read it again: a crash must not hide the change."""
    if path.startswith(UNIT_SETTINGS):
        system.write(RELOAD_PENDING, b"")


def _failure(action: Action, error: Exception) -> AgentError:
    match error:
        case AgentError():
            return ApplyError(f"cannot {action.describe()}: {error.message}", error.hint)
        case OSError():
            # A step may also write a record of itself, such as RELOAD_PENDING.
            return ApplyError(f"cannot {action.describe()}: {reason(error, action.describe())}")
        case _:
            return ApplyError(f"cannot {action.describe()}: {in_words(error)}")


def _update_record(actions: Sequence[Action], system: System, *, finished: bool) -> tuple[str, ...]:
    """Update the ownership record before the first step that needs it, or, if `finished`, after the steps.

    Return failures.

    The record names a file from before the file is written until after it is removed. If the current record cannot be
    read, that is a failure too: the files in it must not be forgotten.
    """
    try:
        before = _read_record(system)
        owned = dict(before)
        for action in actions:
            if isinstance(action, WriteFile) and _needs_record(action):
                owned[action.path] = sha256(action.content)
            elif isinstance(action, RemoveFile) and finished:
                owned.pop(action.path, None)
        if owned != before:
            OWNED_FILES.write(OWNED, Owned(dict(sorted(owned.items()))), system)
    except OSError as error:
        return (f"cannot record the written files in {OWNED}: {reason(error, OWNED)}",)
    return ()


def _read_record(system: System) -> dict[str, str]:
    """Return the ownership record; empty if it is missing or damaged. Raises OSError if it cannot be read."""
    found = OWNED_FILES.read_seen(OWNED, system)
    if isinstance(found, Unseen):
        raise OSError(found.why)
    # Without the record, a pass takes over the files whose content is as the agent would write it.
    return {} if isinstance(found, Absent | Broken) else found.files
