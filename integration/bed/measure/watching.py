"""Follow a change: when a node can be opened, and what the metrics say meanwhile."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from integration.bed.machine.node import MACHINE
from integration.bed.vm.guest import Completed, Guest
from integration.bed.waiting import wait

UNIT = "watching"
# One program reads the metrics, then opens the node, so that a test can compare a claim of the metrics with what the
# node does afterwards. The program may also run in the machine, which has the host's network and CLOCK_MONOTONIC.
SCRIPT = f"""
import http.client, json, os, re, sys, time, urllib.request
def value(page, name):
    found = re.search(f'^unbounded_agent_{{name}}{{{{machine="{MACHINE}"}}}} (.*)$', page, re.MULTILINE)
    return int(float(found[1])) if found else None
last = None
while True:
    try:
        page = urllib.request.urlopen("http://127.0.0.1:9788/metrics", timeout=2).read().decode()
        said = [value(page, "machine_ready"), value(page, "machine_gpus")]
    except (OSError, http.client.HTTPException):
        said = [None, None]
    try:
        os.close(os.open(sys.argv[1], os.O_RDWR))
        now = [*said, True]
    except OSError:
        now = [*said, False]
    if now != last:
        print(json.dumps([time.monotonic(), *now]), flush=True)
    last = now
    time.sleep(0.1)
"""


@dataclass(frozen=True)
class Sample:
    """The values at a moment at which at least one of them had changed."""

    time: float
    """Seconds of the guest's CLOCK_MONOTONIC."""
    ready: int | None
    """The metric machine_ready; None if the page was not served or did not have the metric."""
    gpus: int | None
    """The metric machine_gpus, the number of granted GPUs; None in the same cases."""
    opens: bool


def uptime(guest: Guest) -> float:
    """Return the guest's clock in seconds, equal to CLOCK_MONOTONIC while the guest is not suspended (proc(5))."""
    return float(guest.read("/proc/uptime").split()[0])


class Watching:
    """Samples a node and the metrics while the context is open; `run` runs commands on the host or in the machine."""

    def __init__(self, run: Callable[..., Completed], node: str) -> None:
        self._run, self._node = run, node

    def __enter__(self) -> "Watching":
        start = ("systemd-run", "--quiet", f"--unit={UNIT}", "--property=Type=exec", "python3", "-c", SCRIPT)
        self._run(*start, self._node)
        return self

    def __exit__(self, *_: object) -> None:
        self._run("systemctl", "stop", UNIT)

    def samples(self) -> list[Sample]:
        """Return all samples so far."""
        lines = self._run("journalctl", "--output=cat", f"--unit={UNIT}", "--no-pager").stdout.splitlines()
        # systemd's own lines about the unit are not lists.
        return [Sample(*json.loads(line)) for line in lines if line.startswith("[")]

    def wait(self, wanted: Callable[[Sample], bool], since: float, seconds: float = 240) -> float:
        """Wait for a `wanted` sample at `since` (a time by `uptime`) or later; return its distance from `since`."""

        def found() -> Sample | None:
            return next((each for each in self.samples() if each.time >= since and wanted(each)), None)

        sample = wait("a wanted sample", found, seconds, lambda: str(self.samples()))
        assert sample
        return sample.time - since

    def ready_history(self) -> str:
        """Return the values of the metric machine_ready, in order and without repetitions, such as `1, 0, 1`."""
        values = ["none" if each.ready is None else str(each.ready) for each in self.samples()]
        return ", ".join(each for each, before in zip(values, ["", *values], strict=False) if each != before)
