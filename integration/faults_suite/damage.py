"""Damage the agent's files like a failing disk, a newer release or a careless administrator."""

import hashlib
import os
import re
import stat
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agent.model.paths import nspawn_file, unit_drop_in
from integration.faults_suite.points import Baseline, Finding, Story, directory, silence
from integration.faults_suite.trees import differences, snapshot
from tests.fakes.gpu_host import MACHINE
from tests.fakes.host import UnexpectedError


def _flip(content: bytes, where: int) -> bytes:
    position = where % max(1, len(content))
    return (
        content[:position] + bytes([content[position] ^ 1 << where % 7]) + content[position + 1 :] if content else b"\1"
    )


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "without its end": lambda content: content[:-3],
    "zeroed": lambda content: bytes(len(content)),
    "of a future version": lambda content: b'{"version": 99, "files": {}, "unheard": [1]}',
    "a list": lambda content: b"[]",
    "a number of 5,000 digits": lambda content: b"1" * 5000,
    "nested 3,000 deep": lambda content: b"[" * 3000 + b"]" * 3000,
    "not UTF-8": lambda content: b"\xff\xfe\x00" + content,
    "twice": lambda content: content * 2,
} | {f"with bit {where} changed": (lambda content, where=where: _flip(content, where)) for where in (1, 17, 101, 997)}


def _directory(place: Path) -> None:
    place.unlink()
    (place / "inner").mkdir(parents=True)
    (place / "inner" / "file").write_text("somebody's")


def _fifo(place: Path) -> None:
    place.unlink()
    os.mkfifo(place)


def _link(place: Path) -> None:
    place.unlink()
    place.symlink_to("/nowhere")


FILE = re.compile("[0-7]{4} ")
"""How a snapshot's text for a regular file begins: with the file's mode, which the content follows."""
KINDS: dict[str, Callable[[Path], None]] = {"a directory": _directory, "a FIFO": _fifo, "a dangling link": _link}

SETTINGS = (nspawn_file(MACHINE), unit_drop_in(MACHINE))
UNRECOGNISED = {*KINDS, "of a future version", "a list", "a number of 5,000 digits", "nested 3,000 deep", "not UTF-8"}
"""Damage after which the agent does not recognise its file. If that is one of SETTINGS, it counts as foreign, and the
agent does not change it."""
REFUSED = dict.fromkeys(("DevicesAllowed", "Ready"), ("False", "ForeignFile"))


@dataclass(frozen=True, slots=True)
class Damage:
    """A kind of damage to one file."""

    path: str
    how: str

    @property
    def foreign(self) -> bool:
        """Return whether the damaged file counts as foreign (ForeignFile)."""
        return self.path in SETTINGS and self.how in UNRECOGNISED

    def do(self, tree: Path) -> None:
        place = tree / self.path[1:]
        if self.how in KINDS:
            KINDS[self.how](place)
        else:
            mode = stat.S_IMODE(place.stat().st_mode)
            content = CONTENTS[self.how](place.read_bytes())
            # Replace the file, as a careless administrator would.
            place.unlink()
            place.write_bytes(content)
            place.chmod(mode)


def damages(state: dict[str, str], places: tuple[str, ...], every: int = 1) -> list[Damage]:
    """Return every damage to every file of `state` below `places`; with `every`, a sample of one in so many."""
    files = [path for path, text in sorted(state.items()) if path.startswith(places) and FILE.match(text)]
    found = [Damage(path, how) for path in files for how in (*CONTENTS, *KINDS)]
    return [each for each in found if int(hashlib.sha256(repr(each).encode()).hexdigest(), 16) % every == 0]


def damage(story: Story, baseline: Baseline, what: Damage) -> Finding | None:
    """Run the story's work on a world with that damage and no other change, and return what is wrong afterwards.

    The state is not compared with the baseline's, because it is a cache that is filled again: a driver root may get
    another index.
    """
    wrong: list[str] = []
    with directory() as place, silence():
        world = story.begin(Path(place))
        what.do(world.tree)
        settings = snapshot(world.tree / "etc/systemd")
        try:
            story.again(world)
        except (Exception, UnexpectedError):
            wrong.append(f"an unexpected exception: {traceback.format_exc(limit=-4)}")
        else:
            now = world.conditions()
            wrong += world.faults()
            wrong += [f"{each} was taken away" for each in sorted(baseline.rights - world.rights())]
            if "bit" not in what.how:
                # After a changed bit, conditions are not compared: the document may still be valid and have another
                # value, which only a digest would reveal.
                expected = baseline.conditions | (REFUSED if what.foreign else {})
                wrong += [f"{kind} is {now.get(kind)}" for kind, wanted in expected.items() if now.get(kind) != wanted]
            if what.foreign:
                wrong += differences(settings, snapshot(world.tree / "etc/systemd"))
    return Finding(story.name, f"{what.path} is {what.how}", tuple(wrong)) if wrong else None
