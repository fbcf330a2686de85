"""systemd: its version, the states of units, and the installed template of nspawn's unit."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.errors import CommandError, ObservationError
from agent.facts import Absent, Broken, Seen, Unseen
from agent.system.files import System

PROPERTIES = ("LoadState", "ActiveState", "NeedDaemonReload", "InactiveEnterTimestampMonotonic", "DeviceAllow")
SHOW = ("systemctl", "show", f"--property={','.join(PROPERTIES)}")
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
    """Every unit by name, with one process for all of them."""
    if not names:
        return {}
    try:
        blocks = system.run(*SHOW, *names).strip("\n").split("\n\n")
    except CommandError as error:
        return {name: Unit(Unseen(str(error))) for name in names}
    if len(blocks) != len(names):
        why = f"systemctl show: {len(blocks)} units in its output, {len(names)} were asked for"
        return {name: Unit(Unseen(why)) for name in names}
    # By place: an alias has the properties of the unit that it stands for.
    return {name: _unit(name, block) for name, block in zip(names, blocks, strict=True)}


def _unit(name: str, block: str) -> Unit:
    lines = [line.split("=", 1) for line in block.split("\n") if "=" in line]
    values = dict(lines)
    # One line for each entry; systemd's own order is the reverse of that in the files.
    device_allow = tuple(value for key, value in lines if key == "DeviceAllow")
    load, active = values.get("LoadState", ""), values.get("ActiveState", "")
    needs_reload = values.get("NeedDaemonReload") == "yes"
    has_run = values.get("InactiveEnterTimestampMonotonic", "0") not in ("", "0")
    if not load or not active:
        return Unit(Unseen(f"systemctl show: LoadState or ActiveState of {name} is missing"))
    # A unit whose file was removed or masked may still run: its state is what counts.
    if active != "inactive" or load == "loaded":
        return Unit(active, needs_reload, has_run, device_allow)
    if load == "not-found":
        return Unit(Absent(f"{name} is not installed"))
    return Unit(Broken(f"{name} cannot be started: LoadState is {load}"), needs_reload)


def observe_version(system: System) -> int:
    """systemd's version. Raises ObservationError."""
    try:
        output = system.run("systemctl", "--version")
    except CommandError as error:
        raise ObservationError(f"the version of systemd: {error.message}", error.hint) from error
    match = re.match(r"systemd v?([0-9]+)", output)
    if match is None:
        raise ObservationError(f"systemctl --version: no version in {output[:80]!r}")
    return int(match[1])


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
