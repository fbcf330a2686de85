"""Observes systemd: its version, the states of units, and the installed template of nspawn's unit."""

import io
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from agent.host.state.starts import has_started
from agent.model.device_allow import DeviceAllow
from agent.model.errors import BusError
from agent.model.facts import Absent, Broken, Seen, Unseen
from agent.model.paths import UNITS
from agent.system import systemd
from agent.system.files import System
from agent.system.seen import classify_error

TEMPLATE = "systemd-nspawn@.service"
UNMASK = f"run `systemctl unmask {TEMPLATE}`"
UNIT_DIRECTORIES = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
"""Directories of units, in the order of precedence of systemd.unit(5). Directories of transient and generated units are
left out, because they never contain templates."""
WANTED_BY = {"machines.target": "multi-user.target"}
"""The target that starts each unit that `up` enables, by the unit's name. Machines' units are not listed, because
machines.target starts all of them."""
QUOTING = frozenset("\"'\\")


class Unit(Struct, frozen=True):
    """The current state of one unit."""

    state: Seen[str]
    """The unit's ActiveState."""
    path: str = ""
    """Path of the unit's object on the bus."""
    restarts: bool = False
    """The unit is a service that has ended, and systemd waits before it starts the service again."""
    starts: bool = False
    """A start of the unit is queued or under way."""
    needs_reload: bool = False
    """The unit's NeedDaemonReload."""
    masked: bool = False
    """The unit is masked. It may still run."""
    has_run: bool = False
    """The unit is not active now, and one of these is true: since the host booted, it has stopped or failed to start
    (InactiveEnterTimestampMonotonic); since the host booted, one of its starts was cancelled; or it is masked and
    inactive."""
    device_allow: tuple[DeviceAllow, ...] = ()
    """The DeviceAllow= list in force, from all files and set-property."""


def observe_units(names: Sequence[str], system: System) -> Mapping[str, Unit]:
    """Return the states of units by name, with a single call to PID 1. All are Unseen if PID 1 does not answer.

    The result includes units that are not loaded. An alias has the state of the unit that it names.
    """
    try:
        return dict(zip(names, map(_unit, names, systemd.list_units(names, system)), strict=True))
    except BusError as error:
        return {name: Unit(Unseen(str(error))) for name in names}


def with_properties(machine: str, unit: Unit, system: System) -> Unit:
    """Return the machine's unit with the properties that `observe_units` does not read.

    If one of these properties cannot be read, the unit's state is Unseen. A masked unit that has failed or cannot be
    started counts as inactive, as if somebody had stopped it: nothing runs in its machine.
    """
    if unit.masked and (isinstance(unit.state, Broken) or unit.state == "failed"):
        unit = replace(unit, state="inactive")
    if not isinstance(unit.state, str):
        return unit
    try:
        return replace(
            unit,
            has_run=(unit.masked and unit.state == "inactive") or _has_run(machine, unit, system),
            # If a unit was masked after systemd had loaded it, systemd always says that the unit needs a reload,
            # because systemd no longer looks for the unit's drop-ins (unit_need_daemon_reload in unit.c).
            needs_reload=not unit.masked and systemd.needs_reload(unit.path, system),
            device_allow=systemd.device_allow(unit.path, system),
        )
    except (BusError, OSError) as error:
        return Unit(Unseen(str(error)))


def _has_run(machine: str, unit: Unit, system: System) -> bool:
    """Return whether, since the host booted, the unit has stopped, failed to start, or had a start cancelled.

    While the unit is active, the result is False.
    """
    if unit.state == "active":
        return False
    # The timestamp is read after ActiveState: if ActiveState says that the machine has stopped, the timestamp is set.
    if systemd.inactive_enter(unit.path, system) != 0:
        return True
    # In two cases, systemd has no timestamp although a start of the machine has begun: if that start was cancelled
    # before the unit itself started, or if systemd has unloaded the unit since (it keeps only units that are enabled,
    # failed, or in use: unit_may_gc in unit.c). In both cases, the agent's own mark remains.
    return unit.state == "inactive" and not unit.starts and has_started(machine, system)


def _unit(name: str, listed: systemd.ListedUnit | Unseen) -> Unit:
    if isinstance(listed, Unseen):
        return Unit(listed)
    state, masked = _state(name, listed), listed.load_state == "masked"
    return Unit(state, listed.path, restarts=listed.restarts, starts=listed.starts, masked=masked)


def _state(name: str, listed: systemd.ListedUnit) -> Seen[str]:
    # A unit whose file was removed or masked may still run, so ActiveState is checked first.
    if listed.active_state != "inactive" or listed.load_state == "loaded":
        return listed.active_state
    if listed.load_state == "not-found":
        return Absent(f"{name} is not installed")
    if listed.load_state == "masked":
        return Broken(f"{name} is masked; run `systemctl unmask {name}`")
    return Broken(f"{name} cannot be started: LoadState is {listed.load_state}; see `systemctl status {name}`")


def observe_start(unit: Unit, system: System) -> Seen[int]:
    """Return when the unit last became active, in microseconds since the host booted; 0 if it is not loaded."""
    try:
        return systemd.active_enter(unit.path, system) if isinstance(unit.state, str) else 0
    except BusError as error:
        return Unseen(str(error))


def is_enabled(unit: str, system: System) -> bool:
    """Return whether the unit is enabled: whether its target has the link to it that `systemctl enable` makes."""
    return system.exists(enabling_link(unit))


def enabling_link(unit: str) -> str:
    """Return the link that `systemctl enable` makes for a machine's unit, or for one in WANTED_BY."""
    return f"{UNITS}/{WANTED_BY.get(unit, 'machines.target')}.wants/{unit}"


def observe_version(system: System) -> Seen[int]:
    """Return the version of the running systemd."""
    try:
        text = systemd.version(system)
    except BusError as error:
        return Unseen(f"the version of systemd: {error}")
    match = re.match(r"v?([0-9]{1,9})(?![0-9])", text)
    return int(match[1]) if match else Broken(f"the version of systemd: no number in {text[:80]!r}")


def observe_template(system: System) -> Seen[tuple[DeviceAllow, ...]]:
    """Return the DeviceAllow= list of the installed template unit."""
    for directory in UNIT_DIRECTORIES:
        path = f"{directory}/{TEMPLATE}"
        try:
            return parse_device_allow(system.read_text(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            seen = classify_error(path, error)
            return replace(seen, why=f"{seen.why}; it must be a readable file: if it is masked, {UNMASK}")
    return Absent(f"{TEMPLATE} is in none of {', '.join(UNIT_DIRECTORIES)}: install the package systemd-container")


def parse_device_allow(text: str) -> tuple[DeviceAllow, ...]:
    """Return the DeviceAllow= list in a unit file. An empty assignment discards earlier entries (systemd.syntax(7))."""
    entries: list[DeviceAllow] = []
    section = ""
    for line in _logical_lines(text):
        key, separator, value = (part.strip() for part in line.partition("="))
        if line.startswith("["):
            section = line
        elif separator and key == "DeviceAllow" and section == "[Service]":
            if not value:
                entries.clear()
            elif entry := _entry(value):
                entries.append(entry)
    return tuple(entries)


def _entry(value: str) -> DeviceAllow | None:
    """Return the entry that systemd makes of the value (config_parse_device_allow in load-fragment.c).

    The result is None if systemd ignores the value. Specifiers are not expanded: the entry is copied into a drop-in of
    the same unit, and there systemd expands them.
    """
    node, permissions = (*re.split("[ \t]+", value, maxsplit=1), "")[:2]
    if not QUOTING.isdisjoint(value):
        text = io.StringIO(value)
        lexer = shlex.shlex(text, posix=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            node = lexer.get_token() or ""
        except ValueError:
            return None
        permissions = text.read().strip()
    if not node.startswith(("block-", "char-")):
        node = "" if ".." in node.split("/") else posixpath.normpath(node).replace("//", "/")
        if not node.startswith(("/dev/", "/run/systemd/inaccessible/")):
            return None
    # In `value`, bytes that are not UTF-8 appear as surrogates.
    is_text = not any("\ud800" <= character <= "\udfff" for character in value)
    return DeviceAllow(node, permissions) if is_text and not permissions.strip("rwm") else None


def _logical_lines(text: str) -> Iterator[str]:
    """Yield the lines of a unit file, without comments and empty lines.

    A backslash at the end of a line joins the line with the next one, even if there are comments between the two.
    """
    parts: list[str] = []
    for raw in text.split("\n"):
        line = raw.strip()
        if line.startswith(("#", ";")) or (not line and not parts):
            continue
        parts.append(line.removesuffix("\\").rstrip())
        if not line.endswith("\\"):
            yield " ".join(filter(None, parts))
            parts = []
    if parts:
        yield " ".join(filter(None, parts))
