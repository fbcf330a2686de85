"""An administrator's own checks: real scripts in the tree of a simulated host. Owners are simulated."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.host.observe.checks import LINE, MOST, STALE_AFTER, observe_checks, run_checks
from agent.model.conditions import Reason, Status
from agent.model.facts import HostCheck
from agent.model.paths import CHECK_RESULTS, CHECKS
from agent.system.files import System
from agent.system.journal import Ages
from agent.system.process import OUTPUT_LIMIT, Completed, StillRunningError, TimeLimitError, host_runner
from tests.fakes.host import Host

USER = 1000


class Programs(dict[tuple[str, ...], Completed]):
    """Runs the host's files, and counts how often; what has an answer does not run."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host, self.fails = host, dict[str, Exception]()
        self.ran: list[str] = []

    def __contains__(self, argv: object) -> bool:
        return True

    def __missing__(self, argv: tuple[str, ...]) -> Completed:
        name = os.path.basename(argv[0])
        self.ran.append(name)
        if name in self.fails:
            raise self.fails[name]
        return host_runner(argv, 10)


@pytest.fixture
def programs(host: Host) -> Programs:
    host.make_directory(os.path.dirname(CHECK_RESULTS))
    host.runner.answers = programs = Programs(host)
    return programs


def check(host: Host, name: str, script: str) -> None:
    host.file(f"{CHECKS}/{name}", f"#!/bin/sh\n{script}\n", executable=True)


def run(host: System) -> None:
    """Run the checks as the unit does: with a file at which nothing is cut off before."""
    descriptor = os.open(host.full_path(CHECK_RESULTS), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        run_checks(host, descriptor)
    finally:
        os.close(descriptor)


def found(host: System) -> dict[str, tuple[str, str, str]]:
    return {each.type: (each.status, each.reason, each.message) for each in observe_checks(host, Ages())[0]}


@pytest.mark.processes
@pytest.mark.usefixtures("programs")
def test_the_exit_code_decides(host: Host) -> None:
    check(host, "Good", "echo; echo '  90 % free'; echo more")
    check(host, "Bad", "echo 'only 1 % free'; exit 1")
    check(host, "Unsure", "exit 2")
    check(host, "Odd", "echo 'usage: df'; exit 64")
    check(host, "Killed", "kill -SEGV $$")
    host.file(f"{CHECKS}/Broken", "#!/nowhere\n", executable=True)
    run(host)
    assert found(host) == {
        "Bad": ("False", "CheckFailed", "only 1 % free"),
        "Broken": ("Unknown", "CheckBroken", "cannot be started: not a program that this host can run"),
        "Good": ("True", "CheckPassed", "90 % free"),
        "Killed": ("Unknown", "CheckBroken", "killed by signal 11"),
        "Odd": ("Unknown", "CheckBroken", "exit code 64: usage: df"),
        "Unsure": ("Unknown", "CheckUndecided", "it printed nothing"),
    }


@pytest.mark.processes
def test_attack_what_a_check_prints_is_short_and_printable(host: Host, programs: Programs) -> None:
    check(host, "Loud", r"printf '\033[2J\342\200\256\377'; head -c 100000 /dev/zero | tr '\0' x")
    check(host, "Endless", "")
    programs[(host.full_path(f"{CHECKS}/Endless"),)] = Completed(0, b"x" * (OUTPUT_LIMIT + 1), b"")
    run(host)
    line = found(host)["Loud"][2]
    assert (line[:19], len(line), line.isascii(), line.isprintable()) == ("\\x1b[2J\\u202e\\udcff", LINE, True, True)
    assert found(host)["Endless"] == ("Unknown", "CheckBroken", f"printed more than {OUTPUT_LIMIT} bytes")


def bad_owners(host: Host) -> Iterator[str]:
    for path in (f"{CHECKS}/Trusted", CHECKS, "/etc/unbounded-agent", "/etc", "/"):
        host.owners = {path: (0o755, USER)}
        yield f"{path} belongs to {USER}"
        for mode in (0o775, 0o757):
            host.owners = {path: (mode, 0)}
            yield f"others may write {path} ({mode:o})"
    host.owners = {f"{CHECKS}/Trusted": (0o755, 0)}
    host.acls = {f"{CHECKS}/Trusted"}
    host.owners = {f"{CHECKS}/Trusted": (0o775, 0, 0)}
    yield "an ACL may let others write"
    host.acls = set()
    host.owners = {"/home/user": (0o755, USER)}
    host.file("/home/user/check", "#!/bin/sh\n", executable=True)
    host.remove_file(f"{CHECKS}/Trusted")
    host.symlink(f"{CHECKS}/Trusted", "/home/user/check")
    yield "a link leads to a user's file"


@pytest.mark.processes
def test_attack_a_file_that_others_control_never_runs(host: Host, programs: Programs) -> None:
    check(host, "Trusted", "echo fine")
    run(host)
    assert found(host)["Trusted"] == ("True", "CheckPassed", "fine")
    programs.ran.clear()
    for case in bad_owners(host):
        run(host)
        assert programs.ran == [], case
        assert found(host)["Trusted"][:2] == ("Unknown", "CheckBroken"), case
        assert "must not run" in found(host)["Trusted"][2], case


def test_what_is_no_program_never_runs(host: Host, programs: Programs) -> None:
    host.file(f"{CHECKS}/Plain", "#!/bin/sh\n")
    host.make_directory(f"{CHECKS}/Directory")
    host.symlink(f"{CHECKS}/Dangling", "nowhere")
    run(host)
    assert programs.ran == []
    messages = {name: message for name, (status, _, message) in found(host).items() if status == "Unknown"}
    assert "is not executable" in messages["Plain"]
    assert "not a regular file" in messages["Directory"] or "not executable" in messages["Directory"]
    assert messages["Dangling"] == "it did not run: No such file or directory"


def test_names_are_those_of_conditions_and_few(host: Host, programs: Programs) -> None:
    for name in (
        "disk.sh",
        "Ready",
        "disk",
        "Disk-Full",
        "A" * 41,
        "Disk\n",
        *(f"Check{each:02}" for each in range(20)),
    ):
        host.file(f"{CHECKS}/{name}", "", executable=True)
        programs.fails[name] = TimeLimitError()
    host.file(f"{CHECKS}/.Check00.swp", "")
    run(host)
    checks, problem = observe_checks(host, Ages())
    assert [each.type for each in checks] == sorted(programs.ran) == [f"Check{each:02}" for each in range(MOST)]
    assert problem.startswith(f"{CHECKS}: these files are not run as checks: {'A' * 41}, Check16, Check17 and 7 more (")
    host.failing[CHECKS] = PermissionError(13, "Permission denied")
    assert observe_checks(host, Ages()) == ((), f"{CHECKS}: its checks are unknown: Permission denied")


def test_a_host_without_checks_says_nothing(host: Host) -> None:
    assert observe_checks(host, Ages()) == ((), "")


def test_only_a_fresh_and_whole_result_counts(host: Host, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    check(host, "Good", "")
    assert found(host)["Good"][:2] == ("Unknown", "CheckNotRun"), "it has never run"
    programs[(host.full_path(f"{CHECKS}/Good"),)] = Completed(0, b"fine", b"")
    run(host)
    assert found(host)["Good"][0] == "True"
    check(host, "New", "")
    assert {name: each[0] for name, each in found(host).items()} == {"Good": "True", "New": "Unknown"}
    results = Path(host.full_path(CHECK_RESULTS))
    whole = results.read_bytes()
    changed = whole.replace(b'"line": "fine"', b'"line": "free"')
    for damaged in (b"", whole[:-3], whole + b"x", changed, b"[]", b"{}", b"\xff", b" " * (1 << 17)):
        assert damaged != whole
        results.write_bytes(damaged)
        assert found(host)["Good"][:2] == ("Unknown", "CheckNotRun"), damaged[:80]
    results.unlink()
    results.symlink_to("/etc/passwd")
    assert found(host)["Good"][:2] == ("Unknown", "CheckNotRun")
    results.unlink()
    results.write_bytes(whole)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + STALE_AFTER - 5)
    assert found(host)["Good"][0] == "True"
    monkeypatch.setattr(time, "time", lambda: now() + STALE_AFTER + 5)
    status, reason, message = found(host)["Good"]
    assert (status, reason) == ("Unknown", "CheckNotRun")
    assert message.startswith("the checks last ran 24")
    assert "systemctl status unbounded-agent-checks.timer" in message


def test_a_check_that_cannot_be_killed_is_not_started_again(host: Host, programs: Programs) -> None:
    """Otherwise, one more process would hang each minute."""
    check(host, "Hangs", "")
    check(host, "Late", "")
    programs.fails = {"Hangs": StillRunningError("no answer", 4711), "Late": TimeLimitError()}
    host.make_directory("/proc/4711")
    for _ in range(3):
        run(host)
        assert found(host)["Hangs"][:2] == ("Unknown", "CheckBroken")
        assert "it cannot even be killed" in found(host)["Hangs"][2]
        assert found(host)["Late"] == ("Unknown", "CheckBroken", "stopped after its time limit of 20 s")
    assert sorted(programs.ran) == ["Hangs", "Late", "Late", "Late"]
    Path(host.full_path("/proc/4711")).rmdir()
    del programs.fails["Hangs"]
    programs[(host.full_path(f"{CHECKS}/Hangs"),)] = Completed(0, b"it answers again", b"")
    run(host)
    assert found(host)["Hangs"] == ("True", "CheckPassed", "it answers again")


def test_the_time_is_that_of_the_change(host: Host, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    check(host, "Disk", "")
    times, now = [], time.time()
    for after, code in ((0, 0), (60, 0), (120, 1), (180, 1), (-90, 1)):
        programs[(host.full_path(f"{CHECKS}/Disk"),)] = Completed(code, b"", b"")
        monkeypatch.setattr(time, "time", lambda at=now + after: at)
        run(host)
        results = json.loads(Path(host.full_path(CHECK_RESULTS)).read_bytes())
        times.append(results["content"]["Disk"]["since"] - now)
    assert [round(each) for each in times] == [0, 0, 120, 120, 120]
    (shown,), _ = observe_checks(host, Ages())
    assert shown == HostCheck("Disk", Status.FALSE, Reason.CHECK_FAILED, "it printed nothing", now - 90), "not later"
