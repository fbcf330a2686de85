"""Checks whether containerd runs with its current configuration and serves the kubelet, and restarts it if needed."""

import posixpath
import re
import time
from collections.abc import Mapping
from itertools import pairwise

from agent.machine.containerd.effective import noted_address
from agent.machine.containerd.formats import CRI_2, MAIN
from agent.machine.context import Context
from agent.machine.notes import Notes
from agent.model.conditions import Condition, ConditionType, Status, false, true, unknown
from agent.model.digits import whole_number
from agent.model.errors import CommandError
from agent.model.reasons import Reason
from agent.model.text import one_line
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
PROPERTIES = "LoadState,ActiveState,SubState,ExecMainStartTimestampMonotonic,MainPID,Job"
COMMAND_LINE_LIMIT = 1 << 20
ANSWER_SHOWN = 200
"""Characters that a condition shows of an answer that is none."""
OPTIONS = {name: re.compile(rf"--?{name[0]}(?:{name[1:]})?(?:=(.*))?", re.DOTALL) for name in ("config", "address")}
"""Match containerd's global options for its main configuration file and its socket. The value may be the next
argument."""
CRI_PLUGINS = ("type==io.containerd.grpc.v1,id==cri", "type==io.containerd.cri.v1")
"""Filters of `ctr plugins ls` for the plugin that serves the kubelet, and for those that it needs (containerd 2)."""


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
    """Return RuntimeActive: whether containerd runs with the agent's last change to its configuration, and serves CRI.

    If the reason is RestartPending, the caller must call `restart`. `configured` is RuntimeConfigured.
    """
    if configured.reason == Reason.NOT_APPLICABLE:
        return configured._replace(type=ACTIVE)
    if configured.status is not Status.TRUE:
        return unknown(ACTIVE, Reason.NOT_CONFIGURED, "see RuntimeConfigured")
    notes = context.notes
    changed = notes.load(CHANGED)
    changed_at = changed.get("microseconds", 0)
    try:
        unit = unit_properties(context)
    except CommandError as error:
        return unknown(ACTIVE, Reason.NO_ANSWER, f"cannot tell whether containerd runs: {error}")
    # This time and the noted one are of CLOCK_MONOTONIC, which cannot be set, and which machine and host share.
    started = whole_number(unit.get("ExecMainStartTimestampMonotonic", "")) or 0
    if unit.get("LoadState") == "not-found":
        return false(ACTIVE, Reason.NO_CONTAINERD, f"{UNIT} does not exist: install containerd in the image")
    # containerd's unit itself may have started this run, with an ExecStartPost= from the agent's drop-in for the unit.
    # Then the unit may still be in the state start-post. containerd has sent READY=1 by then, so it runs.
    running = unit.get("ActiveState") == "active" or unit.get("SubState") == "start-post"
    command_line = _command_line(context.system, unit.get("MainPID", "0")) if running else b""
    config_path = _normal(argument(command_line, "config"))
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
        address = argument(command_line, "address")
        return context.once.get("cri", lambda: _check_cri(context.system, address or noted_address(notes)))
    if running:
        return unknown(ACTIVE, Reason.RESTART_PENDING, f"{UNIT} is restarting, because its configuration changed")
    return _not_running(unit, has_run=bool(notes.load(LOADED)))


def _not_running(unit: Mapping[str, str], *, has_run: bool) -> Condition:
    """Return RuntimeActive for a containerd that does not run.

    `unit` has its unit's properties. `has_run` says whether it has run since the machine's boot.
    """
    state = unit.get("ActiveState", "unknown")
    if state == "failed":
        return false(ACTIVE, Reason.FAILED, f"{UNIT} failed: see `journalctl -u containerd` in the machine")
    if state == "inactive":
        masked = unit.get("LoadState") == "masked"
        start = f"`systemctl {'unmask' if masked else 'start'} {UNIT}`" + (" and start it" if masked else "")
        # If it is being restarted, this run comes between its stop and its start, which is queued then.
        if has_run and not unit.get("Job"):
            return false(ACTIVE, Reason.STOPPED, f"{UNIT} was stopped: run {start} in the machine")
        # While the machine boots, that is normal: this run comes before containerd's start.
        advice = f"if the machine has booted, run {start} in the machine"
        return unknown(ACTIVE, Reason.NOT_STARTED, f"{UNIT} is {'masked' if masked else state}: {advice}")
    return unknown(ACTIVE, Reason.NOT_STARTED, f"{UNIT} is {state}: the next run checks again")


def _check_cri(system: System, address: str) -> Condition:
    """Return RuntimeActive for a containerd that runs with its configuration: whether it serves CRI to the kubelet.

    If one of its plugins fails, containerd and its unit stay active without it. Each run asks: ctr takes as long as
    systemctl, and nobody would notice a containerd that hangs otherwise. At boot, nothing waits for the answer, because
    containerd does not run yet.
    """
    running = f"{UNIT} runs with this configuration"
    if system.find_program("ctr") is None:
        remark = "ctr is not in the image, so that it serves the kubelet (CRI) is inferred"
        return true(ACTIVE, Reason.RUNNING, f"{running}; {remark}")
    options = ("--address", address) if address else ()
    try:
        output = system.run("ctr", *options, "plugins", "ls", "--detailed", *CRI_PLUGINS)
    except CommandError as error:
        return unknown(ACTIVE, Reason.NO_ANSWER, f"{running}, but did not say whether it serves the kubelet: {error}")
    plugins = plugin_errors(output)
    if output.strip() and not plugins:
        answer = one_line(output)[:ANSWER_SHOWN]
        return unknown(ACTIVE, Reason.NO_ANSWER, f"{running}, but `ctr plugins ls` printed no plugin: {answer}")
    errors = [error for error in plugins.values() if error]
    if CRI_2 not in plugins:
        errors.append(f"it has no plugin {CRI_2}")
    if not errors:
        return true(ACTIVE, Reason.RUNNING, f"{running} and serves the kubelet")
    # A plugin's error quotes that of the plugin that it needs.
    said = "; ".join(each for each in errors if not any(each != other and each in other for other in errors))
    advice = f"correct what it names, then run `systemctl restart {UNIT}` in the machine"
    return false(ACTIVE, Reason.CRI_FAILED, f"{UNIT} runs, but does not serve the kubelet (CRI): {said}: {advice}")


def plugin_errors(output: str) -> dict[str, str]:
    """Return the error of each plugin in the output of `ctr plugins ls --detailed`, by name; empty if it has none."""
    found = {}
    for block in f"\n{output}".split("\nType:")[1:]:
        kind, _, rest = block.partition("\nID:")
        name, _, details = rest.partition("\n")
        _, failed, error = f"\n{details}".partition("\nError:")
        message = one_line(error.partition("Message:")[2]) or one_line(error)
        found[f"{kind.strip()}.{name.strip()}"] = (message or "it failed") if failed else ""
    return found


def _command_line(system: System, process: str) -> bytes:
    """Return the command line of containerd's process; empty if it cannot be read.

    The unit's ExecStart= does not always show it: it may have variables, or name a script that executes containerd.
    """
    try:
        return system.read(f"/proc/{process}/cmdline", COMMAND_LINE_LIMIT)
    except OSError:
        return b""


def argument(command_line: bytes, name: str) -> str:
    """Return containerd's argument for one of OPTIONS; empty if it has none, or if the command is another program's.

    The unit's main process may be another program, such as a shell that waits for containerd.
    """
    program, *arguments = command_line.decode(errors="surrogateescape").split("\0")
    value = ""
    if posixpath.basename(program) == "containerd":
        for each, following in pairwise(arguments):
            if option := OPTIONS[name].fullmatch(each):
                value = following if option[1] is None else option[1]
    return value


def _normal(path: str) -> str:
    # normpath keeps two slashes at the start.
    return posixpath.normpath(path).replace("//", "/") if path else ""


def unit_properties(context: Context) -> dict[str, str]:
    """Return PROPERTIES of containerd's unit, by name, as they were when a step first asked for them (Context.once).

    `systemctl show` takes a tenth of a CDI generator's time, so it runs only once for all steps. Raises CommandError.
    """

    def show() -> dict[str, str]:
        output = context.system.run("systemctl", "show", f"--property={PROPERTIES}", UNIT)
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
    system.run("systemctl", "--no-block", "try-restart", UNIT)
