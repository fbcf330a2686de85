"""The command line of `unbounded-agent`, and its help texts."""

import argparse
import sys
import textwrap
from collections.abc import Mapping
from functools import partial

from agent import __version__
from agent.model.paths import CONFIG_FILE

VERSION = f"unbounded-agent {__version__} (Python {sys.version.split()[0]})"
BAD_INPUT = "the configuration or an argument is wrong"
ADDRESS = "PCI-ADDRESS"
WIDTH = 78
"""Columns of descriptions. We wrap them ourselves, because argparse would wrap the list of exit codes as well."""


class Command:
    """One command and its help."""

    # Not a data class: `dataclasses` takes as long to load as argparse, and help needs nothing else.
    __slots__ = ("codes", "example", "hidden", "summary", "text")

    def __init__(
        self, summary: str, text: str, example: str, codes: Mapping[int, str], *, hidden: bool = False
    ) -> None:
        """Define the help.

        `summary` is the command's line in the list of commands. `hidden` commands are not listed: only units run them.
        `codes` are the exit codes except 2 (bad input), which is the same for all commands.
        """
        self.summary, self.text, self.example, self.codes, self.hidden = summary, text, example, codes, hidden


COMMANDS = {
    "plan": Command(
        "print what apply would do",
        "Prints each step that `apply` would take. Changes nothing and needs no root rights.",
        "unbounded-agent --config new.toml plan",
        {0: "the plan is printed, or there is nothing to do", 1: "a machine cannot get its settings"},
    ),
    "apply": Command(
        "reconcile once, start stopped machines, wait until they report",
        "Reconciles the host with its configuration once, starts stopped machines, waits until they report, and prints "
        "their conditions. Never restarts a running machine.",
        "sudo unbounded-agent apply",
        {0: "every machine is ready", 1: "a step failed, or a machine is not ready"},
    ),
    "status": Command(
        "print the conditions of each machine",
        "Prints the conditions of each machine. Needs no root rights, but cannot observe as much without them.",
        "unbounded-agent status --json",
        {0: "the conditions are printed, even if a machine is not ready", 1: "the host cannot be observed"},
    ),
    "doctor": Command(
        "diagnose: list each fault with its symptoms and the fix",
        "Lists each fault of the host and its machines with its symptoms and the fix. Faults of a machine come in the "
        "order in which it becomes ready: begin with the first.",
        "unbounded-agent doctor",
        {0: "the host has no fault and every machine is ready", 1: "there is a fault, or a machine is not ready"},
    ),
    "up": Command(
        "make the Kubernetes nodes of the configuration, and wait until they have joined",
        "Makes each machine with a table [machines.NAME.node] into a Kubernetes node: checks everything first, records "
        "the host as it was found, sets what the kubelet needs, makes the root file system from the image, starts the "
        "machine and waits until it is ready and its kubelet has joined. Can be repeated after any failure. Does "
        "nothing on a finished node.",
        "sudo unbounded-agent up",
        {0: "every node is ready and has joined", 1: "a check or a step failed, or a node is not ready"},
    ),
    "preflight": Command(
        "check what would keep `up` from making the nodes",
        "Checks host, drivers, image, programs, API server and bootstrap token for the nodes that `up` would make. "
        "Changes nothing.",
        "sudo unbounded-agent preflight",
        {0: "`up` can make the nodes", 1: "a check failed"},
    ),
    "reset": Command(
        "remove a node, and restore the host as it was found",
        "Stops a machine that `up` made and removes it with everything that the agent wrote for it. After the last "
        "one, restores the host's settings and network as they were before the first `up`, and compares them.",
        "sudo unbounded-agent reset gpu-node",
        {0: "the machine is removed", 1: "a step failed, or the host differs from the host as it was found"},
    ),
    "start": Command(
        "start a machine, and wait until it is ready",
        "Starts a machine and waits until it is ready and, if `up` made it, has joined. Lets pods run there again if "
        "`stop` had cordoned its node.",
        "sudo unbounded-agent start gpu-node --kubeconfig /root/.kube/config",
        {0: "the machine is ready", 1: "a step failed, or the machine is not ready"},
    ),
    "stop": Command(
        "drain a machine's node, and stop the machine",
        "Moves the pods of a machine's node to other nodes, if a kubeconfig is given, and stops the machine. It stays "
        "stopped until `start`, `apply` or the host's next boot.",
        "sudo unbounded-agent stop gpu-node --kubeconfig /root/.kube/config",
        {0: "the machine is stopped", 1: "the pods could not be moved, or the machine could not be stopped"},
    ),
    "restart": Command(
        "drain, stop and start a machine",
        "Does what `stop` and then `start` do.",
        "sudo unbounded-agent restart gpu-node --no-drain",
        {0: "the machine is ready", 1: "a step failed, or the machine is not ready"},
    ),
    "gpus": Command(
        "detach, attach and inspect GPUs",
        "Takes a GPU out of use before you remove it, gives it back, and shows who uses it.",
        "sudo unbounded-agent gpus holders",
        {0: "done", 1: "failed"},
    ),
    "kube": Command(
        "print Kubernetes manifests; choose who offers a node's GPUs",
        "Prints what a cluster with such nodes needs: the RuntimeClass, the device plugin, DeviceClasses, Helm values, "
        "test pods. Moves a node from the device plugin to Dynamic Resource Allocation.",
        "unbounded-agent kube manifests",
        {0: "done", 1: "failed"},
    ),
    "run": Command(
        "run the service: reconcile continuously, serve metrics",
        "Runs the service in the foreground until SIGTERM: reconciles continuously, serves metrics and health pages. "
        "SIGHUP reloads the configuration. Usually run by unbounded-agent.service.",
        "sudo systemctl start unbounded-agent",
        {0: "stopped by a signal", 1: "cannot start, for example because the service already runs"},
    ),
    "version": Command(
        "print the version", "Prints the version, like --version.", "unbounded-agent version", {0: "always"}
    ),
    "load-modules": Command(
        "",
        "Loads the kernel modules of the host's GPUs if driver.load_modules is set. "
        "Run by unbounded-agent-modules.service.",
        "sudo systemctl start unbounded-agent-modules",
        {0: "the modules are loaded, or driver.load_modules is not set", 1: "a module cannot be loaded"},
        hidden=True,
    ),
    "prepare": Command(
        "",
        "Writes a machine's settings before it starts. Run by unbounded-agent-prepare@MACHINE.service.",
        "sudo unbounded-agent prepare gpu-node",
        {0: "the machine has its settings", 1: "a step failed"},
        hidden=True,
    ),
}
GPU_COMMANDS = {
    "detach": Command(
        "take a GPU from its machines; exit code 0 when you may remove it",
        "Takes a GPU from the machines that have it. machines.NAME.on_detach decides whether the command waits for "
        "processes that use the GPU.",
        "sudo unbounded-agent gpus detach 0000:01:00.0",
        {0: "you may remove the GPU", 1: "the GPU is still in use, or could not be taken from a machine"},
    ),
    "attach": Command(
        "give a detached GPU back",
        "Gives a detached GPU back to its machines.",
        "sudo unbounded-agent gpus attach 0000:01:00.0",
        {0: "the machines have the GPU, or it was not detached", 1: "a step failed"},
    ),
    "forget": Command(
        "acknowledge that a lost GPU is gone for good",
        "Acknowledges that a GPU that left the PCI bus without `gpus detach` is gone for good, so that GPUsComplete no "
        "longer reports it. Without an address: all lost GPUs.",
        "sudo unbounded-agent gpus forget 0000:01:00.0",
        {0: "the GPU is forgotten, or none is lost", 1: "the record of granted GPUs cannot be read or written"},
    ),
    "holders": Command(
        "list the processes that have a GPU open",
        "Lists the processes that have a GPU open, with machine, pod and container. Without an address: all GPUs.",
        "sudo unbounded-agent gpus holders 0000:01:00.0",
        {0: "the processes are listed, if there are any", 1: "the GPUs cannot be observed"},
    ),
}
KUBE_COMMANDS = {
    "manifests": Command(
        "list the manifests; with a name: print it; with --out: write them",
        "Lists the Kubernetes manifests and Helm values that come with the agent. Prints those that you name, or "
        "writes them into a directory. Needs no root rights, no cluster and no configuration.",
        "unbounded-agent kube manifests runtime-class | kubectl apply -f -",
        {0: "the manifests are printed or written", 1: "a file cannot be written"},
    ),
    "allocation": Command(
        "move a running node to Dynamic Resource Allocation, or back to the device plugin",
        "Moves a running node from the device plugin to Dynamic Resource Allocation, or back. With a kubeconfig, it "
        "takes the steps that it can, and stops at the first one that you have to take: repeat it then. Without one, "
        "it prints the steps.",
        "sudo unbounded-agent kube allocation dra --kubeconfig /root/.kube/config",
        {0: "the node is moved, or the steps are printed", 1: "a step failed, or is yours to take"},
    ),
}
ADDRESS_OPTIONAL = ("forget", "holders")
"""Subcommands whose address is optional."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser. Its result has `config`, `command`, and the command's own arguments, by name."""
    parser = argparse.ArgumentParser(
        prog="unbounded-agent",
        description=textwrap.fill(
            "Makes this host's GPUs usable inside systemd-nspawn machines that run Kubernetes nodes.", WIDTH
        ),
        epilog=_epilog("unbounded-agent plan", {0: "done, or nothing to do", 1: "failed", 130: "interrupted"}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION, help="print the version and exit")
    parser.add_argument(
        "--config", default=CONFIG_FILE, metavar="FILE", help=f"default: {CONFIG_FILE} and config.d next to it"
    )
    commands = _add(parser, "command", COMMANDS)
    commands["status"].add_argument("--json", action="store_true", help="print JSON: Kubernetes conditions by machine")
    commands["doctor"].add_argument("--json", action="store_true", help="print one JSON object")
    commands["up"].add_argument("machine", metavar="MACHINE", nargs="?", default="", help="only this one")
    commands["up"].add_argument("--rebuild", action="store_true", help="make the root file system again")
    commands["up"].add_argument("--json", action="store_true", help="print one JSON object per line")
    commands["preflight"].add_argument("--json", action="store_true", help="print one JSON object")
    for name in ("reset", "start", "stop", "restart"):
        commands[name].add_argument("machine", metavar="MACHINE", help="its name")
    for name in ("start", "stop", "restart"):
        commands[name].add_argument("--kubeconfig", default="", metavar="FILE", help="of a user who may drain nodes")
    for name in ("stop", "restart"):
        commands[name].add_argument("--no-drain", action="store_true", help="do not move the pods first")
    commands["prepare"].add_argument("machine", metavar="MACHINE", help="its name in the configuration")
    for name, command in _add(commands["gpus"], "gpus_command", GPU_COMMANDS).items():
        count = "?" if name in ADDRESS_OPTIONAL else None
        command.add_argument("address", metavar=ADDRESS, nargs=count, default="", help="for example 0000:01:00.0")
    kube = _add(commands["kube"], "kube_command", KUBE_COMMANDS)
    kube["manifests"].add_argument("names", metavar="NAME", nargs="*", help="a manifest, as in the list")
    kube["manifests"].add_argument(
        "--out", metavar="DIR", help="write NAME.yaml into this directory; without NAME: all"
    )
    kube["allocation"].add_argument("to", choices=("dra", "device-plugin"), help="who is to offer the GPUs")
    kube["allocation"].add_argument("machine", metavar="MACHINE", nargs="?", default="", help="if there are several")
    kube["allocation"].add_argument("--node", default="", metavar="NODE", help="the Node object's name")
    kube["allocation"].add_argument("--kubeconfig", default="", metavar="FILE", help="of an administrator")
    return parser


def _add(
    parser: argparse.ArgumentParser, key: str, commands: Mapping[str, Command]
) -> dict[str, argparse.ArgumentParser]:
    group = parser.add_subparsers(dest=key, required=True, metavar="COMMAND", title="commands")
    added = {}
    for name, command in commands.items():
        # argparse lists only the commands that have `help`.
        add = group.add_parser if command.hidden else partial(group.add_parser, help=command.summary)
        added[name] = add(
            name,
            description=textwrap.fill(command.text, WIDTH, break_on_hyphens=False),
            epilog=_epilog(command.example, command.codes),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    return added


def _epilog(example: str, codes: Mapping[int, str]) -> str:
    lines = [f"  {code:<3} {meaning}" for code, meaning in sorted({2: BAD_INPUT, **codes}.items())]
    return "\n".join(["exit codes:", *lines, "", "example:", f"  {example}"])
