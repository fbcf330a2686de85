"""Diagnoses machines from their conditions: symptoms, and the commands that fix each fault. Pure."""

import re
from collections.abc import Iterable, Sequence, Set

from msgspec import Struct

from agent.cli.doctor.remedies import ADDRESS, AS_ROOT, BY_HAND, REMARKS, remedy
from agent.cli.summary import causes, prevents_ready
from agent.host.outcome import MachineOutcome
from agent.host.vendors import HOST_VENDORS, host_vendor
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.facts import Facts, VendorFacts
from agent.model.reasons import Reason

NOTABLE = frozenset(
    {
        Reason.RELOAD_NEEDED,
        Reason.ONLY_STAGED,
        Reason.PARTLY_OTHER_VERSION,
        Reason.PLAIN_COPY,
        Reason.LAST_GOOD_SETTINGS,
        Reason.NODE_FILES_CHANGED,
        Reason.GPU_DETACHED,
        Reason.DRIVER_HIDDEN,
    }
)
"""Reasons of True conditions that still call for an action. They are listed, but are not faults."""


class MachineFinding(Struct, frozen=True):
    """One fault of a machine, with the conditions that show it; or True conditions that still call for an action."""

    conditions: tuple[ConditionType, ...]
    status: Status
    reason: str
    message: str
    """The message of the conditions, which is the evidence."""
    symptoms: str = ""
    """The symptoms that users see; empty if unknown."""
    fix: tuple[str, ...] = ()
    """Commands that fix the fault, or sentences; empty if there is nothing to do but wait."""
    prevents_ready: bool = False


class Diagnosis(Struct, frozen=True):
    """The findings of one machine."""

    machine: str
    ready: Condition
    findings: tuple[MachineFinding, ...]
    """In the order in which a machine becomes ready, because the first may be the cause of the others."""


class Environment(Struct, frozen=True):
    """The facts on which the symptoms and commands for a machine's faults depend."""

    vendors: tuple[VendorFacts, ...] = ()
    modules: Set[str] = frozenset()
    """Names of the kernel's loaded modules."""
    node: str = "NODE"
    """The name of the machine's Node object."""
    offers_gpus: bool = False
    """Whether the machine offers its GPUs itself (`allocation = "dra"`)."""
    as_root: bool = False
    """Whether root observed the host."""
    made_by_up: bool = True
    """Whether `up` makes the machine's node. `stop` and `restart` can drain no other node."""


def environment_of(
    facts: Facts,
    modules: Set[str],
    node: str,
    *,
    offers_gpus: bool = False,
    as_root: bool = False,
    made_by_up: bool = True,
) -> Environment:
    """Return the environment of a machine. It has only the vendors that have a GPU on this host."""
    vendors = tuple(each for each in facts.vendors if each.gpus)
    return Environment(vendors, modules, node or "NODE", offers_gpus, as_root, made_by_up)


NO_ENVIRONMENT = Environment()


def diagnose(machine: MachineOutcome, environment: Environment = NO_ENVIRONMENT) -> Diagnosis:
    """Return the findings in the machine's conditions. Conditions with the same cause are one finding."""
    notable = (each for each in machine.conditions if each.status is Status.TRUE and _needs_action(each))
    groups = [*causes(machine.conditions), *((each,) for each in notable)]
    order = list(ConditionType)
    groups.sort(key=lambda group: order.index(group[0].type))
    findings = tuple(_finding(group, machine, environment) for group in groups)
    return Diagnosis(machine.name, machine.ready, findings)


def _needs_action(condition: Condition) -> bool:
    """Return whether the condition calls for an action although it is True."""
    return condition.reason in NOTABLE or bool(_remarks(condition))


def _remarks(condition: Condition) -> list[str]:
    """Return the commands for the remarks in a condition's message."""
    # Do not search the messages of other conditions. They may contain names that users of pods choose, and so any word.
    if condition.type is not ConditionType.CDI_SPEC_CURRENT:
        return []
    return [command for word, command in REMARKS.items() if word in condition.message]


def _finding(group: Sequence[Condition], machine: MachineOutcome, environment: Environment) -> MachineFinding:
    first, kinds = group[0], tuple(each.type for each in group)
    return MachineFinding(
        kinds,
        first.status,
        first.reason,
        first.message,
        # An Unknown condition has no known symptoms.
        _symptoms(kinds, first.reason, environment) if first.status is Status.FALSE else "",
        _fix(first, machine, environment),
        first.status is not Status.TRUE and prevents_ready(group),
    )


def _symptoms(kinds: Iterable[ConditionType], reason: str, environment: Environment) -> str:
    """Return the symptoms that the vendors of the host's GPUs list for these conditions.

    For each condition, these are the symptoms that a vendor lists for this reason. If the vendor lists none, they are
    the ones that it lists for all other reasons. If the host has no GPUs, take the symptoms of all vendors.
    """
    vendors = [host_vendor(each.vendor) for each in environment.vendors] or HOST_VENDORS
    reported = [
        text
        for kind in kinds
        for vendor in vendors
        if (text := vendor.symptoms.get((kind, reason)) or vendor.symptoms.get((kind, "")))
    ]
    return "; ".join(dict.fromkeys(reported))


def _fix(condition: Condition, machine: MachineOutcome, environment: Environment) -> tuple[str, ...]:
    kind, reason = condition.type, condition.reason
    vendors = [each for each in environment.vendors if _names_node(condition, each)] or environment.vendors
    special = [host_vendor(each.vendor).remedies(kind, reason, each, environment.modules) for each in vendors]
    # General commands are still needed if one of the vendors has none of its own.
    replaced = special and all(special) and (kind in REPLACED or reason in REPLACED)
    general = () if replaced else remedy(kind, reason, offers_gpus=environment.offers_gpus)
    fix = dict.fromkeys((*(line for lines in special for line in lines), *general, *_remarks(condition)))
    for end, other in () if environment.made_by_up else BY_HAND:
        fix = dict.fromkeys(each.replace(end, other) for each in fix)
    gpus = _gpus(condition, machine, environment)
    return tuple(
        line.replace("{machine}", machine.name).replace("{node}", environment.node)
        for each in fix
        if each != AS_ROOT or not environment.as_root
        for line in _for_each(each, gpus)
    )


def _gpus(condition: Condition, machine: MachineOutcome, environment: Environment) -> Sequence[str]:
    """Return the PCI addresses of the GPUs that a condition is about; none if they are not known."""
    known = [gpu for vendor in environment.vendors for gpu in vendor.gpus]
    match condition.reason:
        case Reason.GPU_LOST:
            return machine.lost
        case Reason.GPU_DETACHED:
            return [gpu.pci_address for gpu in known if gpu.detached]
        case _:
            # The machine may have reported any text.
            return [gpu.pci_address for gpu in known if gpu.pci_address in condition.gpus]


def _for_each(command: str, gpus: Sequence[str]) -> Sequence[str]:
    """Return the command for each of the GPUs, if it has a placeholder for one and they are known."""
    return [command.replace(ADDRESS, gpu) for gpu in gpus] if ADDRESS in command and gpus else [command]


def _names_node(condition: Condition, vendor: VendorFacts) -> bool:
    """Return whether the message names one of the vendor's nodes: then it is about that vendor's GPUs."""
    # A name may be the beginning of another vendor's: /dev/dri/card1 of /dev/dri/card10.
    return isinstance(vendor.devices, tuple) and any(
        re.search(rf"{re.escape(node.path)}(?!\w)", condition.message) for node in vendor.devices
    )


REPLACED: Set[str] = frozenset(
    {
        ConditionType.DRIVER_LOADED,
        ConditionType.LIBRARIES_PRESENT,
        ConditionType.DRIVER_ROOT_STAGED,
        Reason.GPU_FAILED,
    }
)
"""Conditions about drivers, and a reason, for which a vendor's own commands replace the general ones. For others, the
vendor's commands come first, and the general ones follow."""
