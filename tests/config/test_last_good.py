"""A wrong configuration, and the last good one."""

import errno
import json
import os
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from agent.cli.host import load, make_reconciler
from agent.config.load import load_config, load_or_last_good
from agent.config.settings import Config
from agent.model.errors import ConfigChangedError, ConfigError, NoMachinesError
from agent.model.paths import CONFIG_FILE, LAST_GOOD_CONFIG
from agent.system.files import NEW, System
from tests.fakes.config_files import system_with
from tests.fakes.no_process import no_process

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
NODE = """
[machines.a.node]
server = "https://10.0.0.1:6443"
ca_file = "/etc/ca.crt"
bootstrap_token = "/etc/token"
image.name = "oci:/srv/image:1"
"""


class FullDisk(System):
    """A system on which nothing can be written."""

    def __init__(self, tree: Path) -> None:
        super().__init__(no_process, str(tree))

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)


class ReadOnly(FullDisk):
    """A system on which nothing can be written or removed."""

    def remove(self, path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


def host(tmp_path: Path, config: bytes) -> System:
    return system_with(tmp_path, main=config.decode())


def test_a_file_that_two_processes_save_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first boot after an upgrade, prepare@ of each machine and the service save it at the same time."""
    system = host(tmp_path, RIGHT)
    other = threading.Thread(target=load_or_last_good, args=(system,))
    made, renamed = threading.Event(), threading.Event()
    os_open, os_rename, seen = os.open, os.rename, list[bytes]()

    def open_slowly(path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = os_open(path, flags, mode)
        if threading.current_thread() is other and path.endswith(NEW):
            made.set()
            renamed.wait(10)
        return descriptor

    def rename_late(old: str, new: str) -> None:
        if threading.current_thread() is not other:
            other.start()
            made.wait(0.5)
        os_rename(old, new)
        seen.append(system.read(LAST_GOOD_CONFIG))
        renamed.set()

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_slowly)
        patch.setattr(os, "rename", rename_late)
        right = load_or_last_good(system)
        other.join()
    assert seen[0] == system.read(LAST_GOOD_CONFIG)
    assert load_or_last_good(host(tmp_path, RIGHT + b"speed = 9\n")).config == right.config


def test_a_wrong_configuration_is_replaced_by_the_last_good_one(tmp_path: Path) -> None:
    """Also for `doctor`: a typo kept whoever was called at night from every other diagnosis. Others refuse it."""
    right = load_or_last_good(host(tmp_path, RIGHT))
    assert not right.rejected
    assert (tmp_path / LAST_GOOD_CONFIG[1:]).stat().st_mode & 0o777 == 0o600, "it may have secrets"
    system = host(tmp_path, RIGHT + b"speed = 9\n")
    for found in (load_or_last_good(system), load(Namespace(command="doctor", config=CONFIG_FILE), system)):
        assert found.config == right.config
        assert found.config.driver.place_key == "driver.root", "what is set and what is a default differ"
        assert make_reconciler(found, system).rejected == f"{CONFIG_FILE}: machines.a.speed: unknown key"
    system.remove(LAST_GOOD_CONFIG)
    for command, config in (
        *(("doctor", CONFIG_FILE), ("doctor", f"{CONFIG_FILE}/../config.toml")),
        *(("status", CONFIG_FILE), ("plan", CONFIG_FILE)),
    ):
        with pytest.raises(ConfigError, match="speed"):
            load(Namespace(command=command, config=config), system)


@pytest.mark.parametrize("kept", [None, b"", b"\0\0", b"{}", b'{"machines": {"a": {"speed": 9}}}'])
def test_without_a_good_one_the_files_error_is_raised(tmp_path: Path, kept: bytes | None) -> None:
    system = host(tmp_path, b"machines.a.speed = 9\n")
    if kept is not None:
        system.write(LAST_GOOD_CONFIG, kept)
    with pytest.raises(ConfigError, match="speed"):
        load_or_last_good(system)


def test_a_full_disk_does_not_prevent_a_start(tmp_path: Path) -> None:
    host(tmp_path, RIGHT)
    assert not load_or_last_good(FullDisk(tmp_path)).rejected


@pytest.mark.parametrize("full", [True, False])
def test_an_older_configuration_never_restores_what_a_newer_one_removed(tmp_path: Path, full: bool) -> None:
    """If the newer one could not be saved, a machine starts without either."""
    load_or_last_good(host(tmp_path, RIGHT))
    narrower = RIGHT.replace(b'devices = ["kvm"]\n', b"")
    system = host(tmp_path, narrower)
    found = load_or_last_good(FullDisk(tmp_path) if full else system)
    assert not found.config.machines["a"].devices
    system.write(CONFIG_FILE, narrower + b"speed = 9\n")
    if full:
        with pytest.raises(ConfigError, match="speed"):
            load_or_last_good(system)
    else:
        assert load_or_last_good(system).config == found.config


@pytest.mark.parametrize("text", [RIGHT, NODE.encode() + b"[machines.a.node.kubelet]\nconfiguration.x = 2026-01-01\n"])
def test_a_full_disk_keeps_what_is_still_right(tmp_path: Path, text: bytes) -> None:
    """After an upgrade, only the settings are saved again. A date cannot be compared, because JSON lacks dates."""
    system = host(tmp_path, text)
    load_or_last_good(system)
    saved = {**json.loads(system.read(LAST_GOOD_CONFIG)), "validated_by": "0.0.1 1"}
    system.write(LAST_GOOD_CONFIG, json.dumps(saved).encode())
    load_or_last_good(FullDisk(tmp_path))
    assert system.exists(LAST_GOOD_CONFIG) is (text == RIGHT)


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
    found = load_or_last_good(host(tmp_path, b"[machines]\n"))
    assert (found.config, found.rejected) == (Config(machines={}), "")
    assert not load_or_last_good(host(tmp_path, b"speed = 9\n[machines]\n")).config.machines


@pytest.mark.parametrize(
    ("saved", "used"),
    [
        ({}, True),
        ({"validated_by": "0.0.1 1"}, False),
        ({"document": {"machines": {}}}, False),
        ({"settings": {"machines": {"a": {"later": 1}}}}, False),
        ({"settings": None}, False),
        ({"settings": {"\ud800": 1}}, False),
    ],
)
def test_what_was_valid_is_not_validated_again(tmp_path: Path, saved: dict[str, object], used: bool) -> None:
    """Unless another installation of the agent saved the settings, or they are those of another document."""
    system = host(tmp_path, RIGHT)
    load_or_last_good(system)
    last_good = {**json.loads(system.read(LAST_GOOD_CONFIG)), "settings": {"machines": {"saved": {}}}, **saved}
    system.write(LAST_GOOD_CONFIG, json.dumps(last_good).encode())
    assert list(load_config(system).machines) == (["saved"] if used else ["a"])
    system.write(CONFIG_FILE, RIGHT.replace(b"true", b"1"))
    with pytest.raises(ConfigError, match="must be true or false"):
        load_config(system)


@pytest.mark.parametrize("value", ["2026-01-01", "07:32:00", "[2026-01-01T00:00:00Z]", "nan", "[inf]", str(2**70)])
def test_values_that_json_lacks_stay_what_they_are(tmp_path: Path, value: str) -> None:
    """Only the kubelet's configuration can have them. Saved or not, the settings are the same.

    Otherwise the service would read them again before each pass, without end, and no machine would get a GPU.
    """
    system = host(tmp_path, f"{NODE}\n[machines.a.node.kubelet]\nconfiguration.x = {value}\n".encode())
    loaded, again = (load_or_last_good(system) for _ in range(2))
    nodes = [each.config.machines["a"].node for each in (loaded, again)]
    configurations = [repr(node.kubelet.configuration) for node in nodes if node]
    assert len(configurations) == 2
    assert len(set(configurations)) == 1
    for each in (loaded, again):
        in_force = make_reconciler(each, system).in_force
        assert in_force is not None
        in_force.check()


def test_a_last_good_configuration_that_can_be_neither_replaced_nor_removed_is_no_change(tmp_path: Path) -> None:
    """After an error of its disk, the kernel makes a file system read-only."""
    load_or_last_good(host(tmp_path, RIGHT))
    host(tmp_path, NODE.encode())
    system = ReadOnly(tmp_path)
    in_force = make_reconciler(load_or_last_good(system), system).in_force
    assert in_force is not None
    in_force.check()
    load_or_last_good(host(tmp_path, RIGHT.replace(b'devices = ["kvm"]\n', b"")))
    with pytest.raises(ConfigChangedError):
        in_force.check()


@pytest.mark.parametrize(
    "text", ['gpus = ["00000000:01:00.0"]', '[machines.a.node.kubelet]\ncluster_dns = ["FD00::0"]']
)
def test_saved_settings_are_those_that_pydantic_made(tmp_path: Path, text: str) -> None:
    """pydantic's are normalised, complete, and of the same types."""
    system = host(tmp_path, f"{NODE}\n[machines.a]\n{text}".encode() if "gpus" in text else f"{NODE}\n{text}".encode())
    assert load_config(system, save=True) == load_config(system)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run these commands")
@pytest.mark.parametrize(
    ("command", "saves"),
    [
        ({"command": "start"}, True),
        ({"command": "gpus", "subcommand": "attach"}, True),
        ({"command": "kube", "subcommand": "allocation"}, True),
        ({"command": "gpus", "subcommand": "holders"}, False),
        ({"command": "preflight"}, False),
    ],
)
def test_commands_that_make_passes_put_the_configuration_in_force(
    tmp_path: Path, command: dict[str, str], saves: bool
) -> None:
    """Otherwise the service would undo what they do."""
    system = host(tmp_path, RIGHT)
    load(Namespace(**command, config=CONFIG_FILE), system)
    assert system.exists(LAST_GOOD_CONFIG) is saves


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
