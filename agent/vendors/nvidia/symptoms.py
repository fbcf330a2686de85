"""Symptoms of each fault: messages of NVIDIA's programs, CUDA and container runtimes."""

from collections.abc import Mapping

from agent.model.conditions import ConditionType
from agent.model.reasons import Reason

NOT_LOADED = "`nvidia-smi`: couldn't communicate with the NVIDIA driver; CUDA error 100 (NO_DEVICE)"
NO_LIBRARY = "nvidia-ctk: ERROR_LIBRARY_NOT_FOUND; the device plugin: could not load NVML library"
# The numbers are from cuda.h. Many descriptions of 802 and 803 mistake one for the other.
NO_FABRIC = (
    "CUDA error 802 (SYSTEM_NOT_READY), not to be confused with 803 (SYSTEM_DRIVER_MISMATCH); in a confidential "
    "virtual machine, GPUs that nobody has set ready cause it too: `nvidia-smi conf-compute -srs 1`"
)
MISMATCH = "`nvidia-smi`: Driver/library version mismatch; CUDA error 803 (SYSTEM_DRIVER_MISMATCH)"
EPERM = "a GPU opens on the host, but not in the machine: EPERM"
NO_DEVICES = "a CDI specification without devices; `nvidia-smi` in pods: No devices were found"
UNRESOLVABLE = "pods end with `unresolvable CDI devices`, or have no GPU"
NO_RUNTIME = "pods stay in ContainerCreating: no runtime for the handler of their RuntimeClass is configured"

SYMPTOMS: Mapping[tuple[ConditionType, str], str] = {
    (ConditionType.DRIVER_LOADED, Reason.MODULE_NOT_LOADED): NOT_LOADED,
    (ConditionType.DRIVER_LOADED, Reason.WRONG_DRIVER): NOT_LOADED,
    (ConditionType.DEVICES_PRESENT, ""): NO_DEVICES,
    (ConditionType.DEVICES_PRESENT, Reason.GPU_FALLEN_OFF_BUS): "`nvidia-smi`: GPU is lost; Xid 79 in `dmesg`",
    (ConditionType.LIBRARIES_PRESENT, Reason.NOT_INSTALLED): NO_LIBRARY,
    (ConditionType.LIBRARIES_PRESENT, Reason.LIBRARIES_BROKEN): NO_LIBRARY,
    (ConditionType.LIBRARIES_PRESENT, Reason.VERSION_MISMATCH): MISMATCH,
    (ConditionType.FABRIC_READY, ""): NO_FABRIC,
    (ConditionType.PERSISTENCE_MODE, Reason.DAEMON_NOT_RUNNING): "the first use of a GPU after a pause takes seconds",
    (ConditionType.PERSISTENCE_MODE, Reason.PERSISTENCE_DISABLED): "the first use of a GPU after a pause takes seconds",
    (ConditionType.DEVICES_ALLOWED, Reason.NOT_GIVEN): EPERM,
    (ConditionType.DEVICES_ALLOWED, Reason.NOT_PERMITTED): EPERM,
    (ConditionType.LIBRARIES_LINKED, ""): NO_LIBRARY,
    (ConditionType.CDI_SPEC_CURRENT, ""): UNRESOLVABLE,
    (ConditionType.RUNTIME_CONFIGURED, ""): NO_RUNTIME,
    (ConditionType.RUNTIME_ACTIVE, ""): NO_RUNTIME,
}
"""Symptoms by condition and reason. An empty reason stands for all reasons of the condition that have no entry of
their own."""
