"""Lists NVIDIA's programs that keep GPUs open, and how to make each program release a GPU. Pure."""

COMMAND_LENGTH = 15
"""Characters that the kernel keeps of a program's name: TASK_COMM_LEN without the null byte (proc_pid_comm(5))."""

# On nvidia-persistenced: `nvidia-smi drain` fails while persistence mode is on, so `-pm 0` comes first. The driver
# accepts no new clients for a drained GPU.
ADVICE = {
    "nvidia-persistenced": "`nvidia-smi -i {address} -pm 0`, then `nvidia-smi drain -p {address} -m 1`",
    "nv-hostengine": "`systemctl stop nvidia-dcgm`",
    "dcgm-exporter": "stop the exporter, which watches all GPUs that it finds at its start",
    "nv-fabricmanager": "`systemctl stop nvidia-fabricmanager`: no CUDA program on this host works without it",
    "nvidia-cuda-mps-server": "`echo quit | nvidia-cuda-mps-control`: ends all CUDA programs that use MPS",
    "nvidia-smi": "wait for it to end, or end it if it loops (-l)",
}
"""Advice by program, for programs on the host."""
IN_MACHINES = {
    "nvidia-device-plugin": (
        "restart the plugin once the node no longer offers the GPU; machines.NAME.restart_device_plugin = true "
        'and on_detach = "drain-wait" do that'
    ),
    "dcgm-exporter": (
        'set on_detach = "drain-wait", and delete the pod while `gpus detach` waits: the next pod does not get the GPU'
    ),
}
"""Advice by program, for programs in a pod."""


def release_advice(command: str, pci_address: str, *, in_machine: bool) -> str:
    """Return how to make one of NVIDIA's programs release a GPU; empty for any other program."""
    for name, advice in (IN_MACHINES if in_machine else ADVICE).items():
        if command == name[:COMMAND_LENGTH]:
            return advice.format(address=pci_address)
    return ""
