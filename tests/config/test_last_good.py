"""A wrong configuration, and the last good one."""

import errno
import os
from argparse import Namespace
from pathlib import Path

import pytest

from agent.cli.host import load
from agent.config.last_good import Loaded, load_or_last_good
from agent.config.settings import Config
from agent.model.errors import ConfigError, NoMachinesError
from agent.model.paths import CONFIG_FILE, LAST_GOOD_CONFIG
from agent.system.files import System
from tests.fakes.host import ScriptedRunner

RIGHT = b"""
metrics.address = "127.0.0.1:9000"
[driver]
root = "/"
[machines.a]
gpus = ["0000:3b:00.0"]
devices = ["kvm"]
extra_mounts = [{ source = "/srv/models", target = "/models", read_only = true }]
pod_environment.nvidia.SECRET = "s3"
nspawn.extra.Files.Bind = ["/srv/data"]
"""


class FullDisk(System):
    """A system on which nothing can be written."""

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)


def host(tmp_path: Path, config: bytes) -> System:
    system = System(ScriptedRunner(), str(tmp_path))
    system.write(CONFIG_FILE, config)
    return system


def test_a_wrong_configuration_is_replaced_by_the_last_good_one(tmp_path: Path) -> None:
    right = load_or_last_good(host(tmp_path, RIGHT))
    assert not right.rejected
    found = load_or_last_good(host(tmp_path, RIGHT + b"speed = 9\n"))
    assert found.config == right.config
    assert found.config.driver.place_key == "driver.root", "what is set and what is a default differ"
    assert "machines.a.speed: unknown key" in found.rejected


def test_only_root_can_read_the_last_good_configuration(tmp_path: Path) -> None:
    load_or_last_good(host(tmp_path, RIGHT))
    assert (tmp_path / LAST_GOOD_CONFIG[1:]).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kept", [None, b"", b"\0\0", b"{}", b'{"machines": {"a": {"speed": 9}}}'])
def test_without_a_good_one_the_files_error_is_raised(tmp_path: Path, kept: bytes | None) -> None:
    system = host(tmp_path, b"machines.a.speed = 9\n")
    if kept is not None:
        system.write(LAST_GOOD_CONFIG, kept)
    with pytest.raises(ConfigError, match="speed"):
        load_or_last_good(system)


def test_a_full_disk_does_not_prevent_a_start(tmp_path: Path) -> None:
    host(tmp_path, RIGHT)
    assert not load_or_last_good(FullDisk(ScriptedRunner(), str(tmp_path))).rejected


@pytest.mark.parametrize("full", [True, False])
def test_an_older_configuration_never_restores_what_a_newer_one_removed(tmp_path: Path, full: bool) -> None:
    """If the newer one could not be saved, a machine starts without either."""
    load_or_last_good(host(tmp_path, RIGHT))
    narrower = RIGHT.replace(b'devices = ["kvm"]\n', b"")
    system = host(tmp_path, narrower)
    found = load_or_last_good(FullDisk(ScriptedRunner(), str(tmp_path)) if full else system)
    assert not found.config.machines["a"].devices
    system.write(CONFIG_FILE, narrower + b"speed = 9\n")
    if full:
        with pytest.raises(ConfigError, match="speed"):
            load_or_last_good(system)
    else:
        assert load_or_last_good(system).config == found.config


@pytest.mark.parametrize("left", [None, b'metrics.address = "127.0.0.1:9000"\n', b""])
def test_a_deleted_configuration_brings_no_machine_back(tmp_path: Path, left: bytes | None) -> None:
    """Machines are removed by deleting the configuration. A mistake in a file is different, even if it hides them."""
    system = host(tmp_path, RIGHT)
    load_or_last_good(system)
    if left is None:
        system.remove(CONFIG_FILE)
    else:
        system.write(CONFIG_FILE, left)
    with pytest.raises(NoMachinesError, match=r"an empty table \[machines\] for none"):
        load_or_last_good(system)
    system.write(CONFIG_FILE, b"[machine.a]\n")
    assert list(load_or_last_good(system).config.machines) == ["a"]


def test_an_empty_table_is_a_good_configuration_without_machines(tmp_path: Path) -> None:
    load_or_last_good(host(tmp_path, RIGHT))
    assert load_or_last_good(host(tmp_path, b"[machines]\n")) == Loaded(Config(machines={}))
    assert not load_or_last_good(host(tmp_path, b"speed = 9\n[machines]\n")).config.machines


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run `apply`")
@pytest.mark.parametrize("standard", [True, False])
def test_apply_saves_only_the_standard_configuration(tmp_path: Path, standard: bool) -> None:
    system = host(tmp_path, RIGHT)
    system.write("/srv/other.toml", RIGHT)
    options = Namespace(command="apply", config=CONFIG_FILE if standard else "/srv/other.toml")
    assert not load(options, system).rejected
    assert system.exists(LAST_GOOD_CONFIG) is standard
    system.write(CONFIG_FILE, RIGHT + b"speed = 9\n")
    if standard:
        with pytest.raises(ConfigError, match="speed"):
            load(options, system)
