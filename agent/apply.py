"""Do the steps, in their order. Decides nothing: `agent.plan.diff` did."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from agent.actions import (
    Action,
    ChangeDevices,
    Clearing,
    ClearRemains,
    ReloadUnits,
    RemoveDriverRoot,
    RemoveFile,
    StageDriverRoot,
    WriteFile,
)
from agent.errors import AgentError, ApplyError
from agent.ownership import parse_owned, render_owned
from agent.paths import MACHINES_STATE, OWNED, RELOAD_OWED, RUNTIME_PROPERTIES, STATE, UNIT_SETTINGS
from agent.running import change_devices
from agent.staging import clear, remove_root, stage
from agent.system.files import System


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done, and what failed, each failure a sentence that names its step."""

    done: tuple[Action, ...]
    failures: tuple[str, ...]
    uncleared: dict[Clearing, str]
    """What stays on disk though nothing uses it, and why: no machine waits for that, so that it is no failure."""


def apply(actions: Sequence[Action], system: System, progress: Callable[[str], None] = lambda _: None) -> Applied:
    """One bad file does not hold up another machine; only a handoff is left out once staging has failed.

    `progress` hears of each step, and gets an empty text while a long one goes on.
    """
    done: list[Action] = []
    permission_left = False
    failures: list[str] = []
    uncleared: dict[Clearing, str] = {}
    staging_failed = False
    if actions:
        _record(actions, system, finished=False)
    for action in actions:
        if staging_failed and isinstance(action, WriteFile) and action.path.startswith(f"{MACHINES_STATE}/"):
            continue
        if permission_left and isinstance(action, RemoveFile):
            # What is recorded of a machine's settings is all that would lead a later pass to its permission.
            continue
        progress(action.describe())
        try:
            perform(action, system, lambda: progress(""))
            done.append(action)
        except (AgentError, OSError) as error:
            staging_failed = staging_failed or isinstance(action, StageDriverRoot)
            permission_left = permission_left or (
                isinstance(action, RemoveFile) and action.path.startswith(f"{RUNTIME_PROPERTIES}/")
            )
            if isinstance(action, Clearing):
                uncleared[action] = str(_failed(action, error))
            else:
                failures.append(str(_failed(action, error)))
    if any(isinstance(action, RemoveFile) for action in done):
        _record(done, system, finished=True)
    return Applied(tuple(done), tuple(failures), uncleared)


def perform(action: Action, system: System, going_on: Callable[[], None] = lambda: None) -> None:
    """Do one step. Raises OSError or an AgentError."""
    match action:
        case WriteFile(path, content, mode):
            _owe_reload(path, system)
            system.write(path, content, mode)
        case RemoveFile(path):
            _owe_reload(path, system)
            system.remove(path)
        case StageDriverRoot(root):
            stage(root, system, going_on)
        case ChangeDevices():
            change_devices(action, system, going_on)
        case RemoveDriverRoot(index):
            remove_root(index, system)
        case ClearRemains(paths):
            clear(paths, system)
        case ReloadUnits():
            system.run("systemctl", "daemon-reload", timeout=60)
            system.remove(RELOAD_OWED)
        case _:
            assert_never(action)


def _owe_reload(path: str, system: System) -> None:
    """Before the change, so that no crash in between hides it."""
    if path.startswith(UNIT_SETTINGS):
        system.write(RELOAD_OWED, b"")


def _failed(action: Action, error: AgentError | OSError) -> AgentError:
    if isinstance(error, AgentError):
        return ApplyError(f"cannot {action.describe()}: {error.message}", error.hint)
    return ApplyError(f"cannot {action.describe()}: {error.strerror or error}")


def _record(actions: Sequence[Action], system: System, *, finished: bool) -> None:
    """Keep the ownership record: a path is in it before it is written, and until it is removed."""
    try:
        before = parse_owned(system.read(OWNED))
    except FileNotFoundError:
        before = {}
    except (AgentError, OSError):
        # A cache: what it named and is as we would write it is adopted by the next pass, the rest is not ours.
        before = {}
    owned = dict(before)
    for action in actions:
        if isinstance(action, WriteFile) and not action.path.startswith(f"{STATE}/"):
            owned[action.path] = hashlib.sha256(action.content).hexdigest()
        elif isinstance(action, RemoveFile) and finished:
            owned.pop(action.path, None)
    if owned != before:
        system.write(OWNED, render_owned(owned))
