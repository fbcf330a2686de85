"""A node that offers GPUs by Dynamic Resource Allocation at a real control plane, without a virtual machine.

The service that offers the GPUs runs in a process of its own, as its unit would start it. A stand-in for the kubelet
calls the service.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.host.allocation import DIRECTORY
from integration.bed.cluster.control_plane import ControlPlane
from integration.bed.cluster.kubernetes import RELEASE
from integration.bed.cluster.stand_in_kubelet import StandInKubelet, listed, until
from integration.bed.machine.dra_namespace import KUBECONFIG, DraNamespace
from tests.fakes.dra_machine import GPUS, NODE, DraMachine


@dataclass(frozen=True)
class Offering:
    """A node whose service offers two GPUs. `machine` has the documents that the service reads."""

    cluster: ControlPlane
    machine: DraMachine
    service: DraNamespace


@contextmanager
def offering(release: str = RELEASE) -> Iterator[Offering]:
    """Run a control plane of this release (see ControlPlane) and the service of one node."""
    control_plane = ControlPlane((NODE,), release=release)
    # The directory is not in pytest's tmp_path, which is too long for the path of a socket.
    with control_plane as cluster, tempfile.TemporaryDirectory(prefix="dra-") as directory:
        kubelet, machine = StandInKubelet(cluster, NODE), DraMachine(Path(directory))
        kubelet.create_node()
        cluster.kubectl("create", f"--filename={DIRECTORY}/device-class-nvidia.yaml")
        until("the default service account exists", lambda: cluster.kubectl("get", "serviceaccounts", "-oname"))
        machine.put(KUBECONFIG, kubelet.kubeconfig(machine, str(Path(KUBECONFIG).parent)))
        machine.grant(*GPUS[:2])
        with DraNamespace(machine.tree, machine.kubelet) as service:
            until("GPUs are offered", lambda: listed(cluster, "resourceslices"))
            yield Offering(cluster, machine, service)
