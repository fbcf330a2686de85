"""Finds CDI specifications in the machine that the agent did not write, and their effect on the agent's devices.

The rules are those of Cache.refresh in pkg/cdi/cache.go of CDI's Go library. A later directory takes precedence over
earlier ones; a device name in two files of one directory is unusable; an invalid file is skipped.

Container runtimes also read files that are not regular (scanSpecDirs), so they hang on a FIFO until somebody writes to
it. This module does not read such files, but reports them.

A pod that may write in one of the directories can put anything there, in any number. So what one run reads and checks
is limited in number, bytes and time, and what was found out about a file is noted, also that it could not be read.
The agent reads the names itself: `nvidia-ctk cdi list` takes gigabytes for a file of one MiB.
"""

import errno
import json
import posixpath
import stat
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from agent.machine.containerd import EFFECTIVE_NOTE
from agent.machine.notes import Context
from agent.machine.vendors import VENDORS
from agent.model.conditions import Condition, ConditionType, Reason, Status, false
from agent.model.errors import DocumentError
from agent.model.paths import CDI_DIRECTORIES
from agent.model.text import first_of, first_quoted, printable, quoted, sha256
from agent.system.files import System
from agent.vendors.cdi import device_names

SUFFIXES = (".json", ".yaml")
ENABLED = "/etc/systemd/system/multi-user.target.wants"
MASKS = "/etc/systemd/system"
SHOWN = 4
"""How many device names, and how many files, a message shows; there may be hundreds."""
NAMES_READ = 16_384
"""How many names of a directory are read."""
FILES = 256
"""How many files of a directory are read. A node with NVIDIA's DRA driver has one for each claim."""
SIZE_LIMIT = 256 * 1024
"""Bytes of the largest file that is read. A specification of 16 GPUs with 7 MIG instances each has half of that. What a
parser makes of a file takes thousands of times its size at worst."""
SIZE_OF_ALL = 4 << 20
"""Bytes of all files that one run reads, and of what is noted about them."""
TIME_LIMIT = 10.0
"""Seconds in which one run checks new files. The next run checks the others."""
DEVICES = 1024
"""How many devices a file may have. One for 16 GPUs with 7 MIG instances each has 256, each with two names."""
LONGEST_NAME = 256
"""Characters of the longest qualified name that is kept. None of the agent's devices has a longer one."""
NOTE = "foreign-specs"
"""Name of the note with what is known of the files."""


class OwnSpec(NamedTuple):
    """One of the agent's specifications. MachineVendor explains the rival."""

    path: str
    kind: str
    rival: str = ""
    rival_units: tuple[str, ...] = ()


class ForeignSpec(NamedTuple):
    """A specification file that the agent did not write."""

    path: str
    devices: tuple[str, ...] = ()
    """Qualified names of its devices."""
    fault: str = ""
    """Why it has no devices, as the end of a message that begins with the path; empty if it has some."""
    blocking: bool = False
    """Whether runtimes that read the file may hang forever."""
    checked: bool = True
    """Whether it is known which devices runtimes find in the file."""
    outranked: bool = False
    """Whether the agent's directory takes precedence over the file's directory."""


class Foreign(NamedTuple):
    """Other programs' specifications that have devices of the same kind as one of the agent's specifications."""

    same_directory: Mapping[str, str]
    """By qualified device name, the path of a specification in the same directory as the agent's."""
    preferred: Mapping[str, str]
    """By qualified device name, the path of a specification in a directory that takes precedence over the agent's."""
    remarks: tuple[str, ...] = ()
    """Remarks on files that do not affect the agent's devices."""
    blocking: tuple[str, ...] = ()
    """Sentences on files that may make runtimes hang, so that the runtimes read no specification at all."""


def find_foreign(context: Context, own: OwnSpec) -> Foreign:
    """Return what other programs' specifications offer of the kind of a vendor's GPUs.

    The remarks name invalid files, and enabled units that may write a rival specification.
    """
    system, specs = context.system, foreign_specs(context)
    faulty = sorted((spec for spec in specs if spec.fault and not spec.blocking), key=lambda spec: spec.checked)
    broken = [f"{quoted(spec.path)} {spec.fault}" for spec in faulty]
    remarks = [first_of(broken, SHOWN, "; ")] if broken else []
    enabled = [
        unit
        for unit in own.rival_units
        if system.exists(f"{ENABLED}/{unit}") and system.read_link(f"{MASKS}/{unit}") != "/dev/null"
    ]
    if enabled:
        what = f"{' and '.join(enabled)} {'are' if len(enabled) > 1 else 'is'} enabled"
        remarks.append(f"{what} and would write {own.rival}, which would take precedence: {_advice(own)}")
    blocking = tuple(f"{quoted(spec.path)} {spec.fault}" for spec in specs if spec.blocking)
    return with_same_kind(specs, own)._replace(remarks=tuple(remarks), blocking=blocking)


def with_same_kind(specs: Iterable[ForeignSpec], own: OwnSpec) -> Foreign:
    """Return the devices in the specifications that have the same kind as `own`, with their files. Pure."""
    own_directory = posixpath.dirname(own.path)
    same, preferred = dict[str, str](), dict[str, str]()
    for spec in specs:
        if not spec.outranked:
            paths_by_name = same if posixpath.dirname(spec.path) == own_directory else preferred
            paths_by_name.update((name, spec.path) for name in spec.devices if name.startswith(f"{own.kind}="))
    return Foreign(same, preferred)


def foreign_specs(context: Context) -> tuple[ForeignSpec, ...]:
    """Return all specifications that the agent did not write, as they were when a step first asked for them."""
    if NOTE not in context.once:
        reader, specs = _Reader(context, context.notes.load(NOTE)), list[ForeignSpec]()
        try:
            for directory, outranked in _directories(context).items():
                specs += [spec._replace(outranked=outranked) for spec in reader.read_directory(directory)]
        finally:
            # Even if a directory cannot be read: files must not be parsed again in each run.
            context.notes.save(NOTE, reader.notes)
        context.once[NOTE] = tuple(specs)
    found: tuple[ForeignSpec, ...] = context.once[NOTE]
    return found


def _directories(context: Context) -> dict[str, bool]:
    """Return the directories in which runtimes look for specifications, each with ForeignSpec.outranked of its files.

    These are CDI_DIRECTORIES, the only ones of nvidia-container-runtime, and the further ones of containerd.
    """

    def place(directory: str) -> str:
        try:
            return context.system.real_path(directory)
        except (OSError, ValueError):
            return posixpath.normpath(directory)

    found = dict.fromkeys(CDI_DIRECTORIES, False)
    places = {place(each) for each in CDI_DIRECTORIES}
    noted = tuple(context.notes.load(EFFECTIVE_NOTE).get("directories", ()))
    # From the last one, which counts if a directory is listed twice, perhaps through a link.
    for index, directory in reversed(tuple(enumerate(noted))):
        if directory.startswith("/") and place(directory) not in places:
            places.add(place(directory))
            found[posixpath.normpath(directory)] = CDI_DIRECTORIES[0] in noted[index + 1 :]
    return found


def refusal(system: System, own: OwnSpec, devices: Iterable[str], foreign: Foreign) -> Condition | None:
    """Return the condition if a specification with these devices must not be published; None if it may be.

    A device name that two files in one directory define is unusable. If another program's file defines one of these
    names, and the agent's file does not exist yet, publishing would take the device from pods that now get it from that
    other file. If the agent's file exists, the names that both files define are unusable already, so the agent's file
    may be replaced.
    """
    shared_names = [each for name in devices if (each := f"{own.kind}={name}") in foreign.same_directory]
    if not shared_names or system.exists(own.path):
        return None
    paths = tuple(dict.fromkeys(foreign.same_directory[each] for each in shared_names))
    return false(
        ConditionType.CDI_SPEC_CURRENT,
        Reason.NAMES_COLLIDE,
        f"{own.path} is not published, because pods already get {first_of(shared_names, SHOWN)} from "
        f"{first_quoted(paths, SHOWN)}; {_removal(own, paths)}",
    )


def with_foreign(condition: Condition, devices: Iterable[str], foreign: Foreign, own: OwnSpec) -> Condition:
    """Return the condition of a specification with these devices, adjusted to other programs' specifications. Pure."""
    if condition.status is not Status.TRUE:
        return condition
    if foreign.blocking:
        return false(condition.type, Reason.RUNTIME_BLOCKED, f"{first_of(foreign.blocking, SHOWN, '; ')}; remove it")
    own_names = [f"{own.kind}={name}" for name in devices]
    for paths_by_name, reason in ((foreign.same_directory, Reason.NAMES_COLLIDE), (foreign.preferred, Reason.SHADOWED)):
        if shared := [name for name in own_names if name in paths_by_name]:
            paths = tuple(dict.fromkeys(paths_by_name[name] for name in shared))
            names, where = first_of(shared, SHOWN), first_quoted(paths, SHOWN)
            why = f"{own.path} and {where} define the same names, so no pod can get {names}"
            if reason is Reason.SHADOWED:
                why = f"pods get {names} from {where} instead of {own.path}, whose directory has lower precedence"
            return false(condition.type, reason, f"{why}; {_removal(own, paths)}")
    by_path: dict[str, list[str]] = {}
    for name, path in {**foreign.same_directory, **foreign.preferred}.items():
        by_path.setdefault(path, []).append(name)
    further = [
        f"{quoted(path)} has further devices of this kind: {first_quoted(names, SHOWN)}"
        for path, names in by_path.items()
    ]
    shown = [first_of(further, SHOWN, "; ")] if further else []
    return condition._replace(message=printable("; ".join([condition.message, *shown, *foreign.remarks])))


def _removal(own: OwnSpec, paths: tuple[str, ...]) -> str:
    steps = [_advice(own)] if own.rival in paths else []
    if others := [path for path in paths if path != own.rival]:
        steps.append(f"remove {first_quoted(others, SHOWN)}, and stop what writes it")
    return "; ".join(steps)


def _advice(own: OwnSpec) -> str:
    if not own.rival_units:
        return f"remove {own.rival}, and stop running the program that wrote it"
    # Version 1.20.1 of the toolkit starts even disabled units, by a udev rule with SYSTEMD_WANTS, so they must be
    # masked. Version 1.19 has the units in /etc/systemd/system, where `systemctl mask` fails; disabling them is enough
    # there.
    units = " ".join(own.rival_units)
    return f"in the machine, `systemctl disable --now {units}; systemctl mask {units}`, then remove {own.rival}"


class _Reader:
    """Reads and checks the files, within the limits of one run."""

    def __init__(self, context: Context, noted: Mapping[str, dict[str, Any]]) -> None:
        self._system, self._owned, self._noted = context.system, context.owned, noted
        self._bytes, self._deadline = SIZE_OF_ALL, time.monotonic() + TIME_LIMIT
        self.notes: dict[str, dict[str, Any]] = {}
        """What this run knows, by path: a digest, the devices' names, and a fault."""

    def read_directory(self, directory: str) -> list[ForeignSpec]:
        """Return the specifications in a directory, if there is one."""
        if not self._system.is_directory(directory):
            return []
        names = self._system.some_entries(directory, NAMES_READ)
        paths = [f"{directory}/{name}" for name in names if name.endswith(SUFFIXES)]
        # Files that vendors' own tools may write come first: others cannot keep them from being read.
        rivals = [vendor.rival_spec for vendor in VENDORS.values()]
        paths = sorted(paths, key=lambda path: path not in rivals)
        paths = [path for path in paths if not self._owned.has(path)]
        specs = [self._read(path) for path in paths[:FILES] if _file_type(self._system, path) != stat.S_IFDIR]
        if len(paths) > FILES or len(names) == NAMES_READ:
            why = f"has more than {FILES} specifications of other programs, and the others are NotChecked"
            specs.insert(0, ForeignSpec(directory, fault=why, checked=False))
        return specs

    def _read(self, path: str) -> ForeignSpec:
        try:
            if _file_type(self._system, path) not in (None, stat.S_IFREG):
                why = "container runtimes that read it may hang, so no container with a GPU starts"
                return ForeignSpec(path, fault=f"is not a regular file: {why}", blocking=True)
            content = _content(self._system, path, max(0, min(SIZE_LIMIT, self._bytes)))
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
            if error.errno == errno.EFBIG:
                why = f"it is larger than {SIZE_LIMIT} bytes, or all files are larger than {SIZE_OF_ALL}"
                fault = f"is NotChecked: {why}; remove it if nothing needs it"
            return ForeignSpec(path, fault=fault, checked=False)
        self._bytes -= len(content)
        noted, digest = self._noted.get(path, {}), sha256(content)
        if noted.get("digest") != digest:
            if time.monotonic() > self._deadline:
                why = f"is NotChecked yet: a run takes {TIME_LIMIT:.0f} s at most to check new files"
                return ForeignSpec(path, fault=why, checked=False)
            try:
                listed, fault = _names(content), ""
            except DocumentError as error:
                listed, fault = [], f"cannot be read: {error}"
                # PyYAML may be installed later. The file is the same then.
                if isinstance(error.__cause__, ImportError):
                    return ForeignSpec(path, fault=fault, checked=False)
            except OSError as error:
                listed, fault = [], f"is NotChecked: {error.strerror}"
            noted = {"digest": digest, "devices": listed, "fault": fault}
        self.notes[path] = noted
        self._bytes -= len(json.dumps(noted))
        if noted["fault"]:
            return ForeignSpec(path, fault=noted["fault"], checked=False)
        devices = tuple(noted["devices"])
        # A specification without devices is invalid.
        return ForeignSpec(path, devices, "" if devices else "is not a valid CDI specification, so runtimes skip it")


def _names(content: bytes) -> list[str]:
    """Return the qualified names of a specification's devices. Raises DocumentError, or OSError for too many."""
    listed = device_names(content.decode(errors="surrogateescape"))
    if len(listed) > DEVICES or sum(map(len, listed)) > SIZE_LIMIT:
        raise OSError(errno.EFBIG, f"it has more than {DEVICES} devices, or their names are too long")
    return [name for name in listed if len(name) <= LONGEST_NAME] or [quoted(name) for name in listed[:1]]


def _content(system: System, path: str, limit: int) -> bytes:
    """Return the file's content. Raises OSError.

    A link is followed only to a world-readable file. Otherwise a pod that may write in the directory could link to a
    secret, and the names that are found in it, which the report contains, would quote it.
    """
    if system.read_link(path) is None:
        return system.read_untrusted(path, limit)[0]
    with system.open_public(system.real_path(path)) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", path)
    return content


def _file_type(system: System, path: str) -> int | None:
    """Return the type (stat.S_IFMT) of the file that a path leads to; None for a dangling link, which runtimes ignore.

    The kernel must not follow the link: a pod may link to /proc/PID/root, where a file system of the pod may hang. For
    a link that leads there, S_IFLNK is returned.
    """
    try:
        return stat.S_IFMT(system.owner(system.real_path(path))[0])
    except OSError as error:
        return stat.S_IFLNK if error.errno == errno.EXDEV else None
