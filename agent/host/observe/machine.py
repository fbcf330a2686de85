"""Observes one machine from the host, without following any path that the machine can change."""

import math

from agent.host.observe.units import Unit, is_enabled
from agent.host.state.driver_roots import parse_handed
from agent.host.state.granted import GRANTED
from agent.model.device import FileIdentity
from agent.model.errors import DocumentError
from agent.model.facts import Absent, Broken, MachineFacts, Seen, Unseen
from agent.model.granted import Granted
from agent.model.handoff import SIZE_LIMIT, Publication
from agent.model.live import LiveSettings, parse_live
from agent.model.paths import (
    GRANTED_NAME,
    MACHINE_ROOTS,
    NSPAWN_RUNTIME,
    REPORT_NAME,
    granted_file,
    handed_roots_file,
    handoff_file,
    live_file,
    machine_unit,
    node_record,
    nspawn_file,
    report_directory,
    started_drop_in,
    started_nspawn,
)
from agent.system.ages import Ages
from agent.system.damage import discard
from agent.system.files import System
from agent.system.seen import read_seen


def observe_machine(name: str, unit: Unit, system: System, ages: Ages, *, is_node: bool = False) -> MachineFacts:
    """Return the machine's facts. The report is not parsed here. `is_node` is whether `up` makes the machine."""
    report_file = f"{report_directory(name)}/{REPORT_NAME}"
    report = read_seen(lambda path: system.read_untrusted(path, SIZE_LIMIT), report_file)
    content, age = (report[0], ages.of(report_file, report[1])) if isinstance(report, tuple) else (report, 0.0)
    if isinstance(content, Absent):
        content = Absent(f"machine {name} has not reported")
    granted, granted_age = _granted(name, system, ages)
    live, live_age = _live(name, system, ages)
    return MachineFacts(
        name=name,
        root=_root(name, system, is_node=is_node),
        unit_state=unit.state,
        kept_from_boot_by=_kept_from_boot_by(name, unit, system),
        masked=unit.masked,
        starts=unit.starts,
        restarts=unit.restarts,
        has_run=unit.has_run,
        unit_needs_reload=unit.needs_reload,
        device_allow=unit.device_allow,
        granted=granted,
        granted_age=granted_age,
        live=None if isinstance(live, Unseen) else live,
        live_unseen=live.why if isinstance(live, Unseen) else "",
        live_age=live_age,
        started=_started(name, system) if unit.state == "active" and _start_unknown(live) else None,
        handed_roots=_handed_roots(name, system),
        publication=_publication(name, system),
        report=content,
        report_age=age,
    )


def unseen_machine(name: str, unit: Unit, unseen: Unseen) -> MachineFacts:
    """Return the facts of a machine if only its unit could be observed."""
    return MachineFacts(
        name=name,
        root=unseen,
        unit_state=unit.state,
        kept_from_boot_by=_reset(name),
        masked=unit.masked,
        starts=unit.starts,
        restarts=unit.restarts,
        has_run=unit.has_run,
        unit_needs_reload=unit.needs_reload,
        device_allow=unit.device_allow,
        granted=unseen,
        handed_roots=unseen,
        report=unseen,
    )


def _kept_from_boot_by(name: str, unit: Unit, system: System) -> str:
    """Return the command of `MachineFacts.kept_from_boot_by`; empty if the machine does not start at boot.

    If it is unknown whether the machine starts at boot, assume that it does.
    """
    # `up` enables each machine that it makes.
    if read_seen(system.exists, node_record(name)) is not False:
        return _reset(name)
    if read_seen(lambda path: is_enabled(path, system), machine_unit(name)) is False:
        return ""
    # systemd does not disable a masked unit, although the command succeeds.
    unmask = f"systemctl unmask {machine_unit(name)} && " if unit.masked else ""
    return f"{unmask}machinectl disable {name}"


def _reset(name: str) -> str:
    return f"unbounded-agent reset {name}"


def _root(name: str, system: System, *, is_node: bool) -> Seen[str]:
    """Return the machine's root directory; Broken if a symbolic link or a file is in its place.

    A link is refused, because nspawn might resolve it differently from the agent.
    """
    path = f"{MACHINE_ROOTS}/{name}"
    link = read_seen(system.read_link, path)
    if isinstance(link, Absent | Broken | Unseen):
        return link
    if link is not None:
        return Broken(f"{path} is a symbolic link to {link}; replace the link with the machine's root directory")
    match read_seen(system.is_directory, path):
        case True:
            return path
        case False if read_seen(system.exists, node_record(name)) is True:
            return Absent(f"{path} was deleted since `up` made it; run `unbounded-agent up {name}`")
        case False if read_seen(system.exists, path) is True:
            return Broken(f"{path} is not a directory; move it away and unpack the machine's image into that directory")
        case False if is_node:
            return Absent(f"{path} does not exist; run `unbounded-agent up {name}`, which makes it")
        case False:
            advice = "correct the name, or unpack the machine's image into that directory"
            return Absent(f"{path} does not exist; {advice} (machines in {MACHINE_ROOTS}: {_existing(system)})")
        case unseen:
            return unseen


def _existing(system: System) -> str:
    """Return the names of the machines that exist, as text."""
    names = read_seen(system.entries, MACHINE_ROOTS)
    if isinstance(names, Unseen):
        return f"unknown, {names.why}"
    if not isinstance(names, tuple):
        return "none"
    machines = [
        name
        for name in names
        if not name.startswith(".") and read_seen(system.is_directory, f"{MACHINE_ROOTS}/{name}") is True
    ]
    return ", ".join(machines) or "none"


def ignored_settings(name: str, system: System) -> tuple[str, ...]:
    """Return a problem for each settings file that systemd-nspawn ignores because the machine's file in /etc exists.

    systemd-nspawn looks in /etc, then in /run, then next to the root, and reads only the first file that exists
    (systemd.nspawn(5)).
    """
    in_force = nspawn_file(name)
    if read_seen(system.exists, in_force) is not True:
        return ()
    others = (f"{directory}/{name}.nspawn" for directory in (NSPAWN_RUNTIME, MACHINE_ROOTS))
    return tuple(
        f"{other} has no effect, because systemd-nspawn reads {in_force} instead; move its settings to "
        f"machines.{name}.nspawn in the configuration and remove the file"
        for other in others
        if read_seen(system.exists, other) is True
    )


def _granted(name: str, system: System, ages: Ages) -> tuple[Seen[Granted], float]:
    """Return the machine's last grant, and how many seconds ago it was published."""
    path = granted_file(name)
    found = read_seen(lambda path: system.read_untrusted(path, SIZE_LIMIT), path)
    if not isinstance(found, tuple):
        return found, 0.0
    try:
        return GRANTED.parse(GRANTED_NAME, found[0]), ages.of(path, found[1])
    except DocumentError as error:
        discard(path, str(error), system)
        return Broken(str(error)), 0.0


def _publication(name: str, system: System) -> Publication | None:
    """Return the last publication of the handoff; None if there is none, or if its file cannot be observed.

    A link is not followed, because root in the machine can put one there.
    """
    found = read_seen(lambda path: system.identity(path, follow=False), handoff_file(name))
    return Publication(found.inode, found.mtime_ns) if isinstance(found, FileIdentity) else None


def _live(name: str, system: System, ages: Ages) -> tuple[LiveSettings | Unseen | None, float]:
    """Return the machine's live settings, and their age in seconds.

    The settings are None if there are none, and Unseen if they cannot be read now. In both cases, the age is infinite.
    """
    found = read_seen(system.read_untrusted, live_file(name))
    if isinstance(found, Unseen):
        return found, math.inf
    if isinstance(found, Broken):
        discard(live_file(name), found.why, system)
    if not isinstance(found, tuple):
        return None, math.inf
    try:
        return parse_live(found[0]), ages.of(live_file(name), found[1])
    except DocumentError as error:
        # The record is a cache: a damaged one counts as missing.
        discard(live_file(name), str(error), system)
        return None, math.inf


def _start_unknown(live: LiveSettings | Unseen | None) -> bool:
    """Return whether the live settings are missing, or do not say with which settings the machine started.

    If the live settings could not be read, the result is False, because they may be complete.
    """
    return live is None or (isinstance(live, LiveSettings) and not live.fixed)


def _started(name: str, system: System) -> tuple[bytes, bytes] | None:
    """Return the copies of the .nspawn file and the drop-in from the machine's start; None unless both can be read."""
    nspawn, drop_in = read_seen(system.read, started_nspawn(name)), read_seen(system.read, started_drop_in(name))
    return (nspawn, drop_in) if isinstance(nspawn, bytes) and isinstance(drop_in, bytes) else None


def _handed_roots(name: str, system: System) -> Seen[tuple[int, ...]]:
    """Return the indices of the driver roots that handoffs have named since the machine's start."""
    path = handed_roots_file(name)
    data = read_seen(system.read, path)
    if not isinstance(data, bytes):
        return data
    try:
        return parse_handed(path, data)
    except DocumentError as error:
        discard(path, str(error), system)
        return Broken(str(error))
