"""A run of the machine half: reads the handoff, settles the machine, and reports.

What is not as it should be in the machine is said by the report's conditions.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from agent import __version__
from agent.conditions import Condition, ConditionType, Status, false, not_applicable, unknown, worst
from agent.errors import AgentError, ApplyError
from agent.handoff import (
    SIZE_LIMIT,
    Handoff,
    Request,
    parse_handoff,
    render_report,
    with_remark,
)
from agent.identity import FileIdentity
from agent.inside.attempts import Beside, attempt, named
from agent.inside.devices import (
    GRANTED,
    WITHDRAWN,
    WRONG_NODE,
    check_devices,
    unmount_removed,
    with_hidden_driver,
    withdraw_nodes,
)
from agent.inside.journal import ERROR, INFO, say, say_changes
from agent.inside.kubelet import RESTART_MENDS, check_advertised, used_plugins
from agent.inside.libraries import link_libraries
from agent.inside.notes import Notes, Owned
from agent.inside.outdated_pods import name_outdated
from agent.inside.repairs import repairs
from agent.inside.runtime import configure_runtime
from agent.inside.runtime_active import RESTART_PENDING, check_active, restart
from agent.inside.spec import Published, publish_spec, remove_stale_specs
from agent.paths import (
    CONDITIONS_NAME,
    HANDOFF_NAME,
    MACHINE_HANDOFF_DIRECTORY,
    MACHINE_REPORT_DIRECTORY,
    REPORT_NAME,
    spec_file,
)
from agent.system.commands import Runner
from agent.system.files import System
from agent.vendors.machine import OTHER_DEVICES, VENDOR_NAMES, machine_vendor
from agent.vendors.machine_protocol import MachineVendor

HANDOFF = f"{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}"
REPORT = f"{MACHINE_REPORT_DIRECTORY}/{REPORT_NAME}"
# nspawn mounts a new random one over it at each start of a machine (setup_boot_id in nspawn.c), so that it tells the
# machine's boots apart, not the host's.
BOOT_ID = "/proc/sys/kernel/random/boot_id"
ROUNDS = 5
"""systemd's path units lose a change that comes while the service runs, so the service itself looks again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request came to."""

    conditions: tuple[Condition, ...]
    devices: tuple[str, ...] = ()
    counts_repairs: bool = True
    """Whether the host half is one that knows of them."""


def main(runner: Runner) -> int:
    """Exit code 0 when a report was written or there is no handoff, else 1; 1 too when containerd cannot restart."""
    try:
        return run(System(runner))
    except (AgentError, OSError) as error:
        say(ERROR, str(error))
        return 1


def run(system: System) -> int:
    """Until what was reported on is what the host published last.

    Raises AgentError or OSError when no report can be written, or containerd not be restarted.
    """
    reported, outcome = None, None
    for left in reversed(range(ROUNDS)):
        try:
            # Not the generation: the host publishes the same once more after it has bound nodes that were missing.
            published = system.identity(HANDOFF)
            if published == reported:
                break
            handoff = parse_handoff(system.read(HANDOFF, SIZE_LIMIT))
        except FileNotFoundError:
            say(INFO, "no handoff: this machine is not configured on its host")
            break
        # A digest of the whole: made once, not wherever it is needed.
        generation = handoff.generation
        outcome = settle(system, handoff, generation)
        notes = Notes(system)
        notes.save("logged", say_changes(notes.load("logged"), outcome.conditions))
        if left and _is_older(published, system):
            # Else the host would take what was missing before it bound that for the answer.
            continue
        report(system, generation, outcome)
        reported = published
    if outcome and any(each.reason == RESTART_PENDING for each in outcome.conditions):
        # After all rounds: each one that came behind it would prolong the time without a CRI.
        restart(system)
    return 0


def _is_older(published: FileIdentity, system: System) -> bool:
    """Whether the host has published since."""
    try:
        return system.identity(HANDOFF) != published
    except FileNotFoundError:
        return False


def settle(system: System, handoff: Handoff, generation: str) -> Outcome:
    """Every request's steps; conditions of several requests are merged, the worst one counts."""
    notes, owned = Notes(system), Owned(system)
    remove_stale_specs(system, owned, handoff.requests)
    requests = (*handoff.requests, *_given_up(notes, owned, handoff))
    outcomes = [_settle_request(system, notes, owned, each, handoff, generation) for each in requests]
    on_node = _reported_of_node(system, notes)
    conditions = _merged(condition for outcome in outcomes for condition in outcome.conditions)
    if any(request.gpus for request in handoff.requests):
        conditions = named(
            conditions,
            ConditionType.CDI_SPEC_CURRENT,
            "which pods are outdated",
            lambda: name_outdated(conditions, system, notes, handoff),
        )
    if notes.load(WITHDRAWN):
        conditions = named(
            conditions,
            ConditionType.DEVICES_ALLOWED,
            "who has withdrawn nodes open",
            lambda: _name_left_open(conditions, system, notes, handoff),
        )
    return Outcome(
        (*conditions, *((on_node,) if on_node else ())),
        tuple(device for outcome in outcomes for device in outcome.devices),
        counts_repairs=handoff.restart_device_plugin is not None,
    )


def _given_up(notes: Notes, owned: Owned, handoff: Handoff) -> list[Request]:
    """Of vendors that the handoff does not name any more: what the machine has of them is to be taken back."""
    named = {request.vendor for request in handoff.requests}
    return [
        Request(name, (), ())
        for name in (*VENDOR_NAMES, OTHER_DEVICES)
        if name not in named and (owned.has(spec_file(name)) or notes.load(f"{GRANTED}{name}"))
    ]


def _reported_of_node(system: System, notes: Notes) -> Condition | None:
    if not system.exists(f"{MACHINE_HANDOFF_DIRECTORY}/{CONDITIONS_NAME}"):
        return None
    # Only where the host half asks for it: loading it takes a tenth of a run that changes nothing.
    from agent.inside.node_condition import reported

    return reported(system, notes, time.time())


def _name_left_open(
    conditions: tuple[Condition, ...], system: System, notes: Notes, handoff: Handoff
) -> tuple[Condition, ...]:
    # Only after a GPU has gone, as it is rarely needed and looks at every process.
    from agent.inside.left_open import name_left_open

    granted = [device for request in handoff.requests for device in request.devices]
    return name_left_open(conditions, system, notes, granted)


def report(system: System, generation: str, outcome: Outcome) -> None:
    """Also the heartbeat: written in every run, whether or not something changed."""
    if not system.is_directory(MACHINE_REPORT_DIRECTORY):
        raise ApplyError(
            f"{MACHINE_REPORT_DIRECTORY} is missing, so that nothing can be reported",
            "it is bound in by the host: `unbounded-agent apply` there, then restart the machine",
        )
    # A limit of its own: the kernel refuses reads of /proc/sys by KMALLOC_MAX_SIZE and more (ENOMEM).
    boot_id = system.read(BOOT_ID, 64).decode().strip()
    counts = repairs(Notes(system)) if outcome.counts_repairs else None
    document = render_report(generation, outcome.conditions, outcome.devices, boot_id, __version__, counts)
    system.write(REPORT, document)


def _settle_request(
    system: System, notes: Notes, owned: Owned, request: Request, handoff: Handoff, generation: str
) -> Outcome:
    if request.vendor == OTHER_DEVICES:
        # Only here, as few machines are given any.
        from agent.inside.other_devices import settle_others

        return Outcome(settle_others(system, notes, request, _newest(system)))
    vendor = machine_vendor(request.vendor)
    if vendor is None:
        message = f"this image's agent does not know vendor {request.vendor}: bring it to the host's release"
        return Outcome((false(ConditionType.CDI_SPEC_CURRENT, "UnknownVendor", message),))
    devices = Beside(ConditionType.DEVICES_ALLOWED, lambda: _devices(system, notes, vendor, request, generation))
    linked = attempt(
        ConditionType.LIBRARIES_LINKED, lambda: _linked(system, notes, vendor, request, handoff.architecture)
    )
    published = Published(unknown(ConditionType.CDI_SPEC_CURRENT, "NotTried", ""))

    def publish() -> Condition:
        nonlocal published
        published = publish_spec(system, notes, owned, vendor, request, generation)
        return published.condition

    # The generator may have been started early: what does not depend on it comes before its result.
    configured = attempt(
        ConditionType.RUNTIME_CONFIGURED, lambda: configure_runtime(system, notes, owned, vendor, request, handoff)
    )
    active = Beside(ConditionType.RUNTIME_ACTIVE, lambda: check_active(system, notes, configured))
    described, of_modes = attempt(ConditionType.CDI_SPEC_CURRENT, publish), ""
    if request.cdi_modes:
        from agent.inside.cdi_modes import publish_modes

        of_modes = publish_modes(system, notes, owned, vendor, request, handoff)
    advertised = ConditionType.GPUS_ADVERTISED
    # The specs first: from then on no pod is given a node that goes.
    removed, withdrawn = withdraw_nodes(system, notes, request, _newest(system))
    if removed and described.status is not Status.TRUE:
        # The generator lists what has a node, also a GPU that goes: only now can it make a spec without that.
        described = attempt(ConditionType.CDI_SPEC_CURRENT, publish)
    on_node = attempt(advertised, lambda: check_advertised(system, notes, vendor, request, published.devices))
    if handoff.restart_device_plugin and on_node.reason in RESTART_MENDS:
        # Only where it is asked for and due, as with the condition on the Node.
        from agent.inside.plugin_restart import restart_plugin

        needed = on_node
        on_node = attempt(advertised, lambda: restart_plugin(system, notes, vendor, needed))
    (described,) = with_remark((described,), described.type, of_modes)
    conditions = (linked, configured, active.condition(), devices.condition(), described, on_node)
    names = published.devices
    if len(handoff.requests) > 1:
        # Each vendor has an `all`, and a report each name once.
        names = tuple(f"{vendor.spec_kind}={name}" for name in names)
    return Outcome((*conditions, *((withdrawn,) if withdrawn else ())), names)


def _linked(system: System, notes: Notes, vendor: MachineVendor, request: Request, architecture: str) -> Condition:
    if not vendor.driver_files:
        # Only here, as few machines need it. The links into a driver root that are there are another vendor's.
        from agent.inside.dri_links import link_dri_nodes

        link_dri_nodes(system, notes, request)
        return not_applicable(ConditionType.LIBRARIES_LINKED, "no driver files are granted to this machine")
    return link_libraries(system, notes, request, architecture, vendor.data_directories)


def _devices(system: System, notes: Notes, vendor: MachineVendor, request: Request, generation: str) -> Condition:
    # First: the host binds anew what the condition then says to be wrong.
    unmount_removed(system, (*(device.path for device in request.devices), *vendor.bound_directories(request)))
    if request.devices or notes.load(f"char-links-{vendor.name}"):
        # Only where there is a node.
        from agent.inside.char_links import link_nodes

        link_nodes(system, notes, request)
    condition = check_devices(system, notes, request, generation)
    return with_hidden_driver(system, condition, vendor.kernel_paths)


def _newest(system: System) -> Handoff | None:
    """The handoff as it is now: the host may have published another one meanwhile."""
    try:
        return parse_handoff(system.read(HANDOFF, SIZE_LIMIT))
    except (AgentError, OSError):
        return None


def _merged(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    """One of each type; of several words for DevicesAllowed that by which the host binds nodes anew."""
    by_type: dict[ConditionType, list[Condition]] = {}
    for each in conditions:
        by_type.setdefault(each.type, []).append(each)
    for found in by_type.values():
        found.sort(key=lambda each: each.reason != WRONG_NODE)
    return tuple(worst(used_plugins(found)) for found in by_type.values())
