"""Other CDI specs in the machine, and what they make of devices of ours.

Who wins is decided in Cache.refresh (pkg/cdi/cache.go of the Container Device Interface): a directory outranks those
before it, a name that two files of one directory have is nobody's, a file that is not a valid spec is skipped. What is
no file is read all the same (scanSpecDirs), and a FIFO without a writer is waited for.
"""

import hashlib
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from agent.conditions import Condition, ConditionType, Status, false, true
from agent.errors import AgentError
from agent.inside.notes import Notes, Owned
from agent.paths import CDI_DIRECTORIES, MACHINE_STATE
from agent.system.files import System
from agent.vendors.machine_protocol import MachineVendor

SUFFIXES = (".json", ".yaml")
ENABLED = "/etc/systemd/system/multi-user.target.wants"
MASKS = "/etc/systemd/system"
SHOWN = 4
"""Device names in a message; there may be hundreds."""


class OwnSpec(Protocol):
    """A spec of ours, as a MachineVendor describes its own."""

    @property
    def spec_path(self) -> str: ...

    @property
    def spec_kind(self) -> str: ...

    @property
    def rival_spec(self) -> str: ...

    @property
    def rival_units(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class ForeignSpec:
    """A file of somebody else."""

    path: str
    devices: tuple[str, ...]
    """Qualified names."""
    fault: str = ""
    """Why it has none, as a message says it behind the path."""
    blocking: bool = False
    """Runtimes that read it may never come to an end."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """All that stands beside our spec."""

    same_directory: Mapping[str, str]
    """Path by device name."""
    outranking: Mapping[str, str]
    remarks: tuple[str, ...] = ()
    """On what harms no device of ours."""
    blocking: tuple[str, ...] = ()
    """What is wrong with files that keep runtimes from reading any spec."""

    def names(self) -> frozenset[str]:
        """Of devices that pods do not get from our spec."""
        return frozenset({*self.same_directory, *self.outranking})


def look(system: System, notes: Notes, owned: Owned, vendor: MachineVendor) -> Foreign:
    """What stands beside the vendor's spec; see `others`."""
    specs = others(system, notes, owned, vendor)
    broken = tuple(f"{spec.path} {spec.fault}" for spec in specs if spec.fault and not spec.blocking)
    blocking = tuple(f"{spec.path} {spec.fault}" for spec in specs if spec.blocking)
    places = of_kind(specs, vendor)
    return replace(places, remarks=(*broken, *_writer_remark(system, vendor)), blocking=blocking)


def of_kind(specs: Iterable[ForeignSpec], own: OwnSpec) -> Foreign:
    """Those of them that have devices of our spec's kind. Pure."""
    rank = CDI_DIRECTORIES.index(posixpath.dirname(own.spec_path))
    same: dict[str, str] = {}
    outranking: dict[str, str] = {}
    for spec in specs:
        place = outranking if CDI_DIRECTORIES.index(posixpath.dirname(spec.path)) > rank else same
        place.update((name, spec.path) for name in spec.devices if name.startswith(f"{own.spec_kind}="))
    return Foreign(same, outranking)


def others(system: System, notes: Notes, owned: Owned, vendor: MachineVendor) -> tuple[ForeignSpec, ...]:
    """All files of somebody else; spawns the vendor's tool once for every one that is new or changed."""
    name = f"foreign-specs-{vendor.name}"
    noted = notes.load(name)
    found, known = [], {}
    for directory in CDI_DIRECTORIES:
        for entry in system.entries(directory) if system.is_directory(directory) else ():
            path = f"{directory}/{entry}"
            if owned.has(path) or not entry.endswith(SUFFIXES) or system.is_directory(path):
                continue
            spec, note = _read(system, vendor, path, noted.get(path))
            found.append(spec)
            if note:
                known[path] = note
    notes.save(name, known)
    return tuple(found)


def refusal(system: System, own: OwnSpec, devices: Iterable[str], foreign: Foreign) -> Condition | None:
    """Why a spec with these devices is not published: it would take them from who made the other file, for nobody."""
    shared = [each for name in devices if (each := f"{own.spec_kind}={name}") in foreign.same_directory]
    if not shared or system.exists(own.spec_path):
        return None
    paths = tuple(dict.fromkeys(foreign.same_directory[each] for each in shared))
    return collision("NamesCollide", shared, paths, own)


def beside(condition: Condition, devices: Iterable[str], foreign: Foreign, vendor: OwnSpec) -> Condition:
    """The condition of our spec, whose devices these are, with what the others make of it. Pure."""
    if condition.status is not Status.TRUE:
        return condition
    if foreign.blocking:
        return false(condition.type, "RuntimeBlocked", f"{'; '.join(foreign.blocking)}; remove it")
    ours = [f"{vendor.spec_kind}={name}" for name in devices]
    for others, reason in ((foreign.same_directory, "NamesCollide"), (foreign.outranking, "Shadowed")):
        shared = [name for name in ours if name in others]
        if shared:
            paths = tuple(dict.fromkeys(others[name] for name in shared))
            return collision(reason, shared, paths, vendor)
    unharmed = [
        f"{path} has further devices of this kind: {_short(names)}"
        for path, names in _by_path({**foreign.same_directory, **foreign.outranking}).items()
    ]
    return true(condition.type, condition.reason, "; ".join([condition.message, *unharmed, *foreign.remarks]))


def collision(reason: str, shared: Iterable[str], paths: tuple[str, ...], vendor: OwnSpec) -> Condition:
    """The condition where others have devices of ours. Pure."""
    kind, where = ConditionType.CDI_SPEC_CURRENT, ", ".join(paths)
    stop = _advice(vendor) if vendor.rival_spec in paths else f"remove {where} and stop what writes it"
    if reason == "Shadowed":
        return false(
            kind,
            "Shadowed",
            f"{where} outranks {vendor.spec_path} for {_short(shared)}: pods get what it holds; {stop}",
        )
    return false(
        kind,
        "NamesCollide",
        f"{where} and {vendor.spec_path} both have {_short(shared)}, so that no pod can be given them; {stop}",
    )


def _read(system: System, vendor: MachineVendor, path: str, noted: object) -> tuple[ForeignSpec, dict[str, object]]:
    """A foreign file, and the note on it."""
    try:
        if not system.is_file(path) and _leads_somewhere(system, path):
            why = "is no regular file: a container runtime that reads it may hang, and no container with a GPU starts"
            return ForeignSpec(path, (), why, blocking=True), {}
        content = system.read(path)
    except OSError as error:
        return ForeignSpec(path, (), f"cannot be looked into: {error}"), {}
    digest = hashlib.sha256(content).hexdigest()
    if isinstance(noted, dict) and noted.get("digest") == digest and isinstance(noted.get("devices"), list):
        listed = [str(each) for each in noted["devices"]]
    else:
        # Alone in a directory, so that the devices are those of this file.
        directory = f"{MACHINE_STATE}/cdi-foreign"
        system.remove_tree(directory)
        # A name that is a suffix alone counts, as in Go's filepath.Ext.
        suffix = next(each for each in SUFFIXES if path.endswith(each))
        system.write(f"{directory}/spec{suffix}", content)
        try:
            listed = list(vendor.list_devices(system, directory))
        except AgentError as error:
            return ForeignSpec(path, (), f"cannot be looked into: {error}"), {}
    # A spec without devices is not valid.
    fault = "" if listed else "is no valid CDI spec, and runtimes skip it"
    return ForeignSpec(path, tuple(listed), fault), {"digest": digest, "devices": listed}


def _leads_somewhere(system: System, path: str) -> bool:
    """Not so a dangling link, at which runtimes only shrug."""
    try:
        system.real_path(path)
    except OSError:
        return False
    return True


def _writer_remark(system: System, vendor: MachineVendor) -> tuple[str, ...]:
    """A unit that is enabled now is a file that outranks ours tomorrow."""
    enabled = [
        unit
        for unit in vendor.rival_units
        if system.exists(f"{ENABLED}/{unit}") and system.read_link(f"{MASKS}/{unit}") != "/dev/null"
    ]
    if not enabled:
        return ()
    return (
        f"{', '.join(enabled)} is enabled and would write {vendor.rival_spec}, which outranks this: {_advice(vendor)}",
    )


def _advice(vendor: OwnSpec) -> str:
    if not vendor.rival_units:
        return f"remove {vendor.rival_spec}, and run no more what wrote it"
    return f"`systemctl disable --now {' '.join(vendor.rival_units)}`, then remove {vendor.rival_spec}"


def _by_path(paths: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, path in paths.items():
        found.setdefault(path, []).append(name)
    return found


def _short(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"{', '.join(listed[:SHOWN])}{more}"
