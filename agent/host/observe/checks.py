"""An administrator's own checks of the host: runs them, and reads their results.

A unit of its own runs them, without the service's rights. So their output is not trusted: it is bounded and printable.
"""

import os
import re
import time
from threading import Thread
from typing import Annotated

from msgspec import Meta, Struct

from agent.host.state.records import Digested, Time
from agent.model.conditions import ConditionType, Reason, Status
from agent.model.errors import CommandError, DocumentError, ExitCodeError, UnkillableError
from agent.model.facts import HostCheck
from agent.model.paths import CHECK_RESULTS, CHECKS
from agent.model.text import first_quoted, one_line
from agent.system.files import System
from agent.system.journal import Ages
from agent.system.trust import classify_error, entries_if_present, file_fault, untrusted_component

NAME = re.compile(r"[A-Z][A-Za-z0-9]{0,39}")
"""The form of a check's name, which is that of a condition. Editors' copies of a file have other names."""
MOST = 16
"""How many checks run; the first ones by name. Each has a series in the metrics."""
LIMIT = 20.0
"""Seconds for a check. All run at once, so that one that hangs delays no other."""
LINE = 300
"""Characters of a check's line that are shown."""
READ = 4096
"""Characters in which that line is looked for."""
STALE_AFTER = 240.0
"""Seconds after which results are stale: the timer starts a run each minute, and three did not end."""
RESULTS_LIMIT = 1 << 16
MEANINGS = {
    0: (Status.TRUE, Reason.CHECK_PASSED),
    1: (Status.FALSE, Reason.CHECK_FAILED),
    2: (Status.UNKNOWN, Reason.CHECK_UNDECIDED),
}
"""What exit codes mean; any other is an error of the check. Problem daemons of Kubernetes use the same codes."""
RESERVED = frozenset(map(str, ConditionType))


class CheckResult(Struct, frozen=True):
    """How a check ended."""

    code: int | None
    """The exit code; None without one."""
    line: Annotated[str, Meta(max_length=LINE)]
    """The first line that it printed or, without an exit code that MEANINGS has, why there is none."""
    since: Time
    """When it first ended like this, in seconds since the epoch."""
    running: int = 0
    """The id of the check's process, if that cannot be killed. The check does not run again until the process ends."""


_RESULTS = Digested(dict[str, CheckResult])
"""The results of one run, by the checks' names."""


def run_checks(system: System, output: int) -> None:
    """Run all checks, each in a process of its own, and write the results to the descriptor `output`.

    systemd has opened CHECK_RESULTS there: this process may write no file. Raises OSError.
    """
    before, found = _read(system)[0], dict[str, CheckResult]()

    def run(name: str) -> None:
        found[name] = _run(system, name, before.get(name))

    # Not concurrent.futures: it loads logging, for which every command would wait.
    threads = [Thread(target=run, args=(name,)) for name in _names(system)[0]]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    data = _RESULTS.render(found)
    # A reader in between finds a digest that does not match.
    os.pwrite(output, data, 0)
    os.ftruncate(output, len(data))


def _run(system: System, name: str, before: CheckResult | None) -> CheckResult:
    path, code, running = f"{CHECKS}/{name}", None, before.running if before else 0
    # The unit hides all processes but its own.
    if before and running and system.exists(f"/proc/{running}"):
        return before
    try:
        running, why = 0, _fault(system, path)
        if not why:
            code, line = _ended(system, path)
            why = line if code in MEANINGS else f"exit code {code}: {line}"
    except UnkillableError as error:
        why, running = f"{error.ended}: {error.hint}", error.pid
    except CommandError as error:
        why = error.ended
    except OSError as error:
        why = f"it did not run: {error.strerror or error}"
    since = before.since if before and before.code == code else time.time()
    return CheckResult(code, one_line(why)[:LINE], since, running)


def _ended(system: System, path: str) -> tuple[int, str]:
    """Run a check, and return its exit code and the first line that it printed. Raises CommandError."""
    try:
        code, output = 0, system.run(system.full_path(path), timeout=LIMIT)
    except ExitCodeError as error:
        code, output = error.status, error.stdout
    return code, next((line for line in output[:READ].splitlines() if line.strip()), "it printed nothing")


def _fault(system: System, path: str) -> str:
    """Return why a file must not run; empty if it may. Raises OSError."""
    real = system.real_path(path)
    why = untrusted_component(system, path) or file_fault(system, real, root_owned=True)
    if not why and not system.is_program(real):
        why = "it is not executable"
    return f"{real} must not run: {why}" if why else ""


def observe_checks(system: System, ages: Ages) -> tuple[tuple[HostCheck, ...], str]:
    """Return each check as a condition of the host, and a sentence on files that are none; empty if there is none."""
    names, problem = _names(system)
    results, changed, why = _read(system) if names else ({}, 0.0, "")
    if results and (age := ages.of(CHECK_RESULTS, changed)) > STALE_AFTER:
        why = f"the checks last ran {age:.0f} s ago"
    return tuple(_condition(name, results.get(name), why) for name in names), problem


def _condition(name: str, result: CheckResult | None, why: str) -> HostCheck:
    if why or result is None:
        why = why or "it has not run yet"
        advice = "see `systemctl status unbounded-agent-checks.timer unbounded-agent-checks`"
        return HostCheck(name, Status.UNKNOWN, Reason.CHECK_NOT_RUN, f"{why}: {advice}")
    broken = (Status.UNKNOWN, Reason.CHECK_BROKEN)
    status, reason = broken if result.code is None else MEANINGS.get(result.code, broken)
    return HostCheck(name, status, reason, one_line(result.line), min(result.since, time.time()))


def _names(system: System) -> tuple[list[str], str]:
    """Return the names of the checks, and a sentence on files that are none. Hidden files are left out of both."""
    try:
        files = [name for name in entries_if_present(system, CHECKS) if not name.startswith(".")]
    except OSError as error:
        return [], f"{CHECKS}: its checks are unknown: {error.strerror or error}"
    names = [name for name in files if NAME.fullmatch(name) and name not in RESERVED][:MOST]
    if not (others := [name for name in files if name not in names]):
        return names, ""
    rule = f"at most {MOST}, named as conditions are (DiskHealthy), but not as one of the agent's"
    return names, f"{CHECKS}: these files are not run as checks: {first_quoted(others, 3)} ({rule})"


def _read(system: System) -> tuple[dict[str, CheckResult], float, str]:
    """Return the results and when they were written, in seconds since the epoch; or why there are none."""
    try:
        data, changed = system.read_untrusted(CHECK_RESULTS, RESULTS_LIMIT)
        return _RESULTS.parse(CHECK_RESULTS, data), changed, ""
    except OSError as error:
        return {}, 0.0, classify_error(CHECK_RESULTS, error).why
    except DocumentError as error:
        return {}, 0.0, str(error)
