"""`unbounded-agent plan`, `up`, `preflight`, `reset`: show what would be done, make Kubernetes nodes, remove them."""

import argparse
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest

from msgspec import Struct
from msgspec.structs import replace

from agent.cli.output import difference, document, print_machines, print_no_machines, report_problems
from agent.cli.printing import confirm, progress, report, report_failures, say
from agent.config.settings import MACHINE_NAME
from agent.host.joining import Watch, wait_for_servers
from agent.host.observe.machine import observe_joined, observe_units
from agent.host.plan.diff import Difference
from agent.host.plan.goal import Plan
from agent.host.provision.plan import made_nodes, observe_found, observe_node
from agent.host.provision.preflight import Asking, without
from agent.host.provision.reset import reset as remove_node
from agent.host.provision.reset import reset_steps
from agent.host.provision.up import Provisioner, Work, as_if_made
from agent.host.reconcile import Outcome, Reconciler
from agent.host.state.locks import COMMAND_WAIT, PASS_WAIT, locked, machine_locks
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import Absent, Broken, Facts, Unseen
from agent.model.goal import Step
from agent.model.node import Check
from agent.model.paths import MACHINES_STATE, PROVISION_LOCK, nspawn_file, unit_drop_in
from agent.model.text import printable
from agent.system.http import ask
from agent.system.network import HostNetwork, NetworkSource

SERVICE = "unbounded-agent.service"
RELOAD_LIMIT = PASS_WAIT + 60.0
"""Seconds for the service to reload. A reload ends with a pass, which may first have to wait until another process's
pass has ended."""
SERVICE_POLL = 1.0
"""Seconds between two checks of a service that is starting."""
BUSY = "another `unbounded-agent up` or `reset` is still running"


def plan(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print the steps. Also print each machine that does not get its settings, or perhaps does not, with the reason.

    Return 1 if a machine's files must not be written, or if systemd-nspawn@.service is missing or cannot be read; 2 if
    a machine does not exist and `up` does not make it: its name may be wrong.
    """
    facts, planned, left = reconciler.preview()
    stopped = [each.name for each in reconciler.evaluate(facts, planned, left) if each.stopped]
    of_up, unknown = _of_up(reconciler, facts, left)
    steps = [*_as_json(left.actions), *map(_start, stopped)]
    exceptions = (*_exceptions(planned, left, facts), *unknown.items())
    configured = [each for each in facts.machines if each.name in reconciler.config.machines]
    missing = [each.name for each in configured if isinstance(each.root, Absent)]
    if options.json:
        others = [{"machine": name, "message": why} for name, why in exceptions]
        content = {"steps": steps, "upSteps": of_up, "exceptions": others, "problems": facts.all_problems()}
        say([document("plan", content)])
    else:
        say(f"{name}: {why}" for name, why in exceptions)
        if not steps and not of_up and not any(isinstance(each.root, Absent) for each in facts.machines):
            say(["nothing to do"])
        for step, action in zip_longest(steps, left.actions):
            shown = difference(action, reconciler.system) if options.diff and action else ()
            say([f"would {step['sentence']}", *shown])
        say(f"`up` would {each['sentence']}" for each in of_up)
        print_no_machines(reconciler)
        report_problems(facts)
    broken = any(isinstance(each.root, Broken) for each in configured)
    if broken or left.refused or not isinstance(facts.template_device_allow, tuple):
        return 1
    return 0 if all(reconciler.config.machines[name].node for name in missing) else 2


def _of_up(reconciler: Reconciler, facts: Facts, left: Difference) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the steps of `up` that `apply` would not carry out, and by machine why some are unknown."""
    nodes = tuple(sorted(name for name, each in reconciler.config.machines.items() if each.node))
    if not nodes:
        return [], {}
    _, planned, with_machines = reconciler.planned(as_if_made(nodes, facts))
    before, after, unknown = Provisioner(reconciler.config, reconciler.system, HostNetwork()).preview(nodes, planned)
    settings = [each for each in with_machines.actions if each not in left.actions]
    made = [each.name for each in facts.machines if each.name in nodes and isinstance(each.root, Absent)]
    steps = [*_as_json((*before, *settings)), *map(_start, made), *_as_json(after)]
    return steps, {name: f"what `up` would do is not completely known: {why}" for name, why in unknown.items()}


def _as_json(steps: Iterable[Step]) -> list[dict[str, str]]:
    return [{"kind": each.kind, "sentence": each.describe()} for each in steps]


def _start(machine: str) -> dict[str, str]:
    return {"kind": "start", "sentence": f"start machine {machine}"}


def _exceptions(planned: Plan, left: Difference, facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield each machine that does not get its settings, or perhaps does not, with the reason."""
    for machine in facts.machines:
        if isinstance(machine.root, Unseen):
            yield machine.name, f"whether it exists is unknown; this is the plan if it does: {machine.root.why}"
    for name, why in planned.skipped.items():
        yield name, f"{why}: nothing is set up"
    for name, why in planned.held.items():
        yield name, f"left unchanged: {why}"
    for name, refused in left.refused.items():
        yield name, f"its settings are not written: {refused.why if isinstance(refused, Unseen) else refused}"


class _Output(Struct, frozen=True):
    """What `up` prints: sentences for people, or one JSON object per line for programs."""

    for_programs: bool

    def _print(self, event: str, values: Mapping[str, object], to_people: Callable[[], object]) -> None:
        if self.for_programs:
            say([document("up", {"event": event, **values}, indent=None)])
        else:
            to_people()

    def step(self, sentence: str) -> None:
        if sentence:
            self._print("step", {"message": sentence}, lambda: progress(sentence))

    def check(self, check: Check) -> None:
        self._print("check", as_object(check), lambda: say([in_words(check)]))

    def remark(self, sentence: str) -> None:
        self._print("remark", {"message": sentence}, lambda: report(f"note: {sentence}"))

    def found(self, work: Work, later: Sequence[Step] | None) -> None:
        """Print the failed checks and the remarks; for a dry run also the steps, of which `later` follow the work's."""
        for check in work.checks:
            if not check.passed:
                self.check(check)
        for remark in work.remarks:
            self.remark(remark)
        for sentence in () if later is None else [each.describe() for each in (*work.steps, *later)]:
            self._print("would", {"message": sentence}, partial(say, [f"would {sentence}"]))

    def end(self, failures: Sequence[str], machines: Mapping[str, object] = {}) -> None:
        self._print("result", {"machines": machines, "failures": failures}, lambda: report_failures(failures))


def as_object(check: Check) -> dict[str, object]:
    """Return a check as a JSON object for programs (docs/json.md)."""
    return {
        "check": check.name,
        "machine": check.machine,
        "ok": check.passed,
        "required": check.required,
        "message": check.message,
        "advice": check.advice or "",
    }


def in_words(check: Check) -> str:
    """Return a check as a line for people."""
    state = "ok" if check.passed else "FAILED" if check.required else "warning"
    where = f"{check.machine}: " if check.machine else ""
    advice = f" ({check.advice})" if check.advice else ""
    # Messages quote what servers and programs wrote, so make control characters visible.
    return printable(f"{state:>7}  {check.name}: {where}{check.message}{advice}")


def chosen(reconciler: Reconciler, name: str) -> tuple[str, ...]:
    """Return the machines with node settings; if `name` is not empty, only that machine.

    Raises ConfigError if there is no such machine.
    """
    machines = reconciler.config.machines
    nodes = tuple(sorted(each for each, settings in machines.items() if settings.node))
    if name and name not in nodes:
        lacks = "has no node settings" if name in machines else "is not configured"
        raise ConfigError(f"machine {name} {lacks}", f"add a table [machines.{name}.node]")
    if not nodes:
        raise ConfigError("no machine has node settings", "add a table [machines.NAME.node] (docs/bootstrap.md)")
    return (name,) if name else nodes


def _chosen_for_up(options: argparse.Namespace, reconciler: Reconciler) -> tuple[str, ...]:
    if options.rebuild and not options.machine:
        raise ConfigError("--rebuild needs the name of a machine", "it removes everything in that machine")
    names = chosen(reconciler, options.machine)
    if options.rebuild and not options.dry_run:
        confirm(f"everything in machine {options.machine} is removed", options)
    return names


def up(
    options: argparse.Namespace, reconciler: Reconciler, network: NetworkSource | None = None, ask: Asking = ask
) -> int:
    """Make the nodes that do not exist yet; with a name, only that machine's node. Return the exit code.

    With --rebuild, make the node of the machine again even if it exists. Wait until the nodes have joined, and until it
    is known whether they are ready.
    """
    names, output, system = _chosen_for_up(options, reconciler), _Output(options.json), reconciler.system
    reconciler.progress = output.step
    with locked(system, PROVISION_LOCK, COMMAND_WAIT, BUSY), machine_locks(system, names, "up"):
        rebuilt = frozenset(names if options.rebuild else ())
        provisioner = Provisioner(reconciler.config, system, network or HostNetwork(), output.step, ask, rebuilt)
        previews = []

        def check_all() -> Work:
            previews.append(reconciler.preview())
            return provisioner.work(names, previews[-1][0])

        work = check_all() if options.dry_run else wait_for_servers(provisioner, check_all, reconciler)
        facts, planned, difference = previews[-1]
        output.found(work, difference.actions if options.dry_run else None)
        if work.failed or options.dry_run:
            return 1 if work.failed else 0
        watch, failures = Watch(reconciler, names, ask=ask), tuple[str, ...]()
        outcome = Outcome(facts, reconciler.evaluate(facts, planned, difference))
        finished = work.finished and not difference.actions and not watch.waiting(outcome)
        try:
            if not finished or not watch.all_ready(outcome):
                outcome, failures = _make_nodes(work, provisioner, watch, output)
        except AgentError as error:
            output.end([str(error)])
            return 1
        machines = watch.machines(outcome)
        if not options.json:
            print_machines(machines, reconciler)
        states = {
            each.name: {
                "ready": each.ready.status,
                "reason": each.ready.reason,
                "node": observe_joined(each.name, system),
            }
            for each in machines
        }
        output.end(failures, states)
        return 0 if not failures and watch.all_ready(outcome) else 1


def _make_nodes(work: Work, provisioner: Provisioner, watch: Watch, output: _Output) -> tuple[Outcome, tuple[str, ...]]:
    """Carry out the work, start the machines, and wait for them. Return the last outcome, and what failed."""
    provisioner.run(work.steps)
    # Make the service read the configuration: with an older one, it would remove new machines' settings. systemd does
    # not reload a service that is still starting, and such a service may already have read the older configuration: so
    # wait until it has started.
    system, deadline = provisioner.system, time.monotonic() + PASS_WAIT
    while (
        unit := observe_units([SERVICE], system)[SERVICE]
    ).unit_state == "activating" and time.monotonic() < deadline:
        time.sleep(SERVICE_POLL)
    if unit.unit_state in ("active", "reloading"):
        system.run("systemctl", "reload", SERVICE, timeout=RELOAD_LIMIT)
    else:
        output.remark(f"{SERVICE} is not running, so nothing follows changes: run `systemctl enable --now {SERVICE}`")

    outcome, failures = watch.start()
    startable = {machine.name for machine in watch.machines(outcome) if machine.startable}
    for node in work.nodes:
        # Let the machine start at boot even if the wait failed. But without the agent's settings, it must not start at
        # boot: the option -U in systemd-nspawn@.service would change the owners of all files in the machine.
        if node.machine in startable:
            provisioner.enable(node.machine)
        elif not all(node.facts.enabled.values()):
            failures += (
                f"{node.machine} will not start when the host boots, because the agent's settings for it are not in "
                f"place: see `unbounded-agent plan`, then run `unbounded-agent up {node.machine}` again",
            )
    return outcome, failures


def preflight(
    options: argparse.Namespace, reconciler: Reconciler, network: NetworkSource | None = None, ask: Asking = ask
) -> int:
    """Print all checks. Return 1 if one failed that must pass before a node can be made, otherwise 0.

    A check that is ignored need not pass.
    """
    names, _ = chosen(reconciler, ""), without(options.ignore, ())
    facts = reconciler.preview()[0]
    network = network or HostNetwork()
    work = Provisioner(reconciler.config, reconciler.system, network, reconciler.progress, ask).work(names, facts)
    ignored = sorted({each.name for each in work.checks if each.required and not each.passed} & {*options.ignore})
    work = replace(work, checks=without(options.ignore, work.checks))
    if options.json:
        checks = [as_object(check) for check in work.checks]
        say([document("preflight", {"ok": not work.failed, "checks": checks})])
    else:
        say(in_words(check) for check in work.checks)
    remarks = [f"`up` fails until these pass: {', '.join(ignored)}"] if ignored else []
    for remark in (*work.remarks, *remarks):
        report(f"note: {remark}")
    return 1 if work.failed else 0


def reset(options: argparse.Namespace, reconciler: Reconciler, network: NetworkSource | None = None) -> int:
    """Remove the node in a machine, even if it is no longer configured, and print what is left to do.

    Return 1 if this was the last node and the host still differs from how it was found, otherwise 0. Raises AgentError.
    """
    name, configured, system = options.machine, reconciler.config.machines, reconciler.system
    if not re.fullmatch(MACHINE_NAME, name):
        raise ConfigError(f"{name!a} is no machine's name", "use the name in its table [machines.NAME]")
    facts, made = observe_node(name, system), made_nodes(system)
    files = (nspawn_file(name), unit_drop_in(name), f"{MACHINES_STATE}/{name}")
    known = name in configured or name in made or facts.staged or any(map(system.exists, files))
    # `up` may have changed the host, and been interrupted before it made its first node.
    interrupted = not made and not isinstance(observe_found(system), Absent)
    if not known and isinstance(facts.root, Absent) and not interrupted:
        names = ", ".join(sorted({*configured, *made}))
        raise ConfigError(
            f"there is no machine {name}: it is not configured, and nothing is left of it",
            f"the machines are {names}" if names else "no machine is configured, and `up` has made none",
        )
    if options.dry_run:
        steps = reset_steps(name, system, network or HostNetwork())
        say(f"would {step.describe()}" for step in steps)
        return 0
    confirm(f"machine {name} is stopped, and everything in it is removed", options)
    others = {each: settings for each, settings in configured.items() if each != name}
    kept = set(others)

    def remove_files() -> tuple[str, ...]:
        # The machine's root file system is removed by now. So a pass without the machine in the configuration removes
        # the files that the agent wrote for the machine.
        reconciler.config = replace(reconciler.config, machines=others)
        outcome = reconciler.reconcile()
        # Machines that are no longer configured, but run or start at boot, keep their settings.
        kept.update(each.name for each in outcome.facts.machines)
        return outcome.failures_of((name,))

    with locked(system, PROVISION_LOCK, COMMAND_WAIT, BUSY), machine_locks(system, (name,), "reset"):
        ending = remove_node(name, system, network or HostNetwork(), remove_files, lambda: not kept, progress)
    for remark in ending.remarks:
        report(f"note: {remark}")
    lines = [f"machine {name}: nothing to do"]
    if ending.done:
        host = f"keeps its settings for {', '.join(ending.others)}" if ending.others else "is as it was found"
        lines = [f"machine {name} is removed" + ("" if ending.differences else f"; the host {host}")]
        if ending.node:
            lines.append(f"its Node object stays: run `kubectl delete node {ending.node}` where you have the right to")
        if name in configured:
            lines.append(f"it is still configured: `unbounded-agent up {name}` would make it again")
    say(lines)
    return report_failures(ending.differences)
