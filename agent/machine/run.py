"""Runs the machine half: reads the handoff, settles the machine, and reports conditions that say what is wrong."""

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

from agent import __version__
from agent.machine.cdi.outdated_pods import name_outdated
from agent.machine.cdi.spec import Published, publish_spec, remove_stale_specs
from agent.machine.containerd.active import check_active, restart
from agent.machine.containerd.configure import configure_runtime
from agent.machine.context import Context
from agent.machine.devices.former_grants import may_have, note_unknown_nodes, withdrawn_requests
from agent.machine.devices.nodes import (
    WITHDRAWN,
    check_devices,
    unmount_removed,
    with_hidden_driver,
    withdraw_nodes,
)
from agent.machine.kubelet.device_plugin import FIXED_BY_RESTART, check_advertised, used_plugins
from agent.machine.kubelet.validation_markers import settle_markers
from agent.machine.libraries.link import link_libraries
from agent.machine.repairs import repairs
from agent.machine.steps import InBackground, attempt, with_remark_from
from agent.machine.vendors import machine_vendor
from agent.model.conditions import Condition, ConditionType, Status, false, not_applicable, unknown, worst
from agent.model.device import FileIdentity
from agent.model.errors import AgentError, ApplyError
from agent.model.handoff import (
    OTHER_DEVICES,
    SIZE_LIMIT,
    Handoff,
    Request,
    parse_handoff,
    render_report,
    with_remark,
)
from agent.model.paths import (
    CONDITIONS_NAME,
    HANDOFF_NAME,
    MACHINE_HANDOFF_DIRECTORY,
    MACHINE_REPORT_DIRECTORY,
    REPORT_NAME,
)
from agent.model.reasons import Reason
from agent.system.files import System
from agent.system.journal import ERROR, INFO, say, say_changes
from agent.system.process import Runner
from agent.vendors.machine_vendor import MachineVendor

HANDOFF = f"{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}"
REPORT = f"{MACHINE_REPORT_DIRECTORY}/{REPORT_NAME}"
# The id of the machine's boot, not of the host's: nspawn mounts a new one at each start (setup_boot_id in nspawn.c).
BOOT_ID = "/proc/sys/kernel/random/boot_id"
ROUNDS = 5
"""How many handoffs one run may settle. A run itself looks for a changed handoff, because systemd's path unit misses
changes while the service runs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of settling one request, or all requests."""

    conditions: tuple[Condition, ...]
    devices: tuple[str, ...] = ()
    """Names of the CDI devices that pods can request."""
    counts_repairs: bool = True
    """Whether the host half accepts counts of repairs in the report."""


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
    """Settle the machine until the report answers the last published handoff, and return exit code 0.

    Raises AgentError or OSError if the handoff is unusable, no report can be written, or containerd cannot restart.
    """
    reported, outcome = None, None
    for rounds_left in reversed(range(ROUNDS)):
        try:
            # The file's identity is compared, not its content: after binding missing nodes, the host publishes an
            # unchanged handoff again.
            published = system.identity(HANDOFF)
            if published == reported:
                break
            handoff = parse_handoff(system.read(HANDOFF, SIZE_LIMIT))
        except FileNotFoundError:
            say(INFO, "no handoff: this machine is not configured on its host")
            break
        context = Context.of(system, handoff)
        outcome = settle(context)
        _log(context, outcome)
        if rounds_left and _is_outdated(published, system):
            # Not reported: the host may have bound missing nodes since, and would take this report for the answer.
            continue
        report(context, outcome)
        reported = published
    if outcome and any(each.reason == Reason.RESTART_PENDING for each in outcome.conditions):
        # After all rounds, because containerd starts again only when this run ends: until then there is no CRI.
        restart(system)
    return 0


def _log(context: Context, outcome: Outcome) -> None:
    notes, before = context.notes, {}
    # An error must not keep the report from being written. Without the note, each run logs everything.
    with contextlib.suppress(OSError):
        before = notes.load("logged")
    now = say_changes(before, outcome.conditions)
    with contextlib.suppress(OSError):
        notes.save("logged", now)


def _is_outdated(published: FileIdentity, system: System) -> bool:
    """Return whether the host has published the handoff again since the file had this identity."""
    try:
        return system.identity(HANDOFF) != published
    except FileNotFoundError:
        return False


def settle(context: Context) -> Outcome:
    """Settle all requests, and merge their conditions: the worst one of each type is reported."""
    remove_stale_specs(context)
    noting_failed = note_unknown_nodes(context)
    outcomes = [_settle_request(context, each) for each in (*context.handoff.requests, *withdrawn_requests(context))]
    node_condition = _node_condition(context)
    conditions = _merged((*noting_failed, *(condition for outcome in outcomes for condition in outcome.conditions)))
    if any(request.gpus for request in context.handoff.requests):
        conditions = with_remark_from(
            conditions,
            ConditionType.CDI_SPEC_CURRENT,
            "which pods are outdated",
            lambda: name_outdated(context, conditions),
        )
    if may_have(context.notes, WITHDRAWN):
        conditions = with_remark_from(
            conditions,
            ConditionType.DEVICES_ALLOWED,
            "which processes have withdrawn nodes open",
            lambda: _name_left_open(context, conditions),
        )
    return Outcome(
        (*conditions, *((node_condition,) if node_condition else ())),
        tuple(device for outcome in outcomes for device in outcome.devices),
        counts_repairs=context.handoff.restart_device_plugin is not None,
    )


def _node_condition(context: Context) -> Condition | None:
    try:
        if not context.system.exists(f"{MACHINE_HANDOFF_DIRECTORY}/{CONDITIONS_NAME}"):
            return None
    except OSError as error:
        return false(ConditionType.NODE_CONDITION_SET, Reason.FAILED, str(error))
    # Imported only if the condition is configured: the import takes a tenth of a run that changes nothing.
    from agent.machine.kubelet.node_condition import reported

    return reported(context.system, context.notes, time.time())


def _name_left_open(context: Context, conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    # Imported only after a device was withdrawn, because it is rarely needed.
    from agent.machine.devices.left_open import name_left_open

    return name_left_open(context, conditions)


def report(context: Context, outcome: Outcome) -> None:
    """Write the report. Every run writes it, even without a change, because it is also the heartbeat."""
    system = context.system
    if not system.is_directory(MACHINE_REPORT_DIRECTORY):
        raise ApplyError(
            f"{MACHINE_REPORT_DIRECTORY} is missing, so nothing can be reported",
            "the host binds it: run `unbounded-agent apply` there, then restart the machine",
        )
    # The limit is small, because the kernel refuses reads of KMALLOC_MAX_SIZE bytes or more in /proc/sys (ENOMEM).
    boot_id = system.read(BOOT_ID, 64).decode().strip()
    counts = repairs(context.notes) if outcome.counts_repairs else None
    document = render_report(context.generation, outcome.conditions, outcome.devices, boot_id, __version__, counts)
    system.write(REPORT, document)


def _settle_request(context: Context, request: Request) -> Outcome:
    if request.vendor == OTHER_DEVICES:
        # Imported here: few machines are granted other devices.
        from agent.machine.devices.other_devices import settle_others

        return Outcome(settle_others(context, request, _newest(context.system)))
    vendor = machine_vendor(request.vendor)
    if vendor is None:
        message = f"the image's agent does not support vendor {request.vendor}: bring the image to the host's release"
        return Outcome((false(ConditionType.CDI_SPEC_CURRENT, Reason.UNKNOWN_VENDOR, message),))
    return _settle_gpus(context, vendor, request)


def _settle_gpus(context: Context, vendor: MachineVendor, request: Request) -> Outcome:
    devices = InBackground(ConditionType.DEVICES_ALLOWED, lambda: _devices(context, vendor, request))
    linked = attempt(ConditionType.LIBRARIES_LINKED, lambda: _linked(context, vendor, request))
    published = Published(unknown(ConditionType.CDI_SPEC_CURRENT, Reason.NOT_TRIED, ""))

    def publish() -> Condition:
        nonlocal published
        published = publish_spec(context, vendor, request)
        return published.condition

    # The generator may be running already, so steps that do not need its result come first.
    configured = attempt(ConditionType.RUNTIME_CONFIGURED, lambda: configure_runtime(context, vendor, request))
    active = InBackground(ConditionType.RUNTIME_ACTIVE, lambda: check_active(context, configured))
    described, modes_remark = attempt(ConditionType.CDI_SPEC_CURRENT, publish), ""
    if request.cdi_modes:
        from agent.machine.cdi.modes import publish_modes

        modes_remark = publish_modes(context, vendor, request)
    # Nodes are withdrawn only now: as long as a published specification lists a node, new pods may get the node.
    removed, withdrawn = withdraw_nodes(context, request, _newest(context.system))
    if (removed or withdrawn) and described.status is not Status.TRUE:
        # Tried again: the generator lists every GPU that has a node, so only now does it omit a withdrawn GPU. The
        # first attempt may also have failed because a note could not be written.
        described = attempt(ConditionType.CDI_SPEC_CURRENT, publish)
    (described,) = with_remark((described,), described.type, modes_remark)
    advertised = _advertised(context, vendor, request, published)
    found = (linked, configured, active.condition(), devices.condition(), described, advertised)
    conditions = (*found, *settle_markers(context, vendor, request, found))
    names = published.devices
    if len(context.handoff.requests) > 1:
        # Qualified, because each vendor has a device `all`, and a report must not have a name twice.
        names = tuple(f"{vendor.spec_kind}={name}" for name in names)
    return Outcome((*conditions, *((withdrawn,) if withdrawn else ())), names)


def _advertised(context: Context, vendor: MachineVendor, request: Request, published: Published) -> Condition:
    kind = ConditionType.GPUS_ADVERTISED
    found = attempt(kind, lambda: check_advertised(context, vendor, request, published.devices))
    if not context.handoff.restart_device_plugin or found.reason not in FIXED_BY_RESTART:
        return found
    # Imported only if a restart is configured and needed.
    from agent.machine.kubelet.plugin_restart import restart_plugin

    return attempt(kind, lambda: restart_plugin(context, vendor, found))


def _linked(context: Context, vendor: MachineVendor, request: Request) -> Condition:
    if not vendor.driver_files:
        # Imported here: few machines need it. Links into a driver root, if any, stay: they are another vendor's.
        from agent.machine.devices.dri_links import link_dri_nodes

        link_dri_nodes(context, request)
        return not_applicable(ConditionType.LIBRARIES_LINKED, "no driver files are granted to this machine")
    return link_libraries(context, request, vendor.data_directories)


def _devices(context: Context, vendor: MachineVendor, request: Request) -> Condition:
    # Unmounted before the check: as soon as the condition reports wrong nodes, the host binds new ones.
    unmount_removed(context.system, (*(device.path for device in request.devices), *vendor.bound_directories(request)))
    if request.devices or context.notes.load(f"char-links-{vendor.name}"):
        # Imported only if there is a node.
        from agent.machine.devices.char_links import link_nodes

        link_nodes(context, request)
    condition = check_devices(context, request)
    return with_hidden_driver(context.system, condition, vendor.kernel_paths)


def _newest(system: System) -> Handoff | None:
    """Return the current handoff, which may be newer than the one that this run settles; None if it cannot be read."""
    try:
        return parse_handoff(system.read(HANDOFF, SIZE_LIMIT))
    except (AgentError, OSError):
        return None


def _merged(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    """Return the worst condition of each type, with reason WrongNode if one has it: then the host binds nodes again."""
    by_type: dict[ConditionType, list[Condition]] = {}
    for each in conditions:
        by_type.setdefault(each.type, []).append(each)
    for found in by_type.values():
        found.sort(key=lambda each: each.reason != Reason.WRONG_NODE)
    return tuple(worst(used_plugins(found)) for found in by_type.values())
