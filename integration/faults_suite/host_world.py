"""A simulated host for the host half's scenarios: its machine starts, gets nodes and reports.

The trees and the agent's code are real; systemd, machined and the machine are simulated, and survive a kill.
"""

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

from agent import __version__
from agent.cli.prepare import prepare
from agent.config.settings import Config
from agent.host.reconcile import MachineOutcome, Outcome, Reconciler
from agent.model.conditions import Condition, ConditionType, Reason, Status, false, true
from agent.model.errors import AgentError, DocumentError
from agent.model.facts import parse_live
from agent.model.handoff import Handoff, Publication, Report, parse_handoff, render_report
from agent.model.paths import (
    MANIFESTS,
    handed_roots_file,
    handoff_file,
    live_file,
    nspawn_file,
    report_directory,
    unit_drop_in,
)
from integration.faults_suite.host_devices import HostDevices
from integration.faults_suite.host_services import Bus, Runner, ScenarioHost
from integration.faults_suite.interception import Watch
from integration.faults_suite.trees import NEW, numbered, snapshot, unordered
from tests.fakes.gpu_host import MACHINE, UNITS, units
from tests.fakes.reports import IN_MACHINE

BOOT_ID = "11111111-2222-3333-4444-555555555555"
CLOCK_REALTIME_COARSE = 5
"""From linux/time.h; Python's time module does not name it."""
PASSES = 14
"""The most passes that `converge` makes until nothing changes: more than any scenario needs."""


def _wait_for_tick() -> None:
    """Wait until the kernel dates new files later than existing ones: only timer ticks advance its clock for files."""
    before = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) == before:
        time.sleep(0.001)


class HostWorld(HostDevices):
    """A host with two GPUs, a small driver and one machine."""

    def __init__(self, directory: Path) -> None:
        tree = directory / "host"
        tree.mkdir()
        self.watch = Watch("/nowhere")
        self.mounts: set[str] = set()
        self.nodes: dict[str, list[str]] = {}
        """The running machine's mounts at each path, the top one last."""
        self.allowed: frozenset[str] = frozenset()
        self.starting = self.missing_nodes = False
        self.loaded: bytes | None = None
        """The drop-in as PID 1 last read it."""
        self.false_conditions: set[tuple[str, str, str]] = set()
        """Type, reason and message of conditions that were False."""
        self.last: tuple[MachineOutcome, ...] = ()
        self.errors: list[str] = []
        """Failures that passes reported."""
        self.wrong: list[str] = []
        """Things that must never happen, but did."""
        self.machines: dict[str, dict[str, object]] = {MACHINE: {}}
        super().__init__(ScenarioHost(tree, runner=Runner(self)), tree)
        self.host.world, self.host.bus = self, Bus(self)
        self.host._bus = self.host.bus
        self.host.bus.mounts.tree = self.tree
        self._set_up()
        self.agent = self.configured()

    # ---- PID 1 and machined

    def reload(self) -> None:
        self.loaded = self._content(unit_drop_in(MACHINE))

    def start_requested(self) -> None:
        self.starting = True
        if self._content(nspawn_file(MACHINE)) is None or self.loaded is None:
            self.wrong.append("the machine was started without its settings")
        elif self.loaded != self._content(unit_drop_in(MACHINE)):
            self.wrong.append("the machine was started with a drop-in that systemd had not read")

    def permit(self, arguments: tuple[object, ...]) -> None:
        (_, (_, entries)) = arguments[2][1]  # type: ignore[index]
        self._set_permissions([tuple(entry) for entry in entries])

    def bind(self, path: str) -> None:
        number = self._number(path)
        mounted = self.nodes.setdefault(path, [])
        # A second bind is right if the machine has reported missing nodes: then all are bound again. A second bind is
        # also right if the first one was not noted, because that failed or the agent was killed before: then the host
        # half cannot know what is mounted in the machine.
        if mounted.count(number) > int(path not in self._noted()) and not self.missing_nodes:
            self.wrong.append(f"{path} was bound {mounted.count(number) + 1} times")
        mounted.append(number)

    def _noted(self) -> Mapping[str, str]:
        """Return the nodes that the host half has noted as bound."""
        content = self._content(live_file(MACHINE))
        return parse_live(content).nodes if content else {}

    def _number(self, path: str) -> str:
        device = self.host.device(path)
        return f"{device.major}:{device.minor}" if device else "a directory"

    def _content(self, path: str) -> bytes | None:
        place = self.tree / path[1:]
        return place.read_bytes() if place.is_file() else None

    # ---- the machine

    def start(self) -> None:
        """Act as `systemctl start`, whoever calls it: run prepare@, then start the machine, even if prepare@ failed."""
        self.starting = False
        units(self.host, "activating")
        try:
            prepare(MACHINE, self.configured())
        except (AgentError, OSError):
            # The machine starts all the same: its unit only wants (Wants=) prepare@, whose output is in the journal.
            pass
        finally:
            with self.watch.pause():
                self._started()

    def _started(self) -> None:
        """Boot the machine from its settings file and from the drop-in that PID 1 has read."""
        loaded = (self.loaded or b"").decode()
        self._before_start(loaded)
        text = (self._content(nspawn_file(MACHINE)) or b"").decode()
        values = [line.partition("=")[2].split(":")[0] for line in text.splitlines() if line.startswith("Bind")]
        ours = [each for each in values if each not in ("/dev/kmsg", "/lib/modules", "/sys/module")]
        missing = [each for each in ours if not self.host.exists(each)]
        # nspawn fails if a bound file is missing. The drop-in has a script that comments out such lines (`#missing:`).
        if missing and "missing:" not in loaded:
            self.wrong.append(f"the machine cannot boot without {', '.join(missing)}")
        nodes = [each for each in ours if each.startswith("/dev/") and each not in missing]
        self.nodes = {each: [self._number(each)] for each in nodes}
        lines = loaded.splitlines()
        entries = [line.partition("=")[2] for line in lines if line.startswith("DeviceAllow=") and line[12:]]
        self._set_permissions([tuple(each.split(" ", 1)) for each in entries])  # type: ignore[misc]

    def _before_start(self, loaded: str) -> None:
        """Run the drop-in's ExecStartPre= lines, as far as they change the tree: directories and copies."""
        for directories in re.findall(r"mkdir -p ([^;]*)", loaded):
            for each in directories.split():
                self.host.make_directory(each)
        for place in re.findall(r"mount -t tmpfs .* (/\S+)'", loaded):
            self.mounts.add(place)
            self.host.remove(f"{place}/report.json")
        for source, copy in re.findall(r"cp -f (\S+) (\S+)", loaded):
            if (content := self._content(source)) is not None:
                self.host.file(copy, content)

    def _set_permissions(self, entries: list[tuple[str, str]]) -> None:
        self.allowed = frozenset(" ".join(entry) for entry in entries)
        units(self.host, "active")
        # systemd lists DeviceAllow= entries in the reverse of their order in the files.
        self.host.bus.unit(UNITS[0], "active", device_allow=entries[::-1])

    def stop(self) -> None:
        units(self.host, "inactive", stopped_at=4711)
        self.nodes, self.allowed = {}, frozenset()

    @property
    def running(self) -> bool:
        return (
            self.host.bus.properties[self.host.bus.units[UNITS[0]], "org.freedesktop.systemd1.Unit", "ActiveState"][1]
            == "active"
        )

    def handoff(self) -> Handoff | None:
        content = self._content(handoff_file(MACHINE))
        try:
            return parse_handoff(content) if content else None
        except DocumentError:
            # The machine half reports nothing about a handoff that it cannot read.
            return None

    def answer(self) -> None:
        """Act as the machine half: unmount what is no longer granted, and report what is missing."""
        with self.watch.pause():
            handoff = self.handoff()
            if not self.running or handoff is None:
                return
            granted = handoff.requests[0].devices if handoff.requests else ()
            devices = {each.path: f"{each.major}:{each.minor}" for each in granted}
            self.nodes = {path: numbers for path, numbers in self.nodes.items() if path in devices}
            missing_nodes = [path for path, number in devices.items() if self.nodes.get(path, [""])[-1] != number]
            self.missing_nodes = bool(missing_nodes)
            kind = ConditionType.DEVICES_ALLOWED
            allowed = true(kind, Reason.OPENED, "simulated")
            if missing_nodes:
                allowed = false(kind, Reason.WRONG_NODE, ", ".join(missing_nodes))
            others = (each for each in IN_MACHINE if each is not kind)
            conditions = (allowed, *(Condition(each, Status.TRUE, "Fine", "simulated") for each in others))
            _wait_for_tick()
            status = (self.tree / handoff_file(MACHINE)[1:]).stat()
            answered = Publication(status.st_ino, status.st_mtime_ns)
            report = render_report(
                Report(handoff.generation, conditions, (), BOOT_ID, __version__, {}, publication=answered)
            )
            place = self.tree / report_directory(MACHINE)[1:] / "report.json"
            place.write_bytes(report)
            _wait_for_tick()

    # ---- the agent

    def configured(self) -> Reconciler:
        config = Config.validated({"machines": self.machines})
        return Reconciler(config, self.host, self.host, self._answer_when_waiting)

    def _answer_when_waiting(self, sentence: str) -> None:
        if sentence.startswith("wait") and not sentence.startswith("waiting for the driver"):
            self.answer()

    def converge(self) -> None:
        """Run passes, and what happens between them, until nothing is left to do."""
        self.agent = self.configured()
        quiet, left = 0, ""
        for _ in range(PASSES):
            if self.starting:
                self.start()
            self.answer()
            outcome = self.agent.run_pass()
            self.last = outcome.machines
            self.errors += [*outcome.failures, *outcome.facts.problems]
            conditions = [each for machine in outcome.machines for each in machine.conditions]
            self.false_conditions |= {
                (each.type, each.reason, each.message) for each in conditions if each.status is Status.FALSE
            }
            left = _describe(outcome)
            idle = not outcome.actions and not outcome.failures and not self.starting
            quiet = quiet + 1 if idle and not any(each.pending for each in outcome.machines) else 0
            if quiet == 2:
                return
        self.wrong.append(f"no end after {PASSES} passes: {left}")

    # ---- what it came to

    def faults(self) -> list[str]:
        """Return what is wrong with this state, whatever happened before."""
        handed, handoff = self._content(handed_roots_file(MACHINE)), self.handoff()
        named = (
            [each.driver_root.rpartition("/")[2] for each in handoff.requests if each.driver_root] if handoff else []
        )
        recorded = json.loads(handed)["indices"] if handed else named
        lost = [
            f"driver root {each} was handed and is not recorded" for each in named if each not in map(str, recorded)
        ]
        return [*self.wrong, *(lost if self.running else [])]

    def rights(self) -> set[str]:
        """Return what the machine's pods can use: nodes, permissions for nodes, and GPUs."""
        handoff = self.handoff()
        requests = handoff.requests if handoff and self.running else ()
        nodes = {f"{path} {numbers[-1]}" for path, numbers in self.nodes.items()}
        return nodes | set(self.allowed) | {gpu for each in requests for gpu in each.gpus}

    def conditions(self) -> dict[str, tuple[str, str]]:
        """Return status and reason by type, from the last pass."""
        return {each.type: (each.status, each.reason) for each in self.last[0].conditions} if self.last else {}

    def state(self) -> dict[str, str]:
        """Return the state that is compared between two runs."""
        mounts = " ".join(sorted((*self.mounts, *self.host.bus.mounts.mounted.values())))
        found = numbered(snapshot(self.tree) | {"mounts": mounts}, MANIFESTS)
        for path in [*found]:
            # Leave out two things that may differ. The copies of the settings that the machine started with differ if a
            # start was killed. The record of handed driver roots begins only with a start of the machine; until it
            # exists, no driver root is removed. What a killed start left of it, the next start replaces.
            directory, _, record = handed_roots_file(MACHINE).rpartition("/")
            if "/started." in path or path in (f"{directory}/{record}", f"{directory}/.{record}{NEW}"):
                del found[path]
        if (live := live_file(MACHINE)) in found:
            found[live] = unordered(found[live])
        found |= {
            "machine": f"active {self.running}",
            "machine nodes": json.dumps({path: each[-1] for path, each in sorted(self.nodes.items())}),
            "machine permissions": " ".join(sorted(self.allowed)),
        }
        return found


def _describe(outcome: Outcome) -> str:
    return "; ".join((*outcome.sentences, *outcome.failures)) or "a machine stays pending"
