"""Measure how soon pods with a GPU start, relative to pods without one in the same node.

Pods get their GPU by NVIDIA's device plugin, or by Dynamic Resource Allocation. The two must not offer the same GPUs
at the same time, so the node moves from one to the other after every few pods.
"""

import statistics
import time

from agent.model.handoff import DRA
from integration.bed.cluster.cluster import Cluster, pod
from integration.bed.measure.bench_script import Measures
from integration.bed.measure.pairs import compared
from integration.bed.vm.installation import CONFIGURATION

ROUNDS, PODS = 4, 3
PLUGIN = "device-plugin"


def measure_pod_start(cluster: Cluster, rounds: int = ROUNDS, pods: int = PODS) -> Measures:
    """Return the seconds from a pod's creation until it runs, with a ratio for each round.

    Call it for a cluster whose node has no device plugin yet and whose machine has CONFIGURATION. Afterwards, the
    machine's own DRA driver offers the GPUs, and the device plugin is gone.
    """
    cluster.apply("runtime-class", "device-class-nvidia")
    with_gpu: dict[str, list[float]] = {PLUGIN: [], DRA: []}
    without: dict[str, list[float]] = {PLUGIN: [], DRA: []}
    for _ in range(rounds):
        for allocation in (PLUGIN, DRA):
            _offer(cluster, allocation)
            # The first pod is not measured: it also waits for work that the move has caused.
            _start(cluster, gpus=1)
            pairs = [(_start(cluster, gpus=0), _start(cluster, gpus=1)) for _ in range(pods)]
            without[allocation].append(statistics.median(pair[0] for pair in pairs))
            with_gpu[allocation].append(statistics.median(pair[1] for pair in pairs))
    return {
        "pod_start_plain_seconds": statistics.median((*without[PLUGIN], *without[DRA])),
        "pod_start_plugin_seconds": statistics.median(with_gpu[PLUGIN]),
        "pod_start_dra_seconds": statistics.median(with_gpu[DRA]),
        **compared("pod_start_plugin_vs_plain", with_gpu[PLUGIN], without[PLUGIN]),
        **compared("pod_start_dra_vs_plain", with_gpu[DRA], without[DRA]),
        **compared("pod_start_dra_vs_plugin", with_gpu[DRA], with_gpu[PLUGIN]),
    }


def _start(cluster: Cluster, gpus: int) -> float:
    begun = time.monotonic()
    cluster.apply(pod("measured", "sleep", "infinity", gpus=gpus))
    # Not Cluster.wait(): its pauses would be part of the time.
    cluster.kubectl("wait", "pod/measured", "--for=jsonpath={.status.phase}=Running", "--timeout=200s")
    seconds = time.monotonic() - begun
    cluster.delete_pods("measured")
    return seconds


def _offer(cluster: Cluster, allocation: str) -> None:
    """Let the node offer its GPUs through this allocation. No pod may have a GPU during the change.

    The steps and their order are those that `unbounded-agent kube allocation` prints.
    """
    number, guest = len(cluster.host.gpus), cluster.host.guest
    if allocation == DRA:
        cluster.forget_plugin()
    guest.write("/etc/unbounded-agent/config.toml", f'{CONFIGURATION}allocation = "{allocation}"\n'.encode())
    guest.run(["systemctl", "reload", "unbounded-agent.service"])
    if allocation == DRA:
        cluster.wait(f"{number} GPUs in the slices", lambda: len(cluster.devices()) == number)
    else:
        cluster.wait("the slices are gone", lambda: not cluster.devices())
        cluster.deploy_plugin(number)
