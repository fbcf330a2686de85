"""The command `unbounded-agent`: wires the parts together. The only place that prints and sets exit codes."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from agent.cli.detach import attach, detach
from agent.cli.doctor import as_json as diagnosis_as_json
from agent.cli.doctor import diagnose, diagnose_host, in_words, sound
from agent.cli.forget import forget
from agent.cli.holders import holders
from agent.cli.load_modules import load_modules
from agent.cli.parser import VERSION, make_parser
from agent.cli.prepare import prepare
from agent.config.last_good import Loaded, keep, load_or_last_good
from agent.config.load import load_config
from agent.host.daemon import loop
from agent.host.daemon.http.health import NO_MACHINES
from agent.host.outcome import MachineOutcome
from agent.host.reconcile import Reconciler
from agent.host.state.condition_history import as_json
from agent.model.conditions import Condition, Status
from agent.model.errors import AgentError, ConfigError, UnsupportedError
from agent.model.facts import Facts, Unseen
from agent.model.paths import CONFIG_FILE
from agent.model.text import rfc3339
from agent.system.dbus import SystemBus
from agent.system.files import System
from agent.system.sh_runner import host_runner
from agent.system.udev import Udev

ANSWER_LIMIT = 180.0
"""Seconds that `apply` waits for a machine to boot and report, in addition to its driver_wait."""
PROGRESS_INTERVAL = 15.0
"""Seconds between two progress messages."""
LISTING = {"forget": forget, "holders": holders}
"""Subcommands of `gpus` that only print lines; without an address they concern all GPUs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. 0: done or nothing to do; 1: failed, or not ready; 2: bad input."""
    options = make_parser().parse_args(arguments)
    if options.command == "version":
        print(VERSION)
        return 0
    try:
        return _command(options)
    except ConfigError as error:
        print(f"unbounded-agent: {error}", file=sys.stderr)
        return 2
    except AgentError as error:
        print(f"unbounded-agent: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # `unbounded-agent status | head`: the reader has all that it wants.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"unbounded-agent: {error.filename or 'system call'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _command(options: argparse.Namespace) -> int:
    system = System(host_runner, bus=SystemBus())

    def load() -> Loaded:
        return _load(options, system)

    def make(loaded: Loaded, progress: Callable[[str], None] = _progress) -> Reconciler:
        return Reconciler(loaded.config, system, Udev(), progress, rejected=loaded.rejected)

    match options.command:
        case "plan" | "status" | "doctor":
            return _preview(options, make(load()))
        case "apply":
            return _apply(make(load()))
        case "prepare":
            return _print_failures(prepare(options.machine, make(load())).failures)
        case "load-modules":
            load_modules(load().config, system, Udev(), _progress)
            return 0
        case "gpus":
            return _gpus(options.gpus_command, options.address, make(load()))
        case "run":
            return loop.run(load, make)
        case command:
            raise ConfigError(f"unknown command {command}")


READ_ONLY_COMMANDS = ("plan", "status", "doctor")
AT_START = ("run", "prepare", "load-modules")
"""Commands that units run. They use the last good configuration if the current one is wrong: otherwise a machine would
stay down or get no GPUs."""


def _load(options: argparse.Namespace, system: System) -> Loaded:
    if options.command not in READ_ONLY_COMMANDS and os.geteuid() != 0:
        raise UnsupportedError(
            "this command needs root rights", "run it with sudo; `plan`, `status` and `doctor` work as any user"
        )
    standard = options.config == CONFIG_FILE
    if options.command not in AT_START or not standard:
        config = load_config(system, options.config)
        if options.command == "apply" and standard:
            keep(config, system)
        return Loaded(config)
    loaded = load_or_last_good(system)
    if loaded.rejected and options.command != "run":
        _progress(f"the configuration is wrong, using the last good one: {loaded.rejected}")
    return loaded


def _progress(sentence: str) -> None:
    if sentence:
        print(f"unbounded-agent: {sentence}", file=sys.stderr, flush=True)


def _print_failures(failures: Sequence[str]) -> int:
    for failure in failures:
        print(f"unbounded-agent: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _preview(options: argparse.Namespace, reconciler: Reconciler) -> int:
    match options.command:
        case "plan":
            return _plan(reconciler)
        case "status":
            return _status(reconciler, options.json)
        case _:
            return _doctor(reconciler, options.json)


def _plan(reconciler: Reconciler) -> int:
    facts, planned, difference = reconciler.preview()
    for name, why in planned.skipped.items():
        print(f"{name}: {why}: nothing is set up")
    for name, why in planned.held.items():
        print(f"{name}: left unchanged: {why}")
    for name, refused in difference.refused.items():
        print(f"{name}: refused: {refused.why if isinstance(refused, Unseen) else refused}")
    steps = [action.describe() for action in difference.actions]
    steps += [
        f"start machine {machine.name}"
        for machine in reconciler.evaluate(facts, planned, difference)
        if machine.stopped
    ]
    for step in steps:
        print(f"would {step}")
    if not steps:
        print("nothing to do")
    _print_no_machines(reconciler)
    _print_problems(facts)
    return 0 if isinstance(facts.template_device_allow, tuple) and not difference.refused else 1


def _apply(reconciler: Reconciler) -> int:
    outcome = reconciler.run_pass(by_hand=True)
    failures = outcome.failures
    limit = ANSWER_LIMIT + max((each.driver_wait for each in reconciler.config.machines.values()), default=0)
    started, next_report = time.monotonic(), 0.0
    while waiting := [machine for machine in outcome.machines if machine.pending and not failures]:
        waited = time.monotonic() - started
        if waited > limit:
            failures += tuple(f"machine {machine.name} did not report within {limit:.0f} s" for machine in waiting)
            break
        if waited >= next_report:
            for machine in waiting:
                _progress(f"{machine.name}: waiting: {machine.ready.message}")
            next_report = waited + PROGRESS_INTERVAL
        time.sleep(1)
        outcome = reconciler.reconcile()
        failures += outcome.failures
    _print_tables(outcome.machines)
    _print_no_machines(reconciler)
    _print_problems(outcome.facts)
    ready = all(machine.ready.status is Status.TRUE for machine in outcome.machines)
    return _print_failures(failures) or (0 if ready else 1)


def _gpus(command: str, address: str, reconciler: Reconciler) -> int:
    if command in LISTING:
        print("\n".join(LISTING[command](address, reconciler)))
        return 0
    ending = (detach if command == "detach" else attach)(address, reconciler)
    print("\n".join(ending.sentences))
    return 0 if ending.done else 1


def _print_no_machines(reconciler: Reconciler) -> None:
    if not reconciler.config.machines:
        print(NO_MACHINES)


def _print_problems(facts: Facts) -> None:
    for problem in facts.all_problems():
        print(f"unbounded-agent: note: {problem}", file=sys.stderr)


def _status(reconciler: Reconciler, as_json_text: bool) -> int:
    facts, planned, difference = reconciler.preview()
    machines = reconciler.evaluate(facts, planned, difference)
    _print_problems(facts)
    if as_json_text:
        print(as_json({machine.name: machine.conditions for machine in machines}))
    else:
        _print_tables(machines)
        _print_no_machines(reconciler)
    return 0


def _doctor(reconciler: Reconciler, as_json_text: bool) -> int:
    facts, planned, difference = reconciler.preview()
    diagnoses = [diagnose(machine) for machine in reconciler.evaluate(facts, planned, difference)]
    host = diagnose_host(facts, reconciler.system)
    print(diagnosis_as_json(diagnoses, host) if as_json_text else "\n".join(in_words(diagnoses, host)))
    return 0 if sound(diagnoses, host) else 1


def _print_tables(machines: Sequence[MachineOutcome]) -> None:
    for machine in machines:
        print(f"{machine.name}: {len(machine.gpus)} GPUs {' '.join(machine.gpus)}".rstrip())
        rows = [("CONDITION", "STATUS", "SINCE", "REASON", "MESSAGE")]
        rows += [_row(condition) for condition in machine.conditions]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for name, *rest in rows:
            cells = [cell.ljust(width) for cell, width in zip(rest[:3], widths[1:], strict=True)]
            print("  ".join([name.rjust(widths[0]), *cells, rest[3]]))


def _row(condition: Condition) -> tuple[str, str, str, str, str]:
    since = rfc3339(condition.last_transition)
    return (condition.type, condition.status, since, condition.reason, condition.message)


if __name__ == "__main__":
    sys.exit(main())
