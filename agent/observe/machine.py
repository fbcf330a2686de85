"""What the host sees of one machine, without following any path that the machine can change."""

import math
import time

from agent.errors import DocumentError
from agent.facts import Absent, Broken, MachineFacts, Seen, Unseen
from agent.granted import Granted, parse_granted
from agent.handoff import SIZE_LIMIT
from agent.live import LiveSettings, parse_live
from agent.manifest import parse_handed
from agent.observe.units import Unit
from agent.paths import MACHINE_ROOTS, REPORT_NAME, granted_file, handed_roots_file, live_file, report_directory
from agent.system.files import System
from agent.system.looking import look


def observe_machine(name: str, unit: Unit, system: System) -> MachineFacts:
    """Its root directory, unit and last report; the report's bytes are not looked into here."""
    report = look(lambda path: system.read_untrusted(path, SIZE_LIMIT), f"{report_directory(name)}/{REPORT_NAME}")
    # A report from the future says that the clock was set back: of unknown age, so it counts as old if far ahead.
    content, age = (report[0], abs(time.time() - report[1])) if isinstance(report, tuple) else (report, 0.0)
    if isinstance(content, Absent):
        content = Absent(f"machine {name} has not reported")
    granted, granted_age = _granted(name, system)
    live, live_age = _live(name, system)
    return MachineFacts(
        name=name,
        root=_root(name, system),
        unit_state=unit.state,
        has_run=unit.has_run,
        unit_needs_reload=unit.needs_reload,
        device_allow=unit.device_allow,
        granted=granted,
        granted_age=granted_age,
        live=live,
        live_age=live_age,
        handed_roots=_handed_roots(name, system),
        report=content,
        report_age=age,
    )


def _root(name: str, system: System) -> Seen[str]:
    """A symbolic link there does not count: nspawn and we might see different things behind it."""
    path = f"{MACHINE_ROOTS}/{name}"
    link = look(system.read_link, path)
    if isinstance(link, Absent | Broken | Unseen):
        return link
    if link is not None:
        return Broken(f"{path} is a symbolic link to {link}; put the machine's root directory itself there")
    if not system.is_directory(path):
        return Absent(f"{path} is not there; unpack the machine's image into that directory")
    return path


def _granted(name: str, system: System) -> tuple[Seen[Granted], float]:
    """And its age in seconds."""
    path = granted_file(name)
    # Its change time: no machine can set it, and no clock setting of the past matters for long.
    found = look(lambda path: system.read_untrusted(path, SIZE_LIMIT), path)
    if not isinstance(found, tuple):
        return found, 0.0
    try:
        return parse_granted(found[0]), max(0.0, time.time() - found[1])
    except DocumentError as error:
        return Broken(str(error)), 0.0


def _live(name: str, system: System) -> tuple[LiveSettings | None, float]:
    """And its age in seconds."""
    found = look(system.read_untrusted, live_file(name))
    if not isinstance(found, tuple):
        return None, math.inf
    try:
        return parse_live(found[0]), max(0.0, time.time() - found[1])
    except DocumentError:
        # A cache: what is not understood tells as little as what is not there.
        return None, math.inf


def _handed_roots(name: str, system: System) -> Seen[tuple[int, ...]]:
    path = handed_roots_file(name)
    data = look(system.read, path)
    if not isinstance(data, bytes):
        return data
    try:
        return parse_handed(path, data)
    except DocumentError as error:
        return Broken(str(error))
