"""Observes one machine from the host, without following any path that the machine can change."""

import io
import math
import posixpath
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict, astuple, replace

from agent.config.checks import is_subdomain
from agent.host.state.gpus import GRANTED
from agent.host.state.records import HANDED, has_started
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.contract import PATH
from agent.model.device import PCI_ADDRESS, FileIdentity
from agent.model.errors import BusError, DocumentError
from agent.model.facts import Absent, Broken, DeviceAllow, LiveSettings, MachineFacts, Seen, Unit, Unseen, parse_live
from agent.model.goal import fault
from agent.model.handoff import (
    CHANGED_FILES_LIMIT,
    REPORT_VERSION,
    SIZE_LIMIT,
    FabricAnswer,
    HealthAnswer,
    Publication,
    Report,
)
from agent.model.json_document import HOST, IMAGE, accept_version
from agent.model.paths import (
    GRANTED_NAME,
    MACHINE_ROOTS,
    NSPAWN_RUNTIME,
    REPORT_NAME,
    UNITS,
    carried_directory,
    granted_file,
    handed_roots_file,
    handoff_file,
    identity_directory,
    joined_file,
    live_file,
    machine_unit,
    node_record,
    nspawn_file,
    report_directory,
    started_drop_in,
    started_nspawn,
)
from agent.model.text import printable
from agent.model.typed_json import decode
from agent.system import systemd
from agent.system.files import System
from agent.system.journal import Ages
from agent.system.trust import classify_error, discard, read_seen

T = TypeVar("T")

# systemd: its version, the states of units, and the installed template of nspawn's unit.


TEMPLATE = "systemd-nspawn@.service"
UNMASK = f"run `systemctl unmask {TEMPLATE}`"
UNIT_DIRECTORIES = tuple(f"{place}/systemd/system" for place in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib"))
"""Directories of units, in the order of precedence of systemd.unit(5). Directories of transient and generated units are
left out, because they never contain templates."""
WANTED_BY = {"machines.target": "multi-user.target"}
"""The target that starts each unit that `up` enables, by the unit's name. Machines' units are not listed, because
machines.target starts all of them."""
QUOTING = frozenset("\"'\\")


def observe_units(names: Sequence[str], system: System) -> Mapping[str, Unit]:
    """Return the states of units, loaded or not, with one call to PID 1. All are Unseen if PID 1 does not answer."""
    try:
        return dict(zip(names, map(_unit, names, systemd.list_units(names, system)), strict=True))
    except BusError as error:
        return {name: Unit(Unseen(str(error))) for name in names}


def _unit(name: str, listed: systemd.ListedUnit) -> Unit:
    state: Seen[str]
    masked = listed.load_state == "masked"
    # A unit whose file was removed or masked may still run, so ActiveState is checked first.
    if listed.active_state != "inactive" or listed.load_state == "loaded":
        state = listed.active_state
    elif listed.load_state == "not-found":
        state = Absent(f"{name} is not installed")
    elif masked:
        state = Broken(f"{name} is masked; run `systemctl unmask {name}`")
    else:
        state = Broken(f"{name} cannot be started: LoadState is {listed.load_state}; see `systemctl status {name}`")
    return Unit(state, listed.path, restarts=listed.restarts, starts=listed.starts, masked=masked)


def with_properties(machine: str, unit: Unit, system: System) -> Unit:
    """Return the machine's unit with the properties that `observe_units` does not read.

    If one of these properties cannot be read, the unit's state is Unseen. A masked unit that has failed or cannot be
    started counts as inactive, as if somebody had stopped it: nothing runs in its machine.
    """
    if unit.masked and (isinstance(unit.unit_state, Broken) or unit.unit_state == "failed"):
        unit = replace(unit, unit_state="inactive")
    if not isinstance(unit.unit_state, str):
        return unit
    inactive = unit.unit_state == "inactive"
    try:
        # The timestamp is read after ActiveState: if ActiveState says that the machine has stopped, the timestamp is
        # set. In two cases, systemd has no timestamp although a start of the machine has begun: if that start was
        # cancelled before the unit itself started, or if systemd has unloaded the unit since (it keeps only units that
        # are enabled, failed, or in use: unit_may_gc in unit.c). In both cases, the agent's own mark remains.
        has_run = unit.unit_state != "active" and (
            (unit.masked and inactive)
            or systemd.get(unit.path, "Unit.InactiveEnterTimestampMonotonic", int, system) != 0
            or (inactive and not unit.starts and has_started(machine, system))
        )
        return replace(
            unit,
            has_run=has_run,
            # If a unit was masked after systemd had loaded it, systemd always says that the unit needs a reload,
            # because systemd no longer looks for the unit's drop-ins (unit_need_daemon_reload in unit.c).
            unit_needs_reload=not unit.masked and systemd.get(unit.path, "Unit.NeedDaemonReload", bool, system),
            device_allow=systemd.device_allow(unit.path, system),
        )
    except (BusError, OSError) as error:
        return Unit(Unseen(str(error)))


def observe_start(unit: Unit, system: System) -> Seen[int]:
    """Return when the unit last became active, in microseconds since the host booted; 0 if it is not loaded."""
    try:
        if not isinstance(unit.unit_state, str):
            return 0
        return systemd.get(unit.path, "Unit.ActiveEnterTimestampMonotonic", int, system)
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
        text = systemd.get(systemd.SYSTEMD_OBJECT, "Manager.Version", str, system)
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
    """Yield the lines of a unit file without comments. A backslash joins the next line, even behind comments."""
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


def observe_machine(
    name: str, unit: Unit, system: System, ages: Ages, *, is_node: bool = False, carry: Sequence[str] = ()
) -> MachineFacts:
    """Return the machine's facts. `is_node` is whether `up` makes the machine. Raises OSError.

    A directory of `carry` that cannot be observed is an error: without it, the machine would not have its files.
    """
    report, report_age = _report(name, system, ages)
    granted, granted_age = _record(granted_file(name), lambda data: GRANTED.parse(GRANTED_NAME, data), system, ages)
    path = handed_roots_file(name)
    handed_roots, _ = _record(path, lambda data: HANDED.parse(path, data).indices, system, ages)
    # The record of the live settings is a cache: a damaged one counts as missing.
    live, live_age = _record(live_file(name), parse_live, system, ages)
    started = None
    known = isinstance(live, Unseen) or (isinstance(live, LiveSettings) and live.fixed)
    if unit.unit_state == "active" and not known:
        # The record does not say with which settings the machine started.
        files = [read_seen(system.read, path) for path in (started_nspawn(name), started_drop_in(name))]
        started = (files[0], files[1]) if isinstance(files[0], bytes) and isinstance(files[1], bytes) else None
    # A link is not followed, because root in the machine can put one there.
    published = read_seen(lambda path: system.identity(path, follow=False), handoff_file(name))
    return replace(
        unseen_machine(name, unit, Unseen("it was not observed")),
        root=_root(name, system, is_node=is_node),
        kept_from_boot_by=_kept_from_boot_by(name, unit, system),
        granted=granted,
        granted_age=granted_age,
        live=live if isinstance(live, LiveSettings) else None,
        live_unseen=live.why if isinstance(live, Unseen) else "",
        live_age=live_age if isinstance(live, LiveSettings) else math.inf,
        started=started,
        handed_roots=handed_roots,
        # If it cannot be observed, the machine keeps it: a bind without a source is left out when the machine starts.
        identity=read_seen(system.is_directory, identity_directory(name)) is not False,
        publication=Publication(published.inode, published.mtime_ns) if isinstance(published, FileIdentity) else None,
        report=report,
        report_age=report_age,
        carried=tuple(each for each in carry if system.is_directory(carried_directory(name, each), follow=False)),
    )


def unseen_machine(name: str, unit: Unit, unseen: Unseen) -> MachineFacts:
    """Return the facts of a machine if only its unit could be observed."""
    return MachineFacts(
        **asdict(unit),
        name=name,
        root=unseen,
        kept_from_boot_by=f"unbounded-agent reset {name}",
        granted=unseen,
        handed_roots=unseen,
        report=unseen,
    )


def _record(path: str, parse: Callable[[bytes], T], system: System, ages: Ages) -> tuple[Seen[T], float]:
    """Return what one of the agent's records has, and its age in seconds. A damaged record is Broken, and discarded."""
    found = read_seen(system.read_untrusted, path)
    if isinstance(found, tuple):
        try:
            return parse(found[0]), ages.of(path, found[1])
        except DocumentError as error:
            found = Broken(str(error))
    if isinstance(found, Broken):
        discard(path, found.why, system)
    return found, 0.0


def _report(name: str, system: System, ages: Ages) -> tuple[Seen[Report], float]:
    """Return the machine's report, and its age in seconds."""
    path = f"{report_directory(name)}/{REPORT_NAME}"
    found = read_seen(lambda path: system.read_untrusted(path, SIZE_LIMIT), path)
    if isinstance(found, Absent):
        return Absent(f"machine {name} has not reported"), 0.0
    if not isinstance(found, tuple):
        return found, 0.0
    report: Seen[Report]
    try:
        report = parse_report(found[0])
    except DocumentError as error:
        report = Broken(str(error))
    except Exception as error:
        report = fault("read its report", error)
    return report, ages.of(path, found[1])


def _kept_from_boot_by(name: str, unit: Unit, system: System) -> str:
    """Return the command of `MachineFacts.kept_from_boot_by`. An unknown start at boot counts as one."""
    # `up` enables each machine that it makes.
    if read_seen(system.exists, node_record(name)) is not False:
        return f"unbounded-agent reset {name}"
    if read_seen(lambda path: is_enabled(path, system), machine_unit(name)) is False:
        return ""
    # systemd does not disable a masked unit, although the command succeeds.
    unmask = f"systemctl unmask {machine_unit(name)} && " if unit.masked else ""
    return f"{unmask}machinectl disable {name}"


def _root(name: str, system: System, *, is_node: bool) -> Seen[str]:
    """Return the machine's root directory. A link is refused: nspawn might resolve it differently from the agent."""
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
            return Absent(f"{path} does not exist; {advice}")
        case unseen:
            return unseen


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


# Parses a machine's report. The machine is not trusted: everything is bounded, and all texts are printable.


TYPES = frozenset(ConditionType)
CONDITIONS_LIMIT = 64
"""The largest number of conditions in a report: a newer machine half may report more than this release knows."""
GPUS_LIMIT = 256
"""The largest number of GPUs that a condition may name."""


# msgspec accepts a text if the pattern matches anywhere in it. So each pattern begins with \A, and ends with \Z. (With
# `$` instead of \Z, a text with a final newline would be accepted too.)
Word = Annotated[str, Meta(pattern=r"\A[A-Za-z][A-Za-z0-9]{0,63}\Z")]
Address = Annotated[str, Meta(pattern=rf"\A{PCI_ADDRESS.pattern}\Z")]
FabricWord = Annotated[str, Meta(pattern=r"\A(\[?N/A\]?|[A-Za-z0-9 \[\]]{0,64})\Z")]
"""A word of the driver, which conditions show without `machine says`: no command can be made of it."""
HealthField = Annotated[str, Meta(pattern=r"\A[a-z][A-Za-z0-9_.]{0,63}\Z")]
HealthWord = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9 \[\]]{1,64}\Z")]
Time = Annotated[float, Meta(ge=0, lt=2**36)]
"""Seconds since the epoch."""
Count = Annotated[int, Meta(ge=0, lt=2**31)]


class _Condition(Struct, frozen=True):
    """One condition. Unknown keys are ignored, as in the whole report."""

    type: Word
    status: Status
    reason: Word
    message: Annotated[str, Meta(max_length=2000)]
    gpus: Annotated[tuple[Address, ...], Meta(max_length=GPUS_LIMIT)] = ()
    remarks: Annotated[tuple[Word, ...], Meta(max_length=10)] = ()
    vendors: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=10)] = ()


class _Fabric(Struct, frozen=True):
    """What a GPU says of its fabric and of persistence mode."""

    gpu: Address
    state: FabricWord
    status: FabricWord
    persistence: FabricWord = ""


class _Health(Struct, frozen=True):
    """What a GPU says of its health."""

    gpu: Address
    said: Annotated[dict[HealthField, HealthWord], Meta(max_length=32)]
    since: Time
    asked: Time
    silence: Annotated[str, Meta(pattern=r"\A[A-Za-z]{0,32}\Z")]


class _Repairs(Struct, frozen=True):
    """How often each Repair was made. This is not a dict, because msgspec's errors do not name the keys of a dict."""

    links: Count = 0
    spec: Count = 0
    containerd: Count = 0
    runtime: Count = 0


class _Version(Struct, frozen=True):
    """The version of a report. Everything else is ignored."""

    version: int


class _Document(_Version, frozen=True):
    """What the host needs of a report. Other keys are ignored."""

    generation: Annotated[str, Meta(pattern=r"\A[0-9a-f]{0,64}\Z")]
    agent_version: Annotated[str, Meta(max_length=64)]
    conditions: Annotated[tuple[_Condition, ...], Meta(max_length=CONDITIONS_LIMIT)]
    repairs: _Repairs
    advertised_gpus: Count | None
    changed_files: Annotated[tuple[str, ...], Meta(max_length=CHANGED_FILES_LIMIT)]
    publication: Publication | None
    fabric: Annotated[tuple[_Fabric, ...], Meta(max_length=1024)]
    refused: Annotated[str, Meta(max_length=2000)]
    health: Annotated[tuple[_Health, ...], Meta(max_length=1024)] = ()
    cordon: Annotated[str, Meta(max_length=2000)] = ""


def parse_report(data: bytes) -> Report:
    """Parse a report. Raises DocumentError, which names the wrong key if there is one."""
    if len(data) > SIZE_LIMIT:
        raise DocumentError(f"{REPORT_NAME}: larger than {SIZE_LIMIT} bytes")
    try:
        # First, because the keys of another version may have other types.
        accept_version(
            REPORT_NAME, {"version": decode(REPORT_NAME, data, _Version).version}, REPORT_VERSION, IMAGE, HOST
        )
        document = decode(REPORT_NAME, data, _Document)
        _check(document)
    except DocumentError as error:
        raise DocumentError(error.message, error.hint or "the machine half writes it again") from error
    known = [each for each in document.conditions if each.type in TYPES]
    conditions = [
        Condition(
            ConditionType(each.type),
            each.status,
            each.reason,
            printable(each.message),
            # Only a fault can concern some GPUs.
            gpus=each.gpus if each.status is Status.FALSE else (),
            remarks=each.remarks,
            vendors=each.vendors,
        )
        for each in known
    ]
    return Report(
        document.generation,
        tuple(conditions),
        agent_version=document.agent_version,
        repairs=asdict(document.repairs),
        advertised_gpus=document.advertised_gpus,
        changed_files=document.changed_files,
        publication=document.publication,
        fabric=tuple(FabricAnswer(*astuple(each)) for each in document.fabric),
        # An answer from the future would end errors that are still to come.
        health=tuple(HealthAnswer(*astuple(each)) for each in document.health if each.asked < time.time() + 5),
        refused=printable(document.refused),
        cordon=printable(document.cordon),
        unknown_conditions=tuple(
            f"{each.type}={each.status} ({each.reason})" for each in document.conditions if each not in known
        ),
    )


def _check(document: _Document) -> None:
    """Check what the types above cannot express. Raises DocumentError."""
    texts = {
        "agent_version": document.agent_version,
        "refused": document.refused,
        **{f"conditions[{index}].message": each.message for index, each in enumerate(document.conditions)},
    }
    for key, text in texts.items():
        # `isprintable` refuses Unicode's format characters too, which can make one text look like another.
        if not text.isprintable():
            raise DocumentError(f"{REPORT_NAME}: key {key} has unprintable characters: {text[:80]!a}")
    for index, path in enumerate(document.changed_files):
        if not PATH.fullmatch(path):
            raise DocumentError(
                f"{REPORT_NAME}: key changed_files[{index}] has a path that may not be listed: {path[:80]!a}"
            )
    lists = {
        "conditions: a type": [each.type for each in document.conditions],
        "changed_files: a path": document.changed_files,
        "fabric: a GPU": [each.gpu for each in document.fabric],
        "health: a GPU": [each.gpu for each in document.health],
    }
    for what, items in lists.items():
        if len(set(items)) != len(items):
            raise DocumentError(f"{REPORT_NAME}: key {what} appears twice")
    # The type cannot have these limits, because msgspec's limits have at most 63 bits.
    if document.publication and not all(0 <= each < 2**64 for each in document.publication):
        raise DocumentError(f"{REPORT_NAME}: key publication must be two whole numbers from 0 to {2**64 - 1}")


JOINED_LIMIT = 1024
"""Bytes of the largest file that is read about a kubelet's join."""


def observe_joined(machine: str, system: System) -> str:
    """Return the name of the machine's Node object; empty if its kubelet has not joined since the machine's last start.

    The name comes from a file that root in the machine can write, so it is not trusted and may be another Node's name.
    If the file does not contain a valid name, the result is empty too: `doctor` gives the name to kubectl, which would
    take a text such as `--kubeconfig=...` for an option.
    """
    found = read_seen(lambda path: system.read_untrusted(path, JOINED_LIMIT), joined_file(machine))
    node = found[0].decode(errors="replace").strip() if isinstance(found, tuple) else ""
    return node if is_subdomain(node) else ""
