"""NVIDIA on the host, assembled from its parts."""

from agent.model.device import DeviceKind
from agent.model.facts import VendorFacts
from agent.vendors.host_vendor import DriverForPods, HostVendor, Sources
from agent.vendors.nvidia.conditions import SYMPTOMS, cluster_findings, nvidia_conditions, remedies
from agent.vendors.nvidia.devices import (
    KERNEL_DRIVER,
    NODE_DIRECTORIES,
    NODE_NAMES,
    observe_devices,
    observe_gpus,
    parse_xid,
)
from agent.vendors.nvidia.driver import MODULE_NAMES, SERVICES, observe_driver, observe_module, observe_services
from agent.vendors.nvidia.grant import grant_nvidia, misbound_gpus
from agent.vendors.nvidia.places import LIBRARY_NAMES, watched_directories
from agent.vendors.nvidia.user_space import driver_for_pods, observe_user_space


def observe_nvidia(sources: Sources) -> VendorFacts:
    """Return all facts about NVIDIA. What cannot be observed is Unseen; `problems` says what must not be used."""
    module = observe_module(sources.system)
    listed = observe_gpus(sources.system, sources.pci, sources.lost, sources.detached)
    nodes, problems, incomplete = observe_devices(sources, listed)
    user_space = observe_user_space(sources, module if isinstance(module, str) else "")
    return VendorFacts(
        vendor="nvidia",
        gpus=listed.gpus,
        devices=nodes,
        driver=observe_driver(sources, module, user_space, nodes),
        services=observe_services(sources.system),
        node_problems=problems,
        other_problems=(*listed.problems, *user_space.problems),
        incomplete=incomplete,
    )


# Labels of Nodes with NVIDIA GPUs, as the GPU Operator and GPU Feature Discovery name them.

PRESENT = "nvidia.com/gpu.present"
"""Both the GPU Operator and the device plugin's Helm chart select Nodes by this label."""
DRIVER = "nvidia.com/cuda.driver-version"
CUDA = "nvidia.com/cuda.runtime-version"


def node_labels(driver: DriverForPods | None) -> dict[str, str]:
    """Return the labels. For a version that is unknown, there is no label."""
    labels = {PRESENT: "true"}
    versions = {DRIVER: driver.version, CUDA: driver.interfaces.get("CUDA", "")} if driver else {}
    for prefix, version in versions.items():
        if version:
            parts = zip(("major", "minor", "revision"), version.split("."), strict=False)
            labels |= {f"{prefix}.{part}": number for part, number in (*parts, ("full", version))}
    return labels


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
"""How to make a program that keeps GPUs open on the host release one, by program."""
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


NVIDIA = HostVendor(
    name="nvidia",
    observe=observe_nvidia,
    grant=grant_nvidia,
    in_every_handoff=True,
    drivers=(KERNEL_DRIVER,),
    own_nodes=frozenset({DeviceKind.GPU}),
    services=SERVICES,
    module_names=MODULE_NAMES,
    node_names=NODE_NAMES,
    node_directories=NODE_DIRECTORIES,
    image="agent-ubuntu2404-nvidia",
    symptoms=SYMPTOMS,
    library_names=LIBRARY_NAMES,
    library_directories=watched_directories,
    misbound_gpus=misbound_gpus,
    conditions=nvidia_conditions,
    driver_for_pods=driver_for_pods,
    remedies=remedies,
    cluster_findings=cluster_findings,
    node_labels=node_labels,
    release_advice=release_advice,
    parse_kernel_message=parse_xid,
)
