"""Measure for how long a node is down when it is switched to another root file system, next to a plain restart.

Down is the time from the stop of the machine's unit until the API server knows its kubelet's boot. A plain restart is
systemd's, with the node's pods: one of them needs the 30 s that Kubernetes gives a pod to end, unless it asks for
others. A switch has moved the pods before; so has `unbounded-agent restart`, which is measured as well. The processor
is emulated, and boots slowly: the ratio says more than the seconds.
"""

from collections.abc import Callable, Sequence

from agent.model.paths import machine_unit
from integration.bed.cluster.empty_host import EmptyHost, deployment, pod_network
from integration.bed.machine.node import MACHINE
from integration.bed.measure.bench_script import Measures


def measure_new_settings(host: EmptyHost) -> Measures:
    """Make a node with a pod, switch it to other settings of its kubelet, and restart it."""

    def ready() -> None:
        host.wait("the node is Ready", host.nodes_are_ready)
        host.wait("the pod runs", host.deployment_runs)

    host.guest.run(["unbounded-agent", "up"], timeout=1500)
    host.apply(pod_network(), deployment())
    ready()
    text = host.configuration().replace('"2s" }', '"2s", maxPods = 37 }')
    host.guest.write("/etc/unbounded-agent/config.toml", text.encode())
    return measure_switch(host, ["unbounded-agent", "switch", MACHINE], ready)


def measure_switch(host: EmptyHost, switch: Sequence[str], ready: Callable[[], None]) -> Measures:
    """Switch the machine with this command, and restart it in both ways, each time when `ready` has waited for pods."""
    restarts = ["unbounded-agent", "restart", MACHINE], ["systemctl", "restart", machine_unit(MACHINE)]
    seconds = list[int]()
    for command in (switch, *restarts):
        if seconds:
            ready()
        host.guest.run([*command], timeout=1500)
        # systemd does not wait for the kubelet: until then, the file is missing, or older than the stop.
        host.wait("the kubelet works", lambda: down(host) > 0)
        seconds.append(down(host))
    switched, drained, plain = seconds
    return {
        "switch_down_seconds": switched,
        "restart_down_seconds": plain,
        "drained_restart_down_seconds": drained,
        "switch_vs_restart": switched / plain,
        "switch_vs_drained_restart": switched / drained,
    }


def down(host: EmptyHost) -> int:
    """Return the seconds from the machine's last stop until its kubelet worked again; not positive until it does."""
    joined = f"/run/unbounded-agent/machines/{MACHINE}/report/joined"
    stopped = f"systemctl show --value --property=ActiveExitTimestamp {machine_unit(MACHINE)}"
    script = f'echo $(($(stat --format=%Y {joined} || echo 0) - $(date --date="$({stopped})" +%s)))'
    return int(host.guest.run(["sh", "-c", script]).stdout)
