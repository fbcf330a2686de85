"""Named checks of readiness in the form of Kubernetes' conditions: status, reason, message, last transition."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Status(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionType(StrEnum):
    """In the order in which a machine becomes ready; the last one sums up."""

    DRIVER_LOADED = "DriverLoaded"
    DEVICES_PRESENT = "DevicesPresent"
    LIBRARIES_PRESENT = "LibrariesPresent"
    FABRIC_READY = "FabricReady"
    PERSISTENCE_MODE = "PersistenceMode"
    DRIVER_ROOT_STAGED = "DriverRootStaged"
    MACHINE_RUNNING = "MachineRunning"
    DEVICES_ALLOWED = "DevicesAllowed"
    LIBRARIES_LINKED = "LibrariesLinked"
    CDI_SPEC_CURRENT = "CDISpecCurrent"
    RUNTIME_CONFIGURED = "RuntimeConfigured"
    RUNTIME_ACTIVE = "RuntimeActive"
    GPUS_ADVERTISED = "GPUsAdvertised"
    NODE_CONDITION_SET = "NodeConditionSet"
    READY = "Ready"


IN_MACHINE = (
    ConditionType.LIBRARIES_LINKED,
    ConditionType.CDI_SPEC_CURRENT,
    ConditionType.RUNTIME_CONFIGURED,
    ConditionType.RUNTIME_ACTIVE,
    ConditionType.GPUS_ADVERTISED,
    ConditionType.NODE_CONDITION_SET,
)
"""Reported by the machine half alone; the others are seen from the host, DevicesAllowed from both."""

NOT_APPLICABLE = "NotApplicable"
NOT_NEEDED_FOR_READY = frozenset(
    {
        ConditionType.PERSISTENCE_MODE,
        ConditionType.GPUS_ADVERTISED,
        ConditionType.NODE_CONDITION_SET,
        ConditionType.READY,
    }
)
"""The device plugin waits for readiness: depending on what it advertises would be a deadlock."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One check; `reason` is one CamelCase word, `message` a sentence with what to do next."""

    type: ConditionType
    status: Status
    reason: str
    message: str
    last_transition: float = 0.0
    """Seconds since the epoch; 0 until `with_transitions` has set it."""
    losses: tuple[float, ...] = ()
    """Of Ready: when it became False lately, seconds since the epoch (agent.stability)."""
    good_since: float = 0.0
    """Of Ready: since when nothing was False; 0 while something is."""


def printable(text: str) -> str:
    """Without line breaks, control characters and bytes that are no UTF-8, all of which names of files may have.

    Messages go to terminals, logs and JSON, and name files that others than root have named.
    """
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)


def true(kind: ConditionType, reason: str, message: str) -> Condition:
    return Condition(kind, Status.TRUE, reason, printable(message))


def false(kind: ConditionType, reason: str, message: str) -> Condition:
    return Condition(kind, Status.FALSE, reason, printable(message))


def unknown(kind: ConditionType, reason: str, message: str) -> Condition:
    return Condition(kind, Status.UNKNOWN, reason, printable(message))


def not_applicable(kind: ConditionType, message: str) -> Condition:
    """What does not apply does not stand in the way."""
    return Condition(kind, Status.TRUE, NOT_APPLICABLE, printable(message))


def summarize(conditions: Iterable[Condition]) -> Condition:
    """The Ready condition over all others: False outranks Unknown, the first in order gives the reason."""
    relevant = sorted(
        (each for each in conditions if each.type not in NOT_NEEDED_FOR_READY),
        key=lambda each: list(ConditionType).index(each.type),
    )
    for status in (Status.FALSE, Status.UNKNOWN):
        for each in relevant:
            if each.status is status:
                return Condition(ConditionType.READY, status, each.reason, f"{each.type}: {each.message}")
    return true(ConditionType.READY, "AllConditionsTrue", "the machine can run GPU workloads")


def worst(conditions: Iterable[Condition]) -> Condition:
    """What several vendors say of one thing: the worst status, in the words of all that have it.

    Of those to whom it does not apply, one speaks where it applies to nobody.
    """
    found = list(conditions)
    applying = [each for each in found if each.reason != NOT_APPLICABLE] or found[:1]
    status = min((each.status for each in applying), key=(Status.FALSE, Status.UNKNOWN, Status.TRUE).index)
    same = [each for each in applying if each.status is status]
    return replace(same[0], message="; ".join(dict.fromkeys(each.message for each in same)))


def with_transitions(new: Iterable[Condition], old: Iterable[Condition], now: float) -> tuple[Condition, ...]:
    """`new` with the times of last change: kept where type and status are as in `old`, else `now`."""
    before = {each.type: each for each in old}
    dated = []
    for each in new:
        previous = before.get(each.type)
        kept = previous is not None and previous.status is each.status
        dated.append(replace(each, last_transition=previous.last_transition if previous and kept else now))
    return tuple(dated)
