"""What unbounded-agent-prepare@NAME.service does before each start of a machine, whoever asked for it."""

import time

from agent.errors import CommandError, ConfigError
from agent.facts import Absent, Facts, Unseen
from agent.live import LiveSettings, render_live
from agent.locks import locked
from agent.manifest import render_handed
from agent.paths import PASS_LOCK, handed_roots_file, live_file, report_directory
from agent.plan import Plan
from agent.reconcile import BUSY, Outcome, Reconciler
from agent.system.files import System

POLL = 1.0
"""Seconds between two looks for a late driver."""
LOCK_WAIT = 60.0
"""Seconds: the pass that staged a driver root may still be copying."""
LOOKING = 20.0
"""Seconds for looks at a unit whose state cannot be seen."""
PASSES = 3
STOPPED = ("inactive", "failed", "activating")
"""ActiveState of the machine's unit while this runs before its start."""
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
    system = reconciler.system
    with locked(system, PASS_LOCK, LOCK_WAIT, BUSY):
        system.remove(live_file(name))
        # No container of the last boot of the machine runs any more: its driver roots may go.
        system.write(handed_roots_file(name), render_handed(()))
    try:
        _mount_report_directory(name, system)
    except (CommandError, OSError) as error:
        reconciler.progress(f"the machine will not be able to report: {error}")
    _wait_for_driver(name, settings.driver_wait, reconciler)
    return _settle(name, reconciler)


def _settle(name: str, reconciler: Reconciler) -> Outcome:
    """Passes until the machine's files are the goal, then note that it starts with them.

    Nodes may come while a pass goes on: what is noted and not in the files would never be given to the machine.
    """
    outcome = reconciler.reconcile(LOCK_WAIT)
    for _ in range(PASSES - 1):
        if _starts_with(name, outcome):
            break
        outcome = reconciler.reconcile(LOCK_WAIT)
    live = _starts_with(name, outcome)
    if live:
        with locked(reconciler.system, PASS_LOCK, LOCK_WAIT, BUSY):
            reconciler.system.write(live_file(name), render_live(live))
    return outcome


def _starts_with(name: str, outcome: Outcome) -> LiveSettings | None:
    return next((machine.starts_with for machine in outcome.machines if machine.name == name), None)


def _runs(name: str, reconciler: Reconciler) -> bool:
    """Also when that cannot be seen for long: what belongs to a machine that runs must not be made anew."""
    deadline = time.monotonic() + LOOKING
    while time.monotonic() < deadline:
        machines = reconciler.look()[0].machines
        state = next((machine.unit_state for machine in machines if machine.name == name), Absent("not observed"))
        if not isinstance(state, Unseen):
            return isinstance(state, str) and state not in STOPPED
        time.sleep(POLL)
    return True


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
