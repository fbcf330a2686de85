"""The service makes a pass when something changes: its metrics say what started each pass."""

import re
from collections.abc import Callable

import pytest

from integration.bed.machine.node import MACHINE
from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

COUNTED = re.compile(r'^unbounded_agent_wakeups_total\{source="(?P<source>[^"]+)"\} (?P<count>\S+)$', re.MULTILINE)


def wakeups(bed: Bed) -> dict[str, int]:
    """Return the number of passes that events caused, by source."""
    return {each["source"]: int(float(each["count"])) for each in COUNTED.finditer(bed.page("/metrics"))}


def settled(bed: Bed) -> dict[str, int]:
    """Return the wakeups once no event is left over from earlier changes.

    The page shows the counts of the last pass, which may take many seconds here. An event that came before a reload is
    counted, or at least consumed, before the reload after it.
    """
    bed.run("udevadm", "settle")
    before: dict[str, int] = {}
    while (found := wakeups_after_reload(bed)) != before:
        before = found
    return found


def wakeups_after_reload(bed: Bed) -> dict[str, int]:
    """Reload the service, and return the wakeups once the reload's pass has ended."""
    before = reloads(bed)
    bed.run("systemctl", "reload", "unbounded-agent")
    wait("a pass since the reload", lambda: reloads(bed) != before, 120, bed.evidence)
    return wakeups(bed)


def reloads(bed: Bed) -> list[str]:
    """Return the lines of the metrics page that count reloads. The page is made at the end of each pass."""
    return re.findall("^unbounded_agent_config_reloads_total.*", bed.page("/metrics"), re.MULTILINE)


def wait_for_wakeup(bed: Bed, source: str, after: int, seconds: float = 180) -> dict[str, int]:
    """Wait until that source has caused more passes than `after`."""

    def found() -> dict[str, int]:
        passes = wakeups(bed)
        return passes if passes[source] > after else {}

    return wait(f"a pass by {source}", found, seconds, lambda: f"{wakeups(bed)}\n{bed.evidence()}")


def report_of_a_stopped_containerd(bed: Bed) -> None:
    bed.node.shell("systemctl stop containerd.service; systemctl start unbounded-agent-gpu.service", timeout=120)


CHANGES: tuple[tuple[str, Callable[[Bed], object]], ...] = (
    ("loader-cache", lambda bed: bed.run("ldconfig")),
    # No GPU has this minor: nothing is granted, but the node causes a pass.
    ("device-nodes", lambda bed: bed.run("mknod", "/dev/nvidia99", "c", "195", "99")),
    ("device-nodes", lambda bed: bed.run("rm", "/dev/nvidia99")),
    # One device, whose events a busy udev cannot spread over several passes. By its name: a path would also trigger the
    # GPU's DRM nodes, whose mode udev then sets again, which is an event of the source device-nodes.
    ("udev", lambda bed: bed.run("udevadm", "trigger", "--action=change", "--sysname-match=0000:01:00.0")),
    ("reports", report_of_a_stopped_containerd),
    ("machined", lambda bed: bed.run("machinectl", "terminate", MACHINE)),
)
NOISE = """
import os, stat, subprocess
for _ in range(1000):
    os.mknod("/dev/tty-noise", stat.S_IFCHR | 0o600, os.makedev(5, 0))
    os.unlink("/dev/tty-noise")
    for end in os.openpty():
        os.close(end)
with open("/etc/noise", "w") as file:
    file.write("noise")
subprocess.run(["udevadm", "trigger", "--action=change", "--subsystem-match=tty", "--settle"], check=True)
"""


def test_a_start_during_a_run_of_the_machine_half_causes_another_run(ready: Bed) -> None:
    """The run may have read already what has changed: a plain start would only wait for it."""
    setup, again = "unbounded-agent-gpu.service", "unbounded-agent-gpu-again.service"
    states = "systemctl show --value --property=ActiveState --property=SubState"
    script = f"""
        runs() {{ journalctl --sync; journalctl -o cat --unit={setup} --grep='^Starting' | wc -l; }}
        before=$(runs)
        systemctl --no-block start {setup}
        while [ "$({states} {setup} | tr -d '\\n')" != activatingstart ]; do :; done
        systemctl --no-block start {again}
        {states} {again} | tr '\\n' ' '
        # Between the end of one job and the next one, none is listed.
        until [ $(($(runs) - before)) -ge 2 ]; do sleep 0.2; done
        while systemctl list-jobs --no-legend | grep -q unbounded-agent-gpu; do sleep 0.2; done
        echo $(($(runs) - before))
    """
    assert ready.node.shell(script, timeout=120).stdout.split() == ["inactive", "dead", "2"]


def test_each_source_of_events_causes_a_pass(ready: Bed) -> None:
    """Only the source that changed causes a pass, in the service's sandbox with real udev, inotify and mounts."""
    ready.wait_served()
    for source, change in CHANGES:
        before = settled(ready)
        change(ready)
        after = wait_for_wakeup(ready, source, before[source])
        others = {name: count - before[name] for name, count in after.items() if name not in (source, "reports")}
        assert set(others.values()) == {0}, (source, others)


@pytest.mark.exhaustive
def test_unrelated_changes_cause_no_pass(ready: Bed) -> None:
    ready.wait_served()
    before = wakeups(ready)
    ready.run("python3", "-c", NOISE)
    # An event that does concern us, behind all those in the queues.
    ready.run("ldconfig")
    after = wait_for_wakeup(ready, "loader-cache", before["loader-cache"])
    assert after["loader-cache"] == before["loader-cache"] + 1
    assert (after["udev"], after["device-nodes"]) == (before["udev"], before["device-nodes"])
