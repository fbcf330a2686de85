"""Checks whether containerd runs with its current configuration, and restarts it if it does not."""

import posixpath
import re
import time
from itertools import pairwise

from agent.machine.containerd.formats import MAIN
from agent.machine.context import Context
from agent.machine.notes import Notes
from agent.model.conditions import Condition, ConditionType, Status, false, true, unknown
from agent.model.digits import whole_number
from agent.model.reasons import Reason
from agent.system.files import System

ACTIVE = ConditionType.RUNTIME_ACTIVE
UNIT = "containerd.service"
CHANGED = "containerd-changed"
"""Name of the note about the agent's last change to containerd's configuration.

`microseconds` is the time of the change by the monotonic clock. `effective` is null until all files are written, then
empty until the effective configuration has been read back, and then the digest of that configuration. If a run is
killed, the next run knows from `effective` at which step that happened.
"""
LOADED = "containerd-loaded"
"""Name of the note about the last containerd process that was known to run with its current configuration: when it
started, and a digest of the configuration."""
REPLACED = "containerd-replaced"
"""Name of the note about a running containerd whose program file was replaced by one that accepts other CDI
specifications: the path of the running program in /proc, and that program's identity."""
PROPERTIES = "LoadState,ActiveState,SubState,ExecMainStartTimestampMonotonic,MainPID"
COMMAND_LINE_LIMIT = 1 << 20
CONFIG_OPTION = re.compile(r"--?c(?:onfig)?(?:=(.*))?", re.DOTALL)
"""Matches containerd's global option for its main configuration file. The file's name may be the next argument."""


def note_change(notes: Notes, *, written: bool) -> None:
    """Note that containerd's configuration has changed or, if `written` is False, is about to change.

    From then on, containerd is up to date only if it started after the noted time, or if it already runs with the same
    effective configuration. The digest of that configuration is added once it is known (`note_result`).
    """
    notes.save(CHANGED, {"microseconds": time.monotonic_ns() // 1000, "effective": "" if written else None})


def note_result(notes: Notes, effective: str) -> None:
    """Add the digest of the effective configuration to the note CHANGED.

    The noted time stays, because every containerd that started after that time has this configuration.
    """
    notes.save(CHANGED, {**notes.load(CHANGED), "effective": effective})


def change_was_interrupted(notes: Notes) -> bool:
    """Return whether a run began to change containerd's configuration, but was killed before it checked the result."""
    changed = notes.load(CHANGED)
    return bool(changed) and not changed.get("effective")


def writing_was_interrupted(notes: Notes) -> bool:
    """Return whether a run began to change the configuration, and may have been killed before its last write."""
    return notes.load(CHANGED).get("effective", "") is None


def check_active(context: Context, configured: Condition) -> Condition:
    """Return RuntimeActive: whether containerd runs with the agent's last change to its configuration.

    If the reason is RestartPending, the caller must call `restart`. `configured` is RuntimeConfigured.
    """
    if configured.reason == Reason.NOT_APPLICABLE:
        return configured._replace(type=ACTIVE)
    if configured.status is not Status.TRUE:
        return unknown(ACTIVE, Reason.NOT_CONFIGURED, "see RuntimeConfigured")
    notes = context.notes
    changed = notes.load(CHANGED)
    # Another release may have noted another type since the boot of the machine.
    changed_at = noted if isinstance(noted := changed.get("microseconds"), int) else 0
    unit = unit_properties(context)
    state = unit.get("ActiveState", "unknown")
    # This time and the noted one are of CLOCK_MONOTONIC, which cannot be set, and which machine and host share.
    started = whole_number(unit.get("ExecMainStartTimestampMonotonic", "")) or 0
    if unit.get("LoadState") == "not-found":
        return false(ACTIVE, Reason.NO_CONTAINERD, f"{UNIT} does not exist: install containerd in the image")
    # containerd's unit itself may have started this run, with an ExecStartPost= from the agent's drop-in for the unit.
    # Then the unit may still be in the state start-post. containerd has sent READY=1 by then, so it runs.
    running = state == "active" or unit.get("SubState") == "start-post"
    config_path = _config_path(context.system, unit.get("MainPID", "0")) if running else ""
    if config_path not in ("", MAIN):
        return false(
            ACTIVE,
            Reason.OTHER_CONFIGURATION,
            f"{UNIT} runs containerd with {config_path} instead of {MAIN}: remove that argument from ExecStart=",
        )
    loaded = {"started": started, "effective": changed.get("effective", "")}
    # If containerd started before the change, it is up to date only if it already runs with the same effective
    # configuration. That is so if the change only restored a file that somebody had edited.
    if running and (started >= changed_at or (loaded["effective"] and notes.load(LOADED) == loaded)):
        notes.save(LOADED, loaded)
        return true(ACTIVE, Reason.RUNNING, f"{UNIT} runs with this configuration")
    if running:
        return unknown(ACTIVE, Reason.RESTART_PENDING, f"{UNIT} is restarting, because its configuration changed")
    if state == "failed":
        return false(ACTIVE, Reason.FAILED, f"{UNIT} failed: see `journalctl -u containerd` in the machine")
    if state == "inactive":
        # While the machine boots, that is normal: this run comes before containerd's start.
        masked = unit.get("LoadState") == "masked"
        start = f"`systemctl {'unmask' if masked else 'start'} {UNIT}`" + (" and start it" if masked else "")
        advice = f"if the machine has booted, run {start} in the machine"
        return unknown(ACTIVE, Reason.NOT_STARTED, f"{UNIT} is {'masked' if masked else state}: {advice}")
    return unknown(ACTIVE, Reason.NOT_STARTED, f"{UNIT} is {state}: the next run checks again")


def _config_path(system: System, process: str) -> str:
    """Return the main configuration file that containerd's process was started with; empty if no argument names one.

    The unit's ExecStart= does not always show this: it may have variables, or name a script that executes containerd.
    """
    try:
        return config_argument(system.read(f"/proc/{process}/cmdline", COMMAND_LINE_LIMIT))
    except OSError:
        return ""


def config_argument(command_line: bytes) -> str:
    """Return containerd's --config argument; empty if it has none, or if the command line is another program's.

    The unit's main process may be another program, such as a shell that waits for containerd.
    """
    program, *arguments = command_line.decode(errors="surrogateescape").split("\0")
    path = ""
    if posixpath.basename(program) == "containerd":
        for argument, following in pairwise(arguments):
            if option := CONFIG_OPTION.fullmatch(argument):
                path = following if option[1] is None else option[1]
    # normpath keeps two slashes at the start.
    return posixpath.normpath(path).replace("//", "/") if path else ""


def unit_properties(context: Context) -> dict[str, str]:
    """Return PROPERTIES of containerd's unit, by name, as they were when a step first asked for them (Context.once).

    `systemctl show` takes a tenth of a CDI generator's time, so it runs only once for all steps. Raises CommandError.
    """

    def show() -> dict[str, str]:
        output = context.system.run("systemctl", "show", f"--property={PROPERTIES}", UNIT, timeout=20)
        return {key: value for key, _, value in (line.partition("=") for line in output.splitlines())}

    return context.once.get(UNIT, show)


def containerd_state(context: Context) -> list[object]:
    """Return everything that the result of `adapt_to_containerd` depends on, as JSON data. Starts no program."""
    system = context.system
    program, noted = system.find_program("containerd"), context.notes.load(REPLACED)
    # The note is about a process whose program file was replaced. While that process runs, specifications must suit the
    # old program, which rejects additionalGids. After the process has ended, they may have additionalGids.
    ended = bool(noted) and program_identity(system, str(noted.get("running"))) != noted.get("identity")
    return [program and program_identity(system, program), ended]


def program_identity(system: System, path: str) -> list[object] | None:
    """Return a program's identity as a list, as notes have it; None if the program cannot be inspected."""
    try:
        return list(system.identity(path))
    except OSError:
        # For a process that has just exited, the kernel may return EACCES.
        return None


def restart(system: System) -> None:
    """Restart containerd. This must be the last step of a run. Raises CommandError."""
    # containerd is ordered after this service, so its start waits until this run ends. Without --no-block, systemctl
    # would wait for that start. containerd's stop does not wait (job_compare in systemd's job.c), so there is no CRI
    # from now until this run ends.
    system.run("systemctl", "--no-block", "try-restart", UNIT, timeout=20)
