"""Run a scenario with a strike at one call, and check the result."""

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from errno import errorcode
from pathlib import Path
from typing import Protocol

from agent.model.errors import AgentError
from integration.faults_suite.interception import Call, Killed, Strike, Watch, watched
from integration.faults_suite.trees import differences
from tests.fakes.host import UnexpectedError

MEMORY = Path("/dev/shm")
UNDONE = ("NotGiven", "NotStaged")
"""Reasons for work that is not done yet; they claim nothing about an observation."""
SHOWN = 6
"""Differences to show per run."""


class World(Protocol):
    """The world of a scenario."""

    tree: Path
    watch: Watch

    false_conditions: set[tuple[str, str, str]]
    errors: list[str]

    def faults(self) -> list[str]: ...

    def rights(self) -> set[str]: ...

    def conditions(self) -> dict[str, tuple[str, str]]: ...

    def state(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class Story:
    """A scenario with its initial world."""

    name: str
    begin: Callable[[Path], World]
    work: Callable[[World], None]
    again: Callable[[World], None]
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class Baseline:
    """A run without a strike: its calls and its result."""

    writing: tuple[Call, ...]
    reading: tuple[Call, ...]
    state: dict[str, str]
    rights: frozenset[str]
    conditions: dict[str, tuple[str, str]]
    false_conditions: frozenset[tuple[str, str]]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """The differences and errors of one run."""

    story: str
    how: str
    what: tuple[str, ...]

    def __str__(self) -> str:
        more = [f"and {len(self.what) - SHOWN} more"] if len(self.what) > SHOWN else []
        return "\n    ".join((f"{self.story}: {self.how}", *self.what[:SHOWN], *more))


def directory() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory, in memory if possible: a run makes a thousand files."""
    return tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)


@contextmanager
def silence() -> Iterator[None]:
    """Discard what the agent writes to the journal."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def record_baseline(story: Story) -> Baseline:
    """Do the work without a strike, and record its calls. Then do `again`, as after a strike; record the result."""
    with directory() as place, silence():
        world = story.begin(Path(place))
        world.watch = Watch(str(world.tree))
        with watched(world.watch, in_order=story.in_order):
            story.work(world)
        watch, world.watch = world.watch, Watch("/nowhere")
        story.again(world)
        false_conditions = frozenset((kind, reason) for kind, reason, _ in world.false_conditions)
        return Baseline(
            tuple(watch.writing),
            tuple(watch.reading),
            world.state(),
            frozenset(world.rights()),
            world.conditions(),
            false_conditions,
            tuple(world.faults()),
        )


def _unfounded(world: World, baseline: Baseline, how: Strike) -> list[str]:
    """Return a line for each condition that is False because a reading call failed, if nothing reports this failure."""
    if how.writing:
        return []
    words = os.strerror(how.code)
    if any(words in error for error in world.errors):
        return []
    new = [
        each
        for each in world.false_conditions
        if each[:2] not in baseline.false_conditions and words not in each[2] and each[1] not in UNDONE
    ]
    return [f"{kind} is False {reason}, as if that had been seen: {message}" for kind, reason, message in sorted(new)]


def strike(story: Story, baseline: Baseline, how: Strike) -> Finding | None:
    """Do the work with a strike, then `again` without one. Return a finding unless the result is the baseline's."""
    what: list[str] = []
    with directory() as place, silence():
        world = story.begin(Path(place))
        kept = world.rights() & baseline.rights
        watch = world.watch = Watch(str(world.tree), how)
        try:
            with watched(watch, in_order=story.in_order):
                story.work(world)
        except Killed:
            pass
        except (AgentError, OSError):
            # The command line and the service survive these, and report them.
            pass
        except (Exception, UnexpectedError):
            what.append(f"an unexpected exception: {traceback.format_exc(limit=-4)}")
        world.watch = Watch("/nowhere")
        if how.code:
            what += [f"{each} was taken away" for each in sorted(kept - world.rights())]
            what += _unfounded(world, baseline, how)
        what += clean(story, world, baseline)
    if watch.struck is None:
        what.append("the call was not made: the calls differ from run to run")
    return Finding(story.name, _describe(how, watch), tuple(what)) if what else None


def clean(story: Story, world: World, baseline: Baseline) -> list[str]:
    """Do `again`, in which nothing fails, and return what then differs from the baseline."""
    try:
        story.again(world)
    except (Exception, UnexpectedError):
        return [f"the clean run ends: {traceback.format_exc(limit=-4)}"]
    return [*world.faults(), *differences(baseline.state, world.state())]


def _describe(how: Strike, watch: Watch) -> str:
    kind = "writing" if how.writing else "reading"
    what = errorcode[how.code] if how.code else "killed in" if how.torn else "killed before"
    return f"{what} {kind} call {how.number}, {watch.struck}"
