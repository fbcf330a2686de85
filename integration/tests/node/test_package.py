"""The Debian packages on a host whose machine runs: they replace an installation from a checkout, and are upgraded."""

import json
import re

import pytest

from integration.bed.machine.node import MACHINE, Pod
from integration.bed.measure.restarts import AGENT, restarted
from integration.bed.packages import RELEASES, packages
from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

PACKAGE = "unbounded-agent"
IN_MACHINE = ("unbounded-agent-machine", "unbounded-agent-machine-dra")


def install_package(bed: Bed, version: str) -> str:
    """Install a release's package as dpkg(1) does, also an older one, and return what it prints."""
    place = f"/root/{version}.deb"
    bed.guest.write(place, packages(version)[PACKAGE].read_bytes())
    done = bed.run("dpkg", "--install", place, timeout=900)
    return done.stdout + done.stderr


def replace_by_package(bed: Bed, version: str = "1.0") -> None:
    """Install the package next to an installation from a checkout, and do what the package then advises."""
    advice = install_package(bed, version)
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
    assert bed.agent("--version").stdout.startswith(f"unbounded-agent {version} ")
    assert json.loads(bed.agent("status", "--json").stdout)["agent"] == version


def upgrade_machine_half(bed: Bed, version: str) -> None:
    """Install the machine half's packages in the running machine, and wait until the host has its report."""
    places = [f"/root/{name}_{version}.deb" for name in IN_MACHINE]
    for name, place in zip(IN_MACHINE, places, strict=True):
        bed.guest.write(f"/var/lib/machines/{MACHINE}{place}", packages(version)[name].read_bytes())
    bed.node.run("dpkg", "--install", *places, timeout=900)
    # As its timer does every minute.
    bed.node.run("systemctl", "start", "unbounded-agent-gpu.service", timeout=240)
    served = f'machine_agent_info{{machine="{MACHINE}",version="{version}"}} 1'
    wait(f"the metrics have {served}", lambda: served in bed.page("/metrics"), 240, bed.evidence)
    bed.wait_served()


def test_upgrade_and_downgrade_restart_only_the_service(ready: Bed) -> None:
    before = ready.starts()
    replace_by_package(ready)
    for version in ("1.1", "1.0"):
        expect_upgrade(ready, version)
    assert restarted(before, ready.starts()) == {AGENT}


@pytest.mark.parametrize("release", RELEASES)
def test_from_a_release_to_this_one_and_back(ready: Bed, release: str) -> None:
    """In the order of docs/upgrade.md: first the host, then the machine, and back the other way. A pod computes on."""
    replace_by_package(ready, release)
    upgrade_machine_half(ready, release)
    before = ready.starts()
    pod = ready.node.start_pod(Pod(("sleep", "infinity"), cdi=("1",)))
    for half, version in ((expect_upgrade, "1.0"), (upgrade_machine_half, "1.0"),
                          (upgrade_machine_half, release), (expect_upgrade, release)):  # fmt: skip
        half(ready, version)
        ready.wait_ready()
        found = json.loads(ready.node.in_container(pod, "gpu-probe", "/dev/nvidia1", "libcuda.so.1").stdout)
        assert found["open"]["/dev/nvidia1"] == "OK"
        assert "path" in found["load"]["libcuda.so.1"]
    assert restarted(before, ready.starts()) == {AGENT}
