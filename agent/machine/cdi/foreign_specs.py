"""Finds CDI specifications in the machine that the agent did not write, and their effect on the agent's devices.

The rules are those of Cache.refresh (pkg/cdi/cache.go of the Container Device Interface). A later directory takes
precedence over earlier ones; a name in two files of one directory is unusable; an invalid file is skipped.

Container runtimes also read files that are not regular (scanSpecDirs), and so wait for a writer if one is a FIFO. This
module does not read such files, but reports them.
"""

import errno
import hashlib
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from agent.machine.context import Context
from agent.model.conditions import Condition, ConditionType, Status, false
from agent.model.errors import AgentError
from agent.model.paths import CDI_DIRECTORIES, MACHINE_STATE
from agent.model.reasons import Reason
from agent.model.text import printable
from agent.system.files import READ_LIMIT, System
from agent.vendors.machine_vendor import MachineVendor

SUFFIXES = (".json", ".yaml")
ENABLED = "/etc/systemd/system/multi-user.target.wants"
MASKS = "/etc/systemd/system"
SHOWN = 4
"""Device names that a message shows; there may be hundreds."""


class OwnSpec(Protocol):
    """Describes a specification of the agent, as a MachineVendor does."""

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
    """A specification file that the agent did not write."""

    path: str
    devices: tuple[str, ...]
    """Qualified names of its devices."""
    fault: str = ""
    """Why it has no devices; follows the path in a message."""
    blocking: bool = False
    """Runtimes that read the file may hang forever."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """Specifications of other programs that have devices of the same kind as one of the agent's specifications."""

    same_directory: Mapping[str, str]
    """Paths by device name, in the directory of the agent's specification."""
    preferred: Mapping[str, str]
    """Paths by device name, in directories that take precedence."""
    remarks: tuple[str, ...] = ()
    """Remarks on files that do not affect the agent's devices."""
    blocking: tuple[str, ...] = ()
    """Problems with files that keep runtimes from reading any specification."""

    def names(self) -> frozenset[str]:
        """Return the names of devices that pods do not get from the agent's specification."""
        return frozenset({*self.same_directory, *self.preferred})


def find_foreign(context: Context, vendor: MachineVendor) -> Foreign:
    """Return other files with devices of the vendor's kind, and remarks on invalid files and units that write them."""
    specs = others(context, vendor)
    broken = tuple(f"{spec.path} {spec.fault}" for spec in specs if spec.fault and not spec.blocking)
    blocking = tuple(f"{spec.path} {spec.fault}" for spec in specs if spec.blocking)
    places = same_kind(specs, vendor)
    return replace(places, remarks=(*broken, *_writer_remark(context.system, vendor)), blocking=blocking)


def same_kind(specs: Iterable[ForeignSpec], own: OwnSpec) -> Foreign:
    """Return those specifications that have devices of the own specification's kind. Pure."""
    rank = CDI_DIRECTORIES.index(posixpath.dirname(own.spec_path))
    same: dict[str, str] = {}
    preferred: dict[str, str] = {}
    for spec in specs:
        place = preferred if CDI_DIRECTORIES.index(posixpath.dirname(spec.path)) > rank else same
        place.update((name, spec.path) for name in spec.devices if name.startswith(f"{own.spec_kind}="))
    return Foreign(same, preferred)


def others(context: Context, vendor: MachineVendor) -> tuple[ForeignSpec, ...]:
    """Return all specifications that the agent did not write. Runs the vendor's tool for each new or changed file."""
    system, notes = context.system, context.notes
    name = f"foreign-specs-{vendor.name}"
    noted = notes.load(name)
    found, known = [], {}
    for directory in CDI_DIRECTORIES:
        for entry in system.entries(directory) if system.is_directory(directory) else ():
            path = f"{directory}/{entry}"
            if context.owned.has(path) or not entry.endswith(SUFFIXES) or system.is_directory(path):
                continue
            spec, note = _read(system, vendor, path, noted.get(path))
            found.append(spec)
            if note:
                known[path] = note
    notes.save(name, known)
    return tuple(found)


def refusal(system: System, own: OwnSpec, devices: Iterable[str], foreign: Foreign) -> Condition | None:
    """Return the condition if a specification with these devices must not be published; None if it may be.

    If another file in the directory has one of the names, that name would become unusable in both files. So the agent's
    file must not be published then, but may be replaced if it exists already.
    """
    shared = [each for name in devices if (each := f"{own.spec_kind}={name}") in foreign.same_directory]
    if not shared or system.exists(own.spec_path):
        return None
    paths = tuple(dict.fromkeys(foreign.same_directory[each] for each in shared))
    return collision(Reason.NAMES_COLLIDE, shared, paths, own)


def with_foreign(condition: Condition, devices: Iterable[str], foreign: Foreign, vendor: OwnSpec) -> Condition:
    """Return the condition of a specification with these devices, adjusted to the effect of the other files. Pure."""
    if condition.status is not Status.TRUE:
        return condition
    if foreign.blocking:
        return false(condition.type, Reason.RUNTIME_BLOCKED, f"{'; '.join(foreign.blocking)}; remove it")
    ours = [f"{vendor.spec_kind}={name}" for name in devices]
    for others, reason in ((foreign.same_directory, Reason.NAMES_COLLIDE), (foreign.preferred, Reason.SHADOWED)):
        shared = [name for name in ours if name in others]
        if shared:
            paths = tuple(dict.fromkeys(others[name] for name in shared))
            return collision(reason, shared, paths, vendor)
    further = [
        f"{path} has further devices of this kind: {_short(names)}"
        for path, names in _by_path({**foreign.same_directory, **foreign.preferred}).items()
    ]
    return replace(condition, message=printable("; ".join([condition.message, *further, *foreign.remarks])))


def collision(reason: Reason, shared: Iterable[str], paths: tuple[str, ...], vendor: OwnSpec) -> Condition:
    """Return the condition for devices of the agent that other files have too. Pure."""
    kind, where = ConditionType.CDI_SPEC_CURRENT, ", ".join(paths)
    stop = _advice(vendor) if vendor.rival_spec in paths else f"remove {where} and stop what writes it"
    if reason is Reason.SHADOWED:
        return false(
            kind,
            Reason.SHADOWED,
            f"{where} takes precedence over {vendor.spec_path} for {_short(shared)}: pods get what it contains; {stop}",
        )
    return false(
        kind,
        Reason.NAMES_COLLIDE,
        f"{where} and {vendor.spec_path} both define {_short(shared)}, so no pod can get them; {stop}",
    )


def _read(system: System, vendor: MachineVendor, path: str, noted: object) -> tuple[ForeignSpec, dict[str, object]]:
    """Return the specification in a file, and the note about it."""
    try:
        if not system.is_file(path) and _target_exists(system, path):
            why = "is not a regular file: container runtimes that read it may hang, so no container with a GPU starts"
            return ForeignSpec(path, (), why, blocking=True), {}
        content = _content(system, path)
    except OSError as error:
        return ForeignSpec(path, (), f"cannot be read: {error}"), {}
    digest = hashlib.sha256(content).hexdigest()
    if isinstance(noted, dict) and noted.get("digest") == digest and isinstance(noted.get("devices"), list):
        listed = [str(each) for each in noted["devices"]]
    else:
        # The file is copied into a directory of its own, so that the listed devices are only those of this file.
        directory = f"{MACHINE_STATE}/cdi-foreign"
        # As in Go's filepath.Ext, a name can consist only of a suffix.
        suffix = next(each for each in SUFFIXES if path.endswith(each))
        for each in SUFFIXES:
            system.remove(f"{directory}/spec{each}")
        system.write(f"{directory}/spec{suffix}", content)
        try:
            listed = list(vendor.list_devices(system, directory))
        except (AgentError, OSError) as error:
            return ForeignSpec(path, (), f"cannot be read: {error}"), {}
    # A specification without devices is invalid.
    fault = "" if listed else "is not a valid CDI specification, so runtimes skip it"
    return ForeignSpec(path, tuple(listed), fault), {"digest": digest, "devices": listed}


def _content(system: System, path: str) -> bytes:
    """Return the file's content. A link is followed only to a world-readable file. Raises OSError.

    A pod that may write in the directory could link to a secret, which a tool's error would quote in our report.
    """
    if system.read_link(path) is None:
        return system.read(path)
    with system.open_public(system.real_path(path)) as file:
        content = file.read(READ_LIMIT + 1)
    if len(content) > READ_LIMIT:
        raise OSError(errno.EFBIG, f"larger than {READ_LIMIT} bytes", path)
    return content


def _target_exists(system: System, path: str) -> bool:
    """Return whether the path exists; a dangling link, which runtimes ignore, does not."""
    try:
        system.real_path(path)
    except OSError:
        return False
    return True


def _writer_remark(system: System, vendor: MachineVendor) -> tuple[str, ...]:
    """Return a remark on enabled units that may write a rival specification later, which would take precedence."""
    enabled = [
        unit
        for unit in vendor.rival_units
        if system.exists(f"{ENABLED}/{unit}") and system.read_link(f"{MASKS}/{unit}") != "/dev/null"
    ]
    if not enabled:
        return ()
    return (
        f"{', '.join(enabled)} is enabled and would write {vendor.rival_spec}, which would take precedence: "
        f"{_advice(vendor)}",
    )


def _advice(vendor: OwnSpec) -> str:
    if not vendor.rival_units:
        return f"remove {vendor.rival_spec}, and no longer run what wrote it"
    # Version 1.20.1 of the toolkit starts even disabled units, by a udev rule with SYSTEMD_WANTS, so they are masked.
    # Version 1.19 has them in /etc/systemd/system, where units cannot be masked; disabling them is enough.
    units = " ".join(vendor.rival_units)
    return f"`systemctl disable --now {units}; systemctl mask {units}`, then remove {vendor.rival_spec}"


def _by_path(paths: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, path in paths.items():
        found.setdefault(path, []).append(name)
    return found


def _short(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"{', '.join(listed[:SHOWN])}{more}"
