"""Finds the version, the kind and the device names in a CDI specification in YAML. Pure.

A pod may have written the file. The parser's nodes are read, in which an alias is the node itself, not a copy; none is
read twice, so a small file with many aliases takes neither time nor memory. Only plain YAML is accepted: one document,
not nested too deeply, in which all parsers read the same keys, kind and names. In any other file, a runtime could find
devices that this module does not see. Such devices could conflict with the devices of the agent's specification, or
take precedence over them.

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
STRING = "tag:yaml.org,2002:str"
SMALL_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
"""Pattern of plain scalars that are small numbers. OTHER_TYPE matches them too, but all runtimes read the same text."""
OTHER_TYPE = re.compile(
    r"|~|null|y|yes|true|on|n|no|false|off|<<"
    r"|[-+]?(0[box][0-9a-f_]+|\.?[0-9][0-9_]*(\.[0-9_]*)?(e[-+]?[0-9]+)?)",
    re.IGNORECASE,
)
"""Pattern of plain scalars that runtimes may read as another value: `010` as `8`, `1.0` as `1`, `yes` as `true`."""


class Loader(CSafeLoader):
    """A parser to which every plain scalar is text. PyYAML's own rules take `0000:00:02.0` for a number."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own attribute


def parse(text: str) -> dict[str, object]:
    """Return the version (`cdiversion`), the kind, and the devices with only their names. Raises DocumentError."""
    content, depth, document = text.encode(errors="surrogateescape"), 0, dict[str, object]()
    seen = set[int]()
    try:
        for event in yaml.parse(content, Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise _refusal(event)
        root = yaml.compose(content, Loader)
        members = _members(root, seen) if root else {}
        version = members.get("cdiversion")
        # Of no other node it is certain what runtimes read.
        if isinstance(version, yaml.ScalarNode) and version.tag == STRING:
            document["cdiversion"] = version.value
        if kind := members.get("kind"):
            document["kind"] = _text(kind, seen)
        devices = members.get("devices")
        # If the value of `devices` is a scalar, for example because it is empty, it names no device.
        if devices and not isinstance(devices, yaml.ScalarNode):
            if not isinstance(devices, yaml.SequenceNode):
                raise _refusal(devices)
            listed = (_members(each, seen) for each in devices.value)
            document["devices"] = [{"name": _text(each["name"], seen)} if "name" in each else {} for each in listed]
        return document
    except yaml.YAMLError as error:
        # The error's text is not repeated, because it quotes the file: a pod may have put anything there.
        mark = getattr(error, "problem_mark", None)
        where = f", see line {mark.line + 1}" if mark else ""
        raise DocumentError(f"neither JSON nor plain YAML{where}", "write it as JSON, or remove it") from None


def _members(mapping: yaml.Node, seen: set[int]) -> dict[str, yaml.Node]:
    """Return a mapping's values by key in lower case."""
    if not isinstance(mapping, yaml.MappingNode) or id(mapping) in seen:
        raise _refusal(mapping)
    seen.add(id(mapping))
    found: dict[str, yaml.Node] = {}
    for key, value in mapping.value:
        name = _text(key, seen).casefold()
        if name in found:
            raise _refusal(key)
        found[name] = value
    return found


def _text(node: yaml.Node, seen: set[int]) -> str:
    """Return a scalar's text. Raises YAMLError for any other node, and if some parsers read the scalar differently."""
    if isinstance(node, yaml.ScalarNode) and node.tag == STRING and id(node) not in seen:
        seen.add(id(node))
        if node.style or SMALL_NUMBER.fullmatch(node.value) or not OTHER_TYPE.fullmatch(node.value):
            return str(node.value)
    raise _refusal(node)


def _refusal(place: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem_mark=place.start_mark)  # type: ignore[arg-type]  # libyaml has its own marks
