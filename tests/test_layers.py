"""Imports point one way, pure modules touch nothing, and a vendor's name stays with the vendor."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "agent"

LAYERS = (
    ("errors", "paths", "pci_address", "versions"),
    (
        "identity",
        "granted",
        "live",
        "facts",
        "conditions",
        "documents",
        "handoff",
        "judgement",
        "stability",
        "goal",
        "actions",
        "ownership",
        "manifest",
    ),
    ("system",),
    ("pod_environment", "extras", "config"),
    ("vendors",),
    ("observe", "plan", "staging", "running", "apply", "holders", "inside"),
    ("readiness", "locks", "history", "node_condition", "gpu_errors"),
    ("reconcile",),
    (
        "prepare",
        "doctor",
        "driver_modules",
        "gpu_users",
        "detach",
        "gauges",
        "metrics",
        "convergence",
        "statusz",
        "telling",
        "notify",
        "server",
        "health",
        "signals",
        "wakeups",
    ),
    ("daemon",),
    ("cli",),
)
"""Lowest first; a module may import its own layer and those below."""

PURE = {*LAYERS[0], *LAYERS[1], "plan"}
"""Pure by their place; other modules are where their docstring says so."""
IMPURE = {
    *("os", "sys", "io", "pathlib", "shutil", "tempfile", "glob", "fcntl", "ctypes"),
    *("subprocess", "signal", "socket", "select", "threading", "time", "random", "secrets"),
    *("sh", "pyudev", "inotify_simple", "jeepney", "pyroute2", "prometheus_client"),
}
IMPURE_CALLS = re.compile(r"open|print|input|exec|eval|logging\..*")
"""Names of what is called. logging's levels are plain numbers."""

VENDOR_NAME = re.compile(r"nvidia|intel|amd(?!64)", re.IGNORECASE)
VENDOR_IMPORT = re.compile(
    r"agent\.vendors\.(?!(?:cdi_version|generators|host|kernel_modules|machine|machine_protocol|protocols)(?:\.|$))\w+\."
)
VENDOR_LISTS = {"vendors/host.py", "vendors/machine.py", "vendors/generators.py", "vendors/kernel_modules.py"}
"""The lists of vendors; nothing else imports one."""
ALLOWED_NAMES = {
    # Where every vendor's driver roots lie, on the host and seen from the machine: fixed paths that nodes depend on.
    ("paths.py", "/host-nvidia"),
    ("paths.py", "/run/host-nvidia"),
    # A switch of the configuration, and what no path in it may name.
    ("extras.py", "nvidia-fs"),
    ("extras.py", "/dev/nvidia*"),
    ("extras.py", "/etc/nvidia-container-runtime"),
    ("identity.py", "nvidia-fs"),
    # A key of the configuration, and names of variables that it may not set.
    ("pod_environment.py", "nvidia"),
    ("pod_environment.py", "(NVIDIA|NVCT)_.*"),
}


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


def relative_name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def is_pure(path: Path) -> bool:
    """By its place, or by a docstring that calls the module pure."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return name_of(path) in PURE or bool(re.search(r"\bpure\b", docstring, re.IGNORECASE))


def strings(source: str) -> list[tuple[int, str]]:
    """Line and text of every string that is not a docstring, with the fixed parts of f-strings."""
    tree = ast.parse(source)
    docstrings = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
    ]


def vendor_strings(source: str) -> list[tuple[int, str]]:
    return [(line, text) for line, text in strings(source) if VENDOR_NAME.search(text)]


def vendor_imports(path: Path) -> set[str]:
    return {module for module in imports(path) if VENDOR_IMPORT.match(f"{module}.")}


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


@pytest.mark.parametrize("path", [path for path in modules() if is_pure(path)], ids=relative_name)
def test_pure_modules_touch_nothing(path: Path) -> None:
    """The words, the plan and what calls itself pure import and call nothing that reaches outside."""
    assert not {module.split(".")[0] for module in imports(path)} & IMPURE
    tree = ast.parse(path.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not {name for name in called if IMPURE_CALLS.fullmatch(name)}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_stay_small(path: Path) -> None:
    """A module that needs scrolling for long has two subjects."""
    assert len(path.read_text().splitlines()) <= 300


def test_only_the_lists_of_vendors_import_a_vendor() -> None:
    """Everything else asks the list for the vendor of a name; a vendor's own modules import each other."""
    importers = {
        relative_name(path)
        for path in modules()
        if not (name_of(path) == "vendors" and len(path.relative_to(PACKAGE).parts) > 2) and vendor_imports(path)
    }
    assert importers == VENDOR_LISTS


def test_vendor_names_stay_with_the_vendors() -> None:
    """No string outside of vendors/ names one, but for what is allowed; prose in docstrings and comments may."""
    found = {
        (relative_name(path), text): line
        for path in modules()
        if name_of(path) != "vendors"
        for line, text in vendor_strings(path.read_text())
    }
    assert {key: line for key, line in found.items() if key not in ALLOWED_NAMES} == {}
    assert set(found) >= ALLOWED_NAMES, "no longer there: take it from ALLOWED_NAMES"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f(x):\n    'An NVIDIA GPU.'\n    return x == 'nvidia'\n", [3]),
        ("PATH = f'/dev/nVidia{0}'\n", [1]),
        ("x = {'Intel': 1}\n", [1]),
        ("x = 'amd64'\n", []),
    ],
)
def test_the_search_for_vendor_names_finds_them(source: str, lines: list[int]) -> None:
    assert [line for line, _ in vendor_strings(source)] == lines
