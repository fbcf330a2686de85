"""The base class of the configuration's tables, and the checks that `Annotated` attaches to the types of their keys.

pydantic validates a document, because it finds all mistakes; msgspec would stop at the first one. Nevertheless, the
tables are msgspec structs: to load pydantic takes 80 ms and 13 MB, so only code that validates a new document loads it.
Its core schemas are dicts (documentation of pydantic_core), so tables and checks can return theirs without it.
"""

import ipaddress
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import fields

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration. Its `__post_init__` raises ValueError if keys contradict each other."""

    @classmethod
    def validated(cls, document: object) -> Self:
        """Return the table in a document. Raises pydantic.ValidationError, which is a ValueError."""
        table: Self = _adapter(cls).validate_python(document, strict=True)
        return table

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        keys = {
            each.name: {
                "type": "typed-dict-field",
                "schema": handler.generate_schema(each.type),
                "required": each.required,
            }
            for each in fields(cls)
        }
        return _after(lambda values: cls(**values), {"type": "typed-dict", "fields": keys, "extra_behavior": "forbid"})


@cache
def _adapter(table: type[Table]) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(table)


def _after(function: Callable[[Any], object], schema: Any) -> "CoreSchema":  # noqa: ANN401
    """Return the schema of values that are checked by another schema first, then by the function."""
    return {"type": "function-after", "function": {"type": "no-info", "function": function}, "schema": schema}


class Check(Struct, frozen=True):
    """Checks the value of a key, or an item in that value."""

    function: Callable[[Any], object]
    """Takes the value, and returns it, perhaps in another form. Raises ValueError if the value is not allowed."""

    def __get_pydantic_core_schema__(self, source: object, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        return _after(self.function, handler(source))


class Range(Struct, frozen=True):
    """Limits a whole number. The limits themselves are allowed."""

    lowest: int
    highest: int

    def __get_pydantic_core_schema__(self, source: object, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        return {"type": "int", "ge": self.lowest, "le": self.highest}


def text(pattern: str, expected: str, *, longest: int = 0, secret: bool = False) -> Check:
    """Return a check for strings that match a regular expression as a whole.

    In the error, `expected` says what the string should be. If `longest` is not 0, it limits the string's length. If
    the string may be `secret`, the error does not quote it: everyone can read the error in conditions and on the
    service's pages.
    """

    def check(value: str) -> str:
        # Check the length first: the time that a regular expression takes may grow with the square of the length.
        if longest and len(value) > longest:
            raise ValueError(f"must not be longer than {longest} characters")
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{'it' if secret else repr(value)} is not {expected}")
        return value

    return Check(check)


T = TypeVar("T")

# The functions of checks return the value, perhaps in another form. They raise ValueError if it is not allowed.

PLAIN = re.compile(r"(?! )[^\\\x00-\x1f\x7f]*(?<! )")
"""Matches a path that systemd takes literally in a Bind= line, once the path's colons are escaped. The path neither
begins nor ends with a blank, which systemd would strip. It has no backslash, which would begin an escape sequence."""
PATH_LIMIT, NAME_LIMIT = 4095, 255
"""The largest numbers of bytes in a path, and in each name in it (PATH_MAX and NAME_MAX of limits.h)."""


def absolute(value: str) -> str:
    """Return the path without doubled or trailing slashes, if it is absolute and has no `.` and `..`."""
    if not value.startswith("/") or not value.isprintable() or {".", ".."} & set(value.split("/")):
        why = "is not an absolute path, such as /opt/driver/lib, or has `.`, `..` or unprintable characters in it"
        raise ValueError(f"{value!r} {why}")
    return "/" + "/".join(part for part in value.split("/") if part)


def plain(value: str) -> str:
    """Return the path, if it is not too long, and systemd takes it literally."""
    if not PLAIN.fullmatch(value) or not value.isprintable():
        raise ValueError(f"{value!r} has a backslash, a control character, or a blank at its start or end")
    if len(value.encode()) > PATH_LIMIT or any(len(part.encode()) > NAME_LIMIT for part in value.split("/")):
        raise ValueError(f"{value[:40]!r}... is longer than a path can be")
    return value


def host_name(value: str) -> str:
    """Return the host, if Python can look it up: no label (a part between two dots) may be empty, for example."""
    try:
        value.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{value!r} is not a host: {error}") from None
    return value


def usable_url(value: str) -> str:
    """Return the URL, if http.client can use it. The error does not quote it, because it may contain a secret."""
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
    """Return a check for lists: no two items have the same key. In the error, `kind` says what the items are."""

    def check(values: list[T]) -> list[T]:
        keys = [key(value) for value in values]
        if repeated := next((each for each in keys if keys.count(each) > 1), ""):
            raise ValueError(f"{kind} {repeated} appears twice")
        return values

    return Check(check)


# Names and values in Kubernetes' API: the rules of IsQualifiedName and IsValidLabelValue (util/validation of
# k8s.io/apimachinery).
NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
IN_NAMES = "letters, digits, dots, hyphens and underscores, and must begin and end with a letter or digit"
SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
SUBDOMAIN_LIMIT = 253
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")

NodeName = Annotated[
    str,
    text(
        SUBDOMAIN, "a DNS name (lower-case letters, digits and hyphens, parts joined by dots)", longest=SUBDOMAIN_LIMIT
    ),
]
"""A DNS subdomain (RFC 1123) in lower case, as Kubernetes requires it."""


def is_subdomain(text: str) -> bool:
    """Return whether the text is a DNS subdomain, as the name of a Node must be."""
    return len(text) <= SUBDOMAIN_LIMIT and bool(re.fullmatch(SUBDOMAIN, text))


LABEL_KEY = text(
    rf"((?=[^/]{{1,{SUBDOMAIN_LIMIT}}}/){SUBDOMAIN}/)?{NAME}",
    f"a key: its name must have 1 to 63 {IN_NAMES}; what precedes the slash must be a DNS subdomain in lower case",
)
LABEL_VALUE = text(f"({NAME})?", f"a value: it must have at most 63 {IN_NAMES}")


def startup_taint(value: str) -> str:
    """Return the taint, which may be empty, if its effect keeps pods away."""
    if value and split_taint(value)[2] == "PreferNoSchedule":
        raise ValueError(f"{value!r} keeps no pod away: use NoSchedule or NoExecute")
    return value


def split_taint(text: str) -> tuple[str, str, str]:
    """Return the key, value and effect of a taint."""
    key_and_value, colon, effect = text.rpartition(":")
    key, _, value = key_and_value.partition("=")
    if not colon or effect not in EFFECTS:
        raise ValueError(f"{text!r} is not a taint: write KEY=VALUE:EFFECT with one of {', '.join(EFFECTS)}")
    LABEL_KEY.function(key)
    LABEL_VALUE.function(value)
    return key, value, effect


def ip_address(value: str) -> str:
    """Return the IP address in its usual form."""
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError(f"{value!r} is not an IP address") from None


def node_addresses(value: str) -> str:
    """Return at most one IPv4 and one IPv6 address, separated by a comma."""
    addresses = [ip_address(each) for each in value.split(",")] if value else []
    if len(addresses) > 2 or len({":" in each for each in addresses}) != len(addresses):
        raise ValueError(f"{value!r}: a node has one address, or one of IPv4 and one of IPv6")
    return ",".join(addresses)


AbsolutePath = Annotated[str, Check(absolute)]
LabelKey = Annotated[str, LABEL_KEY]
LabelValue = Annotated[str, LABEL_VALUE]
Taint = Annotated[str, Check(lambda value: split_taint(value) and value)]
StartupTaint = Annotated[str, Check(startup_taint)]
IpAddress = Annotated[str, Check(ip_address)]
NodeAddresses = Annotated[str, Check(node_addresses)]
