"""Random sequences of what happens to a host, to its administrator's settings, and to the agent itself.

Cards are plugged, pulled, lost, detached, bound to other drivers and to other minors; MIG instances and driver versions
come and go; two machines start, stop, report late, badly or never; the host reboots; the configuration changes; files
of the agent are removed, damaged or replaced; and each of the agent's steps may fail, be carried out without an answer,
or be the last one of its process. tests/fakes/at_rest.py says what must hold. EVENTS=1000 explores more, at random.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from agent.cli.prepare import prepare
from agent.config.settings import Config
from agent.host.reconcile import Reconciler
from agent.host.state.gpus import forget_detached, record_detached
from agent.model.errors import AgentError
from agent.model.paths import TREES, handoff_file, machine_root, nspawn_file, unit_drop_in
from tests.fakes.at_rest import agent_files, check_outcome, check_permissions, check_rest
from tests.fakes.faults import Fault, KilledError
from tests.fakes.lively_host import LivelyHost

MACHINES = ("a", "b")
SLOTS = tuple(f"0000:0{number}:00.0" for number in range(1, 4))
VERSIONS = ("550.163.01", "580.95.05")
ROUNDS = 8
"""Passes, each after the machines' reports, until a pass changes nothing. Three are usual."""
PATIENCE = 700.0
"""Seconds after which the host no longer waits for a machine's report, and tries a removal again."""
EXAMPLES = int(os.environ.get("EVENTS", "8"))

slots, machines, minors, booleans = st.sampled_from(SLOTS), st.sampled_from(MACHINES), st.integers(0, 3), st.booleans()
versions = st.sampled_from(("", *VERSIONS))
gpus = st.sampled_from(("all", "count=1", "count=2", [SLOTS[0]], [SLOTS[1], SLOTS[2]], [SLOTS[0], SLOTS[1]]))
configured = st.fixed_dictionaries(
    {"gpus": gpus, "driver_wait": st.just(0)},
    optional={
        "device_mode": st.just("rwm"),
        "extra_devices": st.just([{"path": "/dev/fuse", "mode": "rw"}]),
        "mig_config": st.just(True),
        "allocation": st.just("dra"),
        "node_condition": st.just(True),
        "nspawn": st.just({"environment": {"A": "B"}}),
    },
)
faults = st.builds(
    Fault, st.sampled_from(("kill before", "kill within", "kill after", "refuse", "silent")), st.integers(0, 30)
)


class Events(RuleBasedStateMachine):
    """A host with three slots and two machines."""

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.ahead = tempfile.mkdtemp(), 0.0
        """Seconds that have passed in addition to the real ones."""
        wall, monotonic = time.time, time.monotonic
        self.clocks = (
            patch.object(time, "time", lambda: wall() + self.ahead),
            patch.object(time, "monotonic", lambda: monotonic() + self.ahead),
        )
        for clock in self.clocks:
            clock.start()
        self.host = LivelyHost(Path(self.tree), MACHINES)
        self.host.driver(VERSIONS[0])
        self.host.install(VERSIONS[0])
        self.host.node("/dev/fuse", 10, 229)
        self.settings: dict[str, object] = {}
        self.agent = self.new_agent()

    def teardown(self) -> None:
        for clock in self.clocks:
            clock.stop()
        shutil.rmtree(self.tree)

    def new_agent(self) -> Reconciler:
        return Reconciler(Config.validated({"machines": self.settings}), self.host, self.host)

    @initialize(first=configured, second=st.none() | configured)
    def begin(self, first: dict[str, object], second: dict[str, object] | None) -> None:
        for number, slot in enumerate(SLOTS[:2]):
            self.host.plug(number, slot, number)
        self.configure(first, second)
        self.make_pass()

    # ---- cards and their driver

    @rule(card=st.integers(0, 4), address=slots, minor=minors, with_node=booleans)
    def plug(self, card: int, address: str, minor: int, with_node: bool) -> None:
        self.host.plug(card, address, minor, with_node=with_node)

    @rule(address=slots)
    def pull(self, address: str) -> None:
        self.host.pull(address)

    @rule(address=slots)
    def lose(self, address: str) -> None:
        self.host.lose(address)

    @rule(address=slots)
    def make_node(self, address: str) -> None:
        self.host.make_node(address)

    @rule(address=slots, driver=st.sampled_from(("", "vfio-pci", "nouveau")), keep_node=booleans)
    def unbind(self, address: str, driver: str, keep_node: bool) -> None:
        self.host.unbind(address, driver, keep_node=keep_node)

    @rule(address=slots, minor=minors, with_node=booleans)
    def bind(self, address: str, minor: int, with_node: bool) -> None:
        self.host.bind(address, minor, with_node=with_node)

    @rule(order=st.permutations(SLOTS))
    def reload_driver(self, order: list[str]) -> None:
        """The driver finds the cards in another order."""
        for address in SLOTS:
            self.host.unbind(address)
        for address in order:
            self.host.bind(address, 0)

    @rule(address=slots, instance=st.integers(1, 2))
    def make_mig(self, address: str, instance: int) -> None:
        self.host.make_mig(address, instance)

    @rule(minor=minors)
    def destroy_mig(self, minor: int) -> None:
        self.host.destroy_mig(minor)

    @rule(version=versions)
    def install(self, version: str) -> None:
        self.host.install(version)

    @rule(version=versions)
    def load_module(self, version: str) -> None:
        self.host.load_module(version)

    @rule(address=slots, draining=st.none() | booleans)
    def detach_or_attach(self, address: str, draining: bool | None) -> None:
        if draining is None:
            forget_detached(self.host, address)
        else:
            record_detached(self.host, address, draining=draining)

    # ---- machines

    @rule(name=machines)
    def start(self, name: str) -> None:
        self.host.start(name, self.prepare)

    @rule(name=machines, fault=faults)
    def start_with_fault(self, name: str, fault: Fault) -> None:
        self.host.fault, self.host.struck = fault, False
        self.host.start(name, self.prepare)
        self.host.fault = None

    @rule(name=machines)
    def start_without_agent(self, name: str) -> None:
        self.host.start(name, lambda _: None)

    def prepare(self, name: str) -> None:
        """Run unbounded-agent-prepare@. Its failure stops no machine."""
        try:
            prepare(name, self.new_agent())
        except (AgentError, OSError, KilledError):
            assert self.host.struck or name not in self.settings

    @rule(name=machines)
    def stop(self, name: str) -> None:
        self.host.stop(name)

    @rule(name=machines)
    def remove_machine(self, name: str) -> None:
        self.host.remove_machine(name)

    @rule(name=machines)
    def make_machine(self, name: str) -> None:
        self.host.make_directory(machine_root(name))

    @rule(name=machines, well=booleans)
    def answer(self, name: str, well: bool) -> None:
        self.host.answer(name, well=well)

    @rule(name=machines)
    def fall_silent(self, name: str) -> None:
        if running := self.host.running.get(name):
            running.reports = False

    @rule()
    def boot(self) -> None:
        self.host.boot()
        self.agent = self.new_agent()

    @rule(seconds=st.sampled_from((1.0, 220.0)))
    def wait(self, seconds: float) -> None:
        self.ahead += seconds

    # ---- the administrator

    @rule(first=st.none() | configured, second=st.none() | configured)
    def configure(self, first: dict[str, object] | None, second: dict[str, object] | None) -> None:
        self.settings = {name: each for name, each in (("a", first), ("b", second)) if each}
        self.agent = self.new_agent()

    @rule()
    def reload_units(self) -> None:
        self.host.reload()

    @rule(
        name=machines,
        what=st.sampled_from(("tree", *agent_files(""))),
        content=st.sampled_from((None, b"", b"{", b"[Service]\n")),
    )
    def spoil(self, name: str, what: str, content: bytes | None) -> None:
        """Somebody removes or replaces a file of the agent."""
        if what == "tree":
            self.host.remove_tree(f"{TREES}/0")
        elif self.host.exists(path := agent_files(name)[what]):
            self.host.remove(path)
            if content is not None:
                self.host.file(path, content)
        self.host.update_units()

    # ---- the agent

    @rule()
    def make_pass(self) -> None:
        check_outcome(self.agent.run_pass(), self.host)
        while self.host.wanted:
            self.host.start(self.host.wanted.pop(), self.prepare)

    @rule(fault=faults)
    def make_pass_with_fault(self, fault: Fault) -> None:
        self.host.fault, self.host.struck = fault, False
        try:
            self.agent.reconcile()
        except (AgentError, OSError, KilledError):
            assert self.host.struck
            self.agent = self.new_agent()
        finally:
            self.host.fault = None

    @rule(after=st.integers(0, 120))
    def look_in_vain(self, after: int) -> None:
        """If nothing has changed, one failed look takes nothing from anybody."""
        self.settle()
        before, self.host.blind = self.given(), after
        try:
            self.agent.reconcile()
        except (AgentError, OSError):
            assert self.host.blind < 0
        finally:
            self.host.blind = None
        assert self.given() == before, self.host.unseen

    def given(self) -> tuple[dict[str, bytes], dict[str, set[str]]]:
        paths = [path(name) for path in (nspawn_file, unit_drop_in) for name in MACHINES]
        # Nobody reads the handoff of a machine that does not run.
        paths += [handoff_file(name) for name in self.host.running]
        files = {path: self.host.read(path) for path in paths if self.host.exists(path)}
        return files, {name: {*each.allow} for name, each in self.host.running.items()}

    @rule()
    def rest(self) -> None:
        self.settle()
        self.wait(PATIENCE)
        self.settle()
        check_rest(self.agent, self.new_agent(), self.host)

    def settle(self) -> None:
        """Let the machines report and make passes, until there is nothing left to do."""
        resting = 0
        for _ in range(ROUNDS):
            for name in [name for name, each in self.host.running.items() if each.reports]:
                self.host.answer(name)
            outcome = self.agent.reconcile()
            check_outcome(outcome, self.host)
            if not outcome.failures:
                check_permissions(self.agent, self.host)
            resting = 0 if outcome.actions or outcome.failures else resting + 1
            if resting == 2:
                return
        raise AssertionError("no rest")


TestEvents = Events.TestCase
TestEvents.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    derandomize="EVENTS" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
