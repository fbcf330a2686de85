"""The program `unbounded-agent`: parses its arguments, runs the command that they name, and sets the exit code."""

import gc
import io
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module

from agent.cli.parser import LAST_GOOD, VERSION, Command, find_command, make_parser
from agent.cli.printing import STDOUT, ignore_broken_pipe, report, say
from agent.model.errors import AgentError, ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that these arguments name, and return its exit code.

    Without `arguments`, take them from this process's command line (`sys.argv`). In that case, SIGTERM and SIGHUP
    interrupt the command as Ctrl-C does, unless a unit runs the command. The journal then also gets a record of a
    command that changes the host.

    Most commands return 0 (done, or nothing to do), 1 (failed, or not ready), 2 (bad input) or 130 (interrupted);
    agent.cli.parser has the codes of each. Raises SystemExit after `--help`, `--version` or a wrong argument.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = make_parser(*words[:1]).parse_args(words)
    command = find_command(options)[1]
    if not command.function:
        say([VERSION])
        return 0
    if arguments is None and command.configuration != LAST_GOOD:
        # Interrupt this process as Ctrl-C does. By default, both signals end it at once: then a kubectl that it started
        # would go on evicting pods, and the GPU of an unfinished `gpus detach` would stay detached.
        for number in (signal.SIGTERM, signal.SIGHUP):
            # A process that nohup(1) started ignores SIGHUP, which comes when the terminal is gone, and must go on so.
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
    code = 1
    try:
        code = _run(command, options)
    finally:
        if command.changes and arguments is None:
            machine = str(getattr(options, "machine", "") or "")
            import_module("agent.system.journal_fields").record_command(words, code, machine=machine)
    return code


def _run(command: Command, options: Namespace) -> int:
    """Run the command, and return its exit code, also for an error, which is printed."""
    try:
        # Load only what this command needs: to load all takes up to 0.18 s, for which help, scripts that poll `status`,
        # and every start of a machine would wait.
        module, _, function = command.function.partition(":")
        run_command = getattr(import_module(f"agent.cli.{module}"), function)
        tools = import_module("agent.system.tool_runner").tool_runner if command.downloads else None
        return int(run_command(options, import_module("agent.cli.host").reconciler_for(options, tools)))
    except ConfigError as error:
        report(str(error))
        return 2
    except AgentError as error:
        report(str(error))
        return command.failed
    except BrokenPipeError:
        ignore_broken_pipe()
        return 0
    except OSError as error:
        report(f"{error.filename or 'system call'}: {error.strerror or error}")
        return command.failed
    except KeyboardInterrupt:
        return 130


def run() -> int:
    """Run the command that this process was started with. Return its exit code, even if nothing can be printed."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            # The user closed it (`>&-`).
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    # Without this variable, pydantic reads the metadata of every installed package to find plugins, and imports the
    # plugins. That is slow, and root must not load code in that way.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    # Escape what cannot be encoded, as standard error does: names of files may not be UTF-8, and the terminal's
    # encoding may lack characters.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            code = main()
            # Otherwise Python would search all objects for garbage three times while it exits. The kernel frees them.
            gc.freeze()
            return code
        finally:
            # Write what is still in the buffer: argparse leaves the help there.
            sys.stdout.flush()
    except BrokenPipeError:
        ignore_broken_pipe()
        return 0
    except OSError as error:
        ignore_broken_pipe()
        report(f"{error.filename or STDOUT}: {error.strerror}")
        return 1


if __name__ == "__main__":
    sys.exit(run())
