"""The Debian package on a host whose machine runs: it replaces an installation from a checkout, and is upgraded."""

import re

import pytest

from integration.bed.measure.restarts import AGENT, restarted
from integration.bed.packages import packages
from integration.conftest import Bed

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

PACKAGE = "unbounded-agent"


def install_package(bed: Bed, version: str) -> str:
    """Install a release's package as dpkg(1) does, also an older one, and return what it prints."""
    place = f"/root/{version}.deb"
    bed.guest.write(place, packages(version)[PACKAGE].read_bytes())
    done = bed.run("dpkg", "--install", place, timeout=900)
    return done.stdout + done.stderr


def replace_by_package(bed: Bed) -> None:
    """Install the package next to an installation from a checkout, and do what the package then advises."""
    advice = install_package(bed, "1.0")
    commands = re.findall(r"^  (rm .*)$", advice, re.MULTILINE)
    assert commands, advice
    for command in commands:
        bed.run("sh", "-ec", command)
    bed.run("systemctl", "restart", AGENT, timeout=120)


def expect_upgrade(bed: Bed, version: str) -> None:
    """Install that version, and assert that the service runs it."""
    started = bed.starts()[AGENT]
    install_package(bed, version)
    assert bed.starts()[AGENT] != started, "the service runs the new code"
    bed.wait_served()
    shown = bed.run("dpkg-query", "--show", "--showformat=${Version} ${db:Status-Status}", PACKAGE).stdout
    assert shown == f"{version} installed"


def test_upgrade_and_downgrade_restart_only_the_service(ready: Bed) -> None:
    before = ready.starts()
    replace_by_package(ready)
    for version in ("1.1", "1.0"):
        expect_upgrade(ready, version)
    assert restarted(before, ready.starts()) == {AGENT}
