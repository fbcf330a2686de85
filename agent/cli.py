"""The command `unbounded-agent`: wires the real parts; the only place that prints, and that turns errors into codes."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence

from agent import __version__, daemon
from agent.conditions import Condition, Status
from agent.config import Config, load_config
from agent.detach import attach, detach
from agent.doctor import as_json as diagnosis_as_json
from agent.doctor import diagnose, diagnose_host, in_words, sound
from agent.driver_modules import load_modules
from agent.errors import AgentError, ConfigError, UnsupportedError
from agent.facts import Facts
from agent.gpu_users import holders
from agent.history import as_json
from agent.judgement import rfc3339
from agent.observe.udev import Udev
from agent.paths import CONFIG_FILE
from agent.prepare import prepare
from agent.reconcile import MachineOutcome, Reconciler
from agent.system.files import System
from agent.system.host_runner import host_runner
from agent.system.system_bus import SystemBus

ANSWER_LIMIT = 180.0
"""Seconds that `apply` waits for a machine to boot and report, beside those that it may wait for its driver."""
TELL_INTERVAL = 15.0
"""Seconds between two words of what is waited for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: done or nothing to do; 1: failed, or not ready; 2: bad input."""
    options = _parser().parse_args(arguments)
    if options.command == "version":
        print(f"unbounded-agent {__version__} (Python {platform.python_version()})")
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
        # `unbounded-agent status | head`: what is left to print interests nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"unbounded-agent: {error.filename or 'system call'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unbounded-agent",
        description="Makes this host's GPUs usable inside systemd-nspawn machines that run Kubernetes nodes.",
    )
    parser.add_argument("--config", default=CONFIG_FILE, metavar="FILE", help=f"default: {CONFIG_FILE} and config.d")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("plan", help="print what apply would do; changes nothing, needs no rights")
    commands.add_parser("apply", help="make one pass, start stopped machines, wait for their answer")
    status = commands.add_parser("status", help="print the conditions of each machine")
    status.add_argument("--json", action="store_true", help="as JSON, in the form of Kubernetes' conditions")
    doctor = commands.add_parser("doctor", help="print what is wrong, what that looks like and what mends it")
    doctor.add_argument("--json", action="store_true", help="as one JSON object")
    commands.add_parser("run", help="stay, keep the machines ready, serve metrics (the systemd service)")
    commands.add_parser("version", help="print the version")
    _add_gpus(commands.add_parser("gpus", help="take a GPU out of use before it is removed, and what belongs to that"))
    commands.add_parser("load-modules", help="where driver.load_modules is set (unbounded-agent-modules.service)")
    before_start = commands.add_parser("prepare", help="before a machine's start (unbounded-agent-prepare@.service)")
    before_start.add_argument("machine", metavar="MACHINE")
    return parser


def _add_gpus(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="gpus_command", required=True, metavar="COMMAND")
    for name, text in (
        ("detach", "take a GPU from the machines that have it; ends with 0 when it may be removed"),
        ("attach", "give a detached GPU back"),
        ("holders", "list the processes that have a GPU open"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("address", metavar="PCI-ADDRESS", nargs="?" if name == "holders" else None, default="")


def _command(options: argparse.Namespace) -> int:
    system = System(host_runner, bus=SystemBus())

    def load() -> Config:
        return load_config(system, options.config)

    def make(config: Config, progress: Callable[[str], None] = _progress) -> Reconciler:
        return Reconciler(config, system, Udev(), progress)

    match options.command:
        case "plan" | "status" | "doctor":
            return _look(options, make(load()))
        case "apply":
            return _apply(make(_as_root(load())))
        case "prepare":
            outcome = prepare(options.machine, make(_as_root(load())))
            return _tell_failures(outcome.failures)
        case "load-modules":
            load_modules(_as_root(load()), system, Udev(), _progress)
            return 0
        case "gpus":
            return _gpus(options.gpus_command, options.address, make(_as_root(load())))
        case "run":
            _as_root(load())
            return daemon.run(load, make)
        case command:
            raise ConfigError(f"unknown command {command}")


def _as_root(config: Config) -> Config:
    if os.geteuid() != 0:
        raise UnsupportedError(
            "this needs root rights", "run it with sudo; `plan`, `status` and `doctor` work as any user"
        )
    return config


def _progress(sentence: str) -> None:
    if sentence:
        print(f"unbounded-agent: {sentence}", file=sys.stderr, flush=True)


def _tell_failures(failures: Sequence[str]) -> int:
    for failure in failures:
        print(f"unbounded-agent: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _look(options: argparse.Namespace, reconciler: Reconciler) -> int:
    match options.command:
        case "plan":
            return _plan(reconciler)
        case "status":
            return _status(reconciler, options.json)
        case _:
            return _doctor(reconciler, options.json)


def _plan(reconciler: Reconciler) -> int:
    facts, planned, difference = reconciler.look()
    for name, why in planned.skipped.items():
        print(f"{name}: {why}: nothing is set up")
    for name, why in planned.held.items():
        print(f"{name}: left as it is: {why}")
    for name, why in difference.refused.items():
        print(f"{name}: refused: {why}")
    steps = [action.describe() for action in difference.actions]
    steps += [
        f"start machine {machine.name}" for machine in reconciler.judge(facts, planned, difference) if machine.stopped
    ]
    for step in steps:
        print(f"would {step}")
    if not steps:
        print("nothing to do")
    _tell_problems(facts)
    return 1 if difference.refused else 0


def _apply(reconciler: Reconciler) -> int:
    outcome = reconciler.run_pass(by_hand=True)
    failures = outcome.failures
    limit = ANSWER_LIMIT + max(settings.driver_wait for settings in reconciler.config.machines.values())
    started, told = time.monotonic(), 0.0
    while waiting := [machine for machine in outcome.machines if machine.pending and not failures]:
        waited = time.monotonic() - started
        if waited > limit:
            failures += tuple(f"machine {machine.name} did not answer within {limit:.0f} s" for machine in waiting)
            break
        if waited >= told:
            for machine in waiting:
                _progress(f"{machine.name}: wait for {machine.conditions[-1].message}")
            told = waited + TELL_INTERVAL
        time.sleep(1)
        outcome = reconciler.reconcile()
        failures += outcome.failures
    _print_tables(outcome.machines)
    _tell_problems(outcome.facts)
    ready = all(machine.conditions[-1].status is Status.TRUE for machine in outcome.machines)
    return _tell_failures(failures) or (0 if ready else 1)


def _gpus(command: str, address: str, reconciler: Reconciler) -> int:
    if command == "holders":
        print("\n".join(holders(address, reconciler)))
        return 0
    ending = (detach if command == "detach" else attach)(address, reconciler)
    print("\n".join(ending.sentences))
    return 0 if ending.done else 1


def _tell_problems(facts: Facts) -> None:
    for problem in facts.all_problems():
        print(f"unbounded-agent: note: {problem}", file=sys.stderr)


def _status(reconciler: Reconciler, as_json_text: bool) -> int:
    facts, planned, difference = reconciler.look()
    machines = reconciler.judge(facts, planned, difference)
    _tell_problems(facts)
    if as_json_text:
        print(as_json({machine.name: machine.conditions for machine in machines}))
    else:
        _print_tables(machines)
    return 0


def _doctor(reconciler: Reconciler, as_json_text: bool) -> int:
    facts, planned, difference = reconciler.look()
    diagnoses = [diagnose(machine) for machine in reconciler.judge(facts, planned, difference)]
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
