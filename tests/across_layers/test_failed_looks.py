"""A call that fails (EIO) never counts as "does not exist", on either half."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.config.load import load_config
from agent.host.observe.machine import observe_machine
from agent.machine.run import run
from agent.model.conditions import ConditionType
from agent.model.errors import ConfigError
from agent.model.facts import Unit, Unseen
from agent.model.paths import (
    CONDITIONS_NAME,
    CONFIG_DIRECTORY,
    CONFIG_FILE,
    MACHINE_HANDOFF_DIRECTORY,
    MACHINE_ROOTS,
    MACHINES_STATE,
)
from agent.system.files import System
from agent.system.journal import Ages
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host
from tests.fakes.machine import LIBRARIES, gpu_machine
from tests.fakes.no_process import no_process

Fail = Callable[[System, str], None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Return a function that makes every later stat of a path fail."""

    def from_now_on(system: System, path: str) -> None:
        place = f"{system.root}{path}"
        for name in ("stat", "lstat"):
            call = getattr(os, name)

            def failing(
                requested: object, *arguments: object, call: Callable[..., object] = call, **named: object
            ) -> object:
                if requested == place:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), place)
                return call(requested, *arguments, **named)

            monkeypatch.setattr(os, name, failing)

    return from_now_on


LOOKS: tuple[Callable[[System], object], ...] = (
    lambda system: system.exists("/usr/bin/tool"),
    lambda system: system.is_directory("/usr/bin/tool"),
    lambda system: system.is_file("/usr/bin/tool"),
    lambda system: system.is_mount("/usr/bin/tool"),
    lambda system: system.find_program("tool"),
)


def test_a_failed_call_raises_and_is_not_false(tmp_path: Path, fail: Fail) -> None:
    system = System(no_process, str(tmp_path))
    assert not any(look(system) for look in LOOKS)
    fail(system, "/usr/bin/tool")
    for look in LOOKS:
        with pytest.raises(OSError, match="Input/output error"):
            look(system)


@pytest.mark.parametrize("path", ["/a\0b", f"/{'x' * 300}", "/file/below", "/loop"])
def test_impossible_paths_do_not_exist(tmp_path: Path, path: str) -> None:
    """A text in a CDI specification may not even be a path."""
    system = System(no_process, str(tmp_path))
    system.write("/file", b"")
    system.link("/loop", "loop")
    assert not system.is_file(path)
    assert not system.is_directory(path)
    assert system.exists(path) == (path == "/loop")


@pytest.mark.parametrize("path", [CONFIG_FILE, CONFIG_DIRECTORY])
def test_no_machine_falls_out_of_the_configuration(tmp_path: Path, fail: Fail, path: str) -> None:
    """Otherwise the settings of a configured machine would be removed."""
    system = System(no_process, str(tmp_path))
    system.write(CONFIG_FILE, b"[machines.first]\n")
    system.write(f"{CONFIG_DIRECTORY}/second.toml", b"[machines.second]\n")
    fail(system, path)
    with pytest.raises(ConfigError, match="Input/output error"):
        load_config(system)


def test_an_unreadable_machine_is_not_reported_missing(gpu_host: Host, fail: Fail) -> None:
    reconciler(gpu_host).reconcile()
    fail(gpu_host, f"{MACHINE_ROOTS}/{MACHINE}")
    assert isinstance(observe_machine(MACHINE, Unit("active"), gpu_host, Ages()).root, Unseen)
    outcome = reconciler(gpu_host).reconcile()
    assert outcome.actions == ()
    assert "NoSuchMachine" not in {each.reason for each in outcome.machines[0].conditions}


def test_a_pass_goes_on_if_states_of_machines_cannot_be_listed(gpu_host: Host, fail: Fail) -> None:
    """The same if it is unknown whether systemd needs a reload: an extra reload is harmless."""
    reconciler(gpu_host).reconcile()
    gpu_host.failing[MACHINES_STATE] = OSError(errno.EIO, os.strerror(errno.EIO))
    fail(gpu_host, "/run/unbounded-agent/reload-owed")
    outcome = reconciler(gpu_host, node_condition=True).reconcile()
    assert outcome.sentences == ("reload systemd's units",)
    assert outcome.failures == (f"{MACHINES_STATE}: cannot remove outdated conditions for Nodes: Input/output error",)


def test_links_are_not_made_elsewhere(tmp_path: Path, fail: Fail) -> None:
    """Once, links were made in /usr/lib64, where no Debian loader searches, and stayed there."""
    machine = gpu_machine(tmp_path / "machine")
    machine.before_write = lambda path: None
    (machine.tree / "usr/lib64").mkdir()
    fail(machine, f"/{LIBRARIES}")
    run(machine)
    assert machine.entries("/usr/lib64") == ()
    assert machine.conditions()[ConditionType.LIBRARIES_LINKED] == ("False", "Failed")
    assert "Input/output error" in machine.message(ConditionType.LIBRARIES_LINKED)


def test_an_unreadable_host_status_costs_no_report(tmp_path: Path, fail: Fail) -> None:
    machine = gpu_machine(tmp_path / "machine")
    fail(machine, f"{MACHINE_HANDOFF_DIRECTORY}/{CONDITIONS_NAME}")
    assert run(machine) == 0
    assert machine.conditions()[ConditionType.NODE_CONDITION_SET] == ("False", "Failed")
