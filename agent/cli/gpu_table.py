"""Adds the GPUs' users to a list of GPUs, and renders the list for people or programs.

A GPU's users are the processes that have it open. The service's sandbox hides these processes. So if the service makes
the list, the process that asked for the list adds the users. That process must start fast, so this module imports
little.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from agent.cli.documents import document
from agent.system.files import System
from agent.system.open_files import Held, Holder, find_holders
from agent.system.process import Completed

HEADINGS = ("ADDRESS", "STATE", "MACHINE", "DRIVER", "PODS", "MODEL", "UUID")
UNKNOWN = "?"
NOTHING = "-"


class Entry(NamedTuple):
    """One GPU of the list."""

    address: str
    vendor: str
    state: str
    machines: Sequence[str] = ()
    driver: str = ""
    """The kernel driver's name, and its version if that is known."""
    model: str = ""
    uuid: str = ""
    nodes: Sequence[tuple[str, int, int]] = ()
    """Path, major and minor number of each of the GPU's own device nodes."""


class Listing(NamedTuple):
    """The list of GPUs, without their users."""

    entries: Sequence[Entry]
    unknown: Sequence[str]
    """Sentences on what is unknown."""
    for_programs: bool

    def as_text(self) -> str:
        """Return the list as JSON, for `lines_of` in another process of the same version."""
        return json.dumps({**self._asdict(), "entries": [each._asdict() for each in self.entries]})


def lines_of(text: str) -> list[str]:
    """Return the lines to print for the text of a list (Listing.as_text). Raises OSError as `lines` does."""
    content = json.loads(text)
    entries = [Entry(**each) for each in content.pop("entries")]
    return lines(Listing(entries, **content), System(_no_program))


def _no_program(argv: tuple[str, ...], timeout: float) -> Completed:
    raise FileNotFoundError(argv[0])


def lines(listing: Listing, system: System) -> list[str]:
    """Find the GPUs' users, and return the lines to print. Raises OSError if processes cannot be listed."""
    wanted = {(major, minor): path for each in listing.entries for path, major, minor in each.nodes}
    held = find_holders(system, wanted)
    users = [(each, list(_users(each, held.holders))) for each in listing.entries]
    if listing.for_programs:
        gpus = [_as_object(each, holders, held) for each, holders in users]
        return [document("gpus", time.time(), {"gpus": gpus, "unknown": listing.unknown})]
    if users:
        rows = list(_table([_row(each, holders, held) for each, holders in users]))
    else:
        rows = ["no GPU was found" if listing.unknown else "this host has no GPU"]
    return [*rows, *(f"unknown: {each}" for each in listing.unknown)]


def _users(entry: Entry, holders: Iterable[Holder]) -> Iterator[Holder]:
    """Yield the processes that have one of the GPU's own nodes open."""
    paths = {path for path, _, _ in entry.nodes}
    return (each for each in holders if paths & set(each.paths))


def _pods(users: Iterable[Holder]) -> list[str]:
    return sorted({each.pod_uid for each in users if each.pod_uid})


def _as_object(entry: Entry, users: Sequence[Holder], held: Held) -> dict[str, object]:
    return {
        "address": entry.address,
        "vendor": entry.vendor,
        "model": entry.model,
        "uuid": entry.uuid,
        "driver": entry.driver,
        "state": entry.state,
        "machines": entry.machines,
        "processes": len(users),
        "pods": _pods(users),
        # If some processes could not be searched, there may be more users.
        "usersKnown": not held.unseen,
    }


def _table(body: Sequence[tuple[str, ...]]) -> Iterator[str]:
    rows = [HEADINGS, *body]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(entry: Entry, users: Sequence[Holder], held: Held) -> tuple[str, ...]:
    count = len(_pods(users))
    pods = f"{count or ''}{UNKNOWN}" if held.unseen else str(count)
    machines = ",".join(entry.machines)
    cells = (entry.address, entry.state, machines, entry.driver, pods, entry.model, entry.uuid)
    return tuple(each or NOTHING for each in cells)
