"""Which processes have devices open or mapped. By their numbers: the paths differ between host, machine and pod.

By the looker's own /proc: the host's shows the processes of all machines, a machine's its own with those of its pods.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from agent.handoff import one_line
from agent.system.deadlines import bounded
from agent.system.files import System

Number = tuple[int, int]
"""Major and minor."""

PROCESS_LIMIT = 2.0
"""Seconds for one process: of one that hangs in a driver's page fault the kernel cannot list the mappings."""
MAPS_LIMIT = 64 << 20
"""Bytes of /proc/PID/maps: CUDA programs have tens of thousands of mappings."""

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
    """What a look found."""

    holders: tuple[Holder, ...] = ()
    unseen: tuple[str, ...] = ()
    """Processes that could not be looked at, one sentence each: they may hold it too."""

    def __bool__(self) -> bool:
        return bool(self.holders or self.unseen)


def find_holders(system: System, wanted: Mapping[Number, str]) -> Held:
    """Of every process, its first thread's descriptors and its mappings. `wanted`: names of the devices by number.

    Raises OSError when /proc itself cannot be listed.
    """
    holders, unseen = [], []
    mapped: dict[tuple[str, str], Number | None] = {}
    for pid in sorted(int(name) for name in system.entries("/proc") if name.isdecimal()):
        try:
            found = bounded(f"/proc/{pid}", partial(_look, system, pid, wanted, mapped), PROCESS_LIMIT)
        except (FileNotFoundError, ProcessLookupError):
            # It ended meanwhile.
            continue
        except OSError as error:
            unseen.append(f"PID {pid} cannot be looked at: {error.strerror or error}")
            continue
        if found:
            holders.append(found)
    return Held(tuple(holders), tuple(unseen))


def _look(
    system: System, pid: int, wanted: Mapping[Number, str], mapped: dict[tuple[str, str], Number | None]
) -> Holder | None:
    numbers = _opened(system, pid) | _mapped(system, pid, mapped)
    paths = tuple(sorted(wanted[number] for number in numbers & wanted.keys()))
    if not paths:
        return None
    status = dict(line.split(":", 1) for line in _text(system, f"/proc/{pid}/status").splitlines() if ":" in line)
    # The process chooses its name, which may be any 15 bytes.
    command = one_line(_text(system, f"/proc/{pid}/comm"))
    # cgroup v2 has one line, `0::PATH` (cgroups(7)).
    groups = [line[3:] for line in _text(system, f"/proc/{pid}/cgroup").splitlines() if line.startswith("0::")]
    # The looker's own number comes first; kernels without PID namespaces leave the line out.
    inner = tuple(int(each) for each in status.get("NSpid", "").split()[1:])
    return Holder(pid, inner, command, one_line("".join(groups)), paths)


def _opened(system: System, pid: int) -> set[Number]:
    numbers = set()
    for name in system.entries(f"/proc/{pid}/fd"):
        try:
            number = system.device_behind(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
        if number:
            numbers.add(number)
    return numbers


def _mapped(system: System, pid: int, known: dict[tuple[str, str], Number | None]) -> set[Number]:
    """A mapping outlives its descriptor. `known`: by file system and inode, what was found out in this look."""
    numbers = set()
    for line in system.read(f"/proc/{pid}/maps", MAPS_LIMIT).decode(errors="replace").splitlines():
        # proc_pid_maps(5): address, permissions, offset, device of the file system, inode, path.
        fields = line.split(maxsplit=5)
        if len(fields) < 5 or fields[4] == "0":
            continue
        file = (fields[3], fields[4])
        if file not in known:
            # map_files has the same addresses without leading zeros.
            first, last = (int(each, 16) for each in fields[0].split("-"))
            try:
                known[file] = system.device_behind(f"/proc/{pid}/map_files/{first:x}-{last:x}")
            except FileNotFoundError:
                continue
        if number := known[file]:
            numbers.add(number)
    return numbers


def _text(system: System, path: str) -> str:
    return system.read(path).decode(errors="replace")
