"""Names of the devices in others' CDI specifications, without a YAML parser: the standard library has none. Pure.

It understands YAML's block style, which all known generators write, and refuses other styles: a specification taken
for one without devices would outrank ours, or collide with it, unnoticed.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from agent.model.errors import DocumentError

KEY = re.compile(r"""(?P<quote>["']?)(?P<key>[A-Za-z]\w*)(?P=quote)\s*:(?:\s+(?P<value>.*))?""")
SCALAR = re.compile(r"""(?:"([^"\\]*)"|'([^']*)'|([A-Za-z0-9][\w./:-]*))(?:\s+#.*)?""")
"""A value in double quotes, in single quotes, or plain, and possibly a comment."""
ITEM = re.compile(r"(?P<indent> *)(?P<dash>- +)(?P<rest>.*)")


def device_names(text: str) -> tuple[str, ...]:
    """Return qualified names; none for an invalid specification. Raises DocumentError if that is unknown."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        pass
    else:
        return tuple(_listed(document))
    try:
        return tuple(_of_yaml(text))
    except _RefusedError as error:
        number = next((n for n, line in enumerate(text.splitlines(), 1) if str(error) in line), 1)
        # Do not repeat its text: a pod may have put anything there.
        why = f"neither JSON nor YAML in block style, see line {number}"
        raise DocumentError(why, "write it as JSON, or remove it") from None


class _RefusedError(Exception):
    """Holds the part of a line that is not understood."""


def _listed(document: Any) -> list[str]:  # noqa: ANN401 - whatever JSON holds
    kind, devices = (document.get("kind"), document.get("devices")) if isinstance(document, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(devices, list):
        return []
    names = (each.get("name") if isinstance(each, dict) else None for each in devices)
    return [f"{kind}={name}" for name in names if isinstance(name, str)]


def _of_yaml(text: str) -> list[str]:
    blocks = _blocks(text)
    if "kind" not in blocks or "devices" not in blocks:
        return []
    (kind, below), (value, devices) = blocks["kind"], blocks["devices"]
    if below or value:
        raise _RefusedError(kind if below else value)
    return [f"{_scalar(kind)}={name}" for name in _names(devices)]


def _blocks(text: str) -> dict[str, tuple[str, list[str]]]:
    """Return, by key of the document, the text after the key and the lines below it, without comments."""
    blocks: dict[str, tuple[str, list[str]]] = {}
    below: list[str] | None = None
    for line in _lines(text):
        if line == "---" and below is None:
            continue
        if line.startswith((" ", "- ")) and below is not None:
            below.append(line)
            continue
        match = KEY.fullmatch(line)
        if match is None or match["key"] in blocks:
            raise _RefusedError(line)
        below = []
        blocks[match["key"]] = (_without_comment(match["value"]), below)
    return blocks


def _names(lines: list[str]) -> list[str]:
    """Return the names in a list of devices: those at the indentation of its keys, as other names are deeper."""
    names: list[list[str]] = []
    start = keys = 0
    for line in lines:
        item = ITEM.fullmatch(line)
        if item and (not names or len(item["indent"]) == start):
            start, keys = len(item["indent"]), len(item["indent"]) + len(item["dash"])
            names.append([])
            line = " " * keys + item["rest"]
        indent = len(line) - len(line.lstrip(" "))
        if indent > keys and names:
            continue
        match = KEY.fullmatch(line[indent:])
        # A list may have its key's indentation.
        if match is None and names and indent == keys and line[indent:].startswith("- "):
            continue
        if match is None or indent != keys or not names:
            raise _RefusedError(line.strip())
        if match["key"] == "name":
            names[-1].append(_scalar(match["value"] or ""))
    if any(len(each) != 1 for each in names):
        raise _RefusedError("devices")
    return [name for (name,) in names]


def _lines(text: str) -> Iterable[str]:
    stripped = (line.rstrip() for line in text.splitlines())
    return (line for line in stripped if line and not line.lstrip().startswith("#"))


def _scalar(text: str) -> str:
    match = SCALAR.fullmatch(text)
    if match is None:
        raise _RefusedError(text)
    return next(each for each in match.groups() if each is not None)


def _without_comment(value: str | None) -> str:
    return "" if value is None or value.startswith("#") else value
