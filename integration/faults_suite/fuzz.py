"""Mutate the input of parsers, which may only raise our own errors, and take linear time at most."""

import random
import time
import traceback
from collections.abc import Iterator
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
SLACK = 3.0
"""LARGE may take eight times as long as SMALL, times this factor: a busy machine sometimes takes twice as long."""
QUICKLY = 0.25
"""Seconds for LARGE; a parser that is faster is never called slow."""


@dataclass(frozen=True, slots=True)
class Fuzz:
    """A number of mutations for one parser, seeded with its name."""

    parser: str
    inputs: int


def fuzz(what: Fuzz) -> Finding | None:
    """Return a finding if an input fails or takes too long. Parser name and input number reproduce an input."""
    parse, choose = PARSERS[what.parser], random.Random(what.parser)
    corpus = [path.read_bytes() for path in sorted((CORPUS / what.parser).iterdir())]
    wrong = []
    for number in range(what.inputs):
        data = corpus[number] if number < len(corpus) else _mutate(choose, corpus)
        if error := _failure(parse, data):
            wrong.append(f"input {number}, {data[:80]!r}: {error}")
    for name, unit in _repeated(corpus):
        if error := _slow(parse, unit):
            wrong.append(f"{name}: {error}")
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


def _repeated(corpus: list[bytes]) -> Iterator[tuple[str, bytes]]:
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
        ("empty lines", b"\n"),
        ("comments", b"#\\\n"),
    )


def _slow(parse: object, unit: bytes) -> str:
    if not unit:
        return ""
    large = _seconds(parse, unit, LARGE)
    if large < QUICKLY:
        return ""
    small = _seconds(parse, unit, SMALL)
    limit = small * LARGE / SMALL * SLACK
    return f"{large:.2f} s for 1 MiB, and {small:.3f} s for 128 KiB" if large > limit else ""


def _seconds(parse: object, unit: bytes, size: int) -> float:
    data = (unit * (size // len(unit) + 1))[:size]
    began = time.process_time()
    _failure(parse, data)
    return time.process_time() - began
