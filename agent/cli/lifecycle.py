"""`unbounded-agent start`, `stop`, `restart` and `switch`: of a machine, whose pods are moved away before it stops."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from msgspec.structs import replace

from agent.cli.host import settings_of
from agent.cli.node import chosen, in_words
from agent.cli.output import print_machines
from agent.cli.printing import confirm, report_failures, say
from agent.host.allocation import CORDONED, UNSCHEDULABLE, cordon, recorded_node
from agent.host.joining import Watch
from agent.host.leave import (
    CannotLeaveError,
    NoAnswerError,
    doubt_cordon,
    drain,
    is_cordoned,
    lines,
    uncordon,
    unsaved,
    was_drained,
    what_is_lost,
)
from agent.host.observe.machine import observe_joined
from agent.host.provision.apply import STOP_LIMIT
from agent.host.provision.plan import NodeStep
from agent.host.provision.preflight import Asking
from agent.host.provision.up import Provisioner
from agent.host.reconcile import Reconciler
from agent.host.state.locks import machine_locks
from agent.host.state.records import mark_start
from agent.host.switching import Switching, work
from agent.model.conditions import ConditionType, Status
from agent.model.contract import Lost
from agent.model.errors import AgentError, CommandError
from agent.model.facts import Absent, Broken, Unseen
from agent.model.paths import CORDONED_FOR, cordoned_file, machine_unit, other_root
from agent.system.http import ask
from agent.system.network import HostNetwork, NetworkSource

DRAIN_LIMIT = 600.0
"""Seconds that pods get to move to other nodes. kubectl waits for their disruption budgets."""
USE_KUBECTL = "drain it with kubectl, then use --no-drain"
ANSWER_LIMIT = 60.0
"""Seconds for one run of kubectl; a drain has DRAIN_LIMIT in addition."""


def lifecycle(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Start, stop or restart a machine. Return the exit code. Raises AgentError.

    A machine that starts is waited for, and its node is uncordoned if the agent cordoned it. If the machine is not
    ready or, with test_gpus, a GPU has not passed its test, the node stays cordoned, which counts as a failure. Before
    a machine stops, its node is drained: with kubectl if a kubeconfig is given, otherwise by the machine itself.
    """
    name, command, kubeconfig = options.machine, options.command, options.kubeconfig
    settings_of(name, reconciler.config)
    if command == "stop":
        drains = not options.no_drain
        if options.dry_run:
            node = f"node {recorded_node(name, reconciler.system, USE_KUBECTL)}" if kubeconfig else "its node"
            steps = [f"drain {node}"] if drains else []
            say(f"would {step}" for step in (*steps, f"stop machine {name}"))
            return 0
        confirm(f"machine {name} is stopped" + ("" if drains else ", and its pods end with it"), options)
    with machine_locks(reconciler.system, (name,), command):
        if command == "start":
            return start_machine(name, reconciler, kubeconfig)
        if command == "restart":
            _refuse_restart(name, reconciler)
        stop_machine(name, reconciler, kubeconfig, drains=not options.no_drain)
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


def switch(
    options: argparse.Namespace, reconciler: Reconciler, network: NetworkSource | None = None, ask: Asking = ask
) -> int:
    """Switch a node to another root file system, made as `up` makes it. Return the exit code. Raises AgentError.

    The next root file system first boots as a candidate, next to the machine. If it does not become ready, the machine
    serves on. If the machine does not become ready with it, the former one serves again.
    """
    (name,), system = chosen(reconciler, options.machine), reconciler.system
    settings, source = reconciler.config.machines[name], network or HostNetwork()
    assert settings.node, "the machine is a node"
    image = replace(settings.node.image, name=options.image or settings.node.image.name)
    settings = replace(settings, node=replace(settings.node, image=image))
    # Without what earlier switches left: those machines are no part of the configuration.
    machines = {each: own for each, own in reconciler.config.machines.items() if each not in reconciler.candidates}
    config = replace(reconciler.config, machines={**machines, name: settings})
    switching = Switching(reconciler, name, source)
    with switching.locks():
        if not options.dry_run:
            switching.go_on()
        if options.forget:
            return _forget(switching, options)
        provisioner = Provisioner(config, system, source, reconciler.progress, ask)
        found = provisioner.candidate(name, reconciler.preview()[0])
        say(in_words(each) for each in found.checks if not each.passed)
        if found.failed:
            return 1
        if not found.steps:
            say([f"machine {name} was made from this image and these settings: nothing to do"])
            return 0
        return _switch(found.steps, switching, options)


def _forget(switching: Switching, options: argparse.Namespace) -> int:
    path = other_root(switching.name)
    if options.dry_run:
        say([f"would remove {path}"])
        return 0
    confirm(f"{path} is removed", options)
    switching.forget()
    return 0


def _switch(steps: tuple[NodeStep, ...], switching: Switching, options: argparse.Namespace) -> int:
    """Make the candidate, move the pods away, and hand the node over. Return the exit code. Raises AgentError."""
    name, reconciler = switching.name, switching.reconciler
    found = _what_is_lost(name, reconciler, options.give_up)
    lost = unsaved(found, options.give_up)
    missing = "; ".join(lines(lost))
    if options.dry_run:
        say(f"would {each}" for each in switching.sentences(steps))
        say([f"would refuse, because the next root file system would lack {missing}"] if lost else [])
        return 0
    if lost:
        what = f"the next root file system of machine {name} would lack {missing}"
        raise AgentError(what, "copy what is needed, then name each with --give-up PATH")
    switching.refuse_loss(steps)
    offered = switching.offers_gpus()
    confirm(f"machine {name} restarts with another root file system", options)
    with _given_up(switching, "its candidate"):
        limit = switching.make(steps)
        switching.pass_images()
        switching.hold_back()
        # What is left of the candidate is removed now, not while the machine is down.
        reconciler.reconcile()
    with _given_up(switching, "its pods"):
        if options.kubeconfig:
            _drain(name, reconciler, options.kubeconfig)
        elif not options.no_drain:
            _drain_itself(name, reconciler)
    keep, failures = _has_more(name, reconciler, found, options.give_up), tuple[str, ...]()
    try:
        switching.hand_over(keep=keep, limit=limit)
        if offered:
            switching.wait_for_offer()
    except AgentError as error:
        failures = (str(error),)
    outcome = reconciler.reconcile()
    print_machines([each for each in outcome.machines if each.name == name], reconciler)
    not_yet = "" if switching.is_ready(outcome) else "is not ready"
    fenced = [
        gpu.pci_address
        for each in outcome.machines
        if each.name == name
        for gpu in reconciler.cordons_for(each, outcome.facts)
    ]
    failures += _uncordon_itself(name, reconciler, not_yet)
    return report_failures((*failures, *_uncordon(name, reconciler, options.kubeconfig, not_yet, fenced)))


def _what_is_lost(name: str, reconciler: Reconciler, given_up: Sequence[str]) -> tuple[Lost, ...]:
    if "/" in given_up:
        return ()
    reconciler.progress(f"machine {name} looks for files that the next root file system would lack")
    try:
        return what_is_lost(name, reconciler.system)
    except AgentError as error:
        what = f"what the next root file system would lack is unknown: {error.message}"
        raise AgentError(what, "correct this, or give up all files of the former one with --give-up /") from error


def _has_more(name: str, reconciler: Reconciler, found: Sequence[Lost], given_up: Sequence[str]) -> bool:
    """Return whether the former root file system may have files that the next one lacks.

    Pods have written until they were moved away.
    """
    try:
        return bool(found or given_up or what_is_lost(name, reconciler.system))
    except AgentError as error:
        reconciler.progress(f"only --forget will remove the former root file system, as it may have files: {error}")
        return True


@contextmanager
def _given_up(switching: Switching, what: str) -> Iterator[None]:
    """If the block fails or is interrupted, stop the candidate: the machine serves on as before."""
    try:
        yield
    except (AgentError, OSError) as error:
        switching.give_up(f"{what}: {error}")
        why = f"machine {switching.name} was not switched, and serves on: {what}: {error}"
        raise AgentError(why, "correct this, then run the same command again") from error
    except KeyboardInterrupt:
        switching.give_up("it was interrupted")
        raise


def finish_switches(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """End switches that were interrupted, and remove former root file systems whose time is over."""
    return report_failures(work(reconciler))


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
    failures += _uncordon_itself(name, reconciler, not_yet)
    failures += _uncordon(name, reconciler, kubeconfig, not_yet, fenced)
    return report_failures(failures) or (0 if ready else 1)


def stop_machine(name: str, reconciler: Reconciler, kubeconfig: str, *, drains: bool) -> None:
    """Stop a machine, whose lock this process holds; `drains` says whether its node is drained. Raises AgentError."""
    if drains and kubeconfig:
        _drain(name, reconciler, kubeconfig)
    elif drains:
        _drain_itself(name, reconciler)
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


def _drain_itself(name: str, reconciler: Reconciler) -> None:
    """Let the machine drain its node. If it has no node, or no agent that can, its pods end with it."""
    reconciler.progress(f"machine {name} drains its node, up to {DRAIN_LIMIT:.0f} s")
    hint = f"the machine still runs; repeat this, or use --no-drain, or undo it: `unbounded-agent start {name}`"
    try:
        with _said_if_interrupted(reconciler, f"some pods of machine {name} may have been moved; {hint}"):
            drain(name, reconciler.system, reconciler.progress, DRAIN_LIMIT)
    except CannotLeaveError as error:
        unless = "unless --kubeconfig FILE moves them away first"
        reconciler.progress(f"the pods of machine {name} end with it, {unless}: {error}")
    except AgentError as error:
        raise AgentError(error.message, hint) from error


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


def _uncordon_itself(name: str, reconciler: Reconciler, not_yet: str) -> tuple[str, ...]:
    """Let the machine uncordon its node if it has cordoned it for a drain. If the node stays cordoned, return why."""
    if not was_drained(name, reconciler.system):
        return ()
    again = f"run `unbounded-agent start {name}`"
    if not_yet:
        see = f"see `unbounded-agent doctor`, then {again}"
        return (f"the node of machine {name} stays cordoned, because the machine {not_yet}: {see}",)
    reconciler.progress(f"machine {name} uncordons its node")
    try:
        said = uncordon(name, reconciler.system, reconciler.progress)
    except NoAnswerError as error:
        node = observe_joined(name, reconciler.system) or "NODE"
        if is_cordoned(name, reconciler.system):
            # Only once: with such an image, each later start would fail.
            doubt_cordon(name, reconciler.system)
            return (f"{error}; node {node} is still cordoned: run `kubectl uncordon {node}`",)
        # An interrupted `stop` may have cordoned nothing, and only the machine could say.
        reconciler.progress(f"{error}; if node {node} is still cordoned, run `kubectl uncordon {node}`")
        return ()
    except (AgentError, OSError) as error:
        return (f"the node of machine {name} is still cordoned: {error}; {again}",)
    return (f"{said}; see GPUsHealthy in `unbounded-agent status --wide`",) if said else ()


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
