"""What the host sees of one machine, without following any path that the machine can change."""

import re
import time

from agent.facts import Absent, Broken, MachineFacts, Seen, Unseen
from agent.handoff import SIZE_LIMIT
from agent.observe.units import Unit
from agent.paths import MACHINE_ROOTS, REPORT_NAME, report_directory, started_with_file
from agent.system.files import System
from agent.system.looking import look

DIGEST = re.compile(r"[0-9a-f]{1,128}")


def observe_machine(name: str, unit: Unit, system: System) -> MachineFacts:
    """Its root directory, unit and last report; the report's bytes are not looked into here."""
    report = look(lambda path: system.read_untrusted(path, SIZE_LIMIT), f"{report_directory(name)}/{REPORT_NAME}")
    content, age = (report[0], max(0.0, time.time() - report[1])) if isinstance(report, tuple) else (report, 0.0)
    if isinstance(content, Absent):
        content = Absent(f"machine {name} has not reported")
    return MachineFacts(
        name=name,
        root=_root(name, system),
        unit_state=unit.state,
        has_run=unit.has_run,
        unit_needs_reload=unit.needs_reload,
        started_with=_started_with(name, system),
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


def _started_with(name: str, system: System) -> str:
    text = look(system.read_text, started_with_file(name))
    return text.strip() if isinstance(text, str) and DIGEST.fullmatch(text.strip()) else ""
