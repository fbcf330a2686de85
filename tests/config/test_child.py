"""A changed configuration is validated in a child process."""

import sys
from pathlib import Path

import pytest

from agent.config.child import validate_in_child, validated
from agent.config.load import load_config, load_or_last_good
from agent.model.errors import ConfigError
from agent.model.paths import CONFIG_FILE, LAST_GOOD_CONFIG
from agent.system.files import System
from agent.system.host_runner import host_runner
from agent.system.process import Completed
from tests.fakes.host import ScriptedRunner


def host(tmp_path: Path, config: str) -> System:
    system = System(host_runner, str(tmp_path))
    system.write(CONFIG_FILE, config.encode())
    return system


@pytest.mark.processes
def test_the_child_saves_what_this_process_then_uses(tmp_path: Path) -> None:
    system = host(tmp_path, "[machines.a]\n")
    assert not validated(system)
    validate_in_child(system)
    assert validated(system)
    system.write(CONFIG_FILE, b"[machines.b]\n")
    validate_in_child(system)
    assert validated(system)
    assert list(load_config(system).machines) == ["b"]


@pytest.mark.processes
def test_a_wrong_configuration_is_this_process_to_report(tmp_path: Path) -> None:
    system = host(tmp_path, "[machines.a]\n")
    validate_in_child(system)
    good = system.read(LAST_GOOD_CONFIG)
    system.write(CONFIG_FILE, b"[machines.a]\ngpu = 1\n")
    validate_in_child(system)
    assert system.read(LAST_GOOD_CONFIG) == good
    assert "gpu: unknown key" in load_or_last_good(system).rejected


def test_without_a_child_this_process_validates(tmp_path: Path) -> None:
    def no_processes(argv: tuple[str, ...], timeout: float) -> Completed:
        assert argv[0] == sys.executable
        raise BlockingIOError(11, "Resource temporarily unavailable")

    host(tmp_path, "[machines.a]\n")
    system = System(no_processes, str(tmp_path))
    validate_in_child(system)
    assert not validated(system)
    assert list(load_or_last_good(system).config.machines) == ["a"]


def test_known_settings_need_no_child(tmp_path: Path) -> None:
    host(tmp_path, "[machines.a]\n")
    system = System(ScriptedRunner(), str(tmp_path))
    load_or_last_good(system)
    validate_in_child(system)
    assert validated(system)


def test_without_a_configuration_nothing_is_known(tmp_path: Path) -> None:
    system = System(ScriptedRunner(), str(tmp_path))
    assert not validated(system)
    with pytest.raises(ConfigError):
        load_or_last_good(system)
