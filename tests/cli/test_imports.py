"""What each command loads: nobody waits for the service's libraries to read a help text."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from agent.cli.parser import COMMANDS as ALL

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
SERVICE = {"agent.host.daemon", "prometheus_client", "http"}
"""What only `run` needs."""
TOOLS = {"sh", "asyncio", "agent.system.tool_runner"}
"""What only `up` needs, when it downloads."""
FUNCTIONS = {name: command.function.partition(":") for name, command in ALL.items() if command.function}
COMMANDS = {f"agent.cli.{module}" for module, _, _ in FUNCTIONS.values()}
"""The modules of commands."""


def test_every_command_has_its_function() -> None:
    assert FUNCTIONS.keys() >= ALL.keys() - {"driver", "kube", "version"}
    for module, _, function in FUNCTIONS.values():
        assert callable(getattr(import_module(f"agent.cli.{module}"), function))


def loaded(*arguments: str) -> set[str]:
    return loaded_by(CHILD, *arguments)


def loaded_by(code: str, *arguments: str) -> set[str]:
    whole = f"{PATH}{code}\nprint('{LOADED}', *sys.modules)"
    argv = (sys.executable, "-I", "-B", "-c", whole, str(REPOSITORY), *arguments)
    finished = subprocess.run(argv, capture_output=True, text=True, check=True)
    *_, names = finished.stdout.rpartition(LOADED)
    return set(names.split())


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["version"], ["status", "--help"], ["reset"], []])
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
        (["status"], {"status"}),
        # Its archive has the output of `status`.
        (["doctor"], {"doctor.bundle", "status"}),
        (["prepare", "a"], {"prepare"}),
        (["gpus", "holders"], {"gpus"}),
    ],
)
def test_each_command_loads_its_own_modules(tmp_path: Path, arguments: list[str], own: set[str]) -> None:
    """The configuration is missing, so each command ends before it looks at this host."""
    names = loaded("--config", str(tmp_path / "config.toml"), *arguments)
    assert names & COMMANDS == {f"agent.cli.{name}" for name in own}
    assert "agent.host.reconcile" in names
    slow = {"pydantic", "dataclasses", "ssl", "logging", "traceback"}
    assert names & (SERVICE | TOOLS | slow) == set()


@pytest.mark.processes
def test_the_service_loads_no_tools_and_no_validator() -> None:
    names = loaded_by("import agent.cli.service")
    assert names > {"agent.host.daemon.loop", "prometheus_client", "http.server"}
    assert names & (TOOLS | {"pydantic"}) == set()


@pytest.mark.processes
def test_only_a_new_configuration_loads_what_validates_it(tmp_path: Path) -> None:
    """A service that starts again, or a machine, finds what has been valid before."""
    host = tmp_path / "etc" / "unbounded-agent"
    host.mkdir(parents=True)
    (host / "config.toml").write_text("[machines.a]\n")
    code = f"""
from agent.config.load import load_or_last_good
from agent.system.files import System
from agent.system.process import host_runner
assert list(load_or_last_good(System(host_runner, {str(tmp_path)!r})).config.machines) == ["a"]
"""
    first, second = (loaded_by(code) & {"agent.config.settings", "pydantic"} for _ in range(2))
    assert (first, second) == ({"agent.config.settings", "pydantic"}, {"agent.config.settings"})


@pytest.mark.processes
def test_the_steps_of_up_need_no_netlink_until_the_network_is_observed() -> None:
    """`plan` shows these steps; loading pyroute2 takes more processor time than all else that a command loads."""
    names = loaded_by("import agent.host.provision.up, agent.system.network")
    assert {name for name in names if name.startswith("pyroute2")} == set()
