"""Performs steps in their order: those of a pass (agent.host.plan.diff), and those of `up` and `reset`."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from operator import eq
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from agent.host.apply.driver_roots import LEFTOVERS_LIMIT, make_way, protect, publish, remove_root, stage
from agent.host.observe.machine import observe_joined
from agent.host.state.records import OWNED_FILES, Owned
from agent.model.contract import parse_host_status
from agent.model.device import FileIdentity
from agent.model.errors import AgentError, BusAnswerError, BusError, DocumentError, reason
from agent.model.facts import READ_ONLY, Absent, Broken, DeviceAllow, LiveSettings, Seen, Unseen, render_live
from agent.model.goal import (
    ChangeDevices,
    Cleanup,
    ProtectDriverRoots,
    PublishDriverRoot,
    ReloadUnits,
    RemoveDriverRoot,
    RemoveFile,
    RemoveStaleStaging,
    StageDriverRoot,
    Step,
    WriteFile,
    in_words,
)
from agent.model.paths import (
    MACHINES_STATE,
    OWNED,
    RELOAD_PENDING,
    STATE,
    UNIT_SETTINGS,
    conditions_file,
    device_allow_drop_in,
    handoff_directory,
    joined_file,
    live_file,
    machine_of,
    machine_unit,
    rewritten_nspawn,
    started_drop_in,
    started_nspawn,
    token_file,
)
from agent.model.text import restart_command, sha256
from agent.system import systemd
from agent.system.copy import clear
from agent.system.files import System
from agent.system.trust import read_seen, write_record

Progress: TypeAlias = Callable[[str], None]
"""Takes a sentence for the user. An empty text only means that the work goes on."""
Performer: TypeAlias = Callable[[Any, System, Progress], object]
"""Performs a step of one type. Raises OSError or an AgentError."""


class Applied(Struct, frozen=True):
    """The results of the steps."""

    done: tuple[Step, ...]
    failures: tuple[str, ...]
    """Sentences that name the steps that failed."""
    concerned: dict[str, Collection[str]]
    """As in agent.host.reconcile.Outcome."""
    failed_cleanups: dict[Cleanup, str]
    """Removals that failed, with the reason. They are not failures of the pass, because no machine waits for them."""


def apply(
    actions: Sequence[Step],
    system: System,
    progress: Progress = lambda _: None,
    performers: Mapping[type[Step], Performer] | None = None,
) -> Applied:
    """Perform the steps, each by the performer of its type; without `performers`, they are the steps of a pass.

    A step that fails does not stop the others, except steps that depend on it. But after a `decisive` step that fails,
    no later step is performed: raises AgentError. Consecutive steps that are marked `together` run at the same time.
    Calls `progress` with a sentence before each step.
    """
    done, undone, failures, concerned = list[Step](), list[Step](), list[str](), dict[str, Collection[str]]()
    failed_cleanups: dict[Cleanup, str] = {}
    record_failures: tuple[str, ...] | None = None
    for batch in _batches(actions):
        # The ownership record is updated only now, because the disk takes milliseconds, and a new GPU of a running
        # machine needs no settings. If the record cannot be updated, no settings are written.
        if record_failures is None and any(isinstance(each, WriteFile) and _needs_record(each) for each in batch):
            record_failures = _update_record(actions, system, finished=False)
            failures += record_failures
        due = [each for each in batch if not _must_skip(each, undone, system, recorded=not record_failures)]
        undone += [each for each in batch if each not in due]
        for action, error in zip(due, _perform_all(due, system, progress, performers or PERFORMERS), strict=True):
            if error is None:
                done.append(action)
                continue
            expected = isinstance(error, AgentError | OSError)
            if not isinstance(error, Exception) or (action.decisive and not expected):
                raise error
            failure = _failure_of(action, error)
            if action.decisive:
                raise failure from error
            undone.append(action)
            if isinstance(action, Cleanup):
                failed_cleanups[action] = str(failure)
            else:
                failures.append(str(failure))
                if machines := _machines(action):
                    concerned[failures[-1]] = machines
    if any(isinstance(action, RemoveFile) for action in done):
        failures += _update_record(done, system, finished=True)
    return Applied(tuple(done), tuple(failures), concerned, failed_cleanups)


def _batches(actions: Iterable[Step]) -> Iterator[list[Step]]:
    """Yield the steps that may be performed at the same time."""
    for together, group in groupby(actions, key=lambda each: each.together):
        batch = [*group]
        yield from [batch] if together else ([each] for each in batch)


def _perform_all(
    actions: Sequence[Step], system: System, progress: Progress, performers: Mapping[type[Step], Performer]
) -> list[BaseException | None]:
    """Perform independent steps, all to their end, and return their errors. Only Ctrl-C ends them early."""
    errors: list[BaseException | None] = [None] * len(actions)

    def attempt(index: int) -> None:
        try:
            performers[type(actions[index])](actions[index], system, progress)
        except KeyboardInterrupt:
            # Python raises KeyboardInterrupt only in the main thread, which performs the first step. The other threads
            # end with the process.
            raise
        except BaseException as error:
            errors[index] = error

    for action in actions:
        progress(action.describe())
    # Daemon threads, so that the process ends after Ctrl-C without waiting for them.
    threads = [threading.Thread(target=attempt, args=(index,), daemon=True) for index in range(1, len(actions))]
    for thread in threads:
        thread.start()
    if actions:
        attempt(0)
    for thread in threads:
        thread.join()
    return errors


def _machines(action: Step) -> Collection[str]:
    """Return the only machines that a step concerns; none if it may concern any machine."""
    match action:
        case ChangeDevices(machine):
            return (machine,)
        case StageDriverRoot(_, machines) | PublishDriverRoot(_, machines):
            return machines
        case WriteFile(path) | RemoveFile(path) if path.startswith(f"{MACHINES_STATE}/"):
            return (path.removeprefix(f"{MACHINES_STATE}/").partition("/")[0],)
        case WriteFile(path) | RemoveFile(path):
            return tuple(name for name in (machine_of(path),) if name is not None)
        case _:
            return ()


def _must_skip(action: Step, undone: Sequence[Step], system: System, *, recorded: bool) -> bool:
    """Return whether a step depends on one that was not done, or on the ownership record, which is not `recorded`."""
    match action:
        case WriteFile(path) if path.startswith(f"{MACHINES_STATE}/"):
            # The handoff names a driver root that could not be published.
            publishing = [each for each in undone if isinstance(each, StageDriverRoot | PublishDriverRoot)]
            return any(name in each.machines for each in publishing for name in _machines(action))
        case StageDriverRoot():
            # If plain directories could not be replaced, they stay in use: do not stage roots in their place.
            return any(isinstance(each, ProtectDriverRoots) for each in undone)
        case WriteFile():
            return not recorded and _needs_record(action)
        case RemoveFile():
            # If systemd's drop-in with a machine's device permissions could not be removed, the machine's settings
            # files must stay: without them, later passes would not find that drop-in.
            return any(RemoveFile(device_allow_drop_in(name)) in undone for name in _machines(action))
        case ReloadUnits(outdated):
            # No unit file changed. A reload may leave device filters open for a moment.
            return not outdated and read_seen(system.exists, RELOAD_PENDING) is False
        case _:
            return False


def _failure_of(action: Step, error: Exception) -> AgentError:
    """Return the error with which an action failed, in a sentence that names the action."""
    what = f"cannot {action.describe()}"
    match error:
        case AgentError():
            return AgentError(f"{what}: {error.message}", error.hint)
        case OSError():
            # A step may also write a record of itself, such as RELOAD_PENDING.
            return AgentError(f"{what}: {reason(error, action.describe())}")
        case _:
            return AgentError(f"{what}: {in_words(error)}")


def _needs_record(write: WriteFile) -> bool:
    """Return whether the ownership record must name the file. Files in STATE are the agent's even without a record."""
    return not write.path.startswith(f"{STATE}/")


def _update_record(actions: Sequence[Step], system: System, *, finished: bool) -> tuple[str, ...]:
    """Update the ownership record before the first step that needs it, or, if `finished`, after the steps.

    Return failures. The record names a file from before the file is written until after it is removed.
    """
    try:
        found = OWNED_FILES.read_seen(OWNED, system)
        if isinstance(found, Unseen):
            # The files in the record must not be forgotten.
            raise OSError(found.why)
        # Without the record, a pass takes over the files whose content is as the agent would write it.
        before = {} if isinstance(found, Absent | Broken) else found.files
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


# How each step of a pass is performed.


def write_file(action: WriteFile, system: System, _: Progress = lambda _: None) -> None:
    """Write a file of the agent. Raises OSError."""
    if action.path.startswith(f"{STATE}/"):
        make_way(action.path, system)
    with _pending_reload(action.path, system):
        system.write(action.path, action.content, action.mode)


def _remove_file(action: RemoveFile, system: System, _: Progress) -> None:
    with _pending_reload(action.path, system):
        system.remove(action.path)
    # What killed writers left: nobody else writes the file again, and removes it then.
    system.remove_temporary(action.path)
    if (machine := machine_of(action.path)) is not None:
        # It was a machine's settings file. If the machine is now started without the agent's settings, that start makes
        # no new records of the start; once the machine is configured again, the old ones would be taken for them.
        records = (live_file(machine), started_nspawn(machine), started_drop_in(machine))
        for record in (*records, rewritten_nspawn(machine)):
            system.remove(record)


@contextmanager
def _pending_reload(path: str, system: System) -> Iterator[None]:
    """Record, before a unit file changes, that systemd must read it again: a crash must not hide the change.

    The record is removed if the file does not change: the disk may be full, or the file removed already.
    """
    if not path.startswith(UNIT_SETTINGS) or system.exists(RELOAD_PENDING):
        yield
        return

    def identity() -> Seen[FileIdentity]:
        return read_seen(lambda path: system.identity(path, follow=False), path)

    before = identity()
    system.write(RELOAD_PENDING, b"")
    try:
        yield
    finally:
        if identity() == before:
            system.remove(RELOAD_PENDING)


def _stage(action: StageDriverRoot, system: System, progress: Progress) -> None:
    stage(action.root, system, progress)
    publish(action.root.index, system)


def _reload(_: ReloadUnits, system: System, __: Progress) -> None:
    system.run("systemctl", "daemon-reload", timeout=60)
    system.remove(RELOAD_PENDING)


DRM = "/dev/dri/"


def change_devices(action: ChangeDevices, system: System, progress: Progress = lambda _: None) -> None:
    """Change the devices of a running machine, without restarting anything in it, and record what succeeded.

    Raises AgentError, or OSError if the record cannot be written. The calls go to systemd and systemd-machined over
    D-Bus: starting systemctl or machinectl would take ten times as long.

    The intended permissions are recorded first, so that the record has every permission in force even if the agent is
    killed before the end. If the record cannot be written, devices that are no longer granted are forbidden all the
    same, but nothing is permitted or bound: without a record of that, each later pass would do it again.
    """
    before, after = action.before, action.after
    # Keep the nodes that are still granted with the same device number. The machine half removes nodes that are no
    # longer granted. Nodes whose number has changed are bound again below.
    kept = {path: number for path, number in before.nodes.items() if after.nodes.get(path) == number}
    live, failures = replace(after, allow=before.allow, nodes=kept, unsure=before.unsure), []
    change_permissions = before.unsure or set(before.allow) != set(after.allow)
    added = tuple(entry for entry in after.allow if entry not in before.allow)
    intended = replace(live, allow=(*before.allow, *added), unsure=True) if change_permissions else live
    try:
        _record(action.machine, intended, system)
    except OSError:
        if set(before.allow) - set(after.allow):
            still_allowed = (entry for entry in after.allow if entry in before.allow)
            _permit(action.machine, (*still_allowed, *action.foreign), system)
        raise
    if change_permissions:
        try:
            _permit(action.machine, (*after.allow, *action.foreign), system)
            live = replace(live, allow=after.allow, unsure=False)
        except BusError as error:
            failures.append(str(error))
            # If PID 1 did not answer, it may have carried out the call all the same: record the intended permissions.
            live = live if isinstance(error, BusAnswerError) else intended
    # The vendors' own nodes come before those of DRM: few pods need DRM's, and each bind takes machined milliseconds.
    missing = [each for each in after.nodes.items() if each[0] not in live.nodes]
    for path, number in sorted(missing, key=lambda node: node[0].startswith(DRM)):
        try:
            read_only = number.startswith(READ_ONLY) or path in action.read_only
            systemd.bind_mount(action.machine, path, read_only=read_only, system=system)
            live = replace(live, nodes={**live.nodes, path: number})
        except BusError as error:
            # Go on with the other nodes, unless the machine hangs: then each of these nodes would take as long to fail.
            failures.append(f"{path} cannot be bound: {error}")
            if isinstance(error.__cause__, TimeoutError):
                break
        progress("")
    _record(action.machine, live, system)
    if failures:
        raise AgentError("; ".join(failures), f"{restart_command(action.machine)} applies all changes")


def _record(machine: str, live: LiveSettings, system: System) -> None:
    write_record(system, live_file(machine), render_live(live))


def _permit(machine: str, allow: Iterable[DeviceAllow], system: System) -> None:
    # systemd writes the list to /run/systemd/system.control. At the machine's next start, the agent's drop-in takes
    # precedence.
    systemd.set_device_allow(machine_unit(machine), allow, system)


PERFORMERS: Mapping[type[Step], Performer] = {
    WriteFile: write_file,
    RemoveFile: _remove_file,
    StageDriverRoot: _stage,
    PublishDriverRoot: lambda action, system, _: publish(action.root.index, system),
    ProtectDriverRoots: lambda action, system, _: protect(action.indices, system),
    ChangeDevices: change_devices,
    RemoveDriverRoot: lambda action, system, _: remove_root(action.index, system),
    RemoveStaleStaging: lambda action, system, _: clear(action.paths, system, LEFTOVERS_LIMIT),
    ReloadUnits: _reload,
}


# Publishes the documents next to the handoff. A change of one of them does not make the handoff pending.


FRESH = 45.0
"""Seconds until an unchanged host status is written again: less than a minute, so that every timed pass writes it."""


def publish_documents(
    system: System,
    file_of: Callable[[str], str],
    documents: Mapping[str, bytes],
    with_state: Collection[str],
    unchanged: Collection[str] = (),
    same: Callable[[bytes, bytes], bool] = eq,
    until: ExitStack | None = None,
) -> tuple[str, ...]:
    """Write the document of each machine in `documents`; remove that of any other machine that is not in `unchanged`.

    `with_state` are the machines that may have one. Return failures, one sentence each. A document is written, and
    wakes the machine's service, only if it is not the `same` as before. It stays locked `until` that ends.
    """
    failures = []
    for name in sorted({*with_state, *documents} - set(unchanged)):
        path, content = file_of(name), documents.get(name)
        try:
            # A machine that never had a goal has no such directory.
            if not system.is_directory(handoff_directory(name), follow=False):
                continue
            if content is None:
                if system.exists(path):
                    make_way(path, system)
                    system.remove(path)
                continue
            # A link is not followed: root in the machine can remount the directory writable and put one there.
            before = read_seen(lambda path: system.read_untrusted(path)[0], path)
            if not isinstance(before, bytes) or not same(before, content):
                make_way(path, system)
                system.stream(path, (content,), until=until)
        except Exception as error:
            why = reason(error, path) if isinstance(error, OSError) else in_words(error)
            failures.append(f"cannot update {path}: {why}")
    return tuple(failures)


AGAIN = 5.0
"""Seconds after which a request that a machine has not begun is written again. systemd watches a request's file only
while the machine's service does not run (path_enter_running in path.c): it misses one that comes while an earlier
one ends."""


def publish_request(
    system: System, file_of: Callable[[str], str], machine: str, document: bytes, until: ExitStack
) -> tuple[str, ...]:
    """Write a request, also if it is there already: that wakes the machine's service once more. Return failures.

    It holds `until` that ends, or this process: then, the machine finds it unlocked (agent.machine.requests).
    """
    return publish_documents(system, file_of, {machine: document}, (machine,), same=lambda *_: False, until=until)


def publish_host_status(system: System, documents: Mapping[str, bytes], with_state: Collection[str]) -> tuple[str, ...]:
    """Do the same with the host status of each machine, which is also written if it is no longer fresh."""

    def same_and_fresh(before: bytes, after: bytes) -> bool:
        try:
            old, new = parse_host_status(before), parse_host_status(after)
        except DocumentError:
            return False
        # The status is also written if the clock was set back.
        return old._replace(evaluated=new.evaluated) == new and 0 <= new.evaluated - old.evaluated < FRESH

    return publish_documents(system, conditions_file, documents, with_state, same=same_and_fresh)


# Gives a machine its bootstrap token, and removes the token once the machine's kubelet has joined the cluster.
#
# The token's file is next to the handoff, not in the machine's root file system, which the host never opens after the
# machine has booted. So the host can give a new token to a running machine, whose kubelet reads the file each minute,
# and no token stays in the machine.


LIMIT = 1024
"""Bytes of the largest token file that is read."""


def given_token(machine: str, system: System) -> str | None:
    """Return the token that the machine has: None if it has none, an empty string if the token cannot be read."""
    found = read_seen(lambda path: system.read_untrusted(path, LIMIT)[0], token_file(machine))
    if isinstance(found, Absent):
        return None
    return found.decode(errors="replace").strip() if isinstance(found, bytes) else ""


def give_token(machine: str, token: str, system: System) -> None:
    """Write the token for a machine that has not started yet, or has a token. Raises OSError."""
    # An earlier machine of this name may have left the file that says that its kubelet has joined. With this file, the
    # next pass would remove the new token at once.
    system.remove(joined_file(machine))
    give_token_again(machine, token, system)


def give_token_again(machine: str, token: str, system: System) -> None:
    """Write the token for a running machine that has none. Raises OSError.

    Keep the file that says that the kubelet has joined (`joined_file`). The kubelet may join at this moment, and its
    machine writes that file only once per boot. The next pass then finds the file, and removes the token.
    """
    path = token_file(machine)
    make_way(path, system)
    system.write(path, f"{token}\n".encode(), 0o600)


def remove_used_tokens(nodes: Iterable[str], system: System) -> tuple[str, ...]:
    """Remove the tokens of machines that have joined. Return failures, one sentence each."""
    failures = []
    for machine in nodes:
        path = token_file(machine)
        try:
            if system.exists(path) and observe_joined(machine, system):
                make_way(path, system)
                system.remove(path)
        except OSError as error:
            failures.append(f"cannot remove the used bootstrap token {path}: {error.strerror}")
    return tuple(failures)
