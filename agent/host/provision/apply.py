"""Performs the steps of `up` and `reset`. Wherever a step is interrupted, the same command can be run again."""

import posixpath
import time
from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from agent.host.apply.driver_roots import remove_all
from agent.host.apply.steps import Performer, Progress, give_token
from agent.host.observe.machine import enabling_link, observe_units
from agent.host.provision import plan
from agent.host.provision.binaries import cached, fetch, put_programs
from agent.host.provision.host_settings import apply_host, undo_host
from agent.host.provision.image import unpack
from agent.host.provision.network import remove_chains
from agent.host.provision.node_files import (
    KUBECONFIG,
    NODE_RECORDS,
    NodeRecord,
    is_others_candidate,
    read_token,
    record_paths,
    root_record,
)
from agent.host.state.gpus import forget_tests
from agent.host.state.locks import pass_lock
from agent.host.state.switches import RECORDS
from agent.model.contract import render_node_files
from agent.model.errors import AgentError
from agent.model.facts import Unseen
from agent.model.goal import Step
from agent.model.node import Chains
from agent.model.paths import (
    AS_FOUND,
    BINARIES,
    CARRIED,
    KUBELET_CERTIFICATES,
    MACHINES_RUNTIME,
    MACHINES_STATE,
    NODE_FILES,
    PARTIAL,
    candidate_of,
    carried_directory,
    cordoned_file,
    drained_file,
    identity_directory,
    identity_door,
    machine_root,
    machine_unit,
    other_root,
    report_directory,
    root_records,
    staged_prefix,
    switch_directory,
    switch_record,
)
from agent.model.text import sha256
from agent.system.copy import clear, refuse_mounts
from agent.system.files import System
from agent.system.network import NetworkSource
from agent.system.process import ENVIRONMENT
from agent.system.removal import allow_removal

STOP_LIMIT = 600.0
"""Seconds that a machine may take to stop. With the default settings, systemd kills what is left of it after 320 s at
most (agent.host.plan.nspawn.stop_limit)."""
SYNC_LIMIT = 300.0
"""Seconds to write a root file system to disk. Most of it was synced when the image was unpacked."""
REMOVE_LIMIT = 600.0
"""Seconds to remove a directory, which may be a whole root file system."""
UNIT_LIMIT = 60.0
"""Seconds to enable or disable a unit. systemctl then makes systemd reload all units."""
KUBELET = tuple(f"{directory}/kubelet" for directory in ENVIRONMENT["PATH"].split(":"))
"""The paths at which systemd in the machine looks for the kubelet."""


def performers(network: NetworkSource) -> Mapping[type[Step], Performer]:
    """Return the performer of each step of agent.host.provision.plan."""
    return {
        plan.RecordHost: lambda step, system, _: plan.HOST_RECORD.write(AS_FOUND, step.found, system),
        plan.ChangeHost: lambda step, system, _: apply_host(step.goal, step.before, system),
        plan.RestoreHost: lambda step, system, _: undo_host(step.found, system),
        plan.StageRoot: lambda step, system, said: unpack(step.settings, step.image, step.staged, system, said),
        plan.FetchBinaries: lambda step, system, _: [fetch(each, BINARIES, system) for each in step.binaries],
        plan.FillRoot: _fill,
        plan.GiveToken: lambda step, system, _: give_token(step.machine, read_token(step.where, system), system),
        plan.MakeCarried: _make_carried,
        plan.PublishRoot: _publish,
        plan.RecordSwitch: lambda step, system, _: RECORDS.write(switch_record(step.machine), step.switch, system),
        plan.PublishCandidate: _publish_candidate,
        plan.PutAside: lambda step, system, _: _put_aside(step.machine, system),
        plan.UseAgain: _use_again,
        plan.KeepIdentity: lambda step, system, _: _keep_identity(step.machine, system),
        plan.ExchangeRoots: _exchange,
        plan.ForgetCandidate: lambda step, system, _: _forget_state(candidate_of(step.machine), system),
        plan.StopMachine: lambda step, system, _: system.run(
            "systemctl", "stop", machine_unit(step.machine), timeout=STOP_LIMIT
        ),
        plan.RemoveRoot: _remove_root,
        plan.RemoveTree: lambda step, system, _: clear((step.path,), system, REMOVE_LIMIT),
        plan.RemoveDriverRoots: _remove_driver_roots,
        plan.RemoveEmptyDirectory: lambda step, system, _: system.remove_empty_directory(step.path),
        plan.ChangeUnit: _change_unit,
        plan.RemoveLeftover: partial(_remove_leftover, network),
        plan.ForgetNode: _forget_node,
        plan.ForgetHost: _forget_host,
    }


def _fill(step: plan.FillRoot, system: System, _: Progress) -> None:
    # If an interrupted attempt has already renamed the unpacked directory to `staged`, there is nothing to rename.
    if system.link_inode(step.unpacked) is not None:
        kubelet_of_image = any(map(system.image(step.unpacked).is_program, KUBELET))
        if not kubelet_of_image and all(each.name != "kubelet" for each in step.binaries):
            hint = "add it with a table [machines.NAME.node.binaries]: docs/bootstrap.md"
            raise AgentError("the image has no kubelet", hint)
        system.rename(step.unpacked, step.staged)
    root = system.image(step.staged)
    # Digest and size of each file by its path, for the list of files that nobody should change (agent.model.contract).
    listed: dict[str, tuple[str, int]] = {}
    for binary in step.binaries:
        put = put_programs(binary, system.full_path(cached(binary, BINARIES)), root)
        # Network plugins may replace some of the CNI plugins, and imported images are removed: they are not listed.
        listed |= {} if binary.archive in ("programs", "images") else put
    for file in step.files:
        root.write(file.path, file.content, file.mode)
        if file.path == KUBECONFIG:
            # The kubelet may write it again.
            continue
        listed[file.path] = sha256(file.content), len(file.content)
    root.write(NODE_FILES, render_node_files(listed))


def _make_carried(step: plan.MakeCarried, system: System, _: Progress) -> None:
    system.make_private(CARRIED)
    for path in step.paths:
        system.make_directory(carried_directory(step.machine, path))


def _publish(step: plan.PublishRoot, system: System, _: Progress) -> None:
    """Record the node, sync its root file system, and only then give the root file system its final name.

    So a root file system that has its final name is complete, and has a record.
    """
    inode = system.link_inode(step.staged)
    if inode is None:
        raise AgentError(f"{step.staged} has disappeared", "run `unbounded-agent up` again")
    forget_tests(system, step.machine)
    # A switch of the root file system that this one replaces has lost its meaning.
    candidate = candidate_of(step.machine)
    if system.link_inode(machine_root(candidate)) is not None and not is_others_candidate(step.machine, system):
        # A killed `switch` has left it running. A refusal would come too late: the old root file system is gone.
        system.run("systemctl", "stop", machine_unit(candidate), timeout=STOP_LIMIT)
        _put_aside(step.machine, system)
        _forget_state(candidate, system)
    clear((other_root(step.machine), switch_directory(step.machine)), system, REMOVE_LIMIT)
    # The kubelet's certificates will be there from the first start on, and none of a root file system that is gone.
    clear((identity_directory(step.machine),), system, REMOVE_LIMIT)
    for path in (identity_door(step.machine), identity_directory(step.machine)):
        system.make_private(path)
    record = replace(step.record, inode=inode, made=time.time(), born=system.birth(step.staged))
    NODE_RECORDS.write(record_paths(step.machine), record, system)
    system.run("sync", "--file-system", system.full_path(step.staged), timeout=SYNC_LIMIT)
    system.rename(step.staged, machine_root(step.machine))


def _publish_candidate(step: plan.PublishCandidate, system: System, _: Progress) -> None:
    """Record the root file system, sync it, and give it the candidate's name."""
    inode = system.link_inode(step.staged)
    if inode is None:
        raise AgentError(f"{step.staged} has disappeared", f"run `unbounded-agent switch {step.machine}` again")
    record = replace(step.record, inode=inode, made=time.time(), born=system.birth(step.staged))
    NODE_RECORDS.write(root_records(step.machine, "next"), record, system)
    system.run("sync", "--file-system", system.full_path(step.staged), timeout=SYNC_LIMIT)
    system.rename(step.staged, machine_root(candidate_of(step.machine)))


def _use_again(step: plan.UseAgain, system: System, _: Progress) -> None:
    candidate = machine_root(candidate_of(step.machine))
    if system.link_inode(candidate) is None:
        system.rename(other_root(step.machine), candidate)


def _put_aside(machine: str, system: System) -> None:
    candidate = candidate_of(machine)
    root, record = machine_root(candidate), root_record(machine, "next", system)
    if isinstance(record, NodeRecord) and record.is_at(root, system):
        _require_stopped(candidate, system)
        clear((other_root(machine),), system, REMOVE_LIMIT)
        _make_movable(root, system)
        system.rename(root, other_root(machine))


def _require_stopped(machine: str, system: System) -> None:
    """Raise AgentError if the machine's unit runs, is about to start, or is in an unknown state."""
    unit = machine_unit(machine)
    found = observe_units([unit], system)[unit]
    state = "about to start" if found.starts else found.unit_state
    if isinstance(state, Unseen) or (isinstance(state, str) and state not in ("inactive", "failed")):
        why = f"in an unknown state: {state.why}" if isinstance(state, Unseen) else state
        raise AgentError(f"{unit} is {why}", f"stop it: `systemctl stop {unit}`; then run the same command again")


def _make_movable(root: str, system: System) -> None:
    """Raise AgentError if anything is mounted in a root file system, and let its directory be renamed."""
    refuse_mounts(root, system)
    if system.is_directory(root, follow=False):
        # Root in the machine may have forbidden the rename with `chattr +i /`.
        allow_removal(system.full_path(root))


def _exchange(step: plan.ExchangeRoots, system: System, _: Progress) -> None:
    """Swap the two root file systems of a stopped machine, unless that is done, and record which one is the machine's.

    The record of the node follows: a root file system with another inode number would count as somebody else's.
    """
    root, other = machine_root(step.machine), other_root(step.machine)
    record = root_record(step.machine, step.active, system)
    if not isinstance(record, NodeRecord):
        raise AgentError(record.why, f"restore {root_records(step.machine, step.active)[0]} from a backup")
    if not record.is_at(root, system):
        if not record.is_at(other, system):
            raise AgentError(f"{other} is not the {step.active} root file system", "see docs/upgrade.md")
        _require_stopped(step.machine, system)
        if step.active == "next":
            _record_former(step.machine, system)
        for path in (root, other):
            _make_movable(path, system)
        # With another toolkit, for example, pods may not be able to use what passed the test before.
        forget_tests(system, step.machine)
        system.exchange(root, other)
    NODE_RECORDS.write(record_paths(step.machine), record, system)


def _record_former(machine: str, system: System) -> None:
    former = NODE_RECORDS.read(record_paths(machine), system)
    if not isinstance(former, NodeRecord) or not former.is_at(machine_root(machine), system):
        why = f"{machine_root(machine)} was replaced since `up` made it"
        raise AgentError(why if isinstance(former, NodeRecord) else former.why, f"see `unbounded-agent up {machine}`")
    NODE_RECORDS.write(root_records(machine, "former"), former, system)


CERTIFICATE_FILES = 64
"""The largest number of the kubelet's files with certificates and keys. A rotation adds one each few months."""
CERTIFICATE_LIMIT = 1 << 16
"""Bytes of the largest of them."""


def _keep_identity(machine: str, system: System) -> None:
    """Copy the kubelet's certificates from a stopped machine's root file system to the host.

    That root file system is not trusted: no link leads out of it, and only regular files are read. The directory gets
    its name when it is complete.
    """
    kept = identity_directory(machine)
    if system.is_directory(kept, follow=False):
        return
    _require_stopped(machine, system)
    new, root = f"{kept}{PARTIAL}", system.image(machine_root(machine))
    clear((new,), system, REMOVE_LIMIT)
    for path in (identity_door(machine), new):
        system.make_private(path)
    for name in root.some_entries(KUBELET_CERTIFICATES, CERTIFICATE_FILES):
        path = f"{KUBELET_CERTIFICATES}/{name}"
        target = root.read_link(path)
        if target is None and root.is_file(path):
            system.write(f"{new}/{name}", root.read_untrusted(path, CERTIFICATE_LIMIT)[0], 0o600)
        elif target is not None and posixpath.dirname(target) in ("", KUBELET_CERTIFICATES):
            system.link(f"{new}/{name}", posixpath.basename(target))
    system.sync_directory(new)
    system.rename(new, kept)


def _remove_root(step: plan.RemoveRoot, system: System, _: Progress) -> None:
    """Remove a machine's root file system.

    Raises AgentError if the machine's unit runs, is about to start, or is in an unknown state, or if anything is
    mounted in the root file system. The directory is renamed first, so that the machine cannot start from what an
    interrupted removal leaves.
    """
    root = step.path
    _require_stopped(step.machine, system)
    aside = f"{staged_prefix(step.machine)}removed"
    clear((aside,), system, REMOVE_LIMIT)
    _make_movable(root, system)
    system.rename(root, aside)
    clear((aside, identity_directory(step.machine)), system, REMOVE_LIMIT)


def _remove_driver_roots(_: plan.RemoveDriverRoots, system: System, progress: Progress) -> None:
    with pass_lock(system, progress):
        remove_all(system)


def _change_unit(step: plan.ChangeUnit, system: System, _: Progress) -> None:
    system.run("systemctl", step.verb, step.unit, timeout=UNIT_LIMIT)
    if step.verb == "disable":
        # systemd ignores a masked unit, although the command succeeds. Otherwise it has removed both of these.
        system.remove(link := enabling_link(step.unit))
        system.remove_empty_directory(posixpath.dirname(link))


def _remove_leftover(network: NetworkSource, step: plan.RemoveLeftover, system: System, _: Progress) -> None:
    if isinstance(step.leftover, Chains):
        remove_chains(step.leftover, system)
    else:
        network.remove(step.leftover)


def _forget_state(machine: str, system: System) -> None:
    report = report_directory(machine)
    if system.is_mount(report):
        # The machine's unit mounts a file system there before each start.
        system.run("umount", "--lazy", report)
    clear((f"{MACHINES_STATE}/{machine}", f"{MACHINES_RUNTIME}/{machine}"), system, REMOVE_LIMIT)


def _forget_node(step: plan.ForgetNode, system: System, _: Progress) -> None:
    _forget_state(step.machine, system)
    clear((switch_directory(step.machine),), system, REMOVE_LIMIT)
    system.remove(cordoned_file(step.machine))
    system.remove(drained_file(step.machine))
    NODE_RECORDS.remove(record_paths(step.machine), system)


def _forget_host(_: plan.ForgetHost, system: System, __: Progress) -> None:
    clear((BINARIES,), system, REMOVE_LIMIT)
    plan.HOST_RECORD.remove(AS_FOUND, system)
