"""Makes the files that turn a root file system into a node, apart from its programs. Pure."""

from agent.config.node import NodeSettings
from agent.host.provision.containerd_files import containerd_files
from agent.host.provision.host_goal import FORWARDING, sysctl_lines
from agent.host.provision.kubelet_files import NodeInputs, kubelet_files
from agent.host.state.owned_files import MARK
from agent.model.node import NodeFile

HOSTS = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
"""Images have no /etc/hosts, and the kubelet needs one to start pods with hostNetwork."""
SYSCTLS = "/etc/sysctl.d/90-unbounded-agent.conf"


def node_files(machine: str, settings: NodeSettings, inputs: NodeInputs) -> tuple[NodeFile, ...]:
    """Return the files of the node in a machine, sorted by path."""
    header = f"{MARK.decode()} on the host: `unbounded-agent up --rebuild {machine}` makes this machine again.\n"
    files = [
        *kubelet_files(settings, inputs, header),
        *containerd_files(settings.containerd, header),
        NodeFile("/etc/hosts", (header + HOSTS).encode()),
    ]
    if inputs.own_network:
        # These parameters belong to a network. If the machine uses the host's, the host's own file sets them.
        files.append(NodeFile(SYSCTLS, (header + sysctl_lines(FORWARDING)).encode()))
    return tuple(sorted(files, key=lambda file: file.path))
