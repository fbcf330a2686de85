"""Finds the kind and the device names in a CDI specification in YAML, from the parser's events. Pure.

A pod may have written the file. The parser's events are read one by one, so no alias is expanded, and nothing here
recurses. Only plain YAML is accepted: one document, not nested too deeply, in which all parsers read the same keys,
kind and names. In any other file, a runtime could find devices that this module does not see. Such devices could
conflict with the devices of the agent's specification, or take precedence over them.

Importing this module needs PyYAML with libyaml, which is ten times as fast as PyYAML's own parser. Container runtimes
use a translation of libyaml into Go (go.yaml.in/yaml/v2).
"""

import re
from collections.abc import Iterator

import yaml
from yaml import CSafeLoader

from agent.model.errors import DocumentError

DEEPEST = 100
"""The largest permitted number of nested levels; a specification has seven. libyaml's time grows with the square of the
number of levels: 1 MiB of brackets would take minutes."""
SMALL_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
"""Pattern of plain scalars that are small numbers. OTHER_TYPE matches them too, but all runtimes read the same text."""
OTHER_TYPE = re.compile(
    r"|~|null|y|yes|true|on|n|no|false|off|<<"
    r"|[-+]?(0[box][0-9a-f_]+|\.?[0-9][0-9_]*(\.[0-9_]*)?(e[-+]?[0-9]+)?)",
    re.IGNORECASE,
)
"""Pattern of plain scalars that runtimes may read as another value: `010` as `8`, `1.0` as `1`, `yes` as `true`."""


def parse(text: str) -> dict[str, object]:
    """Return the kind, and the devices with only their names. Raises DocumentError."""
    try:
        return _document(_events(text.encode(errors="surrogateescape")))
    except yaml.YAMLError as error:
        # The error's text is not repeated, because it quotes the file: a pod may have put anything there.
        mark = getattr(error, "problem_mark", None)
        where = f", see line {mark.line + 1}" if mark else ""
        raise DocumentError(f"neither JSON nor plain YAML{where}", "write it as JSON, or remove it") from None


def _events(content: bytes) -> Iterator[yaml.Event]:
    depth = 0
    for event in yaml.parse(content, CSafeLoader):
        depth += _depth_change(event)
        if depth > DEEPEST:
            raise _refusal(event)
        yield event


def _document(events: Iterator[yaml.Event]) -> dict[str, object]:
    """Return the kind and the devices of the only document; nothing for an empty stream."""
    document: dict[str, object] = {}
    next(events)  # The start of the stream.
    if isinstance(next(events), yaml.StreamEndEvent):
        return document
    for key, value in _members(events, next(events)):
        if key == "kind":
            document[key] = _text(value)
        # If the value of `devices` is a scalar, for example because it is empty, it names no device.
        elif key == "devices" and not isinstance(value, yaml.ScalarEvent):
            document[key] = _devices(events, value)
        else:
            _skip(events, value)
    next(events)  # The end of the document. The next event must end the stream.
    if not isinstance(end := next(events), yaml.StreamEndEvent):
        raise _refusal(end)
    return document


def _devices(events: Iterator[yaml.Event], start: yaml.Event) -> list[dict[str, str]]:
    if not isinstance(start, yaml.SequenceStartEvent):
        raise _refusal(start)
    devices = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        device = {}
        for key, value in _members(events, event):
            if key == "name":
                device[key] = _text(value)
            else:
                _skip(events, value)
        devices.append(device)
    return devices


def _members(events: Iterator[yaml.Event], start: yaml.Event) -> Iterator[tuple[str, yaml.Event]]:
    """Yield a mapping's keys in lower case, each with the first event of its value.

    The caller must consume the other events of the value.
    """
    if not isinstance(start, yaml.MappingStartEvent):
        raise _refusal(start)
    seen = set()
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _text(event).casefold()
        if key in seen:
            raise _refusal(event)
        seen.add(key)
        yield key, next(events)


def _text(event: yaml.Event) -> str:
    """Return a scalar's text. Raises YAMLError for any other event, and if some parsers read the scalar differently."""
    if isinstance(event, yaml.ScalarEvent):
        # If the scalar has a tag other than `!`, `plain` and `quoted` are both false, and the scalar is refused.
        plain, quoted = event.implicit
        if quoted or (plain and (SMALL_NUMBER.fullmatch(event.value) or not OTHER_TYPE.fullmatch(event.value))):
            return str(event.value)
    raise _refusal(event)


def _skip(events: Iterator[yaml.Event], event: yaml.Event) -> None:
    """Consume the rest of the value whose first event is `event`."""
    depth = _depth_change(event)
    while depth:
        depth += _depth_change(next(events))


def _depth_change(event: yaml.Event) -> int:
    return isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)


def _refusal(event: yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem_mark=event.start_mark)  # type: ignore[arg-type]  # libyaml has its own marks
