"""Processes that read the configuration before it changed."""

import errno
import os
from pathlib import Path

import pytest

from agent.cli.prepare import prepare
from agent.config.load import InForce, save_last_good
from agent.config.settings import Config
from agent.host.reconcile import Reconciler
from agent.model.errors import ConfigChangedError
from agent.model.paths import (
    CONFIG_FILE,
    LAST_GOOD_CONFIG,
    MANIFESTS,
    machine_root,
    machine_unit,
    nspawn_file,
    unit_drop_in,
)
from tests.fakes.command import command
from tests.fakes.gpu_host import MACHINE, units
from tests.fakes.host import Host
from tests.fakes.node_host import node_host, node_reconciler

SECOND = "second"
OLD = {MACHINE: {"gpus": ["0000:01:00.0"]}}
NEW = {**OLD, SECOND: {"gpus": ["0000:02:00.0"]}}
NEW_FILE = b'[machines.gpu-node]\ngpus = ["0000:01:00.0"]\n[machines.second]\ngpus = ["0000:02:00.0"]\n'


def process(host: Host, machines: dict[str, dict[str, list[str]]]) -> Reconciler:
    """Return the reconciler of a process that reads this configuration, and puts it in force."""
    document = {"machines": machines}
    config = Config.validated(document)
    save_last_good(document, config, host)
    return Reconciler(config, host, host, in_force=InForce(config, host))


@pytest.fixture
def two_machines(gpu_host: Host) -> Host:
    """A host with a second machine, which has just stopped."""
    gpu_host.make_directory(machine_root(SECOND))
    gpu_host.bus.unit(machine_unit(SECOND), "inactive", stopped_at=1)
    return gpu_host


def has_settings(host: Host, name: str) -> bool:
    return host.exists(nspawn_file(name)) and host.exists(unit_drop_in(name))


def test_a_process_with_the_old_configuration_removes_nothing(two_machines: Host) -> None:
    """Not even if it could not read the new one at first: otherwise, it would go on with the old one for good."""
    old = process(two_machines, OLD)
    old.reconcile()
    process(two_machines, OLD)
    old.reconcile()
    process(two_machines, NEW)
    two_machines.failing[LAST_GOOD_CONFIG] = OSError(errno.EMFILE, os.strerror(errno.EMFILE), LAST_GOOD_CONFIG)
    old.reconcile()
    del two_machines.failing[LAST_GOOD_CONFIG]
    process(two_machines, NEW).reconcile()
    with pytest.raises(ConfigChangedError, match="run the command again"):
        old.reconcile()
    assert has_settings(two_machines, SECOND)


def test_a_start_goes_on_with_the_new_configuration(two_machines: Host) -> None:
    """It may have waited for the driver for minutes."""
    units(two_machines, "activating")
    starting = process(two_machines, OLD)
    starting.reconcile()
    process(two_machines, NEW).reconcile()
    two_machines.write(CONFIG_FILE, NEW_FILE)
    outcome = prepare(MACHINE, starting)
    assert {each.name: each.start_settings is not None for each in outcome.machines} == {MACHINE: True, SECOND: True}
    assert has_settings(two_machines, SECOND)


def test_reset_leaves_a_machine_that_was_added_meanwhile(tmp_path: Path) -> None:
    node = node_host(tmp_path / "host")
    resetting = node_reconciler(node)
    assert command(resetting, f"up {MACHINE}", network=node.network, ask=node.ask) == 0
    resetting.in_force = InForce(resetting.config, node)
    node.make_directory(machine_root(SECOND))
    node.bus.unit(machine_unit(SECOND), "inactive", stopped_at=1)
    process(node, NEW).reconcile()
    with pytest.raises(ConfigChangedError):
        command(resetting, f"reset {MACHINE}", network=node.network)
    assert has_settings(node, SECOND)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_reset_of_the_last_node_leaves_the_drivers_to_a_machine_that_keeps_its_settings(
    tmp_path: Path, enabled: bool
) -> None:
    """Its next start would find no driver, or the host no directory to bind into it. `up` enables its nodes."""
    node = node_host(tmp_path / "host")
    made = node_reconciler(node)
    assert command(made, f"up {MACHINE}", network=node.network, ask=node.ask) == 0
    node.make_directory(machine_root(SECOND))
    node.bus.unit(machine_unit(SECOND), "inactive", stopped_at=1)
    process(node, {SECOND: {"gpus": ["0000:02:00.0"]}}).reconcile()
    if enabled:
        link = f"/etc/systemd/system/machines.target.wants/{machine_unit(SECOND)}"
        node.link(link, "/usr/lib/systemd/system/systemd-nspawn@.service")
    node.bus.unit(machine_unit(MACHINE), "inactive", stopped_at=1)
    removed = process(node, {})
    removed.reconcile()
    assert has_settings(node, MACHINE), "without them, the template's -U would apply when the host boots"
    assert command(removed, f"reset {MACHINE}", network=node.network) == 0
    assert not node.exists(nspawn_file(MACHINE))
    assert (has_settings(node, SECOND), node.exists(f"{MANIFESTS}/0.json")) == (enabled, enabled)


def test_a_removed_machine_keeps_its_settings_while_it_would_start_with_them(two_machines: Host) -> None:
    """Whoever made the machine: without the settings, the template's -U would apply."""
    process(two_machines, NEW).reconcile()
    unit, removed = machine_unit(SECOND), process(two_machines, OLD)
    # prepare@ may wait for the driver for minutes. ActiveState is `inactive` until the machine's unit starts.
    two_machines.bus.jobs[unit] = "start"
    removed.reconcile()
    assert has_settings(two_machines, SECOND)
    two_machines.bus.jobs.clear()
    link = f"/etc/systemd/system/machines.target.wants/{unit}"
    two_machines.link(link, "/usr/lib/systemd/system/systemd-nspawn@.service")
    two_machines.bus.unit(unit, "inactive", load="masked", stopped_at=1)
    _, planned, _ = removed.preview()
    # systemd ignores a masked unit that it should disable, and succeeds, so the settings would always stay.
    assert f"`systemctl unmask {unit} && machinectl disable {SECOND}` ends that" in planned.held[SECOND]
    two_machines.bus.unit(unit, "inactive", stopped_at=1)
    removed.reconcile()
    assert has_settings(two_machines, SECOND)
    two_machines.remove(link)
    removed.reconcile()
    assert not two_machines.exists(nspawn_file(SECOND)), "its start was cancelled, and it is disabled"
