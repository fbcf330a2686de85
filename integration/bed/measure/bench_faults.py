"""Measure how soon a GPU that fails is tainted at a real API server, without a virtual machine.

Simulated are the host and its kernel log. What follows the log, the pass and the service of the node are the agent's
own. The service runs in a process of its own, as its unit would start it.
"""

import statistics
import tempfile
import time
from pathlib import Path

from agent.dra.inventory import GPU_STATES
from agent.dra.slices import COLLECTION
from agent.model.paths import gpu_states_file
from integration.bed.cluster.dra_node import Offering, offering
from integration.bed.cluster.stand_in_kubelet import until
from integration.bed.measure.bench_dra import getting, watched
from integration.bed.measure.bench_script import Measures
from integration.bed.measure.pairs import compared
from integration.faults_suite.gpu_world import GpuWorld
from tests.fakes.dra_machine import NODE
from tests.fakes.kernel_log import Log

PAIRS = 20
MACHINE = "a"
FAILS = "NVRM: Xid (PCI:0000:02:00): 48, pid=1, name=x"
RECOVERS = "NVRM: Xid (PCI:0000:02:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"


def measure_faults(pairs: int = PAIRS) -> Measures:
    """Measure pairs: from the kernel's record to the taint, and the least that this takes: a read, and one request."""
    ours, back, bare = [], [], []
    with offering() as offer, tempfile.TemporaryDirectory() as directory:
        world = GpuWorld(Path(directory))
        world.begin()
        seen = watched(offer, lambda devices: sum(bool(each.get("taints")) for each in devices))
        _publish(offer, world)
        for _ in range(pairs):
            bare.append(_bare(offer))
            ours.append(_seconds(offer, world, seen, FAILS, 1))
            back.append(_seconds(offer, world, seen, RECOVERS, 0))
        world.log.close()
    return {
        "fault_to_taint_seconds": statistics.median(ours),
        **compared("fault_to_taint_vs_bare", ours, bare),
        **compared("recovery_to_untainted_vs_bare", back, bare),
    }


def _seconds(offer: Offering, world: GpuWorld, seen: dict[int, float], line: str, tainted: int) -> float:
    """Return the seconds from the kernel's line until so many GPUs are tainted."""
    seen.clear()
    begun = time.monotonic()
    world.tell(line)
    assert world.notices()
    world.make_pass()
    _publish(offer, world)
    until(f"{tainted} GPUs are tainted", lambda: tainted in seen)
    return seen[tainted] - begun


def _publish(offer: Offering, world: GpuWorld) -> None:
    """The host and the machine do not share a directory here."""
    offer.machine.put(GPU_STATES, world.host.read(gpu_states_file(MACHINE)))


def _bare(offer: Offering) -> float:
    """Return the seconds to read a record, and to make one request."""
    log = Log()
    reader = log.open("", None)
    with getting(offer, f"{COLLECTION}?fieldSelector=spec.nodeName%3D{NODE}") as get:
        begun = time.monotonic()
        log.write(FAILS)
        assert FAILS in reader.read()
        get()
        seconds = time.monotonic() - begun
    reader.close()
    log.close()
    return seconds
