"""NVIDIA on the host, assembled from its parts."""

from agent.model.device import DeviceKind
from agent.vendors.host_vendor import HostVendor
from agent.vendors.nvidia.cluster import cluster_findings
from agent.vendors.nvidia.conditions import nvidia_conditions
from agent.vendors.nvidia.daemons import release_advice
from agent.vendors.nvidia.devices.nodes import NODE_DIRECTORIES, NODE_NAMES
from agent.vendors.nvidia.driver import MODULE_NAMES, SERVICES
from agent.vendors.nvidia.grant import KERNEL_DRIVER, grant_nvidia, misbound_gpus
from agent.vendors.nvidia.node_labels import node_labels
from agent.vendors.nvidia.observe import observe_nvidia
from agent.vendors.nvidia.remedies import remedies
from agent.vendors.nvidia.symptoms import SYMPTOMS
from agent.vendors.nvidia.user_space.cuda_version import driver_for_pods
from agent.vendors.nvidia.user_space.places import LIBRARY_NAMES, watched_directories
from agent.vendors.nvidia.xid import parse_xid


class Nvidia(HostVendor):
    """NVIDIA on the host."""

    name = "nvidia"
    in_every_handoff = True
    drivers = (KERNEL_DRIVER,)
    own_nodes = frozenset({DeviceKind.GPU})
    services = SERVICES
    module_names = MODULE_NAMES
    node_names = NODE_NAMES
    node_directories = NODE_DIRECTORIES
    image = "agent-ubuntu2404-nvidia"
    symptoms = SYMPTOMS
    library_names = LIBRARY_NAMES

    observe = staticmethod(observe_nvidia)
    grant = staticmethod(grant_nvidia)
    library_directories = staticmethod(watched_directories)
    misbound_gpus = staticmethod(misbound_gpus)
    conditions = staticmethod(nvidia_conditions)
    driver_for_pods = staticmethod(driver_for_pods)
    node_labels = staticmethod(node_labels)
    release_advice = staticmethod(release_advice)
    remedies = staticmethod(remedies)
    cluster_findings = staticmethod(cluster_findings)
    parse_kernel_message = staticmethod(parse_xid)


NVIDIA = Nvidia()
