"""Configures containerd, reads the result back, and checks whether it runs with that and serves the kubelet."""

import contextlib
import errno
import json
import posixpath
import re
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from itertools import islice, pairwise
from typing import Any, NamedTuple

from agent.machine import containerd_tables
from agent.machine.containerd_tables import (
    CRI_2,
    IMPORT,
    MAIN,
    Configuration,
    Table,
    at,
    covers,
    cri_of,
    drop_in_path,
    imports,
    new_version,
    parse_version,
)
from agent.machine.notes import Context, Notes, record_repair
from agent.machine.vendors import VENDORS
from agent.model.conditions import Condition, ConditionType, Reason, Status, false, not_applicable, true, unknown
from agent.model.errors import AgentError, CommandError, DocumentError, ExitCodeError
from agent.model.handoff import Repair, Request
from agent.model.json_document import parse_toml
from agent.model.paths import MACHINE_STATE
from agent.model.text import dotted, first_of, one_line, sha256, whole_number
from agent.system.files import System
from agent.system.kubelet_identity import other_runtime, program_with_kubelet
from agent.vendors.cdi import without_groups
from agent.vendors.machine_vendor import MachineVendor, RuntimeHandler

EFFECTIVE_NOTE = "containerd-effective"
"""Name of the note with what other steps need of the effective configuration: its directories of CDI specifications, of
which later ones take precedence, its socket, and the directory of its state."""
ADDRESS = "containerd-address"
"""Name of what several steps use: the socket that containerd's arguments name, if any."""
DIRECTORIES_NOTED = 32
CHANGED = "containerd-changed"
"""Name of the note about the agent's last change to containerd's configuration.

`microseconds` is the time of the change by the monotonic clock: from then on, containerd is up to date only if it
started after that time, or if it already runs with the same effective configuration. `effective` is null until all
files are written, then empty until the effective configuration has been read back, and then the digest of that
configuration. If a run is killed, the next run knows from `effective` at which step that happened.
"""
RESTORED = "restored"
"""Stands for the digest in the note about the change of a killed run, after a later run has restored the files that it
found."""
LOADED = "containerd-loaded"
"""Name of the note about the last containerd process that was known to run with its current configuration: when it
started, and a digest of the configuration."""
VERSION_NOTE = "containerd-version"

# Whether containerd runs.

ACTIVE = ConditionType.RUNTIME_ACTIVE
UNIT = "containerd.service"
PROPERTIES = "LoadState,ActiveState,SubState,ExecMainStartTimestampMonotonic,MainPID,Job"
COMMAND_LINE_LIMIT = 1 << 20
ANSWER_SHOWN = 200
"""Characters that a condition shows of an answer that is none."""
OPTIONS = {name: re.compile(rf"--?{name[0]}(?:{name[1:]})?(?:=(.*))?", re.DOTALL) for name in ("config", "address")}
"""Match containerd's global options for its main configuration file and its socket. The value may be the next
argument."""
CRI_PLUGINS = ("type==io.containerd.grpc.v1,id==cri", "type==io.containerd.cri.v1")
"""Filters of `ctr plugins ls` for the plugin that serves the kubelet, and for those that it needs (containerd 2)."""


def check_active(context: Context, configured: Condition) -> Condition:
    """Return RuntimeActive: whether containerd runs with the agent's last change to its configuration, and serves CRI.

    If the reason is RestartPending, the caller must restart containerd. `configured` is RuntimeConfigured.
    """
    if configured.reason == Reason.NOT_APPLICABLE:
        return configured._replace(type=ACTIVE)
    if configured.status is not Status.TRUE:
        return unknown(ACTIVE, Reason.NOT_CONFIGURED, "see RuntimeConfigured")
    system, notes = context.system, context.notes
    changed = notes.load(CHANGED)
    try:
        output = system.run("systemctl", "show", f"--property={PROPERTIES}", UNIT)
    except CommandError as error:
        return unknown(ACTIVE, Reason.NO_ANSWER, f"cannot tell whether containerd runs: {error}")
    unit = {key: value for key, _, value in (line.partition("=") for line in output.splitlines())}
    # This time and the noted one are of CLOCK_MONOTONIC, which cannot be set, and which machine and host share.
    started = whole_number(unit.get("ExecMainStartTimestampMonotonic", "")) or 0
    if unit.get("LoadState") == "not-found":
        return false(ACTIVE, Reason.NO_CONTAINERD, f"{UNIT} does not exist: install containerd in the image")
    # containerd's unit itself may have started this run, with an ExecStartPost= from the agent's drop-in for the unit.
    # Then the unit may still be in the state start-post. containerd has sent READY=1 by then, so it runs.
    if unit.get("ActiveState") == "active" or unit.get("SubState") == "start-post":
        command_line = b""
        # The unit's ExecStart= does not always show it: it may have variables, or name a script.
        with contextlib.suppress(OSError):
            command_line = system.read(f"/proc/{unit.get('MainPID', '0')}/cmdline", COMMAND_LINE_LIMIT)
        path, context.once[ADDRESS] = argument(command_line, "config"), argument(command_line, "address")
        # normpath keeps two slashes at the start.
        if path and posixpath.normpath(path).replace("//", "/") != MAIN:
            message = f"{UNIT} runs containerd with {path} instead of {MAIN}: remove that argument from ExecStart="
            return false(ACTIVE, Reason.OTHER_CONFIGURATION, message)
        loaded = {"started": started, "effective": changed.get("effective", "")}
        # If containerd started before the change, it is up to date only if it already runs with the same effective
        # configuration. That is so if the change only restored a file that somebody had edited.
        if started < changed.get("microseconds", 0) and not (loaded["effective"] and notes.load(LOADED) == loaded):
            return unknown(ACTIVE, Reason.RESTART_PENDING, f"{UNIT} is restarting, because its configuration changed")
        notes.save(LOADED, loaded)
        return _check_cri(system, socket_path(context))
    return _not_running(unit, has_run=bool(notes.load(LOADED)))


def socket_path(context: Context) -> str:
    """Return containerd's socket, by its arguments or its configuration; empty if that is unknown."""
    return context.once.get(ADDRESS) or str(context.notes.load(EFFECTIVE_NOTE).get("address", ""))


def _not_running(unit: Mapping[str, str], *, has_run: bool) -> Condition:
    state = unit.get("ActiveState", "unknown")
    if state == "failed":
        return false(ACTIVE, Reason.FAILED, f"{UNIT} failed: see `journalctl -u containerd` in the machine")
    if state != "inactive":
        return unknown(ACTIVE, Reason.NOT_STARTED, f"{UNIT} is {state}: the next run checks again")
    masked = unit.get("LoadState") == "masked"
    start = f"`systemctl {'unmask' if masked else 'start'} {UNIT}`" + (" and start it" if masked else "")
    # If it is being restarted, this run comes between its stop and its start, which is queued then.
    if has_run and not unit.get("Job"):
        return false(ACTIVE, Reason.STOPPED, f"{UNIT} was stopped: run {start} in the machine")
    # While the machine boots, that is normal: this run comes before containerd's start.
    advice = f"if the machine has booted, run {start} in the machine"
    return unknown(ACTIVE, Reason.NOT_STARTED, f"{UNIT} is {'masked' if masked else state}: {advice}")


def _check_cri(system: System, address: str) -> Condition:
    """Return RuntimeActive for a containerd that runs with its configuration: whether it serves CRI to the kubelet.

    If one of its plugins fails, containerd and its unit stay active without it. Each run asks: ctr takes as long as
    systemctl, and nobody would notice a containerd that hangs otherwise. At boot, nothing waits for the answer, because
    containerd does not run yet.
    """
    running = f"{UNIT} runs with this configuration"
    if system.find_program("ctr") is None:
        remark = "ctr is not in the image, so that it serves the kubelet (CRI) is inferred"
        return true(ACTIVE, Reason.RUNNING, f"{running}; {remark}")
    options = ("--address", address) if address else ()
    try:
        output = system.run("ctr", *options, "plugins", "ls", "--detailed", *CRI_PLUGINS)
    except CommandError as error:
        return unknown(ACTIVE, Reason.NO_ANSWER, f"{running}, but did not say whether it serves the kubelet: {error}")
    plugins = plugin_errors(output)
    if output.strip() and not plugins:
        answer = one_line(output)[:ANSWER_SHOWN]
        return unknown(ACTIVE, Reason.NO_ANSWER, f"{running}, but `ctr plugins ls` printed no plugin: {answer}")
    errors = [error for error in plugins.values() if error]
    if CRI_2 not in plugins:
        errors.append(f"it has no plugin {CRI_2}")
    if not errors:
        return true(ACTIVE, Reason.RUNNING, f"{running} and serves the kubelet")
    # A plugin's error quotes that of the plugin that it needs.
    said = "; ".join(each for each in errors if not any(each != other and each in other for other in errors))
    advice = f"correct what it names, then run `systemctl restart {UNIT}` in the machine"
    return false(ACTIVE, Reason.CRI_FAILED, f"{UNIT} runs, but does not serve the kubelet (CRI): {said}: {advice}")


def plugin_errors(output: str) -> dict[str, str]:
    """Return the error of each plugin in the output of `ctr plugins ls --detailed`, by name; empty if it has none."""
    found = {}
    for block in f"\n{output}".split("\nType:")[1:]:
        kind, _, rest = block.partition("\nID:")
        name, _, details = rest.partition("\n")
        _, failed, error = f"\n{details}".partition("\nError:")
        message = one_line(error.partition("Message:")[2]) or one_line(error)
        found[f"{kind.strip()}.{name.strip()}"] = (message or "it failed") if failed else ""
    return found


def argument(command_line: bytes, name: str) -> str:
    """Return containerd's argument for one of OPTIONS; empty if it has none, or if the command is another program's.

    The unit's main process may be another program, such as a shell that waits for containerd.
    """
    program, *arguments = command_line.decode(errors="surrogateescape").split("\0")
    value = ""
    if posixpath.basename(program) == "containerd":
        for each, following in pairwise(arguments):
            if option := OPTIONS[name].fullmatch(each):
                value = following if option[1] is None else option[1]
    return value


# containerd's files.

DUMP_MIGRATES = (2, 0, 6)
"""The first containerd 2 whose `config dump` prints the configuration that the daemon uses (see effective_config)."""
IMPORTS = re.compile(r"^[ \t]*imports[ \t]*=[ \t]*\[", re.MULTILINE)
ENDS = 64
"""How many brackets after IMPORTS may be the end of the list. Others are in comments and patterns."""
SAME_IN_GO = r"([^\[\]\\]|\[([A-Za-z0-9_.]|[A-Za-z0-9]-[A-Za-z0-9])+\])*"
"""Matches the patterns that mean the same to fnmatch and to Go's filepath.Match, which negates with `[^` instead of
`[!`, and has backslashes as escapes."""
VENDOR, LOCAL = "/usr/", "/usr/local/"
"""Where packages have files that are not meant to be edited; and where, below that, administrators have theirs."""
UNWRITABLE = (errno.EROFS, errno.EBUSY, errno.EPERM, errno.EACCES)
"""Errors for a file that cannot be replaced: it is on a read-only file system, is itself a mount, is immutable, or is
on a network file system on which root has no rights."""


def effective_config(system: System, main: str, version: tuple[int, ...]) -> Table:
    """Return containerd's effective configuration for a main file and its imports, including defaults."""
    # From 2.0.0 to 2.0.5, `dump` prints defaults instead of the tables of a version 2 file. `migrate` prints what the
    # daemon uses (cmd/containerd/command/config.go; `server.New` in cmd/containerd/server/server.go).
    verb = "migrate" if (2, 0, 0) <= version < DUMP_MIGRATES else "dump"
    text = system.run("containerd", "--config", main, "config", verb)
    return parse(main, text.encode(errors="surrogateescape"))


def parse(path: str, text: bytes) -> Table:
    """Parse TOML. Raises DocumentError, which names the file."""
    try:
        return parse_toml(text.decode())
    # The text is not TOML or UTF-8, or has a number with more digits than int() accepts.
    except ValueError as error:
        raise DocumentError(
            f"{path}: not TOML: {error}", "repair it: containerd may not start with it either"
        ) from error


def read_optional(system: System, path: str) -> bytes | None:
    """Return a file's content; None if the file does not exist. Raises OSError."""
    try:
        return system.read(path)
    except FileNotFoundError:
        return None


def render_toml(table: Mapping[str, Any], header: str = "") -> bytes:
    """Return plain data as TOML text."""
    # Imported here: the import takes longer than a run that writes nothing.
    import tomlkit

    return (header + tomlkit.dumps(table)).encode()


def with_import(text: bytes, pattern: str) -> bytes:
    """Return the main file's text with one more import. Comments and layout stay. Raises DocumentError."""
    document = parse(MAIN, text)
    if "imports" not in document:
        # Added at the start, because at the end `imports` would become a key of the last table.
        return f'imports = ["{pattern}"]\n'.encode() + text
    # Raises DocumentError if `imports` is not a list.
    imports(MAIN, document)
    document["imports"] = [*document["imports"], pattern]
    # Not by tomlkit, which rejects some orders of tables that containerd accepts. What is parsed decides.
    whole = text.decode()
    begin = found.end() if (found := IMPORTS.search(whole)) else len(whole)
    for end in islice((each.start() for each in re.finditer("]", whole[begin:])), ENDS):
        line = whole.rfind("\n", 0, begin + end) + 1
        # A bracket with a line of its own keeps it.
        alone = not whole[line : begin + end].strip()
        for separator in ("", ", "):
            place, after = (line, "\n") if alone else (begin + end, "")
            edited = f'{whole[:place]}{separator}"{pattern}"{after}{whole[place:]}'.encode()
            with contextlib.suppress(DocumentError):
                if parse(MAIN, edited) == document:
                    return edited
    why = f"its imports are no plain list with fewer than {ENDS} brackets"
    raise DocumentError(f"{MAIN}: cannot be edited: {why}", f'add "{pattern}" to its list `imports`')


def put(system: System, files: Mapping[str, bytes | None]) -> None:
    """In the order of `files`, write each file whose content differs, and remove each file whose content is None."""
    for path, content in files.items():
        if content is None:
            system.remove(path)
        elif read_optional(system, path) != content:
            write(system, path, content)


def write(system: System, path: str, content: bytes, mode: int = 0o600) -> None:
    """Write a file and keep its mode. If the path is a link, write the file that the link leads to.

    `mode` is the mode of a new file. By default, only root may read a new file, because it may contain passwords of
    registries. A link is replaced by a file if it leads to a package's file (VENDOR), or to one that cannot be
    replaced.
    """
    place = path
    if system.exists(path):
        mode = system.mode(path)
        if system.read_link(path) is not None:
            real = system.real_path(path)
            place = real if real.startswith(LOCAL) or not real.startswith(VENDOR) else path
    try:
        system.write(place, content, mode)
    except OSError as error:
        if place == path or error.errno not in UNWRITABLE:
            raise
        system.write(path, content, mode)


def parsed_imports(path: str, content: bytes) -> tuple[str, ...]:
    """Return a file's imports as absolute patterns. Raises DocumentError."""
    patterns = imports(path, parse(path, content))
    for pattern in patterns:
        if "*" in pattern and not re.fullmatch(SAME_IN_GO, pattern):
            raise DocumentError(
                f"{path}: key imports: the agent cannot read the pattern {pattern} as containerd does",
                "write it without a backslash, and with only letters, digits, dots and underscores in brackets",
            )
    return patterns


def loaded_files(system: System, main: bytes, drop_in: str) -> dict[str, bytes]:
    """Return the contents of the files that containerd imports, in the order of loading. Raises DocumentError, OSError.

    The order is breadth first, and each file is loaded once (LoadConfig in containerd's cmd/containerd/server/config).
    If an import covers the agent's drop-in, the result has the drop-in with empty content, whether it exists or not.
    """
    loaded: dict[str, bytes] = {}
    pending = list(parsed_imports(MAIN, main))
    while pending:
        pattern = pending.pop(0)
        matches = set(_glob(system, pattern)) if "*" in pattern else {pattern}
        if covers(pattern, drop_in):
            matches.add(drop_in)
        for path in sorted(matches - {MAIN, *loaded}):
            # The agent lists all imported files in a TOML file of its own, which can only have names in UTF-8.
            if any("\udc80" <= character <= "\udcff" for character in path):
                raise DocumentError(f"{path} is imported, but its name is not UTF-8", "rename it")
            content = b"" if path == drop_in else read_optional(system, path)
            if content is None:
                raise DocumentError(f"{path} is imported, but does not exist", "create it, or remove its import")
            loaded[path] = content
            pending += parsed_imports(path, content)
    return loaded


def _glob(system: System, pattern: str) -> list[str]:
    """Return the paths that match a pattern, as Go's filepath.Glob does; there may be none."""
    paths = [""]
    for part in pattern.split("/")[1:]:
        wild = any(character in part for character in "*?[")
        directories = [each for each in paths if system.is_directory(each or "/")]
        names = {each: system.entries(each or "/") if wild else (part,) for each in directories}
        paths = [
            f"{each}/{name}" for each in directories for name in names[each] if not wild or fnmatchcase(name, part)
        ]
    return [path for path in paths if system.exists(path)]


def _digest(content: bytes | None) -> str:
    return "" if content is None else sha256(content)


# The agent's change of containerd's configuration.

CONFIGURED = ConditionType.RUNTIME_CONFIGURED
BASELINE = f"{MACHINE_STATE}/containerd-baseline.toml"
# After an upgrade, a drop-in may still have an earlier header: it is rewritten only if its tables differ.
HEADER = "# Written by unbounded-agent whenever containerd's other files change; edits here are overwritten.\n"
SUFFIXES = (".toml", ".part")
"""Suffixes that the agent's drop-in may have. Talos merges files whose names end in `.part`."""
OTHER_RUNTIMES = (
    "/run/k3s/containerd/containerd.sock",  # Also RKE2's.
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/crio/crio.sock",  # Also MicroShift's.
    "/run/cri-dockerd.sock",
)
"""Sockets of runtimes that the agent does not configure. Other sockets may be those of a proxy before containerd."""
CDI_ENABLED = true(
    CONFIGURED, Reason.READ_BACK, "`containerd config dump` shows CDI enabled; these GPUs need nothing else"
)


class _Change(NamedTuple):
    """The change that makes containerd load the agent's tables, and what the result is compared with."""

    files: dict[str, bytes | None]
    """New contents in the order of writing; None removes a file. Files that stay as they are are not in it."""
    before: dict[str, bytes | None]
    """The contents of MAIN, the drop-in and its former paths; None for a file that does not exist."""
    configuration: Configuration
    document: Table
    """The content of the drop-in."""
    version: tuple[int, ...]
    """The version of the containerd that reads the files."""
    pattern: str
    """The main file's import that covers the drop-in."""


def configure_runtime(context: Context, vendor: MachineVendor, request: Request) -> Condition:
    """Configure containerd for a request, and return RuntimeConfigured. Raises AgentError or OSError."""
    if not request.gpus:
        # The configuration stays: removing it would restart containerd now, and again when GPUs come back.
        return not_applicable(CONFIGURED, "no GPU is granted to this machine")
    others = (VENDORS.get(each.vendor) for each in context.handoff.requests if each.gpus)
    if vendor.handler is None and any(each and each.handler for each in others):
        return not_applicable(CONFIGURED, "the drop-in for another vendor's runtime also enables CDI")
    return configure_vendor(context, vendor)


def configure_vendor(context: Context, vendor: MachineVendor) -> Condition:
    """Configure containerd for a vendor's runtime, or for CDI alone if it has none, and return RuntimeConfigured."""
    system, notes, handler = context.system, context.notes, vendor.handler
    drop_in = context.handoff.containerd_drop_in or drop_in_path(handler)
    # Vendors without a runtime share one note.
    name = f"containerd-{vendor.name if handler else 'cdi'}"
    program = system.find_program("containerd") or ""
    if obstacle := _obstacle(context, handler, program, drop_in):
        return obstacle
    if handler:
        _edit_runtime_config(context, vendor)
    noted = notes.load(name)
    # If nothing that the result depends on has changed, no program is started.
    state = _inputs_digest(context, program, vendor, drop_in)
    known = noted.get("problem") or notes.load(EFFECTIVE_NOTE)
    if noted.get("state") == state and not _change_was_interrupted(notes) and known:
        return CDI_ENABLED if noted.get("by_others") else _condition(str(noted["problem"]), drop_in)
    # Former drop-ins must be removed. If only CDI is needed, those for vendors' runtimes stay, because their removal
    # would restart containerd.
    kept = {drop_in, *(() if handler else map(drop_in_path, _handlers()))}
    former = [path for path in sorted(context.owned.paths) if path.endswith(SUFFIXES) and path not in kept]
    if handler is None and not former and _enabled_without_drop_in(context, drop_in, program):
        notes.save(name, {"state": state, "by_others": True})
        return CDI_ENABLED
    version = containerd_version(context, program)
    change = _planned_change(context, version, vendor, drop_in, former, str(noted.get("import", "")))
    inputs, problem = _write_and_read_back(
        context, vendor, change, lambda: _inputs_digest(context, program, vendor, drop_in)
    )
    if not problem:
        for path in former:
            context.owned.remove(path)
        found = _digest(change.before[drop_in])
        if noted.get("drop_in") and noted.get("path") == drop_in:
            if drop_in in change.files and found != noted["drop_in"]:
                what = f"somebody {'changed' if found else 'removed'} {drop_in}"
                record_repair(notes, Repair.CONTAINERD, what)
            elif MAIN in change.files:
                record_repair(notes, Repair.CONTAINERD, f"somebody removed the import of {drop_in} from {MAIN}")
    # If there is a problem, the files are as they were, or the drop-in was emptied.
    own = {"drop_in": _digest(read_optional(system, drop_in)), "path": drop_in}
    # An import with which the drop-in does not work must not be made again after somebody has removed it.
    own |= {} if problem else {"import": change.pattern}
    notes.save(name, {"state": state if problem else inputs, "problem": problem, **own})
    return _condition(problem, drop_in)


def _condition(problem: str, drop_in: str) -> Condition:
    if problem:
        return false(CONFIGURED, Reason.READ_BACK_FAILED, problem)
    message = f"`containerd config dump` shows what {drop_in} sets, and no other setting is lost"
    return true(CONFIGURED, Reason.READ_BACK, message)


def _obstacle(context: Context, handler: RuntimeHandler | None, program: str, drop_in: str) -> Condition | None:
    system = context.system
    own = context.notes.load(EFFECTIVE_NOTE).get("address")
    sockets = [path for path in OTHER_RUNTIMES if path != own and system.exists(path)]
    other = other_runtime(system, sockets) if sockets or not program else ""
    if other := other or ("" if program else program_with_kubelet(system)):
        hint = "which the agent does not configure: make the node with `unbounded-agent up` or kubeadm"
        return false(CONFIGURED, Reason.UNSUPPORTED_DISTRIBUTION, f"{other}, {hint}")
    if not program:
        return false(CONFIGURED, Reason.NO_CONTAINERD, "containerd is not installed: install it in the image")
    if handler and not system.exists(handler.binary):
        return false(CONFIGURED, Reason.NO_HANDLER, f"{handler.binary} is not installed: install it in the image")
    if not context.owned.make_way(drop_in):
        message = f"{drop_in} exists and was not written by the agent, so it was left unchanged: move it away"
        return false(CONFIGURED, Reason.FOREIGN_FILE, message)
    return None


def _edit_runtime_config(context: Context, vendor: MachineVendor) -> None:
    """Set the agent's keys in the configuration file of the handler's program, and keep other keys.

    The file belongs to the program's package. The program reads it whenever a container starts, so no restart is
    needed.
    """
    system, notes = context.system, context.notes
    name, settings = f"runtime-{vendor.name}", json.dumps(vendor.runtime_settings)
    present, noted = read_optional(system, vendor.runtime_config), notes.load(name).get("edited")
    if present is not None and noted == [settings, sha256(present)]:
        return
    text = (present or b"").decode(errors="surrogateescape")
    content = vendor.edit_runtime_config(text).encode(errors="surrogateescape")
    if content != present:
        write(system, vendor.runtime_config, content, 0o644)
        # If other settings are noted, the change is not a repair: an older agent had set other keys.
        if noted and noted[0] == settings:
            record_repair(notes, Repair.RUNTIME, f"somebody changed {vendor.runtime_config}")
    notes.save(name, {"edited": [settings, sha256(content)]})


def _handlers() -> list[RuntimeHandler]:
    return [vendor.handler for vendor in VENDORS.values() if vendor.handler]


def _enabled_without_drop_in(context: Context, drop_in: str, program: str) -> bool:
    """Return whether CDI is enabled even without the agent's drop-in for CDI alone.

    If there is a drop-in for CDI alone, and none for a vendor's runtime, the existing drop-in is taken to be needed.
    The agent's drop-in for a vendor's runtime may enable CDI, because that drop-in stays when the vendor's last GPU is
    withdrawn. containerd loads that drop-in after the one for CDI alone, so containerd 1.x ignores the table in the one
    for CDI alone.
    """
    system, own = context.system, read_optional(context.system, drop_in)
    # The drop-in at a configured path may be a vendor's too, which its content shows.
    for_vendor = any(
        context.owned.has(drop_in_path(each)) or each.binary.encode() in (own or b"") for each in _handlers()
    )
    if not system.exists(MAIN) or (own is not None and not for_vendor):
        return False
    version: tuple[int, ...] = ()
    try:
        # A custom build may report no version.
        with contextlib.suppress(DocumentError):
            version = containerd_version(context, program)
        effective = effective_config(system, MAIN, version)
    except (ExitCodeError, DocumentError):
        # The following steps report what is wrong.
        return False
    _note_effective(context.notes, effective)
    return not list(containerd_tables.cdi_problems(effective))


def _inputs_digest(context: Context, program: str, vendor: MachineVendor, drop_in: str) -> str:
    """Return a digest of everything that the result of `configure_vendor` depends on."""
    system, default = context.system, context.handoff.default_runtime
    parts = [json.dumps([system.identity(program), vendor.handler, default]).encode()]
    main, own = read_optional(system, MAIN), read_optional(system, drop_in)
    files = {**loaded_files(system, main or b"", drop_in), MAIN: main, drop_in: own}
    for path, content in files.items():
        parts += [f"\0{path}\0".encode(), b"\0absent" if content is None else content]
    return sha256(b"".join(parts))


def _planned_change(
    context: Context,
    version: tuple[int, ...],
    vendor: MachineVendor,
    drop_in: str,
    former: list[str],
    noted_import: str,
) -> _Change:
    """Return the change that makes containerd load the agent's tables. Raises AgentError or OSError.

    `former` has earlier paths of the drop-in, and `noted_import` is the import that an earlier run found or made.
    """
    system = context.system
    before = {path: read_optional(system, path) for path in (MAIN, drop_in, *former)}
    text = before[MAIN] or b""
    main = parse(MAIN, text)
    if not main:
        # The main file is missing, or has only comments, which are kept.
        text = render_toml({"version": new_version(version)}) + text
    pattern = next((each for each in imports(MAIN, main) if covers(each, drop_in)), "")
    if not pattern:
        # Somebody may have removed the import that is noted. That import may have loaded other files too, so the same
        # pattern is used again if it covers the drop-in. Otherwise it is IMPORT, if that matches only the agent's
        # drop-ins and files that containerd already loads. Otherwise, it is the path with an asterisk: containerd does
        # not start if a file that is imported by its plain path is missing.
        stem, suffix = posixpath.splitext(drop_in)
        pattern = f"{stem}*{suffix}"
        if "*" in noted_import and covers(noted_import, drop_in):
            pattern = noted_import
        elif covers(IMPORT, drop_in):
            known = {drop_in, *former, *loaded_files(system, text, drop_in)}
            pattern = pattern if {*_glob(system, IMPORT)} - known else IMPORT
        text = with_import(text, pattern)
    loaded = {path: parse(path, content) for path, content in loaded_files(system, text, drop_in).items()}
    # Without the former drop-ins, which will be removed.
    order = [path for path in loaded if path not in former]
    later = tuple(order[order.index(drop_in) + 1 :])
    documents = {MAIN: parse(MAIN, text), **{path: loaded[path] for path in order if path != drop_in}}
    configuration = Configuration(documents, {}, later, drop_in)
    configuration = configuration._replace(dump=_baseline(system, configuration, version))
    document = containerd_tables.render(configuration, version, vendor.handler, default=context.handoff.default_runtime)
    files: dict[str, bytes | None] = {drop_in: render_toml(document, HEADER)}
    # The drop-in may no longer be TOML.
    with contextlib.suppress(AgentError):
        if before[drop_in] is not None and parse(drop_in, before[drop_in] or b"") == document:
            files = {}
    if text != before[MAIN]:
        files[MAIN] = text
    # Former drop-ins are removed last, so that a containerd that starts meanwhile has the handler from one of them.
    files |= {path: None for path in former if before[path] is not None}
    return _Change(files, before, configuration, document, version, pattern)


def _baseline(system: System, configuration: Configuration, version: tuple[int, ...]) -> Table:
    """Return containerd's effective configuration for the main file and its imports alone."""
    main, *imported = configuration.documents
    system.write(BASELINE, render_toml(configuration.documents[main] | {"imports": imported}), 0o600)
    try:
        return effective_config(system, BASELINE, version)
    except ExitCodeError as error:
        raise DocumentError(
            f"containerd refuses {MAIN} and its imports, even without the agent's drop-in (tried as the copy "
            f"{BASELINE}): {error}{configuration.newer_files(version)}",
            "repair these files: containerd cannot start with them either",
        ) from error


def _write_and_read_back(
    context: Context, vendor: MachineVendor, change: _Change, digest_inputs: Callable[[], str]
) -> tuple[str, str]:
    """Write the files that differ. Return a digest of what the result depends on, and what is wrong with the result.

    `digest_inputs` returns that digest. It is called before the result is read back, so that the next run notices if
    somebody changes the files after the call.

    If the result is wrong or unknown, the files are restored. If it is wrong and restoring cannot help, because the
    drop-in that this run found is faulty too, the drop-in is emptied if containerd may not even start with it. Raises
    AgentError or OSError if the result is unknown, for example because of a full disk or a time limit.
    """
    system, notes, drop_in = context.system, context.notes, change.configuration.drop_in
    noted, unchecked = notes.load(CHANGED), _change_was_interrupted(notes)
    inputs, refused, effective = "", False, Table()
    try:
        # An earlier run may have been killed before its last write.
        if change.files or noted.get("effective", "") is None:
            context.owned.claim(drop_in)
            # Noted before the first write: if this run is killed, later runs know that containerd must load the files.
            # Noted again after the last: a containerd that started before it may have read only some of the new files.
            notes.save(CHANGED, {"microseconds": time.monotonic_ns() // 1000, "effective": None})
            put(system, change.files)
            notes.save(CHANGED, {"microseconds": time.monotonic_ns() // 1000, "effective": ""})
        inputs = digest_inputs()
        effective = effective_config(system, MAIN, change.version)
        _note_effective(notes, effective)
        problem = _problem(context, vendor, change, effective)
    except (ExitCodeError, DocumentError) as error:
        problem, refused = str(error), isinstance(error, ExitCodeError)
    except (AgentError, OSError):
        _restore(context, change, noted)
        raise
    if not problem:
        if _change_was_interrupted(notes):
            # The noted change is this run's, or that of an earlier run that was killed before it knew the result. The
            # digest leaves out the list of imports, which containerd 1.7 prints in a random order (a map in Go).
            content = json.dumps(effective | {"imports": []}, sort_keys=True, default=str)
            notes.save(CHANGED, {**notes.load(CHANGED), "effective": sha256(content.encode())})
        return inputs, ""
    _restore(context, change, noted)
    done = [f"restored {', '.join(change.files)}"] if change.files else []
    suspect = change.before[drop_in] is not None and (unchecked or refused)
    written = any(content is not None for content in change.files.values())
    if suspect and (not written or _is_refused(system, change.version)):
        # The faulty drop-in was there before this run: either an earlier run was killed before it had checked its
        # change, or containerd has changed since that check. containerd works without the drop-in (the baseline), but
        # may not even start with it. The drop-in is emptied, not removed, because containerd does not start if a file
        # that is imported by its path is missing.
        put(system, {drop_in: HEADER.encode()})
        notes.save(CHANGED, {})
        done.append(f"emptied {drop_in}")
    elif unchecked:
        # Otherwise, each later run would try again.
        notes.save(CHANGED, {**notes.load(CHANGED), "effective": RESTORED})
    return inputs, "; ".join([f"the drop-in does not work: {problem}", *done])


def _change_was_interrupted(notes: Notes) -> bool:
    """Return whether a run began to change containerd's configuration, but was killed before it checked the result."""
    changed = notes.load(CHANGED)
    return bool(changed) and not changed.get("effective")


def _note_effective(notes: Notes, effective: Table) -> None:
    listed = cri_of(effective).get("cdi_spec_dirs")
    directories = [str(each) for each in listed[:DIRECTORIES_NOTED]] if isinstance(listed, list) else []
    # Version 4 of the format has the socket in a table of its own (serviceMigrate in containerd's config.go).
    server = at(effective, "plugins", "io.containerd.server.v1.grpc") or at(effective, "grpc")
    # Without the note, the configuration is read back again.
    with contextlib.suppress(OSError):
        places = {"address": str(server.get("address", "")), "state": str(effective.get("state", ""))}
        notes.save(EFFECTIVE_NOTE, {"directories": directories, **places})


def _problem(context: Context, vendor: MachineVendor, change: _Change, effective: Table) -> str:
    configuration, default = change.configuration, context.handoff.default_runtime
    found = containerd_tables.problems(configuration.dump, effective, change.document, vendor.handler, default=default)
    problem = first_of(tuple(found), separator="; ")
    if problem and configuration.loaded_later:
        later = ", ".join(configuration.loaded_later)
        problem += f"; loaded after {configuration.drop_in}, and may override it: {later}"
    return problem + configuration.mixture(change.version) if problem else ""


def _restore(context: Context, change: _Change, noted: dict[str, Any]) -> None:
    put(context.system, {path: change.before[path] for path in reversed(change.files)})
    context.notes.save(CHANGED, noted)


def _is_refused(system: System, version: tuple[int, ...]) -> bool:
    """Return whether containerd refuses its configuration as it is now. Raises CommandError."""
    try:
        with contextlib.suppress(DocumentError):
            effective_config(system, MAIN, version)
    except ExitCodeError:
        return True
    return False


# What containerd accepts in CDI specifications.

GROUPS_SINCE = (1, 7, 16)
"""The first containerd with version 0.7 of CDI's library. An older containerd ignores every specification with the key
additionalGids, which version 0.7.0 of the format added."""


def containerd_version(context: Context, program: str) -> tuple[int, ...]:
    """Return containerd's version. Raises CommandError, DocumentError or OSError.

    The result is noted, so `containerd --version` runs again only after the program has changed or the machine has
    booted, or if no version was found.
    """
    system, notes = context.system, context.notes
    identity, noted = list(system.identity(program)), notes.load(VERSION_NOTE)
    if noted.get("program") == identity:
        return tuple(noted["version"])
    version = parse_version(system.run("containerd", "--version"))
    notes.save(VERSION_NOTE, {"program": identity, "version": list(version)})
    return version


def program_identity(system: System) -> list[object] | None:
    """Return the identity of containerd's program, on which the result of `adapt_to_containerd` depends."""
    program = system.find_program("containerd")
    return list(system.identity(program)) if program and system.is_file(program) else None


def adapt_to_containerd(context: Context, spec: object) -> tuple[object, tuple[str, ...]]:
    """Return a CDI specification in a form that this machine's containerd accepts, and a remark if it was changed."""
    groupless, program = without_groups(spec), context.system.find_program("containerd")
    if groupless == spec or not program or not context.system.is_file(program):
        return spec, ()
    # A custom build may report no version; RuntimeConfigured says so.
    with contextlib.suppress(DocumentError):
        if (version := containerd_version(context, program)) < GROUPS_SINCE:
            since = f"containerd {dotted(version)} does not support additionalGids (added in {dotted(GROUPS_SINCE)})"
            advice = "containers that do not run as root need the groups of their device nodes as supplementalGroups"
            return groupless, (f"{since}, so they are left out: {advice}",)
    return spec, ()
