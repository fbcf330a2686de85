"""Makes the reference part of docs/configuration.md from the settings' classes.

A key's text is the docstring below it. A path such as docs/kubernetes.md in a docstring becomes a link.
"""

import ast
import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from msgspec import NODEFAULT
from msgspec.structs import FieldInfo, fields

from agent.config.checks import Range, Table
from agent.config.settings import (
    BinariesSettings,
    ContainerdSettings,
    CredentialProvider,
    DriverSettings,
    ExtraDevice,
    ExtraMount,
    GpuHealthSettings,
    GpuRecoverySettings,
    HostNodeSettings,
    ImageSettings,
    KubeletSettings,
    MachineSettings,
    MetricsSettings,
    NodeSettings,
    NspawnSettings,
)

TABLES: Mapping[str, type[Table]] = {
    "machines.NAME": MachineSettings,
    "machines.NAME.extra_devices": ExtraDevice,
    "machines.NAME.extra_mounts": ExtraMount,
    "machines.NAME.nspawn": NspawnSettings,
    "machines.NAME.node": NodeSettings,
    "machines.NAME.node.image": ImageSettings,
    "machines.NAME.node.binaries": BinariesSettings,
    "machines.NAME.node.kubelet": KubeletSettings,
    "machines.NAME.node.kubelet.image_credential_providers": CredentialProvider,
    "machines.NAME.node.containerd": ContainerdSettings,
    "machines.NAME.node.host": HostNodeSettings,
    "driver": DriverSettings,
    "gpu_health": GpuHealthSettings,
    "gpu_recovery": GpuRecoverySettings,
    "metrics": MetricsSettings,
}
"""Tables of the configuration, or lists of tables, with the class that validates each; in the page's order."""
ENTRIES = ("extra_devices", "extra_mounts", "image_credential_providers")
"""How the names of those that are lists of tables end."""
OPTIONAL = ("machines.NAME.node", "machines.NAME.node.binaries")
"""Tables without which a part of the agent does nothing."""
LINK = re.compile(r"docs/([\w/-]+\.md)(#[\w-]+)?")


def generated() -> str:
    """Return the generated part of the page."""
    return _contents() + "".join(_section(table, model) for table, model in TABLES.items())


def _contents() -> str:
    """Return a line with links for each table."""
    # Two tables may have a key of the same name; a page numbers such headings from the second on.
    before: Counter[str] = Counter()
    lines = []
    for table, model in TABLES.items():
        links = [f"[{key}](#{key}{f'-{before[key]}' if before[key] else ''})" for key in keys(model)]
        before.update(keys(model))
        lines.append(f"- {_title(table)}: {', '.join(links)}\n")
    return "\n" + "".join(lines)


def _title(table: str) -> str:
    return f"entries of `{table}`" if table.endswith(ENTRIES) else f"`[{table}]`"


def _section(table: str, model: type[Table]) -> str:
    title = _title(table)
    title = title[0].upper() + title[1:]
    texts = dict(docstrings(model))
    parts = [f"\n## {title}\n\n{_prose(inspect.getdoc(model) or '')}"]
    for field in fields(model):
        if f"{table}.{field.name}" in OPTIONAL:
            default = "optional, see below"
        elif f"{table}.{field.name}" in TABLES:
            default = "see below"
        else:
            default = "required" if field.required else _default(default_of(field))
        parts.append(f"\n### `{field.name}`\n\n*{values(field.type)}; {default}*\n\n{_prose(texts[field.name])}")
    return "".join(parts)


def _default(value: object) -> str:
    return "not set by default" if value is None else f"default `{toml(value)}`"


def keys(model: type[Table]) -> list[str]:
    """Return the names of a table's keys."""
    return [field.name for field in fields(model)]


def default_of(field: FieldInfo) -> object:
    """Return the default of a key that is not required."""
    return field.default_factory() if field.default is NODEFAULT else field.default


def docstrings(model: type[Table]) -> Iterator[tuple[str, str]]:
    """Yield each field with the string below it. Raises ValueError for a field without one."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            raise ValueError(f"{model.__name__}.{field.target.id} has no docstring, which docs/configuration.md needs")
        yield field.target.id, inspect.cleandoc(str(below.value.value))


def linked(text: str) -> str:
    """Return the text with links to the pages that it names by their paths."""
    return LINK.sub(lambda match: f"[{match[1]}]({match[1]}{match[2] or ''})", text)


def _prose(docstring: str) -> str:
    """Return paragraphs with links, filled to the width of the other pages."""
    paragraphs = linked(docstring).split("\n\n")
    filled = [textwrap.fill(each, 120, break_on_hyphens=False, break_long_words=False) for each in paragraphs]
    return "\n\n".join(filled) + "\n"


def values(kind: object) -> str:
    """Describe the values that a key of this type accepts."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        limits = [each for each in arguments[1:] if isinstance(each, Range)]
        return f"whole number from {limits[0].lowest} to {limits[0].highest}" if limits else values(arguments[0])
    if origin in (Union, UnionType):
        return ", or ".join(values(each) for each in arguments if each is not NoneType)
    if origin is Literal:
        *others, last = (f"`{toml(each)}`" for each in arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is list:
        return f"list of {values(arguments[0]).replace('string', 'strings').replace('table', 'tables')}"
    if origin is dict or (isinstance(kind, type) and issubclass(kind, Table)):
        return "table"
    return {bool: "`true` or `false`", str: "string"}[kind]  # type: ignore[index]


def toml(value: object) -> str:
    """Return a value as TOML writes it; JSON differs only for tables."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }" if value else "{}"
    return json.dumps(value)
