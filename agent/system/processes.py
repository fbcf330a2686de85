"""Finds the processes that have devices open or mapped.

Devices are compared by number, because their paths differ between host, machine and pod. The host's /proc has the
processes of all machines; a machine's /proc has its own and those of its pods.
"""

import contextlib
import errno
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from agent.model.text import one_line, quoted
from agent.system.deadlines import bounded
from agent.system.files import System

Number = tuple[int, int]
"""Major and minor."""

PROCESS_LIMIT = 2.0
"""Seconds to search one process. While a process hangs in a driver's page fault, the search of its mappings hangs too,
because the kernel cannot list them."""
SHORTEST = 0.05
"""Seconds to search one process at least, however many others hang, unless SEARCH_LIMIT ends first. Most processes need
a thousandth of that."""
SEARCH_LIMIT = 20.0
"""Seconds for each of the three steps over all processes: their descriptors, their mappings, their names."""

MAPPING = re.compile(
    rb"(?P<first>[0-9a-f]+)-(?P<last>[0-9a-f]+) \S{4} [0-9a-f]+ (?P<device>[0-9a-f]+:[0-9a-f]+) (?P<inode>[0-9]+)"
)
"""The start of a line of /proc/PID/maps (proc_pid_maps(5)). The path follows, which may have any bytes but newlines."""

MACHINE = re.compile(r"/systemd-nspawn@(?P<name>[^/@]+)\.service(?:/|$)")
"""Matches the unit of a machine in a control group's path."""
POD = re.compile(r"[-/]pod(?P<uid>[0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12})[./]")
"""Matches a pod in a control group's path: `kubepods-besteffort-pod<UID>.slice`, with `_` for `-`, or
`kubepods/pod<UID>` (pkg/kubelet/cm/pod_container_manager_linux.go). The UID of a static pod has no hyphens."""
CONTAINER = re.compile(r"[-/](?P<id>[0-9a-f]{64})(?:\.scope)?(?:/|$)")
"""Matches a container in a control group's path: `cri-containerd-<id>.scope` or `<id>`."""


class Holder(NamedTuple):
    """One process that holds a device."""

    pid: int
    inner_pids: tuple[int, ...]
    """The process's ids in nested PID namespaces. Seen from the host, a pod's process has one in its machine and one in
    its pod."""
    command: str
    cgroup: str
    paths: tuple[str, ...]
    """The devices that the process has open, by the names that the caller of `find_holders` uses for them."""

    @property
    def machine(self) -> str:
        """The process's machine; empty if it runs outside machines."""
        found = MACHINE.search(self.cgroup)
        return found["name"] if found else ""

    @property
    def pod_uid(self) -> str:
        found = POD.search(self.cgroup)
        return found["uid"].replace("_", "-") if found else ""

    @property
    def container(self) -> str:
        """The full id of the process's container; empty outside a container."""
        found = CONTAINER.search(self.cgroup)
        return found["id"] if found else ""

    def describe(self, pod: str = "") -> str:
        """Return one line about the process. `pod` is the pod's name, if known."""
        parts = [f"PID {self.pid} ({quoted(self.command)})"]
        if self.machine:
            inner = f" (PID {self.inner_pids[0]} there)" if self.inner_pids else ""
            parts.append(f"machine {self.machine}{inner}")
        if pod or self.pod_uid:
            parts.append(f"pod {pod or self.pod_uid}")
        if self.container and not pod:
            parts.append(f"container {self.container}")
        return f"{', '.join(parts)}: {', '.join(self.paths)}"


class Held(NamedTuple):
    """The result of a search. As a bool, it is True if a process has one of the devices open."""

    holders: tuple[Holder, ...] = ()
    unseen: tuple[str, ...] = ()
    """Other processes that could not be searched completely, one sentence each. They may have a device open too, so
    commands show them. They do not stop a command, because any pod can have a process that can never be searched."""

    def __bool__(self) -> bool:
        return bool(self.holders)


def find_holders(system: System, wanted: Mapping[Number, str]) -> Held:
    """Return the processes that have one of the devices open or mapped. `wanted` has the devices' names by number.

    Raises OSError if /proc itself cannot be listed.
    """
    pids = sorted(int(name) for name in system.entries("/proc") if name.isdecimal())
    return _Search(system, wanted).run(pids)


class _Search:
    """One search of all processes.

    The descriptors of all processes are read before the first mappings, because only reading mappings may block.
    """

    def __init__(self, system: System, wanted: Mapping[Number, str]) -> None:
        self._system, self._wanted = system, wanted
        self._found: dict[int, set[Number]] = {}
        self._holders: dict[int, Holder] = {}
        self._unseen: dict[int, str] = {}

    def run(self, pids: list[int]) -> Held:
        self._for_each("descriptors", self._search_descriptors, pids)
        self._for_each("mappings", self._search_mappings, pids)
        self._for_each("names", self._add_holder, [pid for pid in pids if pid in self._found])
        unseen = {pid: why for pid, why in sorted(self._unseen.items()) if pid not in self._holders}
        return Held(tuple(self._holders.values()), tuple(f"cannot inspect PID {pid}: {unseen[pid]}" for pid in unseen))

    def _for_each(self, what: str, search: Callable[[int, float], None], pids: list[int]) -> None:
        """Call `search` for each process, with a deadline. Each missed deadline halves the time for later processes.

        SEARCH_LIMIT bounds the time for all processes. A process whose search fails is recorded as unseen.
        """
        end, limit = time.monotonic() + SEARCH_LIMIT, PROCESS_LIMIT
        for pid in pids:
            deadline = min(time.monotonic() + limit, end)
            try:
                seconds = deadline - time.monotonic()
                if seconds <= 0:
                    why = f"searching other processes took the whole {SEARCH_LIMIT:.0f} s"
                    raise TimeoutError(errno.ETIMEDOUT, why)
                bounded(f"/proc/{pid}: {what}", partial(search, pid, deadline), seconds)
            except (FileNotFoundError, ProcessLookupError):
                # The process has exited in the meantime.
                continue
            except OSError as error:
                if isinstance(error, TimeoutError):
                    limit = max(limit / 2, SHORTEST)
                self._unseen.setdefault(pid, error.strerror or str(error))

    def _search_descriptors(self, pid: int, deadline: float) -> None:
        """Search the descriptors of a process: first those of its main thread, which most threads share.

        Other threads may have descriptors of their own (CLONE_FILES of clone(2) and unshare(2)), and a main thread that
        has exited has none.
        """
        for thread in self._threads(pid):
            directory = f"/proc/{pid}/task/{thread}/fd"
            try:
                names = self._system.entries(directory)
            except (FileNotFoundError, ProcessLookupError):
                continue
            for name in names:
                _check_deadline(deadline)
                self._add(pid, f"{directory}/{name}")
            if pid in self._found:
                return

    def _search_mappings(self, pid: int, deadline: float) -> None:
        """Search the mappings of a process, which all its threads with memory share.

        A device stays mapped when its descriptor is closed.
        """
        for thread in self._threads(pid):
            inspected = set()
            # A thread that has exited or has no memory has no line: some kernels return ESRCH, others an empty file.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                line = b""
                for line in self._system.lines(f"/proc/{pid}/task/{thread}/maps"):
                    _check_deadline(deadline)
                    mapping = MAPPING.match(line)
                    if not mapping:
                        raise OSError(errno.EBADMSG, f"a line of its mappings has an unknown format: {line[:80]!a}")
                    # Each file is inspected once: CUDA programs have tens of thousands of mappings of the same few.
                    file = (mapping["device"], mapping["inode"], line[mapping.end() :])
                    if mapping["inode"] == b"0" or file in inspected:
                        continue
                    # Names in map_files have no leading zeros. /proc/PID/task/TID has no map_files, but /proc/TID has,
                    # although /proc does not list threads.
                    first, last = (int(mapping[each], 16) for each in ("first", "last"))
                    if self._add(pid, f"/proc/{thread}/map_files/{first:x}-{last:x}"):
                        inspected.add(file)
                if line:
                    return

    def _threads(self, pid: int) -> list[int]:
        return sorted((int(name) for name in self._system.entries(f"/proc/{pid}/task")), key=lambda each: each != pid)

    def _add(self, pid: int, link: str) -> bool:
        """Record the device that the link leads to, if it is wanted. Return whether the link still exists."""
        try:
            number = self._system.device_behind(link)
        except FileNotFoundError:
            return False
        if number and number in self._wanted:
            self._found.setdefault(pid, set()).add(number)
        return True

    def _add_holder(self, pid: int, deadline: float) -> None:
        status, command, cgroup = (
            self._system.read(f"/proc/{pid}/{name}").decode(errors="replace") for name in ("status", "comm", "cgroup")
        )
        # The process chooses some fields of its status, but the kernel escapes newlines, so each line is a whole field.
        fields = dict(line.split(":", 1) for line in status.split("\n") if ":" in line)
        # cgroup v2 has one line, `0::PATH` (cgroups(7)).
        groups = [line[3:] for line in cgroup.split("\n") if line.startswith("0::")]
        # The first id in the line NSpid is the one in this PID namespace. Kernels without PID namespaces omit the line.
        inner = tuple(int(each) for each in fields.get("NSpid", "").split()[1:])
        paths = tuple(sorted(self._wanted[number] for number in set(self._found[pid])))
        # The process chooses its name, which may be any 15 bytes.
        self._holders[pid] = Holder(pid, inner, one_line(command), one_line("".join(groups)), paths)


def _check_deadline(deadline: float) -> None:
    """Raise TimeoutError if the deadline has passed: a search may be slow without hanging in one call."""
    if time.monotonic() > deadline:
        raise TimeoutError(errno.ETIMEDOUT, "it has too many open or mapped files for the time limit")
