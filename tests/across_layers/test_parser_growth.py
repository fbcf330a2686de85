"""Every parser of outside text takes time in proportion to the text: a MiB is the most that is read of a file."""

import ast
from pathlib import Path

import pytest

from integration.faults_suite import fuzz, parsers

REPOSITORY = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "agent.model.json_document.parse_document",
    # Called by parsers that are.
    "agent.model.json_document.parse_json",
    # Called by three that are.
    "agent.model.json_document.parse_toml",
    # Of a program's arguments, and of lines of the kernel log, which HostVendor.parse_kernel_message parses.
    *("agent.machine.gpu_test.parse", "agent.vendors.drm.host.parse_line"),
    # They take what Python's JSON parser returned.
    *(f"agent.host.allocation.parse_{name}" for name in ("claimants", "counts", "holders")),
}
"""Parsers that are not in the registry."""


@pytest.mark.parametrize("parser", parsers.PARSERS)
def test_time_grows_linearly(parser: str) -> None:
    assert fuzz.grows(parser) == []


def test_the_registry_of_parsers_is_complete() -> None:
    defined = {
        f"{'.'.join(path.relative_to(REPOSITORY).with_suffix('').parts)}.{node.name}"
        for path in (REPOSITORY / "agent").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.split("_")[0] == "parse"
    }
    assert defined - _used() == ELSEWHERE


def _used() -> set[str]:
    """Return the functions that the registry's module names, with their modules."""
    tree = ast.parse(Path(parsers.__file__).read_text())
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    attributes = {
        f"{imported[node.value.id]}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported
    }
    return {*imported.values(), *attributes}
