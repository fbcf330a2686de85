"""`driver upgrade` with real apt, dpkg and systemd: made-up packages with scripts, and the stand-in kernel modules."""

import re
import time
from collections.abc import Callable

import pytest

from agent.model.paths import DRIVER_PACKAGES, DRIVER_UPGRADE
from integration.bed.drivers.driver_packages import (
    DAEMON,
    FAILING,
    UNLOADABLE,
    install_dkms_packages,
    install_packages,
    versions,
)
from integration.bed.machine.node import MACHINE
from integration.bed.waiting import wait
from integration.conftest import Bed
from integration.tests.node.test_generations import expect_driver

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

LIMIT, SLOW = 590.0, 1500.0
COMMAND = "unbounded-agent driver upgrade"
SAID = "/root/said"
HOLD = f"""
import fcntl, os, time
while not os.path.exists("{DRIVER_UPGRADE}"):
    time.sleep(0.1)
with open("/var/lib/dpkg/lock-frontend", "w") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    while "for the lock of apt" not in open("{SAID}").read():
        time.sleep(1)
    time.sleep(5)
"""
"""Has the lock of apt and dpkg from before the drain until the command has said for 5 s that it waits."""


@pytest.fixture
def packaged(ready: Bed) -> Bed:
    """A ready host whose driver is in packages, with a daemon that only works with its own version of the module."""
    install_packages(ready.guest)
    ready.agent("apply", timeout=400)
    return ready


def module(bed: Bed) -> str:
    return bed.run("cat", "/sys/module/nvidia/version").stdout.strip()


def expect_as_before(bed: Bed, version: str) -> None:
    """Assert that the driver, its daemon and its machine run in this version, and that nothing is left to do."""
    packages = bed.run("dpkg-query", "--show", "--showformat=${Version} ${db:Status-Status}\n", "made-up-*").stdout
    assert set(packages.splitlines()) == {f"{version}-9 installed"}
    assert module(bed) == version
    assert bed.run("systemctl", "is-active", DAEMON).stdout == "active\n"
    assert bed.run("ls", DRIVER_UPGRADE, DRIVER_PACKAGES, check=False).stdout == ""
    bed.wait_ready()
    expect_driver(bed, version)


def test_it_upgrades_and_goes_on_after_a_kill(packaged: Bed, measured: Callable[[str, object], None]) -> None:
    old, new = versions()
    shown = packaged.agent("driver", "upgrade", "--to", new, "--dry-run").stdout
    assert f"driver {old} -> {new}: 3 packages" in shown
    assert f"would stop {DAEMON}" in shown
    assert "would unload nvidia_drm, nvidia_modeset, nvidia_uvm, nvidia" in shown
    assert packaged.run("ls", DRIVER_UPGRADE, check=False).stdout == ""

    # Killed as soon as the packages are being replaced.
    packaged.guest.write("/root/first", b"")
    packaged.guest.start(["sh", "-c", f"{COMMAND} --to {new} >/root/first 2>&1"])
    wait("it installs", lambda: "install driver" in packaged.guest.read("/root/first").decode(), 300)
    packaged.run("pkill", "-KILL", "-f", "[d]river upgrade --to")
    assert "is not finished" in packaged.agent("doctor", check=False).stdout
    before = time.monotonic()
    again = packaged.agent("driver", "upgrade", timeout=LIMIT)
    measured("seconds of the second run", f"{time.monotonic() - before:.0f}")
    assert "this upgrade was interrupted, and goes on" in again.stdout
    assert f"driver {new} runs in place of {old}" in again.stdout
    expect_as_before(packaged, new)


@pytest.mark.parametrize("version", [UNLOADABLE, FAILING])
def test_it_goes_back(packaged: Bed, version: str, measured: Callable[[str, object], None]) -> None:
    """If the module does not load, or a package's script fails. It waits for the lock of another program."""
    old = versions().installed
    packaged.guest.write(SAID, b"")
    packaged.guest.start(["python3", "-c", HOLD])
    before = time.monotonic()
    ended = packaged.run("sh", "-c", f"{COMMAND} --to {version} 2>{SAID}", timeout=LIMIT, check=False)
    measured("seconds", f"{time.monotonic() - before:.0f}")
    said = packaged.guest.read(SAID).decode()
    print(ended.stdout, said)
    assert ended.status == 1
    assert f"driver {old} runs: driver {version} is not usable" in ended.stdout
    if version == FAILING:
        assert "the module cannot be built" in ended.stdout
    assert re.search(r"waiting up to 600 s for the lock of apt and dpkg, which PID [0-9]+ \(python3\) has", said)
    expect_as_before(packaged, old)


def test_dkms_builds_the_module_before_the_drain(ready: Bed, measured: Callable[[str, object], None]) -> None:
    """Real DKMS, a real compiler and the kernel's real headers. A build that fails costs no pod anything."""
    before = time.monotonic()
    install_dkms_packages(ready.guest)
    measured("seconds of the installation", f"{time.monotonic() - before:.0f}")
    ready.agent("apply", timeout=400)
    (old, new), leader = versions(), leader_of(ready)
    assert ready.run("modinfo", "--field=version", "nvidia", check=False).status == 1
    failed = ready.agent("driver", "upgrade", "--to", FAILING, timeout=SLOW, check=False)
    print(failed.stdout, failed.stderr)
    log = f"{DRIVER_PACKAGES}/build.log"
    assert f"the module of driver {FAILING} cannot be built" in failed.stderr
    assert f"see {log}; nothing was changed" in failed.stderr
    assert "made up: the kernel is too new" in ready.guest.read(log).decode()
    assert (module(ready), leader_of(ready)) == (old, leader)
    release = ready.run("uname", "-r").stdout.strip()
    headers = f"/lib/modules/{release}/build"
    ready.run("mv", headers, "/root/build")
    refused = ready.agent("driver", "upgrade", "--to", new, timeout=SLOW, check=False)
    assert f"install the package linux-headers-{release}; nothing was changed" in refused.stderr
    ready.run("mv", "/root/build", headers)
    before = time.monotonic()
    ended = ready.agent("driver", "upgrade", "--to", new, timeout=SLOW)
    measured("seconds of the upgrade", f"{time.monotonic() - before:.0f}")
    print(ended.stdout, ended.stderr)
    assert f"driver {new} runs in place of {old}" in ended.stdout
    assert f"nvidia-current/{new}, {release}, x86_64: installed" in ready.run("dkms", "status").stdout
    assert (module(ready), leader_of(ready) == leader) == (new, False)
    ready.wait_ready()
    expect_driver(ready, new)


def leader_of(bed: Bed) -> str:
    return bed.run("machinectl", "show", "--property=Leader", MACHINE).stdout
