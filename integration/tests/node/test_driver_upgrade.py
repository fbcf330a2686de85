"""`driver upgrade` with real apt, dpkg and systemd: made-up packages with scripts, and the stand-in kernel modules."""

import re
import time
from collections.abc import Callable

import pytest

from agent.model.paths import DRIVER_PACKAGES, DRIVER_UPGRADE
from integration.bed.drivers.driver_packages import DAEMON, FAILING, UNLOADABLE, install_packages, versions
from integration.bed.waiting import wait
from integration.conftest import Bed
from integration.tests.node.test_generations import expect_driver

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

LIMIT = 590.0
COMMAND = "unbounded-agent driver upgrade"
HOLD = f"""
import fcntl, os, time
while not os.path.exists("{DRIVER_UPGRADE}"):
    time.sleep(0.1)
with open("/var/lib/dpkg/lock-frontend", "w") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    while "install the new" not in open("{DRIVER_UPGRADE}").read():
        time.sleep(1)
    time.sleep(20)
"""
"""Has the lock of apt and dpkg for 20 s after the old modules were unloaded."""


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
    packaged.guest.start(["python3", "-c", HOLD])
    before = time.monotonic()
    ended = packaged.agent("driver", "upgrade", "--to", version, timeout=LIMIT, check=False)
    measured("seconds", f"{time.monotonic() - before:.0f}")
    print(ended.stdout, ended.stderr)
    assert ended.status == 1
    assert f"driver {old} runs: driver {version} is not usable" in ended.stdout
    if version == FAILING:
        assert "the module cannot be built" in ended.stdout
    assert re.search(
        r"waiting up to 600 s for the lock of apt and dpkg, which PID [0-9]+ \(python3\) has", ended.stderr
    )
    expect_as_before(packaged, old)
