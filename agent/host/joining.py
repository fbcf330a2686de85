"""Starts machines, and waits until they are ready and their kubelets have joined."""

import time
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from agent.host.apply.steps import give_token_again
from agent.host.gpu_recovery import begin
from agent.host.observe.machine import observe_joined
from agent.host.provision.node_files import read_token
from agent.host.provision.preflight import Asking, check_server
from agent.host.provision.up import Provisioner, Work
from agent.host.reconcile import MachineOutcome, Outcome, Reconciler, started_and_stopped
from agent.model.conditions import Condition, ConditionType, Reason, Status
from agent.model.errors import AgentError
from agent.model.node import Check
from agent.model.paths import machine_unit, token_file
from agent.system.http import ask

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
TEST_LIMIT = 900.0
"""Seconds in addition until the GPUs of a machine with test_gpus are tested: up to a minute for each of eight, and what
did not succeed is begun again."""
LIMIT_NOTE = f"this command waits at most {SERVER_LIMIT / 60:.0f} minutes for its answer"
NOT_JOINED = "its kubelet has not joined the cluster yet"


def wait_for_servers(provisioner: Provisioner, check_all: Callable[[], Work], reconciler: Reconciler) -> Work:
    """Wait until all API servers answer, or another check fails. Return the last result of `check_all`.

    If a server still does not answer after SERVER_LIMIT seconds, the result has the failed check of that server.
    """
    until, work = time.monotonic() + SERVER_LIMIT, check_all()

    def look() -> tuple[tuple[Check, ...], str]:
        late = provisioner.late(work)
        said = "; ".join(dict.fromkeys(check.message for check in late))
        return late, f"waiting: {said}; {LIMIT_NOTE}" if late else ""

    while work.failed and all(check.late for check in work.failed):
        if reconciler.wait(look, until - time.monotonic(), SERVER_POLL):
            gave_up = f"; gave up after {SERVER_LIMIT / 60:.0f} minutes"
            checks = (replace(each, message=each.message + gave_up) if each.late else each for each in work.checks)
            return replace(work, checks=tuple(checks))
        work = check_all()
    return work


class Watch(Struct, frozen=True):
    """The machines that a command starts and waits for."""

    reconciler: Reconciler
    names: tuple[str, ...]
    ask: Asking = ask
    limit: float = 0.0
    """Seconds in place of JOIN_LIMIT and driver_wait, for a caller that knows better; 0 for these."""

    def machines(self, outcome: Outcome) -> tuple[MachineOutcome, ...]:
        """Return the outcomes of these machines, without those of other machines."""
        return tuple(each for each in outcome.machines if each.name in self.names)

    def waiting(self, outcome: Outcome) -> dict[str, str | None]:
        """Return why machines are not finished yet, by machine; empty if all machines are finished.

        None means that only the machine's kubelet has not joined the cluster yet.
        """
        # A machine that is stopping counts as not running. Its last report is still there, and would let it pass for
        # finished.
        ended = {each.name for each in outcome.facts.machines if each.ended or each.unit_state == "deactivating"}
        reasons: dict[str, str | None] = {}
        for machine in self.machines(outcome):
            if machine.pending or machine.name in ended:
                reasons[machine.name] = machine.awaited
            elif not self._joined(machine.name):
                reasons[machine.name] = None
            elif machine.ready.status is Status.TRUE and _tested(machine).status is Status.UNKNOWN:
                reasons[machine.name] = _tested(machine).message
        return reasons

    def all_ready(self, outcome: Outcome) -> bool:
        """Return whether all machines are ready and have joined, and their GPUs have passed the test if they must."""
        machines = self.machines(outcome)
        tested = all(_tested(each).status is Status.TRUE for each in machines)
        return tested and all(each.ready.status is Status.TRUE and self._joined(each.name) for each in machines)

    def _joined(self, name: str) -> bool:
        """Return whether the machine has joined and its bootstrap token is removed; True without node settings."""
        system = self.reconciler.system
        joined = bool(observe_joined(name, system)) and not system.exists(token_file(name))
        return joined or self.reconciler.config.machines[name].node is None

    def start(self) -> tuple[Outcome, tuple[str, ...]]:
        """Make a pass, start stopped machines, and wait for all machines. Return the last outcome, and what failed.

        Any failure ends the wait, except one that concerns only machines that are not in `names`.
        """
        outcome, started = self.reconciler.reconcile(), set[str]()
        failures = outcome.failures_of(self.names) + self._start_stopped(outcome, started)
        return (outcome, failures) if failures else self._wait(started | _running(outcome))

    def _begin_test(self, outcome: Outcome) -> None:
        """Begin what the service would begin: it may not run."""
        try:
            begin(self.reconciler.config, self.reconciler.system, outcome)
        except (AgentError, OSError) as error:
            self.reconciler.progress(f"cannot begin the test of the GPUs: {error}")

    def _start_stopped(self, outcome: Outcome, started: set[str]) -> tuple[str, ...]:
        """Start stopped machines that have their settings and are not in `started`; add them to it.

        Return what failed, with a sentence for each machine that does not run, and will not start before the user does
        something.
        """
        failures: tuple[str, ...] = ()
        facts = {each.name: each for each in outcome.facts.machines}
        for machine in self.machines(outcome):
            name, seen, running = machine.name, facts[machine.name], machine.condition(ConditionType.MACHINE_RUNNING)
            if machine.stopped and machine.startable and name not in started:
                started.add(name)
                failures += self.reconciler.start(name)
            # If a machine's settings files belong to another program, the agent neither changes nor starts the machine.
            foreign = seen.ended and machine.condition(ConditionType.DEVICES_ALLOWED).reason == Reason.FOREIGN_FILE
            if running.reason == Reason.NO_SUCH_MACHINE:
                failures += (running.message,)
            elif seen.masked and seen.ended:
                unmask = f"`systemctl unmask {machine_unit(name)}`"
                failures += (f"{name} was not started, because its unit is masked: run {unmask} first",)
            elif foreign or (machine.stopped and name not in started):
                failures += (
                    f"{name} was not started, because its settings files are missing or not the agent's, or "
                    "systemd has not read them yet (see `unbounded-agent plan`)",
                )
        return failures

    def _wait(self, started: set[str]) -> tuple[Outcome, tuple[str, ...]]:
        """Wait until all machines are finished, something fails, or time is up. Return the same as `start`."""
        settings = [self.reconciler.config.machines[name] for name in self.names]
        must_test = any(each.test_gpus for each in settings)
        limit = self.limit or JOIN_LIMIT + max(each.driver_wait for each in settings)
        limit += TEST_LIMIT * must_test
        began = limit_since = time.monotonic()
        last_sentence, failing, joining = "", set[str](), dict[str, _Joining]()
        while True:
            time.sleep(NODE_POLL)
            outcome = self.reconciler.reconcile()
            if must_test:
                self._begin_test(outcome)
            facts = {each.name: each for each in outcome.facts.machines}
            # A machine that was started, and no longer runs, is a failure even if no pass saw it run: its start may
            # have failed between two passes.
            ended = started & {name for name, each in facts.items() if each.stays_ended}
            failures = outcome.failures_of(self.names)
            failures += tuple(started_and_stopped(name) for name in self.names if name in ended)
            # A machine in `started` is not started again. So a machine that runs now stays stopped if somebody stops
            # it.
            started |= _running(outcome)
            failures += self._start_stopped(outcome, started)
            # Machines that have failed, that systemd starts again, and that have not run since they failed.
            failing |= {name for name, each in facts.items() if each.restarts}
            failing -= {name for name, each in facts.items() if each.unit_state == "active"}
            waiting = self.waiting(outcome)
            for name in failing & waiting.keys():
                log = f"`journalctl -e -u {machine_unit(name)}`"
                waiting[name] = f"it has failed, and systemd starts it again: see {log}"
            if failures or not waiting:
                return outcome, failures
            joins = (name for name, why in waiting.items() if why is None)
            joining = {name: joining.get(name) or _Joining(name, self.reconciler, self.ask) for name in joins}
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


def _tested(machine: MachineOutcome) -> Condition:
    return machine.condition(ConditionType.GPUS_TESTED)


def _running(outcome: Outcome) -> set[str]:
    return {each.name for each in outcome.facts.machines if each.unit_state in ("active", "activating")}


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
