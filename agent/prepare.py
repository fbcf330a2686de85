"""What unbounded-agent-prepare@NAME.service does before each start of a machine, whoever asked for it."""

import time

from agent.errors import CommandError, ConfigError
from agent.facts import Facts
from agent.live import render_live
from agent.manifest import render_handed
from agent.paths import handed_roots_file, live_file, report_directory
from agent.plan import Plan
from agent.reconcile import Outcome, Reconciler
from agent.system.files import System

POLL = 1.0
"""Seconds between two looks for a late driver."""
LOCK_WAIT = 60.0
"""Seconds: the pass that staged a driver root may still be copying."""
REPORT_MOUNT = ("-t", "tmpfs", "-o", "size=1m,nr_inodes=64,mode=0755,nosuid,nodev,noexec", "unbounded-agent-report")
"""Small, so that a machine that fills it harms nobody."""


def prepare(name: str, reconciler: Reconciler) -> Outcome:
    """Give the machine a place to report to, wait for the driver, then make one pass over its settings."""
    settings = reconciler.config.machines.get(name)
    if settings is None:
        raise ConfigError(f"machine {name} is not configured", f"add a table [machines.{name}]")
    if _runs(name, reconciler):
        # `systemctl start` of a machine that runs pulls this in too: what it was started with stays what it was.
        return reconciler.reconcile(LOCK_WAIT)
    reconciler.system.remove(live_file(name))
    # No container of the last boot of the machine runs any more: its driver roots may go.
    reconciler.system.write(handed_roots_file(name), render_handed(()))
    try:
        _mount_report_directory(name, reconciler.system)
    except (CommandError, OSError) as error:
        reconciler.progress(f"the machine will not be able to report: {error}")
    _wait_for_driver(name, settings.driver_wait, reconciler)
    outcome = reconciler.reconcile(LOCK_WAIT)
    for machine in outcome.machines:
        if machine.name == name and machine.starts_with and not outcome.failures:
            reconciler.system.write(live_file(name), render_live(machine.starts_with))
    return outcome


def _runs(name: str, reconciler: Reconciler) -> bool:
    facts = reconciler.look()[0]
    return any(
        machine.name == name and machine.unit_state in ("active", "reloading", "deactivating")
        for machine in facts.machines
    )


def _mount_report_directory(name: str, system: System) -> None:
    """Here, because the daemon's sandbox may not mount. Anew: what a machine left there proves and fills nothing."""
    directory = report_directory(name)
    system.make_directory(directory)
    if system.is_mount(directory):
        system.run("umount", "--lazy", directory)
    system.run("mount", *REPORT_MOUNT, directory)


def _wait_for_driver(name: str, seconds: int, reconciler: Reconciler) -> None:
    deadline = time.monotonic() + seconds
    told = ""
    while time.monotonic() < deadline:
        facts, planned, _ = reconciler.look()
        waiting = ", ".join(_without_driver(name, facts, planned))
        if not waiting:
            return
        if waiting != told:
            reconciler.progress(f"wait for the driver of {waiting}, at most {seconds} s")
            told = waiting
        time.sleep(POLL)
    reconciler.progress(f"go on without {told}")


def _without_driver(name: str, facts: Facts, planned: Plan) -> list[str]:
    """Granted GPUs that no driver is bound to, or that have no node yet."""
    driver = {gpu.pci_address: gpu.driver for vendor in facts.vendors for gpu in vendor.gpus}
    return [
        address
        for machine in planned.goal.machines
        if machine.name == name
        for grant in machine.grants
        for address in grant.gpus
        if not driver[address] or all(node.pci_address != address for node in grant.nodes)
    ]
