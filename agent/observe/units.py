"""systemd: its version, the states of units, and the installed template of nspawn's unit."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agent.errors import BusAnswerError, BusError, ObservationError
from agent.facts import Absent, Broken, Seen, Unseen
from agent.system.files import System
from agent.system.services import GET, SYSTEMD, SYSTEMD_MANAGER, SYSTEMD_OBJECT

T = TypeVar("T", str, bool, int, list[object])

TEMPLATE = "systemd-nspawn@.service"
UNIT_DIRECTORIES = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
"""systemd.unit(5), in the order of precedence; transient and generated units are no templates."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit as systemd has it now."""

    state: Seen[str]
    """ActiveState."""
    needs_reload: bool = False
    """NeedDaemonReload."""
    has_run: bool = False
    """It was active in this boot and is not any more (InactiveEnterTimestampMonotonic)."""
    device_allow: tuple[str, ...] = ()
    """DeviceAllow= as systemd has it, from all files and set-property."""


def observe_units(names: Sequence[str], system: System) -> Mapping[str, Unit]:
    """Every unit by name, asked of PID 1 over D-Bus: no process is started for it."""
    units: dict[str, Unit] = {}
    for name in names:
        try:
            units[name] = _unit(name, system)
        except BusAnswerError as error:
            units[name] = Unit(Unseen(str(error)))
        except BusError as error:
            # Not asked for the others too: each question may take its whole time limit.
            return units | {each: Unit(Unseen(str(error))) for each in names if each not in units}
    return units


def _unit(name: str, system: System) -> Unit:
    # LoadUnit, as GetUnit fails for one that is not loaded. An alias leads to the unit that it stands for.
    loaded = system.call(SYSTEMD, SYSTEMD_OBJECT, f"{SYSTEMD_MANAGER}.LoadUnit", name)
    path = _expected("LoadUnit", loaded[0] if loaded else None, str)
    load = _property(system, path, "Unit", "LoadState", str)
    active = _property(system, path, "Unit", "ActiveState", str)
    # After ActiveState: where that is inactive since just now, this tells.
    has_run = _property(system, path, "Unit", "InactiveEnterTimestampMonotonic", int) != 0
    needs_reload = _property(system, path, "Unit", "NeedDaemonReload", bool)
    # A unit whose file was removed or masked may still run: its state is what counts.
    if active != "inactive" or load == "loaded":
        return Unit(active, needs_reload, has_run, _device_allow(system, path))
    if load == "not-found":
        return Unit(Absent(f"{name} is not installed"))
    return Unit(Broken(f"{name} cannot be started: LoadState is {load}"), needs_reload)


def _device_allow(system: System, path: str) -> tuple[str, ...]:
    """systemd's own order is the reverse of that in the files."""
    entries = _property(system, path, "Service", "DeviceAllow", list)
    allowed = []
    for entry in entries:
        match entry:
            case (str(node), str(permissions)):
                allowed.append(f"{node} {permissions}")
            case _:
                raise BusAnswerError(f"DeviceAllow of {path}: an entry is {entry!r}")
    return tuple(allowed)


def _property(system: System, path: str, interface: str, name: str, kind: type[T]) -> T:
    """Raises BusError; its type is part of systemd's interface, which is stable."""
    match system.call(SYSTEMD, path, GET, f"{SYSTEMD}.{interface}", name):
        case ((str(), value),):
            return _expected(f"{name} of {path}", value, kind)
        case answer:
            raise BusAnswerError(f"{name} of {path}: the answer is {answer!r}")


def _expected(what: str, value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise BusAnswerError(f"{what}: {value!r} is no {kind.__name__}")
    return value


def observe_version(system: System) -> Seen[int]:
    """Of the systemd that runs."""
    try:
        text = _property(system, SYSTEMD_OBJECT, "Manager", "Version", str)
    except BusError as error:
        return Unseen(f"the version of systemd: {error}")
    # Free text by its documentation; every release has had its number in front, as Debian and Ubuntu have it.
    match = re.match(r"v?([0-9]+)", text)
    return int(match[1]) if match else Broken(f"the version of systemd: no number in {text[:80]!r}")


def observe_template(system: System) -> tuple[str, ...]:
    """DeviceAllow= of the installed template. Raises ObservationError."""
    for directory in UNIT_DIRECTORIES:
        path = f"{directory}/{TEMPLATE}"
        try:
            return parse_device_allow(system.read_text(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ObservationError(f"{path}: {error.strerror}", "it must be a readable file, not masked") from error
    raise ObservationError(
        f"{TEMPLATE} is in none of {', '.join(UNIT_DIRECTORIES)}", "install the package systemd-container"
    )


def parse_device_allow(text: str) -> tuple[str, ...]:
    """The entries in their order; an empty one discards those before it (systemd.syntax(7), systemd.unit(5))."""
    entries: list[str] = []
    section = ""
    for line in _logical_lines(text):
        key, separator, value = (part.strip() for part in line.partition("="))
        if line.startswith("["):
            section = line
        elif separator and key == "DeviceAllow" and section == "[Service]":
            entries = [*entries, value] if value else []
    return tuple(entries)


def _logical_lines(text: str) -> list[str]:
    """Without comments and empty lines; a backslash at the end joins lines, and comments between them are dropped."""
    lines: list[str] = []
    joining = False
    for raw in text.split("\n"):
        line = raw.strip()
        if line.startswith(("#", ";")) or (not line and not joining):
            continue
        content = line.removesuffix("\\").rstrip()
        if joining:
            lines[-1] = f"{lines[-1]} {content}".strip()
        else:
            lines.append(content)
        joining = line.endswith("\\")
    return lines
