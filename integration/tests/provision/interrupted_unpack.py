"""Makes a root file system from an image in a process that kills itself at one of `STAGES`.

python -m integration.tests.provision.interrupted_unpack STAGE IMAGE ROOT
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from agent.config.settings import ImageSettings
from agent.host.provision.image import inspect, unpack
from agent.system.files import System
from agent.system.process import Completed, host_runner
from agent.system.tool_runner import tool_runner

PROGRAMS = ("skopeo", "umoci", "sync")
STAGES = (*(f"{when} {name}" for name in PROGRAMS for when in ("before", "in")), "before rename", "after rename")
WRITTEN = {"skopeo": 8 << 20, "umoci": 8 << 20, "sync": 0}
"""Bytes that a program has written when the process is killed "in" it."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Interrupted(System):
    """A host whose agent is killed at a stage."""

    def __init__(self, stage: str, root: Path) -> None:
        super().__init__(host_runner, tool_runner=self._tool)
        self._stage, self._partial = stage, root.with_name(f"{root.name}.partial")

    def rename(self, old: str, new: str) -> None:
        # In any other stage, the program was over before the thread saw what it had written.
        if self._stage != "after rename":
            die()
        super().rename(old, new)
        die()

    def _tool(self, argv: tuple[str, ...], timeout: float) -> Completed:
        if "inspect" not in argv:
            if self._stage == f"before {argv[0]}":
                die()
            if self._stage == f"in {argv[0]}":
                threading.Thread(target=self._die_after, args=(WRITTEN[argv[0]],), daemon=True).start()
        return tool_runner(argv, timeout)

    def _die_after(self, more: int) -> None:
        before = self._size()
        while self._size() < before + more:
            time.sleep(0.002)
        die()

    def _size(self) -> int:
        # A file may disappear meanwhile: skopeo's temporary ones.
        return sum(each.lstat().st_size for each in self._partial.rglob("*") if each.exists())


if __name__ == "__main__":
    stage, name, root = sys.argv[1:]
    settings, system = ImageSettings(name=name), Interrupted(stage, Path(root))
    unpack(settings, inspect(settings, name, system), root, system)
