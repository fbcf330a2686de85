"""Rules that keep the tests apart from each other and from how the agent is written, and a limit of late imports."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LATE_IMPORTS = 10
"""How many imports are inside functions of agent/. The number may only fall; the aim is 10, for optional packages."""
LIBRARIES = {
    "_replace",
    "_asdict",
    "_make",
    "_fields",
    "_field_defaults",
    "_actions",
    "_SubParsersAction",
    "_HelpAction",
    "_metadata",
}
"""Names with an underscore that Python's own library documents, or that argparse has no other name for."""


@cache
def trees(place: str) -> dict[str, ast.Module]:
    found = sorted((REPOSITORY / place).rglob("*.py"))
    return {str(path.relative_to(REPOSITORY)): ast.parse(path.read_text()) for path in found}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def from_test_modules(tree: ast.AST) -> list[str]:
    return [
        name
        for name in imported(tree)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ]


def private_names(tree: ast.AST) -> set[str]:
    """Return private names that are not of `self`, of `cls` or of Python's library."""
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    ours = (name.split(".") for name in imported(tree) if name.startswith("agent."))
    return (attributes | {part for parts in ours for part in parts if is_private(part)}) - LIBRARIES


def late_imports(tree: ast.AST) -> int:
    """Return how many imports are inside functions."""
    late = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return len(late)


def test_helpers_are_in_no_test_module() -> None:
    """A helper is in tests/fakes or a conftest: then a test module can change, and go, without another."""
    assert {path: found for path, tree in trees("tests").items() if (found := from_test_modules(tree))} == {}
    assert from_test_modules(ast.parse("from tests.cli.test_up import run")) == ["tests.cli.test_up.run"]
    assert from_test_modules(ast.parse("from tests.cli import test_up")) == ["tests.cli.test_up"]


def test_no_private_name_is_used() -> None:
    """Such a test breaks when the code changes, and says nothing about what users see."""
    found = {path: private_names(tree) for path, tree in trees("tests").items()}
    assert {path: names for path, names in found.items() if names} == {}
    assert private_names(ast.parse("from agent.host import _x\ny._z, self._a, y.__b__")) == {"_x", "_z"}


def test_modules_import_at_their_top() -> None:
    counted = {path: late_imports(tree) for path, tree in trees("agent").items()}
    assert sum(counted.values()) <= LATE_IMPORTS, {path: number for path, number in counted.items() if number}
    assert late_imports(ast.parse("import a\ndef f():\n    import b\n    def g():\n        from c import d")) == 2


def test_no_loaded_module_is_replaced() -> None:
    """A library that finds another one missing, or in part, fails in ways that only this agent sees."""
    uses = {path for path, tree in trees("agent").items() for node in ast.walk(tree) if is_modules(node)}
    assert uses == set()
    assert is_modules(ast.parse("sys.modules", mode="eval").body)


def is_modules(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules"
