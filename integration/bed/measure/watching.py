"""Follows a change: when a node opens, and what the metrics say meanwhile."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from integration.bed.machine.node import MACHINE
from integration.bed.vm.guest import Completed, Guest

UNIT = "watching"
# One program for both, in this order, so that what the metrics claim can be held against what the node does after it.
# The machine is on the host's network, and shares its CLOCK_MONOTONIC.
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
    """A moment at which something was another than before."""

    time: float
    """Seconds of the guest's CLOCK_MONOTONIC."""
    ready: int | None
    """The metric; None when the page was not served, or did not have it."""
    gpus: int | None
    """Granted ones, by the metrics."""
    opens: bool


def uptime(guest: Guest) -> float:
    """Seconds of the guest's clock, which its CLOCK_MONOTONIC is too as long as it is not suspended (proc(5))."""
    return float(guest.read("/proc/uptime").split()[0])


class Watching:
    """A context manager: watches that node and the metrics until its end; `run` is the host's or the machine's."""

    def __init__(self, run: Callable[..., Completed], node: str) -> None:
        self._run, self._node = run, node

    def __enter__(self) -> "Watching":
        start = ("systemd-run", "--quiet", f"--unit={UNIT}", "--property=Type=exec", "python3", "-c", SCRIPT)
        self._run(*start, self._node)
        return self

    def __exit__(self, *_: object) -> None:
        self._run("systemctl", "stop", UNIT)

    def samples(self) -> list[Sample]:
        """All that were taken."""
        lines = self._run("journalctl", "--output=cat", f"--unit={UNIT}", "--no-pager").stdout.splitlines()
        # systemd's own lines of the unit are no lists.
        return [Sample(*json.loads(line)) for line in lines if line.startswith("[")]

    def wait(self, wanted: Callable[[Sample], bool], since: float, seconds: float = 240) -> float:
        """Until it is so; how long after `since` (by `uptime`) that was first seen."""
        deadline = time.monotonic() + seconds
        while True:
            samples = self.samples()
            if found := next((each for each in samples if each.time >= since and wanted(each)), None):
                return found.time - since
            assert time.monotonic() < deadline, samples
            time.sleep(0.5)

    def told_ready(self) -> str:
        """What the metric machine_ready was, one after the other: `1, 0, 1`."""
        values = ["none" if each.ready is None else str(each.ready) for each in self.samples()]
        return ", ".join(each for each, before in zip(values, ["", *values], strict=False) if each != before)
