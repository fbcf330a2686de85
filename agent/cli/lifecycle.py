"""`unbounded-agent start`, `stop` and `restart`: start or stop a machine, and move its pods away before it stops."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from agent.cli.host import settings_of
from agent.cli.output import print_machines
from agent.cli.printing import confirm, report_failures, say
from agent.host.allocation import CORDONED, UNSCHEDULABLE, cordon, recorded_node
from agent.host.joining import Watch
from agent.host.provision.apply import STOP_LIMIT
from agent.host.reconcile import Reconciler
from agent.host.state.locks import machine_locks
from agent.host.state.records import mark_start
from agent.model.conditions import ConditionType, Status
from agent.model.errors import AgentError, CommandError
from agent.model.facts import Absent, Broken, Unseen
from agent.model.paths import CORDONED_FOR, cordoned_file, machine_unit

DRAIN_LIMIT = 600.0
"""Seconds that pods get to move to other nodes. kubectl waits for their disruption budgets."""
USE_KUBECTL = "drain it with kubectl, then use --no-drain"
ANSWER_LIMIT = 60.0
"""Seconds for one run of kubectl; a drain has DRAIN_LIMIT in addition."""


def lifecycle(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Start, stop or restart a machine. Return the exit code. Raises AgentError.

    A machine that starts is waited for, and its node is uncordoned if the agent cordoned it. If there is no kubeconfig,
    the machine is not ready or, with test_gpus, a GPU has not passed its test, the node stays cordoned, which counts as
    a failure. Before a machine stops, its node is drained if a kubeconfig is given.
    """
    name, command, kubeconfig = options.machine, options.command, options.kubeconfig
    settings_of(name, reconciler.config)
    if command == "stop":
        drains = not options.no_drain and bool(kubeconfig)
        if options.dry_run:
            steps = [f"drain node {recorded_node(name, reconciler.system, USE_KUBECTL)}"] if drains else []
            say(f"would {step}" for step in (*steps, f"stop machine {name}"))
            return 0
        confirm(f"machine {name} is stopped" + ("" if drains else ", and its pods end with it"), options)
    with machine_locks(reconciler.system, (name,), command):
        if command == "start":
            return start_machine(name, reconciler, kubeconfig)
        if command == "restart":
            _refuse_restart(name, reconciler)
        stop_machine(name, reconciler, kubeconfig, drain=not options.no_drain)
        if command == "stop":
            return 0
        # "May not", because the error or the interrupt may also come after the start.
        stopped, again = f"machine {name} was stopped, and may not have started again", _start_it(name)
        try:
            with _said_if_interrupted(reconciler, f"{stopped}: {again}"):
                return start_machine(name, reconciler, kubeconfig)
        except AgentError as error:
            hint = f"{error.hint}; then {again}" if error.hint else again
            raise AgentError(f"{stopped}: {error.message}", hint) from error


def start_machine(name: str, reconciler: Reconciler, kubeconfig: str) -> int:
    """Start a machine, whose lock this process holds, and wait for it. Return the exit code of `start`."""
    _, planned, _ = reconciler.preview()
    if why := planned.skipped.get(name):
        raise AgentError(
            f"machine {name} was not started: {why}, so the agent has no settings for it",
            f"`systemctl start {machine_unit(name)}` starts it with your own settings or systemd's defaults",
        )
    watch = Watch(reconciler, (name,))
    outcome, failures = watch.start()
    print_machines(watch.machines(outcome), reconciler)
    ready = not failures and watch.all_ready(outcome)
    machines = watch.machines(outcome)
    fenced = [gpu.pci_address for each in machines for gpu in reconciler.cordons_for(each, outcome.facts)]
    tested = all(each.condition(ConditionType.GPUS_TESTED).status is Status.TRUE for each in machines)
    not_yet = "" if ready else "is not ready" if tested else "has a GPU that has not passed its test (GPUsTested)"
    failures += _uncordon(name, reconciler, kubeconfig, not_yet, fenced)
    return report_failures(failures) or (0 if ready else 1)


def stop_machine(name: str, reconciler: Reconciler, kubeconfig: str, *, drain: bool) -> None:
    """Stop a machine, whose lock this process holds. With a kubeconfig, `drain` its node first. Raises AgentError."""
    if drain and kubeconfig:
        _drain(name, reconciler, kubeconfig)
    elif drain:
        reconciler.progress(f"the pods of machine {name} end with it: --kubeconfig FILE would move them away first")
    reconciler.progress(f"stop machine {name}")
    # The service starts a machine that has not run since the host booted. If this command stops the machine before its
    # first start, systemd records no stop: only the mark shows the service that the machine must stay stopped.
    mark_start(name, reconciler.system)
    with _said_if_interrupted(reconciler, f"machine {name} is stopping; {_start_it(name)}"):
        reconciler.system.run("systemctl", "stop", machine_unit(name), timeout=STOP_LIMIT)


def _refuse_restart(name: str, reconciler: Reconciler) -> None:
    """Raise AgentError if the agent would not start the machine after it has stopped it."""
    facts, planned, difference = reconciler.preview()
    machine, unit = next(each for each in facts.machines if each.name == name), machine_unit(name)
    refused, faulted = difference.refused.get(name, ""), difference.faults.get(name)
    refused = refused.why if isinstance(refused, Unseen) else refused
    why = planned.skipped.get(name) or planned.held.get(name) or refused or (faulted.why if faulted else "")
    hint = f"`systemctl restart {unit}` restarts it with the settings that it has"
    if machine.masked:
        why, hint = "its unit is masked", f"run `systemctl unmask {unit}` first"
    elif isinstance(machine.root, Absent | Broken):
        hint = ""
    if why:
        raise AgentError(f"machine {name} was not stopped, because the agent would not start it again: {why}", hint)


def _start_it(name: str) -> str:
    return f"start it with `unbounded-agent start {name}`"


@contextmanager
def _said_if_interrupted(reconciler: Reconciler, sentence: str) -> Iterator[None]:
    """If the `with` block is interrupted, for example by Ctrl-C, report the sentence.

    The sentence says in which state the interrupted block leaves the machine or node.
    """
    try:
        yield
    except KeyboardInterrupt:
        reconciler.progress(f"interrupted: {sentence}")
        raise


def _drain(name: str, reconciler: Reconciler, kubeconfig: str) -> None:
    """Cordon the node and move its pods to other nodes.

    If the node was not cordoned before, leave a note. The note makes the next `start` with a kubeconfig uncordon the
    node.
    """
    system = reconciler.system
    node = recorded_node(name, system, USE_KUBECTL)
    kubectl = partial(_kubectl, reconciler, kubeconfig)
    if (found := kubectl(*UNSCHEDULABLE, node).strip()) != CORDONED:
        reconciler.progress(f"cordon node {node}")
        cordon(name, node, kubectl, system, again=found.startswith(CORDONED))
    reconciler.progress(f"drain node {node}, up to {DRAIN_LIMIT:.0f} s")
    arguments = ("--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={DRAIN_LIMIT:.0f}s")
    undo = f"`unbounded-agent start {name} --kubeconfig FILE`"
    hint = f"the machine still runs; repeat this, or use --no-drain, or undo it: {undo}"
    try:
        with _said_if_interrupted(reconciler, f"some pods of node {node} may have been moved; {hint}"):
            kubectl("drain", node, *arguments, timeout=DRAIN_LIMIT + ANSWER_LIMIT)
    except CommandError as error:
        what = f"the node's pods could not be moved: {error.ended}"
        raise CommandError(error.argv, what, error.stderr, hint) from error


def _uncordon(
    name: str, reconciler: Reconciler, kubeconfig: str, not_yet: str, fenced: Sequence[str]
) -> tuple[str, ...]:
    """Uncordon the machine's node if the agent cordoned it, nothing is `not_yet` done, and there is a kubeconfig.

    With `fenced` GPUs, the machine does that, as with its own cordon: new pods must not get these GPUs meanwhile.

    If the agent cordoned the node and it stays cordoned, return a sentence that says why; otherwise, return nothing.
    """
    system, note = reconciler.system, cordoned_file(name)
    if not system.exists(note):
        return ()
    node, again = system.read_text(note).strip(), f"`unbounded-agent start {name} --kubeconfig FILE`"
    if not_yet:
        see = f"see `unbounded-agent doctor`, then run {again}"
        return (f"node {node} stays cordoned, because its machine {not_yet}: {see}",)
    if not kubeconfig:
        return (f"this agent cordoned node {node}, and has not uncordoned it: run {again} to uncordon it",)
    change = ("annotate", "--overwrite", "node", node, f"{CORDONED_FOR}=start") if fenced else ("uncordon", node)
    if not fenced:
        reconciler.progress(f"uncordon node {node}")
    try:
        _kubectl(reconciler, kubeconfig, *change)
    except CommandError as error:
        return (f"node {node} is still cordoned: {error}",)
    system.remove(note)
    if fenced:
        until = "is healthy, or the device plugin withdraws it; see GPUsHealthy in `unbounded-agent status --wide`"
        return (f"node {node} stays cordoned by its machine until {', '.join(fenced)} {until}",)
    return ()


def _kubectl(reconciler: Reconciler, kubeconfig: str, *arguments: str, timeout: float = ANSWER_LIMIT) -> str:
    return reconciler.system.run("kubectl", f"--kubeconfig={kubeconfig}", *arguments, timeout=timeout)
