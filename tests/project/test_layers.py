"""Imports point one way, pure modules touch nothing, and a vendor's name stays with the vendor.

The layer rule: model <- system <- config <- vendors <- host | machine | dra <- cli.
"""

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

PACKAGE = Path(__file__).resolve().parents[2] / "agent"

Order: TypeAlias = tuple[str | tuple[str, ...], ...]
"""Lowest first: a module imports from its own room and from lower rooms. Rooms in one tuple never import each other."""
ORDER: Order = ("model", "system", "config", "vendors", ("host", "machine", "dra"), "cli")
ROOMS: Mapping[str, Order] = {
    "host": (
        ("state", "vendors"),
        ("observe", "plan"),
        "apply",
        "verify",
        "reconcile",
        ("provision", "detach"),
        ("joining", "allocation", "daemon"),
    ),
    "machine": (
        ("notes", "vendors", "open_nodes", "containerd_tables"),
        ("devices", "libraries", "containerd"),
        ("foreign_specs", "node_condition"),
        "cdi",
        "kubelet",
        "run",
    ),
}
"""The order of rooms within each half."""
NEVER = {("machine", "config"), ("dra", "config")}
"""Imports from a lower room that are still forbidden: settings are the host's, and a machine gets a handoff."""

PURE = ("model/", "host/plan/", "host/verify/", "machine/containerd_tables.py")
"""Places whose modules are pure; elsewhere a module's docstring says so."""
IMPURE = {
    *("os", "sys", "io", "pathlib", "shutil", "tempfile", "glob", "fcntl", "ctypes"),
    *("subprocess", "signal", "socket", "select", "threading", "time", "random", "secrets"),
    *("sh", "pyudev", "jeepney", "pyroute2", "prometheus_client"),
}
IMPURE_CALLS = re.compile(r"open|print|input|exec|eval|logging\..*")
"""Names of impure calls. logging's levels are plain numbers."""

VENDOR_NAME = re.compile(r"nvidia|intel|amd(?!64)", re.IGNORECASE)
VENDOR_IMPORT = re.compile(r"agent\.vendors\.(?:amd|drm|intel|nvidia|other_devices)\.")
VENDOR_LISTS = {"host/vendors.py", "machine/vendors.py", "dra/inventory.py"}
"""The lists of vendors; nothing else imports one."""
ALLOWED_NAMES = {
    # Where every vendor's driver roots are, on the host and in the machine: fixed paths that nodes depend on.
    ("model/paths.py", "/host-nvidia"),
    ("model/paths.py", "/run/host-nvidia"),
    # A device class in the configuration, and what no path in it may name.
    ("config/settings.py", "nvidia-fs"),
    ("config/settings.py", "/dev/nvidia"),
    ("config/settings.py", "/etc/nvidia-container-runtime"),
    ("model/device.py", "nvidia-fs"),
    # The name of an image that containerfiles/ builds.
    ("host/provision/image.py", "agent-ubuntu2404-nvidia"),
    # A key of the configuration, and names of variables that it may not set.
    ("config/settings.py", "nvidia"),
    ("config/settings.py", "(NVIDIA|NVCT)_.*"),
}

OPENING = re.compile(r"(io\.|os\.)?open|os\.(fdopen|popen|mkfifo|mknod|walk|fwalk)|shutil\..*")
"""Calls that open whatever file is at a path."""
OPENING_METHODS = {"read_bytes", "write_bytes", "write_text"}
"""pathlib's. Its read_text has the same name as ours, so pathlib itself is refused."""
OPENING_MODULES = {"codecs", "fileinput", "glob", "linecache", "mmap", "pathlib", "shelve", "shutil", "tempfile"}
DOORS = {"system/opening.py", "system/removal.py", "machine/open_nodes.py"}
"""Modules that may open files. One opens directories to remove them; one opens device nodes to test them, in a child
that may hang."""

DATA_CLASSES = {
    # It changes, and its collections are its own.
    "dra/grpc_server.py",
    # agent.dra loads it in the machine, which has no msgspec.
    "vendors/dra_vendor.py",
}
"""Modules with data classes. Making one takes most of a millisecond at each start."""


@cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def ranks(order: Order) -> dict[str, tuple[int, str]]:
    """Return each room's rank, and its name."""
    groups = [(each,) if isinstance(each, str) else each for each in order]
    return {name: (place, name) for place, group in enumerate(groups) for name in group}


def fits(order: Order, importer: str, imported: str) -> bool:
    """Return whether a room of this order may import from another. Raises KeyError for a room without a place in it."""
    (mine, _), (other, _) = ranks(order)[importer], ranks(order)[imported]
    return importer == imported or other < mine


def is_allowed(importer: str, module: str) -> bool:
    """Return whether `agent/<importer>` may import `module`. Raises KeyError for a room without a place in an order."""
    parts, target = importer.removesuffix(".py").split("/"), module.split(".")[1:]
    if len(parts) < 2 or len(target) < 2 or parts[-1] == "__init__":
        return True
    if parts[0] == target[0] and parts[0] in ROOMS:
        return fits(ROOMS[parts[0]], parts[1], target[1])
    return fits(ORDER, parts[0], target[0]) and (parts[0], target[0]) not in NEVER


def relative_name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def is_pure(path: Path) -> bool:
    """Return whether a module is pure by its place, or because its docstring says so."""
    docstring = ast.get_docstring(parsed(path.read_text())) or ""
    return relative_name(path).startswith(PURE) or bool(re.search(r"\bpure\b", docstring, re.IGNORECASE))


def strings(source: str) -> list[tuple[int, str]]:
    """Return line and text of every string that is not a docstring, with the fixed parts of f-strings."""
    tree = parsed(source)
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


def test_imports_point_one_way() -> None:
    wrong = {
        name: [each for each in sorted(imports(path)) if each.startswith("agent.") and not is_allowed(name, each)]
        for path in modules()
        for name in [relative_name(path)]
    }
    assert {name: found for name, found in wrong.items() if found} == {}
    assert sum(len(imports(path)) for path in modules()) > 1000, "the imports were not found"
    for importer, module in (("host/plan/goal.py", "agent.model.facts"), ("cli/main.py", "agent.__version__")):
        assert is_allowed(importer, module)
    for importer, module in (
        *(("model/facts.py", "agent.host.plan.goal.Plan"), ("host/plan/goal.py", "agent.machine.vendors.VENDORS")),
        *(("machine/run.py", "agent.host.vendors.HOST_VENDORS"), ("machine/run.py", "agent.config.settings.Config")),
        *(("dra/service.py", "agent.machine.run.main"), ("dra/service.py", "agent.config.settings.Config")),
        *(
            ("host/plan/goal.py", "agent.host.observe.host.observe"),
            ("host/reconcile.py", "agent.host.daemon.loop.run"),
        ),
    ):
        assert not is_allowed(importer, module), importer


def test_values_are_structs_or_named_tuples() -> None:
    """Structs on the host, and named tuples in what a machine loads, except where only a data class will do."""
    found = {
        relative_name(each) for each in modules() if re.search(r"^@(\w+\.)?dataclass", each.read_text(), re.MULTILINE)
    }
    assert found == DATA_CLASSES


def reaches_outside(path: Path) -> set[str]:
    """Return the imports and calls of a module that a pure one must not have."""
    called = {ast.unparse(node.func) for node in ast.walk(parsed(path.read_text())) if isinstance(node, ast.Call)}
    imported = {module.split(".")[0] for module in imports(path)}
    return imported & IMPURE | {name for name in called if IMPURE_CALLS.fullmatch(name)}


def test_pure_modules_touch_nothing() -> None:
    """They import and call nothing that reaches outside."""
    pure = [path for path in modules() if is_pure(path)]
    assert {relative_name(path): found for path in pure if (found := reaches_outside(path))} == {}
    assert len(pure) > 30
    assert reaches_outside(PACKAGE / "system/files.py") >= {"os", "time"}


def test_integration_imports_only_fakes_from_the_tests() -> None:
    """Then a test module can change without a run on a virtual machine."""
    files = sorted((PACKAGE.parent / "integration").rglob("*.py"))
    taken = {module for path in files for module in imports(path) if module.startswith("tests.")}
    assert taken
    assert {module for module in taken if not module.startswith("tests.fakes")} == set()


def test_packages_are_empty() -> None:
    """Each import of a module runs its packages' files, and the machine half has a dozen of them at every boot."""
    packages = [path for path in modules() if path.name == "__init__.py" and path.parent != PACKAGE]
    more = [
        relative_name(path)
        for path in packages
        if any(not isinstance(each, ast.Expr) for each in parsed(path.read_text()).body)
    ]
    assert more == [], "more than a docstring"
    assert len(packages) > 15


def test_only_the_lists_of_vendors_import_a_vendor() -> None:
    """All other modules get a vendor by its name from the list; a vendor's own modules import each other."""
    importers = {
        relative_name(path)
        for path in modules()
        if not VENDOR_IMPORT.match(f"agent.{relative_name(path).replace('/', '.')}") and vendor_imports(path)
    }
    assert importers == VENDOR_LISTS


def test_vendor_names_stay_with_the_vendors() -> None:
    """No string outside of vendors/ names a vendor, except the allowed ones; docstrings and comments may."""
    found = {
        (relative_name(path), text): line
        for path in modules()
        if not relative_name(path).startswith("vendors/") and relative_name(path) not in VENDOR_LISTS
        for line, text in vendor_strings(path.read_text())
    }
    assert {key: line for key, line in found.items() if key not in ALLOWED_NAMES} == {}
    assert set(found) >= ALLOWED_NAMES, "no longer there: take it from ALLOWED_NAMES"
    source = "def f(x):\n    'NVIDIA.'\n    return x == 'nvidia'\nPATH = f'/dev/nVidia{0}'\nx = {'Intel': 'amd64'}\n"
    assert {line for line, _ in vendor_strings(source)} == {3, 4, 5}


def opened(source: str) -> list[int]:
    """Return lines in which a file is opened, or a name that opens files is imported."""
    found = []
    for node in ast.walk(parsed(source)):
        match node:
            case ast.Call(ast.Attribute(_, method)) if method in OPENING_METHODS:
                found.append(node.lineno)
            case ast.Call(
                _, [ast.Attribute(ast.Name("os"), "devnull") | ast.Call(ast.Attribute(_, "memfd_create")), *_]
            ):
                # Nobody else can change /dev/null or a file in memory.
                pass
            case ast.Call(function) if OPENING.fullmatch(ast.unparse(function)):
                found.append(node.lineno)
            case ast.Import(names) if {name.name for name in names} & OPENING_MODULES:
                found.append(node.lineno)
            case ast.ImportFrom(module, names) if module in OPENING_MODULES or (
                module in ("os", "io") and "open" in {name.name for name in names}
            ):
                found.append(node.lineno)
            case _:
                pass
    return found


def test_only_the_door_opens_files() -> None:
    """Any other way to open a file waits for whoever put a FIFO or a lease there, or acts on a device."""
    found = {relative_name(path): lines for path in modules() if (lines := opened(path.read_text()))}
    assert set(found) == DOORS
    for source, lines in (
        ("open(path)\nwith io.open(path) as file:\n    pass\n", [1, 2]),
        ("os.open(path, os.O_RDONLY)\nos.open(os.devnull, os.O_WRONLY)\nopen(os.memfd_create(name))\n", [1]),
        ("open(os.open(path, os.O_RDONLY))\n", [1, 1]),
        ("from pathlib import Path\nPath(place).read_bytes()\nimport shutil\nfrom os import open\n", [1, 2, 3, 4]),
        ("system.read_text(path)\nopening.stream(path)\nself._wakeups.open()\n", []),
    ):
        assert sorted(opened(source)) == lines, source


REMOVALS = re.compile(
    r"\brm +(-\S+ +)*(-[a-z]*[rR][a-z]*|--recursive)|[\"']rm[\"'],.*[\"'](-[a-z]*[rR]|--recursive)"
    r"|rmtree|removedirs|[ ]-delete\b|one-file-system"
)
BUILT = ("containerfiles/install-", "containerfiles/agent-")
"""What runs only in an image that is being built, on the image's own files."""


def test_every_tree_is_removed_through_one_door() -> None:
    """Anything else also removes the data of a bind mount of the same file system."""
    repository = PACKAGE.parent
    found: dict[str, list[str]] = {}
    directories = ("agent", "deploy", "systemd", "containerfiles")
    for path in sorted(each for name in directories for each in (repository / name).rglob("*")):
        name = str(path.relative_to(repository))
        if path.is_file() and path.suffix != ".pyc" and not name.startswith(BUILT):
            lines = [line for line in path.read_text().splitlines() if REMOVALS.search(line)]
            found |= {name: lines} if lines else {}
    assert found == {}
    removals = ["rm -rf x", "rm --force -R x", "rm -r x", "rm --recursive x", "find x -delete", "os.removedirs(x)"]
    assert all(map(REMOVALS.search, [*removals, 'run("rm", "-rf", x)', "shutil.rmtree(x)"]))
    assert not any(map(REMOVALS.search, ["rm -f x", "rm x-r", "podman build --rm -f x", 'run("rm", "-f", x)']))
