"""The files by which the GPU Operator's validator says that driver and toolkit work. Pure.

Names and content are as in the Operator's release 26.7, for a driver on the host (cmd/nvidia-validator). The device
plugin's container waits for both files, and sources the first one in its shell.
"""

from agent.model.conditions import ConditionType
from agent.vendors.machine_vendor import Marker

DIRECTORY = "/run/nvidia/validations"
DRIVER = (ConditionType.DEVICES_ALLOWED, ConditionType.LIBRARIES_LINKED, ConditionType.CDI_SPEC_CURRENT)
"""What proves that the driver works. CDISpecCurrent proves that NVML works: nvidia-ctk finds the GPUs through NVML."""
TOOLKIT = (*DRIVER, ConditionType.RUNTIME_CONFIGURED, ConditionType.RUNTIME_ACTIVE)
# The Operator mounts the machine's root on /host.
CONTENT = """\
IS_HOST_DRIVER=true
NVIDIA_DRIVER_ROOT=/
DRIVER_ROOT_CTR_PATH=/host
NVIDIA_DEV_ROOT=/
DEV_ROOT_CTR_PATH=/host
"""
MARKERS = (
    Marker(f"{DIRECTORY}/driver-ready", CONTENT, DRIVER),
    Marker(f"{DIRECTORY}/toolkit-ready", "", TOOLKIT),
)
