"""Starts machines, and waits until they have reported and, if they are nodes, joined."""

import time
from dataclasses import dataclass

from agent.host.outcome import MachineOutcome, Outcome
from agent.host.provision.observe import observe_joined
from agent.host.reconcile import Reconciler
from agent.model.conditions import Status

JOIN_LIMIT = 300.0
"""Seconds to wait for machines to boot, report and join, in addition to their longest driver_wait."""
PASS_WAIT = 60.0
"""Seconds to wait for another pass to end: the service may be staging a driver root."""
POLL = 0.5
"""Seconds between two passes while machines boot."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Some of the configured machines."""

    reconciler: Reconciler
    names: tuple[str, ...]
    limit: float = JOIN_LIMIT

    def machines(self, outcome: Outcome) -> tuple[MachineOutcome, ...]:
        """Return the machines' outcomes."""
        return tuple(each for each in outcome.machines if each.name in self.names)

    def node(self, name: str) -> str:
        """Return the name of the Node object as which the machine has joined; empty if it has not."""
        return observe_joined(name, self.reconciler.system)

    def waiting(self, outcome: Outcome) -> dict[str, str]:
        """Return why machines are waited for, by name."""
        found = {}
        for machine in self.machines(outcome):
            if machine.pending or machine.stopped:
                found[machine.name] = machine.ready.message
            elif not self._joined(machine.name):
                found[machine.name] = "its kubelet has not joined the cluster yet"
        return found

    def all_ready(self, outcome: Outcome) -> bool:
        """Return whether all are ready and have joined."""
        machines = self.machines(outcome)
        return all(each.ready.status is Status.TRUE and self._joined(each.name) for each in machines)

    def start(self) -> tuple[Outcome, tuple[str, ...]]:
        """Make a pass, start what is stopped, and wait. Return the last outcome, and failures."""
        outcome = self.reconciler.reconcile(PASS_WAIT)
        failures = outcome.failures
        for machine in self.machines(outcome):
            if machine.stopped and machine.startable:
                failures += self.reconciler.start(machine.name)
            elif machine.stopped:
                failures += (f"{machine.name} was not started, because its settings are not written",)
        return (outcome, failures) if failures else self._wait()

    def _wait(self) -> tuple[Outcome, tuple[str, ...]]:
        limit = self.limit + max(self.reconciler.config.machines[name].driver_wait for name in self.names)
        started, said = time.monotonic(), ""
        while True:
            time.sleep(POLL)
            outcome = self.reconciler.reconcile(PASS_WAIT)
            waiting = self.waiting(outcome)
            if outcome.failures or not waiting:
                return outcome, outcome.failures
            if time.monotonic() - started > limit:
                return outcome, tuple(_late(name, why, limit) for name, why in waiting.items())
            sentence = "; ".join(f"{name}: waiting: {why}" for name, why in waiting.items())
            if sentence != said:
                self.reconciler.progress(sentence)
                said = sentence

    def _joined(self, name: str) -> bool:
        return self.reconciler.config.machines[name].node is None or bool(self.node(name))


def _late(name: str, why: str, limit: float) -> str:
    advice = (
        f"see `journalctl -M {name} -u kubelet`; if the bootstrap token has expired meanwhile, make a new one and run "
        f"`unbounded-agent up --rebuild {name}`"
    )
    return f"machine {name} is not ready within {limit:.0f} s: {why} ({advice})"
