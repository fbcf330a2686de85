"""The commands of `unbounded-agent`: what each does, who may run it, its exit codes, and examples."""

import argparse
from collections.abc import Mapping, Sequence

STARTED_NOT_READY = "a step failed, the machine or node is not ready, or the node is cordoned"
NO_CONFIGURATION = "an argument is wrong"
"""The meaning of exit code 2 for commands that read no configuration."""

UNIT_COMMANDS = ("run", "prepare", "load-modules")
"""Commands that systemd units run."""


class Command:
    """One command and its help."""

    # Not a data class: `dataclasses` takes as long to load as argparse, and no other part of the help needs it.
    __slots__ = ("codes", "examples", "hidden", "root", "summary", "text")

    def __init__(
        self,
        summary: str,
        text: str,
        examples: str | Sequence[str],
        codes: Mapping[int, str],
        *,
        hidden: bool = False,
        root: bool = True,
    ) -> None:
        """Define the help.

        `summary` is the command's line in the list of commands. `hidden` commands are not listed: only units run them.
        `codes` has the meanings of the exit codes. If it has no entry for code 2, this code means
        agent.cli.parser.BAD_INPUT. `root` commands need root rights; the others work as any user.
        """
        self.summary, self.codes, self.hidden, self.root = summary, codes, hidden, root
        self.text = f"{text} Run as: {self.user}."
        self.examples = (examples,) if isinstance(examples, str) else tuple(examples)

    @property
    def user(self) -> str:
        """Who may run the command."""
        return "root" if self.root else "any user"


COMMANDS = {
    "plan": Command(
        "print what apply would do",
        "Prints each step that `apply` would take. Changes nothing.",
        ("unbounded-agent --config new.toml plan", "unbounded-agent plan --diff"),
        {
            0: "the plan is printed, or there is nothing to do",
            1: "`apply` could not write a machine's settings",
            2: "the configuration or an argument is wrong, or a machine does not exist",
        },
        root=False,
    ),
    "apply": Command(
        "reconcile once, start stopped machines, wait until they report",
        "Reconciles the host with its configuration once, starts stopped machines, waits until they report, and prints "
        "their conditions. Never restarts a running machine, and starts none on which another command works.",
        "sudo unbounded-agent apply",
        {0: "every machine is ready", 1: "a step failed, or a machine is not ready"},
    ),
    "status": Command(
        "print whether each machine is ready, and why not",
        "Prints whether each machine is ready, and each cause of a condition that is not True, once. Machines that are "
        "not ready come first. What only root may read is unknown to other users, and not ready.",
        (
            "unbounded-agent status",
            "unbounded-agent status gpu-node --wait=600",
            "unbounded-agent status --json",
        ),
        {
            0: "the states are printed; with --check or --wait: every machine is ready",
            1: "the host cannot be observed",
            3: "with --check or --wait: a machine is not ready",
            4: "with --check or --wait: whether a machine is ready is unknown",
        },
        root=False,
    ),
    "doctor": Command(
        "diagnose: list each fault with its evidence and the commands that fix it",
        "Lists each fault of the host and its machines with evidence, symptoms and the commands that fix it. A "
        "machine's faults are in the order of the steps by which it becomes ready: begin with the first. With a "
        "kubeconfig, also looks in the cluster for what keeps pods from GPUs. Works without a configuration too; while "
        "the configuration is invalid, root gets a report on the last good one, and exit code 2.",
        (
            "unbounded-agent doctor",
            "sudo unbounded-agent doctor --kubeconfig /root/.kube/config",
            "sudo unbounded-agent doctor --bundle",
        ),
        {
            0: "all machines are ready, host and cluster have no fault; or archive written",
            1: "a machine is not ready, there is a fault, or the cluster could not be read",
        },
        root=False,
    ),
    "up": Command(
        "make the configured Kubernetes nodes, and wait until they have joined",
        "Makes each machine with a table [machines.NAME.node] into a Kubernetes node: checks everything first, records "
        "the host as it was found, sets what the kubelet needs on the host, makes the root file system from the image, "
        "starts the machine and waits until it is ready and its kubelet has joined. Can be repeated after any failure. "
        "Does nothing on a finished node.",
        "sudo unbounded-agent up",
        {
            0: "every node is ready and has joined",
            1: "a check or a step failed, or a node is not ready or has not joined",
        },
    ),
    "preflight": Command(
        "check whether `up` can make the nodes",
        "Checks host, drivers, image, programs, API server and bootstrap token for the nodes that `up` would make. "
        "Changes nothing.",
        "sudo unbounded-agent preflight",
        {0: "`up` can make the nodes", 1: "a check failed"},
    ),
    "reset": Command(
        "remove a node; after the last one, restore the host to what it was",
        "Stops a machine that `up` made and removes it with everything that the agent wrote for it. After the last "
        "such machine, restores the host's settings and network to what they were before the first `up`, and prints "
        "what still differs.",
        "sudo unbounded-agent reset gpu-node",
        {0: "the machine is removed", 1: "a step failed, or the host is not what it was before the first `up`"},
    ),
    "start": Command(
        "start a machine, and wait until it is ready",
        "Starts a machine and waits until it is ready and, if `up` made it, until its node has joined. If the "
        "agent cordoned the node, for example by `stop`, also uncordons it once the machine is ready, which needs "
        "--kubeconfig. Without --kubeconfig, exits with 1 in this case, even if somebody else has uncordoned the node. "
        "The node of a machine that is not ready stays cordoned.",
        "sudo unbounded-agent start gpu-node --kubeconfig /root/.kube/config",
        {0: "the machine is ready and, if it is a node, has joined", 1: STARTED_NOT_READY},
    ),
    "stop": Command(
        "drain a machine's node, and stop the machine",
        "Stops a machine. With --kubeconfig, drains its node first; without, the node's pods end with the machine. The "
        "machine stays stopped until `start`, `apply` or the host's next boot.",
        "sudo unbounded-agent stop gpu-node --kubeconfig /root/.kube/config",
        {0: "the machine is stopped", 1: "the node could not be drained, or the machine could not be stopped"},
    ),
    "restart": Command(
        "drain, stop and start a machine",
        "Stops a machine as `stop` does, then starts it as `start` does.",
        "sudo unbounded-agent restart gpu-node --no-drain",
        {0: "the machine is ready and, if it is a node, has joined", 1: STARTED_NOT_READY},
    ),
    "gpus": Command(
        "list, detach and attach GPUs, and show who uses them",
        "Without a subcommand, lists the GPUs as `gpus list` does. The other subcommands need root.",
        ("unbounded-agent gpus", "sudo unbounded-agent gpus holders"),
        {0: "done", 1: "failed"},
        root=False,
    ),
    "kube": Command(
        "print Kubernetes manifests; choose who offers a node's GPUs",
        "Prints what a cluster with GPU nodes needs: the RuntimeClass, the device plugin, DeviceClasses, Helm values, "
        "test pods. `kube allocation`, which needs root, moves a node from the device plugin to Dynamic Resource "
        "Allocation, or back.",
        "unbounded-agent kube manifests",
        {0: "done", 1: "failed"},
        root=False,
    ),
    "run": Command(
        "run the service: reconcile continuously, serve metrics",
        "Runs the service in the foreground until SIGTERM: reconciles continuously, serves metrics and health pages. "
        "SIGHUP reloads the configuration. Usually run by unbounded-agent.service.",
        "sudo systemctl start unbounded-agent",
        {0: "stopped by a signal", 1: "cannot start, for example because the service already runs"},
    ),
    "version": Command(
        "print the version",
        "Prints the version, like --version.",
        "unbounded-agent version",
        {0: "the version is printed", 2: NO_CONFIGURATION},
        root=False,
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
    "list": Command(
        "list the GPUs, with the machines that have them and the pods that use them",
        "Lists the GPUs of the host, and those that were lost. For each: address, state, machine, kernel driver, how "
        "many pods have it open, model and UUID. A `?` means that some processes could not be searched: only root can "
        "search all.",
        ("sudo unbounded-agent gpus list", "unbounded-agent gpus --json"),
        {0: "the GPUs are listed", 1: "some could not be observed"},
        root=False,
    ),
    "detach": Command(
        "take a GPU from its machines; exit code 0 when you may remove it",
        "Takes a GPU from the machines that have it. While processes use the GPU, machines.NAME.on_detach decides "
        "whether the command refuses, waits, or takes the GPU anyway.",
        "sudo unbounded-agent gpus detach 0000:01:00.0",
        {0: "you may remove the GPU", 1: "the GPU is still in use, or could not be taken from a machine"},
    ),
    "attach": Command(
        "give a detached GPU back",
        "Gives a detached GPU back to its machines, and forgets its last fatal error. Run it after a reset of a GPU "
        "too: machines that failed to open a GPU then try again at once.",
        "sudo unbounded-agent gpus attach 0000:01:00.0",
        {0: "the machines have the GPU, or it was not detached", 1: "a step failed"},
    ),
    "forget": Command(
        "acknowledge that a lost GPU is gone for good",
        "Acknowledges that a GPU that left the PCI bus without `gpus detach` is gone for good, so that GPUsComplete no "
        "longer reports it. Without an address: all lost GPUs, and also damage to the record of granted GPUs.",
        "sudo unbounded-agent gpus forget 0000:01:00.0",
        {
            0: "the GPU is forgotten; or, without an address, none is lost",
            1: "the record of granted GPUs cannot be read or written",
        },
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
        "list, print or write the Kubernetes manifests that come with the agent",
        "Lists the Kubernetes manifests and Helm values that come with the agent. Prints those that you name, or "
        "writes them into a directory. Needs no cluster and no configuration.",
        "unbounded-agent kube manifests runtime-class | kubectl apply -f -",
        {0: "the manifests are printed or written", 1: "a file cannot be written", 2: NO_CONFIGURATION},
        root=False,
    ),
    "allocation": Command(
        "move a running node to Dynamic Resource Allocation, or back to the device plugin",
        "Moves a running node from the device plugin to Dynamic Resource Allocation, or back. With a kubeconfig, takes "
        "the steps that kubectl can take, and stops at the first one that you have to take: take it, then run the "
        "command again. Without a kubeconfig, only prints the steps.",
        "sudo unbounded-agent kube allocation dra --kubeconfig /root/.kube/config",
        {0: "the node is moved, or the steps are printed", 1: "a step failed, or is yours to take"},
    ),
}


def full_name(options: argparse.Namespace) -> str:
    """Return the command's name, including the subcommand of `gpus` and `kube`."""
    match options.command:
        case "gpus":
            return f"gpus {options.gpus_command or 'list'}"
        case "kube":
            return f"kube {options.kube_command}"
        case command:
            return str(command)
