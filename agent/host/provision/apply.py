"""Runs the steps of `up` and `reset`. Wherever a step is interrupted, the same command can be run again."""

import posixpath
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from agent.config.settings import ImageSettings
from agent.host.apply.driver_roots import remove_all
from agent.host.apply.steps import failure_of, give_token
from agent.host.observe.machine import enabling_link, observe_units
from agent.host.provision.binaries import cached, fetch, put_programs
from agent.host.provision.host_settings import apply_host, undo_host
from agent.host.provision.image import Progress, unpack
from agent.host.provision.network import remove_chains
from agent.host.provision.node_files import NODE_RECORDS, read_token, record_paths
from agent.host.provision.plan import (
    HOST_RECORD,
    Action,
    ChangeHost,
    DisableUnit,
    EnableUnit,
    FetchBinaries,
    FillRoot,
    ForgetHost,
    ForgetNode,
    GiveToken,
    PublishRoot,
    RecordHost,
    RemoveDriverRoots,
    RemoveEmptyDirectory,
    RemoveLeftover,
    RemoveRoot,
    RemoveTree,
    RestoreHost,
    StageRoot,
    StopMachine,
)
from agent.host.state.locks import pass_lock
from agent.model.contract import render_node_files
from agent.model.errors import AgentError
from agent.model.facts import Unseen
from agent.model.node import Chains, NodeBinary
from agent.model.paths import (
    AS_FOUND,
    BINARIES,
    MACHINES_RUNTIME,
    MACHINES_STATE,
    NODE_FILES,
    cordoned_file,
    machine_root,
    machine_unit,
    report_directory,
    staged_prefix,
)
from agent.model.text import sha256
from agent.system import opening
from agent.system.copy import CHUNK, clear, refuse_mounts
from agent.system.files import System
from agent.system.network import NetworkSource
from agent.system.process import ENVIRONMENT
from agent.system.removal import allow_removal

STOP_LIMIT = 300.0
"""Seconds that a machine may take to stop. systemd kills what is left of it after 120 s."""
SYNC_LIMIT = 300.0
"""Seconds to write a root file system to disk. Most of it was synced when the image was unpacked."""
REMOVE_LIMIT = 600.0
"""Seconds to remove a directory, which may be a whole root file system."""
UNIT_LIMIT = 60.0
"""Seconds to enable or disable a unit. systemctl then makes systemd reload all units."""
KUBELET = tuple(f"{directory}/kubelet" for directory in ENVIRONMENT["PATH"].split(":"))
"""The paths at which systemd in the machine looks for the kubelet."""


class Tools(Struct, frozen=True):
    """What the steps use to do their work."""

    system: System
    network: NetworkSource
    image: ImageSettings | None = None
    """Where images come from; None if no root file system is made."""


def run(actions: Sequence[Action], tools: Tools, progress: Progress) -> None:
    """Run the steps one after another. Raises AgentError for the first that fails."""
    for action in actions:
        _run(action, tools, progress)


def run_together(actions: Sequence[Action], tools: Tools, progress: Progress) -> None:
    """Run independent steps at the same time. Raises the error of the first that fails, such as AgentError.

    After a failure, the other steps still run to their end, so that the next attempt finds their results. Only Ctrl-C
    ends them early.
    """
    failures: list[BaseException] = []

    def call(action: Action) -> None:
        try:
            _run(action, tools, progress)
        except KeyboardInterrupt:
            # Python raises KeyboardInterrupt only in the main thread, which runs the first step. The other threads end
            # with the process.
            raise
        except BaseException as error:
            failures.append(error)

    # Daemon threads, so that the process ends after Ctrl-C without waiting for them.
    threads = [threading.Thread(target=call, args=(action,), daemon=True) for action in actions[1:]]
    for thread in threads:
        thread.start()
    for action in actions[:1]:
        call(action)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _run(action: Action, tools: Tools, progress: Progress) -> None:
    progress(action.describe())
    try:
        perform(action, tools, progress)
    except (AgentError, OSError) as error:
        raise failure_of(action, error) from error


def perform(action: Action, tools: Tools, progress: Progress = lambda _: None) -> None:  # noqa: C901
    """Perform one step. Raises OSError or an AgentError."""
    system = tools.system
    match action:
        case RecordHost(found):
            HOST_RECORD.write(AS_FOUND, found, system)
        case ChangeHost(goal, before):
            apply_host(goal, before, system)
        case RestoreHost(found):
            undo_host(found, system)
        case StageRoot(image, staged):
            assert tools.image, "a root file system is made from an image"
            unpack(tools.image, image, staged, system, progress)
        case FetchBinaries(binaries):
            for binary in binaries:
                fetch(binary, BINARIES, system)
        case FillRoot():
            _fill(action, system)
        case GiveToken(machine, where):
            give_token(machine, read_token(where, system), system)
        case PublishRoot():
            _publish(action, system)
        case StopMachine(machine):
            system.run("systemctl", "stop", machine_unit(machine), timeout=STOP_LIMIT)
        case RemoveRoot(machine):
            _remove_root(machine, system)
        case RemoveTree(path):
            clear((path,), system, REMOVE_LIMIT)
        case RemoveDriverRoots():
            with pass_lock(system, progress):
                remove_all(system)
        case RemoveEmptyDirectory(path):
            system.remove_empty_directory(path)
        case EnableUnit(unit):
            system.run("systemctl", "enable", unit, timeout=UNIT_LIMIT)
        case DisableUnit(unit):
            system.run("systemctl", "disable", unit, timeout=UNIT_LIMIT)
            # systemd ignores a masked unit, although the command succeeds. Otherwise it has removed both of these.
            system.remove(link := enabling_link(unit))
            system.remove_empty_directory(posixpath.dirname(link))
        case RemoveLeftover(leftover):
            if isinstance(leftover, Chains):
                remove_chains(leftover, system)
            else:
                tools.network.remove(leftover)
        case ForgetNode(machine):
            _forget_node(machine, system)
        case ForgetHost():
            clear((BINARIES,), system, REMOVE_LIMIT)
            HOST_RECORD.remove(AS_FOUND, system)
        case _:
            assert_never(action)


def _fill(action: FillRoot, system: System) -> None:
    # If an interrupted attempt has already renamed the unpacked directory to `staged`, there is nothing to rename.
    if system.link_inode(action.unpacked) is not None:
        _require_kubelet(action, system.image(action.unpacked))
        system.rename(action.unpacked, action.staged)
    root = system.image(action.staged)
    listed: dict[str, tuple[str, int]] = {}
    for binary in action.binaries:
        listed |= _put(binary, root, system)
    for file in action.files:
        root.write(file.path, file.content, file.mode)
    listed |= {each.path: (sha256(each.content), len(each.content)) for each in action.files}
    root.write(NODE_FILES, render_node_files(listed))


def _require_kubelet(action: FillRoot, image: System) -> None:
    if any(each.name == "kubelet" for each in action.binaries) or any(map(image.is_program, KUBELET)):
        return
    raise AgentError("the image has no kubelet", "add it with a table [machines.NAME.node.binaries]: docs/bootstrap.md")


def _put(binary: NodeBinary, root: System, system: System) -> dict[str, tuple[str, int]]:
    """Put a fetched program, or the programs of a fetched archive, into a root file system.

    Returns each program's digest and size by its path, for the list of files that nobody should change
    (agent.model.contract). CNI plugins are not in this result.
    """
    path = cached(binary, BINARIES)
    if not binary.archive:
        with opening.plain(system.full_path(path)) as reading:
            root.stream(binary.path, iter(partial(reading.read, CHUNK), b""), 0o755)
        return {binary.path: (binary.sha256, system.identity(path).size)}
    programs = put_programs(binary, system.full_path(path), root)
    # An archive of several programs is that of the CNI plugins. Leave them out of the result, because network plugins
    # may replace some of them with their own editions.
    return programs if binary.archive == "program" else {}


def _publish(action: PublishRoot, system: System) -> None:
    """Record the node, sync its root file system, and only then give the root file system its final name.

    So a root file system that has its final name is complete, and has a record.
    """
    inode = system.link_inode(action.staged)
    if inode is None:
        raise AgentError(f"{action.staged} has disappeared", "run `unbounded-agent up` again")
    born = system.birth(action.staged)
    record = replace(action.record, inode=inode, made=time.time(), born=born)
    NODE_RECORDS.write(record_paths(action.machine), record, system)
    system.run("sync", "--file-system", system.full_path(action.staged), timeout=SYNC_LIMIT)
    system.rename(action.staged, machine_root(action.machine))


def _remove_root(machine: str, system: System) -> None:
    """Remove a machine's root file system.

    Raises AgentError if the machine's unit runs, is about to start, or is in an unknown state, or if anything is
    mounted in the root file system.

    The directory is renamed first, so that the machine cannot start from what an interrupted removal leaves.
    """
    unit = machine_unit(machine)
    found = observe_units([unit], system)[unit]
    state = "about to start" if found.starts else found.state
    if isinstance(state, Unseen) or (isinstance(state, str) and state not in ("inactive", "failed")):
        why = f"in an unknown state: {state.why}" if isinstance(state, Unseen) else state
        raise AgentError(f"{unit} is {why}", f"stop it: `systemctl stop {unit}`; then run the same command again")
    root, aside = machine_root(machine), f"{staged_prefix(machine)}removed"
    clear((aside,), system, REMOVE_LIMIT)
    refuse_mounts(root, system)
    if system.is_directory(root, follow=False):
        # Root in the machine may have forbidden the rename with `chattr +i /`.
        allow_removal(system.full_path(root))
    system.rename(root, aside)
    clear((aside,), system, REMOVE_LIMIT)


def _forget_node(machine: str, system: System) -> None:
    report = report_directory(machine)
    if system.is_mount(report):
        # The machine's unit mounts a file system there before each start.
        system.run("umount", "--lazy", report)
    clear((f"{MACHINES_STATE}/{machine}", f"{MACHINES_RUNTIME}/{machine}"), system, REMOVE_LIMIT)
    system.remove(cordoned_file(machine))
    NODE_RECORDS.remove(record_paths(machine), system)
