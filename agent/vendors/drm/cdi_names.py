"""Names of the devices of other CDI specs, without a parser of YAML, which the standard library lacks. Pure.

Of YAML the block style is understood, which all known generators write. What is written in another way is refused:
taken for a spec without devices, it would outrank ours, or collide with it, unnoticed.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from agent.errors import DocumentError

KEY = re.compile(r"""(?P<quote>["']?)(?P<key>[A-Za-z]\w*)(?P=quote)\s*:(?:\s+(?P<value>.*))?""")
SCALAR = re.compile(r"""(?:"([^"\\]*)"|'([^']*)'|([A-Za-z0-9][\w./:-]*))(?:\s+#.*)?""")
"""In double quotes, in single quotes, or plain; with a comment."""
ITEM = re.compile(r"(?P<indent> *)(?P<dash>- +)(?P<rest>.*)")


def device_names(text: str) -> tuple[str, ...]:
    """Qualified names; none of what is no valid spec. Raises DocumentError where that cannot be told."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return tuple(_of_yaml(text))
    return tuple(_listed(document))


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
        raise _refused(f"kind: {kind}" if below else f"devices: {value}")
    return [f"{_scalar(kind)}={name}" for name in _names(devices)]


def _blocks(text: str) -> dict[str, tuple[str, list[str]]]:
    """By key of the document: what stands behind the key, and the lines below it. Comments are left out."""
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
            raise _refused(line)
        below = []
        blocks[match["key"]] = (_without_comment(match["value"]), below)
    return blocks


def _names(lines: list[str]) -> list[str]:
    """Of a list of devices: by the indentation of its keys, as other names stand deeper."""
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
        # A list may stand as deep as its key.
        if match is None and names and indent == keys and line[indent:].startswith("- "):
            continue
        if match is None or indent != keys or not names:
            raise _refused(line)
        if match["key"] == "name":
            names[-1].append(_scalar(match["value"] or ""))
    if any(len(each) != 1 for each in names):
        raise _refused("a device without just one name")
    return [name for (name,) in names]


def _lines(text: str) -> Iterable[str]:
    stripped = (line.rstrip() for line in text.splitlines())
    return (line for line in stripped if line and not line.lstrip().startswith("#"))


def _scalar(text: str) -> str:
    match = SCALAR.fullmatch(text)
    if match is None:
        raise _refused(text)
    return next(each for each in match.groups() if each is not None)


def _without_comment(value: str | None) -> str:
    return "" if value is None or value.startswith("#") else value


def _refused(line: str) -> DocumentError:
    return DocumentError(
        f"neither JSON nor YAML in block style: {line.strip()[:80]!r}", "write it as JSON, or remove it"
    )
