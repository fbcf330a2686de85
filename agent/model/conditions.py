"""Named checks of readiness in the form of Kubernetes' conditions: status, reason, message, last transition."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from agent.model.reasons import Reason
from agent.model.text import printable, rfc3339


class Status(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionType(StrEnum):
    """All conditions, in the order in which a machine becomes ready. The last one sums up the others."""

    DRIVER_LOADED = "DriverLoaded"
    DEVICES_PRESENT = "DevicesPresent"
    GPUS_COMPLETE = "GPUsComplete"
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
    VALIDATION_MARKERS_SET = "ValidationMarkersSet"
    GPUS_ADVERTISED = "GPUsAdvertised"
    NODE_CONDITION_SET = "NodeConditionSet"
    READY = "Ready"


IN_MACHINE = (
    ConditionType.LIBRARIES_LINKED,
    ConditionType.CDI_SPEC_CURRENT,
    ConditionType.RUNTIME_CONFIGURED,
    ConditionType.RUNTIME_ACTIVE,
    ConditionType.VALIDATION_MARKERS_SET,
    ConditionType.GPUS_ADVERTISED,
    ConditionType.NODE_CONDITION_SET,
)
"""Conditions that only the machine half reports. The host half reports the others; both report DevicesAllowed."""

NOT_NEEDED_FOR_READY = frozenset(
    {
        ConditionType.GPUS_COMPLETE,
        ConditionType.PERSISTENCE_MODE,
        ConditionType.VALIDATION_MARKERS_SET,
        ConditionType.GPUS_ADVERTISED,
        ConditionType.NODE_CONDITION_SET,
        ConditionType.READY,
    }
)
"""Conditions that Ready ignores.

The device plugin may wait for Ready, so Ready must not wait for the GPUs that the plugin advertises. GPUsComplete is
about GPUs that the machine no longer has; the machine can use its other GPUs.
"""


class Condition(NamedTuple):
    """The result of one check."""

    type: ConditionType
    status: Status
    reason: str
    """A Reason; any word if the condition was read from a report or a file."""
    message: str
    """A sentence on what was found and, if needed, on what to do next."""
    last_transition: float = 0.0
    """Seconds since the epoch; 0 until `with_transitions` has set it."""
    losses: tuple[float, ...] = ()
    """Only for Ready: the recent times, in seconds since the epoch, at which Ready was lost.

    Ready is lost when a condition that it needs becomes False after all were met (agent.host.verify.flapping).
    """
    good_since: float = 0.0
    """Only for Ready: when all conditions that it needs were first met after the last loss; 0 until then."""
    advertised: int | None = None
    """Only for GPUsAdvertised, in the machine half: how many of the granted GPUs are advertised; None if unknown."""
    gpus: tuple[str, ...] = ()
    """PCI addresses of the only GPUs that a fault concerns: the others serve pods. Empty if it concerns all."""
    said: tuple[tuple[str, str, str], ...] | None = None
    """Only for FabricReady: the last FabricAnswer of each granted GPU, whatever else is shown. Only another answer of
    the GPU replaces it. None if the GPUs' answers were not evaluated."""

    @property
    def needed_for_ready(self) -> bool:
        """Whether Ready follows from this condition. One bad GPU must not take the node from the others."""
        return self.type not in NOT_NEEDED_FOR_READY and not self.gpus

    def to_kubernetes(self) -> dict[str, str | None]:
        """Return the condition as Kubernetes' API writes it (metav1.Condition). An unknown time is null."""
        return {
            "type": self.type,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "lastTransitionTime": rfc3339(self.last_transition) if self.last_transition else None,
        }


def true(kind: ConditionType, reason: Reason, message: str) -> Condition:
    return Condition(kind, Status.TRUE, reason, printable(message))


def false(kind: ConditionType, reason: Reason, message: str, gpus: Iterable[str] = ()) -> Condition:
    """Return a condition that is False. `gpus` is as in Condition."""
    return Condition(kind, Status.FALSE, reason, printable(message), gpus=tuple(gpus))


def unknown(kind: ConditionType, reason: Reason, message: str) -> Condition:
    return Condition(kind, Status.UNKNOWN, reason, printable(message))


def not_applicable(kind: ConditionType, message: str) -> Condition:
    """Return a condition that is True, because it does not apply and so must not block Ready."""
    return Condition(kind, Status.TRUE, Reason.NOT_APPLICABLE, printable(message))


def summarize(conditions: Iterable[Condition]) -> Condition:
    """Return Ready, with status and reason of the first condition that is False, or else of the first that is Unknown.

    Ready is True if there is neither. Only conditions that are `needed_for_ready` count.
    """
    ordered = sorted(conditions, key=lambda each: list(ConditionType).index(each.type))
    for status in (Status.FALSE, Status.UNKNOWN):
        for each in ordered:
            if each.needed_for_ready and each.status is status:
                return Condition(ConditionType.READY, status, each.reason, f"{each.type}: {each.message}")
    if unusable := sorted({gpu for each in ordered for gpu in each.gpus}):
        first = next(each for each in ordered if each.gpus)
        why = f"pods cannot use {', '.join(unusable)}, but all other GPUs; {first.type}: {first.message}"
        return true(ConditionType.READY, Reason.SOME_GPUS_UNUSABLE, why)
    return true(ConditionType.READY, Reason.ALL_CONDITIONS_TRUE, "the machine can run GPU workloads")


def worst(conditions: Iterable[Condition]) -> Condition:
    """Merge several vendors' conditions of one type into one.

    The result has the worst status, the reason of the first condition with that status, and the messages of all
    conditions that are not True or, if all are, of all. What concerns all GPUs is worse than what concerns only some,
    even if nothing is known of it. Of True conditions, one whose reason calls for action comes first. Conditions that
    do not apply are ignored. If none applies, the first one is returned.
    """
    found = list(conditions)
    applying = [each for each in found if each.reason != Reason.NOT_APPLICABLE] or found[:1]
    faults = [each for each in applying if each.status is not Status.TRUE]
    # `sort` keeps the order of equals.
    faults.sort(key=lambda each: (bool(each.gpus), each.status is Status.UNKNOWN))
    said = faults or applying
    first = next((each for each in said if each.reason == Reason.EDITS_LEFT_OUT), said[0])
    counts = [each.advertised for each in applying if each.advertised is not None]
    return first._replace(
        message="; ".join(dict.fromkeys(each.message for each in said)),
        gpus=tuple(dict.fromkeys(gpu for each in said for gpu in each.gpus)) if first.gpus else (),
        advertised=sum(counts) if counts else None,
    )


def with_transitions(new: Iterable[Condition], old: Iterable[Condition], now: float) -> tuple[Condition, ...]:
    """Return `new` with transition times: the time in `old` if the status there is the same, otherwise `now`."""
    before = {each.type: each for each in old}
    dated = []
    for each in new:
        previous = before.get(each.type)
        kept = previous is not None and previous.status is each.status
        dated.append(each._replace(last_transition=previous.last_transition if previous and kept else now))
    return tuple(dated)
