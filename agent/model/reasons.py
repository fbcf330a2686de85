"""The reasons of conditions; docs/conditions.md says what each means and what to do."""

from enum import StrEnum


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
    """Becomes FABRIC_MANAGER_STUCK after some minutes (agent.host.verify.flapping)."""
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
