"""Does containerd run with its configuration? It is restarted only where that really is another one."""

import re
import time
from dataclasses import astuple, replace

from agent.conditions import NOT_APPLICABLE, Condition, ConditionType, Status, false, true, unknown
from agent.inside.containerd import MAIN
from agent.inside.notes import Notes
from agent.system.files import System

ACTIVE = ConditionType.RUNTIME_ACTIVE
UNIT = "containerd.service"
RESTART_PENDING = "RestartPending"
CHANGED = "containerd-changed"
"""When its configuration was changed last, and a digest of what it then came to."""
LOADED = "containerd-loaded"
"""The containerd that was last proven to run with its configuration: when it was started, and that digest."""
REPLACED = "containerd-replaced"
"""A containerd that ran on after its program was replaced by one that takes other CDI specs: its file in /proc, and the
identity of the program behind that."""


CONFIG_ARGUMENT = re.compile(r"argv\[\]=(?:[^ ;]*/)?containerd(?: [^;]*?)? (?:--config|-c)[ =](?P<path>/[^ ;]*)")
"""In the property ExecStart=, of containerd's global options: those of a shell or another program tell nothing."""


def note_change(notes: Notes, effective: str = "") -> None:
    """What containerd must have been started after, unless it was with the same effective configuration."""
    notes.save(CHANGED, {"microseconds": time.monotonic_ns() // 1000, "effective": effective})


def check_active(system: System, notes: Notes, configured: Condition) -> Condition:
    """The RuntimeActive condition: containerd runs, and was started after our last change of its configuration.

    Its reason is RESTART_PENDING when the caller is to call `restart`. `configured` is RuntimeConfigured.
    """
    if configured.reason == NOT_APPLICABLE:
        return replace(configured, type=ACTIVE)
    if configured.status is not Status.TRUE:
        return unknown(ACTIVE, "NotConfigured", "see RuntimeConfigured")
    changed = notes.load(CHANGED)
    unit = show(system, "LoadState,ActiveState,SubState,ExecMainStartTimestampMonotonic,ExecStart")
    state = unit.get("ActiveState", "unknown")
    # Both are CLOCK_MONOTONIC, which a machine shares with its host and no clock setting moves.
    started = int(unit.get("ExecMainStartTimestampMonotonic") or 0)
    if unit.get("LoadState") == "not-found":
        return false(ACTIVE, "NoContainerd", f"there is no {UNIT}: install containerd in the image")
    # Our drop-in of containerd.service starts this service by ExecStartPost=, once containerd has said READY=1.
    running = state == "active" or unit.get("SubState") == "start-post"
    other = CONFIG_ARGUMENT.search(unit.get("ExecStart", ""))
    if running and other and other["path"] != MAIN:
        return false(
            ACTIVE,
            "OtherConfiguration",
            f"{UNIT} starts containerd with {other['path']} instead of {MAIN}: take that argument out of ExecStart=",
        )
    loaded = {"started": started, "effective": changed.get("effective", "")}
    # The second: somebody's change of its files was mended, and that same process never saw anything of it.
    if running and (
        started >= changed.get("microseconds", 0) or (loaded["effective"] and notes.load(LOADED) == loaded)
    ):
        notes.save(LOADED, loaded)
        return true(ACTIVE, "Running", f"{UNIT} runs with this configuration")
    if running:
        return unknown(ACTIVE, RESTART_PENDING, f"{UNIT} is being restarted, since its configuration changed")
    if state == "failed":
        return false(ACTIVE, "Failed", f"{UNIT} failed: see `journalctl -u containerd` in the machine")
    return unknown(ACTIVE, "NotStarted", f"{UNIT} is {state}: proven at the next run")


def show(system: System, properties: str) -> dict[str, str]:
    """Of containerd's unit, by name. Raises CommandError."""
    output = system.run("systemctl", "show", f"--property={properties}", UNIT, timeout=20)
    return {key: value for key, _, value in (line.partition("=") for line in output.splitlines())}


def containerd_state(system: System, notes: Notes) -> list[object]:
    """All that the answer of containerd_without_groups depends on, without starting anything."""
    program, noted = system.find_program("containerd"), notes.load(REPLACED)
    ended = bool(noted) and program_identity(system, str(noted.get("running"))) != noted.get("identity")
    return [program and program_identity(system, program), ended]


def program_identity(system: System, path: str) -> list[object] | None:
    """As notes keep it; None where there is none."""
    try:
        return list(astuple(system.identity(path)))
    except OSError:
        # The kernel tells a process that has just ended by EACCES, too.
        return None


def restart(system: System) -> None:
    """Start containerd anew; the last act of a run. Raises CommandError."""
    # --no-block: containerd's start waits for the end of this run, which is ordered before it, and so would we. Its
    # stop does not wait (job_compare in systemd's job.c lets stops go first): from here on there is no CRI.
    system.run("systemctl", "--no-block", "try-restart", UNIT, timeout=20)
