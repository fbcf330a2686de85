"""Hands the host half's verdict to those machines that are to set it on their Node object."""

from collections.abc import Mapping
from dataclasses import replace

from agent.conditions import Condition
from agent.errors import DocumentError
from agent.judgement import SIZE_LIMIT, Judgement, judgement, parse_judgement, render_judgement
from agent.paths import MACHINES_STATE, conditions_file, handoff_directory
from agent.system.files import System

FRESH = 45.0
"""Seconds for which an unchanged verdict is not written again: less than from one timed pass to the next."""


def publish_judgements(system: System, ready: Mapping[str, Condition], now: float) -> tuple[str, ...]:
    """Write the verdict on each machine of `ready`, take back every other; returns what failed, one sentence each."""
    failures = []
    known = system.entries(MACHINES_STATE) if system.is_directory(MACHINES_STATE) else ()
    for name in sorted({*known, *ready}):
        path = conditions_file(name)
        try:
            # Without the directory the machine was never set up: it has no GPU.
            if not system.is_directory(handoff_directory(name)):
                continue
            if name not in ready:
                system.remove_tree(path)
            else:
                _write(system, path, judgement(ready[name], now))
        except OSError as error:
            failures.append(f"cannot update {path}: {error.strerror}")
    return tuple(failures)


def _write(system: System, path: str, verdict: Judgement) -> None:
    try:
        # Root in the machine can remount the directory writable, and put a link there.
        before = parse_judgement(system.read_untrusted(path, SIZE_LIMIT)[0])
    except (OSError, DocumentError):
        before = None
    same = before is not None and replace(before, judged=verdict.judged) == verdict
    # Written also when the clock was set back.
    if before is None or not same or not 0 <= verdict.judged - before.judged < FRESH:
        system.write(path, render_judgement(verdict))
