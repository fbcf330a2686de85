"""What the programs in a machine load: the setup at boot only the standard library, the offer of GPUs only two more."""

import subprocess
import sys
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


def loaded(package: str) -> set[str]:
    """Return what a fresh interpreter has loaded after all modules of a package."""
    argv = (sys.executable, "-I", "-B", "-c", CHILD, str(REPOSITORY), package)
    return set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.processes
def test_the_setup_at_boot_loads_no_data_classes() -> None:
    """They took a fifth of a run that changes nothing: `dataclasses` loads `inspect`, and each class compiles code."""
    assert "dataclasses" not in loaded("agent.machine")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("package", "parts", "libraries"),
    [
        ("agent.machine", {"machine", "model", "system", "vendors"}, set()),
        ("agent.dra", {"dra", "model", "system", "vendors"}, {"google", "h2", "hpack", "hyperframe"}),
    ],
)
def test_a_package_loads_only_this(package: str, parts: set[str], libraries: set[str]) -> None:
    """All of its modules are loaded, and what they load at their start."""
    names = loaded(package)
    assert {name.split(".")[1] for name in names if name.startswith("agent.")} == parts
    foreign = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"agent"}
    # The site module of this environment may load some, such as that of an editable installation.
    assert {name for name in foreign if not name.startswith("_")} == libraries
