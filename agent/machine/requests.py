"""Settles one request of the handoff: devices, libraries, CDI specification and containerd's configuration."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from agent.machine.cdi.spec import Published, publish_spec
from agent.machine.containerd.active import check_active
from agent.machine.containerd.configure import configure_runtime
from agent.machine.context import Context
from agent.machine.devices.nodes import check_devices, unmount_removed, with_hidden_driver, withdraw_nodes
from agent.machine.failures import LONGEST, Failure, next_attempt, publications
from agent.machine.kubelet.device_plugin import FIXED_BY_RESTART, check_advertised
from agent.machine.kubelet.validation_markers import settle_markers
from agent.machine.libraries.link import link_libraries
from agent.machine.steps import InBackground, attempt
from agent.machine.vendors import machine_vendor
from agent.model.conditions import Condition, ConditionType, Status, false, not_applicable, unknown
from agent.model.digest import json_digest
from agent.model.handoff import DRA, OTHER_DEVICES, SIZE_LIMIT, FabricAnswer, Handoff, Request, with_remark
from agent.model.paths import FABRIC_NAME, MACHINE_HANDOFF_DIRECTORY
from agent.model.reasons import Reason
from agent.system.files import System
from agent.system.journal import WARNING, say
from agent.vendors.machine_vendor import MachineVendor

if TYPE_CHECKING:
    from agent.model.allocatable import AllocatableVendor


class Outcome(NamedTuple):
    """The result of settling one request, or all requests."""

    conditions: tuple[Condition, ...]
    devices: tuple[str, ...] = ()
    """Names of the CDI devices that pods can request."""
    allocatable: "AllocatableVendor | None" = None
    """Only in the result of one request for GPUs: the devices that claims can have; None without Dynamic Resource
    Allocation."""
    fabric: tuple[FabricAnswer, ...] = ()
    """What the GPUs say of their registration with the fabric."""


def settle_request(context: Context, request: Request, read_newest: Callable[[], Handoff | None]) -> Outcome:
    """Bring the machine in line with one request of the handoff, and return the result.

    `read_newest` returns the current handoff, which may be newer than that of the request; None if it cannot be read.
    """
    if request.vendor == OTHER_DEVICES:
        # Imported here: few machines are granted other devices.
        from agent.machine.devices.other_devices import settle_others

        return Outcome(settle_others(context, request, read_newest()))
    vendor = machine_vendor(request.vendor)
    if vendor is None:
        message = f"the image's agent does not support vendor {request.vendor}: update it to the host agent's release"
        return Outcome((false(ConditionType.CDI_SPEC_CURRENT, Reason.UNKNOWN_VENDOR, message),))
    return _settle_gpus(context, vendor, request, read_newest)


def _settle_gpus(
    context: Context, vendor: MachineVendor, request: Request, read_newest: Callable[[], Handoff | None]
) -> Outcome:
    devices = InBackground(lambda: attempt(ConditionType.DEVICES_ALLOWED, lambda: _devices(context, vendor, request)))
    # The generator may be running already (agent.machine.prefetch), so steps that do not need its result come first.
    configured = attempt(ConditionType.RUNTIME_CONFIGURED, lambda: configure_runtime(context, vendor, request))
    active = InBackground(lambda: attempt(ConditionType.RUNTIME_ACTIVE, lambda: check_active(context, configured)))
    linked = attempt(ConditionType.LIBRARIES_LINKED, lambda: _linked(context, vendor, request))
    # nvidia-smi needs the libraries. The GPUs are asked while the generator has them open too.
    fabric = InBackground(lambda: _fabric(context, vendor, request))
    published = Published(unknown(ConditionType.CDI_SPEC_CURRENT, Reason.NOT_TRIED, ""))

    def publish(*, at_once: bool = False) -> Condition:
        nonlocal published
        published = publish_spec(context, vendor, request, at_once=at_once)
        return published.condition

    spec_condition, modes_remark, left_out = attempt(ConditionType.CDI_SPEC_CURRENT, publish), "", False
    if request.cdi_modes:
        from agent.machine.cdi.modes import publish_modes

        modes_remark, left_out = publish_modes(context, vendor, request)
    # Nodes are withdrawn only now: as long as a published specification lists a node, new pods may get the node.
    removed, not_withdrawn = withdraw_nodes(context, request, read_newest())
    if (removed or not_withdrawn) and spec_condition.status is not Status.TRUE:
        # Try again. The generator lists every GPU that has a node, so it omits the withdrawn GPUs only now that their
        # nodes are gone. If there is a condition `not_withdrawn`, some nodes may be gone even though `removed` is empty
        # (the removal of a node could not be noted), so try again in this case too. But that condition may last, so an
        # attempt then waits as usual.
        spec_condition = attempt(ConditionType.CDI_SPEC_CURRENT, lambda: publish(at_once=bool(removed)))
    if left_out and spec_condition.reason == Reason.VERIFIED:
        spec_condition = spec_condition._replace(reason=Reason.EDITS_LEFT_OUT)
    (spec_condition,) = with_remark((spec_condition,), spec_condition.type, modes_remark)
    conditions: tuple[Condition, ...]
    conditions = (linked, configured, active.result(), devices.result(), spec_condition)
    conditions += _advertised(context, vendor, request, published)
    conditions += settle_markers(context, vendor, request, conditions)
    names = published.devices
    if len(context.handoff.requests) > 1:
        # The names are qualified, because each vendor has a device `all`, and a report must not have a name twice.
        names = tuple(f"{vendor.spec_kind}={name}" for name in names)
    conditions += (not_withdrawn,) if not_withdrawn else ()
    allocatable = _allocatable(context, vendor, request, published.devices, spec_condition)
    return Outcome(conditions, names, allocatable, fabric.result())


def _fabric(context: Context, vendor: MachineVendor, request: Request) -> tuple[FabricAnswer, ...]:
    """Return what the GPUs say of their registration with the fabric.

    To ask a GPU is to open it. So the GPUs are asked only when the host publishes something: a handoff, or the same one
    again, as `gpus attach` does after a reset, the states of GPUs, or what their fabric depends on. Until all are
    registered, they are asked again, as often as Failure allows. Nor are they asked more often because the Fabric
    Manager dies again and again, although the host publishes each of its starts.
    """
    if not request.gpus:
        return ()
    note, host = f"fabric-{vendor.name}", [context.generation, _on_host(context.system)]
    cause = json_digest([*host, publications(context)])
    try:
        noted, now = context.notes.load(note), time.monotonic()
        same = noted.get("cause") == cause
        since, until = _waiting(host, noted, now, same=same)
        answers = tuple(FabricAnswer(*each) for each in noted["answers"]) if same or now < until else None
        if answers is not None and now < until:
            return answers
        failure = Failure.of(context, f"{note}-failed", cause)
        if answers is not None and (vendor.fabric_settled(request, answers) or failure.noted()):
            return answers
        answers = vendor.query_fabric(context.system, request)
        if not vendor.fabric_settled(request, answers):
            failure.save(message="not all GPUs are registered")
        if not same:
            since, until = next_attempt(since, now)
        asked = {"cause": cause, "host": host, "since": since, "until": until}
        context.notes.save(note, {**asked, "answers": [list(each) for each in answers]})
        return answers
    # Any exception, as in `attempt`. No answer is no verdict.
    except Exception as error:
        say(WARNING, f"cannot tell whether the GPUs are registered with the fabric: {error}")
        return ()


def _on_host(system: System) -> str:
    """Return what the fabric of the GPUs depends on, in words of the host half; empty if it says nothing."""
    try:
        return system.read(f"{MACHINE_HANDOFF_DIRECTORY}/{FABRIC_NAME}", SIZE_LIMIT).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _waiting(host: list[str], noted: Mapping[str, Any], now: float, *, same: bool) -> tuple[float, float]:
    """Return since when the Fabric Manager has changed again and again, and until when GPUs are not asked therefore.

    Both are `now` if something else has changed since they were asked, or if the Fabric Manager did not for a while.
    `host` is the handoff's generation, and what the host says of the fabric. `same` says that nothing has changed.
    """
    match noted:
        case {"host": [str(generation), str(cause)], "since": float(since), "until": float(until)}:
            if same or (generation == host[0] and cause != host[1] and now - until <= LONGEST):
                return since, until
        case _:
            pass
    return now, now


def _allocatable(
    context: Context, vendor: MachineVendor, request: Request, names: tuple[str, ...], spec_condition: Condition
) -> "AllocatableVendor | None":
    if context.handoff.allocation != DRA:
        return None
    from agent.machine.cdi.allocatable import allocatable_vendor

    return allocatable_vendor(context, vendor, request, names, spec_condition)


def _advertised(
    context: Context, vendor: MachineVendor, request: Request, published: Published
) -> tuple[Condition, ...]:
    """Return GPUsAdvertised, after a restart of the device plugin if that is configured and needed.

    Return nothing if the node itself offers its GPUs.
    """
    if context.handoff.allocation == DRA:
        return ()
    kind = ConditionType.GPUS_ADVERTISED
    condition = attempt(kind, lambda: check_advertised(context, vendor, request, published.devices))
    if not context.handoff.restart_device_plugin or condition.reason not in FIXED_BY_RESTART:
        return (condition,)
    # Imported only if a restart is configured and needed.
    from agent.machine.kubelet.plugin_restart import restart_plugin

    return (attempt(kind, lambda: restart_plugin(context, vendor, condition)),)


def _linked(context: Context, vendor: MachineVendor, request: Request) -> Condition:
    if not vendor.driver_files:
        from agent.machine.devices.dri_links import link_dri_nodes  # Here, because few machines need it.

        link_dri_nodes(context, request)
        # `link_libraries` is not called: as this request has no driver root, it would take the links to another
        # vendor's libraries for stale ones, and remove them.
        return not_applicable(ConditionType.LIBRARIES_LINKED, "no driver files are granted to this machine")
    return link_libraries(context, request, vendor.data_directories)


def _devices(context: Context, vendor: MachineVendor, request: Request) -> Condition:
    # Unmount nodes that the host has removed, and do that before the check. Once the check's condition reports nodes
    # with wrong numbers, the host binds new nodes at once, and these must not be unmounted.
    unmount_removed(context.system, (*(device.path for device in request.devices), *vendor.bound_directories(request)))
    if request.devices or context.notes.load(f"char-links-{vendor.name}"):
        # Imported only if there are nodes, or links from an earlier run.
        from agent.machine.devices.char_links import link_nodes

        link_nodes(context, request)
    condition = check_devices(context, request)
    return with_hidden_driver(context.system, condition, vendor.kernel_paths)
