"""The agent's settings in containerd 1.7, 2.1, 2.2 and 2.4: checked by the real programs' own `config dump`.

There is no virtual machine: the machine half's step runs on a root file system, and containerd inside it by chroot(1).
One test starts containerd; its unit is simulated.
"""

import contextlib
import os
import re
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.host.provision.binaries import POD_IMAGES_DIRECTORY
from agent.host.provision.node_files import POD_IMAGES_SERVICE, NodeInputs, node_files
from agent.machine.containerd import check_active, configure_vendor
from agent.machine.notes import Context
from agent.machine.vendors import VENDORS
from agent.model.conditions import Condition, ConditionType, Reason, Status, unknown
from agent.model.errors import AgentError
from agent.model.handoff import Handoff
from agent.system.files import System
from agent.system.process import Completed, host_runner
from integration.bed.machine.containerds import debian_root, upstream_root
from integration.bed.machine.pod_images import PAUSE, pod_images
from integration.bed.process import run
from integration.bed.waiting import wait
from tests.fakes.node_settings import node_settings
from tests.fakes.programs import program

pytestmark = pytest.mark.scenario("002")

MAIN = "/etc/containerd/config.toml"
CONF_D = "/etc/containerd/conf.d"
DROP_IN = f"{CONF_D}/99-nvidia.toml"
PART = "/etc/cri/conf.d/20-nvidia.part"
HANDLER = "/usr/bin/nvidia-container-runtime"
IMPORTS = f'imports = ["{CONF_D}/*.toml"]\n'
OURS = ("enable_cdi", "cdi_spec_dirs")

CRI_2 = 'plugins."io.containerd.grpc.v1.cri"'
RUNTIME_3 = 'plugins."io.containerd.cri.v1.runtime"'
IMAGES_3 = 'plugins."io.containerd.cri.v1.images"'

USER_2 = f"""\
# what the user has set
[{CRI_2}]
  sandbox_image = "registry.example/pause:3.9" # mirrored
  enable_cdi = false
  cdi_spec_dirs = ["/opt/user/cdi"]
  [{CRI_2}.registry]
    config_path = "/etc/containerd/certs.d"
  [{CRI_2}.cni]
    bin_dir = "/opt/user/cni/bin"
    conf_dir = "/opt/user/cni/net.d"
  [{CRI_2}.containerd]
    snapshotter = "native"
    default_runtime_name = "crun"
  [{CRI_2}.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [{CRI_2}.containerd.runtimes.runc.options]
      SystemdCgroup = true
      Root = "/run/user-runc"
  [{CRI_2}.containerd.runtimes.crun]
    runtime_type = "io.containerd.runc.v2"
    pod_annotations = ["run.oci.handler"]
    [{CRI_2}.containerd.runtimes.crun.options]
      BinaryName = "/opt/user/bin/crun"
      SystemdCgroup = true
[plugins."io.containerd.internal.v1.opt"]
  path = "/opt/user/opt"
"""
USER_3 = f"""\
# what the user has set
[{IMAGES_3}]
  snapshotter = "native"
  [{IMAGES_3}.pinned_images]
    sandbox = "registry.example/pause:3.9" # mirrored
  [{IMAGES_3}.registry]
    config_path = "/etc/containerd/certs.d"
[{RUNTIME_3}]
  enable_cdi = false
  cdi_spec_dirs = ["/opt/user/cdi"]
[{RUNTIME_3}.cni]
  bin_dirs = ["/opt/user/cni/bin"]
  conf_dir = "/opt/user/cni/net.d"
[{RUNTIME_3}.containerd]
  default_runtime_name = "crun"
  [{RUNTIME_3}.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [{RUNTIME_3}.containerd.runtimes.runc.options]
      SystemdCgroup = true
      Root = "/run/user-runc"
  [{RUNTIME_3}.containerd.runtimes.crun]
    runtime_type = "io.containerd.runc.v2"
    pod_annotations = ["run.oci.handler"]
    [{RUNTIME_3}.containerd.runtimes.crun.options]
      BinaryName = "/opt/user/bin/crun"
      SystemdCgroup = true
[plugins."io.containerd.internal.v1.opt"]
  path = "/opt/user/opt"
"""
USER_VALUES = {
    "registry.example/pause:3.9", "/etc/containerd/certs.d", "/opt/user/cni/bin", "/opt/user/cni/net.d", "native",
    "/opt/user/bin/crun", "/opt/user/opt", "/opt/user/cdi", "run.oci.handler", "/run/user-runc",
}  # fmt: skip
MIRRORS = f'[{CRI_2}.registry.mirrors."docker.io"]\nendpoint = ["https://mirror.example"]\n'

BUNDLE = {"bundle": "/srv/bundle", "sha256": {}, "pod_images": {"pause.tar": "0" * 64}}

Files = dict[str, str]


class ContainerdMachine:
    """A root with one containerd, and the machine half's step for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.spawned: list[tuple[str, ...]] = []
        # Only its existence matters here: containerd starts it for containers, not for `config dump`.
        (root / HANDLER[1:]).write_text("")
        self.version = str(re.findall(r"\d+\.\d+\.\d+", self.tool("containerd", "--version"))[0])

    def tool(self, *argv: str) -> str:
        return System(self._runner).run(*argv)

    def reset(self, files: Files) -> None:
        """Return to a machine where the agent has never run, with these files."""
        for directory in (
            "etc/containerd",
            "etc/cri",
            "etc/nvidia-container-runtime",
            "run/unbounded-agent",
            "var/lib",
        ):
            shutil.rmtree(self.root / directory, ignore_errors=True)
        for path, text in files.items():
            self.put(path, text)

    def put(self, path: str, text: str) -> None:
        place = self.root / path[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def settle(self, vendor: str = "nvidia", *, default: bool = False, drop_in: str = "") -> Condition:
        """Run the step once, with notes and ownership as a new process reads them."""
        self.spawned.clear()
        handoff = Handoff("node", "x86_64", (), default_runtime=default, containerd_drop_in=drop_in)
        return configure_vendor(self.context(handoff), VENDORS[vendor])

    def context(self, handoff: Handoff) -> Context:
        return Context.of(System(self._runner, str(self.root)), handoff)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run containerd in the block, in a mount namespace with the file systems that it needs.

        The root must be a mount, because containerd looks up the mount on which it stores images.
        """
        mounts = 'for each in proc sys dev; do mkdir -p "$0/$each" && mount --rbind "/$each" "$0/$each"; done'
        script = f'mount --bind "$0" "$0" && {mounts} && exec chroot "$0" containerd'
        with (self.root.parent / "containerd.log").open("w") as log:
            argv = ["unshare", "--mount", "sh", "-ec", script, str(self.root)]
            process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            wait("containerd listens", (self.root / "run/containerd/containerd.sock").exists, 60)
            yield
        finally:
            process.terminate()
            process.wait(60)

    def files(self) -> dict[str, tuple[int, str]]:
        """Return inode and text of each file below /etc/containerd; a rewritten file has another inode."""
        found = [path for path in (self.root / "etc/containerd").rglob("*") if path.is_file()]
        return {f"/{path.relative_to(self.root)}": (path.stat().st_ino, path.read_text()) for path in found}

    def dump(self) -> dict[tuple[str, ...], Any]:
        """Return all values of `containerd config dump` by path."""
        text = self.tool("containerd", "--config", MAIN, "config", "dump")
        return dict(leaves(tomllib.loads(text)))

    def _runner(self, argv: tuple[str, ...], timeout: float) -> Completed:
        self.spawned.append(argv)
        if argv[0] == "systemctl":
            started = f"ExecMainStartTimestampMonotonic={time.monotonic_ns() // 1000}\n"
            return Completed(0, f"LoadState=loaded\nActiveState=active\nSubState=running\n{started}".encode(), b"")
        return host_runner(("chroot", str(self.root), *argv), timeout)


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)))
    else:
        yield path, value


def texts(dump: dict[tuple[str, ...], Any]) -> set[str]:
    """Return all strings, including those in lists."""
    found = (value if isinstance(value, list) else [value] for value in dump.values())
    return {str(each) for value in found for each in value}


def expect_configured(machine: ContainerdMachine, *, default: bool = False) -> dict[tuple[str, ...], Any]:
    """Settle twice; assert that containerd's own dump has our settings and all that it had before."""
    before = machine.dump() if (machine.root / MAIN[1:]).exists() else {}
    texts_before = {path: text for path, (_, text) in machine.files().items()}
    condition = machine.settle(default=default)
    assert (condition.status, condition.reason) == (Status.TRUE, "ReadBack"), condition.message
    after = machine.dump()
    for path, value in before.items():
        if path[0] == "plugins" and path[-1] not in OURS and not (default and path[-1] == "default_runtime_name"):
            assert after.get(path) == value, path
    ours = {path[-1]: value for path, value in after.items() if "nvidia" in path or path[-1] in OURS}
    assert ours["BinaryName"] == HANDLER
    # containerd 2.4 has no such key, because CDI is always enabled.
    assert ours.get("enable_cdi", release(machine) >= (2, 4)) is True
    assert {"/etc/cdi", "/var/run/cdi"} <= set(ours["cdi_spec_dirs"])
    # The user's default runtime uses runc's shim too. containerd 2 fills in defaults, all empty, but only for runc.
    runtime = "crun" if any("crun" in path for path in before) else "runc"
    options = {path[-1]: value for path, value in after.items() if path[-3:-1] == (runtime, "options") and value}
    copied = {path[-1]: value for path, value in after.items() if path[-3:-1] == ("nvidia", "options") and value}
    assert copied == options | {"BinaryName": HANDLER}
    for name, text in texts_before.items():
        left = machine.files()[name][1]
        assert [line for line in text.splitlines() if line not in left.splitlines() and "imports" not in line] == []
        assert name == MAIN or left == text
    settled = machine.files()
    assert machine.settle(default=default) == condition
    assert machine.files() == settled
    assert machine.spawned == []
    return after


def _exhaustive(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.exhaustive)


@pytest.fixture(scope="session", params=["trixie", *map(_exhaustive, ("noble", "sid", "upstream"))])
def containerd_machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ContainerdMachine:
    source = upstream_root() if request.param == "upstream" else debian_root(request.param)
    root = tmp_path_factory.mktemp("containerd") / request.param
    run(["cp", "-a", "--reflink=auto", source, root])
    return ContainerdMachine(root)


@pytest.fixture
def machine(containerd_machine: ContainerdMachine, record_property: Callable[[str, object], None]) -> ContainerdMachine:
    record_property("containerd", containerd_machine.version)
    return containerd_machine


def release(machine: ContainerdMachine) -> tuple[int, ...]:
    return tuple(map(int, machine.version.split(".")))


def versions(machine: ContainerdMachine) -> list[int]:
    """Return the versions of files that this containerd reads, except 1, which the agent refuses."""
    if release(machine) < (2,):
        return [2]
    return [2, 3] if release(machine) < (2, 3) else [2, 3, 4]


def user(version: int) -> str:
    return USER_2 if version == 2 else USER_3


@pytest.mark.parametrize("text", [None, "", "# nothing but a comment\n", IMPORTS, '[debug]\nlevel = "info"\n'])
def test_main_file_without_settings(machine: ContainerdMachine, text: str | None) -> None:
    """The main file is missing, empty, or has only comments, only imports, or no plugin's table."""
    machine.reset({} if text is None else {MAIN: text})
    expect_configured(machine)


@pytest.mark.parametrize("default", [False, True])
def test_users_settings_survive(machine: ContainerdMachine, default: bool) -> None:
    for version in versions(machine):
        machine.reset({MAIN: f"# top\nversion = {version}\n{user(version)}"})
        after = expect_configured(machine, default=default)
        assert texts(after) >= USER_VALUES
        name = next(value for path, value in after.items() if path[-1] == "default_runtime_name")
        assert name == ("nvidia" if default else "crun")


def test_registry_mirrors_survive(machine: ContainerdMachine) -> None:
    """containerd 2 has the image service's settings in a table of their own."""
    machine.reset({MAIN: f"version = 2\n{MIRRORS}"})
    assert "https://mirror.example" in texts(expect_configured(machine))


BOTH = f'[{CRI_2}.registry]\nconfig_path = "/etc/containerd/certs.d"\n{MIRRORS}'
REFUSED = "`mirrors` cannot be set when `config_path` is provided"


def test_containerd_says_whether_it_serves_the_kubelet(machine: ContainerdMachine) -> None:
    """Its CRI plugin refuses some settings that `containerd config dump` prints without a word."""
    configured, handoff = unknown(ConditionType.RUNTIME_CONFIGURED, Reason.NOT_TRIED, ""), Handoff("node", "x86_64", ())
    # The first releases of 2.2 have a `config_path` by default, even with the user's `mirrors`: their own defect.
    defect = (2, 2) <= release(machine) < (2, 2, 2)
    with_mirrors = ("False", REFUSED) if defect else ("True", "serves the kubelet")
    for settings, status, said in ((MIRRORS, *with_mirrors), (BOTH, "False", REFUSED), ("", "True", "")):
        machine.reset({MAIN: f"version = 2\n{settings}"})
        configured = machine.settle()
        assert configured.status is Status.TRUE, configured.message
        with machine.running():
            active = check_active(machine.context(handoff), configured)
        assert active.status == status, active.message
        assert said in active.message
    silent = check_active(machine.context(handoff), configured)
    assert (silent.status, silent.reason) == (Status.UNKNOWN, "NoAnswer"), silent.message


@pytest.mark.parametrize(
    ("imports", "path"),
    [
        (f'imports = ["{CONF_D}/*.toml"]', f"{CONF_D}/10-user.toml"),
        ('imports = ["conf.d/*.toml", "none/*.toml"]', f"{CONF_D}/10-user.toml"),
        ('imports = ["/etc/containerd/user.toml"]', "/etc/containerd/user.toml"),
        ('imports = [\n  "user.toml", # the user\'s\n]', "/etc/containerd/user.toml"),
        ('imports = ["/etc/containerd/*/10-*.toml"]', "/etc/containerd/user.d/10-user.toml"),
    ],
    ids=["conf.d", "relative, and one without a match", "file", "relative file", "directory's pattern"],
)
def test_settings_in_imported_files_survive(machine: ContainerdMachine, imports: str, path: str) -> None:
    """The user's own files are neither lost nor changed."""
    for version in versions(machine):
        files = {MAIN: f"version = {version}\n{imports}\n", path: f"version = {version}\n{user(version)}"}
        machine.reset(files)
        assert texts(expect_configured(machine)) >= USER_VALUES


def test_imported_file_alone_has_the_version(machine: ContainerdMachine) -> None:
    """A main file without tables has no version: the imported file's version is the configuration's."""
    machine.reset({MAIN: IMPORTS, f"{CONF_D}/10-user.toml": f"version = 2\n{USER_2}"})
    assert texts(expect_configured(machine)) >= USER_VALUES


@pytest.mark.parametrize("path", [f"{CONF_D}/99-zz.toml", "/etc/containerd/nested/user.toml"])
def test_file_loaded_after_ours(machine: ContainerdMachine, path: str) -> None:
    """containerd 1.7 would replace our table with that of a later file; 2.x replaces only values that both have."""
    files = {MAIN: f"version = 2\n{IMPORTS}", path: f"version = 2\n{USER_2}"}
    if "nested" in path:
        files[f"{CONF_D}/10-user.toml"] = 'version = 2\nimports = ["../nested/*.toml"]\n'
    machine.reset(files)
    before = machine.files()
    if machine.version.startswith("2"):
        condition = machine.settle()
        assert (condition.status, condition.reason) == (Status.FALSE, "ReadBackFailed")
        assert "cdi_spec_dirs does not contain /etc/cdi, /var/run/cdi" in condition.message
        assert f"loaded after {DROP_IN}, and may override it: {path}" in condition.message
    else:
        with pytest.raises(AgentError, match=f"{DROP_IN} is loaded before {path}, which would replace its table"):
            machine.settle()
    assert machine.files() == before
    (machine.root / path[1:]).rename(machine.root / CONF_D[1:] / "11-user.toml")
    assert texts(expect_configured(machine)) >= USER_VALUES


@pytest.mark.scenario("001")
def test_drop_in_at_a_configured_path(machine: ContainerdMachine) -> None:
    """containerd loads the drop-in from Talos's directory with its suffix, and the former file is gone; then back."""
    for version in versions(machine):
        machine.reset({MAIN: f"# top\nversion = {version}\n{user(version)}"})
        expect_configured(machine)
        usual = machine.dump()
        for drop_in, former in ((PART, DROP_IN), ("", PART)):
            condition = machine.settle(drop_in=drop_in)
            assert (condition.status, condition.reason) == (Status.TRUE, "ReadBack"), condition.message
            assert not (machine.root / former[1:]).exists()
            moved = {path: value for path, value in machine.dump().items() if path[0] != "imports"}
            assert moved == {path: value for path, value in usual.items() if path[0] != "imports"}
            machine.settle(drop_in=drop_in)
            assert machine.spawned == []


BROKEN = "version = 2\n\nx = = 1\n"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({MAIN: BROKEN}, rf"{MAIN}: not TOML: .*line 3"),
        (
            {MAIN: f"version = 2\n{IMPORTS}", f"{CONF_D}/10-user.toml": BROKEN},
            rf"{CONF_D}/10-user.toml: not TOML: .*line 3",
        ),
        (
            {MAIN: 'version = 2\nimports = ["gone.toml"]\n'},
            "/etc/containerd/gone.toml is imported, but does not exist",
        ),
        ({MAIN: "version = 2\nimports = 1\n"}, f"{MAIN}: key imports is not a list"),
        ({MAIN: "version = 9\n"}, rf"containerd refuses {MAIN} and its imports.* `?9`?"),
        ({MAIN: 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n'}, f"{MAIN} disables .*CRI plugin"),
        ({MAIN: '[plugins.cri]\nsandbox_image = "x"\n'}, rf"{MAIN} has version 1\b.*containerd config (dump|migrate)`"),
    ],
    ids=["main", "imported", "missing import", "imports", "version 9", "cri disabled", "version 1"],
)
@pytest.mark.parametrize("settled", [False, True], ids=["never settled", "settled before"])
def test_unusable_files_are_named_and_left_alone(
    machine: ContainerdMachine, files: Files, said: str, settled: bool
) -> None:
    """The message has the file and the line, and no file changes. Once they are repaired, settings converge."""
    good = {MAIN: f"version = 2\n{IMPORTS}{USER_2}"}
    machine.reset(good if settled else {})
    if settled:
        machine.settle()
    for path, text in files.items():
        machine.put(path, text)
    before = machine.files()
    for _ in range(2):
        with pytest.raises(AgentError, match=said):
            machine.settle()
        assert machine.files() == before
    for path in files:
        (machine.root / path[1:]).unlink()
    machine.put(MAIN, good[MAIN])
    assert texts(expect_configured(machine)) >= USER_VALUES
    if settled:
        assert machine.files()[DROP_IN] == before[DROP_IN]


@pytest.mark.scenario("003")
def test_pod_images_of_a_bundle_are_imported_before_the_kubelet(machine: ContainerdMachine, tmp_path: Path) -> None:
    """By the command of the unit that `up` writes. An archive that is no image stays, and fails the unit only."""
    machine.reset({f"{POD_IMAGES_DIRECTORY}/broken.tar": "no archive"})
    images = machine.root / POD_IMAGES_DIRECTORY[1:]
    shutil.copy(pod_images() / "pause.tar", images / "pause.tar")
    service = node_files("gpu", node_settings(binaries=BUNDLE), NodeInputs("gpu-1", "", b""))
    (unit,) = [file.content.decode() for file in service if file.path == POD_IMAGES_SERVICE]
    script = unit.replace("\\\n", "").replace("$$", "$").partition("ExecStart=/bin/sh -c '")[2].partition("'")[0]
    # These roots have no shell.
    ctr = f'exec chroot {machine.root} ctr "$1" "$2" "$3" "{POD_IMAGES_DIRECTORY}/$4"'
    program(tmp_path / "ctr", ctr)
    argv = ["sh", "-c", script.replace(POD_IMAGES_DIRECTORY, str(images))]
    with machine.running():
        finished = subprocess.run(argv, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False)
        assert PAUSE in machine.tool("ctr", "--namespace=k8s.io", "images", "list", "--quiet").split()
    assert finished.returncode == 1
    assert [each.name for each in images.iterdir()] == ["broken.tar"]


@pytest.mark.scenario("004")
def test_a_vendor_without_a_runtime_needs_cdi_alone(machine: ContainerdMachine) -> None:
    """Nothing else changes, another vendor's runtime may come and go, and a settled configuration runs no program."""
    for version in versions(machine):
        machine.reset({MAIN: f"version = {version}\n{user(version)}"})
        before = machine.dump()
        for vendor in ("intel", "amd", "nvidia", "intel"):
            condition = machine.settle(vendor)
            assert (condition.status, condition.reason) == (Status.TRUE, "ReadBack"), condition.message
            after = machine.dump()
            found = {path[-1]: value for path, value in after.items() if path[-1] in OURS}
            assert found.get("enable_cdi", release(machine) >= (2, 4)) is True
            assert {"/etc/cdi", "/var/run/cdi"} <= set(found["cdi_spec_dirs"])
            for path, value in before.items():
                assert path[0] != "plugins" or path[-1] in OURS or after.get(path) == value, path
            settled = machine.files()
            assert machine.settle(vendor) == condition
            assert (machine.files(), machine.spawned) == (settled, [])
        assert {path for path in machine.files() if path.startswith(CONF_D)} == {DROP_IN}
