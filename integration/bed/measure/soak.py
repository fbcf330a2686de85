"""Hours of change on the simulated GPU host with three machines: what the agent uses must not grow."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from integration.bed import wheels
from integration.bed.cache import step
from integration.bed.drivers.driver_upgrade import LOAD, MODULES, REPLACE, UPGRADE, send_upgrade
from integration.bed.drivers.host_roots import LIBRARIES, SPLIT_LIBRARIES, driver_version, host_root
from integration.bed.machine.machine_image import machines_disk
from integration.bed.machine.node import MACHINE
from integration.bed.vm.guest import Completed, Guest
from integration.bed.vm.host_image import host_image
from integration.bed.vm.installation import install
from integration.bed.vm.simulated_host import SimulatedHost

MACHINES = (MACHINE, "second", "third")
CONFIGURATION = "".join(f"[machines.{name}]\n" for name in MACHINES)
SCRIPTS = Path(__file__).with_name("soak_scripts")
GPUS = range(2)
"""Hot-plug ports with a GPU. Few: nvidia-ctk takes longer for each of them, and no result depends on their number."""
PORT = 2
"""The hot-plug port, at first empty, into which GPUs are plugged."""
ALLOWED = {"resident_kib": 0.1, "bytes_var": 0.01}
"""Fraction by which a number may grow after the warm-up: Python frees little memory, and directories no blocks."""
# All machines share one image, and each has its own overlay. --make-private: otherwise, a mount on a machine's root
# directory would appear on the image as well (shared subtrees).
ROOTS = """
mkdir -p /run/image
mount --bind --make-private /var/lib/machines/{image} /run/image
for machine in {machines}; do
    root=/var/lib/machines/$machine changes=/run/changes-$machine
    mkdir -p $root $changes
    mount -t tmpfs -o size=768m changes $changes
    mkdir $changes/upper $changes/work
    mount -t overlay -o lowerdir=/run/image,upperdir=$changes/upper,workdir=$changes/work overlay $root
done
"""
# The archive has each file's whole path, because some file names are in two directories. Its format `posix` keeps all
# digits of the times.
SAVE = """
cd /
find {libraries} -name '*.so.{version}' -print0 |
    tar --create --format=posix --null --files-from=- --file=/root/original.tar
"""
RESTORE = """
find /{libraries} -name '*.so.{version}' -delete
tar --extract --directory=/ --file=/root/original.tar
ldconfig -n /{split}
ldconfig
"""
LOAD_ORIGINAL = "/usr/lib/simulated-gpu-host/load-driver"
# rmmod fails while a process has a node open, if only to check it: hence the retries. Not `modprobe -r`, which would
# also remove DRM's modules: insmod, which loads the other driver, does not load DRM's modules again.
UNLOADED = """
for try in $(seq 60); do
    for module in nvidia_drm nvidia_modeset nvidia_uvm nvidia; do
        test ! -d /sys/module/$module || rmmod $module
    done
    test -d /sys/module/nvidia || exit 0
    sleep 1
done
exit 1
"""
LET_REPORT = """
for machine in {machines}; do
    systemctl --machine=$machine start unbounded-agent-gpu.service &
    started="$started $!"
done
for each in $started; do wait $each; done
"""
BOUND = "until test $(ls -d /sys/bus/pci/drivers/nvidia/0000:* | wc -l) = {count}; do sleep 0.5; done"
HOTPLUG, SWITCH, REPORT = "hotplug cycles", "driver switches", "reports of three machines"
SHOWN = 10
"""The progress is printed each time that so many changes are done."""
QUIET = "5"
"""Seconds without a pass."""

Measured = Mapping[str, object]
"""Numbers, and lists of names."""


@dataclass
class Soak:
    """A host whose three machines are ready."""

    host: SimulatedHost
    deadline: float
    versions: tuple[str, str]
    """Versions of the driver: the host's first one, and its replacement."""
    current: int = 0
    """Index of the version that the host has now."""
    done: dict[str, int] = field(default_factory=dict)
    """Changes, by their kind."""

    @property
    def guest(self) -> Guest:
        return self.host.guest

    def follow(self, gpus: int) -> None:
        """Wait until every machine has that many GPUs of the current driver and is ready."""
        self._script("follow", str(gpus), self.versions[self.current], *MACHINES, timeout=1800)

    def hotplug(self) -> None:
        """Plug in a GPU, which appears in all machines, then unplug it without `gpus detach`."""
        self.host.qemu.plug(PORT)
        self.guest.run(["sh", "-c", BOUND.format(count=len(self.host.gpus))], timeout=120)
        self.guest.run(["/usr/lib/simulated-gpu-host/make-nodes"])
        self.follow(len(self.host.gpus))
        self.host.qemu.unplug(PORT)
        self.follow(len(self.host.gpus))

    def switch_driver(self) -> None:
        """Switch to the driver's other version; a second call switches back."""
        old, self.current = self.versions[self.current], 1 - self.current
        if self.current:
            files = REPLACE.format(old=old, new=UPGRADE, libraries=LIBRARIES, split=SPLIT_LIBRARIES)
            load = LOAD.format(directory=MODULES)
        else:
            files = RESTORE.format(version=old, libraries=LIBRARIES, split=SPLIT_LIBRARIES)
            load = LOAD_ORIGINAL
        self.guest.run(["sh", "-ec", files], timeout=240)
        self.guest.run(["sh", "-c", UNLOADED], timeout=200)
        self.guest.run(["sh", "-ec", load], timeout=240)
        self.follow(len(self.host.gpus))

    def report(self) -> None:
        """Let each machine report once."""
        self.guest.run(["sh", "-ec", LET_REPORT.format(machines=" ".join(MACHINES))], timeout=600)

    def change(self, counts: Mapping[str, int]) -> None:
        """Make as many changes of each kind as `counts` says, evenly spread, or fewer if the time is up."""
        changes = {HOTPLUG: self.hotplug, SWITCH: self.switch_driver, REPORT: self.report}
        self.done, began = dict.fromkeys(counts, 0), time.monotonic()
        for number, kind in enumerate(turns(counts), 1):
            if time.monotonic() > self.deadline:
                break
            changes[kind]()
            self.done[kind] += 1
            if number % SHOWN == 0:
                print(f"    {self.done} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    def measure(self) -> Measured:
        """Wait until the agent has nothing left to do, and return the measurements."""
        self.follow(len(self.host.gpus))
        path = "/root/bench/quiet"
        self.guest.write(path, (SCRIPTS.with_name("bench_scripts") / "quiet").read_bytes(), 0o755)
        self.guest.run([path, MACHINE, QUIET], timeout=300)
        found: Measured = json.loads(self._script("measure", *MACHINES, timeout=300).stdout)
        return found

    def _script(self, name: str, *arguments: str, timeout: float) -> Completed:
        return self.guest.run([f"/root/soak/{name}", *arguments], timeout=timeout)


def turns(counts: Mapping[str, int]) -> list[str]:
    """Return a list that has each kind as often as `counts` says, spread evenly over the list."""
    places = [((number + 0.5) / count, kind) for kind, count in counts.items() for number in range(count)]
    return [kind for _, kind in sorted(places)]


def growth(before: Measured, after: Measured) -> dict[str, object]:
    """Return what grew beyond ALLOWED: numbers by how much, lists by their new entries."""
    grown: dict[str, object] = {}
    for name, then in before.items():
        now = after[name]
        if isinstance(then, list) and isinstance(now, list):
            if len(now) > len(then):
                grown[name] = sorted(set(now) - set(then)) or len(now) - len(then)
        elif isinstance(then, int) and isinstance(now, int) and now - then > int(then * ALLOWED.get(name, 0)):
            grown[name] = now - then
    return grown


def _prepare(host: SimulatedHost, minutes: float) -> Soak:
    guest = host.guest
    old = driver_version(host_root())
    with step("make three machines, and a second driver"):
        guest.run(["sh", "-ec", ROOTS.format(image=MACHINE, machines=" ".join(MACHINES))])
        guest.run(["sh", "-ec", SAVE.format(libraries=LIBRARIES, version=old)], timeout=120)
        new = send_upgrade(guest)
    for script in SCRIPTS.iterdir():
        guest.write(f"/root/soak/{script.name}", script.read_bytes(), 0o755)
    with step("start the service, and wait until the machines are ready"):
        guest.run(["systemctl", "start", "unbounded-agent.service"], timeout=600)
        soak = Soak(host, time.monotonic() + minutes * 60, (old, new))
        soak.follow(len(host.gpus))
    return soak


def _run(options: argparse.Namespace) -> dict[str, object]:
    image = host_image(wheels.dependencies())
    with SimulatedHost(image, machines_disk(), gpus=GPUS, memory_mib=6144, one_processor=True) as host:
        with step("install the host half"):
            install(host.guest, CONFIGURATION)
        soak = _prepare(host, options.minutes)
        with step("warm up: each change once"):
            soak.hotplug()
            soak.switch_driver()
            soak.switch_driver()
            soak.report()
            before = soak.measure()
        started = time.monotonic()
        with step("plug and unplug GPUs, switch drivers, and let machines report"):
            soak.change({HOTPLUG: options.cycles, SWITCH: options.switches, REPORT: options.reports // len(MACHINES)})
        if soak.current:
            soak.switch_driver()
        after = soak.measure()
    sizes = {
        name: [len(each) if isinstance(each, list) else each for each in (before[name], after[name])] for name in before
    }
    return {
        "done": soak.done,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "before_after": sizes,
        "growth": growth(before, after),
    }


def main() -> int:
    """Print one JSON object; return 1 if something has grown."""
    parser = argparse.ArgumentParser(prog="integration/soak", description=__doc__)
    parser.add_argument("--cycles", type=int, default=200, help="GPUs that are plugged in and out (default: 200)")
    parser.add_argument("--switches", type=int, default=50, help="of the host's driver (default: 50)")
    parser.add_argument("--reports", type=int, default=500, help="of all machines together (default: 500)")
    parser.add_argument("--minutes", type=float, default=480, help="no change begins after that (default: 480)")
    result = _run(parser.parse_args())
    print(json.dumps(result))
    return 1 if result["growth"] else 0


if __name__ == "__main__":
    sys.exit(main())
