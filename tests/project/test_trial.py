"""The trial of a new release (deploy/debian/trial): when it begins, what ends it, and what the former one gets back.

integration/tests/node/test_package.py runs it with systemd and dpkg.
"""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.model import paths
from tests.fakes.programs import program

REPOSITORY = Path(__file__).parents[2]
SCRIPT = (REPOSITORY / "deploy/debian/trial").read_text()
PLACE, LOCAL, STATE, RUN = "usr/lib/unbounded-agent", "usr/local/lib", "var/lib/unbounded-agent", "run/unbounded-agent"
FORMER = f"{PLACE}/former"
UNIT = "systemd/system/unbounded-agent.service"
FILES = (UNIT, f"{UNIT}.d/50-trial.conf", "udev/rules.d/70-unbounded-agent.rules", "tmpfiles.d/unbounded-agent.conf")
MODULE = "host/agent/module.py"
SYSTEMCTL = """\
echo "systemctl $*" >>"$ROOT/calls"
case $* in
    *ActiveState*) echo "$ACTIVE" ;;
    *InvocationID*) echo former ;;
    *DropInPaths*) echo "$ROOT/usr/lib/$DROP_IN $ROOT/$DROP_IN" ;;
esac
"""


@dataclass
class Host:
    """A host with release 1.0, of which dpkg thinks that it is `version`."""

    root: Path
    version: str = "1.0"
    active: str = "active"
    drop_in: str = "usr/lib/drop-in.conf"

    def __post_init__(self) -> None:
        program(self.root / "bin/systemctl", SYSTEMCTL)
        program(self.root / "bin/dpkg-query", 'cat "$ROOT/version"')
        for name in ("systemd-run", "udevadm"):
            program(self.root / "bin" / name, f'echo "{name} $*" >>"$ROOT/calls"')
        self.write("run/systemd/system/.keep", "")
        (self.root / "usr/bin").mkdir(parents=True)
        (self.root / "usr/bin/python3").symlink_to("/usr/bin/python3")
        self.unpack("1.0")
        self.configuration("1.0")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text)

    def configuration(self, text: str) -> None:
        self.write(f"{STATE}/last-good-config.json", text)

    def read(self, name: str) -> str:
        return (self.root / name).read_text()

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def unpack(self, version: str) -> None:
        """Put a release's files and its link into place, as dpkg does."""
        self.version = version
        for name in (f"{PLACE}/{MODULE}", *(f"usr/lib/{file}" for file in FILES)):
            self.write(name, version)
        self.write(f"{PLACE}/host/agent/system/removal.py", (REPOSITORY / "agent/system/removal.py").read_text())
        (self.root / PLACE / "current").unlink(missing_ok=True)
        (self.root / PLACE / "current").symlink_to("host")

    def trial(self, action: str, **environment: str) -> str:
        (self.root / "version").write_text(self.version)
        text = re.sub(r"(?<![\w}])/(etc|proc|run|sys|usr|var)/", rf"{self.root}/\1/", SCRIPT)
        host = {"PATH": f"{self.root}/bin:/usr/bin:/bin", "ROOT": str(self.root), "INVOCATION_ID": "new"}
        environment = {**host, "ACTIVE": self.active, "DROP_IN": self.drop_in, **environment}
        done = subprocess.run(
            ["sh", "-c", text, "trial", action],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            umask=0o077,
        )
        assert done.returncode == 0 or "KILL_AT" in environment, done.stderr
        return done.stdout

    def upgrade(self, version: str) -> None:
        self.trial("keep")
        self.unpack(version)
        self.trial("begin")

    def ended(self, result: str, status: str = "", **environment: str) -> str:
        """Let the service end, and return which release runs."""
        if status:
            environment["EXIT_STATUS"] = status
        self.trial("stopped", SERVICE_RESULT=result, **environment)
        return self.runs

    @property
    def runs(self) -> str:
        return self.read(f"{PLACE}/current/agent/module.py")

    @property
    def on_trial(self) -> bool:
        return self.exists(f"{FORMER}/trial")

    def calls(self) -> list[str]:
        return self.read("calls").splitlines() if self.exists("calls") else []

    def put(self) -> dict[str, str]:
        """Return the files that take precedence over the package's."""
        top = self.root / LOCAL
        return {str(each.relative_to(top)): each.read_text() for each in top.rglob("*") if each.is_file()}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def upgraded(host: Host) -> Host:
    """Release 1.1 is on trial."""
    host.upgrade("1.1")
    assert host.on_trial
    host.configuration("1.1")
    return host


def test_the_agent_looks_where_the_script_writes() -> None:
    assert {paths.TRIAL, paths.WENT_BACK} == {f"/{FORMER}/trial", f"/{FORMER}/went-back"}
    assert f"\nplace=/{PLACE}\nformer=$place/former\n" in SCRIPT
    assert f"{paths.STATE}/last-good-config.json" == paths.LAST_GOOD_CONFIG
    assert f"{paths.RUNTIME}/service.json" == paths.SERVICE_STATE
    assert f"{paths.RUNTIME}/conditions.json" == paths.CONDITIONS


def test_an_upgrade_keeps_the_release_that_ran(upgraded: Host) -> None:
    """It takes space only where the new release differs."""
    assert upgraded.runs == "1.1"
    assert upgraded.read(f"{FORMER}/{MODULE}") == "1.0"
    assert {upgraded.read(f"{FORMER}/lib/{file}") for file in FILES} == {"1.0"}
    assert upgraded.put() == {}


def test_nothing_is_copied_while_the_release_is_kept(host: Host) -> None:
    host.trial("keep")
    assert (host.root / PLACE / MODULE).stat().st_ino == (host.root / FORMER / MODULE).stat().st_ino


NO_TRIAL: dict[str, Callable[[Host], object]] = {
    "a downgrade": lambda host: host.unpack("0.9"),
    "the same release again": lambda host: host.unpack("1.0"),
    "the service does not run": lambda host: setattr(host, "active", "inactive"),
    "it has not started": lambda host: setattr(host, "active", "activating"),
    "its passes do not finish": lambda host: host.write(
        f"{RUN}/service.json", '{"unfinished": "no space", "failed": ""}'
    ),
    "it has an internal error": lambda host: host.write(
        f"{RUN}/conditions.json", '{"a": [{"reason": "InternalError"}]}'
    ),
    "an image is built": lambda host: (host.root / "run/systemd/system").rename(host.root / "run/none"),
    "a checkout is installed too": lambda host: host.write(f"{LOCAL}/{UNIT}", "checkout"),
}


@pytest.mark.parametrize("why", NO_TRIAL)
def test_no_trial_begins(host: Host, why: str) -> None:
    host.trial("keep")
    host.unpack("1.1")
    NO_TRIAL[why](host)
    host.trial("begin")
    assert not host.exists(FORMER)
    assert set(host.put().values()) <= {"checkout"}
    assert host.ended("exit-code", "1") == host.version


OWN = {
    "it crashes while it is imported": ("exit-code", "1"),
    "an internal error in a pass": ("exit-code", "70"),
    "its program or its Python is missing": ("exit-code", "203"),
    "its sandbox cannot be made": ("exit-code", "226"),
    "a segmentation fault": ("signal", "SEGV"),
    "an abort with a core dump": ("core-dump", "ABRT"),
    "the watchdog": ("watchdog", "ABRT"),
    "it hangs before its first pass": ("timeout", "ABRT"),
}


@pytest.mark.parametrize("what", OWN)
def test_a_release_that_fails_gives_way_once(upgraded: Host, what: str) -> None:
    assert upgraded.ended(*OWN[what]) == "1.0"
    assert upgraded.put() == dict.fromkeys(FILES, "1.0")
    assert "systemctl daemon-reload" in upgraded.calls()
    told = upgraded.read(f"{FORMER}/went-back")
    assert re.fullmatch(r"release 1\.1 failed at \S+Z, and 1\.0 runs again: (it|systemd) [^\n]+\n", told)
    calls = upgraded.calls()
    assert upgraded.ended(*OWN[what]) == "1.0"
    assert upgraded.calls() == calls, "once"


def test_more_memory_than_the_unit_allows(upgraded: Host) -> None:
    upgraded.write("proc/self/cgroup", "0::/system.slice/unbounded-agent.service\n")
    events = "sys/fs/cgroup/system.slice/unbounded-agent.service/memory.events"
    upgraded.write(events, "max 0\noom 0\noom_kill 1\n")
    assert upgraded.ended("oom-kill", "KILL") == "1.1", "the host had no memory left"
    upgraded.write(events, "max 90\noom 1\noom_kill 1\n")
    assert upgraded.ended("oom-kill", "KILL") == "1.0"


FOREIGN = {
    "an administrator stops it": ("success", "0"),
    "an administrator stops it before it handles signals": ("success", "TERM"),
    "somebody kills it": ("signal", "KILL"),
    "somebody ends it": ("signal", "TERM"),
    "the configuration is invalid": ("exit-code", "2"),
    "the host is in its way, as a service that runs already": ("exit-code", "75"),
    "a command of ExecStartPre fails, as on a full disk": ("exit-code", "0"),
    "the same at the first start": ("exit-code", ""),
    "the same after somebody killed it": ("exit-code", "KILL"),
    "somebody interrupts its start": ("exit-code", "130"),
    "somebody ends its start": ("protocol", "TERM"),
    "somebody ends its first pass": ("protocol", "0"),
    "a GPU's driver blocks it in the kernel": ("watchdog", "KILL"),
    "a GPU's driver blocks it for good": ("watchdog", ""),
    "a disk blocks its start": ("timeout", "KILL"),
    "a disk blocks its end": ("timeout", "TERM"),
    "a command of ExecStartPre hangs": ("timeout", ""),
    "a disk fails under its program": ("signal", "BUS"),
    "systemd has no resources": ("resources", ""),
    "the host has no memory": ("oom-kill", "KILL"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_nobody_else_ends_a_trial(upgraded: Host, what: str) -> None:
    assert upgraded.ended(*FOREIGN[what]) == "1.1"
    assert upgraded.on_trial
    assert upgraded.ended("exit-code", "1") == "1.0", "it goes on"


def test_a_start_that_waits_for_a_cluster_or_a_bus_ends_no_trial(upgraded: Host) -> None:
    """A pass has ended, and the service says what is in its way."""
    upgraded.write(f"{RUN}/service.json", '{"unfinished": "the system bus does not answer"}')
    assert upgraded.ended("timeout", "ABRT") == "1.1"
    assert upgraded.ended("timeout", "ABRT") == "1.0", "what the last run wrote says nothing of this one"


def test_what_an_administrator_added_to_the_unit_ends_no_trial(upgraded: Host) -> None:
    upgraded.drop_in = "etc/systemd/system/unbounded-agent.service.d/user.conf"
    assert upgraded.ended("exit-code", "217") == "1.1"
    assert upgraded.ended("exit-code", "1") == "1.0"


def test_how_the_kept_release_ends_ends_no_trial(upgraded: Host) -> None:
    """It runs until its restart, and meanwhile dpkg has replaced its files."""
    assert upgraded.ended("exit-code", "1", INVOCATION_ID="former") == "1.1"
    assert upgraded.on_trial


def test_every_user_may_see_what_runs(upgraded: Host) -> None:
    """The files that the service makes are only for root."""
    upgraded.ended("exit-code", "1")
    for name in (f"{FORMER}/went-back", f"{LOCAL}/{UNIT}", f"{FORMER}/{MODULE}"):
        assert (upgraded.root / name).stat().st_mode & 0o777 == 0o644, name
    for name in (FORMER, f"{LOCAL}/systemd/system"):
        assert (upgraded.root / name).stat().st_mode & 0o777 == 0o755, name


def test_the_configuration_is_one_that_the_former_release_knows(upgraded: Host) -> None:
    """The files may have new keys, and with them the last good configuration. Only root may read it."""
    saved = upgraded.root / STATE / "last-good-config.json"
    upgraded.ended("exit-code", "1")
    assert saved.read_text() == "1.0"


KILLING = """\
n=$(($(cat "$ROOT/n" 2>/dev/null || echo 0) + 1))
echo "$n" >"$ROOT/n"
if [ "$n" = "${KILL_AT:-0}" ]; then kill -9 "$PPID"; exit 1; fi
exec /bin/NAME "$@"
"""


def test_a_power_cut_at_any_step_is_repaired_by_the_next_end(host: Host, tmp_path: Path) -> None:
    for name in ("mv", "ln", "rm"):
        program(tmp_path / "bin" / name, KILLING.replace("NAME", name))
    steps = 0
    for step in range(1, 100):
        host.unpack("1.0")
        host.upgrade("1.1")
        (tmp_path / "n").unlink()
        host.ended("exit-code", "1", KILL_AT=str(step))
        steps = int(host.read("n"))
        # The new release may run on, or the former one does.
        assert host.runs in ("1.0", "1.1")
        if host.on_trial:
            host.ended("exit-code", "1")
        if steps < step:
            break
        assert host.runs == "1.0"
        assert host.put() == dict.fromkeys(FILES, "1.0")
        assert host.read(f"{FORMER}/went-back")
        host.trial("remove")
    assert steps >= 8


def test_the_next_release_is_tried_against_the_one_that_runs(upgraded: Host) -> None:
    upgraded.ended("exit-code", "1")
    upgraded.upgrade("1.2")
    assert (upgraded.runs, upgraded.read(f"{FORMER}/{MODULE}"), upgraded.on_trial) == ("1.2", "1.0", True)
    assert upgraded.put() == {}
    assert not (upgraded.root / LOCAL / "systemd").exists()
    assert not upgraded.exists(f"{FORMER}/went-back")
    assert upgraded.ended("exit-code", "1") == "1.0"


def test_a_package_that_is_configured_again_changes_nothing(upgraded: Host) -> None:
    upgraded.ended("exit-code", "1")
    before = upgraded.put()
    upgraded.trial("begin")
    assert (upgraded.runs, upgraded.put(), upgraded.on_trial) == ("1.0", before, False)
    assert upgraded.exists(f"{FORMER}/went-back")


def test_a_downgrade_to_the_release_that_runs_is_the_end_of_it(upgraded: Host) -> None:
    upgraded.ended("exit-code", "1")
    upgraded.upgrade("1.0")
    assert upgraded.runs == "1.0"
    assert not upgraded.exists(FORMER)
    assert upgraded.put() == {}


def test_a_trial_ends_after_a_time_of_running(upgraded: Host) -> None:
    upgraded.trial("ready")
    (scheduled,) = (call for call in upgraded.calls() if call.startswith("systemd-run"))
    assert f"--on-active=15min {upgraded.root}/{PLACE}/trial end" in scheduled
    upgraded.active = "activating"
    upgraded.trial("end")
    assert upgraded.on_trial, "it has ended meanwhile, and begins again when it is ready"
    upgraded.active = "active"
    upgraded.trial("end")
    assert not upgraded.exists(FORMER)
    upgraded.trial("ready")
    assert [call for call in upgraded.calls() if call.startswith("systemd-run")] == [scheduled]


def test_units_of_an_unfinished_way_back_go_with_the_trial(upgraded: Host) -> None:
    """After a power cut before the link was set, the new release may run well with the former one's units."""
    program(upgraded.root / "bin/ln", 'kill -9 "$PPID"')
    upgraded.ended("exit-code", "1", KILL_AT="ln")
    assert (upgraded.runs, upgraded.put()) == ("1.1", dict.fromkeys(FILES, "1.0"))
    upgraded.trial("end")
    assert upgraded.put() == {}
    assert "systemctl daemon-reload" in upgraded.calls()


def test_the_time_of_one_trial_does_not_end_the_next(upgraded: Host) -> None:
    """Until the next release is ready, the timer would be that of the one before it."""
    upgraded.trial("ready")
    (upgraded.root / "calls").unlink()
    upgraded.upgrade("1.2")
    assert upgraded.calls()[0] == "systemctl stop unbounded-agent-trial.timer"


def test_the_end_of_the_time_leaves_a_former_release_that_runs(upgraded: Host) -> None:
    upgraded.ended("exit-code", "1")
    upgraded.trial("end")
    assert upgraded.runs == "1.0"


def test_a_removal_removes_all(upgraded: Host) -> None:
    upgraded.ended("exit-code", "1")
    upgraded.trial("remove")
    assert "systemctl stop unbounded-agent-trial.timer" in upgraded.calls(), "it would start what is removed"
    assert not upgraded.exists(FORMER)
    assert upgraded.put() == {}
    assert not (upgraded.root / LOCAL / "systemd").exists()


def test_a_service_without_a_trial_is_left_alone(host: Host) -> None:
    host.trial("ready")
    host.ended("exit-code", "1")
    assert host.calls() == []
    assert os.readlink(host.root / PLACE / "current") == "host"
