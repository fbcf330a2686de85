"""Prints what several commands show about machines and their host."""

import difflib
import json
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from agent import __version__
from agent.cli.printing import WIDTH, report, say, terminal
from agent.host.reconcile import NO_MACHINES, MachineOutcome, Reconciler
from agent.model.conditions import Condition, ConditionType, Reason, Status
from agent.model.facts import Absent, Broken, Facts, Unseen
from agent.model.goal import Action, RemoveFile, WriteFile
from agent.model.text import counted, first_of, printable, rfc3339
from agent.system.files import System
from agent.system.trust import read_seen

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
VERSION = 1
"""Version of the JSON documents. It changes if a key is removed or changes its meaning, but not if a key is added."""
PUBLIC = 0o004
"""The permission bit that lets every user read a file. Content that is written without this bit is not shown:
it may be secret."""
MISSING = "/dev/null"
"""Stands for a file that does not exist, as in the output of diff(1)."""


def summaries(
    machines: Iterable[MachineOutcome], *, width: int = WIDTH, colour: bool = False, whole: bool = True
) -> Iterator[str]:
    """Yield the lines about the machines, those that are not ready first.

    With `whole`, messages have as many lines as they need; otherwise, each cause has one line.
    """
    now, order = time.time(), (Status.FALSE, Status.UNKNOWN, Status.TRUE)
    for machine in sorted(machines, key=lambda each: (order.index(each.ready.status), each.name)):
        ready = machine.ready
        state = f"\x1b[{COLOURS[ready.status]}m{STATES[ready.status]}\x1b[0m" if colour else STATES[ready.status]
        of = f" (candidate for {machine.candidate_of})" if machine.candidate_of else ""
        parts = [f"{machine.name}{of}: {state}"]
        if ready.reason != Reason.ALL_CONDITIONS_TRUE:
            parts.append(ready.reason)
        if ready.last_transition:
            parts.append(f"for {duration(now - ready.last_transition)}")
        yield ", ".join((*parts, counted(len(machine.gpus), "GPU")))
        for group in causes(machine.conditions):
            aside = "" if prevents_ready(group) else " (not needed for Ready)"
            end, names = f": {group[0].status}, {group[0].reason}{aside}", [each.type for each in group]
            wordings = [f"  {first_of(names, count)}{end}" for count in range(CONDITIONS_NAMED, 0, -1)]
            line = next((each for each in wordings if len(each) <= width), wordings[-1])
            if whole:
                yield line
                yield from paragraph(INDENT, group[0].message, width)
            else:
                yield shortened(f"{line}: {group[0].message}", width)
        if ready.status is Status.TRUE and not machine.gpus:
            yield from paragraph(INDENT, ready.message, width)


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
        same = [group for group in worst if group[0].status is ready.status]
        if not any(prevents_ready(group) and group[0].reason in (ready.reason, *CONSEQUENCES) for group in same):
            # Three cases need Ready itself: GPUsComplete, which Ready otherwise ignores, makes Ready False if all GPUs
            # are lost; only Ready can have the reason Settling; and a machine without GPUs may be not ready for another
            # reason than that it does not run. Ready joins the group that has its status and reason, if there is one.
            cause = next((group for group in same if group[0].reason == ready.reason), None)
            worst = [*(group for group in worst if group is not cause), [*(cause or ()), ready]]
    # Among equals, False comes before Unknown.
    worst.sort(key=lambda group: (not prevents_ready(group), group[0].status is Status.UNKNOWN))
    return tuple(map(tuple, worst))


def prevents_ready(group: Iterable[Condition]) -> bool:
    """Return whether a group of conditions that are not True keeps the machine from being ready."""
    return any(each.type is ConditionType.READY or each.needed_for_ready for each in group)


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


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows, of which the first has the headings, in columns of the same width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def condition_tables(machines: Iterable[MachineOutcome]) -> Iterator[str]:
    """Yield for each machine a line with its GPUs, and a table of all its conditions."""
    for machine in machines:
        yield f"{machine.name}: {counted(len(machine.gpus), 'GPU')} {' '.join(machine.gpus)}".rstrip()
        width = max(len(each.type) for each in machine.conditions)
        rows = [("CONDITION".rjust(width), "STATUS", "SINCE", "REASON", "MESSAGE")]
        for each in machine.conditions:
            since = rfc3339(each.last_transition) if each.last_transition else "-"
            rows.append((each.type.rjust(width), each.status, since, each.reason, each.message))
        yield from table(rows)


def check_lines(facts: Facts, width: int, *, every: bool = False) -> Iterator[str]:
    """Yield the host's own checks that are not True, or all."""
    for each in facts.checks:
        if every or each.status is not Status.TRUE:
            yield from paragraph(f"host check {each.type}: ", each.text, width)


def print_machines(machines: Sequence[MachineOutcome], reconciler: Reconciler) -> None:
    """Print for each machine whether it is ready, and what is wrong."""
    width, colour = terminal()
    say(summaries(machines, width=width, colour=colour))
    print_no_machines(reconciler)


def print_no_machines(reconciler: Reconciler) -> None:
    """If the configuration has no machine, print a line that explains the empty result."""
    if not reconciler.config.machines:
        say([NO_MACHINES])


def report_problems(facts: Facts) -> None:
    """Report what was refused, discarded or not understood."""
    for problem in facts.all_problems():
        report(f"note: {problem}")


def document(command: str, content: Mapping[str, object], *, indent: int | None = 2) -> str:
    """Return the JSON document of a command as text (docs/json.md); with `indent=None`, on one line."""
    envelope = {"version": VERSION, "time": rfc3339(time.time()), "agent": __version__, "command": command}
    return json.dumps({**envelope, **content}, indent=indent)


def difference(action: Action, system: System) -> Iterator[str]:
    """Yield the lines of the difference. If there is none to show, yield one line that says why.

    Yield nothing for a step that neither writes nor removes a file.
    """
    if not isinstance(action, WriteFile | RemoveFile):
        return
    if isinstance(action, WriteFile) and not action.mode & PUBLIC:
        yield f"# {action.path}: not shown, because not every user may read it (mode {action.mode:04o})"
        return
    before = read_seen(system.read, action.path)
    if isinstance(before, Broken | Unseen):
        yield f"# cannot show the difference: {before.why}"
        return
    old = b"" if isinstance(before, Absent) else before
    new = action.content if isinstance(action, WriteFile) else b""
    removed, added = (each.decode(errors="replace").splitlines() for each in (old, new))
    if not isinstance(before, Absent) and removed == added:
        yield f"# {action.path}: the same content, written again"
        return
    names = (MISSING if isinstance(before, Absent) else action.path, action.path)
    names = names if isinstance(action, WriteFile) else (names[0], MISSING)
    yield from map(printable, difflib.unified_diff(removed, added, *names, lineterm=""))
