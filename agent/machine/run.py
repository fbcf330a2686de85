"""Runs the machine half: reads the handoff, settles it, and reports conditions that say what is wrong.

To settle a handoff, or a part of it, is to change the machine so that it matches what the handoff grants.
"""

import contextlib
from collections.abc import Iterable, Iterator

from agent import __version__
from agent.machine.cdi.outdated_pods import name_outdated
from agent.machine.cdi.spec import remove_stale_specs
from agent.machine.containerd.active import restart
from agent.machine.context import Context
from agent.machine.devices.former_grants import may_have_content, note_unknown_nodes, withdrawn_requests
from agent.machine.devices.nodes import WITHDRAWN
from agent.machine.kubelet.device_plugin import used_plugins
from agent.machine.repairs import repair_counts
from agent.machine.requests import Outcome, settle_request
from agent.machine.steps import attempt, with_remark_from
from agent.model.conditions import Condition, ConditionType, false, worst
from agent.model.device import FileIdentity
from agent.model.errors import AgentError, ApplyError, DocumentError
from agent.model.handoff import DRA, SIZE_LIMIT, Handoff, Publication, parse_handoff, render_report
from agent.model.paths import (
    ALLOCATABLE,
    CONDITIONS_NAME,
    HANDOFF_NAME,
    MACHINE_HANDOFF_DIRECTORY,
    MACHINE_REPORT_DIRECTORY,
    NODE_FILES,
    REPORT_NAME,
)
from agent.model.reasons import Reason
from agent.system.files import System
from agent.system.journal import ERROR, INFO, WARNING, say, say_changes
from agent.system.process import Runner

HANDOFF = f"{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}"
REPORT = f"{MACHINE_REPORT_DIRECTORY}/{REPORT_NAME}"
# The id of the machine's boot, not of the host's: nspawn mounts a new one at each start (setup_boot_id in nspawn.c).
BOOT_ID = "/proc/sys/kernel/random/boot_id"
ROUNDS = 5
"""How many handoffs one run may settle. The run itself checks for a new handoff, because systemd's path unit misses
changes while the service runs."""


def main(runner: Runner) -> int:
    """Run the machine half, log errors, and return the exit code.

    The code is 1 if an error kept a report from being written, or containerd from being restarted; otherwise 0. A
    missing handoff is not an error.
    """
    try:
        return run(System(runner))
    except (AgentError, OSError) as error:
        say(ERROR, str(error))
        return 1


def run(system: System) -> int:
    """Settle handoffs until a report answers the newest one, in at most ROUNDS rounds. Return exit code 0.

    Raises AgentError or OSError if the handoff is unusable, no report can be written, or containerd cannot be
    restarted.
    """
    outcome, failed = None, ""
    try:
        for settled in _rounds(system):
            outcome = settled
    except (AgentError, OSError) as error:
        failed = str(error)
        raise
    finally:
        # containerd is restarted only after all rounds: once it has stopped, it starts again only when this run ends
        # (see `restart`), and until then no pod can start. It is restarted even if no report could be written, because
        # pods need the new configuration all the same.
        if outcome and any(each.reason == Reason.RESTART_PENDING for each in outcome.conditions):
            _restart(system, failed)
    return 0


def _restart(system: System, failed: str) -> None:
    """Restart containerd.

    `failed` is the error that ended the rounds; empty if there was none. If the restart fails too, `failed` is logged
    here, because the caller gets only the error of the restart.
    """
    try:
        restart(system)
    except (AgentError, OSError):
        if failed:
            say(ERROR, failed)
        raise


def _rounds(system: System) -> Iterator[Outcome]:
    """Settle each new handoff, yield the outcome, and then report it, in at most ROUNDS rounds.

    Raises AgentError or OSError if the handoff is unusable, or no report can be written.
    """
    reported = None
    for rounds_left in reversed(range(ROUNDS)):
        try:
            # The file's identity is compared, not its content: after the host has bound missing nodes, it publishes the
            # handoff again with the same content, and this run must check the nodes again.
            published = system.identity(HANDOFF)
            if published == reported:
                break
            handoff = _read_handoff(system, published)
        except FileNotFoundError:
            say(
                INFO,
                f"{HANDOFF} does not exist: on the host, this machine is not configured, or unbounded-agent.service "
                "has not published anything for it yet",
            )
            break
        context = Context.of(system, handoff)
        outcome = settle(context)
        _log(context, outcome)
        yield outcome
        # If the host has published the handoff again during this round, the outcome is not reported: the host may have
        # bound the nodes that this outcome calls missing. In the last round, the outcome is reported in any case.
        if not (rounds_left and _is_outdated(published, system)):
            report(context, outcome, Publication(published.inode, published.mtime_ns))
            reported = published
        _sync(context)


def _read_handoff(system: System, published: FileIdentity) -> Handoff:
    """Return the handoff. If it cannot be used, report that to the host, and raise DocumentError. Raises OSError."""
    content = system.read(HANDOFF, SIZE_LIMIT)
    try:
        return parse_handoff(content)
    except DocumentError as error:
        publication = Publication(published.inode, published.mtime_ns)
        # The caller logs the error in any case.
        with contextlib.suppress(OSError):
            boot_id = system.read(BOOT_ID, 64).decode().strip()
            report = render_report("", (), (), boot_id, __version__, {}, publication=publication, refused=str(error))
            system.write(REPORT, report)
        raise


def _log(context: Context, outcome: Outcome) -> None:
    notes, before = context.notes, {}
    # An error must not keep the report from being written. Without the note, each run logs everything.
    with contextlib.suppress(OSError):
        before = notes.load("logged")
    now = say_changes(before, outcome.conditions)
    with contextlib.suppress(OSError):
        notes.save("logged", now)


def _sync(context: Context) -> None:
    for path in context.unsynced:
        try:
            context.system.sync(path)
        except OSError as error:
            say(WARNING, f"cannot sync {path}: {error}")


def _is_outdated(published: FileIdentity, system: System) -> bool:
    """Return whether the host has published the handoff again since the file had this identity."""
    try:
        return system.identity(HANDOFF) != published
    except FileNotFoundError:
        return False


def settle(context: Context) -> Outcome:
    """Settle all requests, and merge their conditions into one of each type."""
    remove_stale_specs(context)
    not_noted = note_unknown_nodes(context)
    requests = (*context.handoff.requests, *withdrawn_requests(context))
    outcomes = [settle_request(context, each, lambda: _newest(context.system)) for each in requests]
    node_condition = _node_condition(context)
    all_conditions = (*not_noted, *(condition for outcome in outcomes for condition in outcome.conditions))
    conditions = _merged((*all_conditions, *_offered(context, outcomes)))
    if any(request.gpus for request in context.handoff.requests):
        conditions = with_remark_from(
            conditions,
            ConditionType.CDI_SPEC_CURRENT,
            "which pods are outdated",
            lambda: name_outdated(context, conditions),
        )
    if may_have_content(context.notes, WITHDRAWN):
        conditions = with_remark_from(
            conditions,
            ConditionType.DEVICES_ALLOWED,
            "which processes still have nodes open that are no longer granted",
            lambda: _name_left_open(context, conditions),
        )
    return Outcome(
        (*conditions, *((node_condition,) if node_condition else ())),
        tuple(device for outcome in outcomes for device in outcome.devices),
        fabric=tuple(answer for outcome in outcomes for answer in outcome.fabric),
    )


def _offered(context: Context, outcomes: Iterable[Outcome]) -> tuple[Condition, ...]:
    """If the node itself is to offer its GPUs, publish the devices that claims can have, and return GPUsAdvertised.

    Otherwise, remove what was published, and return an empty tuple.
    """
    if context.handoff.allocation != DRA:
        with contextlib.suppress(OSError):
            context.system.remove(ALLOCATABLE)
        return ()
    # Imported here: only nodes with Dynamic Resource Allocation need it.
    from agent.machine.kubelet.offered import settle_offer

    vendors = [each.allocatable for each in outcomes if each.allocatable]
    return (attempt(ConditionType.GPUS_ADVERTISED, lambda: settle_offer(context, vendors)),)


def _node_condition(context: Context) -> Condition | None:
    try:
        if not context.system.exists(f"{MACHINE_HANDOFF_DIRECTORY}/{CONDITIONS_NAME}"):
            return None
        # Imported only if the condition is configured: the import takes a tenth of a run that changes nothing.
        from agent.machine.kubelet.node_condition import reported

        return reported(context.notes)
    except OSError as error:
        return false(ConditionType.NODE_CONDITION_SET, Reason.FAILED, str(error))


def _name_left_open(context: Context, conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    # Imported only after a device was withdrawn, because it is rarely needed.
    from agent.machine.devices.left_open import name_left_open

    return name_left_open(context, conditions)


def report(context: Context, outcome: Outcome, publication: Publication) -> None:
    """Write the report. Every run writes it, even without a change, because it is also the machine's heartbeat."""
    system = context.system
    if not system.is_directory(MACHINE_REPORT_DIRECTORY):
        raise ApplyError(
            f"{MACHINE_REPORT_DIRECTORY} is missing, so nothing can be reported",
            "the host binds it: run `unbounded-agent apply` there, then restart the machine",
        )
    boot_id = system.read(BOOT_ID, 64).decode().strip()
    advertised = next((each.advertised for each in outcome.conditions if each.advertised is not None), None)
    document = render_report(
        context.generation,
        outcome.conditions,
        outcome.devices,
        boot_id,
        __version__,
        repair_counts(context.notes),
        advertised,
        _changed_files(context),
        publication,
        outcome.fabric,
    )
    system.write(REPORT, document)


def _changed_files(context: Context) -> tuple[str, ...]:
    """Return the paths of the files that `up` put into this machine and that have changed since."""
    # An error must not keep the report from being written. The next run compares again.
    with contextlib.suppress(OSError):
        if context.system.exists(NODE_FILES):
            # Imported here: only machines that `up` made have the list.
            from agent.machine.kubelet.changed_files import changed_files

            return changed_files(context)
    return ()


def _newest(system: System) -> Handoff | None:
    """Return the current handoff, which may be newer than the one that this run settles; None if it cannot be read."""
    try:
        return parse_handoff(system.read(HANDOFF, SIZE_LIMIT))
    except (AgentError, OSError):
        return None


def _merged(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    """Merge the conditions of each type into one, as `worst` does. `used_plugins` says which conditions count.

    If one of the conditions has the reason WrongNode, the merged condition has this reason, because it makes the host
    bind nodes.
    """
    by_type: dict[ConditionType, list[Condition]] = {}
    for each in conditions:
        by_type.setdefault(each.type, []).append(each)
    merged = []
    for same_type in by_type.values():
        wrong_node = any(each.reason == Reason.WRONG_NODE for each in same_type)
        found = worst(used_plugins(same_type))
        merged.append(found._replace(reason=Reason.WRONG_NODE) if wrong_node else found)
    return tuple(merged)
