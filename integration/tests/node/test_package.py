"""The Debian package on a host whose machine runs: it replaces an installation from a checkout, and is upgraded."""

import re

import pytest

from integration.bed.measure.restarts import AGENT, restarted
from integration.bed.packages import packages
from integration.conftest import Bed

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

PACKAGE = "unbounded-agent"


def install(bed: Bed, version: str) -> str:
    """Install a release's package as dpkg(1) does, also an older one, and return what it prints."""
    place = f"/root/{version}.deb"
    bed.guest.write(place, packages(version)[PACKAGE].read_bytes())
    done = bed.run("dpkg", "--install", place, timeout=900)
    return done.stdout + done.stderr


def test_upgrade_and_downgrade_restart_only_the_service(ready: Bed) -> None:
    before = ready.starts()
    advice = install(ready, "1.0")
    commands = re.findall(r"^  (rm .*)$", advice, re.MULTILINE)
    assert commands, advice
    for command in commands:
        ready.run("sh", "-ec", command)
    ready.run("systemctl", "restart", AGENT, timeout=120)
    for version in ("1.1", "1.0"):
        started = ready.starts()[AGENT]
        install(ready, version)
        assert ready.starts()[AGENT] != started, "the service runs the new code"
        ready.wait_served()
        shown = ready.run("dpkg-query", "--show", "--showformat=${Version} ${db:Status-Status}", PACKAGE).stdout
        assert shown == f"{version} installed"
    assert restarted(before, ready.starts()) == {AGENT}
