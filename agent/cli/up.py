"""`unbounded-agent up`: makes the Kubernetes nodes of the configuration, and waits until they have joined."""

import argparse
import time
from collections.abc import Iterable

from agent.cli.documents import document
from agent.cli.output import print_machines
from agent.cli.printing import progress, report, say
from agent.cli.waiting import Watch, wait_for_servers
from agent.cli.wiring import reconciler_for
from agent.host.observe.units import observe_units
from agent.host.outcome import Outcome
from agent.host.provision.preflight import Asking, Check
from agent.host.provision.up import Provisioner, Work
from agent.host.reconcile import Reconciler
from agent.host.state.locks import COMMAND_WAIT, PASS_WAIT, locked, machine_locks
from agent.model.errors import AgentError, ConfigError
from agent.model.paths import PROVISION_LOCK
from agent.model.text import printable
from agent.system.files import System
from agent.system.https import ask
from agent.system.network import HostNetwork, NetworkSource
from agent.system.tool_runner import tool_runner

SERVICE = "unbounded-agent.service"
RELOAD_LIMIT = PASS_WAIT + 60.0
"""Seconds for the service to reload. A reload ends with a pass, which may first have to wait until another process's
pass has ended."""
SERVICE_POLL = 1.0
"""Seconds between two checks of a service that is starting."""
BUSY = "another `unbounded-agent up` or `reset` is still running"


class Output:
    """What `up` prints: sentences for people, or one JSON object per line for programs."""

    def __init__(self, *, for_programs: bool) -> None:
        self._for_programs = for_programs

    def step(self, sentence: str) -> None:
        """Report that a step begins."""
        if not self._for_programs:
            progress(sentence)
        elif sentence:
            self._event("step", message=sentence)

    def check(self, check: Check) -> None:
        """Report a failed check."""
        if self._for_programs:
            self._event("check", **as_object(check))
        else:
            say([in_words(check)])

    def remark(self, sentence: str) -> None:
        """Report something that the user should know although nothing has failed."""
        if self._for_programs:
            self._event("remark", message=sentence)
        else:
            report(f"note: {sentence}")

    def result(self, outcome: Outcome, watch: Watch, failures: Iterable[str]) -> None:
        """Report the final state of the machines, and what failed."""
        machines, failures = watch.machines(outcome), list(failures)
        if self._for_programs:
            states = {
                each.name: {"ready": each.ready.status, "reason": each.ready.reason, "node": watch.node(each.name)}
                for each in machines
            }
            self._event("result", machines=states, failures=failures)
            return
        print_machines(machines, watch.reconciler)
        for failure in failures:
            report(failure)

    def failure(self, sentence: str) -> None:
        """Report the error that ended the command."""
        if self._for_programs:
            self._event("result", machines={}, failures=[sentence])
        else:
            report(sentence)

    def _event(self, event: str, **values: object) -> None:
        say([document("up", time.time(), {"event": event, **values}, indent=None)])


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
    if name and name not in machines:
        raise ConfigError(f"machine {name} is not configured", f"add a table [machines.{name}.node]")
    if name and name not in nodes:
        raise ConfigError(f"machine {name} has no node settings", f"add a table [machines.{name}.node]")
    if not nodes:
        raise ConfigError("no machine has node settings", "add a table [machines.NAME.node] (docs/bootstrap.md)")
    return (name,) if name else nodes


def run_up(options: argparse.Namespace) -> int:
    """Run `up` with these options."""
    reconciler = reconciler_for(options, tool_runner)
    return up(reconciler, options.machine, rebuild=options.rebuild, for_programs=options.json)


def up(
    reconciler: Reconciler,
    name: str,
    *,
    rebuild: bool,
    for_programs: bool,
    network: NetworkSource | None = None,
    ask: Asking = ask,
) -> int:
    """Make the nodes that do not exist yet; with a `name`, only that machine's node. Return the exit code.

    With `rebuild`, make the node of machine `name` again even if it exists. Wait until the nodes have joined, and until
    it is known whether they are ready.
    """
    if rebuild and not name:
        raise ConfigError("--rebuild needs the name of a machine", "it removes everything in that machine")
    names, output = chosen(reconciler, name), Output(for_programs=for_programs)
    reconciler.progress = output.step
    system = reconciler.system
    with locked(system, PROVISION_LOCK, COMMAND_WAIT, BUSY), machine_locks(system, names, "up"):
        rebuilt = frozenset(names) if rebuild else frozenset[str]()
        network = network or HostNetwork()
        provisioner = Provisioner(reconciler.config, reconciler.system, network, output.step, ask, rebuilt)
        previews = []

        def check_all() -> Work:
            previews.append(reconciler.preview())
            return provisioner.work(names, previews[-1][0])

        work = wait_for_servers(provisioner, check_all, output.step)
        facts, planned, difference = previews[-1]
        for check in work.checks:
            if not check.passed:
                output.check(check)
        for remark in work.remarks:
            output.remark(remark)
        if work.failed:
            return 1
        outcome, watch = (
            Outcome(facts, reconciler.evaluate(facts, planned, difference)),
            Watch(reconciler, names, ask=ask),
        )
        if work.finished and not difference.actions and not watch.waiting(outcome) and watch.all_ready(outcome):
            output.result(outcome, watch, ())
            return 0
        return _make(work, provisioner, watch, output)


def _make(work: Work, provisioner: Provisioner, watch: Watch, output: Output) -> int:
    try:
        return _make_nodes(work, provisioner, watch, output)
    except AgentError as error:
        output.failure(str(error))
        return 1


def _make_nodes(work: Work, provisioner: Provisioner, watch: Watch, output: Output) -> int:
    provisioner.run(work.record)
    host = work.host
    for node in work.nodes:
        if node.make:
            # Change the host's settings only once, while the first image is pulled. If no image is pulled, the call of
            # `run` below the loop changes them.
            provisioner.make_root(node, host)
            host = ()
        provisioner.replace_token(node)
    provisioner.run(host)
    _reload_service(provisioner.system, output)
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
    output.result(outcome, watch, failures)
    return 0 if not failures and watch.all_ready(outcome) else 1


def _reload_service(system: System, output: Output) -> None:
    """Make the service read the configuration. With an older configuration, it would remove new machines' settings."""
    deadline = time.monotonic() + PASS_WAIT
    # systemd does not reload a service that is still starting, and such a service may already have read the older
    # configuration: so wait until it has started.
    while (state := observe_units([SERVICE], system)[SERVICE].state) == "activating" and time.monotonic() < deadline:
        time.sleep(SERVICE_POLL)
    if state in ("active", "reloading"):
        system.run("systemctl", "reload", SERVICE, timeout=RELOAD_LIMIT)
    else:
        output.remark(f"{SERVICE} is not running, so nothing follows changes: run `systemctl enable --now {SERVICE}`")
