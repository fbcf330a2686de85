"""`unbounded-agent gpus forget`: acknowledges that GPUs are gone for good."""

import argparse
from contextlib import suppress

from agent.cli.holders import named
from agent.cli.printing import say
from agent.cli.wiring import reconciler_for
from agent.host.plan.remembered import remembered_files
from agent.host.reconcile import Reconciler
from agent.host.state.locks import pass_lock
from agent.model.errors import ConfigError, ObservationError
from agent.model.facts import Absent, Broken, Unseen
from agent.model.paths import WAKE
from agent.model.remembered import Remembered
from agent.system.damage import write_record


def run_forget(options: argparse.Namespace) -> int:
    """Run `gpus forget` with these options."""
    say(forget(options.address, reconciler_for(options)))
    return 0


def forget(address: str, reconciler: Reconciler) -> tuple[str, ...]:
    """Forget the lost GPU at this address. Without an address, forget all lost GPUs, and acknowledge a damaged record.

    Return lines that say what was forgotten. Raises ConfigError if no lost GPU has the address, and ObservationError
    if the record cannot be read.
    """
    with pass_lock(reconciler.system, reconciler.progress):
        # Take the GPUs from a plan, not from the record: if the service is not running, the record may be out of date.
        remembered = reconciler.preview()[1].goal.remembered
        if isinstance(remembered, Absent | Broken | Unseen):
            hint = "make this record of granted GPUs readable, then run the command again"
            raise ObservationError(remembered.why, hint)
        lost = {gpu.pci_address: gpu for gpu in remembered.gpus if gpu.lost}
        if address:
            gpu = named(address, lost.values())
            if gpu is None:
                hint = f"lost GPUs: {', '.join(lost)}" if lost else "no GPU is lost"
                raise ConfigError(f"{address!a}: no lost GPU has this PCI address or UUID", hint)
            lost = {gpu.pci_address: gpu}
        damage = remembered.damage if address else ""
        gpus = tuple(gpu for gpu in remembered.gpus if gpu.pci_address not in lost)
        for file in remembered_files(Remembered(gpus, damage)):
            write_record(reconciler.system, file.path, file.content)
        if gpus != remembered.gpus or damage != remembered.damage:
            # Wake the service: its metrics and the machines' Node objects show the loss until its next pass. Write the
            # file under the lock, because a pass at the same time would remove the temporary file (HOST_FILES).
            with suppress(OSError):
                reconciler.system.write(WAKE, b"")
    lines = [
        f"{gpu.describe()} is forgotten, and no longer missing in: {', '.join(gpu.machines)}" for gpu in lost.values()
    ]
    if remembered.damage != damage:
        lines.append("the damage to the record is acknowledged: the agent remembers GPUs again from now on")
    return tuple(lines) or ("no GPU is lost: nothing to do",)
