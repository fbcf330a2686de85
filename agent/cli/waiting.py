"""Waits until API servers answer, and until machines have reported and, if they are nodes, have joined the cluster."""

import time
from collections.abc import Callable, Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from agent.cli.output import started_and_stopped
from agent.host.apply.bootstrap_token import give_token_again
from agent.host.observe.joined import observe_joined
from agent.host.outcome import MachineOutcome, Outcome
from agent.host.provision.preflight import Asking, Check, check_server
from agent.host.provision.secrets import read_token
from agent.host.provision.up import Provisioner, Work
from agent.host.reconcile import Reconciler
from agent.model.conditions import ConditionType, Status
from agent.model.errors import ApplyError
from agent.model.paths import machine_unit, token_file
from agent.model.reasons import Reason
from agent.system.https import ask

JOIN_LIMIT = 300.0
"""Seconds to wait for machines to boot, report and join, in addition to their longest driver_wait."""
SERVER_LIMIT = 900.0
"""Seconds to wait for an API server that does not answer. Often a cluster and its nodes are made at the same time."""
REJOIN_WAIT = 60.0
"""Seconds after which a node that had joined before gets a bootstrap token again. If its certificate is still valid, it
joins sooner."""
SERVER_POLL = 5.0
"""Seconds between two requests to an API server."""
POLL = 0.5
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

    def waiting(self, outcome: Outcome) -> dict[str, str]:
        """Return why machines are not finished yet, by machine; empty if all machines are finished."""
        reasons = {}
        # A machine that is stopping counts as not running. Its last report is still there, and would let it pass for
        # finished.
        ended = {each.name for each in outcome.facts.machines if each.ended or each.unit_state == "deactivating"}
        for machine in self.machines(outcome):
            if machine.pending or machine.name in ended:
                reasons[machine.name] = machine.awaited
            elif not self._joined(machine.name):
                reasons[machine.name] = NOT_JOINED
        return reasons

    def all_ready(self, outcome: Outcome) -> bool:
        """Return whether all machines are ready and have joined."""
        machines = self.machines(outcome)
        return all(each.ready.status is Status.TRUE and self._joined(each.name) for each in machines)

    def start(self) -> tuple[Outcome, tuple[str, ...]]:
        """Make a pass, start stopped machines, and wait for all machines. Return the last outcome, and what failed.

        Any failure ends the wait, except one that concerns only machines that are not in `names`.
        """
        outcome = self.reconciler.reconcile()
        started: set[str] = set()
        failures = (
            outcome.failures_of(self.names)
            + self._start_stopped(outcome, started)
            + self._never_started(outcome, started)
        )
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
        last_sentence, failing, servers = "", frozenset[str](), _Servers(self.reconciler, self.ask)
        tokens = _NewTokens(self.reconciler, self.ask)
        while True:
            time.sleep(POLL)
            outcome = self.reconciler.reconcile()
            failures = outcome.failures_of(self.names) + self._ended(outcome, started)
            failures += self._start_stopped(outcome, started) + self._never_started(outcome, started)
            failing = _failing(outcome, failing)
            waiting = self.waiting(outcome)
            waiting |= {name: _failed(name) for name in failing & waiting.keys()}
            if failures or not waiting:
                return outcome, failures
            problems = {name: servers.problem(name) for name, why in waiting.items() if why == NOT_JOINED}
            now, silent = time.monotonic(), any(each and each.late for each in problems.values())
            if silent and now - began <= SERVER_LIMIT:
                # No kubelet can join through an API server that does not answer, so `limit` counts only from the
                # server's answer on.
                limit_since = now
            elif silent or now - limit_since > limit:
                return outcome, tuple(
                    _timed_out(name, why, problems.get(name), now - began, tokens.refused.get(name, ""))
                    for name, why in waiting.items()
                )
            tokens.offer(name for name, problem in problems.items() if problem is None)
            sentence = "; ".join(_progress(name, why, problems.get(name)) for name, why in waiting.items())
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


class _Servers(Struct):
    """Checks the API servers of machines that have not joined, each at most once in SERVER_POLL seconds."""

    reconciler: Reconciler
    ask: Asking
    asked_at: dict[str, float] = field(default_factory=dict)
    problems: dict[str, Check | None] = field(default_factory=dict)

    def problem(self, name: str) -> Check | None:
        """Return the failed check that shows why a machine cannot join; None if no check fails on this host."""
        node, now = self.reconciler.config.machines[name].node, time.monotonic()
        if node and now - self.asked_at.get(name, now - SERVER_POLL) >= SERVER_POLL:
            system = self.reconciler.system
            # Check the token only if the machine has one. If its node has joined before, it has none left, and rarely
            # needs one: see _NewTokens.
            checks = check_server(node, system, self.ask, with_token=system.exists(token_file(name)))
            self.asked_at[name] = now
            self.problems[name] = next((check for check in checks if not check.passed), None)
        return self.problems.get(name)


class _NewTokens(Struct):
    """Gives bootstrap tokens to nodes that had joined before, because their kubelets' certificates may have expired.

    A kubelet whose certificate is still valid ignores the token (LoadClientConfig in
    pkg/kubelet/certificate/bootstrap).
    """

    reconciler: Reconciler
    ask: Asking
    since: dict[str, float] = field(default_factory=dict)
    """By machine: since when its node has not joined although no check fails on this host."""
    refused: dict[str, str] = field(default_factory=dict)
    """By machine: why its node got no token, in words; empty if the node got one, or needs none."""

    def offer(self, names: Iterable[str]) -> None:
        """Give a token to each of these nodes, once, after it has waited for REJOIN_WAIT seconds. Raises AgentError."""
        now = time.monotonic()
        self.since = {name: self.since.get(name, now) for name in names}
        for name, since in self.since.items():
            if now - since > REJOIN_WAIT and name not in self.refused and (refused := self._give(name)) is not None:
                self.refused[name] = refused

    def _give(self, name: str) -> str | None:
        """Give a node its token again, unless it needs none. Raises AgentError.

        Return why the node cannot get a token. The text is empty if the node got one, or needs none. Return None if the
        API server did not answer.
        """
        node, system = self.reconciler.config.machines[name].node, self.reconciler.system
        if not node or not node.bootstrap_token or system.exists(token_file(name)):
            return ""
        if failed := next((each for each in check_server(node, system, self.ask) if not each.passed), None):
            if failed.late:
                return None
            why = f"{failed.message} ({failed.advice})"
            return f"if its certificate has expired, it needs a valid bootstrap token: {why}"
        what = f"give machine {name} the bootstrap token of {node.bootstrap_token} again"
        self.reconciler.progress(f"{what}, in case its kubelet's certificate has expired")
        try:
            give_token_again(name, read_token(node.bootstrap_token, system), system)
        except OSError as error:
            raise ApplyError(f"cannot {what}: {error.strerror}") from error
        return ""


def _progress(name: str, why: str, problem: Check | None) -> str:
    if problem is None:
        return f"{name}: waiting: {why}"
    return f"{name}: waiting: {why}: {problem.message} ({LIMIT_NOTE if problem.late else problem.advice})"


def _timed_out(name: str, why: str, problem: Check | None, waited: float, no_token: str) -> str:
    what = f"machine {name} was not ready within {waited:.0f} s: {why}"
    if problem is None and why == NOT_JOINED:
        again = no_token or f"then run `unbounded-agent up {name}` again"
        return f"{what} (see `journalctl -M {name} -u kubelet`; {again})"
    if problem is None:
        return f"{what} (see `unbounded-agent doctor`, then run the same command again)"
    if problem.late:
        return f"{what}: {problem.message} ({problem.advice}; then run `unbounded-agent up {name}` to continue)"
    return f"{what}: {problem.message} ({problem.advice})"
