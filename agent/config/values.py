"""The checks of values that several settings share: paths, hosts, URLs, and lists without repetitions. Pure."""

import re
from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from agent.config.table import Check

T = TypeVar("T")

PLAIN = re.compile(r"(?! )[^\\\x00-\x1f\x7f]*(?<! )")
"""Matches a path that systemd takes literally in a Bind= line, once the path's colons are escaped. The path neither
begins nor ends with a blank, which systemd would strip. It has no backslash, which would begin an escape sequence."""
PATH_LIMIT, NAME_LIMIT = 4095, 255
"""The largest numbers of bytes in a path, and in each name in it (PATH_MAX and NAME_MAX of limits.h)."""


def absolute(value: str) -> str:
    """Return the path without doubled or trailing slashes.

    Raises ValueError if it is not absolute, has a component `.` or `..`, or has unprintable characters.
    """
    if not value.startswith("/") or not value.isprintable() or {".", ".."} & set(value.split("/")):
        why = "is not an absolute path, such as /opt/driver/lib, or has `.`, `..` or unprintable characters in it"
        raise ValueError(f"{value!r} {why}")
    return "/" + "/".join(part for part in value.split("/") if part)


AbsolutePath = Annotated[str, Check(absolute)]
"""Normalised: no trailing and no doubled slashes."""


def plain(value: str) -> str:
    """Return the path. Raises ValueError if it is too long, or if systemd would not take it literally."""
    if not PLAIN.fullmatch(value) or not value.isprintable():
        raise ValueError(f"{value!r} has a backslash, a control character, or a blank at its start or end")
    if len(value.encode()) > PATH_LIMIT or any(len(part.encode()) > NAME_LIMIT for part in value.split("/")):
        raise ValueError(f"{value[:40]!r}... is longer than a path can be")
    return value


def host_name(value: str) -> str:
    """Return the host name or address.

    Raises ValueError if Python could not look it up, for example because a label (a part between two dots) is empty.
    """
    try:
        value.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{value!r} is not a host: {error}") from None
    return value


def usable_url(value: str) -> str:
    """Return the URL. Raises ValueError if http.client could not use it, or if it has a query or a fragment.

    The error does not quote the URL, because it may contain a secret.
    """
    try:
        parts = urlsplit(value)
        unusable = not host_name(parts.hostname or "") or parts.port == 0 or parts.query or parts.fragment
    except ValueError:
        unusable = True
    if unusable or not value.isascii():
        raise ValueError("no request can be sent there: check the host and the port, and use ASCII without `?` and `#`")
    return value


def is_below(path: str, others: Iterable[str]) -> bool:
    """Return whether the path is one of the others, or lies below one of them."""
    return f"{path}/".startswith(tuple(f"{other}/" for other in others))


def once(kind: str, key: Callable[[T], str]) -> Check:
    """Return a check for lists that raises ValueError if two items have the same key.

    In the error, `kind` says what the items are.
    """

    def check(values: list[T]) -> list[T]:
        keys = [key(value) for value in values]
        if repeated := next((each for each in keys if keys.count(each) > 1), ""):
            raise ValueError(f"{kind} {repeated} appears twice")
        return values

    return Check(check)
