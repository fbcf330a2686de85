"""A stop of a machine, also by the host's shutdown, is announced in it: what delays a shutdown there may end its work.

The kubelet is such a program (its graceful node shutdown), tests/kubernetes/test_shutdown.py. Here, systemd-inhibit
stands in for it.
"""

import time
from collections.abc import Callable

import pytest

from integration.bed.measure.restarts import AGENT, MACHINE_UNIT
from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

LOG = "/var/lib/machines/gpu-node/var/log/delays-shutdown"
DELAYS = r"""
trap 'echo SIGTERM >>/var/log/delays-shutdown; sync; exit' TERM
match="type='signal',member='PrepareForShutdown'"
stdbuf -oL busctl monitor --match="$match" org.freedesktop.login1 >/run/delays-shutdown &
until grep -q Prepare /run/delays-shutdown; do sleep 0.2; done
echo announced >>/var/log/delays-shutdown
sleep 3
echo finished >>/var/log/delays-shutdown
sync
kill $!
"""
"""Runs in the machine, with a lock of mode delay: waits until logind announces the shutdown, then works 3 seconds."""


def delay_shutdowns(bed: Bed) -> None:
    bed.guest.write("/var/lib/machines/gpu-node/root/delays-shutdown", DELAYS.encode())
    inhibit = "systemd-inhibit --what=shutdown --mode=delay --who=test sh /root/delays-shutdown"
    bed.node.shell(f"rm -f /var/log/delays-shutdown; systemd-run --unit=delays-shutdown {inhibit}")
    listed = "systemd-inhibit --list --no-pager; busctl list --no-pager"
    wait("it delays shutdowns", lambda: "delay" in bed.node.shell(listed).stdout, 60)
    # busctl subscribes after the lock was taken.
    wait("it listens", lambda: bed.node.run("pgrep", "busctl", check=False).status == 0, 60)
    time.sleep(3)


def said(bed: Bed) -> list[str]:
    return bed.guest.read(LOG).decode().split()


def test_a_stop_of_the_unit_is_announced(ready: Bed, measured: Callable[[str, object], None]) -> None:
    """Without the agent's service too."""
    ready.run("systemctl", "stop", AGENT, "unbounded-agent.socket")
    delay_shutdowns(ready)
    before = time.monotonic()
    ready.run("systemctl", "stop", MACHINE_UNIT, timeout=400)
    measured("seconds to stop", f"{time.monotonic() - before:.1f}")
    assert said(ready) == ["announced", "finished"]


def test_the_hosts_reboot_is_announced(ready: Bed) -> None:
    """By the command of unattended-upgrades. The machine starts again with the host, and does not stop again."""
    ready.run("machinectl", "enable", "gpu-node")
    delay_shutdowns(ready)
    ready.host.reboot(timeout=600, command=("/sbin/shutdown", "-r", "now"))
    assert said(ready) == ["announced", "finished"]
    ready.wait_ready(420)
