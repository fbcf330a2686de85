"""Named checks of readiness in the form of Kubernetes' conditions: status, reason, message, last transition."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from agent.model.text import MESSAGE_LIMIT, printable, rfc3339

# The reasons of conditions; docs/conditions.md says what each means and what to do.


class Reason(StrEnum):
    """The reason for a condition's status. Users' programs compare these words, so none is ever renamed.

    Compare with `==`: reasons read from a report or a file are plain strings.
    """

    # Any condition:
    NOT_APPLICABLE = "NotApplicable"
    OBSERVATION_FAILED = "ObservationFailed"
    INTERNAL_ERROR = "InternalError"
    NO_SUCH_MACHINE = "NoSuchMachine"
    STALE_EVIDENCE = "StaleEvidence"
    NOT_EVALUATED = "NotEvaluated"
    MACHINE_NOT_RUNNING = "MachineNotRunning"
    NO_REPORT = "NoReport"
    BAD_REPORT = "BadReport"
    HANDOFF_PENDING = "HandoffPending"
    REPORT_STALE = "ReportStale"
    NOT_REPORTED = "NotReported"
    FAILED = "Failed"

    # Several conditions:
    PRESENT = "Present"
    GPU_DETACHED = "GPUDetached"
    GPU_LOST = "GPULost"
    NOT_STAGED = "NotStaged"
    RUNNING = "Running"
    NOT_STARTED = "NotStarted"
    FOREIGN_FILE = "ForeignFile"
    SHADOWED = "Shadowed"
    NOT_TRIED = "NotTried"
    NO_CONTAINERD = "NoContainerd"
    SET = "Set"

    # DriverLoaded:
    LOADED = "Loaded"
    MODULE_NOT_LOADED = "ModuleNotLoaded"
    MODULE_BROKEN = "ModuleBroken"
    WRONG_DRIVER = "WrongDriver"

    # DevicesPresent:
    NODES_MISSING = "NodesMissing"
    GPU_NOT_FOUND = "GPUNotFound"
    GPU_FALLEN_OFF_BUS = "GPUFallenOffBus"
    GPU_WITHOUT_DRIVER = "GPUWithoutDriver"

    # GPUsComplete:
    COMPLETE = "Complete"
    RECORD_DAMAGED = "RecordDamaged"

    # GPUsHealthy:
    HEALTHY = "Healthy"
    GPU_DEGRADED = "GPUDegraded"
    GPU_NEEDS_RESET = "GPUNeedsReset"
    GPU_NEEDS_REBOOT = "GPUNeedsReboot"
    GPU_BROKEN = "GPUBroken"
    TOO_FEW_HEALTHY_GPUS = "TooFewHealthyGPUs"

    # LibrariesPresent:
    ONLY_STAGED = "OnlyStaged"
    PARTLY_OTHER_VERSION = "PartlyOtherVersion"
    RELOAD_NEEDED = "ReloadNeeded"
    VERSION_MISMATCH = "VersionMismatch"
    NOT_INSTALLED = "NotInstalled"
    NOT_IN_CONFIGURED_PLACE = "NotInConfiguredPlace"
    LIBRARIES_BROKEN = "LibrariesBroken"

    # FabricReady:
    FABRIC_MANAGER_ACTIVE = "FabricManagerActive"
    FABRIC_MANAGER_STARTING = "FabricManagerStarting"
    """Becomes FABRIC_MANAGER_STUCK after some minutes (agent.host.verify.readiness)."""
    FABRIC_MANAGER_STUCK = "FabricManagerStuck"
    FABRIC_MANAGER_NOT_RUNNING = "FabricManagerNotRunning"
    FABRIC_MANAGER_MISSING = "FabricManagerMissing"
    FABRIC_REGISTERED = "FabricRegistered"
    FABRIC_REGISTERING = "FabricRegistering"
    """Becomes FABRIC_NOT_REGISTERED after some minutes, as above."""
    FABRIC_NOT_REGISTERED = "FabricNotRegistered"
    FABRIC_FAILED = "FabricFailed"

    # PersistenceMode:
    DAEMON_ACTIVE = "DaemonActive"
    DAEMON_NOT_RUNNING = "DaemonNotRunning"
    PERSISTENCE_ENABLED = "PersistenceEnabled"
    PERSISTENCE_DISABLED = "PersistenceDisabled"

    # DriverRootStaged:
    STAGED = "Staged"
    PLAIN_COPY = "PlainCopy"
    NOTHING_FITS = "NothingFits"
    NOTHING_TO_STAGE = "NothingToStage"
    NOT_MOUNTED = "NotMounted"

    # MachineRunning:
    LAST_GOOD_SETTINGS = "LastGoodSettings"
    NODE_FILES_CHANGED = "NodeFilesChanged"
    STARTING = "Starting"
    STOPPED = "Stopped"
    NOT_RUNNING = "NotRunning"

    # DevicesAllowed:
    OPENED = "Opened"
    NODES_PRESENT = "NodesPresent"
    MACHINE_RESTART_NEEDED = "MachineRestartNeeded"
    NOT_GIVEN = "NotGiven"
    NOT_WITHDRAWN = "NotWithdrawn"
    WRONG_NODE = "WrongNode"
    """Makes the host bind the nodes again."""
    NOT_PERMITTED = "NotPermitted"
    DRIVER_HIDDEN = "DriverHidden"
    NO_DRIVER = "NoDriver"
    GPU_FAILED = "GPUFailed"
    OPEN_TIMED_OUT = "OpenTimedOut"
    OPEN_FAILED = "OpenFailed"

    # LibrariesLinked:
    LINKED = "Linked"
    CONFLICT = "Conflict"
    NOT_IN_LOADER_CACHE = "NotInLoaderCache"

    # CDISpecCurrent:
    VERIFIED = "Verified"
    GPU_MISSING = "GPUMissing"
    PARTITION_MISSING = "PartitionMissing"
    GENERATION_FAILED = "GenerationFailed"
    EDITS_LEFT_OUT = "EditsLeftOut"
    SPEC_REFUSED = "SpecRefused"
    NO_DRIVER_ROOT = "NoDriverRoot"
    NAMES_COLLIDE = "NamesCollide"
    RUNTIME_BLOCKED = "RuntimeBlocked"
    UNKNOWN_VENDOR = "UnknownVendor"

    # RuntimeConfigured:
    READ_BACK = "ReadBack"
    READ_BACK_FAILED = "ReadBackFailed"
    NO_HANDLER = "NoHandler"

    # RuntimeActive:
    OTHER_CONFIGURATION = "OtherConfiguration"
    CRI_FAILED = "CRIFailed"
    NO_ANSWER = "NoAnswer"
    NOT_CONFIGURED = "NotConfigured"
    RESTART_PENDING = "RestartPending"
    """Makes the machine half restart containerd at the end of its run."""

    # ValidationMarkersSet:
    NOT_PROVEN = "NotProven"

    # GPUsTested:
    TESTED = "Tested"
    TEST_FAILED = "TestFailed"
    NOT_TESTED = "NotTested"
    TESTING = "Testing"

    # GPUsAdvertised:
    ADVERTISED = "Advertised"
    NO_KUBELET = "NoKubelet"
    KUBELET_DOWN = "KubeletDown"
    NO_DEVICE_PLUGIN = "NoDevicePlugin"
    NOT_PUBLISHED = "NotPublished"
    BAD_CHECKPOINT = "BadCheckpoint"
    UNKNOWN_IDS = "UnknownIDs"
    DEVICE_PLUGIN_DOWN = "DevicePluginDown"
    NOT_REGISTERED = "NotRegistered"
    GPUS_MISSING = "GPUsMissing"
    DEVICE_PLUGIN_RESTART_NEEDED = "DevicePluginRestartNeeded"
    PLUGIN_SPEC_OUTDATED = "PluginSpecOutdated"
    STALE_GPUS = "StaleGPUs"
    DRA_DRIVER_DOWN = "DRADriverDown"
    DEVICE_PLUGIN_ACTIVE = "DevicePluginActive"

    # NodeConditionSet:
    NO_KUBECTL = "NoKubectl"
    KUBELET_NOT_RUNNING = "KubeletNotRunning"
    UNSUPPORTED_DISTRIBUTION = "UnsupportedDistribution"
    NO_KUBECONFIG = "NoKubeconfig"
    BAD_NODE_NAME = "BadNodeName"
    NODE_DELETED = "NodeDeleted"
    NODE_NOT_REGISTERED = "NodeNotRegistered"
    REFUSED = "Refused"
    API_UNREACHABLE = "APIUnreachable"
    BAD_DOCUMENT = "BadDocument"
    AGENT_SILENT = "AgentSilent"

    # Ready:
    ALL_CONDITIONS_TRUE = "AllConditionsTrue"
    SOME_GPUS_UNUSABLE = "SomeGPUsUnusable"
    SETTLING = "Settling"
    NO_GPU = "NoGPU"
    NO_GPU_GRANTED = "NoGPUGranted"

    # An administrator's checks of the host:
    CHECK_PASSED = "CheckPassed"
    CHECK_FAILED = "CheckFailed"
    CHECK_UNDECIDED = "CheckUndecided"
    CHECK_BROKEN = "CheckBroken"
    CHECK_NOT_RUN = "CheckNotRun"


class Status(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionType(StrEnum):
    """All conditions, in the order in which a machine becomes ready. The last one sums up the others."""

    DRIVER_LOADED = "DriverLoaded"
    DEVICES_PRESENT = "DevicesPresent"
    GPUS_COMPLETE = "GPUsComplete"
    GPUS_HEALTHY = "GPUsHealthy"
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
    GPUS_TESTED = "GPUsTested"
    GPUS_ADVERTISED = "GPUsAdvertised"
    NODE_CONDITION_SET = "NodeConditionSet"
    READY = "Ready"


NOT_NEEDED_FOR_READY = frozenset(
    {
        ConditionType.GPUS_COMPLETE,
        ConditionType.PERSISTENCE_MODE,
        ConditionType.VALIDATION_MARKERS_SET,
        ConditionType.GPUS_TESTED,
        ConditionType.GPUS_ADVERTISED,
        ConditionType.NODE_CONDITION_SET,
        ConditionType.READY,
    }
)
"""Conditions that Ready ignores.

The device plugin may wait for Ready, so Ready must not wait for the GPUs that the plugin advertises. GPUsComplete is
about GPUs that the machine no longer has; the machine can use its other GPUs.
"""


class Remark(StrEnum):
    """What the message of CDISpecCurrent says besides its reason, with every status (docs/conditions.md)."""

    PODS_OUTDATED = "PodsOutdated"
    EDITS_LEFT_OUT = "EditsLeftOut"
    MODE_NOT_SERVED = "ModeNotServed"


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

    Ready is lost when a condition that it needs becomes False after all were met (agent.host.verify.readiness).
    """
    good_since: float = 0.0
    """Only for Ready: when all conditions that it needs were first met after the last loss; 0 until then."""
    advertised: int | None = None
    """Only for GPUsAdvertised, in the machine half: how many of the granted GPUs are advertised; None if unknown."""
    gpus: tuple[str, ...] = ()
    """PCI addresses of the only GPUs that a fault concerns: the others serve pods. Empty if it concerns all."""
    remarks: tuple[str, ...] = ()
    """The Remarks in its message."""
    vendors: tuple[str, ...] = ()
    """The vendors whose GPUs it is about; empty if it is about no vendor's."""
    said: tuple[tuple[str, str, str], ...] | None = None
    """Only for FabricReady: the last FabricAnswer of each granted GPU, whatever else is shown. Only another answer of
    the GPU replaces it. None if the GPUs' answers were not evaluated."""

    @property
    def needed_for_ready(self) -> bool:
        """Whether Ready follows from this condition. One bad GPU must not take the node from the others."""
        return self.type not in NOT_NEEDED_FOR_READY and not self.gpus

    def to_kubernetes(self) -> dict[str, str | None]:
        """Return the condition as Kubernetes' API writes it (metav1.Condition). An unknown time is null."""
        return kubernetes_form(*self[:5])


def kubernetes_form(kind: str, status: str, reason: str, message: str, at: float) -> dict[str, str | None]:
    since = rfc3339(at) if at else None
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}


def true(kind: ConditionType, reason: Reason, message: str) -> Condition:
    return Condition(kind, Status.TRUE, reason, printable(message)[:MESSAGE_LIMIT])


def false(kind: ConditionType, reason: Reason, message: str, gpus: Iterable[str] = ()) -> Condition:
    """Return a condition that is False. `gpus` is as in Condition."""
    return Condition(kind, Status.FALSE, reason, printable(message)[:MESSAGE_LIMIT], gpus=tuple(gpus))


def unknown(kind: ConditionType, reason: Reason, message: str) -> Condition:
    return Condition(kind, Status.UNKNOWN, reason, printable(message)[:MESSAGE_LIMIT])


def not_applicable(kind: ConditionType, message: str) -> Condition:
    """Return a condition that is True, because it does not apply and so must not block Ready."""
    return Condition(kind, Status.TRUE, Reason.NOT_APPLICABLE, printable(message)[:MESSAGE_LIMIT])


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
        remarks=tuple(dict.fromkeys(remark for each in said for remark in each.remarks)),
        vendors=tuple(dict.fromkeys(vendor for each in said for vendor in each.vendors)),
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
