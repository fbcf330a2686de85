"""Rules of the source: imports point one way, pure modules touch nothing, a vendor's name stays with the vendor.

The layer rule: model <- system <- config <- vendors <- host | machine | dra <- cli. Each file is parsed once, and its
tree is not kept: all together, they would make each later collection of garbage slow.
"""

import ast
import re
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

Order: TypeAlias = tuple[str | tuple[str, ...], ...]
"""Lowest first: a module imports from its own room and from lower rooms. Rooms in one tuple never import each other."""
ORDER: Order = ("model", "system", "config", "vendors", ("host", "machine", "dra"), "cli")
ROOMS: Mapping[str, Order] = {
    "host": (
        ("state", "vendors"),
        ("observe", "plan"),
        "apply",
        "verify",
        "leave",
        "reconcile",
        ("provision", "detach"),
        ("allocation", "daemon", "gpu_reset", "gpu_tests"),
        ("gpu_recovery", "driver_upgrade"),
        "joining",
        "switching",
    ),
    "machine": (
        ("notes", "requests", "vendors", "open_nodes", "gpu_test", "containerd_tables"),
        ("devices", "libraries", "containerd", "node_events"),
        "foreign_specs",
        "cdi",
        "kubelet",
        ("run", "gpu_tests", "node_cordon", "leave"),
        "node_condition",
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

LATE_IMPORTS = 10
"""How many imports are inside functions of agent/, for optional packages. The number may only fall."""
LIBRARIES = {
    *("_replace", "_asdict", "_make", "_fields", "_field_defaults", "_metadata"),
    *("_actions", "_SubParsersAction", "_HelpAction"),
}
"""Names with an underscore that Python's own library documents, or that argparse has no other name for."""


class Source:
    """A module."""

    def __init__(self, text: str, name: str = "") -> None:
        """`name` is its path below `agent` or `tests`, for example."""
        self.name, self.text, self.tree = name, text, ast.parse(text)
        self.nodes = tuple(ast.walk(self.tree))
        self.imports = set[str]()
        """Full names of modules, and of what is imported from them."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                self.imports |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}


@cache
def found_in(place: str) -> dict[str, dict[str, Any]]:
    """Return what the rules of a place find, by their functions' names, and by the names of its modules."""
    rules = {rule.find.__name__: rule.find for rule in RULES if rule.place == place}
    rules["imports"] = attrgetter("imports")
    if place == "agent":
        rules |= {"names_vendors": names_vendors, "late_imports": late_imports, "is_pure": is_pure}
    found: dict[str, dict[str, Any]] = {name: {} for name in rules}
    top = REPOSITORY / place
    for path in sorted(top.rglob("*.py")):
        source = Source(path.read_text(), path.relative_to(top).as_posix())
        for name, find in rules.items():
            if faults := find(source):
                found[name][source.name] = faults
    return found


def dotted(node: ast.AST) -> str:
    """Return a name as it is written, such as `os.open`; () stands for what is no name."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{dotted(value)}.{name}"
        case _:
            return "()"


def fits(order: Order, importer: str, imported: str) -> bool:
    """Return whether a room of this order may import from another. Raises KeyError for a room without a place in it."""
    groups = [(each,) if isinstance(each, str) else each for each in order]
    ranks = {name: place for place, group in enumerate(groups) for name in group}
    return importer == imported or ranks[imported] < ranks[importer]


def is_allowed(importer: str, module: str) -> bool:
    """Return whether `agent/<importer>` may import `module`. Raises KeyError for a room without a place in an order."""
    parts, target = importer.removesuffix(".py").split("/"), module.split(".")[1:]
    if len(parts) < 2 or len(target) < 2 or parts[-1] == "__init__":
        return True
    if parts[0] == target[0] and parts[0] in ROOMS:
        return fits(ROOMS[parts[0]], parts[1], target[1])
    return fits(ORDER, parts[0], target[0]) and (parts[0], target[0]) not in NEVER


def imports_upwards(source: Source) -> list[str]:
    return [each for each in source.imports if each.startswith("agent.") and not is_allowed(source.name, each)]


def has_data_classes(source: Source) -> list[str]:
    return re.findall(r"^@(?:\w+\.)?dataclass", source.text, re.MULTILINE)


def is_pure(source: Source) -> bool:
    """Return whether a module is pure by its place, or because its docstring says so."""
    return source.name.startswith(PURE) or bool(re.search(r"\b[Pp]ure\b", ast.get_docstring(source.tree) or ""))


def reaches_outside(source: Source) -> set[str]:
    """Return the imports and calls that a pure module must not have."""
    if not is_pure(source):
        return set()
    called = {dotted(node.func) for node in source.nodes if isinstance(node, ast.Call)}
    imported = {module.split(".")[0] for module in source.imports}
    return imported & IMPURE | {name for name in called if IMPURE_CALLS.fullmatch(name)}


def has_more_than_a_docstring(source: Source) -> list[str]:
    """Each import of a module runs its packages' files, and the machine half has a dozen of them at every boot."""
    if not source.name.endswith("/__init__.py"):
        return []
    return [ast.unparse(each) for each in source.tree.body if not isinstance(each, ast.Expr)]


def imports_a_vendor(source: Source) -> set[str]:
    """Other modules get a vendor by its name from the lists; a vendor's own modules import each other."""
    own = VENDOR_IMPORT.match(f"agent.{source.name.replace('/', '.')}")
    return set() if own else {module for module in source.imports if VENDOR_IMPORT.match(f"{module}.")}


def names_vendors(source: Source) -> set[str]:
    """Return the strings that name one, also fixed parts of f-strings; docstrings and comments may."""
    if source.name.startswith("vendors/") or source.name in VENDOR_LISTS:
        return set()
    texts = {node for node in source.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    texts -= {
        node.value for node in source.nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return {str(node.value) for node in texts if VENDOR_NAME.search(str(node.value))}


def opens_files(source: Source) -> list[int]:
    """Return lines in which a file is opened, or a name that opens files is imported.

    Any other way to open a file waits for whoever put a FIFO or a lease there, or acts on a device.
    """
    found = []
    for node in source.nodes:
        match node:
            case ast.Call(ast.Attribute(_, method)) if method in OPENING_METHODS:
                found.append(node.lineno)
            case ast.Call(
                _, [ast.Attribute(ast.Name("os"), "devnull") | ast.Call(ast.Attribute(_, "memfd_create")), *_]
            ):
                # Nobody else can change /dev/null or a file in memory.
                pass
            case ast.Call(function) if OPENING.fullmatch(dotted(function)):
                found.append(node.lineno)
            case ast.Import(names) if {name.name for name in names} & OPENING_MODULES:
                found.append(node.lineno)
            case ast.ImportFrom(module, names) if module in OPENING_MODULES or (
                module in ("os", "io") and "open" in {name.name for name in names}
            ):
                found.append(node.lineno)
            case _:
                pass
    return sorted(found)


def captures_unlimited_numbers(source: Source) -> list[str]:
    """int() raises ValueError for a decimal number of more than 4,300 digits."""
    return re.findall(r"\((?:\?P<\w+>)?(?:\[0-9\]|\\d)[+*]\)", source.text)


def replaces_modules(source: Source) -> list[int]:
    """A library that finds another one missing, or in part, fails in ways that only this agent sees."""
    return [each.lineno for each in source.nodes if isinstance(each, ast.Attribute) and dotted(each) == "sys.modules"]


def imports_test_modules(source: Source) -> list[str]:
    """A helper is in tests/fakes or a conftest: then a test module can change, and go, without another."""
    return [name for name in source.imports if re.match(r"tests\.(.*\.)?test_", name)]


def imports_more_than_fakes(source: Source) -> list[str]:
    """Of the tests, integration imports fakes only: then a test can change without a run on a virtual machine."""
    return [name for name in source.imports if name.startswith("tests.") and not name.startswith("tests.fakes")]


def private_names(source: Source) -> set[str]:
    """Return those that are not of `self`, of `cls` or of Python's library.

    Such a test breaks when the code changes, and says nothing about what users see.
    """
    used = {
        node.attr for node in source.nodes
        if isinstance(node, ast.Attribute) and dotted(node.value) not in ("self", "cls")
    }  # fmt: skip
    used |= {part for name in source.imports if name.startswith("agent.") for part in name.split(".")}
    return {name for name in used if re.match("_(?!_)", name)} - LIBRARIES


def late_imports(source: Source) -> set[int]:
    """Return the lines of imports inside functions."""
    functions = [each for each in source.nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = (node for each in functions for node in ast.walk(each))
    return {node.lineno for node in inside if isinstance(node, ast.Import | ast.ImportFrom)}


class Rule(NamedTuple):
    """What no module in a place has, but those that are named here."""

    place: str
    find: Callable[[Source], object]
    found: tuple[tuple[str, str, object], ...] = ()
    """Examples: a module's name, its text, and what is found. Without any, `but` shows that something is found."""
    but: set[str] = set()  # noqa: RUF012
    """Modules in which this must be found: a name that is no longer needed goes."""


RULES = (
    Rule(
        "agent",
        imports_upwards,
        (
            ("model/facts.py", "from agent.host.plan import goal", ["agent.host.plan", "agent.host.plan.goal"]),
            ("host/plan/goal.py", "import agent.machine.vendors", ["agent.machine.vendors"]),
            ("machine/run.py", "import agent.host.vendors", ["agent.host.vendors"]),
            ("machine/run.py", "import agent.config.settings", ["agent.config.settings"]),
            ("dra/service.py", "import agent.machine.run", ["agent.machine.run"]),
            ("dra/service.py", "import agent.config.settings", ["agent.config.settings"]),
            ("host/plan/goal.py", "import agent.host.observe.host", ["agent.host.observe.host"]),
            ("host/reconcile.py", "import agent.host.daemon.loop", ["agent.host.daemon.loop"]),
            ("host/plan/goal.py", "import agent.model.facts", []),
            ("cli/main.py", "from agent import __version__", []),
        ),
    ),
    Rule("agent", has_data_classes, but=DATA_CLASSES),
    Rule(
        "agent",
        reaches_outside,
        (
            ("model/a.py", "import os.path\nlogging.info(x)\nopen(y)", {"os", "logging.info", "open"}),
            ("host/a.py", "'Pure.'\nimport time", {"time"}),
            ("host/a.py", "import time", set()),
        ),
    ),
    Rule(
        "agent",
        has_more_than_a_docstring,
        (("host/__init__.py", "'x'\nimport y", ["import y"]), ("__init__.py", "import x", [])),
    ),
    Rule("agent", imports_a_vendor, but=VENDOR_LISTS),
    Rule(
        "agent",
        opens_files,
        (
            ("", "open(path)\nwith io.open(path) as file:\n    pass\n", [1, 2]),
            ("", "os.open(path, os.O_RDONLY)\nos.open(os.devnull, os.O_WRONLY)\nopen(os.memfd_create(name))\n", [1]),
            ("", "open(os.open(path, os.O_RDONLY))\n", [1, 1]),
            ("", "from pathlib import Path\nPath(a).read_bytes()\nimport shutil\nfrom os import open\n", [1, 2, 3, 4]),
            ("", "system.read_text(path)\nopening.stream(path)\nself._wakeups.open()\n", []),
        ),
        DOORS,
    ),
    Rule("agent", replaces_modules, (("", "sys.modules['a'] = None", [1]),)),
    # The inode of a mapping is never made a number.
    Rule("agent", captures_unlimited_numbers, but={"system/processes.py"}),
    Rule(
        "tests",
        imports_test_modules,
        (
            ("", "from tests.cli.test_up import run", ["tests.cli.test_up", "tests.cli.test_up.run"]),
            ("", "from tests.cli import test_up", ["tests.cli.test_up"]),
            ("", "from tests.fakes import host", []),
        ),
    ),
    Rule("tests", private_names, (("", "from agent.host import _x\ny._z, self._a, y.__b__", {"_x", "_z"}),)),
    Rule("integration", imports_more_than_fakes, (("", "import tests.cli, tests.fakes.host", ["tests.cli"]),)),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.find.__name__)
def test_rule(rule: Rule) -> None:
    found = found_in(rule.place)[rule.find.__name__]
    assert {name: faults for name, faults in found.items() if name not in rule.but} == {}
    assert found.keys() == rule.but, "no longer there"
    for name, text, expected in rule.found:
        faults = rule.find(Source(text, name))
        assert (sorted(faults) if isinstance(faults, list) else faults) == expected, text


def test_vendor_names_stay_with_the_vendors() -> None:
    found = found_in("agent")["names_vendors"]
    assert {(name, text) for name, texts in found.items() for text in texts} == ALLOWED_NAMES
    assert names_vendors(Source("def f(x):\n    'NVIDIA.'\nx = f'/dev/nVidia{0}', 'amd64'")) == {"/dev/nVidia"}


def test_modules_import_at_their_top() -> None:
    found = found_in("agent")["late_imports"]
    assert sum(map(len, found.values())) <= LATE_IMPORTS, found
    assert late_imports(Source("import a\ndef f():\n    import b\n    def g():\n        from c import d")) == {3, 5}


def test_the_rules_see_the_modules() -> None:
    assert len(found_in("agent")["is_pure"]) > 30
    for place in ("agent", "tests"):
        assert sum(map(len, found_in(place)["imports"].values())) > 1000
    named = {name for found in found_in("integration")["imports"].values() for name in found}
    assert any(name.startswith("tests.fakes") for name in named)


REMOVALS = re.compile(
    r"\brm +(-\S+ +)*(-[a-z]*[rR][a-z]*|--recursive)|[\"']rm[\"'],.*[\"'](-[a-z]*[rR]|--recursive)"
    r"|rmtree|removedirs|[ ]-delete\b|one-file-system"
)
BUILT = ("containerfiles/install-", "containerfiles/agent-")
"""What runs only in an image that is being built, on the image's own files."""


def test_every_tree_is_removed_through_one_door() -> None:
    """Anything else also removes the data of a bind mount of the same file system."""
    found: dict[str, list[str]] = {}
    directories = ("agent", "deploy", "systemd", "containerfiles")
    for path in sorted(each for name in directories for each in (REPOSITORY / name).rglob("*")):
        name = str(path.relative_to(REPOSITORY))
        if path.is_file() and path.suffix != ".pyc" and not name.startswith(BUILT):
            lines = [line for line in path.read_text().splitlines() if REMOVALS.search(line)]
            found |= {name: lines} if lines else {}
    assert found == {}
    removals = ["rm -rf x", "rm --force -R x", "rm -r x", "rm --recursive x", "find x -delete", "os.removedirs(x)"]
    assert all(map(REMOVALS.search, [*removals, 'run("rm", "-rf", x)', "shutil.rmtree(x)"]))
    assert not any(map(REMOVALS.search, ["rm -f x", "rm x-r", "podman build --rm -f x", 'run("rm", "-f", x)']))
