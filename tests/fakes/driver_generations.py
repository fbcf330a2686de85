"""Driver updates on a fake host, and the machines that live through them."""

import os
from pathlib import Path

from agent.cli.prepare import prepare
from agent.host.reconcile import Outcome
from agent.model.conditions import Condition, ConditionType
from agent.model.handoff import parse_handoff
from agent.model.paths import (
    LOADER_CACHE,
    handoff_file,
)
from agent.system.copy import DOOR
from agent.system.process import Completed, TimeLimitError
from tests.fakes.clearing import clear_below, clears
from tests.fakes.facts import VERSION
from tests.fakes.gpu_host import MACHINE, RECORDED, reconciler, units
from tests.fakes.host import HOSTS, Host, ScriptedRunner

NEWER = "580.95.05"


class RunnerThatClears(ScriptedRunner):
    """Also removes trees, below the host's."""

    def __init__(self, tree: Path) -> None:
        super().__init__()
        self.tree = tree
        self.clearings = 0
        self.clearing_fails = False
        self.per_second = 0.0
        """How many files it removes in one second; 0 if removal takes no time."""
        self.clearing_seconds = 0.0

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        if not clears(argv):
            return super().__call__(argv, timeout)
        self.clearings += 1
        if self.clearing_fails:
            return Completed(1, b"", b"libcuda.so.1: Input/output error")
        if self.per_second:
            self._slow(argv[len(DOOR) :], timeout)
        return clear_below(self.tree, argv)

    def _slow(self, paths: tuple[str, ...], timeout: float) -> None:
        files = [each for path in paths for each in Path(f"{self.tree}{path}").rglob("*") if each.is_file()]
        for number, file in enumerate(files):
            if (number + 1) / self.per_second > timeout:
                raise TimeLimitError
            file.unlink()
            self.clearing_seconds += 1 / self.per_second


def upgrade(host: Host, old: str = VERSION, new: str = NEWER) -> None:
    """Act as a package manager that replaces the files and runs ldconfig; the loaded module stays the same."""
    for directory, _, names in os.walk(f"{host.root}/usr"):
        for path in (Path(directory, name) for name in names):
            if path.is_symlink() and old in os.readlink(path):
                target = os.readlink(path).replace(old, new)
                path.unlink()
                path.symlink_to(target)
            if old in path.name:
                path.rename(path.with_name(path.name.replace(old, new)))
    host.loader_cache((HOSTS / RECORDED / "ldconfig.txt").read_text().replace(VERSION, new))
    # A new inode, as after ldconfig.
    host.write(LOADER_CACHE, b"written again")


def start_machine(host: Host) -> None:
    units(host, "inactive")
    prepare(MACHINE, reconciler(host))
    units(host, "active")


def driver_root(host: Host) -> str:
    (request,) = parse_handoff(host.read(handoff_file(MACHINE))).requests
    return request.driver_root


def condition(outcome: Outcome, kind: ConditionType) -> Condition:
    return next(each for each in outcome.machines[0].conditions if each.type is kind)
