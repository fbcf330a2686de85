"""What each command loads: nobody waits for the service's libraries to read a help text."""

import subprocess
import sys
from pathlib import Path

import msgspec  # noqa: F401
import pytest
import typing_extensions

from agent.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]
LOADED = "loaded:"
PATH = "import sys; sys.path.insert(0, sys.argv[1])\n"
CHILD = """
from agent.cli.main import main
try:
    main(sys.argv[2:])
except SystemExit:
    pass
"""
SERVICE = {"agent.host.daemon", "prometheus_client", "http", "inotify_simple"}
"""What only `run` needs."""
TOOLS = {"sh", "asyncio", "agent.system.tool_runner"}
"""What only `up` needs, when it downloads."""
COMMANDS = {
    *(f"agent.cli.{name}" for name in ("plan", "status", "doctor", "apply", "prepare", "load_modules", "service")),
    *(f"agent.cli.{name}" for name in ("gpus", "detach", "forget", "holders")),
}


def loaded(*arguments: str) -> set[str]:
    """Return the names of the modules that a fresh interpreter has loaded after this command."""
    return loaded_by(CHILD, *arguments)


def loaded_by(code: str, *arguments: str) -> set[str]:
    """Return the names of the modules that a fresh interpreter has loaded after this code."""
    whole = f"{PATH}{code}\nprint('{LOADED}', *sys.modules)"
    argv = (sys.executable, "-I", "-B", "-c", whole, str(REPOSITORY), *arguments)
    finished = subprocess.run(argv, capture_output=True, text=True, check=True)
    *_, names = finished.stdout.rpartition(LOADED)
    return set(names.split())


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["--version"], ["version"], ["--help"], ["status", "--help"], ["reset"], []])
def test_help_version_and_bad_arguments_load_little(arguments: list[str]) -> None:
    names = loaded(*arguments)
    assert "agent.cli.parser" in names
    libraries = {"pydantic", "pydantic_core", "msgspec", "jeepney", "sh", "asyncio", "logging", "dataclasses", "typing"}
    assert names & (libraries | {"shutil"} | SERVICE | COMMANDS) == set()
    assert {name for name in names if name.startswith(("agent.config", "agent.host", "agent.system"))} == set()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        (["plan"], {"plan"}),
        # It names faults of the host as `doctor` does.
        (["status"], {"doctor", "status"}),
        (["doctor"], {"doctor", "status"}),
        (["apply"], {"apply"}),
        (["prepare", "a"], {"prepare"}),
        (["gpus", "holders"], {"gpus", "detach", "holders", "forget"}),
    ],
)
def test_each_command_loads_its_own_modules(tmp_path: Path, arguments: list[str], own: set[str]) -> None:
    """The configuration is missing, so each command ends before it looks at this host."""
    names = loaded("--config", str(tmp_path / "config.toml"), *arguments)
    assert names & COMMANDS == {f"agent.cli.{name}" for name in own}
    assert "agent.host.reconcile" in names
    slow = {"pydantic", "typing_extensions", "inspect", "dataclasses", "hashlib", "ssl", "logging", "traceback"}
    assert names & (SERVICE | TOOLS | slow) == set()


SERVICE_CHILD = """
from agent.cli.libraries import load_msgspec, load_prometheus_client
load_msgspec()
load_prometheus_client()
import agent.cli.service, agent.cli.wiring
"""


@pytest.mark.processes
def test_the_service_loads_no_tools_and_no_openssl() -> None:
    names = loaded_by(SERVICE_CHILD)
    assert names > {"agent.host.daemon.loop", "prometheus_client", "http.server"}
    assert names & (TOOLS | {"pydantic", "ssl", "_ssl", "_hashlib"}) == set()


@pytest.mark.processes
def test_a_python_without_its_own_digests_uses_openssls() -> None:
    """Fedora and RHEL build theirs so (--with-builtin-hashlib-hashes=blake2)."""
    missing = ("_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_sha3")
    code = f"""
sys.modules.update(dict.fromkeys({missing}))
{SERVICE_CHILD}
import hashlib, random
assert hashlib.sha256().name == "sha256"
"""
    names = loaded_by(code)
    assert names > {"agent.host.daemon.loop", "prometheus_client", "_hashlib"}
    assert names & {"ssl", "_ssl"} == set()


@pytest.mark.processes
def test_openssl_can_still_be_loaded_later() -> None:
    """What prometheus_client and the standard library keep in place of it finds the real one."""
    code = f"""{SERVICE_CHILD}
import http.client, prometheus_client.exposition, urllib.request
connection = http.client.HTTPSConnection("localhost")
assert prometheus_client.exposition.ssl.create_default_context().check_hostname
import ssl
assert isinstance(connection._context, ssl.SSLContext)
"""
    assert loaded_by(code) > {"ssl", "_ssl"}


def test_a_command_takes_no_module_from_a_process_that_has_it(tmp_path: Path) -> None:
    """Only msgspec is loaded without typing_extensions. Tests run commands in their own process."""
    assert "msgspec" in sys.modules
    assert main(["--config", str(tmp_path / "config.toml"), "plan"]) == 2
    assert sys.modules["typing_extensions"] is typing_extensions


@pytest.mark.processes
def test_only_a_new_configuration_loads_what_validates_it(tmp_path: Path) -> None:
    """A service that starts again, or a machine, finds what has been valid before."""
    host = tmp_path / "etc" / "unbounded-agent"
    host.mkdir(parents=True)
    (host / "config.toml").write_text("[machines.a]\n")
    code = f"""
from agent.config.load import load_or_last_good
from agent.system.files import System
from agent.system.host_runner import host_runner
assert list(load_or_last_good(System(host_runner, {str(tmp_path)!r})).config.machines) == ["a"]
"""
    first, second = (loaded_by(code) & {"agent.config.settings", "pydantic"} for _ in range(2))
    assert (first, second) == ({"agent.config.settings", "pydantic"}, {"agent.config.settings"})


@pytest.mark.processes
def test_loading_kernel_modules_needs_no_pass(tmp_path: Path) -> None:
    names = loaded("--config", str(tmp_path / "config.toml"), "load-modules")
    assert names & COMMANDS == {"agent.cli.load_modules"}
    assert "agent.host.reconcile" not in names
    assert names & SERVICE == set()
