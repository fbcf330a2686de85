"""Adds the GPUs' users to a list of GPUs, and renders the list for people or programs.

A GPU's users are the processes that have it open.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from agent.cli.documents import document
from agent.model.facts import DeviceNode
from agent.system.files import System
from agent.system.open_files import Held, Holder, find_holders

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
    nodes: tuple[DeviceNode, ...] = ()
    """The GPU's own device nodes."""


def lines(entries: Sequence[Entry], unknown: Sequence[str], system: System, *, for_programs: bool) -> list[str]:
    """Find the GPUs' users, and return the lines to print. Raises OSError if processes cannot be listed.

    `unknown` has sentences on what is unknown about the GPUs.
    """
    wanted = {(node.number.major, node.number.minor): node.path for each in entries for node in each.nodes}
    held = find_holders(system, wanted)
    users = [(each, list(_users(each, held.holders))) for each in entries]
    if for_programs:
        gpus = [_as_object(each, holders, held) for each, holders in users]
        return [document("gpus", time.time(), {"gpus": gpus, "unknown": unknown})]
    if users:
        rows = list(_table([_row(each, holders, held) for each, holders in users]))
    else:
        rows = ["no GPU was found" if unknown else "this host has no GPU"]
    return [*rows, *(f"unknown: {each}" for each in unknown)]


def _users(entry: Entry, holders: Iterable[Holder]) -> Iterator[Holder]:
    """Yield the processes that have one of the GPU's own nodes open."""
    paths = {node.path for node in entry.nodes}
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
