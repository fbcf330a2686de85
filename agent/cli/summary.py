"""Summarises machines in a few lines: whether each is ready, and each cause of a fault once. Pure."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from agent.cli.terminal import WIDTH
from agent.host.outcome import MachineOutcome
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.reasons import Reason
from agent.model.text import counted, first_of, printable

CONDITIONS_NAMED = 3
"""How many conditions a line names at most; it counts the others."""
CONSEQUENCES = frozenset({Reason.MACHINE_NOT_RUNNING})
"""A condition with one of these reasons is only a consequence of another condition, which names the cause."""
INDENT = " " * 4
LARGEST_INDENT = 14
"""Columns by which the further lines of a paragraph are indented at most, however long its heading is."""
UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
STATES = {Status.TRUE: "ready", Status.FALSE: "not ready", Status.UNKNOWN: "unknown"}
COLOURS = {Status.TRUE: "32", Status.FALSE: "1;31", Status.UNKNOWN: "1;33"}
"""Parameters of the escape sequence SGR (ECMA-48): green, bold red, bold yellow."""


class Style(Struct, frozen=True):
    """How to print."""

    width: int = WIDTH
    """Columns."""
    colour: bool = False
    whole: bool = True
    """Print full messages, on as many lines as they need; otherwise one line for each cause."""


def summaries(machines: Iterable[MachineOutcome], now: float, style: Style) -> Iterator[str]:
    """Yield the lines about the machines, those that are not ready first. `now` is in seconds since the epoch."""
    order = (Status.FALSE, Status.UNKNOWN, Status.TRUE)
    for machine in sorted(machines, key=lambda each: (order.index(each.ready.status), each.name)):
        yield _heading(machine, now, style)
        for cause in causes(machine.conditions):
            yield from _cause(cause, style)
        if machine.ready.status is Status.TRUE and not machine.gpus:
            yield from paragraph(INDENT, machine.ready.message, style.width)


def causes(conditions: Iterable[Condition]) -> tuple[tuple[Condition, ...], ...]:
    """Return the conditions that are not True, grouped by cause. Groups with conditions that Ready needs come first.

    Conditions with the same reason and message have the same cause. If a cause makes some conditions False and others
    Unknown, its group has only the False ones. Ready itself is left out if a condition that it needs already explains
    why Ready is not True.
    """
    groups: dict[tuple[str, str], list[Condition]] = {}
    ready = None
    for each in conditions:
        if each.type is ConditionType.READY:
            ready = each
        elif each.status is not Status.TRUE:
            groups.setdefault((each.reason, each.message), []).append(each)
    # Leave out consequences. If there is nothing but consequences, their cause is not known, so keep them.
    own = [group for (reason, _), group in groups.items() if reason not in CONSEQUENCES] or list(groups.values())
    worst = [[each for each in group if each.status is Status.FALSE] or group for group in own]
    if ready and ready.status is not Status.TRUE:
        worst = _with_ready(ready, worst)
    return tuple(tuple(group) for group in sorted(worst, key=_rank))


def _with_ready(ready: Condition, groups: list[list[Condition]]) -> list[list[Condition]]:
    """Return the groups. If no condition that Ready needs has Ready's reason, add Ready to the groups.

    If a group has Ready's status and reason, Ready joins that group; otherwise Ready is a group of its own.
    """
    same_status = [group for group in groups if group[0].status is ready.status]
    if any(prevents_ready(group) and group[0].reason in (ready.reason, *CONSEQUENCES) for group in same_status):
        return groups
    # Three cases need this: GPUsComplete, which Ready otherwise ignores, makes Ready False if all GPUs are lost; only
    # Ready can have the reason Settling; and a machine without GPUs may be not ready for another reason than that it
    # does not run.
    cause = next((group for group in same_status if group[0].reason == ready.reason), None)
    return [*(group for group in groups if group is not cause), [*(cause or ()), ready]]


def prevents_ready(group: Iterable[Condition]) -> bool:
    """Return whether a group of conditions that are not True keeps the machine from being ready."""
    return any(each.type is ConditionType.READY or each.needed_for_ready for each in group)


def _rank(group: Sequence[Condition]) -> tuple[bool, bool]:
    """Return the key to sort by: groups that prevent Ready come first; among equals, False comes before Unknown."""
    return not prevents_ready(group), group[0].status is Status.UNKNOWN


def _heading(machine: MachineOutcome, now: float, style: Style) -> str:
    ready = machine.ready
    state = STATES[ready.status]
    if style.colour:
        state = f"\x1b[{COLOURS[ready.status]}m{state}\x1b[0m"
    parts = [f"{machine.name}: {state}"]
    if ready.reason != Reason.ALL_CONDITIONS_TRUE:
        parts.append(ready.reason)
    if ready.last_transition:
        parts.append(f"for {duration(now - ready.last_transition)}")
    return ", ".join((*parts, counted(len(machine.gpus), "GPU")))


def _cause(group: Sequence[Condition], style: Style) -> Iterator[str]:
    first = group[0]
    aside = "" if prevents_ready(group) else " (not needed for Ready)"
    end = f": {first.status}, {first.reason}{aside}"
    names = [each.type for each in group]
    wordings = [f"  {first_of(names, count)}{end}" for count in range(CONDITIONS_NAMED, 0, -1)]
    line = next((each for each in wordings if len(each) <= style.width), wordings[-1])
    if style.whole:
        yield line
        yield from paragraph(INDENT, first.message, style.width)
    else:
        yield shortened(f"{line}: {first.message}", style.width)


def paragraph(heading: str, text: str, width: int) -> list[str]:
    """Return the lines of a text with a heading. Paths and commands stay whole, so that they can be copied."""
    return textwrap.wrap(
        # Escape invisible characters: pods write the logs and messages that `doctor` shows as evidence.
        printable(text),
        width,
        initial_indent=heading,
        subsequent_indent=" " * min(len(heading), LARGEST_INDENT),
        break_long_words=False,
        break_on_hyphens=False,
    )


def shortened(line: str, width: int) -> str:
    """Return the line with at most `width` characters."""
    return line if len(line) <= width else f"{line[: width - 3].rstrip()}..."


def duration(seconds: float) -> str:
    """Return a time span in the largest unit of which it has at least two, rounded down: 119 s, 2 min."""
    for length, unit in UNITS:
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(max(seconds, 0))} s"


def table(machine: MachineOutcome, since: Sequence[str]) -> Iterator[str]:
    """Yield a line with the machine's GPUs and a table of all its conditions; `since` has their times as text."""
    yield f"{machine.name}: {counted(len(machine.gpus), 'GPU')} {' '.join(machine.gpus)}".rstrip()
    rows = [("CONDITION", "STATUS", "SINCE", "REASON", "MESSAGE")]
    rows += [
        (each.type, each.status, time, each.reason, each.message)
        for each, time in zip(machine.conditions, since, strict=True)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, *rest in rows:
        cells = [cell.ljust(width) for cell, width in zip(rest[:3], widths[1:], strict=True)]
        yield "  ".join([name.rjust(widths[0]), *cells, rest[3]])
