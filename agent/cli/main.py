"""The program `unbounded-agent`: parses its arguments, runs the command that they name, and sets the exit code."""

import argparse
import signal
import sys
from collections.abc import Sequence

from agent.cli.commands import UNIT_COMMANDS
from agent.cli.libraries import load_msgspec, load_prometheus_client
from agent.cli.parser import VERSION, make_parser
from agent.cli.printing import ignore_broken_pipe, progress, report, report_failures, say
from agent.model.errors import AgentError, ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that these arguments name, and return its exit code.

    Without `arguments`, take them from this process's command line (`sys.argv`). In that case, SIGTERM and SIGHUP
    interrupt the command as Ctrl-C does, unless the command is one of UNIT_COMMANDS.

    Most commands return 0 (done, or nothing to do), 1 (failed, or not ready), 2 (bad input) or 130 (interrupted);
    agent.cli.commands has the codes of each. Raises SystemExit after `--help`, `--version` or a wrong argument.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = make_parser(*words[:1]).parse_args(words)
    if options.command == "version":
        say([VERSION])
        return 0
    if arguments is None and options.command not in UNIT_COMMANDS:
        _interrupt_at_hangup()
    try:
        return _run(options)
    except ConfigError as error:
        report(str(error))
        return 2
    except AgentError as error:
        report(str(error))
        return 1
    except BrokenPipeError:
        ignore_broken_pipe()
        return 0
    except OSError as error:
        report(f"{error.filename or 'system call'}: {error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    """Run any command but `version`. Import only the modules that this command needs."""
    load_msgspec()
    # To load the modules of all commands, with prometheus_client and asyncio, takes thirty times as long as Python's
    # own start. If the top of this file imported them, help, scripts that poll `status`, and every start of a machine
    # would wait for that.
    match options.command:
        case "run":
            load_prometheus_client()
            from agent.cli.service import run

            return run(options)
        case "load-modules":
            from agent.cli.host import load, this_host
            from agent.cli.load_modules import load_modules
            from agent.system.sysfs import Sysfs

            system = this_host()
            load_modules(load(options, system).config, system, Sysfs(system), progress)
            return 0
        case "kube" if options.kube_command != "allocation":
            from agent.cli.host import this_host
            from agent.cli.kube import manifests

            return manifests(options.names, options.out, this_host())
        case "reset":
            from agent.cli.reset import reset

            return reset(options)
        case _:
            return _run_with_reconciler(options)


def _run_with_reconciler(options: argparse.Namespace) -> int:
    """Run a command that needs the configuration and a reconciler."""
    from agent.cli.wiring import reconciler_for

    match options.command:
        case "plan":
            from agent.cli.plan import plan

            return plan(reconciler_for(options), with_differences=options.diff, for_programs=options.json)
        case "status":
            from agent.cli.host import load
            from agent.cli.status import Request, status

            form = "json" if options.json else "wide" if options.wide else ""
            request = Request(options.machine, form, options.check, options.wait, options.watch)
            reconciler = reconciler_for(options)
            return status(reconciler, request, lambda: load(options, reconciler.system).config)
        case "doctor":
            from agent.cli.doctor.command import doctor

            return doctor(
                reconciler_for(options),
                for_programs=options.json,
                kubeconfig=options.kubeconfig,
                bundle=options.bundle,
            )
        case "apply":
            from agent.cli.apply import apply

            return apply(reconciler_for(options))
        case "prepare":
            from agent.cli.prepare import prepare

            return report_failures(prepare(options.machine, reconciler_for(options)).failures_of((options.machine,)))
        case "gpus":
            from agent.cli.gpus import gpus

            return gpus(options, reconciler_for(options))
        case "kube":
            from agent.cli.allocation import allocation

            return allocation(options, reconciler_for(options))
        case "up":
            from agent.cli.up import up

            return up(reconciler_for(options), options.machine, rebuild=options.rebuild, for_programs=options.json)
        case "preflight":
            from agent.cli.preflight import preflight

            return preflight(reconciler_for(options), for_programs=options.json)
        case _:
            from agent.cli.lifecycle import lifecycle

            return lifecycle(options, reconciler_for(options))


def _interrupt_at_hangup() -> None:
    """Let SIGTERM and SIGHUP interrupt this process as Ctrl-C does.

    SIGHUP comes when the connection to the terminal is lost. By default, both signals end the process at once. Then a
    kubectl that it started would go on evicting pods, and the GPU of an unfinished `gpus detach` would stay detached.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        # A process that nohup(1) started ignores SIGHUP, and must continue to ignore it.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
