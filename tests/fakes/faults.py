"""A host on which one of the agent's steps, or one of its looks, fails, or is the last thing that its process does."""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

from agent.model.device import DeviceNumber
from agent.system.files import temporary_path
from tests.fakes.cards import CardHost
from tests.fakes.host import ScriptedRunner

T = TypeVar("T")


class KilledError(BaseException):
    """The agent's process ends here."""


class Fault(NamedTuple):
    """What happens at one of the agent's next steps."""

    kind: str
    """`kill before`, `kill within` (a temporary file stays) or `kill after` the step; `refuse`: it fails; `silent`: it
    is carried out, but seems to fail."""
    after: int
    """How many other steps come first."""


class FaultyHost(CardHost):
    """See the module's docstring."""

    def __init__(self, tree: Path, runner: ScriptedRunner) -> None:
        super().__init__(tree, runner)
        self.fault: Fault | None = None
        self.struck = False
        """Whether the fault has happened."""
        self.blind: int | None = None
        """How many looks come before one that fails; None if none fails."""
        self.unseen = ""
        """What that look was for."""

    def step(self, act: Callable[[], T], refused: Exception | None = None, silent: Exception | None = None) -> T:
        """Do what the agent does, unless the fault strikes here."""
        fault = self.fault
        if fault is None or self.struck:
            return act()
        self.struck = fault.after == 0
        self.fault = fault._replace(after=fault.after - 1)
        if self.struck and fault.kind in ("kill before", "kill within"):
            raise KilledError
        if self.struck and fault.kind == "refuse":
            raise refused or OSError(errno.EIO, "Input/output error")
        done = act()
        if self.struck:
            raise KilledError if fault.kind == "kill after" else silent or OSError(errno.EIO, "Input/output error")
        return done

    def look(self, what: str, error: Exception | None = None) -> None:
        """Let a look of the agent fail, if it is the one that `blind` says."""
        if self.blind is not None:
            self.blind -= 1
            if self.blind == -1:
                self.unseen = what
                raise error or OSError(errno.EIO, "Input/output error", what)

    def read(self, path: str, limit: int = 4 << 20) -> bytes:
        self.look(path)
        return super().read(path, limit)

    def read_untrusted(self, path: str, limit: int = 4 << 20) -> tuple[bytes, float]:
        self.look(path)
        return super().read_untrusted(path, limit)

    def entries(self, path: str) -> tuple[str, ...]:
        self.look(path)
        return super().entries(path)

    def device(self, path: str) -> DeviceNumber | None:
        self.look(path)
        return super().device(path)

    def lines(self, path: str) -> Iterator[bytes]:
        self.look(path)
        return super().lines(path)

    def stream(
        self,
        path: str,
        chunks: Iterable[bytes],
        mode: int = 0o644,
        *,
        durable: bool = True,
        until: ExitStack | None = None,
    ) -> None:
        if self.fault and not self.struck and self.fault == ("kill within", 0):
            self.make_directory(os.path.dirname(path))
            content = b"".join(chunks)
            chunks = (content,)
            Path(temporary_path(self.full_path(path))).write_bytes(content[: len(content) // 2])
        self.step(lambda: super(FaultyHost, self).stream(path, chunks, mode, durable=durable, until=until))

    def remove(self, path: str) -> None:
        self.step(lambda: super(FaultyHost, self).remove(path))

    def rename(self, old: str, new: str) -> None:
        self.step(lambda: super(FaultyHost, self).rename(old, new))
