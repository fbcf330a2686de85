"""What units run: `prepare` writes a machine's settings, `load-modules` loads drivers, `run-checks` runs checks."""

import argparse
import sys
import time
from contextlib import suppress

from agent.cli.host import settings_of
from agent.cli.printing import report_failures
from agent.config.load import load_or_last_good
from agent.host.observe.checks import run_checks
from agent.host.plan.nspawn import STOP_ANSWER, stop_limit
from agent.host.reconcile import Outcome, Reconciler
from agent.host.state.gpus import observe_gpus
from agent.host.state.locks import pass_lock
from agent.host.state.records import HANDED, Handed, clear_report, mark_start
from agent.host.vendors import load_gpu_modules
from agent.model.errors import ConfigChangedError
from agent.model.facts import Absent, Unseen, render_live
from agent.model.paths import MACHINE_ROOTS, handed_roots_file, live_file
from agent.system.trust import write_record

RETRY_LIMIT = 20.0
"""Seconds for which to try again if the unit's state cannot be observed."""
PASSES = 3
"""How many passes are made at most until a machine's files match the goal."""
WAIT_LIMIT = 360.0
"""Seconds after the command's start. From then on, the command no longer waits until another process's pass ends. The
time limit of the command's unit is a minute longer, so that the command can still make its own last pass."""
STOPPED = ("inactive", "failed", "activating")
"""The values that ActiveState of the machine's unit can have before the machine runs."""


def load_modules(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Load the kernel modules of the host's GPUs if `driver.load_modules` is set. Raises AgentError or OSError."""
    system, report = reconciler.system, reconciler.progress
    if not reconciler.config.driver.load_modules:
        report("driver.load_modules is not set: loading kernel modules is left to the host")
        return 0
    load_gpu_modules(system, reconciler.devices.pci_devices, observe_gpus(system).detached, report)
    return 0


def write_checks(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Run the administrator's checks, and write the results to standard output, a file. Raises OSError."""
    run_checks(reconciler.system, sys.stdout.fileno())
    return 0


def run_prepare(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Prepare the machine that the options name. Return the exit code."""
    return report_failures(prepare(options.machine, reconciler).failures_of((options.machine,)))


def prepare(name: str, reconciler: Reconciler) -> Outcome:
    """Wait for the driver, then make up to PASSES passes until the machine's settings are written.

    If the machine is already running, or its state cannot be observed, make only one pass. Return the last outcome.
    Raises ConfigError for a machine that is not configured.
    """
    settings = settings_of(name, reconciler.config)
    system, started = reconciler.system, time.monotonic()
    reconciler.wait_until = started + WAIT_LIMIT
    if _runs(name, reconciler):
        # `systemctl start` of a running machine runs this command too: keep the record of the machine's live settings.
        return _pass(reconciler)
    try:
        # systemd makes it so at boot, but a file system may be mounted there later.
        system.make_private(MACHINE_ROOTS)
    except OSError as error:
        advice = f"once that is corrected, run `chmod 700 {MACHINE_ROOTS}`"
        reconciler.progress(f"{MACHINE_ROOTS} may be open to users of the host: {error.strerror}; {advice}")
    # Mark the start now: if `stop` cancels the start from here on, the service must not start the machine again.
    mark_start(name, system)
    # Remove the record of live settings before taking the lock: if another process's pass holds the lock for too long,
    # this command fails. The machine still starts after that failure, and the old record would be wrong. A directory in
    # its place stays until a record is written.
    with suppress(IsADirectoryError):
        system.remove(live_file(name))
    # Remove the old report. The machine's unit also mounts an empty directory over the report, but that may fail.
    clear_report(system, name)
    with pass_lock(system, reconciler.progress, reconciler.wait_until):
        # Remove the record again: the pass that held the lock may have found the machine running, and written a record.
        with suppress(IsADirectoryError):
            system.remove(live_file(name))
        # Clear the record of the driver roots that the machine's previous run used. Its containers have ended, so these
        # roots may be removed now. If the record cannot be written, because the disk is full, the roots are kept.
        with suppress(OSError):
            system.write(handed_roots_file(name), HANDED.render(Handed(())))

    def without_driver() -> tuple[str, str]:
        """Return the machine's granted GPUs that no driver is bound to, or that have no device node yet."""
        facts, planned, _ = reconciler.preview()
        driver = {gpu.pci_address: gpu.driver for vendor in facts.vendors for gpu in vendor.gpus}
        missing = ", ".join(
            address
            for machine in planned.goal.machines
            if machine.name == name
            for grant in machine.grants
            for address in grant.gpus
            if not driver[address] or all(node.pci_address != address for node in grant.nodes)
        )
        return missing, missing and f"waiting for the driver of GPU {missing}, up to {settings.driver_wait} s"

    # driver_wait counts from this command's start, so it includes the time in which `_runs` waited for the end of the
    # machine's previous run. The unit's time limit is too short for two full waits, one after the other.
    left = started + settings.driver_wait - time.monotonic()
    if left > 0 and (missing := reconciler.wait(without_driver, left)):
        reconciler.progress(f"continuing without GPU {missing}")

    # One pass may not be enough, because device nodes may appear during a pass. If a device node were in the record but
    # not in the files, later passes would assume that the machine has it, and not bind it. So if the files never match,
    # nothing is recorded.
    passes = 0
    while True:
        outcome, passes = _pass(reconciler), passes + 1
        live = next((machine.start_settings for machine in outcome.machines if machine.name == name), None)
        if live:
            with pass_lock(system, reconciler.progress, reconciler.wait_until):
                write_record(system, live_file(name), render_live(live))
        if live or passes == PASSES:
            return outcome


def _pass(reconciler: Reconciler) -> Outcome:
    """Make a pass. If the configuration has changed since it was read, read it again."""
    try:
        return reconciler.reconcile()
    except ConfigChangedError:
        loaded = load_or_last_good(reconciler.system)
        reconciler.config, reconciler.rejected = loaded.config, loaded.rejected
        if reconciler.in_force:
            reconciler.in_force.config = loaded.config
        return reconciler.reconcile()


def _runs(name: str, reconciler: Reconciler) -> bool:
    """Return whether the machine runs.

    If a start is requested while the machine is still stopping, systemd runs this command before the machine has
    stopped. So wait until it has stopped. If it does not stop in time, or if its state stays unknown, return True: the
    records of a machine that may be running must be kept.
    """
    started = time.monotonic()
    # Once for ExecStop=, if the machine half answered it, and once for systemd's own stop.
    stopping = min(2 * stop_limit(settings_of(name, reconciler.config)) + STOP_ANSWER, WAIT_LIMIT)
    while True:
        machines = reconciler.preview()[0].machines
        state = next((machine.unit_state for machine in machines if machine.name == name), Absent("no such machine"))
        stops = state == "deactivating"
        if not stops and not isinstance(state, Unseen):
            return isinstance(state, str) and state not in STOPPED
        if time.monotonic() - started > (stopping if stops else RETRY_LIMIT):
            return True
        time.sleep(1.0)
