"""Configures containerd, and reads back what it makes of it."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from agent.conditions import Condition, ConditionType, false, not_applicable, true
from agent.errors import AgentError, DocumentError, ExitCodeError
from agent.handoff import Handoff, Repair, Request
from agent.inside import containerd, runtime_files
from agent.inside.containerd import MAIN, Configuration, Table
from agent.inside.notes import Notes, Owned
from agent.inside.repairs import repaired
from agent.inside.runtime_active import CHANGED, note_change
from agent.paths import MACHINE_STATE
from agent.system.files import System
from agent.vendors.machine import VENDOR_NAMES, machine_vendor
from agent.vendors.machine_protocol import MachineVendor, RuntimeHandler

CONFIGURED = ConditionType.RUNTIME_CONFIGURED
BASELINE = f"{MACHINE_STATE}/containerd-baseline.toml"
ENABLED = true(CONFIGURED, "ReadBack", "`containerd config dump` has CDI enabled, and these GPUs need no more")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Texts of the two files (None: as it is), and what they are to stand next to."""

    main: bytes | None
    drop_in: bytes | None
    baseline: Table
    """The dump of the main file without the drop-in."""
    behind: tuple[str, ...]
    """Files that are loaded after the drop-in."""


@dataclass(frozen=True, slots=True)
class Places:
    """Of our part of containerd's configuration."""

    drop_in: str
    former: tuple[str, ...]
    """Where it was put before: it goes from there."""


def configure_runtime(
    system: System, notes: Notes, owned: Owned, vendor: MachineVendor, request: Request, handoff: Handoff
) -> Condition:
    """The RuntimeConfigured condition, after making it true where that is possible."""
    if not request.gpus:
        # What is configured stays: GPUs come back, and taking it away would restart containerd twice.
        return not_applicable(CONFIGURED, "no GPU is granted to this machine")
    others = (machine_vendor(each.vendor) for each in handoff.requests if each.gpus)
    if vendor.handler is None and any(each and each.handler for each in others):
        return not_applicable(CONFIGURED, "another vendor's runtime is configured, and CDI with it")
    default, chosen = handoff.default_runtime, handoff.containerd_drop_in
    return configure_vendor(system, notes, owned, vendor, default=default, chosen=chosen)


def configure_vendor(
    system: System, notes: Notes, owned: Owned, vendor: MachineVendor, *, default: bool, chosen: str = ""
) -> Condition:
    """The same for one vendor that has GPUs here, and is the one to have its runtime configured.

    `chosen`: the path of our part of the configuration, if it is not to be the usual one.
    """
    handler, places = vendor.handler, _places(owned, vendor, chosen)
    drop_in, name = places.drop_in, f"containerd-{vendor.name if handler else 'cdi'}"
    program = system.find_program("containerd")
    if program is None:
        return false(CONFIGURED, "NoContainerd", "containerd is not installed: install it in the image")
    if handler and not system.exists(handler.binary):
        return false(CONFIGURED, "NoHandler", f"{handler.binary} is not installed: install it in the image")
    if not owned.may_write(drop_in):
        return false(CONFIGURED, "ForeignFile", f"{drop_in} is not ours and is not overwritten: move it away")
    if handler:
        _edit_runtime_config(system, notes, vendor)
    noted = notes.load(name)
    # One look for everything that the result depends on: a run that finds it as noted spawns nothing.
    state = _state(system, program, vendor, drop_in, default=default)
    if noted.get("state") == state:
        return ENABLED if noted.get("by_others") else _configured(str(noted.get("problem", "")), drop_in)
    if handler is None and not places.former and _enabled_by_others(system, owned, drop_in):
        notes.save(name, {"state": state, "by_others": True})
        return ENABLED
    # Only here: most runs need no version.
    from agent.inside.containerd_version import containerd_version

    version = containerd_version(system, notes, program)
    before = {path: runtime_files.read_optional(system, path) for path in (MAIN, drop_in, *places.former)}
    wanted = _wanted(system, version, vendor, places, before, default=default)
    faults = _write_and_read_back(system, notes, owned, vendor, places, wanted, before, default=default)
    left = _digest(runtime_files.read_optional(system, drop_in))
    if not faults and (found := _changed_by_others(noted, _digest(before[drop_in]), wanted, drop_in)):
        repaired(notes, Repair.CONTAINERD, found)
    state = _state(system, program, vendor, drop_in, default=default)
    notes.save(name, {"state": state, "problem": faults, "drop_in": left, "path": drop_in})
    return _configured(faults, drop_in)


def _places(owned: Owned, vendor: MachineVendor, chosen: str) -> Places:
    """What was written for a vendor's runtime does not go where CDI alone is needed: that would restart containerd."""
    drop_in = chosen or containerd.drop_in_path(vendor.handler)
    kept = {drop_in} if vendor.handler else {drop_in, *_of_vendors()}
    return Places(drop_in, tuple(path for path in owned.ending(containerd.SUFFIXES) if path not in kept))


def _of_vendors() -> list[str]:
    """The usual places of the drop-ins for vendors' runtimes."""
    return [containerd.drop_in_path(handler) for handler in _handlers()]


def _names_a_runtime(system: System, drop_in: str) -> bool:
    """Whether it was written for a vendor's runtime: at a configured place all of ours have one name."""
    content = runtime_files.read_optional(system, drop_in) or b""
    return any(handler.binary.encode() in content for handler in _handlers())


def _handlers() -> list[RuntimeHandler]:
    vendors = (machine_vendor(name) for name in VENDOR_NAMES)
    return [vendor.handler for vendor in vendors if vendor and vendor.handler]


def _enabled_by_others(system: System, owned: Owned, drop_in: str) -> bool:
    """Where CDI alone is needed: whether pods have it without a drop-in for that.

    What was written for a vendor's runtime enables it too, stays when the last GPU of that vendor goes, and is loaded
    behind our drop-in, as whose successor containerd 1.x would then take it.
    """
    of_vendors = any(owned.has(path) for path in _of_vendors()) or _names_a_runtime(system, drop_in)
    if not system.exists(MAIN) or (system.exists(drop_in) and not of_vendors):
        return False
    try:
        return not list(containerd.cdi_problems(runtime_files.parse(MAIN, _dump(system, MAIN))))
    except (ExitCodeError, DocumentError):
        # What follows tells what is wrong with it.
        return False


def _configured(problem: str, drop_in: str) -> Condition:
    if problem:
        return false(CONFIGURED, "ReadBackFailed", problem)
    return true(CONFIGURED, "ReadBack", f"`containerd config dump` has what {drop_in} holds, and lost nothing")


def _changed_by_others(noted: Mapping[str, Any], found: str, wanted: Wanted, drop_in: str) -> str:
    """What somebody did to our part since it was noted, in words; empty if only what it follows changed."""
    if not noted.get("drop_in") or noted.get("path") != drop_in:
        return ""
    if wanted.drop_in is not None and found != noted["drop_in"]:
        return f"somebody {'changed' if found else 'removed'} {drop_in}"
    return f"somebody took the import of {drop_in} out of {MAIN}" if wanted.main is not None else ""


def _digest(content: bytes | None) -> str:
    """Empty where there is no file."""
    return "" if content is None else hashlib.sha256(content).hexdigest()


def _edit_runtime_config(system: System, notes: Notes, vendor: MachineVendor) -> None:
    """The file belongs to the handler's package: only our keys are set. It is read at each container's start."""
    name = f"runtime-{vendor.name}"
    present = runtime_files.read_optional(system, vendor.runtime_config)
    text = (present or b"").decode(errors="surrogateescape")
    edited = vendor.edit_runtime_config(text)
    if present is None or edited != text:
        system.write(vendor.runtime_config, edited.encode(errors="surrogateescape"))
        if notes.load(name):
            repaired(notes, Repair.RUNTIME, f"somebody changed {vendor.runtime_config}")
    notes.save(name, {"path": vendor.runtime_config})


def _wanted(
    system: System,
    version: tuple[int, ...],
    vendor: MachineVendor,
    places: Places,
    before: dict[str, bytes | None],
    *,
    default: bool,
) -> Wanted:
    drop_in = places.drop_in
    text = before[MAIN] or b""
    main = runtime_files.parse(MAIN, text)
    if not main:
        # No file, or nothing but comments, which stay.
        text = runtime_files.render_toml({"version": containerd.new_version(version)}) + text
    if not any(containerd.covers(pattern, drop_in) for pattern in containerd.imports(MAIN, main)):
        text = runtime_files.with_import(text, containerd.import_pattern(drop_in))
    main = runtime_files.parse(MAIN, text)
    everything = runtime_files.loaded_files(system, main, drop_in)
    # As it will be without what was put elsewhere before.
    order = [path for path in everything if path not in places.former]
    behind = tuple(order[order.index(drop_in) + 1 :])
    loaded = {path: everything[path] for path in order if path != drop_in}
    configuration = Configuration(main, loaded, _baseline(system, main, loaded), behind, drop_in)
    document = containerd.render(configuration, version, vendor.handler, default=default)
    try:
        same = before[drop_in] is not None and runtime_files.parse(drop_in, before[drop_in] or b"") == document
    except AgentError:
        same = False
    return Wanted(
        main=None if text == before[MAIN] else text,
        drop_in=None if same else runtime_files.render_toml(document, runtime_files.HEADER),
        baseline=configuration.dump,
        behind=behind,
    )


def _baseline(system: System, main: Table, imported: Iterable[str]) -> Table:
    """What containerd itself makes of the same files without ours, of whatever version."""
    system.write(BASELINE, runtime_files.render_toml(main | {"imports": list(imported)}), 0o600)
    try:
        return runtime_files.parse(BASELINE, _dump(system, BASELINE))
    except ExitCodeError as error:
        raise DocumentError(
            f"containerd refuses {MAIN} and what it imports, here as {BASELINE} without our drop-in: {error}",
            "repair it: containerd cannot start with it either",
        ) from error


def _write_and_read_back(
    system: System,
    notes: Notes,
    owned: Owned,
    vendor: MachineVendor,
    places: Places,
    wanted: Wanted,
    before: dict[str, bytes | None],
    *,
    default: bool,
) -> str:
    """Write what differs; what is wrong with the result, after putting the files back as they were, or "".

    Raises AgentError or OSError, after that too, where the result is not known: a full disk, a time limit.
    """
    drop_in = places.drop_in
    written = {path: text for path, text in ((drop_in, wanted.drop_in), (MAIN, wanted.main)) if text is not None}
    # Removed last: a containerd that starts meanwhile has the handler in any case.
    changes: dict[str, bytes | None] = {**written, **{path: None for path in places.former if before[path] is not None}}
    noted, effective = notes.load(CHANGED), ""
    try:
        if changes:
            owned.claim(drop_in)
            # Before the first write: a run that is killed in between must not leave files that nobody loads.
            note_change(notes)
        runtime_files.put(system, changes)
        with_ours = runtime_files.parse(MAIN, _dump(system, MAIN))
        # Without the list of files, which containerd 1.7 prints in another order each time (a map of Go's).
        effective = _digest(json.dumps(with_ours | {"imports": []}, sort_keys=True, default=str).encode())
        faults = "; ".join(containerd.problems(wanted.baseline, with_ours, vendor.handler, default=default))
        if faults and wanted.behind:
            faults += f"; loaded after {drop_in}, and stronger: {', '.join(wanted.behind)}"
    except (ExitCodeError, DocumentError) as error:
        faults = str(error)
    except (AgentError, OSError):
        _put_back(system, notes, changes, before, noted)
        raise
    if faults:
        _put_back(system, notes, changes, before, noted)
        return f"not taken over: {faults}" + (f"; {', '.join(changes)} put back as before" if changes else "")
    if changes:
        # Again: a containerd that started since may have read the first file without the second.
        note_change(notes, effective)
    for path in places.former:
        owned.remove(path)
    return ""


def _put_back(
    system: System, notes: Notes, changes: Iterable[str], before: dict[str, bytes | None], noted: dict[str, Any]
) -> None:
    runtime_files.put(system, {path: before[path] for path in reversed(tuple(changes))})
    notes.save(CHANGED, noted)


def _dump(system: System, main: str) -> bytes:
    return system.run("containerd", "--config", main, "config", "dump").encode(errors="surrogateescape")


def _state(system: System, program: str, vendor: MachineVendor, drop_in: str, *, default: bool) -> str:
    """A digest of containerd's program, of all files that it loads, and of what is asked for."""
    handler = astuple(vendor.handler) if vendor.handler else None
    digest = hashlib.sha256(json.dumps([astuple(system.identity(program)), handler, default]).encode())
    main = runtime_files.read_optional(system, MAIN)
    loaded = runtime_files.loaded_files(system, runtime_files.parse(MAIN, main or b""), drop_in)
    for path in dict.fromkeys((MAIN, drop_in, *loaded)):
        content = runtime_files.read_optional(system, path)
        digest.update(f"\0{path}\0".encode() + (content if content is not None else b"\0absent"))
    return digest.hexdigest()
