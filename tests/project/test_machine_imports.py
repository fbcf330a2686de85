"""What the programs in a machine load: the setup at boot only the standard library, the offer of GPUs only two more."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CHILD = """
import importlib, pkgutil, sys

sys.path.insert(0, sys.argv[1])
package = importlib.import_module(sys.argv[2])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(*sys.modules)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("package", "parts", "libraries"),
    [
        ("agent.machine", {"machine", "model", "system", "vendors"}, set()),
        ("agent.dra", {"dra", "model", "system", "vendors"}, {"google", "h2", "hpack", "hyperframe"}),
    ],
)
def test_a_package_loads_only_this(package: str, parts: set[str], libraries: set[str]) -> None:
    """All of its modules are loaded in a fresh interpreter, and what they load at their start."""
    argv = (sys.executable, "-I", "-B", "-c", CHILD, str(REPOSITORY), package)
    names = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    assert {name.split(".")[1] for name in names if name.startswith("agent.")} == parts
    foreign = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"agent"}
    # The site module of this environment may load some, such as that of an editable installation.
    assert {name for name in foreign if not name.startswith("_")} == libraries
    # Data classes took a fifth of a boot that changes nothing: `dataclasses` loads `inspect`, and each compiles code.
    assert package != "agent.machine" or "dataclasses" not in names


OPTIONAL = {"tomlkit", "yaml"}
"""Packages that the image has for the machine half. It imports them where it changes a file, or reads others' YAML."""


def imported(module: str) -> Iterator[str]:
    """Return what a module of ours imports anywhere, also inside functions, except for the type checker alone."""
    path = REPOSITORY / f"{module.replace('.', '/')}.py"
    tree = ast.parse((path if path.is_file() else path.with_suffix("") / "__init__.py").read_text())
    typed = {
        inner for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
        for inner in ast.walk(node)
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node not in typed:
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                is_module = (REPOSITORY / f"{inner.replace('.', '/')}.py").is_file()
                yield inner if is_module and inner.startswith("agent.") else node.module or ""


def test_nothing_that_the_setup_may_load_needs_what_a_machine_lacks() -> None:
    """An import inside a function fails only when the function is called, which may be in no unit test."""
    machine = (REPOSITORY / "agent" / "machine").glob("*.py")
    found = {f"agent.machine.{each.stem}" for each in machine if each.stem != "__init__"}
    foreign, left = dict[str, str](), list(found)
    while left:
        module = left.pop()
        for name in imported(module):
            if not name.startswith("agent"):
                package = name.split(".")[0]
                if package not in sys.stdlib_module_names | OPTIONAL:
                    foreign[module] = package
            elif name not in found and name != "agent":
                found.add(name)
                left.append(name)
    assert foreign == {}
    assert {"agent.vendors.nvidia.machine", "agent.vendors.drm.machine"} <= found
