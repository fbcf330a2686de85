"""systemd: its version, the states of units, and the installed template of nspawn's unit."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    path: str = ""
    """Of its object on the bus."""
    needs_reload: bool = False
    """NeedDaemonReload."""
    has_run: bool = False
    """It was active in this boot and is not any more (InactiveEnterTimestampMonotonic)."""
    device_allow: tuple[str, ...] = ()
    """DeviceAllow= as systemd has it, from all files and set-property."""


def observe_units(names: Sequence[str], system: System) -> Mapping[str, Unit]:
    """The state of each unit by name, by one question to PID 1: no process is started for it.

    Also of those that are not loaded; an alias is the unit that it stands for.
    """
    method = f"{SYSTEMD_MANAGER}.ListUnitsByNames"
    try:
        answer = system.call(SYSTEMD, SYSTEMD_OBJECT, method, list(names), signature="as")
    except BusError as error:
        return {name: Unit(Unseen(str(error))) for name in names}
    match answer:
        case ([*entries],) if len(entries) == len(names):
            # By place: the answer has canonical names.
            return {name: _unit(name, entry) for name, entry in zip(names, entries, strict=True)}
        case _:
            return {
                name: Unit(Unseen(f"{method}: {len(names)} units were asked for, others are told")) for name in names
            }


def with_properties(unit: Unit, system: System) -> Unit:
    """With what a machine's unit is judged by."""
    if not isinstance(unit.state, str):
        return unit
    try:
        return replace(
            unit,
            # After ActiveState: where that is inactive since just now, this tells.
            has_run=unit.state != "active"
            and _property(system, unit.path, "Unit", "InactiveEnterTimestampMonotonic", int) != 0,
            needs_reload=_property(system, unit.path, "Unit", "NeedDaemonReload", bool),
            device_allow=_device_allow(system, unit.path),
        )
    except BusError as error:
        return Unit(Unseen(str(error)))


def _unit(name: str, entry: object) -> Unit:
    """From a(ssssssouso): name, description, LoadState, ActiveState, SubState, whom it follows, object path, job."""
    match entry:
        case (str(), str(), str(load), str(active), str(), str(), str(path), *_):
            return Unit(_state(name, load, active), path)
        case _:
            return Unit(Unseen(f"ListUnitsByNames: the entry of {name} is {repr(entry)[:200]}"))


def _state(name: str, load: str, active: str) -> Seen[str]:
    # A unit whose file was removed or masked may still run: its state is what counts.
    if active != "inactive" or load == "loaded":
        return active
    if load == "not-found":
        return Absent(f"{name} is not installed")
    return Broken(f"{name} cannot be started: LoadState is {load}")


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
