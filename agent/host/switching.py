"""Switches a machine to another root file system, in which it is the same Node, and goes back if that fails."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from msgspec import Struct

from agent.config.settings import Config
from agent.host.apply.steps import apply
from agent.host.joining import Watch
from agent.host.leave import NoAnswerError, clear, pass_images, try_programs, uncordon, was_drained
from agent.host.provision.apply import performers
from agent.host.provision.node_files import NodeRecord, is_others_candidate, root_record
from agent.host.provision.plan import (
    ExchangeRoots,
    ForgetCandidate,
    KeepIdentity,
    NodeStep,
    PublishCandidate,
    PutAside,
    RecordSwitch,
    RemoveTree,
    StopMachine,
)
from agent.host.reconcile import Outcome, Reconciler
from agent.host.state.locks import COMMAND_WAIT, locked, machine_locks
from agent.host.state.records import mark_start
from agent.host.state.switches import RECORDS, State, Switch, read_switches
from agent.model.conditions import ConditionType, Status
from agent.model.errors import AgentError
from agent.model.paths import PROVISION_LOCK, candidate_of, machine_root, other_root, switch_record
from agent.system.files import System
from agent.system.network import HostNetwork, NetworkSource
from agent.system.systemd import list_units, queue_job

UNIT = "unbounded-agent-switch.service"
"""Ends what a killed command or a power cut interrupted, and removes former root file systems."""
OFFER_LIMIT = 300.0
SLOWER, SHORTEST_WAIT = 3, 180.0
"""A machine that serves pods may boot so many times slower than its candidate, and is given at least so many seconds.
Each second counts: if the machine does not become ready, nothing runs in it until it has gone back."""
BUSY = "another `unbounded-agent up`, `switch` or `reset` is still running"
WENT_BACK = "the former root file system serves again"


class Switching(Struct, frozen=True):
    """One machine's switch. Its caller holds the `locks`."""

    reconciler: Reconciler
    name: str
    network: NetworkSource

    @property
    def _system(self) -> System:
        return self.reconciler.system

    def _run(self, *steps: NodeStep) -> None:
        apply(steps, self._system, self.reconciler.progress, performers(self.network))

    @contextmanager
    def locks(self) -> Iterator[None]:
        """Hold the locks that a switch needs. Raises AgentError if another command has one."""
        machines = (self.name, candidate_of(self.name))
        with locked(self._system, PROVISION_LOCK, COMMAND_WAIT, BUSY), machine_locks(self._system, machines, "switch"):
            yield

    def _record(self, state: State, reason: str = "", *, image: str = "", keep: bool = False) -> None:
        """Record the state. Without `image`, it is the one of the next root file system."""
        record = root_record(self.name, "next", self._system)
        name = image or (record.image.name if isinstance(record, NodeRecord) else "another image")
        self._run(RecordSwitch(self.name, Switch(state, name, time.time(), reason, keep)))

    def sentences(self, steps: tuple[NodeStep, ...]) -> tuple[str, ...]:
        """Return all that a switch does, in sentences."""
        first, last = (
            f"start machine {each}, and wait until it is ready" for each in (candidate_of(self.name), self.name)
        )
        return (
            *(each.describe() for each in steps),
            first,
            f"run the programs of a node in machine {candidate_of(self.name)}, without an effect",
            f"pass the images of machine {self.name}'s containers to machine {candidate_of(self.name)}",
            f"stop machine {candidate_of(self.name)}",
            f"move the pods of machine {self.name} to other nodes",
            f"stop machine {self.name}",
            *(each.describe() for each in self._exchange()),
            last,
        )

    def _exchange(self) -> tuple[NodeStep, ...]:
        return KeepIdentity(self.name), ExchangeRoots(self.name, "next")

    def refuse_loss(self, steps: tuple[NodeStep, ...]) -> None:
        """Raise AgentError if the steps would remove a root file system that a user wanted to keep."""
        other, before = other_root(self.name), RECORDS.read(switch_record(self.name), self._system)
        # If going back has failed, the former one is still aside.
        if before and before.keep and not self.serves("former") and RemoveTree(other) in steps:
            what = f"{other}, the former root file system, has files that the present one lacks"
            raise AgentError(what, f"copy them, then run `unbounded-agent switch {self.name} --forget`")

    def make(self, steps: tuple[NodeStep, ...]) -> float:
        """Make the candidate, boot it and wait until it is ready. Raises AgentError; the machine serves on.

        Return for how many seconds to wait for the machine, when it boots with the same root file system.

        A candidate proves what a machine's Ready means: each GPU opens, the CDI specification is verified, containerd
        answers. Its kubelet only shows that it runs at all.
        """
        images = [each.record.image.name for each in steps if isinstance(each, PublishCandidate)]
        self._record("trying", image=images[0] if images else "")
        self._run(StopMachine(candidate_of(self.name)))
        self._run(*steps)
        began = time.monotonic()
        self._start(candidate_of(self.name))
        took = time.monotonic() - began
        self._try_programs()
        return max(SLOWER * took, SHORTEST_WAIT)

    def _try_programs(self) -> None:
        progress = self.reconciler.progress
        try:
            try_programs(candidate_of(self.name), self._system, progress)
        except NoAnswerError as error:
            progress(f"whether its kubelet runs shows only after the switch: {error}")

    def pass_images(self) -> None:
        """Give the images of the machine's containers to its candidate: later, pods need not pull them."""
        progress = self.reconciler.progress
        progress(f"machine {self.name} passes the images of its containers to its candidate")
        try:
            pass_images(self.name, candidate_of(self.name), self._system, progress)
        except (AgentError, OSError) as error:
            progress(f"images are pulled again after the switch: {error}")

    def hold_back(self) -> None:
        """Stop the candidate. Its root file system waits for its turn."""
        if not is_others_candidate(self.name, self._system):
            self._run(StopMachine(candidate_of(self.name)), PutAside(self.name), ForgetCandidate(self.name))

    def give_up(self, why: str) -> None:
        """Stop the candidate, and record why the machine serves on as before."""
        self.hold_back()
        self._record("failed", why)

    def hand_over(self, *, keep: bool, limit: float = 0.0) -> None:
        """Stop the machine, and start it with the next root file system. If it is not ready then, go back.

        If it has that root file system already, only wait until it is ready. `keep` says whether the former one has
        files that are needed; `limit`, how many seconds to wait, as `make` returns it. Raises AgentError after going
        back.
        """
        self._record("handing over", keep=keep)
        try:
            if not self.serves("next"):
                self._stop()
            self._run(*self._exchange())
            self._start(self.name, limit)
        except (AgentError, OSError, KeyboardInterrupt) as error:
            why = "it was interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            self.go_back(why, keep=keep)
            raise AgentError(f"machine {self.name} was not switched: {why}", WENT_BACK) from error
        self._record("done", keep=keep)

    def go_back(self, why: str, *, keep: bool = False) -> None:
        """Let the former root file system serve again, and record why. Raises AgentError if it is not ready."""
        self.reconciler.progress(f"going back to the former root file system: {why}")
        # Without this record, the switch counts as interrupted, and goes back as well.
        with suppress(AgentError, OSError):
            self._record("handing over", why, keep=keep)
        failures = list[str]()
        # Whatever fails, for example because the disk is full, the machine starts.
        for part in (self._let_former_serve, partial(self._start, self.name)):
            try:
                part()
            except (AgentError, OSError) as error:
                failures.append(str(error))
        if failures:
            # This is the end all the same: repeated stops would be worse than a machine that is not ready.
            why = f"{why}; and then, going back: {'; '.join(failures)}"
            self._record("failed", why, keep=keep)
            raise AgentError(f"machine {self.name} was not switched, and is not ready: {why}")
        self._record("failed", why)

    def _let_former_serve(self) -> None:
        if served := self.serves("next"):
            self._stop()
        # If they have changed places already, the record of the node may not have followed.
        if served or self.serves("former"):
            self._run(ExchangeRoots(self.name, "former"))

    def go_on(self) -> None:
        """End a switch that was interrupted: the next root file system must become ready, or the former one serves."""
        switch = RECORDS.read(switch_record(self.name), self._system)
        if switch is None or switch.state in ("done", "failed"):
            return
        clear(self.name, candidate_of(self.name), self._system, self.reconciler.progress)
        try:
            self._end(switch)
        finally:
            self._uncordon()

    def _uncordon(self) -> None:
        """Let the machine uncordon its node if it has drained it: the command that would have done that is gone."""
        try:
            if was_drained(self.name, self._system) and self.is_ready(self.reconciler.reconcile()):
                self.wait_for_offer()
                uncordon(self.name, self._system, self.reconciler.progress)
        except (AgentError, OSError) as error:
            again = f"run `unbounded-agent start {self.name}`"
            self.reconciler.progress(f"the node of machine {self.name} is still cordoned: {error}; {again}")

    def _end(self, switch: Switch) -> None:
        if switch.state == "trying":
            self.give_up("it was interrupted")
        elif switch.state == "handing over":
            if switch.reason or not self.serves("next"):
                self.go_back(switch.reason or "it was interrupted", keep=switch.keep)
            else:
                self.hand_over(keep=switch.keep)

    def serves(self, which: str) -> bool:
        """Return whether the `next` or the `former` root file system has the machine's name."""
        record = root_record(self.name, which, self._system)
        return isinstance(record, NodeRecord) and record.is_at(machine_root(self.name), self._system)

    def is_ready(self, outcome: Outcome) -> bool:
        """Return whether the machine is ready and has joined, and its GPUs have passed the test if they must."""
        return Watch(self.reconciler, (self.name,)).all_ready(outcome)

    def offers_gpus(self) -> bool:
        """Return whether the node offers the machine's GPUs to pods, as far as the machine knows."""
        machines = self.reconciler.reconcile().machines
        offers = (each.condition(ConditionType.GPUS_ADVERTISED).status for each in machines if each.name == self.name)
        return next(offers, Status.UNKNOWN) is Status.TRUE

    def wait_for_offer(self) -> None:
        """Wait until the device plugin offers GPUs again, for OFFER_LIMIT seconds at most.

        Until then, the Node may have the count of the former root file system: a pod that the scheduler sends there
        would start without its GPU, because the new one has no record of the plugin.
        """

        def look() -> tuple[None, str]:
            return None, "" if self.offers_gpus() else "waiting until the device plugin offers the GPUs again"

        self.reconciler.wait(look, OFFER_LIMIT)

    def forget(self) -> None:
        """Remove the root file system that does not serve."""
        self._run(RemoveTree(other_root(self.name)))

    def _stop(self) -> None:
        # Otherwise, the service would start a machine that has not run since the host booted.
        mark_start(self.name, self._system)
        self._run(StopMachine(self.name))

    def _start(self, machine: str, limit: float = 0.0) -> None:
        """Start a machine and wait until it is ready and, if it is a node, has joined. Raises AgentError."""
        watch = Watch(self.reconciler, (machine,), limit=limit)
        outcome, failures = watch.start()
        if not failures and not watch.all_ready(outcome):
            failures = tuple(f"machine {machine} is not ready: {each.awaited}" for each in watch.machines(outcome))
        if failures:
            raise AgentError("; ".join(failures))


def work(reconciler: Reconciler, network: NetworkSource | None = None) -> tuple[str, ...]:
    """End each switch that was interrupted, and remove former root file systems whose time is over.

    Return what failed, in sentences.
    """
    failures, system, configured = list[str](), reconciler.system, reconciler.config.machines
    for name in [each for each in read_switches(system) if each in configured and _is_free(each, system)]:
        switching = Switching(reconciler, name, network or HostNetwork())
        try:
            with switching.locks():
                switching.go_on()
                switch = read_switches(system).get(name)
                if switch and _is_over(name, switch, reconciler.config, reconciler.reconcile()):
                    switching.forget()
        except (AgentError, OSError) as error:
            failures.append(str(error))
    return tuple(failures)


def begin(config: Config, system: System, outcome: Outcome) -> None:
    """Start the unit if a switch was interrupted, or a former root file system is to be removed. Raises AgentError."""
    due = [
        name
        for name, switch in read_switches(system).items()
        if name in config.machines
        and (
            switch.state in ("trying", "handing over")
            or (_is_over(name, switch, config, outcome) and _has(name, system))
        )
    ]
    if any(_is_free(name, system) for name in due) and not _runs(system):
        queue_job("StartUnit", UNIT, system)


def _has(name: str, system: System) -> bool:
    return system.link_inode(other_root(name)) is not None


def _is_over(name: str, switch: Switch, config: Config, outcome: Outcome) -> bool:
    """Return whether the machine has been ready with its new root file system for as long as the former one is kept."""
    node = config.machines[name].node
    if switch.state != "done" or switch.keep or node is None:
        return False
    ready = next((each.ready for each in outcome.machines if each.name == name), None)
    since = max(switch.since, ready.last_transition if ready else 0.0)
    return ready is not None and ready.status is Status.TRUE and time.time() - since >= node.keep_former * 3600


def _runs(system: System) -> bool:
    (unit,) = list_units([UNIT], system)
    return unit.starts or unit.active_state not in ("inactive", "failed")


def _is_free(name: str, system: System) -> bool:
    """Return whether no command works on the machine: if that is a switch, it ends that itself."""
    try:
        with locked(system, PROVISION_LOCK, 0.0, BUSY), machine_locks(system, (name,), "run", 0.0):
            return True
    except AgentError:
        return False
