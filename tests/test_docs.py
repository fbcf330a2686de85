"""docs/conditions.md lists exactly the reasons that the code can give, each with its status."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.conditions import ConditionType

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = REPOSITORY / "docs" / "conditions.md"

CONSTRUCTORS = {"true": (1, "True"), "false": (1, "False"), "unknown": (1, "Unknown")}
"""Of agent.conditions: the position of the argument `reason`, and the status."""
REASON = re.compile(r"[A-Z][A-Za-z]+")
ROW = re.compile(r"^\| `(?P<reason>\w+)` \| (?P<status>True|False|Unknown) \| (?P<meaning>.+) \| (?P<advice>.+) \|$")

Function = ast.FunctionDef | ast.Module


class Module:
    """The reasons that one module gives to conditions."""

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.constructors = dict(CONSTRUCTORS)
        self.found: set[tuple[str, str]] = set()
        """Reason and status."""

    def reasons(self) -> set[tuple[str, str]]:
        known = 0
        # A function that passes its own parameter on as the reason is a constructor too.
        while known != len(self.constructors):
            known = len(self.constructors)
            for function in self._functions():
                for call in _calls(function):
                    self._look(function, call)
        return self.found

    def _functions(self) -> Iterator[Function]:
        yield from (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef))

    def _look(self, function: Function, call: ast.Call) -> None:
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name == "Condition":
            position, status = 2, ast.unparse(call.args[1]).removeprefix("Status.").capitalize()
        elif name in self.constructors:
            position, status = self.constructors[name]
        else:
            return
        reason = next((each.value for each in call.keywords if each.arg == "reason"), None) or call.args[position]
        if isinstance(reason, ast.Attribute) and reason.attr == "reason":
            return  # Copied from another condition.
        if isinstance(reason, ast.Name) and isinstance(function, ast.FunctionDef):
            parameters = [each.arg for each in function.args.args]
            if reason.id in parameters:
                # Those of agent.conditions are in CONSTRUCTORS.
                self.constructors.setdefault(function.name, (parameters.index(reason.id), status))
                return
        values = set(self._constants(function, reason, frozenset()))
        assert values, f"line {call.lineno}: no reason found for {ast.unparse(call)}"
        self.found |= {(value, status) for value in values}

    def _constants(self, function: Function, value: ast.expr, seen: frozenset[str]) -> Iterator[str]:
        """What looks like a reason in an expression, or in what was assigned to the names in it."""
        for node in ast.walk(value):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and REASON.fullmatch(node.value):
                yield node.value
            elif isinstance(node, ast.Name) and node.id not in seen:
                for scope in (function, self.tree):
                    for assigned in _assigned(scope, node.id):
                        yield from self._constants(function, assigned, seen | {node.id})


def _calls(function: Function) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(function) if isinstance(node, ast.Call))


def _assigned(scope: Function, name: str) -> Iterator[ast.expr]:
    """Values that the scope assigns to a name; of `a, b = x, y` only the name's part."""
    nodes = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name) and target.id == name:
                yield node.value
            elif isinstance(target, ast.Tuple):
                names = [each.id if isinstance(each, ast.Name) else "" for each in target.elts]
                if name in names:
                    parts = node.value.elts if isinstance(node.value, ast.Tuple) else None
                    yield parts[names.index(name)] if parts else node.value


def reasons_of_the_code() -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for path in sorted((REPOSITORY / "agent").rglob("*.py")):
        found |= Module(path.read_text()).reasons()
    return found


def rows() -> list[re.Match[str]]:
    return [row for row in map(ROW.match, DOCUMENT.read_text().splitlines()) if row]


def test_every_reason_is_documented_and_no_other() -> None:
    documented = {(row["reason"], row["status"]) for row in rows()}
    code = reasons_of_the_code()
    assert code - documented == set(), "the code gives these, docs/conditions.md does not have them"
    assert documented - code == set(), "docs/conditions.md has these, the code does not give them"


def test_every_row_of_the_tables_is_read() -> None:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert len(lines) == len(rows())


def test_every_condition_has_its_section() -> None:
    sections = re.findall(r"^## (\w+)$", DOCUMENT.read_text(), re.MULTILINE)
    assert sections == [str(kind) for kind in ConditionType]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(): return false(K, 'Plain', 'a message')", {("Plain", "False")}),
        ("def f(): return Condition(K, Status.TRUE, 'Direct', '')", {("Direct", "True")}),
        ("def f(r): return unknown(K, r, '')\ndef g(): f('Passed')", {("Passed", "Unknown")}),
        ("T = {1: ('Listed', 'x y')}\ndef f():\n  r, m = T.get(1, ('Other', 'z z'))\n  return false(K, r, m)",
         {("Listed", "False"), ("Other", "False")}),
        ("def f():\n  r, m = 'First', 'Second'\n  return false(K, r, m)", {("First", "False")}),
        ("def f(c): return Condition(c.type, c.status, c.reason, '')", set()),
    ],
)  # fmt: skip
def test_the_search_for_reasons_finds_them(source: str, expected: set[tuple[str, str]]) -> None:
    assert Module(source).reasons() == expected
