"""Which processes have devices open or mapped. By their numbers: the paths differ between host, machine and pod.

By the looker's own /proc: the host's shows the processes of all machines, a machine's its own with those of its pods.
"""

import errno
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from agent.handoff import one_line
from agent.system.deadlines import bounded
from agent.system.files import System

Number = tuple[int, int]
"""Major and minor."""

PROCESS_LIMIT = 2.0
"""Seconds for one process: of one that hangs in a driver's page fault the kernel cannot list the mappings."""
LEAST = 0.05
"""Seconds for one process where others hang: most are looked at in a thousandth."""
LOOK_LIMIT = 20.0
"""Seconds for all processes' descriptors, and again for their mappings."""

MAPPING = re.compile(
    rb"(?P<first>[0-9a-f]+)-(?P<last>[0-9a-f]+) \S{4} [0-9a-f]+ (?P<device>[0-9a-f]+:[0-9a-f]+) (?P<inode>[0-9]+)"
)
"""What a line of /proc/PID/maps begins with (proc_pid_maps(5)); behind it comes the path, of any bytes but newlines."""

MACHINE = re.compile(r"/systemd-nspawn@(?P<name>[^/@]+)\.service(?:/|$)")
"""systemd's unit of a machine, in a control group's path."""
POD = re.compile(r"[-/]pod(?P<uid>[0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12})[./]")
"""The kubelet's group of a pod: `kubepods-besteffort-pod<UID>.slice`, with `_` for `-`, or `kubepods/pod<UID>`.

(pkg/kubelet/cm/pod_container_manager_linux.go; the UID of a static pod has no hyphens.)
"""
CONTAINER = re.compile(r"[-/](?P<id>[0-9a-f]{64})(?:\.scope)?(?:/|$)")
"""A container's group, `cri-containerd-<id>.scope` or `<id>`."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One process."""

    pid: int
    """As the looker sees it."""
    inner_pids: tuple[int, ...]
    """In the PID namespaces below: of a pod's process, seen from the host, in its machine and in its pod."""
    command: str
    cgroup: str
    paths: tuple[str, ...]
    """What it has open, by the looker's names."""

    @property
    def machine(self) -> str:
        """Empty for a process of the looker's own system."""
        found = MACHINE.search(self.cgroup)
        return found["name"] if found else ""

    @property
    def pod_uid(self) -> str:
        """Empty outside of a Kubernetes pod."""
        found = POD.search(self.cgroup)
        return found["uid"].replace("_", "-") if found else ""

    @property
    def container(self) -> str:
        """The whole id; empty outside of a container."""
        found = CONTAINER.search(self.cgroup)
        return found["id"] if found else ""

    def describe(self, pod: str = "") -> str:
        """One line. `pod`: its name, where the looker knows it."""
        parts = [f"PID {self.pid} ({self.command})"]
        if self.machine:
            inner = f" (there PID {self.inner_pids[0]})" if self.inner_pids else ""
            parts.append(f"machine {self.machine}{inner}")
        if pod or self.pod_uid:
            parts.append(f"pod {pod or self.pod_uid}")
        if self.container and not pod:
            parts.append(f"container {self.container}")
        return f"{', '.join(parts)}: {', '.join(self.paths)}"


@dataclass(frozen=True, slots=True)
class Held:
    """What a look found; true where somebody is known to hold something."""

    holders: tuple[Holder, ...] = ()
    unseen: tuple[str, ...] = ()
    """Processes that could not be looked at in full, one sentence each: to be told, as they may hold it too.

    They decide nothing: any pod can have a process that nobody can look at, for ever.
    """

    def __bool__(self) -> bool:
        return bool(self.holders)


def find_holders(system: System, wanted: Mapping[Number, str]) -> Held:
    """Of every process, all threads' descriptors and its mappings. `wanted`: names of the devices by number.

    Raises OSError when /proc itself cannot be listed.
    """
    pids = sorted(int(name) for name in system.entries("/proc") if name.isdecimal())
    return _Look(system, wanted, pids).run()


class _Look:
    """One look at all processes: descriptors first, which cost no wait, so that mappings that do can hide none."""

    def __init__(self, system: System, wanted: Mapping[Number, str], pids: list[int]) -> None:
        self._system, self._wanted, self._pids = system, wanted, pids
        self._found: dict[int, set[Number]] = {pid: set() for pid in pids}
        self._unseen: dict[int, str] = {}

    def run(self) -> Held:
        self._each("descriptors", self._opened, self._pids)
        self._each("mappings", self._mapped, self._pids)
        holders: dict[int, Holder] = {}
        self._each("names", lambda pid, _: self._name(pid, holders), [pid for pid in self._pids if self._found[pid]])
        unseen = {pid: why for pid, why in sorted(self._unseen.items()) if pid not in holders}
        return Held(tuple(holders.values()), tuple(f"PID {pid} cannot be looked at: {unseen[pid]}" for pid in unseen))

    def _each(self, what: str, look: Callable[[int, float], None], pids: list[int]) -> None:
        """For half as long with each process that hangs, and for LOOK_LIMIT at most in all."""
        end, limit = time.monotonic() + LOOK_LIMIT, PROCESS_LIMIT
        for pid in pids:
            deadline = min(time.monotonic() + limit, end)
            try:
                seconds = deadline - time.monotonic()
                if seconds <= 0:
                    raise TimeoutError(errno.ETIMEDOUT, f"others took all of the {LOOK_LIMIT:.0f} s")
                bounded(f"/proc/{pid}: {what}", partial(look, pid, deadline), seconds)
            except (FileNotFoundError, ProcessLookupError):
                # It ended meanwhile.
                continue
            except TimeoutError as error:
                limit = max(limit / 2, LEAST)
                self._unseen.setdefault(pid, error.strerror or str(error))
            except OSError as error:
                self._unseen.setdefault(pid, error.strerror or str(error))

    def _opened(self, pid: int, deadline: float) -> None:
        """Other threads only where the first has none open: they may have descriptors of their own.

        CLONE_FILES of clone(2) and unshare(2); and a first thread that has ended has none any more.
        """
        for thread in self._threads(pid):
            directory = f"/proc/{pid}/task/{thread}/fd"
            try:
                names = self._system.entries(directory)
            except (FileNotFoundError, ProcessLookupError):
                continue
            for name in names:
                _in_time(deadline)
                self._add(pid, f"{directory}/{name}")
            if self._found[pid]:
                return

    def _mapped(self, pid: int, deadline: float) -> None:
        """A mapping outlives its descriptor. All threads have the same memory, but those that have ended."""
        for thread in self._threads(pid):
            try:
                if self._mapped_by(pid, thread, deadline):
                    return
            except (FileNotFoundError, ProcessLookupError):
                # ESRCH: without memory, as one that has ended, or the kernel's own.
                continue

    def _mapped_by(self, pid: int, thread: int, deadline: float) -> bool:
        """Whether the thread has memory."""
        has_memory, known = False, set()
        for line in self._system.lines(f"/proc/{pid}/task/{thread}/maps"):
            _in_time(deadline)
            has_memory, mapping = True, MAPPING.match(line)
            if not mapping:
                raise OSError(errno.EBADMSG, f"a line of its mappings has another form: {line[:80]!a}")
            # CUDA programs have tens of thousands of mappings of the same few files.
            file = (mapping["device"], mapping["inode"], line[mapping.end() :])
            if mapping["inode"] == b"0" or file in known:
                continue
            # map_files has the same addresses without leading zeros; /proc lists only processes, and has each thread.
            first, last = (int(mapping[each], 16) for each in ("first", "last"))
            if self._add(pid, f"/proc/{thread}/map_files/{first:x}-{last:x}"):
                known.add(file)
        return has_memory

    def _threads(self, pid: int) -> list[int]:
        """The first thread, whose number is the process's, comes first."""
        return sorted((int(name) for name in self._system.entries(f"/proc/{pid}/task")), key=lambda each: each != pid)

    def _add(self, pid: int, link: str) -> bool:
        """Whether there is still something behind the link."""
        try:
            number = self._system.device_behind(link)
        except FileNotFoundError:
            return False
        if number and number in self._wanted:
            self._found[pid].add(number)
        return True

    def _name(self, pid: int, holders: dict[int, Holder]) -> None:
        paths = tuple(sorted(self._wanted[number] for number in set(self._found[pid])))
        # Lines that hold what others chose end with a newline alone, which the kernel escapes there.
        status = dict(line.split(":", 1) for line in self._lines(pid, "status") if ":" in line)
        # The process chooses its name, which may be any 15 bytes.
        command = one_line(_text(self._system, f"/proc/{pid}/comm"))
        # cgroup v2 has one line, `0::PATH` (cgroups(7)).
        groups = [line[3:] for line in self._lines(pid, "cgroup") if line.startswith("0::")]
        # The looker's own number comes first; kernels without PID namespaces leave the line out.
        inner = tuple(int(each) for each in status.get("NSpid", "").split()[1:])
        holders[pid] = Holder(pid, inner, command, one_line("".join(groups)), paths)

    def _lines(self, pid: int, name: str) -> list[str]:
        return _text(self._system, f"/proc/{pid}/{name}").split("\n")


def _in_time(deadline: float) -> None:
    """Ends a look by itself that is slow, and does not hang. Raises TimeoutError."""
    if time.monotonic() > deadline:
        raise TimeoutError(errno.ETIMEDOUT, "it has too much open or mapped for the time")


def _text(system: System, path: str) -> str:
    return system.read(path).decode(errors="replace")
