"""`unbounded-agent up`, `preflight` and `reset`: make the Kubernetes nodes of the configuration, and remove them."""

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from agent.cli.output import document, print_machines
from agent.cli.printing import progress, report, report_failures, say
from agent.config.settings import MACHINE_NAME
from agent.host.joining import Watch, wait_for_servers
from agent.host.observe.machine import observe_joined, observe_units
from agent.host.provision.plan import made_nodes, observe_found, observe_node
from agent.host.provision.preflight import Asking
from agent.host.provision.reset import reset as remove_node
from agent.host.provision.up import Provisioner, Work
from agent.host.reconcile import Outcome, Reconciler
from agent.host.state.locks import COMMAND_WAIT, PASS_WAIT, locked, machine_locks
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import Absent
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
        "advice": check.advice,
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


def up(
    options: argparse.Namespace, reconciler: Reconciler, network: NetworkSource | None = None, ask: Asking = ask
) -> int:
    """Make the nodes that do not exist yet; with a name, only that machine's node. Return the exit code.

    With --rebuild, make the node of the machine again even if it exists. Wait until the nodes have joined, and until it
    is known whether they are ready.
    """
    if options.rebuild and not options.machine:
        raise ConfigError("--rebuild needs the name of a machine", "it removes everything in that machine")
    names, output, system = chosen(reconciler, options.machine), _Output(options.json), reconciler.system
    reconciler.progress = output.step
    with locked(system, PROVISION_LOCK, COMMAND_WAIT, BUSY), machine_locks(system, names, "up"):
        rebuilt = frozenset(names if options.rebuild else ())
        provisioner = Provisioner(reconciler.config, system, network or HostNetwork(), output.step, ask, rebuilt)
        previews = []

        def check_all() -> Work:
            previews.append(reconciler.preview())
            return provisioner.work(names, previews[-1][0])

        work = wait_for_servers(provisioner, check_all, reconciler)
        facts, planned, difference = previews[-1]
        for check in work.checks:
            if not check.passed:
                output.check(check)
        for remark in work.remarks:
            output.remark(remark)
        if work.failed:
            return 1
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
    while (state := observe_units([SERVICE], system)[SERVICE].state) == "activating" and time.monotonic() < deadline:
        time.sleep(SERVICE_POLL)
    if state in ("active", "reloading"):
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


def preflight(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print all checks. Return 1 if one failed that must pass before a node can be made, otherwise 0."""
    names = chosen(reconciler, "")
    facts = reconciler.preview()[0]
    work = Provisioner(reconciler.config, reconciler.system, HostNetwork(), reconciler.progress).work(names, facts)
    if options.json:
        checks = [as_object(check) for check in work.checks]
        say([document("preflight", {"ok": not work.failed, "checks": checks})])
    else:
        say(in_words(check) for check in work.checks)
    for remark in work.remarks:
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
