"""The Debian packages on a host whose machine runs: they replace an installation from a checkout, and are upgraded."""

import json
import re
from pathlib import Path

import pytest

from integration.bed.machine.node import MACHINE, Pod
from integration.bed.measure import pages
from integration.bed.measure.restarts import AGENT, restarted
from integration.bed.packages import CODE, RELEASES, Edit, packages, release
from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

PACKAGE = "unbounded-agent"
IN_MACHINE = ("unbounded-agent-machine", "unbounded-agent-machine-dra")


def install_package(bed: Bed, version: str) -> str:
    """Install a release's package as dpkg(1) does, also an older one, and return what it prints."""
    return install(bed, packages(version)[PACKAGE])


def install(bed: Bed, deb: Path) -> str:
    place = f"/root/{deb.name}"
    bed.guest.write(place, deb.read_bytes())
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


@pytest.mark.parametrize("former", RELEASES)
def test_from_a_release_to_this_one_and_back(ready: Bed, former: str) -> None:
    """In the order of docs/upgrade.md: first the host, then the machine, and back the other way. A pod computes on."""
    replace_by_package(ready, former)
    upgrade_machine_half(ready, former)
    before = ready.starts()
    pod = ready.node.start_pod(Pod(("sleep", "infinity"), cdi=("1",)))
    for half, version in ((expect_upgrade, "1.0"), (upgrade_machine_half, "1.0"),
                          (upgrade_machine_half, former), (expect_upgrade, former)):  # fmt: skip
        half(ready, version)
        ready.wait_ready()
        found = json.loads(ready.node.in_container(pod, "gpu-probe", "/dev/nvidia1", "libcuda.so.1").stdout)
        assert found["open"]["/dev/nvidia1"] == "OK"
        assert "path" in found["load"]["libcuda.so.1"]
    assert restarted(before, ready.starts()) == {AGENT}


UNIT = "usr/lib/systemd/system/unbounded-agent.service"
LOOP, SETTINGS = f"{CODE}/host/daemon/loop.py", f"{CODE}/config/settings.py"
PASS = "        with pass_lock(self.system"
WORK = "    def next_pass(self)"
SHORT_WATCHDOG: Edit = (UNIT, "WatchdogSec=120", "WatchdogSec=60")
FAILURES: dict[str, tuple[str, tuple[Edit, ...]]] = {
    "1.1": ("it ended with exit code 1", ((LOOP, "import contextlib\n", "import contextlib, missing\n"),)),
    "1.2": (
        "it gave no sign of life, and the watchdog ended it",
        (
            SHORT_WATCHDOG,
            (LOOP, WORK, f"{WORK}:\n        while True: pass\n\n    def former(self)"),
            (
                SETTINGS,
                "    address: Annotated[str, ADDRESS,",
                '    new: str = ""\n    address: Annotated[str, ADDRESS,',
            ),
        ),
    ),
    "1.3": (
        "it ended itself after an internal error in a pass",
        ((f"{CODE}/host/reconcile.py", PASS, f"        {{}}['no such machine']\n{PASS}"),),
    ),
    "1.4": ("systemd could not run it (203)", ((UNIT, "ExecStart=/usr/bin/unbounded-agent", "ExecStart=/usr/bin/no"),)),
    "1.5": ("it crashed (SEGV)", ((LOOP, WORK, f"{WORK}:\n        os.kill(os.getpid(), 11)\n\n    def former(self)"),)),
}
"""Releases that fail: what is said of them, and what is wrong with them."""
PLACE = "/usr/lib/unbounded-agent"


def link(bed: Bed) -> str:
    return bed.run("readlink", f"{PLACE}/current").stdout.strip()


def version_served(bed: Bed) -> str:
    found = re.search(r'build_info{.*version="([^"]+)"}', pages.get(bed.guest, "/metrics").body)
    return found[1] if found else ""


def test_a_release_that_fails_gives_way_to_the_former_one(ready: Bed, tmp_path: Path) -> None:
    """The machine and dpkg notice nothing of it, and the next release is installed as usual."""
    replace_by_package(ready)
    ready.wait_served()
    before, configuration = ready.starts(), ready.guest.read("/etc/unbounded-agent/config.toml")
    for version, (why, edits) in FAILURES.items():
        if version == "1.2":
            # A key that only this release knows.
            ready.guest.write("/etc/unbounded-agent/config.toml", configuration + b'[metrics]\nnew = "x"\n')
        install(ready, release(tmp_path, version, *edits))
        wait(f"{version} has failed", lambda: link(ready) == "former/host", 400, ready.evidence)
        wait("1.0 serves its pages", lambda: version_served(ready) == "1.0", 400, ready.evidence)
        ready.wait_served()
        told = ready.run("cat", f"{PLACE}/former/went-back").stdout
        assert re.fullmatch(rf"release {version} failed at \S+, and 1\.0 runs again: {re.escape(why)}\n", told)
        rejected = version == "1.2"
        reloaded = f"unbounded_agent_config_last_reload_successful {0.0 if rejected else 1.0}\n"
        assert reloaded in pages.get(ready.guest, "/metrics").body
        # Commands refuse a key that they do not know.
        ready.guest.write("/etc/unbounded-agent/config.toml", configuration)
        assert told.strip() in ready.agent("status").stderr
        assert told.strip() in " ".join(ready.agent("doctor", check=False).stdout.split()), "doctor wraps its lines"
        assert told.strip() in ready.run("journalctl", "--no-pager", "-p", "err", "-u", AGENT).stdout
        assert why in ready.run("journalctl", "-u", AGENT, "--no-pager", "-n", "200").stdout
        assert "\nunbounded_agent_went_back 1.0\n" in pages.get(ready.guest, "/metrics").body
        status = ready.run("dpkg-query", "--show", "--showformat=${Version} ${db:Status-Status}", PACKAGE).stdout
        assert status == f"{version} installed"
        assert ready.run("dpkg", "--audit").stdout == ""
        ready.run("systemctl", "restart", AGENT, timeout=300)
        assert version_served(ready) == "1.0"
        print(version, restarted(before, ready.starts()), told, flush=True)
        assert restarted(before, ready.starts()) == {AGENT}

    install(ready, release(tmp_path, "2.0", (f"{PLACE[1:]}/trial", "minutes=15", "minutes=1")))
    assert version_served(ready) == "2.0"
    assert link(ready) == "host"
    assert ready.run("find", "/usr/local/lib", "-name", "*unbounded*").stdout == ""
    # What is not the release's fault.
    ready.run("systemctl", "kill", "--signal=KILL", AGENT)
    wait("it runs again", lambda: version_served(ready) == "2.0", 200, ready.evidence)
    assert link(ready) == "host"
    wait(
        "the trial is over",
        lambda: ready.run("test", "-e", f"{PLACE}/former", check=False).status,
        300,
        ready.evidence,
    )
    assert restarted(before, ready.starts()) == {AGENT}
    assert json.loads(ready.agent("status", "--json").stdout)["machines"]
