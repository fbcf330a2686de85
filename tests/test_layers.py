"""Imports point one way, pure modules touch nothing, and a vendor's name stays with the vendor."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "agent"

LAYERS = (
    ("errors", "paths"),
    ("facts", "conditions", "handoff", "goal", "actions", "ownership", "manifest"),
    ("system",),
    ("config",),
    ("vendors",),
    ("observe", "plan", "staging", "apply", "inside"),
    ("readiness", "locks", "history"),
    ("reconcile",),
    ("prepare", "metrics", "notify", "server", "health", "signals"),
    ("daemon",),
    ("cli",),
)
"""Lowest first; a module may import its own layer and those below."""

PURE = ("facts", "goal", "actions", "conditions", "handoff", "paths", "ownership", "manifest", "plan", "readiness")
IMPURE = {"os", "subprocess", "time", "logging", "socket", "pathlib", "shutil"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def top(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def name_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE).with_suffix("")
    return relative.parts[0]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    """A module imports from its own layer and from lower ones only."""
    rank = {name: index for index, layer in enumerate(LAYERS) for name in layer}
    name = name_of(path)
    if name == "__init__":
        return
    assert name in rank, f"{path} is in no layer"
    above = {
        module
        for module in imports(path)
        if module.startswith("agent.") and top(module) in rank and rank[top(module)] > rank[name]
    }
    assert not above


@pytest.mark.parametrize("path", [path for path in modules() if name_of(path) in PURE], ids=lambda path: path.name)
def test_pure_modules_touch_nothing(path: Path) -> None:
    """The words and the plan import nothing that reaches outside."""
    assert not {module.split(".")[0] for module in imports(path)} & IMPURE


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_stay_small(path: Path) -> None:
    """A module that needs scrolling for long has two subjects."""
    assert len(path.read_text().splitlines()) <= 300


def test_vendor_names_stay_with_the_vendors() -> None:
    """Code outside of vendors/ knows no vendor; prose and the fixed path of the driver roots may name one."""
    for path in modules():
        if name_of(path) == "vendors":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                literals = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                named = [each for each in literals if re.search("nvidia|intel|amd", str(each), re.IGNORECASE)]
                assert not named, f"{path}:{node.lineno} compares with {named}"
