"""The command line of `unbounded-agent`."""

import argparse
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial

from agent import __version__
from agent.cli.commands import COMMANDS, GPU_COMMANDS, KUBE_COMMANDS, Command
from agent.model.paths import CONFIG_DIRECTORY, CONFIG_FILE

VERSION = f"unbounded-agent {__version__} (Python {sys.version.split()[0]})"
BAD_INPUT = "the configuration or an argument is wrong"
ADDRESS = "PCI-ADDRESS"
WIDTH = 78
"""Columns of descriptions. This module wraps descriptions itself: argparse would wrap the list of exit codes too."""
ADDRESS_OPTIONAL = ("forget", "holders")
"""Subcommands of `gpus` whose address is optional."""
FILES = (
    CONFIG_FILE,
    f"{CONFIG_DIRECTORY}/*.toml",
    f"{CONFIG_FILE}.sample  all settings (Debian package)",
    "/usr/share/doc/unbounded-agent/docs/  the docs/ that texts name (package)",
)
CODES = {
    0: "done, or nothing to do",
    1: "failed",
    3: "status --check or --wait: a machine is not ready",
    4: "status --check or --wait: whether a machine is ready is unknown",
    130: "interrupted",
}
"""Exit codes of the whole program."""
WAIT_DEFAULT = 300.0
"""Default of `status --wait`, in seconds."""
WATCH_INTERVAL = 2.0
"""Default of `status --watch`, in seconds."""
SHORTEST_INTERVAL = 0.5
"""Shortest interval of `status --watch`, in seconds."""
JSON = "print JSON (docs/json.md)"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows an option with an optional value as `--wait[=SECONDS]`, not as `--wait [SECONDS]`.

    The `=` helps to avoid `--wait MACHINE`, in which argparse takes the machine for the value.
    """

    def __init__(self, prog: str) -> None:
        # Without a width, argparse would load shutil, and ask for the terminal's width at each argument that is added.
        super().__init__(prog, width=WIDTH)

    def format_help(self) -> str:
        return re.sub(r"(--[a-z-]+) \[([A-Z]+)\]", r"\1[=\2]", super().format_help())


class Parser(argparse.ArgumentParser):
    """Says what an unknown word may have been meant for, and shows the usage of the command that does not know it."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse. argparse would leave what a command does not know to the program's own parser."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            # The commands that have help: only units run the others.
            shown = [each.dest for each in action._choices_actions]
            self.error(f"there is no command {value!r}" + (_meant(value, shown) or f"; commands: {', '.join(shown)}"))
        super()._check_value(action, value)

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} is one argument too many"
        option = word.partition("=")[0]
        known = [name for name, each in self._option_string_actions.items() if each.help != argparse.SUPPRESS]
        further = "; the options of a command follow its name" if self._subparsers else f"; options: {', '.join(known)}"
        return f"there is no option {option!r}{_meant(option, known) or further}"


def _meant(word: object, known: Iterable[str]) -> str:
    close = get_close_matches(str(word), known, cutoff=0.7)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def make_parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser. The parsed options are `config`, `command`, and the command's own arguments.

    With the name of a command, the parser knows only that command: to add all takes as long as Python's own start.
    """
    parser = Parser(
        prog="unbounded-agent",
        description=textwrap.fill(
            "Makes this host's GPUs usable inside systemd-nspawn machines that run Kubernetes nodes.", WIDTH
        ),
        epilog=_epilog(["unbounded-agent plan"], CODES, FILES),
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=VERSION, help="print the version and exit")
    parser.add_argument(
        "--config", default=CONFIG_FILE, metavar="FILE", help=f"instead of {CONFIG_FILE} and config.d next to it"
    )
    known = {command: COMMANDS[command]} if command in COMMANDS else COMMANDS
    for name, added in _add(parser, "command", known).items():
        _add_arguments(name, added)
    return parser


def _add_arguments(name: str, command: argparse.ArgumentParser) -> None:
    match name:
        case "plan":
            form = command.add_mutually_exclusive_group()
            form.add_argument("--diff", action="store_true", help="show what changes in files, as a unified diff")
            form.add_argument("--json", action="store_true", help=JSON)
        case "status":
            _add_status(command)
        case "doctor":
            _add_doctor(command)
        case "up":
            _add_up(command)
        case "preflight":
            command.add_argument("--json", action="store_true", help=JSON)
        case "reset" | "start" | "stop" | "restart":
            _add_lifecycle(name, command)
        case "prepare":
            command.add_argument("machine", metavar="MACHINE", help="the machine's name in the configuration")
        case "gpus":
            _add_gpus(command)
        case "kube":
            _add_kube(_add(command, "kube_command", KUBE_COMMANDS))
        case _:
            # The other commands have no arguments of their own.
            pass


def _add_status(status: argparse.ArgumentParser) -> None:
    text = "only this machine, with full messages"
    status.add_argument("machine", metavar="MACHINE", nargs="?", default="", help=text)
    form = status.add_mutually_exclusive_group()
    form.add_argument("--wide", action="store_true", help="print a table of all conditions")
    form.add_argument("--json", action="store_true", help=JSON)
    text = f"repeat every SECONDS (default: {WATCH_INTERVAL:.0f}) until interrupted"
    _add_seconds(form, "--watch", WATCH_INTERVAL, SHORTEST_INTERVAL, text)
    text = "exit with 3 if a machine is not ready, or with 4 if that is unknown"
    status.add_argument("--check", action="store_true", help=text)
    text = f"wait until ready, for at most SECONDS (default: {WAIT_DEFAULT:.0f}); exit codes as for --check"
    _add_seconds(status, "--wait", WAIT_DEFAULT, 0, text)


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("--json", action="store_true", help=JSON)
    text = "write an archive for a bug report, with recognised secrets removed (default: in the current directory)"
    doctor.add_argument("--bundle", nargs="?", const="", default=None, metavar="FILE", help=text)
    text = "also check the cluster; the user must be allowed to read nodes, pods, DaemonSets, events and logs"
    _add_kubeconfig(doctor, text)


def _add_up(up: argparse.ArgumentParser) -> None:
    up.add_argument("machine", metavar="MACHINE", nargs="?", default="", help="only this machine")
    text = "make the root file system of MACHINE again; everything in the old one is lost"
    up.add_argument("--rebuild", action="store_true", help=text)
    up.add_argument("--json", action="store_true", help="print JSON, one object per line (docs/json.md)")


def _add_lifecycle(name: str, command: argparse.ArgumentParser) -> None:
    command.add_argument("machine", metavar="MACHINE", help="the machine's name")
    if name != "reset":
        drain = "kubeconfig of a user who may cordon and drain nodes; only for machines that `up` made"
        _add_kubeconfig(command, "kubeconfig of a user who may uncordon nodes" if name == "start" else drain)
    if name in ("stop", "restart"):
        command.add_argument("--no-drain", action="store_true", help="do not drain, even with --kubeconfig")


def _add_gpus(gpus: argparse.ArgumentParser) -> None:
    gpus.add_argument("--json", action="store_true", help=JSON)
    added = _add(gpus, "gpus_command", GPU_COMMANDS, required=False)
    # Without this usage, argparse would show COMMAND as required. Set it only now that the subcommands are added:
    # otherwise, the usage of each subcommand would begin with this text.
    gpus.usage = "%(prog)s [-h] [--json] [COMMAND ...]"
    for name, command in added.items():
        if name == "list":
            # For `gpus --json list`: a default of this option would overwrite the `--json` before `list`.
            command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=JSON)
        else:
            count = "?" if name in ADDRESS_OPTIONAL else None
            command.add_argument(
                "address", metavar=ADDRESS, nargs=count, default="", help="for example 0000:01:00.0, or the UUID"
            )


def _add_kube(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    manifests, allocation = commands["manifests"], commands["allocation"]
    manifests.add_argument("names", metavar="NAME", nargs="*", help="a manifest's name (without a name: list them)")
    manifests.add_argument("--out", metavar="DIR", help="write each NAME.yaml into this directory (without NAME: all)")
    text = "who offers the GPUs from then on: the node itself, or a device plugin"
    allocation.add_argument("to", choices=("dra", "device-plugin"), help=text)
    text = "the machine (may be left out if the configuration has only one)"
    allocation.add_argument("machine", metavar="MACHINE", nargs="?", default="", help=text)
    text = "the Node object's name (default: the one that `up` recorded)"
    allocation.add_argument("--node", default="", metavar="NODE", help=text)
    _add_kubeconfig(allocation, "an administrator's kubeconfig")


def _add_kubeconfig(parser: argparse.ArgumentParser, text: str) -> None:
    # Make the path absolute, because kubectl runs in another directory than this process.
    parser.add_argument(
        "--kubeconfig", type=lambda path: path and os.path.abspath(path), default="", metavar="FILE", help=text
    )


def _add_seconds(parser: argparse._ActionsContainer, option: str, default: float, minimum: float, text: str) -> None:
    """Add an option with an optional number of seconds.

    If the user gives the option without a number, its value is `default`; without the option, the value is None.
    """

    def parse(number: str) -> float:
        try:
            seconds = float(number)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds) or seconds < minimum:
            raise argparse.ArgumentTypeError(
                f"{number!r} is not a number of seconds ({minimum:g} or more): write {option}=SECONDS, or put the "
                f"machine before {option}"
            )
        return seconds

    parser.add_argument(option, type=parse, nargs="?", const=default, default=None, metavar="SECONDS", help=text)


def _add(
    parser: argparse.ArgumentParser, key: str, commands: Mapping[str, Command], *, required: bool = True
) -> dict[str, argparse.ArgumentParser]:
    # Without `prog`, argparse would format the usage to find out the program's name.
    group = parser.add_subparsers(prog=parser.prog, dest=key, required=required, metavar="COMMAND", title="commands")
    added = {}
    for name, command in commands.items():
        # argparse lists only the commands that have `help`.
        add = group.add_parser if command.hidden else partial(group.add_parser, help=command.summary)
        added[name] = add(
            name,
            description=textwrap.fill(command.text, WIDTH, break_on_hyphens=False),
            epilog=_epilog(command.examples, command.codes),
            formatter_class=_Formatter,
        )
        # Also after the command, where it replaces one before the command. The program's own help has it.
        added[name].add_argument("--config", default=argparse.SUPPRESS, metavar="FILE", help=argparse.SUPPRESS)
    return added


def _epilog(examples: Sequence[str], codes: Mapping[int, str], files: Sequence[str] = ()) -> str:
    lines = [f"  {code:<3} {meaning}" for code, meaning in sorted({2: BAD_INPUT, **codes}.items())]
    heading = "example:" if len(examples) == 1 else "examples:"
    above = ["files:", *(f"  {each}" for each in files), ""] if files else []
    return "\n".join([*above, "exit codes:", *lines, "", heading, *(f"  {each}" for each in examples)])
