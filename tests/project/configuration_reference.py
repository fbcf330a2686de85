"""Write the reference part of docs/configuration.md from the settings' classes: `make docs`.

A key's text is the docstring below it; its values and default are those of pydantic's JSON schema. A path such as
docs/kubernetes.md in a docstring becomes a link.
"""

import ast
import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent.config.devices import ExtraDevice
from agent.config.mounts import ExtraMount
from agent.config.node import (
    BinariesSettings,
    ContainerdSettings,
    HostNodeSettings,
    ImageSettings,
    KubeletSettings,
    NodeSettings,
)
from agent.config.nspawn_settings import NspawnSettings
from agent.config.settings import DriverSettings, MachineSettings, MetricsSettings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
BEGIN = "<!-- Generated from the settings' classes by `make docs`. Do not edit below this line. -->\n"
TABLES: Mapping[str, type[BaseModel]] = {
    "machines.NAME": MachineSettings,
    "machines.NAME.extra_devices": ExtraDevice,
    "machines.NAME.extra_mounts": ExtraMount,
    "machines.NAME.nspawn": NspawnSettings,
    "machines.NAME.node": NodeSettings,
    "machines.NAME.node.image": ImageSettings,
    "machines.NAME.node.binaries": BinariesSettings,
    "machines.NAME.node.kubelet": KubeletSettings,
    "machines.NAME.node.containerd": ContainerdSettings,
    "machines.NAME.node.host": HostNodeSettings,
    "driver": DriverSettings,
    "metrics": MetricsSettings,
}
"""Tables of the configuration, or lists of tables, with the class that validates each; in the page's order."""
OPTIONAL = ("machines.NAME.node", "machines.NAME.node.binaries")
"""Tables without which a part of the agent does nothing."""
UNSET = ("driver.root",)
"""Keys whose absence means something other than their default."""
LINK = re.compile(r"docs/([\w/-]+\.md)(#[\w-]+)?")

Schema = Mapping[str, Any]


def page(text: str) -> str:
    """Return the page with its generated part replaced. Raises ValueError if the line before that part is missing."""
    written, mark, _ = text.partition(BEGIN)
    if not mark:
        raise ValueError(f"{PAGE} does not contain the line {BEGIN!r}")
    return written + BEGIN + _contents() + "".join(_section(table, model) for table, model in TABLES.items())


def _contents() -> str:
    """Return a line with links for each table."""
    # Two tables may have a key of the same name; a page numbers such headings from the second on.
    before: Counter[str] = Counter()
    lines = []
    for table, model in TABLES.items():
        links = [f"[{field}](#{field}{f'-{before[field]}' if before[field] else ''})" for field in model.model_fields]
        before.update(list(model.model_fields))
        lines.append(f"- {_title(table)}: {', '.join(links)}\n")
    return "\n" + "".join(lines)


def _title(table: str) -> str:
    return f"entries of `{table}`" if table.endswith(("extra_devices", "extra_mounts")) else f"`[{table}]`"


def _section(table: str, model: type[BaseModel]) -> str:
    title = _title(table)
    title = title[0].upper() + title[1:]
    schema = model.model_json_schema()
    texts = dict(docstrings(model))
    parts = [f"\n## {title}\n\n{_prose(inspect.getdoc(model) or '')}"]
    for field, properties in schema["properties"].items():
        default = f"default `{toml(properties['default'])}`" if "default" in properties else "required"
        if f"{table}.{field}" in UNSET:
            default = "not set by default"
        if f"{table}.{field}" in OPTIONAL:
            default = "optional, see below"
        elif "$ref" in properties or f"{table}.{field}" in TABLES:
            default = "see below"
        parts.append(f"\n### `{field}`\n\n*{values(properties, schema)}; {default}*\n\n{_prose(texts[field])}")
    return "".join(parts)


def docstrings(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield each field with the string below it. Raises ValueError for a field without one."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            raise ValueError(f"{model.__name__}.{field.target.id} has no docstring, which docs/configuration.md needs")
        yield field.target.id, inspect.cleandoc(str(below.value.value))


def _prose(docstring: str) -> str:
    """Return paragraphs with links, filled to the width of the other pages."""
    linked = LINK.sub(lambda match: f"[{match[1]}]({match[1]}{match[2] or ''})", docstring)
    paragraphs = [
        textwrap.fill(each, 120, break_on_hyphens=False, break_long_words=False) for each in linked.split("\n\n")
    ]
    return "\n\n".join(paragraphs) + "\n"


def values(schema: Schema, root: Schema) -> str:
    """Describe the values that a key accepts."""
    if "$ref" in schema:
        return "table"
    if "anyOf" in schema:
        return ", or ".join(values(each, root) for each in schema["anyOf"] if each.get("type") != "null")
    if "const" in schema:
        return f"`{toml(schema['const'])}`"
    if "enum" in schema:
        *others, last = (f"`{toml(each)}`" for each in schema["enum"])
        return f"{', '.join(others)} or {last}"
    match schema["type"]:
        case "array":
            items = schema["items"]
            return f"list of {'tables' if '$ref' in items else values(items, root).replace('string', 'strings')}"
        case "object":
            return "table"
        case "integer":
            return f"whole number from {schema['minimum']} to {schema['maximum']}"
        case kind:
            return {"boolean": "`true` or `false`", "string": "string"}[kind]


def toml(value: object) -> str:
    """Return a value as TOML writes it; JSON differs only for tables."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }" if value else "{}"
    return json.dumps(value)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
