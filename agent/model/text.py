"""Formats text for people and for the API server: single lines without invisible characters, numbers and times."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from unicodedata import category

MESSAGE_LIMIT = 2000
"""Characters that a condition's message may have."""
LISTED = 10
"""How many items of a list, whose length nothing limits, a message names, so that what follows them is not cut off."""

BLANK = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
"""Characters that str.isprintable() accepts and no terminal shows: fillers, variation selectors
(Default_Ignorable_Code_Point in Unicode's DerivedCoreProperties.txt), the Braille pattern without dots."""


QUOTE_LIMIT = 300
"""Characters of an outsider's text that `quoted` shows: enough for a path with the longest possible name."""
PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+,-./:=@_")


def printable(text: str) -> str:
    """Return the text with whitespace other than a space turned into spaces, and other invisible characters escaped.

    So the text is one line. Messages go to terminals, logs and JSON, and contain names of files that users other than
    root may choose. With invisible characters, or those that change the writing direction, one name can look like
    another.
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    # Marks (M) are drawn onto the character before them, so they make one name look like another.
    if character.isprintable() and character not in BLANK and category(character)[0] != "M":
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()


def quoted(text: str, limit: int = QUOTE_LIMIT) -> str:
    """Return text that an outsider may have chosen, such as a pod, for use in a sentence: at most `limit` characters.

    What looks like a plain name or path stays as it is. Anything else is put in quotes, with all but ASCII escaped, so
    it can neither look like another name nor like a part of the sentence.
    """
    shown = text if len(text) <= limit else f"{text[:limit]}..."
    return shown if shown and PLAIN.issuperset(shown) else ascii(shown)


def one_line(text: str) -> str:
    """Return text, such as a program's output, on one printable line of at most MESSAGE_LIMIT characters."""
    return printable(" ".join(text.split()))[:MESSAGE_LIMIT]


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun, such as `1 GPU` or `2 GPUs`. By default, the plural is the singular with an s."""
    return f"{number} {singular if number == 1 else plural or f'{singular}s'}"


def first_of(items: Sequence[str], number: int = LISTED, separator: str = ", ") -> str:
    """Return the first items, up to this number, and how many more there are: `a, b and 2 more`."""
    more = len(items) - number
    return separator.join(items[:number]) + (f" and {more} more" if more > 0 else "")


def first_quoted(names: Iterable[str], number: int, limit: int = QUOTE_LIMIT) -> str:
    """Return the first names that outsiders may have chosen, each as `quoted` shows it, and how many more there are."""
    return first_of([quoted(each, limit) for each in names], number)


def restart_command(machine: str) -> str:
    """Return the command, in a message, that restarts a machine and moves its pods to other nodes first."""
    by_hand = f"if `up` did not make its node: `unbounded-agent restart {machine}`, after `kubectl drain`"
    return f"`unbounded-agent restart {machine} --kubeconfig FILE` ({by_hand})"


def dotted(version: Iterable[int]) -> str:
    """Return a version as programs print it: `1.7.24`."""
    return ".".join(map(str, version))


def rfc3339(seconds: float) -> str:
    """Return a time as Kubernetes writes it: UTC, whole seconds."""
    # Imported here, because the import takes a tenth of the machine half's start, and most runs format no date.
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# Parses numbers in text that the kernel and programs write.

DIGITS = 18
"""Digits of the longest number that is accepted. Without a limit, int() would raise ValueError at 4,301 digits
(sys.set_int_max_str_digits)."""


def whole_number(text: str) -> int | None:
    """Return the number; None unless the text is 1 to DIGITS ASCII digits. int() would accept other scripts' digits."""
    return int(text) if len(text) <= DIGITS and text.isascii() and text.isdecimal() else None


# Digests by which the agent recognises content.


def sha256(content: bytes) -> str:
    """Return the SHA-256 digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def json_digest(value: object) -> str:
    """Return the digest of a value in JSON, whatever the order of its keys."""
    return sha256(json.dumps(value, sort_keys=True).encode())


def portion(done: int, total: int) -> str:
    """Return how many of `total` bytes are done, in words. skopeo may write somewhat more than the registry has."""
    return f"{done >> 20} of {total >> 20} MiB ({min(100 * done // total, 100) if total else 100} %)"
