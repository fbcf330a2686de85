"""The command line of `unbounded-agent`: one table of commands, from which parser, help, completion and pages come."""

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
from agent.model.paths import CONFIG_DIRECTORY, CONFIG_FILE

VERSION = f"unbounded-agent {__version__} (Python {sys.version.split()[0]})"
STARTED = {
    0: "the machine is ready and, if it is a node, has joined",
    1: "a step failed, the machine or node is not ready, or the node is cordoned",
}
BAD_INPUT = "the configuration or an argument is wrong"
"""The meaning of exit code 2 for commands that do not say another one."""
NO_CONFIGURATION = "an argument is wrong"
"""The meaning of exit code 2 for commands that read no configuration."""
WIDTH = 78
"""Columns of descriptions. This module wraps descriptions itself: argparse would wrap the list of exit codes too."""
FILES = (
    CONFIG_FILE,
    f"{CONFIG_DIRECTORY}/*.toml",
    f"{CONFIG_FILE}.sample  all settings (Debian package)",
    "/usr/share/doc/unbounded-agent/docs/  the docs/ that texts name (package)",
)
CODES = {
    0: "done, or nothing to do",
    1: "failed",
    3: "a machine is not ready (status --check, --wait), a GPU not tested",
    4: "status --check or --wait: whether a machine is ready is unknown",
    70: "an internal error after an upgrade (run)",
    75: "the service cannot start (run)",
    130: "interrupted",
}
"""Exit codes of the whole program."""

# How a command treats the configuration (agent.cli.host.load).
READS = "reads"
NEEDS_NONE = "needs none"
SAVES = "saves"
"""The command makes passes. It puts the configuration in force, by saving it as the last good one: otherwise, a process
that still has an older configuration would undo what the command does."""
REMOVES = "removes"
"""As SAVES; but the configuration file may have been removed together with its last machine."""
OPTIONAL = "optional"
"""The command works without a configuration. It makes no pass, which would remove the settings of all machines."""
DIAGNOSES = "diagnoses"
"""As OPTIONAL; and if the configuration is invalid, the command uses the last good one."""
LAST_GOOD = "last good"
"""A unit runs the command. If the configuration is invalid, the command uses the last good one: otherwise a machine
would not start, or would get no GPUs."""

LONGEST_TEST = 3600.0
"""TEST_LIMIT of agent.model.contract, which takes longer to load than all of the help."""

Argument = tuple[str, dict[str, object]]
"""One argument of a command: its name, and the other parameters of argparse's `add_argument`."""


def _argument(name: str, text: str, **options: object) -> Argument:
    return name, {"help": text, **options}


def _flag(name: str, text: str) -> Argument:
    return _argument(name, text, action="store_true")


def _optional(name: str, metavar: str, text: str) -> Argument:
    return _argument(name, text, metavar=metavar, nargs="?", default="")


def _kubeconfig(text: str) -> Argument:
    # Make the path absolute, because kubectl runs in another directory than this process.
    return _argument("--kubeconfig", text, type=lambda path: path and os.path.abspath(path), default="", metavar="FILE")


def _seconds(option: str, default: float, minimum: float, text: str) -> Argument:
    """Return an option with an optional number of seconds.

    If the user gives the option without a number, its value is `default`; without the option, the value is None.
    """

    def parse(number: str) -> float:
        try:
            seconds = float(number)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds) or seconds < minimum:
            raise argparse.ArgumentTypeError(
                f"{number!r} is not a number of seconds ({minimum:g} or more): write {option}=SECONDS, or put "
                f"{option} last"
            )
        return seconds

    return _argument(option, text, type=parse, nargs="?", const=default, metavar="SECONDS")


def _test_seconds(number: str) -> float:
    try:
        seconds = float(number)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_TEST:
        raise argparse.ArgumentTypeError(f"{number!r} is not a number of seconds (0 to {LONGEST_TEST:g})")
    return seconds


JSON = "print JSON (docs/json.md)"
JSON_FORM = _flag("--json", JSON)
MACHINE = _argument("machine", "the machine's name", metavar="MACHINE")
DRAIN = _kubeconfig("kubeconfig of a user who may cordon and drain nodes; only for machines that `up` made")
NO_DRAIN = _flag("--no-drain", "do not drain: pods end with the machine")
WHICH_GPU = "for example 0000:01:00.0, or the UUID"
DRY_RUN = _flag("--dry-run", "only print the steps")
YES = _flag("--yes", "do not ask before anything is removed; without a terminal, the command never asks")
ASK_NOT = _flag("--yes", "do not ask; without a terminal, the command never asks")
GPU = _argument("address", WHICH_GPU, metavar="PCI-ADDRESS")
GPU_OR_ALL = _optional("address", "PCI-ADDRESS", WHICH_GPU)


class Command:
    """One command and its help."""

    # Neither a data class nor a named tuple: the help needs none of the libraries that these load.

    def __init__(
        self,
        function: str,
        summary: str,
        text: str,
        *arguments: Argument | list[Argument],
        codes: Mapping[int, str] = {0: "done", 1: "failed"},
        failed: int = 1,
        examples: Sequence[str] = (),
        configuration: str = READS,
        hidden: bool = False,
        root: bool = True,
        downloads: bool = False,
        changes: bool = False,
    ) -> None:
        """Define the command.

        `function` is MODULE:NAME in agent.cli: a function of the parsed options and a reconciler that returns the exit
        code; `failed` is the code after an error. `summary` is the command's line in the list of commands, which has no
        `hidden` ones: only units run these. The help has the summary too, followed by `text`. `root` commands need root
        rights; the others work as any user. Of a list of arguments, only one may be given. The journal gets a record of
        a command that `changes` the host, or that saves the configuration. Only a command that `downloads` may run
        tools of the host that use a proxy, and write large files.
        """
        self.function, self.summary, self.codes, self.arguments = function, summary, codes, arguments
        self.failed = failed
        self.configuration, self.hidden, self.root, self.downloads = configuration, hidden, root, downloads
        self.changes, self.examples = changes or configuration in (SAVES, REMOVES), examples
        self.user = "root" if root else "any user"
        self.text = f"{summary[0].upper()}{summary[1:]}. {text}".rstrip()

    def examples_of(self, name: str) -> Sequence[str]:
        """Return the examples of the command's help. `name` is the command's whole name."""
        return self.examples or (f"{'sudo ' if self.root else ''}unbounded-agent {name}",)


COMMANDS = {
    "plan": Command(
        "node:plan",
        "print each step that apply would take, and those that up would take in addition",
        "Changes nothing.",
        [_flag("--diff", "show what changes in files, as a unified diff"), JSON_FORM],
        examples=("unbounded-agent --config new.toml plan", "unbounded-agent plan --diff"),
        codes={
            0: "the plan is printed",
            1: "`apply` could not write a machine's settings",
            2: f"{BAD_INPUT}, or a machine does not exist",
        },
        root=False,
    ),
    "apply": Command(
        "status:apply",
        "reconcile once, start stopped machines, wait until they report",
        "Never restarts a running machine, and starts none on which another command works.",
        codes={0: "every machine is ready", 1: "a step failed, or a machine is not ready"},
        configuration=SAVES,
    ),
    "status": Command(
        "status:status",
        "print whether each machine is ready, and why not",
        "What only root may read is unknown to other users, and not ready.",
        _optional("machine", "MACHINE", "only this machine, with full messages"),
        [
            _flag("--wide", "print a table of all conditions"),
            JSON_FORM,
            _seconds("--watch", 2.0, 0.5, "repeat every SECONDS (default: 2) until interrupted"),
        ],
        _flag("--check", "exit with 3 if a machine is not ready, or with 4 if that is unknown"),
        _seconds("--wait", 300.0, 0.0, "as --check, but wait until ready, for at most SECONDS (default: 300)"),
        examples=("unbounded-agent status gpu-node --wait=600", "unbounded-agent status --json"),
        codes={
            0: "the states are printed; with --check or --wait: every machine is ready",
            1: "the host cannot be observed",
            3: "with --check or --wait: a machine is not ready",
            4: "with --check or --wait: whether a machine is ready is unknown",
        },
        root=False,
    ),
    "doctor": Command(
        "doctor.bundle:doctor",
        "list each fault of host and machines, with evidence, symptoms and the commands that fix it",
        "A machine's faults are in the order in which it becomes ready: begin with the first. Works without a "
        "configuration too; while it is invalid, root gets a report on the last good one, and exit code 2.",
        JSON_FORM,
        _argument(
            "--bundle",
            "write an archive for a bug report, with recognised secrets removed (default: in the current directory)",
            nargs="?",
            const="",
            metavar="FILE",
        ),
        _kubeconfig("also check the cluster, as a user who may read nodes, pods, DaemonSets, events and logs"),
        examples=(
            "sudo unbounded-agent doctor --kubeconfig /root/.kube/config",
            "sudo unbounded-agent doctor --bundle",
        ),
        codes={
            0: "all machines are ready, host and cluster have no fault; or archive written",
            1: "a machine is not ready, there is a fault, or the cluster could not be read",
        },
        configuration=DIAGNOSES,
        root=False,
    ),
    "up": Command(
        "node:up",
        "make the configured Kubernetes nodes, and wait until they have joined",
        "Makes each machine with a table [machines.NAME.node] into a node: checks everything first, records the host "
        "as it was found, sets what the kubelet needs on the host, makes the root file system from the image, and "
        "starts the machine. Can be repeated after any failure. Does nothing on a finished node.",
        _optional("machine", "MACHINE", "only this machine"),
        _flag("--rebuild", "make the root file system of MACHINE again; everything in the old one is lost"),
        YES,
        DRY_RUN,
        _flag("--json", "print JSON, one object per line (docs/json.md)"),
        codes={
            0: "every node is ready and has joined",
            1: "a check or a step failed, or a node is not ready or has not joined",
        },
        configuration=SAVES,
        downloads=True,
    ),
    "preflight": Command(
        "node:preflight",
        "check whether up can make the nodes",
        "Checks host, drivers, image, programs, API server and bootstrap token. Changes nothing.",
        _argument(
            "--ignore",
            "only warn if checks of this name fail; can be repeated",
            action="append",
            default=[],
            metavar="NAME",
        ),
        JSON_FORM,
        codes={0: "`up` can make the nodes, once what was ignored passes", 1: "a check failed"},
        downloads=True,
    ),
    "reset": Command(
        "node:reset",
        "remove a node; after the last one, restore the host to what it was",
        "Removes a machine that `up` made, with everything that the agent wrote for it. After the last one, prints "
        "what still differs from before the first `up`.",
        MACHINE,
        YES,
        DRY_RUN,
        examples=("sudo unbounded-agent reset gpu-node",),
        codes={0: "the machine is removed", 1: "a step failed, or the host is not what it was before the first `up`"},
        configuration=REMOVES,
    ),
    "start": Command(
        "lifecycle:lifecycle",
        "start a machine, and wait until it is ready",
        "Also waits until its node has joined, if `up` made it. If the agent cordoned the node, for example by `stop`, "
        "uncordons it once the machine is ready. If it was cordoned with --kubeconfig, that is needed again; without, "
        "exits with 1.",
        MACHINE,
        _kubeconfig("kubeconfig of a user who may uncordon nodes"),
        examples=("sudo unbounded-agent start gpu-node",),
        codes=STARTED,
        configuration=SAVES,
    ),
    "stop": Command(
        "lifecycle:lifecycle",
        "drain a machine's node, and stop the machine",
        "Without --kubeconfig, the machine drains its own node (docs/runbooks.md#stop-start-reboot). The machine stays "
        "stopped until `start`, `apply` or the host's next boot.",
        MACHINE,
        DRAIN,
        NO_DRAIN,
        ASK_NOT,
        DRY_RUN,
        examples=("sudo unbounded-agent stop gpu-node",),
        codes={0: "the machine is stopped", 1: "the node could not be drained, or the machine could not be stopped"},
        changes=True,
    ),
    "restart": Command(
        "lifecycle:lifecycle",
        "drain, stop and start a machine",
        "As `stop` and `start` do.",
        MACHINE,
        DRAIN,
        NO_DRAIN,
        examples=("sudo unbounded-agent restart gpu-node --no-drain",),
        codes=STARTED,
        configuration=SAVES,
    ),
    "switch": Command(
        "lifecycle:switch",
        "switch a node to another image, and back if that fails",
        "First tries it next to the machine. Then drains the node, and restarts the machine as the same Node. If that "
        "is not ready, the former root file system serves again.",
        MACHINE,
        _argument("--image", "another image than the configured one", metavar="NAME", default=""),
        DRAIN,
        NO_DRAIN,
        _argument(
            "--give-up",
            "do without PATH of the former root; can be repeated",
            action="append",
            default=[],
            metavar="PATH",
        ),
        _flag("--forget", "only remove the former root file system"),
        ASK_NOT,
        DRY_RUN,
        examples=("sudo unbounded-agent switch gpu-node --kubeconfig /root/.kube/config",),
        codes={
            0: "the machine is ready with the new root file system",
            1: "a check or a step failed",
        },
        configuration=SAVES,
        downloads=True,
    ),
    "gpus": Command(
        "gpus:list_gpus",
        "list, detach, attach and reset GPUs, and show who uses them",
        "Without a subcommand, as `gpus list`. The other subcommands need root.",
        JSON_FORM,
        configuration=OPTIONAL,
        root=False,
    ),
    "gpus list": Command(
        "gpus:list_gpus",
        "list the GPUs, also lost ones, with the machines that have them and the pods that use them",
        "A `?` means that some processes could not be searched: only root can search all.",
        # For `gpus --json list`: a default of this option would overwrite the `--json` before `list`.
        _argument("--json", JSON, action="store_true", default=argparse.SUPPRESS),
        codes={0: "the GPUs are listed", 1: "some could not be observed"},
        configuration=OPTIONAL,
        root=False,
    ),
    "gpus detach": Command(
        "gpus:run_detach",
        "take a GPU from its machines; exit code 0 when you may remove it",
        "While processes use the GPU, machines.NAME.on_detach decides whether the command refuses, waits, or takes the "
        "GPU anyway.",
        GPU,
        examples=("sudo unbounded-agent gpus detach 0000:01:00.0",),
        codes={0: "you may remove the GPU", 1: "the GPU is still in use, or could not be taken from a machine"},
        configuration=SAVES,
    ),
    "gpus attach": Command(
        "gpus:run_detach",
        "give a detached GPU back, and forget its last fatal error",
        "Run it after a reset of a GPU too: machines that failed to open a GPU then try again at once.",
        GPU,
        examples=("sudo unbounded-agent gpus attach 0000:01:00.0",),
        codes={0: "the machines have the GPU, or it was not detached", 1: "a step failed"},
        configuration=SAVES,
    ),
    "gpus reset": Command(
        "gpus:run_reset",
        "reset GPUs with their vendor's tool, and give them back",
        "Prints the steps first. Takes the GPU from its machines as `gpus detach` does. Names the processes that have "
        "it open, or the linked GPUs that must be named too, and refuses. After an interruption, the same command "
        "goes on; `gpus attach` ends it.",
        _argument("addresses", f"{WHICH_GPU}; GPUs that must be reset together", metavar="PCI-ADDRESS", nargs="+"),
        DRY_RUN,
        _flag("--evict", "evict the pods that were given the GPU, as far as their disruption budgets allow; needs DRA"),
        _seconds(
            "--timeout",
            600.0,
            0.0,
            "wait up to SECONDS (default: 600) until nobody uses the GPU, whatever on_detach says",
        ),
        ASK_NOT,
        examples=("sudo unbounded-agent gpus reset 0000:01:00.0 --timeout=600",),
        codes={0: "the machines have the GPUs again, or the steps are printed", 1: "refused, or failed"},
        configuration=SAVES,
    ),
    "gpus test": Command(
        "gpus:run_test",
        "let the machines test GPUs by computing on them",
        "Without an address: all GPUs of running machines. A GPU that fails counts as failed until a test passes.",
        _argument("addresses", WHICH_GPU, metavar="PCI-ADDRESS", nargs="*"),
        _argument(
            "--seconds",
            "how long each GPU computes at least (default: 0, which is one round; at most 3600)",
            type=_test_seconds,
            default=0.0,
            metavar="SECONDS",
        ),
        _flag("--force", "test also GPUs that pods have, which may end their programs"),
        JSON_FORM,
        examples=("sudo unbounded-agent gpus test", "sudo unbounded-agent gpus test 0000:01:00.0 --seconds 600"),
        codes={0: "all have passed", 1: "one failed or hung", 3: "none failed, but one was not tested"},
        configuration=SAVES,
    ),
    "gpus forget": Command(
        "gpus:run_forget",
        "acknowledge that a lost GPU is gone for good",
        "GPUsComplete then no longer reports a GPU that left the PCI bus without `gpus detach`. Without an address: "
        "all lost GPUs, and also damage to the record of granted GPUs.",
        GPU_OR_ALL,
        ASK_NOT,
        DRY_RUN,
        examples=("sudo unbounded-agent gpus forget 0000:01:00.0",),
        changes=True,
    ),
    "gpus holders": Command(
        "gpus:run_lines",
        "list the processes that have a GPU open, with machine, pod and container",
        "Without an address: all GPUs.",
        GPU_OR_ALL,
        configuration=OPTIONAL,
    ),
    "driver": Command(
        "",
        "upgrade the driver's packages",
        "",
        examples=("sudo unbounded-agent driver upgrade --dry-run",),
    ),
    "driver upgrade": Command(
        "driver:upgrade",
        "upgrade the driver's packages of this host, and reload its modules",
        "Prints the steps first. Stops the machines with the GPUs meanwhile. If the new driver does not load, goes "
        "back to the old packages. After an interruption, the same command goes on. Run `apt update` first.",
        _argument("--to", "this version (default: the newest of the package sources)", default="", metavar="VERSION"),
        DRY_RUN,
        _flag("--next-boot", "only install: the new modules are loaded at the host's next boot"),
        ASK_NOT,
        _kubeconfig("kubeconfig of a user who may cordon and drain nodes; without, machines drain their own nodes"),
        examples=(
            "sudo unbounded-agent driver upgrade --dry-run",
            "sudo unbounded-agent driver upgrade --kubeconfig /root/.kube/config",
        ),
        codes={
            0: "the new driver runs; or nothing is to do; or the steps are printed",
            1: "refused, or failed",
        },
        configuration=SAVES,
        downloads=True,
    ),
    "kube": Command(
        "",
        "print Kubernetes manifests; choose who offers a node's GPUs",
        "`kube allocation` needs root.",
        examples=("unbounded-agent kube manifests",),
        root=False,
    ),
    "kube manifests": Command(
        "kube:manifests",
        "list, print or write the Kubernetes manifests and Helm values that come with the agent",
        "Needs no cluster and no configuration.",
        _argument("names", "a manifest's name (without a name: list them)", metavar="NAME", nargs="*"),
        _argument("--out", "write each NAME.yaml into this directory (without NAME: all)", metavar="DIR"),
        examples=("unbounded-agent kube manifests runtime-class | kubectl apply -f -",),
        codes={0: "the manifests are printed or written", 1: "a file cannot be written", 2: NO_CONFIGURATION},
        configuration=NEEDS_NONE,
        root=False,
    ),
    "kube allocation": Command(
        "kube:allocation",
        "move a running node to Dynamic Resource Allocation, or back to the device plugin",
        "With a kubeconfig, takes the steps that kubectl can take, and stops at the first one that you have to take: "
        "take it, then run the command again. Without, only prints the steps.",
        _argument(
            "to",
            "who offers the GPUs from then on: the node itself, or a device plugin",
            choices=("dra", "device-plugin"),
        ),
        _optional("machine", "MACHINE", "the machine (may be left out if the configuration has only one)"),
        _argument("--node", "the Node object's name (default: the one that `up` recorded)", default="", metavar="NODE"),
        _kubeconfig("an administrator's kubeconfig"),
        examples=("sudo unbounded-agent kube allocation dra --kubeconfig /root/.kube/config",),
        codes={0: "the node is moved, or the steps are printed", 1: "a step failed, or is yours to take"},
        configuration=SAVES,
    ),
    "run": Command(
        "service:serve",
        "run the service: reconcile continuously, serve metrics",
        "SIGTERM ends it, SIGHUP reloads the configuration. Usually run by unbounded-agent.service.",
        examples=("sudo systemctl start unbounded-agent",),
        codes={
            0: "stopped by a signal",
            70: "an internal error after an upgrade",
            75: "cannot start, for example because the service already runs",
        },
        # Not 1, which is Python's for an error that nobody handles: only that ends the trial of a release.
        failed=75,
        configuration=LAST_GOOD,
    ),
    "version": Command("", "print the version", "", codes={0: "done", 2: NO_CONFIGURATION}, root=False),
    "load-modules": Command(
        "prepare:load_modules",
        "load the kernel modules of the host's GPUs if driver.load_modules is set",
        "Run by unbounded-agent-modules.service.",
        examples=("sudo systemctl start unbounded-agent-modules",),
        configuration=LAST_GOOD,
        hidden=True,
    ),
    "run-checks": Command(
        "prepare:write_checks",
        "run the checks in /etc/unbounded-agent/checks.d",
        "Run by unbounded-agent-checks.service, not as root.",
        examples=("sudo systemctl start unbounded-agent-checks",),
        configuration=NEEDS_NONE,
        hidden=True,
        root=False,
    ),
    "recover-gpus": Command(
        "gpus:run_recovery",
        "reset and test the GPUs for which gpu_recovery and test_gpus ask it",
        "Run by unbounded-agent-gpus.service.",
        examples=("sudo systemctl start unbounded-agent-gpus",),
        configuration=LAST_GOOD,
        hidden=True,
    ),
    "finish-switches": Command(
        "lifecycle:finish_switches",
        "end interrupted switches, remove former root file systems",
        "Run by unbounded-agent-switch.service.",
        examples=("sudo systemctl start unbounded-agent-switch",),
        configuration=LAST_GOOD,
        hidden=True,
    ),
    "prepare": Command(
        "prepare:run_prepare",
        "write a machine's settings before it starts",
        "Run by unbounded-agent-prepare@MACHINE.service.",
        MACHINE,
        examples=("sudo unbounded-agent prepare gpu-node",),
        configuration=LAST_GOOD,
        hidden=True,
    ),
}


def find_command(options: argparse.Namespace) -> tuple[str, Command]:
    """Return the name of the command that the parsed options are for, with its subcommand, and the command."""
    # Without a subcommand, `gpus` lists the GPUs.
    subcommand = getattr(options, "subcommand", None) or ("list" if options.command == "gpus" else "")
    name = f"{options.command} {subcommand}".rstrip()
    return name, COMMANDS[name]


def subcommands(name: str) -> dict[str, Command]:
    """Return the subcommands of a command by their own names; for an empty name, the commands of the program."""
    split = ((full.rpartition(" "), command) for full, command in COMMANDS.items())
    return {own: command for (parent, _, own), command in split if parent == name}


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
    known = subcommands("")
    _add(parser, "command", {command: known[command]} if command in known else known)
    return parser


def _add(parser: argparse.ArgumentParser, key: str, commands: Mapping[str, Command], *, required: bool = True) -> None:
    # Without `prog`, argparse would format the usage to find out the program's name.
    group = parser.add_subparsers(prog=parser.prog, dest=key, required=required, metavar="COMMAND", title="commands")
    for name, command in commands.items():
        # argparse lists only the commands that have `help`.
        add = group.add_parser if command.hidden else partial(group.add_parser, help=command.summary)
        added = add(
            name,
            description=textwrap.fill(f"{command.text} Run as: {command.user}.", WIDTH, break_on_hyphens=False),
            epilog=_epilog(command.examples_of(f"{parser.prog.partition(' ')[2]} {name}".lstrip()), command.codes),
            formatter_class=_Formatter,
        )
        # Also after the command, where it replaces one before the command. The program's own help has it.
        added.add_argument("--config", default=argparse.SUPPRESS, metavar="FILE", help=argparse.SUPPRESS)
        for each in command.arguments:
            alternatives = each if isinstance(each, list) else [each]
            place = added if len(alternatives) == 1 else added.add_mutually_exclusive_group()
            for name_or_flag, options in alternatives:
                place.add_argument(name_or_flag, **options)  # type: ignore[arg-type]
        if below := subcommands(name):
            _add(added, "subcommand", below, required=name != "gpus")
        if name == "gpus":
            # Without this usage, argparse would show COMMAND as required. Set it only now that the subcommands are
            # added: otherwise, the usage of each subcommand would begin with this text.
            added.usage = "%(prog)s [-h] [--json] [COMMAND ...]"


def _epilog(examples: Sequence[str], codes: Mapping[int, str], files: Sequence[str] = ()) -> str:
    lines = [f"  {code:<3} {meaning}" for code, meaning in sorted({2: BAD_INPUT, **codes}.items())]
    heading = "example:" if len(examples) == 1 else "examples:"
    above = ["files:", *(f"  {each}" for each in files), ""] if files else []
    return "\n".join([*above, "exit codes:", *lines, "", heading, *(f"  {each}" for each in examples)])
