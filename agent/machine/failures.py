"""Remembers that a costly step failed, so that its next attempt may wait.

An attempt to make a CDI specification opens every GPU, several times if one has failed. A GPU whose driver has failed
often hangs, writes to the kernel log, or leaves processes that cannot be killed. So there must not be an attempt each
minute. Neither should ldconfig write the loader cache each minute.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from agent import __version__
from agent.machine.context import Context
from agent.model.digest import json_digest
from agent.model.errors import AgentError
from agent.model.paths import GPU_STATES_NAME, HANDOFF_NAME, MACHINE_HANDOFF_DIRECTORY

LONGEST = 600.0
"""The longest time in seconds between two attempts. Most recoveries need no time at all, because they change what a
failure depends on. But no event shows, for example, that somebody reset a GPU on the host: until `gpus attach`, nothing
changes here."""
EARLY = 30.0
"""Seconds by which a run may come too early for the next attempt. Otherwise it would wait for one more run."""


class Failure(NamedTuple):
    """What a failed attempt depended on. The failure holds, for a time, until any of that changes."""

    context: Context
    note: str
    """The name of the note about the failure."""
    state: str

    @classmethod
    def of(cls, context: Context, note: str, *inputs: object) -> "Failure":
        """Return the failure that an attempt with these inputs, which are JSON data, may have.

        It also depends on what the host publishes.
        """
        # Another release of the agent may succeed.
        return cls(context, note, json_digest([__version__, publications(context), *inputs]))

    def noted(self) -> Mapping[str, Any]:
        """Return the details of the last attempt if it failed and the next attempt has to wait; otherwise nothing."""
        noted = self.context.notes.load(self.note)
        if noted.get("state") != self.state or time.monotonic() >= noted["until"]:
            return {}
        details: Mapping[str, Any] = noted["details"]
        return details

    def save(self, **details: str | tuple[str, ...]) -> None:
        """Note that an attempt failed. The next run tries again; later waits are as long as the failure has lasted.

        If that cannot be noted, the next run tries again.
        """
        notes, now = self.context.notes, time.monotonic()
        with contextlib.suppress(OSError):
            noted = notes.load(self.note)
            first = noted.get("since") if noted.get("state") == self.state else None
            since, until = next_attempt(first, now)
            notes.save(self.note, {"state": self.state, "since": since, "until": until, "details": details})

    @contextlib.contextmanager
    def saved(self) -> Iterator[None]:
        """Note that the attempt failed if the block raises AgentError or OSError, which is raised again."""
        try:
            yield
        except (AgentError, OSError) as error:
            self.save(message=str(error))
            raise


def next_attempt(first: object, now: float) -> tuple[float, float]:
    """Return when the first of several failed attempts was, and when to try again, both by CLOCK_MONOTONIC.

    `first` is the noted time of the first one; any other type if the attempt that fails now is the first.
    """
    since = first if isinstance(first, float) else now
    return since, now + min(now - since, LONGEST) - EARLY


def publications(context: Context) -> list[list[int]]:
    """Return a value that changes whenever the host publishes the handoff or the GPU states.

    It publishes an unchanged handoff again after it has bound missing nodes, and after `gpus attach`, which says that a
    GPU was reset.
    """
    return [_publication(context, name) for name in (HANDOFF_NAME, GPU_STATES_NAME)]


def _publication(context: Context, name: str) -> list[int]:
    """Return what changes whenever the host publishes this file; empty if there is none."""
    try:
        identity = context.system.identity(f"{MACHINE_HANDOFF_DIRECTORY}/{name}")
    except FileNotFoundError:
        return []
    return [identity.inode, identity.mtime_ns]


def forget(context: Context, note: str) -> None:
    """Forget a failure, so that the next attempt does not wait. Raises OSError."""
    if context.notes.load(note):
        context.notes.save(note, {})
