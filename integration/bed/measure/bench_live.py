"""Measure how a running machine follows its host, relative to bare tools, and what the service costs."""

import statistics

from integration.bed.measure.bench_script import Measures, numbers, script, seconds
from integration.bed.measure.pairs import compared
from integration.bed.vm.guest import Guest
from integration.bed.vm.qemu import PORTS
from integration.bed.vm.simulated_host import SimulatedHost

QUIET = 4.0
"""Seconds. If the service makes no pass for so long, the passes for udev's events are over, and the next pass is the
one for the new node."""
READY = """
page=http://127.0.0.1:9788/readyz/machines/gpu-node
until python3 -c "import urllib.request; urllib.request.urlopen('$page', timeout=10)" 2>/dev/null; do sleep 1; done
"""


def measure_hotplug(host: SimulatedHost, pairs: int) -> Measures:
    """Plug up to `pairs` GPUs into empty ports of a ready machine's host, one after the other.

    Each GPU's node comes to the machine twice: by the agent, then by set-property and bind alone; nvidia-ctk runs in
    between. Ratios are taken within such a pair: the speed of an emulated processor changes all the time.
    """
    opened, bare, ready, ctk = [], [], [], []
    for port in [port for port in range(PORTS) if port not in host.gpus][:pairs]:
        minor = str(len(host.gpus))
        _plug(host, port)
        ours = numbers(script(host.guest, "hotplug", "agent", minor, timeout=300))
        opened.append(ours["open"])
        ready.append(ours["ready"])
        ctk.append(numbers(script(host.guest, "hotplug", "ctk", minor, timeout=120))["ctk"])
        bare.append(numbers(script(host.guest, "hotplug", "bare", minor, timeout=300))["open"])
    return {
        "hotplug_open_seconds": statistics.median(opened),
        "hotplug_bare_seconds": statistics.median(bare),
        "hotplug_ready_seconds": statistics.median(ready),
        "hotplug_ctk_seconds": statistics.median(ctk),
        **compared("hotplug_open_vs_bare", opened, bare),
        **compared("hotplug_ready_vs_ctk", ready, ctk),
    }


def measure_reset(guest: Guest, gpu: str, pairs: int) -> Measures:
    """Measure how long a GPU is away for a reset, by the agent until its machine has it again, or by nvidia-smi alone.

    The driver's nvidia-smi is real; the reset is simulated, and takes no time. So this is what the agent adds.
    """
    ours, bare = [], []
    for _ in range(pairs):
        bare.append(seconds(script(guest, "reset", "bare", gpu, timeout=300)))
        ours.append(seconds(script(guest, "reset", "agent", gpu, timeout=600)))
    measures: Measures = {"reset_to_schedulable_seconds": statistics.median(ours)}
    return measures | compared("reset_to_schedulable_vs_bare", ours, bare)


def measure_commands(guest: Guest, pairs: int) -> Measures:
    """Measure the processor time of commands, as a multiple of an empty Python program's.

    The goal is 15, and 0.2 s on a processor that is not emulated.
    """
    guest.run(["sh", "-c", READY], timeout=200)
    found: dict[str, tuple[list[float], list[float]]] = {}
    for line in script(guest, "commands", str(pairs), timeout=600).stdout.splitlines():
        name, ours, bare = line.split()
        times = found.setdefault(name, ([], []))
        times[0].append(float(ours))
        times[1].append(float(bare))
    measures: Measures = {}
    for name, (ours_times, bare_times) in found.items():
        measures |= compared(f"{name}_vs_python", ours_times, bare_times)
    return measures


def measure_idle(guest: Guest, seconds: float) -> Measures:
    """Measure the host half's service while nothing changes. Raises ValueError if no pass or no process was counted."""
    guest.run(["sh", "-c", READY], timeout=200)
    found = numbers(script(guest, "idle", str(seconds), timeout=seconds + 200))
    # The script first causes a pass that starts a process. If that is not counted, counting does not work.
    if not found["counted_processes"] or not found["passes"]:
        raise ValueError(f"processes are not counted, or no pass was made: {found}")
    return {
        "idle_seconds": seconds,
        "idle_passes": int(found["passes"]),
        "idle_processes_spawned": int(found["processes"]),
        "idle_cpu_seconds": found["cpu_seconds"],
        "idle_wakeups": int(found["wakeups"]),
        "resident_mib": found["resident_mib"],
    }


def _plug(host: SimulatedHost, port: int) -> None:
    """Plug in one more GPU, and wait until it has its driver and the service is quiet; its node is not made yet."""
    host.qemu.plug(port)
    bound = f"until test $(ls -d /sys/bus/pci/drivers/nvidia/0000:* | wc -l) = {len(host.gpus)}; do sleep 0.5; done"
    host.guest.run(["sh", "-c", bound], timeout=60)
    script(host.guest, "quiet", str(QUIET), timeout=200)
