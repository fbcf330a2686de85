"""A host with machines that start, stop and report, and an agent that can fail or be killed at each of its steps.

Synthetic: PID 1, machined and the machines do what their sources say, as far as the agent can tell.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from agent import __version__
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import BusAnswerError, BusError, DocumentError
from agent.model.handoff import HealthAnswer, Publication, Report, parse_handoff, render_report
from agent.model.paths import (
    HOST_NVIDIA,
    REPORT_NAME,
    RUNTIME,
    RUNTIME_PROPERTIES,
    device_allow_drop_in,
    handoff_directory,
    handoff_file,
    machine_root,
    machine_unit,
    nspawn_file,
    report_directory,
    started_drop_in,
    started_nspawn,
    unit_drop_in,
)
from agent.system.process import Completed
from agent.system.systemd import SYSTEMD_MANAGER
from tests.fakes.clearing import clear_below, clears
from tests.fakes.faults import FaultyHost
from tests.fakes.host import CHANGES, JOB_VERBS, ScriptedBus, ScriptedRunner
from tests.fakes.reports import IN_MACHINE

BOOT_ID = "11111111-2222-3333-4444-555555555555"
SERVICES = ("nvidia-persistenced.service", "nvidia-fabricmanager.service")
TEMPLATE = [("char-pts", "rw")]


class Running(Struct):
    """A machine that runs."""

    nodes: dict[str, tuple[int, int]]
    """The numbers of the nodes that it sees."""
    allow: set[str]
    """What its cgroup permits, in the form of DeviceAllow=."""
    reports: bool = True
    answered: str = ""
    """The generation of the handoff on which it reported last."""
    health: tuple[HealthAnswer, ...] = ()
    """What it says that its GPUs say."""


class LivelyBus(ScriptedBus):
    """PID 1 and machined, which carry out the calls."""

    host: "LivelyHost"

    def __call__(
        self, service: str, path: str, method: str, signature: str, arguments: tuple[object, ...], timeout: float
    ) -> tuple[object, ...]:
        def answer() -> tuple[object, ...]:
            found = ScriptedBus.__call__(self, service, path, method, signature, arguments, timeout)
            if method in CHANGES:
                self.host.change(method, *arguments)
            return found

        if method not in (*CHANGES, *JOB_VERBS):
            self.host.look(method, BusError(f"{method}: no answer in time"))
            return answer()
        refused, silent = BusAnswerError(f"{method}: refused"), BusError(f"{method}: no answer in time")
        return self.host.step(answer, refused, silent)


class LivelyRunner(ScriptedRunner):
    """Removes trees below the tree, and lets PID 1 read its units."""

    host: "LivelyHost"

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        match argv:
            case _ if clears(argv):
                return self.host.step(lambda: clear_below(self.host.root, argv))
            case ("systemctl", "daemon-reload"):
                self.host.step(self.host.reload)
                return Completed(0, b"", b"")
            case ("systemctl", "start", "--no-block", unit):
                self.host.wanted.append(unit.removeprefix("systemd-nspawn@").removesuffix(".service"))
                return Completed(0, b"", b"")
            case _:
                return super().__call__(argv, timeout)


class LivelyHost(FaultyHost):
    """See the module's docstring. Methods after the line `----` are what happens to the host."""

    def __init__(self, tree: Path, machines: tuple[str, ...]) -> None:
        runner = LivelyRunner()
        super().__init__(tree, runner)
        self.bus = bus = LivelyBus()
        self._bus, bus.host, bus.mounts.tree, runner.host = bus, self, tree, self
        self.machines = machines
        self.running: dict[str, Running] = {}
        self.starting: set[str] = set()
        self.wanted: list[str] = []
        """Machines that the agent has started, if their units have not begun yet."""
        self.stops: dict[str, int] = {}
        self.loaded: dict[str, bytes] = {}
        """The agent's drop-ins as PID 1 has read them."""
        self.listed: dict[str, list[tuple[str, str]]] = {}
        """DeviceAllow= in PID 1."""
        self.file("/usr/lib/systemd/system/systemd-nspawn@.service", "[Service]\nDeviceAllow=char-pts rw\n")
        bus.version("257.13-1~deb13u1")
        for name in machines:
            self.make_directory(machine_root(name))
        self.reload()

    # ---- what PID 1 and machined do

    def change(self, method: str, *arguments: Any) -> None:  # noqa: ANN401
        name = arguments[0].removeprefix("systemd-nspawn@").removesuffix(".service")
        running = self.running.get(name)
        if method == f"{SYSTEMD_MANAGER}.SetUnitProperties":
            entries = self.listed[name] = [each for _, (_, value) in arguments[2] for each in value]
            self.file(device_allow_drop_in(name), "".join(f"DeviceAllow={node} {how}\n" for node, how in entries))
            if running:
                running.allow = {node for node, _ in entries}
        elif running is None:
            raise BusAnswerError(f"No machine '{name}' known")
        else:
            running.nodes[arguments[1]] = self.numbers()[arguments[1]]
        self.update_units()

    def reload(self) -> None:
        """Read the units again, which changes no permission of a running machine."""
        for name in self.machines:
            self.loaded[name] = self._content(unit_drop_in(name))
            lines = (self._content(device_allow_drop_in(name)) + self.loaded[name]).decode().splitlines()
            self.listed[name] = [*TEMPLATE]
            for value in (line.removeprefix("DeviceAllow=") for line in lines if line.startswith("DeviceAllow=")):
                node, _, how = value.partition(" ")
                self.listed[name] = [*self.listed[name], (node, how)] if node else []
        self.update_units()

    def update_units(self) -> None:
        for name in self.machines:
            state = "active" if name in self.running else "activating" if name in self.starting else "inactive"
            stale = self.loaded[name] != self._content(unit_drop_in(name))
            stops, allow = self.stops.get(name, 0), self.listed[name]
            self.bus.unit(machine_unit(name), state, reload=stale, stopped_at=stops, device_allow=allow)
        for service in SERVICES:
            self.bus.unit(service, "inactive")

    def _content(self, path: str) -> bytes:
        place = Path(self.full_path(path))
        return place.read_bytes() if place.exists() else b""

    def numbers(self) -> dict[str, tuple[int, int]]:
        return {path: (each.major, each.minor) for path, each in self.device_numbers.items()}

    # ---- what happens to the host

    def start(self, name: str, prepare: Callable[[str], object]) -> None:
        """Start a machine as its unit does. `prepare` does what unbounded-agent-prepare@ does."""
        if name in self.running or not self.is_directory(machine_root(name)):
            return
        self.starting.add(name)
        self.update_units()
        prepare(name)
        self.fault = None
        self.starting.remove(name)
        if self.loaded[name]:
            self._before_start(name)
        lines = self._content(nspawn_file(name)).decode().splitlines()
        bound = {line.partition("=")[2] for line in lines if line.startswith(("Bind=/dev/", "BindReadOnly=/dev/"))}
        nodes = {path: number for path, number in self.numbers().items() if path in bound}
        self.running[name] = Running(nodes, {node for node, _ in self.listed[name]})
        self.update_units()

    def _before_start(self, name: str) -> None:
        """Do what agent.host.plan.nspawn lets a shell do."""
        for directory in (HOST_NVIDIA, handoff_directory(name), report_directory(name)):
            self.make_directory(directory)
        self.remove(f"{report_directory(name)}/{REPORT_NAME}")
        lines = [line.removeprefix("#missing:") for line in self._content(nspawn_file(name)).decode().splitlines()]
        for number, line in enumerate(lines):
            if line.startswith(("Bind=", "BindReadOnly=")) and not self.exists(line.split("=")[1].split(":")[0]):
                lines[number] = f"#missing:{line}"
        if lines:
            Path(self.full_path(nspawn_file(name))).write_text("".join(f"{line}\n" for line in lines))
        for source, copy in ((nspawn_file(name), started_nspawn(name)), (unit_drop_in(name), started_drop_in(name))):
            self.file(copy, self._content(source))

    def stop(self, name: str) -> None:
        if self.running.pop(name, None):
            self.stops[name] = self.stops.get(name, 0) + 1
        self.update_units()

    def remove_machine(self, name: str) -> None:
        self.stop(name)
        self.remove_tree(machine_root(name))

    def answer(self, name: str, *, well: bool = True) -> None:
        """Let the machine half act on its handoff and report, if it runs. Its CDI specification may be faulty."""
        running, content = self.running.get(name), self._content(handoff_file(name))
        if running is None or not self.is_directory(report_directory(name)):
            return
        try:
            handoff = parse_handoff(content)
        except DocumentError:
            return
        devices = [(each.path, (each.major, each.minor)) for request in handoff.requests for each in request.devices]
        wrong = [
            path for path, (major, minor) in devices
            if running.nodes.get(path) != (major, minor) or f"/dev/char/{major}:{minor}" not in running.allow
        ]  # fmt: skip
        failed = {ConditionType.DEVICES_ALLOWED: "WrongNode"} if wrong else {} if well else {IN_MACHINE[0]: "Broken"}
        conditions = tuple(
            Condition(kind, Status.FALSE if kind in failed else Status.TRUE, failed.get(kind, "Fine"), "simulated")
            for kind in (ConditionType.DEVICES_ALLOWED, *IN_MACHINE)
        )
        running.answered, status = handoff.generation, os.stat(self.full_path(handoff_file(name)))
        publication = Publication(status.st_ino, status.st_mtime_ns)
        report = render_report(
            Report(
                *(handoff.generation, conditions, (), BOOT_ID, __version__, {}),
                publication=publication,
                health=running.health,
            )
        )
        self.write(f"{report_directory(name)}/{REPORT_NAME}", report)

    def boot(self) -> None:
        """Reboot the host: /run is empty, and no machine runs."""
        for name in self.machines:
            self.stop(name)
        self.stops.clear()
        for directory in (RUNTIME, RUNTIME_PROPERTIES):
            self.remove_tree(directory)
        self.bus.mounts.boot()
        self.reload()
