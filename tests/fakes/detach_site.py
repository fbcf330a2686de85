"""A host whose GPUs are detached and attached."""

import os
from collections.abc import Callable
from pathlib import Path

from agent import __version__
from agent.config.settings import Config
from agent.host.detach import Timing
from agent.host.reconcile import Reconciler
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.facts import DeviceAllow, parse_live, render_live
from agent.model.handoff import FabricAnswer, Publication, Report, parse_handoff, render_report
from agent.model.paths import handoff_file, live_file, report_directory
from tests.fakes.clock import Clock
from tests.fakes.gpu_host import MACHINE, set_up, units
from tests.fakes.host import Host
from tests.fakes.processes import process
from tests.fakes.reports import IN_MACHINE

PERMISSION = DeviceAllow("/dev/char/195:1", "rw")
HOLDER = 4242
BOOT_ID = "11111111-2222-3333-4444-555555555555"
FAST = Timing(poll=0, answer=20)


class Site:
    """A host with its running machine, and what happens while somebody waits."""

    def __init__(self, tree: Path, clock: Clock | None = None) -> None:
        """With a clock, each wait lets the machine answer, and something happen."""
        if clock:
            clock.meanwhile = self.wait
        self.host = set_up(Host(tree))
        self.host.make_directory("/proc")
        self.messages: list[str] = []
        self.meanwhile: list[Callable[[], object]] = []
        """Steps, run one by one whenever a machine or a process is waited for."""
        self.answers = True
        self.failing: dict[ConditionType, str] = {}
        """Reasons of the conditions that the machine reports as False."""
        self.fabric: tuple[FabricAnswer, ...] = ()
        """What the machine reports of its GPUs' registration with the fabric."""
        for bus in ("01", "02"):
            self.plug(f"0000:{bus}:00.0")
        self.agent = self.configure()

    def plug(self, address: str) -> None:
        link = Path(self.host.root, f"sys/bus/pci/devices/{address}")
        if link.is_symlink():
            # Here the new link may get the inode number of a removed one; in kernfs it never does.
            link.rename(link.with_name(f"before-{len(self.messages)}-{address}"))
        self.host.symlink(f"/sys/bus/pci/devices/{address}", f"../../../devices/pci0000:00/{address}")

    def configure(self, **settings: object) -> Reconciler:
        config = Config.validated({"machines": {MACHINE: settings}})
        self.agent = Reconciler(config, self.host, self.host, self.messages.append)
        return self.agent

    def start(self) -> None:
        """Start the machine with what it was prepared for."""
        (machine,) = self.agent.reconcile().machines
        assert machine.start_settings
        self.host.write(live_file(MACHINE), render_live(machine.start_settings))
        units(self.host, "active")
        self.answer()

    def wait(self) -> None:
        if self.answers:
            self.answer()
        if self.meanwhile:
            self.meanwhile.pop(0)()

    def publication(self) -> Publication:
        status = os.stat(self.host.full_path(handoff_file(MACHINE)))
        return Publication(status.st_ino, status.st_mtime_ns)

    def answer(self, answered: Publication | None = None) -> None:
        handoff = parse_handoff(self.host.read(handoff_file(MACHINE)))
        conditions = tuple(
            Condition(
                kind, Status.FALSE if kind in self.failing else Status.TRUE, self.failing.get(kind, "Fine"), "simulated"
            )
            for kind in (ConditionType.DEVICES_ALLOWED, *IN_MACHINE)
        )
        report = render_report(
            Report(
                handoff.generation,
                conditions,
                (),
                BOOT_ID,
                __version__,
                {},
                publication=answered or self.publication(),
                fabric=self.fabric,
            )
        )
        self.host.write(f"{report_directory(MACHINE)}/report.json", report)

    def forget_report(self) -> None:
        """What the machine has reported is gone, and it does not answer from now on."""
        self.answers = False
        self.host.remove_file(f"{report_directory(MACHINE)}/report.json")

    def hold(self, device: str = "/dev/nvidia1", **how: object) -> Path:
        directory = process(Path(self.host.root), HOLDER, opened=(device,), **how)  # type: ignore[arg-type]
        self.meanwhile = []
        return directory

    def granted(self) -> tuple[str, ...]:
        return parse_handoff(self.host.read(handoff_file(MACHINE))).requests[0].gpus

    def granted_gpus(self) -> tuple[str, ...]:
        return tuple(
            gpu for request in parse_handoff(self.host.read(handoff_file(MACHINE))).requests for gpu in request.gpus
        )

    def permitted(self) -> bool:
        return PERMISSION in parse_live(self.host.read(live_file(MACHINE))).allow

    def conditions(self) -> dict[ConditionType, tuple[Status, str]]:
        (machine,) = self.agent.reconcile().machines
        return {each.type: (each.status, each.reason) for each in machine.conditions}


class Interrupted(BaseException):
    """Acts like KeyboardInterrupt, which would end the test run."""
