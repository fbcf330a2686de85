"""Measure GPUs in a machine (set-up, hot-plug, faults, reset), claims, pods, root file systems and driver roots.

Most absolute times are those of an emulated processor and mean little; the ratios compare what ran side by side.
"""

import argparse
import json
import statistics
from collections.abc import Iterator

from integration.bed import wheels
from integration.bed.cache import step
from integration.bed.cluster.cluster import Cluster
from integration.bed.cluster.cluster_command import make_ready
from integration.bed.cluster.empty_host import EmptyHost
from integration.bed.machine.machine_image import machines_disk
from integration.bed.measure import history
from integration.bed.measure.bench_dra import measure_dra
from integration.bed.measure.bench_faults import measure_faults
from integration.bed.measure.bench_join import measure_join
from integration.bed.measure.bench_live import measure_commands, measure_hotplug, measure_idle, measure_reset
from integration.bed.measure.bench_pods import measure_pod_start
from integration.bed.measure.bench_script import Measures, numbers, script, seconds
from integration.bed.measure.bench_staging import measure_staging
from integration.bed.measure.bench_switch import measure_new_settings
from integration.bed.measure.pairs import compared, disturbed
from integration.bed.vm.guest import Guest
from integration.bed.vm.host_image import host_image
from integration.bed.vm.installation import CONFIGURATION, install
from integration.bed.vm.simulated_host import SimulatedHost

ROUNDS = 15
"""Pairs of runs. A ratio is taken within a pair: the speed of an emulated processor changes from minute to minute."""
LINKS = 60
"""Links that the plain recipe makes: as many as a current driver has. Each takes one call into the machine."""
PAIRS = 4
"""GPUs to plug in: one for each empty port of the virtual machine."""
COMMAND_PAIRS = 7
RESET_GPU = "0000:02:00.0"
IDLE = 600.0
"""Seconds for which the service is measured while nothing changes."""


def measure_setup(guest: Guest, rounds: int = ROUNDS) -> Measures:
    """Measure the set-up on a host with the flat layout, where the agent is installed but has never run."""
    guest.run(["unbounded-agent", "apply"], timeout=300)
    floor, setup = [], []
    for _ in range(rounds):
        floor.append(seconds(script(guest, "floor")))
        setup.append(seconds(script(guest, "setup")))
    first = seconds(script(guest, "setup", "first"))
    measures: Measures = {**numbers(script(guest, "size"))}
    recipe = numbers(script(guest, "recipe", str(LINKS), timeout=300))
    measures |= {
        "floor_seconds": statistics.median(floor),
        "setup_seconds": statistics.median(setup),
        "first_setup_seconds": first,
        "recipe_seconds": recipe["seconds"],
        "recipe_links": recipe["links"],
        "recipe_vs_setup": recipe["seconds"] / statistics.median(setup),
    }
    return measures | compared("setup_vs_floor", setup, floor)


def recipe_on_split_layout(guest: Guest) -> str:
    """Return the error that nvidia-ctk prints when the recipe fails on a host with Debian's layout.

    Raises ValueError if the recipe succeeds.
    """
    guest.run(["unbounded-agent", "apply"], timeout=300)
    ended = script(guest, "recipe", "0", timeout=300, check=False)
    if ended.status == 0:
        raise ValueError(f"the plain recipe worked on the split layout: {ended.stdout}")
    return ended.stderr.strip().splitlines()[-1]


def _run() -> Iterator[tuple[str, float | int | str]]:
    with step("GPUs by Dynamic Resource Allocation"):
        yield from measure_dra().items()
    with step("the taint of a GPU that fails"):
        yield from measure_faults().items()
    with step("root file systems of nodes"):
        yield from measure_join().items()
    with step("staging of a driver"):
        yield from measure_staging().items()
    dependencies, machines = wheels.dependencies(), machines_disk()
    with SimulatedHost(host_image(dependencies, layout="flat"), machines) as host:
        with step("install the host half"):
            install(host.guest)
        with step("measure on the flat layout"):
            yield from measure_setup(host.guest).items()
    with SimulatedHost(host_image(dependencies), machines) as host:
        with step("install the host half"):
            install(host.guest)
        with step("start the service"):
            host.guest.run(["systemctl", "start", "unbounded-agent.service"], timeout=240)
        with step("commands"):
            yield from measure_commands(host.guest, COMMAND_PAIRS).items()
        with step(f"what the service costs in {IDLE:.0f} s"):
            yield from measure_idle(host.guest, IDLE).items()
        with step("the reset of a GPU"):
            yield from measure_reset(host.guest, RESET_GPU, PAIRS).items()
        with step("GPUs that are plugged in"):
            yield from measure_hotplug(host, PAIRS).items()
        with step("the plain recipe on the split layout"):
            yield "recipe_on_split_layout", recipe_on_split_layout(host.guest)
    with EmptyHost() as host, step("a node's switch to another root file system"):
        yield from measure_new_settings(host).items()
    with SimulatedHost(host_image(dependencies), machines) as host:
        make_ready(host, CONFIGURATION)
        with Cluster(host) as cluster, step("pods by the device plugin and by Dynamic Resource Allocation"):
            yield from measure_pod_start(cluster).items()


def main() -> None:
    """Measure, keep the run, and print one line for each measurement, or with --json one object.

    With --draw, measure nothing and draw all runs that were kept.
    """
    parser = argparse.ArgumentParser(prog="integration/bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw all runs that were kept")
    options = parser.parse_args()
    if options.draw:
        print("\n".join(history.draw(history.runs(history.history_file()))))
        return
    measures = dict(_run())
    history.keep(measures, history.history_file())
    if options.json:
        print(json.dumps(measures, indent=1))
        return
    for name, value in measures.items():
        print(f"{name:36} {value if isinstance(value, str) else f'{value:.2f}'}")
    if names := disturbed(measures):
        print(f"other work disturbed this run, repeat it for: {', '.join(names)}")


if __name__ == "__main__":
    main()
