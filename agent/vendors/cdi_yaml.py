"""Finds the kind and the device names in a CDI specification in YAML. Pure.

A pod may have written the file. The parser's nodes are read, in which an alias is the node itself, not a copy. Only
plain YAML is accepted: one document, not nested too deeply, in which all parsers read the same keys, kind and names. In
any other file, a runtime could find devices that this module does not see. Such devices could conflict with the devices
of the agent's specification, or take precedence over them.

Importing this module needs PyYAML with libyaml, which is ten times as fast as PyYAML's own parser. Container runtimes
use a translation of libyaml into Go (go.yaml.in/yaml/v2).
"""

import re

import yaml
from yaml import CSafeLoader

from agent.model.errors import DocumentError

DEEPEST = 100
"""The largest permitted number of nested levels; a specification has seven. libyaml's time grows with the square of the
number of levels: 1 MiB of brackets would take minutes."""
STRING, NUMBER = (f"tag:yaml.org,2002:{each}" for each in ("str", "int"))
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
    content, depth, document = text.encode(errors="surrogateescape"), 0, dict[str, object]()
    try:
        for event in yaml.parse(content, CSafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise _refusal(event)
        root = yaml.compose(content, CSafeLoader)
        members = _members(root) if root else {}
        if kind := members.get("kind"):
            document["kind"] = _text(kind)
        devices = members.get("devices")
        # If the value of `devices` is a scalar, for example because it is empty, it names no device.
        if devices and not isinstance(devices, yaml.ScalarNode):
            if not isinstance(devices, yaml.SequenceNode):
                raise _refusal(devices)
            listed = map(_members, devices.value)
            document["devices"] = [{"name": _text(each["name"])} if "name" in each else {} for each in listed]
        return document
    except yaml.YAMLError as error:
        # The error's text is not repeated, because it quotes the file: a pod may have put anything there.
        mark = getattr(error, "problem_mark", None)
        where = f", see line {mark.line + 1}" if mark else ""
        raise DocumentError(f"neither JSON nor plain YAML{where}", "write it as JSON, or remove it") from None


def _members(mapping: yaml.Node) -> dict[str, yaml.Node]:
    """Return a mapping's values by key in lower case."""
    if not isinstance(mapping, yaml.MappingNode):
        raise _refusal(mapping)
    found: dict[str, yaml.Node] = {}
    for key, value in mapping.value:
        name = _text(key).casefold()
        if name in found:
            raise _refusal(key)
        found[name] = value
    return found


def _text(node: yaml.Node) -> str:
    """Return a scalar's text. Raises YAMLError for any other node, and if some parsers read the scalar differently."""
    if isinstance(node, yaml.ScalarNode) and node.tag in (STRING, NUMBER):
        quoted = node.style and node.tag == STRING
        if quoted or SMALL_NUMBER.fullmatch(node.value) or not OTHER_TYPE.fullmatch(node.value):
            return str(node.value)
    raise _refusal(node)


def _refusal(place: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem_mark=place.start_mark)  # type: ignore[arg-type]  # libyaml has its own marks
