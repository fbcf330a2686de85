"""Machines that run on a fake host."""

from agent.model.paths import (
    nspawn_file,
    started_drop_in,
    started_nspawn,
    unit_drop_in,
)
from tests.fakes.gpu_host import MACHINE, reconciler, units
from tests.fakes.host import Host


def running(host: Host) -> None:
    """Set up a host whose machine started with these settings, and make a pass after that."""
    agent = reconciler(host)
    outcome = agent.run_pass()
    assert outcome.failures == ()
    started(host)
    units(host, "active", device_allow=[("char-pts", "rw"), *allowed(host)])
    assert agent.reconcile().failures == ()
    host.bus.changes.clear()


def started(host: Host) -> None:
    """Copy the settings as the unit's drop-in does at a start."""
    host.write(started_nspawn(MACHINE), host.read(nspawn_file(MACHINE)))
    host.write(started_drop_in(MACHINE), host.read(unit_drop_in(MACHINE)))


def allowed(host: Host) -> list[tuple[str, str]]:
    """Return the machine's permissions by number, as PID 1 lists them."""
    lines = host.read_text(unit_drop_in(MACHINE)).splitlines()
    entries = [line.removeprefix("DeviceAllow=") for line in lines if line.startswith("DeviceAllow=/dev/char/")]
    return [(entry.split()[0], entry.split()[1]) for entry in entries]
