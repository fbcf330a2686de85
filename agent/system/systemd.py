"""Calls to PID 1 on the system bus, org.freedesktop.systemd1(5).

A `path` is that of a unit's object on the bus (ListedUnit.path). Any function may raise BusError, also if an
answer does not have the documented type: systemd promises that these types do not change.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar, cast

from agent.model.errors import BusAnswerError
from agent.model.facts import DeviceAllow
from agent.system.files import System

T = TypeVar("T", str, bool, int, list[object])

SYSTEMD = "org.freedesktop.systemd1"
SYSTEMD_OBJECT = "/org/freedesktop/systemd1"
SYSTEMD_MANAGER = f"{SYSTEMD}.Manager"
GET = "org.freedesktop.DBus.Properties.Get"
CHANGE_LIMIT = 30.0
"""Seconds to wait for the answer to a change: PID 1 does not answer while it reloads its units."""

STARTS = ("start", "restart")
"""Types of jobs that start an inactive unit. systemd replaces other types that may start a unit by one of these
(job_type_collapse in job.c). An inactive unit may also have a stop job: machined requests one if systemd had to kill
the machine."""

RESTARTS = ("auto-restart", "auto-restart-queued")
"""Values of SubState while systemd waits before it starts a service again (Restart=, RestartSec=). ActiveState is then
`activating`. systemd has the second one since version 254."""


class ListedUnit(NamedTuple):
    """The state of a unit, the path of its object on the bus, and whether systemd is about to start it."""

    load_state: str
    active_state: str
    path: str
    restarts: bool
    """Whether systemd waits before it starts the service again (RESTARTS)."""
    starts: bool
    """Whether the unit has a job that starts it (STARTS)."""


@contextmanager
def _documented(what: str) -> Iterator[None]:
    """Raise BusAnswerError where an answer does not have the documented type."""
    try:
        yield
    except (TypeError, ValueError, IndexError) as error:
        raise BusAnswerError(f"{what}: unexpected answer: {error}") from error


def list_units(names: Sequence[str], system: System) -> list[ListedUnit]:
    """Return the state of each unit, in the order of `names`."""
    method = f"{SYSTEMD_MANAGER}.ListUnitsByNames"
    with _documented(method):
        (entries,) = cast(Any, system.call(SYSTEMD, SYSTEMD_OBJECT, method, list(names), signature="as"))
        # An entry has no alias, so units are known by their position.
        return [_listed(entry) for _, entry in zip(names, entries, strict=True)]


def _listed(entry: object) -> ListedUnit:
    """Return the unit in an entry of the list. Raises TypeError.

    An entry has name, description, LoadState, ActiveState, SubState, followed unit and path, and its job's id, type and
    path (ssssssouso). The job's type is empty without a job.
    """
    match entry:
        case (str(), str(), str(load), str(active), str(sub), str(), str(path), int(), str(job), *_):
            return ListedUnit(load, active, path, sub in RESTARTS, job in STARTS)
        case _:
            raise TypeError(repr(entry)[:200])


def get(path: str, name: str, kind: type[T], system: System) -> T:
    """Return a property such as `Unit.NeedDaemonReload` of the object at a path (org.freedesktop.systemd1(5))."""
    interface, _, member = name.rpartition(".")
    with _documented(f"{member} of {path}"):
        ((_, value),) = cast(Any, system.call(SYSTEMD, path, GET, f"{SYSTEMD}.{interface}", member))
        if not isinstance(value, kind):
            raise TypeError(repr(value))
        return value


def device_allow(path: str, system: System) -> tuple[DeviceAllow, ...]:
    """Return the unit's DeviceAllow entries in force, as systemd lists them: the last one in the unit's files first."""
    allowed = []
    for entry in get(path, "Service.DeviceAllow", list, system):
        match entry:
            case (str(node), str(permissions)):
                allowed.append(DeviceAllow(node, permissions))
            case _:
                raise BusAnswerError(f"DeviceAllow of {path}: unexpected entry {entry!r}")
    return tuple(allowed)


def set_device_allow(unit: str, allow: Iterable[DeviceAllow], system: System) -> None:
    """Replace the unit's whole DeviceAllow= list.

    Assigning a list only adds its entries, so an empty list, which removes all entries, is assigned first. systemd
    applies both assignments of one SetUnitProperties call at once: no permission is missing in between. A drop-in and a
    daemon-reload would change nothing for a running unit (systemd 257).
    """
    entries = [(entry.node, entry.permissions or "rwm") for entry in allow]
    properties = [("DeviceAllow", ("a(ss)", [])), ("DeviceAllow", ("a(ss)", entries))]
    method, runtime = f"{SYSTEMD_MANAGER}.SetUnitProperties", True
    system.call(SYSTEMD, SYSTEMD_OBJECT, method, unit, runtime, properties, signature="sba(sv)", timeout=CHANGE_LIMIT)


def queue_job(verb: Literal["StartUnit", "StopUnit"], unit: str, system: System) -> str:
    """Start or stop a unit without waiting. Return the path of the job's object, for `is_queued`."""
    # With "fail", the job does not replace the jobs of the host's shutdown.
    with _documented(f"{verb} {unit}"):
        (job,) = system.call(SYSTEMD, SYSTEMD_OBJECT, f"{SYSTEMD_MANAGER}.{verb}", unit, "fail")
        if not isinstance(job, str):
            raise TypeError(repr(job))
        return job


def is_queued(job: str, system: System) -> bool:
    """Return whether the job is not finished yet."""
    try:
        system.call(SYSTEMD, job, GET, f"{SYSTEMD}.Job", "State")
    except BusAnswerError:
        # The object of a finished job no longer exists.
        return False
    return True


# Calls to systemd-machined on the system bus, org.freedesktop.machine1(5). They raise BusError.

MACHINED = "org.freedesktop.machine1"
MACHINED_OBJECT = "/org/freedesktop/machine1"
MACHINED_MANAGER = f"{MACHINED}.Manager"


def bind_mount(machine: str, path: str, *, read_only: bool, system: System) -> None:
    """Bind a node or directory to the same path in the machine, as `machinectl bind` does.

    A second call for the same path would mount over the first bind.
    """
    make_directories = True
    arguments = (machine, path, path, read_only, make_directories)
    method = f"{MACHINED_MANAGER}.BindMountMachine"
    system.call(MACHINED, MACHINED_OBJECT, method, *arguments, signature="sssbb", timeout=CHANGE_LIMIT)
