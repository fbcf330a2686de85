"""Reads, copies and merges nested tables of TOML documents. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

Table = dict[str, Any]


def merge(into: Table, table: Table) -> None:
    """Add a copy of `table` to `into`: tables are merged, and other values are replaced."""
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = copy_of(value)


def copy_of(value: Any) -> Any:  # noqa: ANN401 - a value of any type in a table
    import copy  # Here, because it loads weakref and warnings, and most runs change no table.

    return copy.deepcopy(value)


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the path and the value of each key whose value is not a table, or is an empty table."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)))
    elif path:
        yield path, value


def at(document: object, *names: str) -> Table:
    """Return the table at a path; an empty one if there is none."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}
