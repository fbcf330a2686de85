"""Measure for how long a node is down when it is switched to another root file system, next to a plain restart.

Down is the time from the stop of the machine's unit until the API server knows its kubelet's boot. Both drain the node
before that. The processor is emulated, and boots slowly: the ratio says more than the seconds.
"""

from collections.abc import Callable, Sequence

from agent.model.paths import machine_unit
from integration.bed.cluster.empty_host import EmptyHost, pod_network
from integration.bed.machine.node import MACHINE
from integration.bed.measure.bench_script import Measures


def measure_new_settings(host: EmptyHost) -> Measures:
    """Make a node, switch it to other settings of its kubelet, and restart it."""

    def ready() -> None:
        host.wait("the node is Ready", host.nodes_are_ready)

    host.guest.run(["unbounded-agent", "up"], timeout=1500)
    host.apply(pod_network())
    ready()
    text = host.configuration().replace('"2s" }', '"2s", maxPods = 37 }')
    host.guest.write("/etc/unbounded-agent/config.toml", text.encode())
    return measure_switch(host, ["unbounded-agent", "switch", MACHINE], ready)


def measure_switch(host: EmptyHost, switch: Sequence[str], ready: Callable[[], None]) -> Measures:
    """Switch the machine with this command, wait with `ready` until its pods run, and restart it."""
    host.guest.run([*switch], timeout=1500)
    switched = down(host)
    ready()
    host.guest.run(["unbounded-agent", "restart", MACHINE], timeout=1500)
    restarted = down(host)
    return {
        "switch_down_seconds": switched,
        "restart_down_seconds": restarted,
        "switch_vs_restart": switched / restarted,
    }


def down(host: EmptyHost) -> int:
    """Return the seconds from the machine's last stop until its kubelet worked again."""
    joined = f"/run/unbounded-agent/machines/{MACHINE}/report/joined"
    stopped = f"systemctl show --value --property=ActiveExitTimestamp {machine_unit(MACHINE)}"
    script = f'echo $(($(stat --format=%Y {joined}) - $(date --date="$({stopped})" +%s)))'
    return int(host.guest.run(["sh", "-c", script]).stdout)
