"""containerd's drop-in: rendered from the files before it, read back, and never at the expense of a user's setting."""

import errno
import json
import os
import re
import time
import tomllib
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import tomlkit

from agent.machine.containerd import CHANGED, parsed_imports, with_import
from agent.machine.containerd_tables import (
    CRI_2,
    CRI_3,
    IMPORT,
    MAIN,
    SHIM,
    Configuration,
    covers,
    imports,
    merge,
    parse_version,
    problems,
    render,
)
from agent.machine.notes import Notes
from agent.machine.run import run
from agent.model.errors import AgentError, DocumentError
from agent.model.paths import MACHINE_STATE
from agent.system.process import Completed
from agent.vendors.machine_vendor import RuntimeHandler
from agent.vendors.nvidia.machine import edit_runtime_config
from agent.vendors.nvidia.nvidia_ctk import parse_version as parse_toolkit
from tests.fakes.containerd_files import MAIN_2, MAIN_3
from tests.fakes.kubelet import listener
from tests.fakes.machine import REQUEST, Machine, containerd, failing, hang, settle, systemctl

HANDLER = RuntimeHandler("nvidia", "/usr/bin/nvidia-container-runtime")
DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"
V17, V21, V24 = (1, 7, 24), (2, 1, 9), (2, 4, 2)


NAMED = f"""\
{MAIN_2}
[plugins."{CRI_2}".containerd.runtimes.nvidia]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "/etc/cri-base.json"
  [plugins."{CRI_2}".containerd.runtimes.nvidia.options]
    SystemdCgroup = true
    BinaryName = "/opt/nvidia-container-runtime"
"""
"""An operator has configured a handler of that name before."""
OTHER_DEFAULT = f"""\
[plugins."{CRI_2}".containerd]
  default_runtime_name = "crun"
  [plugins."{CRI_2}".containerd.runtimes.crun]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "/etc/cri-base.json"
    [plugins."{CRI_2}".containerd.runtimes.crun.options]
      SystemdCgroup = true
      BinaryName = "/usr/bin/crun"
"""


DUMP = {"plugins": {CRI_2: {"containerd": {"runtimes": {"runc": {"runtime_type": "default", "snapshotter": ""}}}}}}


@pytest.fixture
def machine(machine: Machine) -> Machine:
    machine.put(MAIN, MAIN_2)
    return machine


IMPORTED = "/etc/containerd/conf.d/10-site.toml"
BASELINE = f"{MACHINE_STATE}/containerd-baseline.toml"
RUNTIME_CONFIG = "/etc/nvidia-container-runtime/config.toml"


@pytest.mark.parametrize(
    ("importer", "text"),
    [
        (MAIN, f'imports = ["{IMPORT}", "/etc/containerd/later.toml"]\n{MAIN_3}'),
        (IMPORTED, 'version = 3\nimports = ["/etc/containerd/later.toml"]\n'),
    ],
)
def test_a_file_that_is_imported_later_is_read_too(machine: Machine, importer: str, text: str) -> None:
    """If the note kept the former imports, nobody would notice a change of that file."""
    machine.put(MAIN, f'imports = ["{IMPORT}"]\n{MAIN_3}')
    machine.put(IMPORTED, "version = 3\n")
    run(machine)
    machine.put("/etc/containerd/later.toml", "version = 3\n")
    machine.put(importer, text)
    run(machine)
    assert not asked(machine)
    machine.put("/etc/containerd/later.toml", "version = 3\n# changed\n")
    assert asked(machine)


def drop_in(main: str, containerd: tuple[int, ...], *imported: str, default: bool = False) -> dict[str, Any]:
    files = {f"/etc/containerd/{index}.toml": tomllib.loads(each) for index, each in enumerate(imported)}
    configuration = Configuration({MAIN: tomllib.loads(main), **files}, DUMP)
    return render(configuration, containerd, HANDLER, default=default)


def on_read_back(machine: Machine, act: Callable[[Completed], Completed]) -> None:
    """From now on, `act` gets and returns containerd's dump of its files with the drop-in."""

    def answer(argv: tuple[str, ...]) -> Completed:
        done = containerd(machine, argv)
        return act(done) if argv[2:3] == (MAIN,) else done

    machine.program("containerd", answer)


def die(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def asked(machine: Machine) -> list[tuple[str, ...]]:
    """Run, and return what containerd was asked."""
    machine.calls.clear()
    run(machine)
    return [call for call in machine.calls if call[0] == "containerd"]


REFUSED = Completed(1, b"", b"containerd: bad")


def works(machine: Machine) -> None:
    machine.program("containerd", lambda argv: containerd(machine, argv))


def restarts(machine: Machine) -> int:
    return sum(call[:3] == ("systemctl", "--no-block", "try-restart") for call in machine.calls)


# ---- rendering


OURS = {"SystemdCgroup": True, "BinaryName": HANDLER.binary}
DIRECTORIES = ["/etc/cdi", "/var/run/cdi"]
NVIDIA = "containerd.runtimes.nvidia"
KEPT: dict[str, object] = {NVIDIA: {"runtime_type": SHIM, "base_runtime_spec": "/etc/cri-base.json", "options": OURS}}
"""A runtime without these settings, such as SystemdCgroup, would start pods outside the kubelet's cgroups."""
DEFAULT = "version = 2\n" + OTHER_DEFAULT
OF_ANOTHER_SHIM = MAIN_2 + OTHER_DEFAULT.replace(SHIM, "io.containerd.kata.v2").replace("crun", "kata")
OFF = f'version = 3\n[plugins."{CRI_3}"]\nenable_cdi = false\ncdi_spec_dirs = ["/srv/cdi", "/etc/cdi"]\n'
SITES_2 = f'version = 2\n[plugins."{CRI_2}"]\ncdi_spec_dirs = ["/srv/cdi"]\n'
SITES_3 = SITES_2.replace(CRI_2, CRI_3)
CGROUP = f"{NVIDIA}.options.SystemdCgroup"
WITHOUT_RUNTIMES = f'version = 3\n[plugins."{CRI_3}"]\nstream_idle_timeout = "3h"\n'
COUNTS: dict[str, object] = {CGROUP: True, "cdi_spec_dirs": ["/srv/cdi", *DIRECTORIES]}
RENDERED: list[tuple[str, tuple[int, ...], tuple[str, ...], int, str, dict[str, object]]] = [
    (
        "1.x replaces a plugin's table with that of the file loaded last: it is repeated",
        V17,
        (MAIN_2,),
        2,
        CRI_2,
        {
            "sandbox_image": "registry.example/pause:3.9",
            "cni": {"bin_dir": "/usr/lib/cni"},
            "enable_cdi": True,
            "cdi_spec_dirs": DIRECTORIES,
            "containerd.runtimes.runc.options": {"SystemdCgroup": True},
            NVIDIA: {"runtime_type": SHIM, "options": OURS},
            "containerd.default_runtime_name": None,
        },
    ),
    (
        "1.x: an imported file's table has replaced the main file's already",
        V17,
        (MAIN_2, f'[plugins."{CRI_2}"]\nsandbox_image = "other"\n', "[metrics]\n"),
        2,
        CRI_2,
        {"sandbox_image": "other", "cni": None},
    ),
    (
        "1.x: a table with another runtime, but without runc, would remove the default runtime",
        V17,
        ("version = 2\n",),
        2,
        CRI_2,
        {"containerd.runtimes.runc": {"runtime_type": "default", "snapshotter": ""}, f"{NVIDIA}.snapshotter": ""},
    ),
    ("2.x merges tables", V21, (MAIN_2,), 2, CRI_2, {**COUNTS, "cdi_spec_dirs": DIRECTORIES, "enable_cdi": True}),
    ("2.x has CDI on", V21, (MAIN_3,), 3, CRI_3, {"containerd.runtimes.runc": None, "cni": None, "enable_cdi": None}),
    ("2.x with CDI off", V21, (OFF,), 3, CRI_3, {"cdi_spec_dirs": ["/srv/cdi", *DIRECTORIES], "enable_cdi": True}),
    ("1.x: settings of that name", V17, (NAMED,), 2, CRI_2, KEPT),
    ("2.x: settings of that name", V21, (NAMED,), 2, CRI_2, KEPT),
    ("1.x: settings of the default", V17, (DEFAULT,), 2, CRI_2, KEPT),
    ("2.x: settings of the default", V21, (DEFAULT,), 2, CRI_2, KEPT),
    ("another shim's options", V17, (OF_ANOTHER_SHIM,), 2, CRI_2, {NVIDIA: {"runtime_type": SHIM, "options": OURS}}),
    ("from 2.3 on, each file has its own version", V24, ("version = 4\n", MAIN_2, SITES_2), 4, CRI_3, COUNTS),
    ("the same with version 3", V24, ("version = 3\n", MAIN_2, SITES_2), 3, CRI_3, COUNTS),
    ("the same with version 2", V24, ("version = 2\n", MAIN_3, SITES_3), 2, CRI_2, COUNTS),
    ("the same with a newer file", V24, ("version = 3\n", "version = 4\n"), 3, CRI_3, {"cdi_spec_dirs": DIRECTORIES}),
    (
        "the tables of a file in version 4 are not migrated",
        V24,
        ("version = 4\n", MAIN_2.replace("version = 2", "version = 4")),
        4,
        CRI_3,
        {f"{NVIDIA}.options": {"BinaryName": HANDLER.binary}},
    ),
    ("without a version, the imported files'", V21, ("imports = []\n", "version = 2\n", "[debug]\n"), 2, CRI_2, {}),
    ("without any, the newest that all 2.x read", V21, ("[debug]\n",), 3, CRI_3, {}),
    # containerd 2.1 reads all files as the last version says; in version 2, a key of CRI_3 hides that of CRI_2.
    # Otherwise the drop-in would change how it reads the others.
    ("mixed, version 3 last", V21, (MAIN_2, MAIN_3.replace("true", "false")), 3, CRI_3, {CGROUP: False}),
    ("mixed, version 2 last", V21, (MAIN_3, MAIN_2.replace("true", "false")), 2, CRI_3, {CGROUP: True}),
    ("mixed, an empty one last", V21, (MAIN_3, "version = 2\n"), 2, CRI_3, {CGROUP: True}),
    ("mixed, no runtimes in the newer one", V21, (WITHOUT_RUNTIMES, MAIN_2), 2, CRI_2, {CGROUP: True}),
]


@pytest.mark.parametrize(
    ("containerd", "files", "version", "cri", "expected"),
    [each[1:] for each in RENDERED],
    ids=[each[0] for each in RENDERED],
)
def test_the_drop_in(
    containerd: tuple[int, ...], files: tuple[str, ...], version: int, cri: str, expected: dict[str, object]
) -> None:
    document = drop_in(files[0], containerd, *files[1:])
    assert document["version"] == version
    for path, value in expected.items():
        found: Any = document["plugins"][cri]
        for each in path.split("."):
            found = found.get(each) if isinstance(found, dict) else None
        assert found == value, path


@pytest.mark.parametrize(
    ("main", "containerd", "expected"),
    [
        (MAIN_2, (1, 6, 20), "1.6.20 is too old: 1.7.0 is the first with CDI"),
        ("[plugins.cri]\n", V17, "version 1, .*`containerd config dump` prints it in version 2"),
        ("[plugins.cri]\n", V21, "version 1, .*`containerd config migrate` prints it in a newer version"),
        ('version = 2\ndisabled_plugins = ["cri"]\n', V17, "disables containerd's CRI"),
    ],
)
def test_settings_that_cannot_work_are_named(main: str, containerd: tuple[int, ...], expected: str) -> None:
    with pytest.raises(AgentError, match=expected):
        drop_in(main, containerd)


@pytest.mark.parametrize(
    ("version", "main", "imported", "named"),
    [
        ("v2.3.2", "version = 2\n", "version = 4\n", f"{IMPORTED} has version 4, and {MAIN} has version 2"),
        ("v2.3.2", "version = 2\n", "version = 2\n", ""),
        ("v2.3.2", "version = 3\n", "version = 2\n", ""),
        ("v2.1.9", "version = 2\n", "version = 4\n", ""),
    ],
)
def test_a_drop_in_of_a_newer_version_is_named(
    machine: Machine, version: str, main: str, imported: str, named: str
) -> None:
    """containerd 2.3.2 does not name it: "drop-in config version 4 higher than root config version 2"."""
    said = b"containerd: drop-in config version 4 higher than root config version 2"
    version_answer = Completed(0, f"containerd containerd {version} 0\n".encode(), b"")
    machine.program("containerd", lambda argv: Completed(1, b"", said) if "dump" in argv else version_answer)
    machine.put(MAIN, f'imports = ["{IMPORT}"]\n{main}')
    machine.put(IMPORTED, imported)
    run(machine)
    message = machine.message("RuntimeConfigured")
    assert said.decode() in message
    assert named in message
    assert ("has version" in message) == bool(named)


def test_versions_and_imports() -> None:
    assert parse_version("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+b1") == (1, 6, 20)
    assert parse_version("containerd github.com/containerd/containerd/v2 v2.1.9 abc") == V21
    with pytest.raises(DocumentError):
        parse_version("containerd")
    assert covers("/etc/containerd/conf.d/*.toml", DROP_IN)
    assert covers(DROP_IN, DROP_IN)
    assert covers("/etc/*/conf.d/*.toml", DROP_IN)
    assert not covers("/etc/containerd/*.toml", DROP_IN)
    assert not covers("/etc/containerd/conf.d/9?-nvidia.toml", DROP_IN)
    # Imports are relative to the directory of the file that has them, and are normalised.
    document = {"imports": ["../*.toml", "./a.toml", "/b.toml"]}
    assert imports(DROP_IN, document) == ("/etc/containerd/*.toml", "/etc/containerd/conf.d/a.toml", "/b.toml")
    with pytest.raises(DocumentError, match=f"{MAIN}: key imports is not a list"):
        imports(MAIN, {"imports": "x"})
    patterns = ("/etc/[a-c]?[0-9x]/*.toml", "/etc/[^a].toml", r"/etc/\a.toml")
    content = f"imports = {json.dumps(patterns)}\n".encode()
    assert parsed_imports(MAIN, content) == patterns, "without an asterisk, it is no pattern"
    assert covers(patterns[0], "/etc/bxx/a.toml")
    for listed in ("7", "{}"):
        with pytest.raises(DocumentError, match=f"{MAIN}: key imports is not a list"):
            with_import(f"imports = {listed}\n".encode(), IMPORT)


def test_a_fault_names_files_of_mixed_versions(machine: Machine) -> None:
    machine.put(MAIN, f'imports = ["{IMPORT}"]\n{MAIN_2}')
    machine.put(IMPORTED, MAIN_3)

    def ignores_drop_ins(argv: tuple[str, ...]) -> Completed:
        return containerd(machine, argv, "v2.1.9") if "config" not in argv else Completed(0, MAIN_3.encode(), b"")

    machine.program("containerd", ignores_drop_ins)
    assert machine.verdict("RuntimeConfigured") == ("False", "ReadBackFailed")
    assert (
        f"containerd 2.1.9 reads all its files as version 3, that of {IMPORTED}, but {MAIN} has version 2: write these "
        "files in one version"
    ) in machine.message("RuntimeConfigured")


def test_a_file_loaded_after_ours_is_refused_if_it_would_win() -> None:
    """containerd 1.x takes a plugin's table from the file loaded last."""
    files = {"/etc/containerd/conf.d/99-zz.toml": {"version": 2, "plugins": {CRI_2: {"sandbox_image": "x"}}}}
    configuration = Configuration({MAIN: {"version": 2}, **files}, DUMP, tuple(files), DROP_IN)
    with pytest.raises(AgentError, match=f"{DROP_IN} is loaded before .*99-zz.toml"):
        render(configuration, V17, HANDLER, default=False)
    assert render(configuration, V21, HANDLER, default=False)["version"] == 2


UNUSUAL = "version = 2\n[plugins.a.b]\nx = 1\n[debug]\n[plugins.a]\ny = 2\n[[stream]]\n[plugins]\n"
"""Tables in an unusual order, which containerd accepts."""
EMPTY_LINES = "\n" * (1 << 20)
"""tomlkit would take 20 s for them."""
PATTERNS = json.dumps([f"/{number}[a-z].toml" for number in range(20)]).removesuffix("]")
ADDED = {
    "no list": f'<imports = ["/x"]\n>{MAIN_2}',
    "empty": 'imports = [<"/x">]\n',
    "lines": f'imports = [\n  "/a.toml", # why\n<"/x"\n>  ]\n{MAIN_2}',
    "no last comma": f'imports = [\n  "/a.toml" # why\n<, "/x"\n>  ]\n{MAIN_2}',
    "patterns": f'imports = {PATTERNS}<, "/x">]\n',
    "comment": f'imports = ["/a.toml"<, "/x">] # why\n{UNUSUAL}',
    "string": f'imports = [\n  "/a.toml",\n<"/x"\n>]\nroot = """\n[no table]\n"""\n{UNUSUAL}',
    "later": f'oom = [\n[1],\n[2]]\n# [comment]\nimports = ["/a.toml"<, "/x">]\n  {UNUSUAL}',
    "dotted": 'imports = ["/a.toml"<, "/x">]\nplugins.a.b = 1\nplugins.a.c = 2\n',
    "no line's end": 'imports = ["/a.toml"<, "/x">]',
    "CRLF": 'imports = ["/a.toml"<, "/x">]\r\n[plugins]\r\n',
    **{
        f"before {value!r}": f'imports = ["/a"<, "/x">]\nx = {value}\n  [t]\ny = "["\n[u]\n'
        for value in (
            '"""[\n[a]\n\\""""""',
            "'''\n[a]\n''''",
            '["""a"""", "[", \'"\']',
            "1 # [ '\n#\n",
            '{a = [1, {}], b = "]"}',
        )
    },
    "many lines": f'imports = [<"/x">]\n\n\n{EMPTY_LINES}[a]\n',
    "many lists": "a = [\n" + "[1],\n" * 600 + ']\nimports = [<"/x">]\n[b]\n',
}


@pytest.mark.parametrize("edited", ADDED.values(), ids=ADDED)
def test_the_import_is_added_at_once_and_nothing_else_changes(edited: str) -> None:
    """Only what is between < and > is new."""
    before, began = re.sub("<.*>", "", edited, flags=re.DOTALL), time.process_time()
    assert with_import(before.encode(), "/x").decode() == re.sub("[<>]", "", edited)
    assert time.process_time() - began < 2


def test_imports_in_another_form_are_left_alone() -> None:
    with pytest.raises(DocumentError, match=r'cannot be edited: its imports .* \(add "/x" to its list `imports`\)'):
        with_import(b'"imports" = []\n', "/x")


def test_lost_and_changed_settings_are_found() -> None:
    before = {"version": 2, "plugins": {CRI_2: {"sandbox_image": "a", "x": {"y": 1}}, "opt": {"path": "/srv"}}}
    after = {"version": 2, "plugins": {CRI_2: {"sandbox_image": "b"}, "opt": {"path": "/srv"}}}
    assert drop_in(MAIN_3, V21, default=True)["plugins"][CRI_3]["containerd"]["default_runtime_name"] == "nvidia"
    found = "; ".join(problems(before, after, {}, HANDLER, default=True))
    for expected in (
        f"{CRI_2}.sandbox_image is changed",
        f"{CRI_2}.x.y is lost",
        "does not run /usr/bin/nvidia-container-runtime",
        "enable_cdi is not true",
        "cdi_spec_dirs does not contain /etc/cdi, /var/run/cdi",
        "default_runtime_name is not nvidia",
    ):
        assert expected in found

    def dump(*directories: str) -> dict[str, Any]:
        return {"version": 4, "plugins": {CRI_3: {"cdi_spec_dirs": list(directories)}}}

    before, after = dump("/srv/cdi", "/etc/cdi"), dump("/etc/cdi", "/var/run/cdi")
    assert list(problems(before, after, {}, None, default=False)) == ["cdi_spec_dirs no longer contains /srv/cdi"]


def test_lost_settings_of_the_handler_are_found() -> None:
    """Settings of a handler that existed before count too. A key that containerd does not know is not a loss."""
    runtimes: dict[str, Any] = {"runc": {"options": {"SystemdCgroup": True}}}
    before = {"version": 2, "plugins": {CRI_2: {"containerd": {"runtimes": runtimes}}}}
    ours = {"runtime_type": "x", "typo": 1, "options": {"SystemdCgroup": True, "BinaryName": HANDLER.binary}}
    wanted = {"plugins": {CRI_2: {"containerd": {"runtimes": {"nvidia": ours}}}}}
    lost = {"options": {"BinaryName": HANDLER.binary}}
    after = {"version": 2, "plugins": {CRI_2: {"containerd": {"runtimes": {**runtimes, "nvidia": lost}}}}}
    found = "; ".join(problems(before, after, wanted, HANDLER, default=False))
    assert "runtime nvidia does not have options.SystemdCgroup as configured" in found
    assert "typo" not in found
    runtimes["nvidia"] = {"base_runtime_spec": "/x.json", "options": {"BinaryName": "/old"}}
    after = {"version": 2, "plugins": {CRI_2: {"containerd": {"runtimes": {**runtimes, "nvidia": lost}}}}}
    found = "; ".join(problems(before, after, wanted, HANDLER, default=False))
    assert "runtimes.nvidia.base_runtime_spec is lost" in found
    assert "BinaryName" not in found


# ---- in the machine


def test_files_are_as_readable_as_they_were(machine: Machine) -> None:
    """The main file may have passwords of registries, which the drop-in repeats for containerd 1.x."""
    machine.put(MAIN, "version = 2\n")
    (machine.tree / MAIN[1:]).chmod(0o640)
    run(machine)
    assert IMPORT in machine.read_text(MAIN)
    assert machine.mode(MAIN) == 0o640
    assert machine.mode(DROP_IN) == 0o600


@pytest.mark.parametrize("path", [MAIN, RUNTIME_CONFIG])
@pytest.mark.parametrize("elsewhere", ["/srv/settings/own.toml", "/usr/local/etc/own.toml"])
def test_a_link_to_a_file_elsewhere_stays(machine: Machine, path: str, elsewhere: str) -> None:
    """Somebody keeps the settings elsewhere, and changes them there later."""
    machine.put(elsewhere, MAIN_2 if path == MAIN else "disable-require = true\n")
    (machine.tree / elsewhere[1:]).chmod(0o640)
    machine.link(path, f"../..{elsewhere}")
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert machine.read_link(path) == f"../..{elsewhere}"
    assert ("imports" if path == MAIN else 'mode = "cdi"') in machine.read_text(elsewhere)
    assert machine.mode(elsewhere) == 0o640


@pytest.mark.parametrize(
    ("elsewhere", "number"),
    [
        ("/srv/settings/own.toml", errno.EROFS),
        ("/srv/settings/own.toml", errno.EBUSY),
        ("/srv/settings/own.toml", errno.EPERM),
        ("/usr/share/containerd/config.toml", 0),
    ],
)
def test_a_link_to_a_file_that_must_stay_is_replaced(machine: Machine, elsewhere: str, number: int) -> None:
    """The file is on a read-only file system, is itself a mount, is immutable, or belongs to a package."""
    machine.put(elsewhere, MAIN_2)
    machine.link(MAIN, elsewhere)

    def read_only(path: str) -> None:
        if path.startswith("/srv/"):
            raise OSError(number, os.strerror(number), path)

    machine.before_write = read_only
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert machine.read_link(MAIN) is None
    assert "imports" in machine.read_text(MAIN)
    assert machine.read_text(elsewhere) == MAIN_2


@pytest.mark.parametrize("text", ["[broken", "version = 2\n[plugins.x]\ny = 1\n"])
def test_files_that_containerd_does_not_load_stay_unloaded(machine: Machine, text: str) -> None:
    """The import of the whole directory would load what somebody has left there, or is preparing."""
    machine.put(IMPORTED, text)
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert tomllib.loads(machine.read_text(MAIN))["imports"] == ["/etc/containerd/conf.d/99-nvidia*.toml"]


@pytest.mark.parametrize("refused", [False, True])
def test_an_import_that_somebody_has_removed(machine: Machine, refused: bool) -> None:
    """What containerd did load is loaded again. An import with which the drop-in did not work is not made again."""
    if refused:
        on_read_back(machine, lambda _: REFUSED)
    else:
        machine.put(IMPORTED, "version = 2\n")
    machine.put(MAIN, f'imports = ["{"/etc/containerd/conf.d/*9*.toml" if refused else IMPORT}"]\n{MAIN_2}')
    assert machine.verdict("RuntimeConfigured")[0] == ("False" if refused else "True")
    machine.put(MAIN, MAIN_2)
    works(machine)
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert tomllib.loads(machine.read_text(MAIN))["imports"] == [IMPORT]


def test_containerd_restarts_once_per_change(machine: Machine) -> None:
    for _ in range(2):
        run(machine)
        machine.program("systemctl", systemctl("active", time.monotonic_ns() // 1000))
    assert restarts(machine) == 1
    assert machine.conditions()["RuntimeActive"] == ("True", "Running")
    assert machine.read_text(MAIN) == f'imports = ["{IMPORT}"]\n{MAIN_2}'
    machine.put(MAIN, machine.read_text(MAIN).replace("pause:3.9", "pause:3.10"))
    run(machine)
    assert "pause:3.10" in machine.read_text(DROP_IN)
    assert restarts(machine) == 2


def test_a_program_with_a_runtime_inside_is_named_instead_of_a_missing_containerd(machine: Machine) -> None:
    machine.drop("/usr/bin/containerd")
    assert machine.verdict("RuntimeConfigured") == ("False", "NoContainerd")
    start_process(machine, "/usr/local/bin/k3s agent", "k3s-agent.service")
    machine.put("/proc/77/cmdline", "/usr/local/bin/k3s agent\0\0\0")
    assert machine.verdict("RuntimeConfigured") == ("False", "UnsupportedDistribution")
    assert machine.message("RuntimeConfigured").startswith("K3s runs in this machine (process 77), with a kubelet ")
    assert "install" not in machine.message("RuntimeConfigured")


RUNTIME_OF_K3S = "/run/k3s/containerd/containerd.sock"
"""RKE2 has it too."""


def start_process(machine: Machine, arguments: str, service: str) -> None:
    machine.process(77, *arguments.split(), cgroup=f"0::/system.slice/{service}")


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("arguments", "configuration", "path", "endpoint"),
    [
        ("kubelet --container-runtime-endpoint=unix:///run/k3s/containerd/containerd.sock", "", "", RUNTIME_OF_K3S),
        ("kubelet --container-runtime-endpoint /run/k0s/containerd.sock", "", "", "/run/k0s/containerd.sock"),
        (
            "kubelet --config=/k0s/kubelet.yaml",
            "# containerRuntimeEndpoint: /x\ncontainerRuntimeEndpoint: unix:///var/run/k0s/containerd.sock\n",
            "/k0s/kubelet.yaml",
            "/run/k0s/containerd.sock",
        ),
        (
            "kubelet --config=/none --config-dir=/etc/kubelet.conf.d",
            '{"kind": "KubeletConfiguration", "containerRuntimeEndpoint":"unix:///run/k3s/containerd/containerd.sock"}',
            "/etc/kubelet.conf.d/00-rke2-defaults.conf",
            RUNTIME_OF_K3S,
        ),
    ],
)
def test_a_kubelet_with_another_runtime_is_named(
    machine: Machine, arguments: str, configuration: str, path: str, endpoint: str, *, installed: bool
) -> None:
    """containerd.service was configured and called right, but no pod of RKE2 or k0s is run by it."""
    machine.link("/var/run", "/run")
    if not installed:
        machine.drop("/usr/bin/containerd")
    if configuration:
        machine.put(path, configuration)
    start_process(machine, arguments, "rke2-agent.service")
    with listener(machine, endpoint):
        assert machine.verdict("RuntimeConfigured") == ("False", "UnsupportedDistribution")
        assert machine.message("RuntimeConfigured").startswith("the kubelet (process 77) uses the container runtime at")


@pytest.mark.parametrize(
    ("arguments", "service"),
    [
        ("kubelet --container-runtime-endpoint=unix:///run/containerd/containerd.sock", "kubelet.service"),
        ("kubelet --container-runtime-endpoint=unix:///run/proxy.sock", "kubelet.service"),
        ("kubelet --config=/etc/kubernetes/kubelet.json", "kubelet.service"),
        ("/usr/bin/vi k3s agent", "cron.service"),
        ("kubelet --container-runtime-endpoint=unix:///run/k3s/containerd/containerd.sock", "kubepods/pod1"),
    ],
)
def test_a_runtime_that_serves_no_kubelet_does_not_matter(machine: Machine, arguments: str, service: str) -> None:
    start_process(machine, arguments, service)
    with listener(machine, RUNTIME_OF_K3S):
        run(machine)
    assert machine.conditions()["RuntimeConfigured"] == ("True", "ReadBack")


def test_a_runtime_beside_containerd_is_that_of_the_program_with_a_kubelet_inside(machine: Machine) -> None:
    start_process(machine, "/usr/local/bin/k3s agent", "k3s-agent.service")
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack"), "K3s can use containerd.service"
    with listener(machine, RUNTIME_OF_K3S):
        assert machine.verdict("RuntimeConfigured") == ("False", "UnsupportedDistribution")
        assert f", and a runtime at {RUNTIME_OF_K3S}, which" in machine.message("RuntimeConfigured")
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack"), "its socket stays, but nobody listens"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/usr/bin/containerd --config /srv/other.toml", ("False", "OtherConfiguration")),
        ("/usr/bin/containerd -c=/srv/other.toml --log-level debug", ("False", "OtherConfiguration")),
        ("containerd --log-level debug -config /srv/a\xe9", ("False", "OtherConfiguration")),
        (f"containerd --config {MAIN} --config /srv/other.toml", ("False", "OtherConfiguration")),
        (f"/usr/bin/containerd --config {MAIN}", ("True", "Running")),
        ("/usr/bin/containerd --config //etc/containerd/./config.toml", ("True", "Running")),
        ("/usr/bin/containerd", ("True", "Running")),
        ("/usr/bin/containerd --config", ("True", "Running")),
        ("/bin/sh -c /usr/local/bin/start-containerd", ("True", "Running")),
    ],
)
def test_a_containerd_that_was_started_with_another_file(
    machine: Machine, command: str, expected: tuple[str, str]
) -> None:
    """Such a containerd has none of the agent's settings, whenever it was started.

    The process has the arguments, not the unit, whose ExecStart= may have variables or name a script.
    """
    run(machine)
    machine.put("/proc/52/cmdline", command.replace(" ", "\0").encode("latin-1") + b"\0")
    machine.program("systemctl", systemctl("active", time.monotonic_ns() // 1000, main_process=52))
    assert machine.verdict("RuntimeActive") == expected


@pytest.mark.parametrize("left", [None, 0o644, 0o666, "/etc/victim"], ids=["none", "readable", "writable", "link"])
def test_the_copy_of_the_main_file_is_for_root_alone(machine: Machine, left: int | str | None) -> None:
    """It is tried without the drop-in, and may have passwords of registries. A pod may have left such a file."""
    machine.put("/etc/victim", "kept")
    if isinstance(left, int):
        machine.put(BASELINE)
        (machine.tree / BASELINE[1:]).chmod(left)
    elif left:
        machine.make_directory(MACHINE_STATE)
        machine.link(BASELINE, left)
    seen = list[int]()

    def look(argv: tuple[str, ...]) -> Completed:
        if BASELINE in argv:
            assert machine.read_link(BASELINE) is None
            seen.append(machine.mode(BASELINE))
        return containerd(machine, argv)

    machine.program("containerd", look)
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert seen == [0o600]
    assert machine.read_text("/etc/victim") == "kept"


def test_nvidias_runtime_is_configured_although_cdi_is_on(machine: Machine) -> None:
    cdi = f"enable_cdi = true\n  cdi_spec_dirs = {json.dumps(DIRECTORIES)}\n  sandbox_image"
    machine.put(MAIN, MAIN_2.replace("sandbox_image", cdi))
    run(machine)
    assert HANDLER.binary in machine.read_text(DROP_IN)


def test_a_refused_configuration_is_reverted(machine: Machine) -> None:
    on_read_back(machine, lambda _: REFUSED)
    assert machine.verdict("RuntimeConfigured") == ("False", "ReadBackFailed")
    assert machine.conditions()["RuntimeActive"] == ("Unknown", "NotConfigured")
    assert "containerd: bad" in machine.message("RuntimeConfigured")
    assert machine.read_text(MAIN) == MAIN_2
    assert not machine.exists(DROP_IN)
    assert restarts(machine) == 0
    assert not asked(machine)
    assert machine.conditions()["RuntimeConfigured"] == ("False", "ReadBackFailed")


def killed_run(machine: Machine, kept: int = 2) -> None:
    """Make a run that is killed after `kept` writes to containerd's files: before the next one, or before the check."""
    writes: list[str] = []

    def killed(path: str) -> None:
        if path.startswith("/etc/containerd/"):
            if len(writes) == kept:
                raise KeyboardInterrupt
            writes.append(path)

    on_read_back(machine, die)
    machine.before_write = killed
    with pytest.raises(KeyboardInterrupt):
        run(machine)
    machine.before_write = lambda path: None
    works(machine)
    assert len(writes) == kept


def has_settings(machine: Machine) -> bool:
    return machine.exists(DROP_IN) and bool(tomllib.loads(machine.read_text(DROP_IN)))


def refuse_drop_in(machine: Machine) -> None:
    """From now on, containerd refuses its configuration if the drop-in has any setting."""
    on_read_back(machine, lambda done: REFUSED if has_settings(machine) else done)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_after_a_killed_run_containerd_is_still_restarted(machine: Machine, kept: int) -> None:
    killed_run(machine, kept)
    assert restarts(machine) == 0
    run(machine)
    assert restarts(machine) == 1
    assert machine.conditions()["RuntimeConfigured"] == ("True", "ReadBack")


@pytest.mark.parametrize("refused", [True, False])
def test_after_a_killed_run_a_drop_in_that_does_not_work_is_emptied(machine: Machine, refused: bool) -> None:
    """The killed run had not read the result back. With such a drop-in, containerd could not start."""
    faulty = REFUSED if refused else Completed(0, MAIN_2.encode(), b"")
    killed_run(machine)
    assert machine.exists(DROP_IN)
    on_read_back(machine, lambda done: faulty if has_settings(machine) else done)
    for _ in range(2):
        assert machine.verdict("RuntimeConfigured") == ("False", "ReadBackFailed")
        assert tomllib.loads(machine.read_text(DROP_IN)) == {}
    assert not asked(machine)
    assert restarts(machine) == 0


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_after_a_killed_run_a_faulty_change_is_tried_only_once(machine: Machine, kept: int) -> None:
    """However many files the killed run wrote. Each try would write both files, and start containerd twice."""
    killed_run(machine, kept)
    refuse_drop_in(machine)
    for _ in range(2):
        assert machine.verdict("RuntimeConfigured") == ("False", "ReadBackFailed")
    assert not asked(machine)
    works(machine)
    machine.put("/usr/bin/containerd", "another release")
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert restarts(machine) == 1


def test_a_drop_in_that_another_containerd_refuses_is_emptied(machine: Machine) -> None:
    """A new release of containerd would not start. If only the check had failed, the next run writes the file again."""
    run(machine)
    refuse_drop_in(machine)
    machine.put("/usr/bin/containerd", "another release")
    assert machine.verdict("RuntimeConfigured") == ("False", "ReadBackFailed")
    assert f"emptied {DROP_IN}" in machine.message("RuntimeConfigured")
    assert tomllib.loads(machine.read_text(DROP_IN)) == {}
    works(machine)
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert has_settings(machine)
    assert machine.report()["repairs"]["containerd"] == 0
    # It refuses the new drop-in too, which differs because config.toml has changed.
    refuse_drop_in(machine)
    machine.put("/usr/bin/containerd", "a third release")
    machine.put(MAIN, machine.read_text(MAIN).replace("SystemdCgroup = true", "SystemdCgroup = false"))
    run(machine)
    assert f"; restored {DROP_IN}; emptied {DROP_IN}" in machine.message("RuntimeConfigured")
    assert tomllib.loads(machine.read_text(DROP_IN)) == {}


@pytest.mark.parametrize("missed", [True, False])
def test_after_a_killed_run_only_a_containerd_that_missed_a_file_restarts(machine: Machine, missed: bool) -> None:
    """containerd started during the killed run: before its last write, or after that."""
    paths: list[str] = []
    starts = [0]

    def start_containerd() -> None:
        starts.append(time.monotonic_ns() // 1000)

    def killed_at_dump(_: Completed) -> NoReturn:
        start_containerd()
        die()

    def killed(path: str) -> None:
        paths.append(path)
        if path == MAIN and missed:
            start_containerd()
        if paths.count(f"{MACHINE_STATE}/{CHANGED}.json") == 2 and missed:
            raise KeyboardInterrupt

    machine.before_write = killed
    on_read_back(machine, killed_at_dump)
    with pytest.raises(KeyboardInterrupt):
        run(machine)
    assert {MAIN, DROP_IN} <= {*paths}
    machine.before_write = lambda path: None
    works(machine)
    machine.program("systemctl", systemctl("active", starts[-1]))
    run(machine)
    assert restarts(machine) == missed
    expected = ("Unknown", "RestartPending") if missed else ("True", "Running")
    assert machine.conditions()["RuntimeActive"] == expected


def test_a_containerd_whose_dump_shows_no_migrated_tables(machine: Machine) -> None:
    """2.0.0 to 2.0.5 print defaults instead of a version 2 file's tables in `config dump`. 2.x merges files deeply."""

    def answer(argv: tuple[str, ...]) -> Completed:
        if argv[-2:] == ("config", "dump"):
            return Completed(0, f'version = 3\n[plugins."{CRI_3}"]\nenable_cdi = true\n'.encode(), b"")
        if argv[-2:] != ("config", "migrate"):
            return containerd(machine, argv, "v2.0.5")
        document = tomllib.loads(machine.read_text(argv[2]))
        if machine.exists(DROP_IN) and IMPORT in document["imports"]:
            merge(document, tomllib.loads(machine.read_text(DROP_IN)))
        return Completed(0, tomlkit.dumps(document).replace(CRI_2, CRI_3).encode(), b"")

    machine.program("containerd", answer)
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    document = tomllib.loads(machine.read_text(DROP_IN))
    assert document["version"] == 2
    assert document["plugins"][CRI_2]["containerd"]["runtimes"]["nvidia"]["options"]["SystemdCgroup"] is True


def test_a_full_disk_reverts_everything(machine: Machine) -> None:
    machine.before_write = failing(errno.ENOSPC, MAIN)
    assert machine.verdict("RuntimeConfigured") == ("False", "Failed")
    assert "No space left on device" in machine.message("RuntimeConfigured")
    assert not machine.exists(DROP_IN)
    assert Notes(machine).load(CHANGED) == {}
    assert restarts(machine) == 0
    machine.before_write = lambda path: None
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert restarts(machine) == 1


def stopped(argv: tuple[str, ...]) -> Completed:
    return Completed(-9, b"", b"")


@pytest.mark.parametrize(("answer", "expected"), [(hang, "time limit"), (stopped, "killed by signal 9")])
@pytest.mark.parametrize("ours", [False, True], ids=["baseline", "read back"])
def test_a_containerd_that_did_not_answer_is_run_again(
    machine: Machine, answer: Callable[[tuple[str, ...]], Completed], expected: str, ours: bool
) -> None:
    """On a busy machine, nothing is known against the configuration, and nothing is claimed."""

    def busy(argv: tuple[str, ...]) -> Completed:
        return answer(argv) if "dump" in argv and (argv[2] == MAIN) is ours else containerd(machine, argv)

    machine.program("containerd", busy)
    assert machine.verdict("RuntimeConfigured") == ("False", "Failed")
    assert expected in machine.message("RuntimeConfigured")
    assert "refuses" not in machine.message("RuntimeConfigured")
    assert machine.read_text(MAIN) == MAIN_2
    assert not machine.exists(DROP_IN)
    assert restarts(machine) == 0
    works(machine)
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")


def loses(done: Completed) -> Completed:
    return done._replace(stdout=done.stdout.replace(b"SystemdCgroup = true", b"").replace(b"x = 7", b""))


@pytest.mark.parametrize("number", [0, 99])
def test_a_lost_setting_reverts_everything(machine: Machine, number: int) -> None:
    before = MAIN_2 + "".join(f'[plugins."io.containerd.{index}"]\nx = 7\n' for index in range(number))
    machine.put(MAIN, before)
    on_read_back(machine, loses)
    run(machine)
    assert "options.SystemdCgroup is lost" in machine.message("RuntimeConfigured")
    assert "; restored " in machine.message("RuntimeConfigured")
    assert machine.read_text(MAIN) == before


def test_a_change_while_a_fault_is_found_is_checked_by_the_next_run(machine: Machine) -> None:
    """Somebody writes the main file in two steps: the fault of the first one must not be noted for the second one."""
    main = with_import(MAIN_2.encode(), DROP_IN).decode()
    machine.put(MAIN, main)

    def between(done: Completed) -> Completed:
        machine.put(MAIN, main + "# second step\n")
        return loses(done)

    on_read_back(machine, between)
    assert machine.verdict("RuntimeConfigured") == ("False", "ReadBackFailed")
    works(machine)
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")


def test_a_change_after_the_reading_is_checked_by_the_next_run(machine: Machine) -> None:
    """The main file is replaced by one without the import, while the good result is noted."""

    def replaced_after(done: Completed) -> Completed:
        machine.put(MAIN, MAIN_2)
        return done

    on_read_back(machine, replaced_after)
    run(machine)
    assert DROP_IN not in machine.read_text(MAIN)
    works(machine)
    run(machine)
    assert machine.read_text(MAIN) != MAIN_2
    assert machine.conditions()["RuntimeConfigured"] == ("True", "ReadBack")


GO_PATTERNS = ("conf.d/[^9]*.toml", "conf.d/[!9]*.toml", r"conf.d/\9*.toml", "conf.d/[]a]*.toml", "conf.d/[a*.toml")
DEEP = {"a list": "x = " + "[" * 100_000, "a table": f"[a{'.a' * 2000}]\n"}
"""tomllib raises RecursionError, and so does everything that handles its result; both files are the machine's."""
UNUSABLE = {
    "no TOML": (MAIN, "version = ", f"{MAIN}: not TOML"),
    # int() rejects more than 4,300 digits.
    "an endless number": (MAIN, f"x = {'9' * 5000}", f"{MAIN}: not TOML"),
    **{each: (MAIN, text, "nested too deeply") for each, text in DEEP.items()},
    # tomllib reads a table's dotted name without recursion; everything that handles the table recurses.
    "too deep to copy": (MAIN, f'version = 2\nimports = ["{IMPORT}"]\n[plugins."{CRI_2}"{".a" * 2000}]\n', ""),
    # The agent would miss files that containerd loads, and lose their settings.
    **{
        each: (MAIN, f"imports = ['{IMPORT}', '{each}']\n{MAIN_3}", f"{MAIN}: key imports: the agent cannot read the")
        for each in GO_PATTERNS
    },
    "no TOML, an imported one": (IMPORTED, "=", f"{IMPORTED}: not TOML"),
    "no TOML, the runtime's": (RUNTIME_CONFIG, "mode = ", "not TOML"),
    "an endless number, the runtime's": (RUNTIME_CONFIG, f"mode = {'9' * 5000}", "not TOML"),
    **{f"{each}, the runtime's": (RUNTIME_CONFIG, text, "nested too deeply") for each, text in DEEP.items()},
    "no table": (RUNTIME_CONFIG, "nvidia-container-runtime.modes = 7\n", "nvidia-container-runtime.modes is not a"),
}


@pytest.mark.parametrize(("path", "text", "said"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_file_that_cannot_be_used_is_named_and_stays(machine: Machine, path: str, text: str, said: str) -> None:
    """Also after a run that has noted what was good in it."""
    machine.put(MAIN, f'imports = ["{IMPORT}"]\n{MAIN_2}')
    good = machine.read_text(path) if machine.exists(path) else ""
    for noted in (False, True):
        machine.put(path, text)
        assert machine.verdict("RuntimeConfigured") == ("False", "Failed")
        assert said in machine.message("RuntimeConfigured")
        assert machine.read_text(path) == text
        assert machine.exists(DROP_IN) is noted
        machine.put(path, good)
        assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")


def test_a_file_whose_name_is_not_utf_8_is_named(machine: Machine) -> None:
    """TOML cannot import it alone, as the agent must to see what containerd makes of all other files."""
    machine.put("/etc/containerd/conf.d/\udce9.toml", "version = 3\n")
    machine.put(MAIN, f'imports = ["{IMPORT}"]\n{MAIN_3}')
    assert machine.verdict("RuntimeConfigured") == ("False", "Failed")
    expected = r"/etc/containerd/conf.d/\udce9.toml is imported, but its name is not UTF-8 (rename it)"
    assert machine.message("RuntimeConfigured") == expected


def test_a_foreign_file_stays(machine: Machine) -> None:
    """At the default path, and at a configured one, for which the agent's former file stays."""
    for path in (DROP_IN, PART):
        machine.put(path, "# theirs")
        place(machine, path)
        assert machine.verdict("RuntimeConfigured") == ("False", "ForeignFile")
        assert machine.read_text(path) == "# theirs"
    place(machine, OTHER_PART)
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    ours = machine.read(OTHER_PART)
    place(machine, PART)
    assert machine.verdict("RuntimeConfigured") == ("False", "ForeignFile")
    assert machine.read(OTHER_PART) == ours
    assert {machine.read_text(path) for path in (DROP_IN, PART)} == {"# theirs"}


PART, OTHER_PART = (f"/etc/cri/conf.d/{number}-nvidia.part" for number in (20, 30))


def place(machine: Machine, path: str) -> None:
    machine.hand(REQUEST, containerd_drop_in="" if path == DROP_IN else path)


def test_an_existing_import_is_used(machine: Machine) -> None:
    machine.put(MAIN, main := f'imports = ["/etc/cri/conf.d/*.part"]\n{MAIN_2}')
    place(machine, PART)
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert machine.read_text(MAIN) == main


@pytest.mark.scenario("001")
@pytest.mark.parametrize("boot", [False, True], ids=["next run", "next boot"])
def test_the_drop_in_moves_to_another_configured_path(machine: Machine, boot: bool) -> None:
    """Moved and moved back: the former file is removed, even after a boot of the machine, which clears the notes."""
    run(machine)
    ours = machine.read(DROP_IN)
    for path, former in ((PART, DROP_IN), (DROP_IN, PART)):
        if boot:
            machine.remove_tree(MACHINE_STATE)
        place(machine, path)
        assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
        assert machine.read(path) == ours
        assert not machine.exists(former)
        assert machine.conditions()["RuntimeActive"] == ("Unknown", "RestartPending")
        before = machine.read(MAIN)
        run(machine)
        assert (machine.read(MAIN), machine.read(path)) == (before, ours)
    assert machine.report()["repairs"]["containerd"] == 0, "nobody changed anything"


def test_a_refused_move_is_reverted(machine: Machine) -> None:
    """For example, another file imports the former one by its name, which containerd then cannot find."""
    machine.put(MAIN, f'imports = ["{DROP_IN}"]\n{MAIN_2}')
    run(machine)
    before = {path: machine.read(path) for path in (MAIN, DROP_IN)}
    on_read_back(machine, lambda done: done if machine.exists(DROP_IN) else REFUSED)
    place(machine, PART)
    assert machine.verdict("RuntimeConfigured") == ("False", "ReadBackFailed")
    assert {path: machine.read(path) for path in before} == before
    assert not machine.exists(PART)
    machine.put(MAIN, before[MAIN].decode().replace(DROP_IN, IMPORT))
    works(machine)
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert not machine.exists(DROP_IN)


def test_a_repair_restarts_only_a_containerd_that_missed_the_file(machine: Machine) -> None:
    """The running process has the same configuration; one that was started meanwhile has not."""
    files = [MAIN, DROP_IN]

    def in_another_order(completed: Completed) -> Completed:
        files.reverse()
        return Completed(0, tomlkit.dumps(tomllib.loads(completed.stdout.decode()) | {"imports": files}).encode(), b"")

    on_read_back(machine, in_another_order)
    settle(machine)
    machine.drop(DROP_IN)
    run(machine)
    assert machine.exists(DROP_IN)
    assert machine.conditions()["RuntimeActive"] == ("True", "Running")
    # Killed after the files are restored: the next run finds out what containerd makes of them.
    machine.drop(DROP_IN)
    on_read_back(machine, die)
    with pytest.raises(KeyboardInterrupt):
        run(machine)
    assert machine.exists(DROP_IN)
    on_read_back(machine, in_another_order)
    assert machine.verdict("RuntimeActive") == ("True", "Running")
    assert restarts(machine) == 0
    machine.drop(DROP_IN)
    machine.program("systemctl", systemctl("active", time.monotonic_ns() // 1000))
    assert machine.verdict("RuntimeActive") == ("Unknown", "RestartPending")
    assert restarts(machine) == 1


@pytest.mark.parametrize("missing", ["containerd", "nvidia-container-runtime"])
def test_a_missing_program_is_named(machine: Machine, missing: str) -> None:
    machine.drop(f"/usr/bin/{missing}")
    assert machine.verdict("RuntimeConfigured")[0] == "False"
    assert f"{missing} is not installed" in machine.message("RuntimeConfigured")


# ---- nvidia-container-runtime's own configuration


def test_the_runtime_config_keeps_the_packages_settings(machine: Machine) -> None:
    """The agent writes only the settings that make `runtimeClassName: nvidia` use the published specification."""
    machine.put(
        RUNTIME_CONFIG,
        '#accept = true\n[nvidia-container-cli]\nroot = "/x" # ours\n'
        '[nvidia-container-runtime]\nmode = "auto"\nruntimes = ["crun"]\n',
    )
    run(machine)
    text = machine.read_text(RUNTIME_CONFIG)
    assert "#accept = true" in text
    assert 'root = "/x" # ours' in text
    settings = tomllib.loads(text)["nvidia-container-runtime"]
    assert settings["mode"] == "cdi"
    assert settings["runtimes"] == ["crun"]
    assert settings["modes"]["cdi"]["default-kind"] == "nvidia.com/gpu"
    assert settings["modes"]["cdi"]["spec-dirs"] == ["/etc/cdi", "/var/run/cdi"]
    assert edit_runtime_config(text) is text


@pytest.mark.parametrize(
    "text",
    [
        "nvidia-container-runtime = {}\n",
        "[nvidia-container-runtime]\nmodes.csv = 1\n",
        "nvidia-container-runtime.modes.csv = []\n[x.nvidia-container-runtime.a]\n",
        "[nvidia-container-runtime.c.a]\nb = 1\n[x]\n[nvidia-container-runtime]\nmodes.csv={q=1}\n",
    ],
)
def test_runtime_config_in_unusual_forms(text: str) -> None:
    """tomlkit fails on some of these forms, and turns others into invalid TOML."""
    edited = tomllib.loads(edit_runtime_config(text))
    assert edited["nvidia-container-runtime"]["mode"] == "cdi"
    assert edited["nvidia-container-runtime"]["modes"]["cdi"]["default-kind"] == "nvidia.com/gpu"
    before = tomllib.loads(text)["nvidia-container-runtime"]
    assert {key for key in before if key != "modes"} <= edited["nvidia-container-runtime"].keys()
    assert before.get("modes", {}).items() <= edited["nvidia-container-runtime"]["modes"].items()


def test_a_file_too_large_to_edit_is_refused_at_once() -> None:
    began = time.process_time()
    with pytest.raises(DocumentError, match=r"config\.toml: has 1048583 characters, .*shorten or remove it"):
        edit_runtime_config(f"a = []\n{EMPTY_LINES}")
    assert time.process_time() - began < 2
    done = edit_runtime_config("")
    assert edit_runtime_config(done + EMPTY_LINES) == done + EMPTY_LINES


@pytest.mark.parametrize("text", ["x 1.7.{}", "x {}.7.24", "x v2.{}.1"])
def test_an_endless_number_is_rejected(text: str) -> None:
    """int() rejects more than 4,300 digits."""
    with pytest.raises(DocumentError, match="no version"):
        parse_version(text.format("9" * 5000))
    with pytest.raises(DocumentError, match="no version"):
        parse_toolkit(f"CLI version {text.format('9' * 5000).removeprefix('x ')}")
