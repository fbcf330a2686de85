"""Mutate the input of parsers, which may raise only AgentError and OSError, and take linear time at most."""

import gc
import json
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agent.model.errors import AgentError
from integration.faults_suite.parsers import CORPUS, PARSERS
from integration.faults_suite.points import Finding

TOKENS = (
    b"", b"\0", b"\n", b"\r\n", b" " * 40, b'"', b"'", b"\\", b"\\\n", b"#", b"=", b":", b",", b"[", b"]", b"{", b"}",
    b"[[", b"null", b"true", b"NaN", b"-1", b"1e999", b"0x7f", b"9" * 5000, b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80",
    "\u202e".encode(), "\u0663".encode(), b"../" * 20, b"%s%n", b"[" * 3000, b'{"a":' * 3000, b"a." * 2000,
)  # fmt: skip
SMALL, LARGE = 1 << 17, 1 << 20
"""Bytes. LARGE is the most that the agent reads of any file."""
SLACK = 1.5
"""LARGE may take eight times as long as SMALL, times this factor."""
TRIES = 4
QUICKLY = 0.25
"""Seconds for LARGE; a parser that is faster is never called slow."""


@dataclass(frozen=True, slots=True)
class Fuzz:
    """A number of mutations for one parser, seeded with its name."""

    parser: str
    inputs: int


def fuzz(what: Fuzz) -> Finding | None:
    """Return a finding if an input fails or takes too long. An input's number and its parser's name reproduce it."""
    parse, choose = PARSERS[what.parser], random.Random(what.parser)
    corpus = [path.read_bytes() for path in sorted((CORPUS / what.parser).iterdir())]
    wrong = []
    for number in range(what.inputs):
        data = corpus[number] if number < len(corpus) else _mutate(choose, corpus)
        if error := _failure(parse, data):
            wrong.append(f"input {number}, {data[:80]!r}: {error}")
    wrong += grows(what.parser)
    return Finding(f"parser {what.parser}", f"{len(wrong)} of {what.inputs} inputs", tuple(wrong)) if wrong else None


def _failure(parse: object, data: bytes) -> str:
    assert callable(parse)
    try:
        parse(data)
    except (AgentError, OSError):
        return ""
    except Exception:
        return traceback.format_exc(limit=-2).strip().replace("\n", " / ")
    return ""


def _mutate(choose: random.Random, corpus: list[bytes]) -> bytes:
    data = choose.choice(corpus)
    for _ in range(choose.choice((1, 1, 2, 4))):
        start = choose.randrange(len(data) + 1)
        end = min(len(data), start + choose.choice((0, 1, 1, 4, 30)))
        other = choose.choice(corpus)
        middle = choose.choice(
            (
                choose.choice(TOKENS),
                choose.choice(TOKENS),
                bytes([choose.randrange(256)]),
                data[start:end] * 2,
                data[start:end][::-1],
                other[choose.randrange(len(other) + 1) :],
            )
        )
        data = data[:start] + middle + data[end:]
    return data


def grows(parser: str) -> list[str]:
    """Return a sentence for each kind of text for which the parser takes more than linear time."""
    parse = PARSERS[parser]
    corpus = [path.read_bytes() for path in sorted((CORPUS / parser).iterdir())]
    found = ((name, _slow(parse, make)) for name, make in _long_texts(corpus))
    return [f"{name}: {error}" for name, error in found if error]


def _long_texts(corpus: list[bytes]) -> Iterator[tuple[str, Callable[[int], bytes]]]:
    """Yield kinds of text, each with a function that makes a text of that kind with a given number of bytes."""
    for name, unit in _units(corpus):
        if unit:
            yield name, lambda size, unit=unit: (unit * (size // len(unit) + 1))[:size]  # type: ignore[misc]
    try:
        document = json.loads(corpus[0])
    except ValueError:
        return
    yield from ((f"its list {place}, longer", make) for place, make in _longer_lists(document, lambda whole: whole))


def _longer_lists(
    part: object, whole: Callable[[object], object], place: str = ""
) -> Iterator[tuple[str, Callable[[int], bytes]]]:
    """Yield the lists in a part of a document, each with a function that makes the document with many more items in it.

    `whole` returns the document with another value in the part's place. Of a list's items, the first is looked into,
    and the shortest is repeated.
    """
    if isinstance(part, list) and part:
        item = min(part, key=lambda item: len(json.dumps(item)))
        yield place, lambda size: json.dumps(whole([*part, *[item] * (size // len(json.dumps([item])))])).encode()
        yield from _longer_lists(part[0], lambda value: whole([value, *part[1:]]), place)
    if isinstance(part, dict):
        for key, value in part.items():
            # The default value keeps this turn's key.
            yield from _longer_lists(value, lambda new, key=key: whole({**part, key: new}), f"{place}.{key}")  # type: ignore[misc]


def _units(corpus: list[bytes]) -> Iterator[tuple[str, bytes]]:
    yield "its whole text again and again", corpus[0]
    longest = max(corpus[0].splitlines(), key=len, default=b"")
    yield from (
        ("its longest line", longest + b"\n"),
        ("its longest line without an end", longest),
        ("continued lines", longest + b" \\\n"),
        ("blanks", b" "),
        ("digits", b"7"),
        ("open brackets", b"["),
        ("quotes", b'"'),
        ("keys", b"a="),
        ("parts of a key", b"a."),
        ("quoted parts of a key", b'"a" . '),
        ("empty lines", b"\n"),
        ("comments", b"#\\\n"),
    )


def _slow(parse: object, make: Callable[[int], bytes]) -> str:
    error = ""
    # A busy computer may slow down one measurement, but not each of several.
    for _ in range(TRIES):
        large = _seconds(parse, make(LARGE))
        if large < QUICKLY:
            return ""
        small = _seconds(parse, make(SMALL))
        if large <= small * LARGE / SMALL * SLACK:
            return ""
        error = f"{large:.2f} s for 1 MiB, and {small:.3f} s for 128 KiB"
    return error


def _seconds(parse: object, data: bytes) -> float:
    # The collector's passes are few and long: one in the longer text's time would count as growth.
    gc.disable()
    try:
        began = time.process_time()
        _failure(parse, data)
        return time.process_time() - began
    finally:
        gc.enable()
