"""`unbounded-agent up`, `preflight` and `reset`: make the Kubernetes nodes of the configuration, and remove them."""

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from agent.cli.host import load, this_host
from agent.cli.output import document, print_machines, started_and_stopped
from agent.cli.printing import progress, report, report_failures, say
from agent.cli.wiring import make_reconciler, reconciler_for
from agent.config.load import Loaded
from agent.config.settings import MACHINE_NAME, Config
from agent.host.apply.steps import give_token_again
from agent.host.observe.machine import observe_joined, observe_units
from agent.host.provision.node_files import read_token
from agent.host.provision.plan import made_nodes, observe_found, observe_node
from agent.host.provision.preflight import Asking, check_server
from agent.host.provision.reset import Ending, reset
from agent.host.provision.up import Provisioner, Work
from agent.host.reconcile import MachineOutcome, Outcome, Reconciler
from agent.host.state.locks import COMMAND_WAIT, PASS_WAIT, locked, machine_locks
from agent.model.conditions import ConditionType, Reason, Status
from agent.model.errors import AgentError, ConfigError, NoMachinesError
from agent.model.facts import Absent
from agent.model.node import Check
from agent.model.paths import MACHINES_STATE, PROVISION_LOCK, machine_unit, nspawn_file, token_file, unit_drop_in
from agent.model.text import printable
from agent.system.files import System
from agent.system.http import ask
from agent.system.network import HostNetwork, NetworkSource
from agent.system.tool_runner import tool_runner

JOIN_LIMIT = 300.0
"""Seconds to wait for machines to boot, report and join, in addition to their longest driver_wait."""
SERVER_LIMIT = 900.0
"""Seconds to wait for an API server that does not answer. Often a cluster and its nodes are made at the same time."""
REJOIN_WAIT = 60.0
"""Seconds after which a node that had joined before gets a bootstrap token again. If its certificate is still valid, it
joins sooner."""
SERVER_POLL = 5.0
"""Seconds between two requests to an API server."""
NODE_POLL = 0.5
"""Seconds between two passes while machines boot."""
LIMIT_NOTE = f"this command waits at most {SERVER_LIMIT / 60:.0f} minutes for its answer"


def wait_for_servers(provisioner: Provisioner, check_all: Callable[[], Work], progress: Callable[[str], None]) -> Work:
    """Wait until all API servers answer, or another check fails. Return the last result of `check_all`.

    If a server still does not answer after SERVER_LIMIT seconds, the result has the failed check of that server.
    """
    started, last_sentence = time.monotonic(), ""
    while True:
        work = check_all()
        late = tuple(check for check in work.failed if check.late)
        if not late or late != work.failed:
            return work
        while late:
            if time.monotonic() - started > SERVER_LIMIT:
                return replace(work, checks=tuple(_gave_up(check) for check in work.checks))
            sentence = f"waiting: {'; '.join(dict.fromkeys(check.message for check in late))}; {LIMIT_NOTE}"
            if sentence != last_sentence:
                progress(sentence)
                last_sentence = sentence
            time.sleep(SERVER_POLL)
            late = provisioner.late(work)


def _gave_up(check: Check) -> Check:
    message = f"{check.message}; gave up after {SERVER_LIMIT / 60:.0f} minutes"
    return replace(check, message=message) if check.late else check


class Watch(Struct, frozen=True):
    """The machines that a command starts and waits for."""

    reconciler: Reconciler
    names: tuple[str, ...]
    limit: float = JOIN_LIMIT
    ask: Asking = ask

    def machines(self, outcome: Outcome) -> tuple[MachineOutcome, ...]:
        """Return the outcomes of these machines, without those of other machines."""
        return tuple(each for each in outcome.machines if each.name in self.names)

    def node(self, name: str) -> str:
        """Return the name of the machine's Node object; empty if the machine has not joined."""
        return observe_joined(name, self.reconciler.system)

    def waiting(self, outcome: Outcome) -> dict[str, str | None]:
        """Return why machines are not finished yet, by machine; empty if all machines are finished.

        None means that only the machine's kubelet has not joined the cluster yet.
        """
        reasons: dict[str, str | None] = {}
        # A machine that is stopping counts as not running. Its last report is still there, and would let it pass for
        # finished.
        ended = {each.name for each in outcome.facts.machines if each.ended or each.unit_state == "deactivating"}
        for machine in self.machines(outcome):
            if machine.pending or machine.name in ended:
                reasons[machine.name] = machine.awaited
            elif not self._joined(machine.name):
                reasons[machine.name] = None
        return reasons

    def all_ready(self, outcome: Outcome) -> bool:
        """Return whether all machines are ready and have joined."""
        machines = self.machines(outcome)
        return all(each.ready.status is Status.TRUE and self._joined(each.name) for each in machines)

    def start(self) -> tuple[Outcome, tuple[str, ...]]:
        """Make a pass, start stopped machines, and wait for all machines. Return the last outcome, and what failed.

        Any failure ends the wait, except one that concerns only machines that are not in `names`.
        """
        outcome, started = self.reconciler.reconcile(), set[str]()
        failures = outcome.failures_of(self.names)
        failures += self._start_stopped(outcome, started) + self._never_started(outcome, started)
        return (outcome, failures) if failures else self._wait(started | _running(outcome))

    def _start_stopped(self, outcome: Outcome, started: set[str]) -> tuple[str, ...]:
        """Start stopped machines that have their settings and are not in `started`; add them to it. Return failures."""
        failures: tuple[str, ...] = ()
        for machine in self.machines(outcome):
            if machine.stopped and machine.startable and machine.name not in started:
                started.add(machine.name)
                failures += self.reconciler.start(machine.name)
        return failures

    def _never_started(self, outcome: Outcome, started: set[str]) -> tuple[str, ...]:
        """Return a sentence for each machine that does not run, and will not start before the user does something."""
        failures: tuple[str, ...] = ()
        facts = {each.name: each for each in outcome.facts.machines}
        for machine in self.machines(outcome):
            seen, running = facts[machine.name], machine.condition(ConditionType.MACHINE_RUNNING)
            allowed = machine.condition(ConditionType.DEVICES_ALLOWED)
            # If a machine's settings files belong to another program, the agent neither changes nor starts the machine.
            foreign = seen.ended and allowed.reason == Reason.FOREIGN_FILE
            if running.reason == Reason.NO_SUCH_MACHINE:
                failures += (running.message,)
            elif seen.masked and seen.ended:
                unmask = f"`systemctl unmask {machine_unit(machine.name)}`"
                failures += (f"{machine.name} was not started, because its unit is masked: run {unmask} first",)
            elif foreign or (machine.stopped and machine.name not in started):
                failures += (
                    f"{machine.name} was not started, because its settings files are missing or not the agent's, or "
                    "systemd has not read them yet (see `unbounded-agent plan`)",
                )
        return failures

    def _ended(self, outcome: Outcome, started: set[str]) -> tuple[str, ...]:
        """Return a sentence for each machine in `started` that no longer runs. Add running ones to `started`.

        A machine in `started` that was never seen running gets a sentence too, because its start may have failed
        between two passes.
        """
        ended = {each.name for each in outcome.facts.machines if each.stays_ended}
        failures = tuple(started_and_stopped(name) for name in self.names if name in started & ended)
        # A machine in `started` is not started again. So a machine that runs now stays stopped if somebody stops it.
        started |= _running(outcome)
        return failures

    def _wait(self, started: set[str]) -> tuple[Outcome, tuple[str, ...]]:
        """Wait until all machines are finished, something fails, or time is up. Return the same as `start`."""
        limit = self.limit + max(self.reconciler.config.machines[name].driver_wait for name in self.names)
        began = limit_since = time.monotonic()
        last_sentence, failing, joining = "", frozenset[str](), dict[str, _Joining]()
        while True:
            time.sleep(NODE_POLL)
            outcome = self.reconciler.reconcile()
            failures = outcome.failures_of(self.names) + self._ended(outcome, started)
            failures += self._start_stopped(outcome, started) + self._never_started(outcome, started)
            failing = _failing(outcome, failing)
            waiting = self.waiting(outcome)
            waiting |= {name: _failed(name) for name in failing & waiting.keys()}
            if failures or not waiting:
                return outcome, failures
            joining = {
                name: joining.get(name) or _Joining(name, self.reconciler, self.ask)
                for name, why in waiting.items()
                if why is None
            }
            problems = [each.look() for each in joining.values()]
            now, silent = time.monotonic(), any(each and each.late for each in problems)
            if silent and now - began <= SERVER_LIMIT:
                # No kubelet can join through an API server that does not answer, so `limit` counts only from the
                # server's answer on.
                limit_since = now
            elif silent or now - limit_since > limit:
                late = (_timed_out(name, why, joining.get(name), now - began) for name, why in waiting.items())
                return outcome, tuple(late)
            sentence = "; ".join(_progress(name, why, joining.get(name)) for name, why in waiting.items())
            if sentence != last_sentence:
                self.reconciler.progress(sentence)
                last_sentence = sentence

    def _joined(self, name: str) -> bool:
        """Return whether the machine has joined and its bootstrap token is removed; True without node settings."""
        if self.reconciler.config.machines[name].node is None:
            return True
        return bool(self.node(name)) and not self.reconciler.system.exists(token_file(name))


def _running(outcome: Outcome) -> set[str]:
    return {each.name for each in outcome.facts.machines if each.unit_state in ("active", "activating")}


def _failing(outcome: Outcome, before: frozenset[str]) -> frozenset[str]:
    """Return the machines that have failed, that systemd starts again, and that have not run since they failed.

    `before` is what this function returned after the previous pass.
    """
    running = {each.name for each in outcome.facts.machines if each.unit_state == "active"}
    return (before | {each.name for each in outcome.facts.machines if each.restarts}) - running


def _failed(name: str) -> str:
    return f"it has failed, and systemd starts it again: see `journalctl -e -u {machine_unit(name)}`"


NOT_JOINED = "its kubelet has not joined the cluster yet"


class _Joining(Struct):
    """Looks for what keeps a machine's node from joining. Gives it its bootstrap token again if it may need one.

    A node that had joined before needs a token if its kubelet's certificate has expired. A kubelet whose certificate is
    still valid ignores the token (LoadClientConfig in pkg/kubelet/certificate/bootstrap).
    """

    name: str
    reconciler: Reconciler
    ask: Asking
    looked_at: float | None = None
    problem: Check | None = None
    """The failed check that shows why the machine cannot join; None if no check fails on this host."""
    unhindered_since: float | None = None
    """Since when the node has not joined although no check fails."""
    no_token: str | None = None
    """Why the node got no token again; empty if it got one, or needs none; None before that is known."""

    def look(self) -> Check | None:
        """Check the API server, at most once in SERVER_POLL seconds. Return the failed check. Raises AgentError."""
        now, system = time.monotonic(), self.reconciler.system
        node = self.reconciler.config.machines[self.name].node
        if node and (self.looked_at is None or now - self.looked_at >= SERVER_POLL):
            # Check the token only if the machine has one. If its node has joined before, it has none left, and rarely
            # needs one.
            checks = check_server(node, system, self.ask, with_token=system.exists(token_file(self.name)))
            self.looked_at, self.problem = now, next((check for check in checks if not check.passed), None)
        if self.problem or self.unhindered_since is None:
            self.unhindered_since = None if self.problem else now
        elif now - self.unhindered_since > REJOIN_WAIT and self.no_token is None:
            self.no_token = self._give_token()
        return self.problem

    def _give_token(self) -> str | None:
        """Give the node its token again, once. Return the new `no_token`; None if the API server did not answer."""
        name, node, system = self.name, self.reconciler.config.machines[self.name].node, self.reconciler.system
        if not node or not node.bootstrap_token or system.exists(token_file(name)):
            return ""
        if failed := next((each for each in check_server(node, system, self.ask) if not each.passed), None):
            why = f"if its certificate has expired, it needs a valid bootstrap token: {failed.message}"
            return None if failed.late else f"{why} ({failed.advice})"
        what = f"give machine {name} the bootstrap token of {node.bootstrap_token} again"
        self.reconciler.progress(f"{what}, in case its kubelet's certificate has expired")
        try:
            give_token_again(name, read_token(node.bootstrap_token, system), system)
        except OSError as error:
            raise AgentError(f"cannot {what}: {error.strerror}") from error
        return ""


def _progress(name: str, why: str | None, joining: _Joining | None) -> str:
    sentence = f"{name}: waiting: {why or NOT_JOINED}"
    if joining is None or (problem := joining.problem) is None:
        return sentence
    return f"{sentence}: {problem.message} ({LIMIT_NOTE if problem.late else problem.advice})"


def _timed_out(name: str, why: str | None, joining: _Joining | None, waited: float) -> str:
    what = f"machine {name} was not ready within {waited:.0f} s: {why or NOT_JOINED}"
    if joining is None:
        return f"{what} (see `unbounded-agent doctor`, then run the same command again)"
    if (problem := joining.problem) is None:
        again = joining.no_token or f"then run `unbounded-agent up {name}` again"
        return f"{what} (see `journalctl -M {name} -u kubelet`; {again})"
    then = f"; then run `unbounded-agent up {name}` to continue" if problem.late else ""
    return f"{what}: {problem.message} ({problem.advice}{then})"


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

    def step(self, sentence: str) -> None:
        if not self.for_programs:
            progress(sentence)
        elif sentence:
            self._event("step", message=sentence)

    def check(self, check: Check) -> None:
        if self.for_programs:
            self._event("check", **as_object(check))
        else:
            say([in_words(check)])

    def remark(self, sentence: str) -> None:
        if self.for_programs:
            self._event("remark", message=sentence)
        else:
            report(f"note: {sentence}")

    def result(self, outcome: Outcome, watch: Watch, failures: Sequence[str]) -> None:
        machines = watch.machines(outcome)
        if not self.for_programs:
            print_machines(machines, watch.reconciler)
        self.end(
            failures,
            {
                each.name: {"ready": each.ready.status, "reason": each.ready.reason, "node": watch.node(each.name)}
                for each in machines
            },
        )

    def end(self, failures: Sequence[str], machines: Mapping[str, object] = {}) -> None:
        if self.for_programs:
            self._event("result", machines=machines, failures=failures)
        else:
            report_failures(failures)

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
    names, output = chosen(reconciler, name), _Output(for_programs)
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
        outcome = Outcome(facts, reconciler.evaluate(facts, planned, difference))
        watch = Watch(reconciler, names, ask=ask)
        if work.finished and not difference.actions and not watch.waiting(outcome) and watch.all_ready(outcome):
            output.result(outcome, watch, ())
            return 0
        try:
            return _make_nodes(work, provisioner, watch, output)
        except AgentError as error:
            output.end([str(error)])
            return 1


def _make_nodes(work: Work, provisioner: Provisioner, watch: Watch, output: _Output) -> int:
    provisioner.run(work.steps)
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


def _reload_service(system: System, output: _Output) -> None:
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


# `unbounded-agent preflight`: checks what would keep the nodes of the configuration from being made.


def run_preflight(options: argparse.Namespace) -> int:
    """Run `preflight` with these options."""
    return preflight(reconciler_for(options, tool_runner), for_programs=options.json)


def preflight(reconciler: Reconciler, *, for_programs: bool) -> int:
    """Print all checks. Return 1 if one failed that must pass before a node can be made, otherwise 0."""
    names = chosen(reconciler, "")
    facts = reconciler.preview()[0]
    work = Provisioner(reconciler.config, reconciler.system, HostNetwork(), reconciler.progress).work(names, facts)
    if for_programs:
        checks = [as_object(check) for check in work.checks]
        say([document("preflight", time.time(), {"ok": not work.failed, "checks": checks})])
    else:
        say(in_words(check) for check in work.checks)
    for remark in work.remarks:
        report(f"note: {remark}")
    return 1 if work.failed else 0


# `unbounded-agent reset`: removes a node from the host and, after the last node, restores the host.


def run_reset(options: argparse.Namespace) -> int:
    """Remove the node in the machine that `options` names, even if it is no longer configured. Return the exit code."""
    system = this_host()
    try:
        loaded = load(options, system)
    except NoMachinesError:
        # The configuration file may have been removed together with its last machine.
        loaded = Loaded(Config(machines={}), in_force=False)
    return reset_machine(options.machine, make_reconciler(loaded, system), HostNetwork())


def reset_machine(machine: str, reconciler: Reconciler, network: NetworkSource) -> int:
    """Remove the node, and print what is left to do.

    Return 1 if this was the last node and the host still differs from how it was found, otherwise 0. Raises AgentError.
    """
    if not re.fullmatch(MACHINE_NAME, machine):
        raise ConfigError(f"{machine!a} is no machine's name", "use the name in its table [machines.NAME]")
    _check_known(machine, reconciler)
    others = {name: each for name, each in reconciler.config.machines.items() if name != machine}
    without_machine = Reconciler(
        replace(reconciler.config, machines=others),
        reconciler.system,
        reconciler.devices,
        reconciler.progress,
        memory=reconciler.memory,
        in_force=reconciler.in_force,
    )

    kept = set(others)

    def remove_files() -> tuple[str, ...]:
        # The machine's root file system is removed by now. So a pass without the machine in the configuration removes
        # the files that the agent wrote for the machine.
        outcome = without_machine.reconcile()
        # Machines that are no longer configured, but run or start at boot, keep their settings.
        kept.update(each.name for each in outcome.facts.machines)
        return outcome.failures_of((machine,))

    system = reconciler.system
    with locked(system, PROVISION_LOCK, COMMAND_WAIT, BUSY), machine_locks(system, (machine,), "reset"):
        ending = reset(machine, system, network, remove_files, lambda: not kept, progress)
    for remark in ending.remarks:
        report(f"note: {remark}")
    say(_advice(machine, ending, configured=machine in reconciler.config.machines))
    return report_failures(ending.differences)


def _check_known(machine: str, reconciler: Reconciler) -> None:
    """Raise ConfigError for a machine that is not configured, and of which nothing is left."""
    system, configured = reconciler.system, reconciler.config.machines
    facts, made = observe_node(machine, system), made_nodes(system)
    files = (nspawn_file(machine), unit_drop_in(machine), f"{MACHINES_STATE}/{machine}")
    if machine in configured or machine in made or facts.staged or any(map(system.exists, files)):
        return
    if not isinstance(facts.root, Absent) or not (made or isinstance(observe_found(system), Absent)):
        # The second: `up` has changed the host and was interrupted before it made its first node.
        return
    names = ", ".join(sorted({*configured, *made}))
    raise ConfigError(
        f"there is no machine {machine}: it is not configured, and nothing is left of it",
        f"the machines are {names}" if names else "no machine is configured, and `up` has made none",
    )


def _advice(machine: str, ending: Ending, *, configured: bool) -> list[str]:
    if not ending.done:
        return [f"machine {machine}: nothing to do"]
    host = f"keeps its settings for {', '.join(ending.others)}" if ending.others else "is as it was found"
    lines = [f"machine {machine} is removed" + ("" if ending.differences else f"; the host {host}")]
    if ending.node:
        lines.append(f"its Node object stays: run `kubectl delete node {ending.node}` where you have the right to")
    if configured:
        lines.append(f"it is still configured: `unbounded-agent up {machine}` would make it again")
    return lines
