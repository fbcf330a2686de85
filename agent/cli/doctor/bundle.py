"""`unbounded-agent doctor --bundle`: writes an archive that helps to understand a fault, without recognised secrets.

What goes in is on a list: the agent's own files, and named files, commands and fields of others. From all of it,
secrets that are recognised are removed (agent.cli.doctor.redaction).
"""

import fnmatch
import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial

from msgspec import to_builtins

from agent.cli.doctor.redaction import REMOVED, redacted
from agent.cli.doctor.words import Report, as_object, in_words
from agent.cli.documents import document
from agent.cli.parser import VERSION
from agent.cli.status import as_dated, as_json
from agent.host.reconcile import Reconciler
from agent.host.vendors import HOST_VENDORS
from agent.model.errors import CommandError
from agent.model.paths import (
    CONDITIONS,
    CONFIG_FILE,
    REPORT_NAME,
    STATE,
    granted_file,
    handoff_file,
    live_file,
    machine_unit,
    nspawn_file,
    report_directory,
    unit_drop_in,
)
from agent.model.text import rfc3339
from agent.system.files import System

FILE_LIMIT = 2 << 20
"""Bytes of the largest file in the archive. Of a longer text, only the end is kept."""
TOTAL_LIMIT = 32 << 20
"""Bytes of all files together, before compression."""
COMMAND_LIMIT = 30.0
"""Seconds for one command."""
LINES = "5000"
"""Lines of a log that are kept."""

FILES = (
    "/etc/os-release",
    "/proc/version",
    "/proc/devices",
    "/proc/modules",
    "/proc/meminfo",
    CONFIG_FILE,
    CONDITIONS,
)
CMDLINE, MOUNTS = "/proc/cmdline", "/proc/mounts"
PARAMETERS = re.compile(
    r"""(?x)(?:root|rootfstype|rootflags|ro|rw|init|console|BOOT_IMAGE|mem|numa.*|hugepages.*|hugepagesz|isolcpus|lsm
    |video|efi|clocksource|tsc|idle|mitigations|security|apparmor|selinux|cgroup.*|default_hugepagesz|systemd\.unified.*
    |.*iommu.*|pci.*|acpi.*|kvm.*|vfio.*|drm.*|modprobe.*|module.*|rd\.driver\..*)"""
)
"""Kernel parameters whose values are included, besides those of the vendors' modules. Others may be secrets of any
form."""
MODULES = tuple(name for vendor in HOST_VENDORS for name in (*vendor.drivers, *vendor.module_names))
MOUNT_OPTIONS = {
    "ro",
    "rw",
    "noexec",
    "exec",
    "nodev",
    "dev",
    "nosuid",
    "suid",
    "relatime",
    "noatime",
    "bind",
    "nofail",
}
"""Options of mounts that are included."""
UNIT_PROPERTIES = (
    *("Id", "LoadState", "ActiveState", "SubState", "Result", "FragmentPath", "DropInPaths", "NeedDaemonReload"),
    *("ExecMainStatus", "ExecMainCode", "MainPID", "NRestarts", "ActiveEnterTimestamp", "InactiveEnterTimestamp"),
    *("DevicePolicy", "DeviceAllow", "Requires", "Wants", "After", "MemoryMax", "TasksMax", "UnitFileState"),
)
"""What is included of a machine's unit: its environment and its arguments may have secrets."""
SERVICES = tuple(service for vendor in HOST_VENDORS for service in vendor.services)
COMMANDS = {
    "units": ("systemctl", "list-units", "--all", "--no-pager", "unbounded-agent*", "systemd-nspawn@*", *SERVICES),
    "service.log": ("journalctl", "-u", "unbounded-agent*", "-n", LINES, "--no-pager", "-o", "short-iso"),
    "kernel.log": ("journalctl", "-k", "-b", "-n", LINES, "--no-pager", "-o", "short-iso"),
    "lspci": ("lspci", "-Dnnk"),
    "disks": ("df", "-h"),
    "ldconfig": ("ldconfig", "-p"),
}
MACHINE_COMMANDS = {
    "unit": ("systemctl", "show", "--no-pager", f"--property={','.join(UNIT_PROPERTIES)}", "{unit}"),
    "start.log": (
        "journalctl",
        "-b",
        "-u",
        "{unit}",
        "-u",
        "unbounded-agent-prepare@{machine}",
        "-n",
        LINES,
        "--no-pager",
    ),
    "machine-half.log": ("journalctl", "-M", "{machine}", "-b", "-u", "unbounded-agent*", "-n", LINES, "--no-pager"),
    "containerd.log": ("journalctl", "-M", "{machine}", "-b", "-u", "containerd", "-n", LINES, "--no-pager"),
    "kubelet.log": ("journalctl", "-M", "{machine}", "-b", "-u", "kubelet", "-n", LINES, "--no-pager"),
}
RECORDS = ".json"
"""How the names of the agent's records in STATE end, which are included."""


def default_name(host: str, now: float) -> str:
    """Return a file name for a bundle."""
    return f"unbounded-agent-{host}-{rfc3339(now).replace(':', '')}.tar.gz"


def write_bundle(path: str, report: Report, reconciler: Reconciler) -> tuple[str, ...]:
    """Write the archive, which only its owner may read. Return sentences on what was left out. Raises OSError."""
    now = time.time()
    left_out: list[str] = []
    buffer, total = io.BytesIO(), 0
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, read in _contents(report, reconciler):
            try:
                text = read()
            except (CommandError, OSError) as error:
                left_out.append(f"{name}: {error}")
                continue
            data = redacted(text).encode(errors="replace")[-FILE_LIMIT:]
            total += len(data)
            if total > TOTAL_LIMIT:
                left_out.append(f"{name} and what would follow: the archive is limited to {TOTAL_LIMIT >> 20} MiB")
                break
            _add(archive, name, data, now)
        _add(archive, "left-out.txt", "".join(f"{each}\n" for each in left_out).encode(errors="replace"), now)
    reconciler.system.write(path, buffer.getvalue(), 0o600)
    return tuple(left_out)


def _add(archive: tarfile.TarFile, name: str, data: bytes, now: float) -> None:
    member = tarfile.TarInfo(f"unbounded-agent/{name.lstrip('/')}")
    member.size, member.mtime, member.mode = len(data), int(now), 0o600
    archive.addfile(member, io.BytesIO(data))


def _contents(report: Report, reconciler: Reconciler) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each file in the archive, with a function that returns the file's text."""
    now, system = time.time(), reconciler.system
    facts, planned, difference = reconciler.preview()
    machines = as_dated(reconciler.evaluate(facts, planned, difference), system)
    steps = "".join(f"{each.describe()}\n" for each in difference.actions)
    yield "version.txt", lambda: f"{VERSION}\n"
    yield "doctor.txt", lambda: "\n".join(in_words(report))
    yield "doctor.json", lambda: document("doctor", now, as_object(report))
    yield "status.json", lambda: as_json(machines, facts, now)
    yield "plan.txt", lambda: steps
    yield "settings.json", lambda: json.dumps(to_builtins(reconciler.config), indent=1)
    for path in FILES:
        yield f"files{path}", partial(system.read_text, path)
    yield f"files{CMDLINE}", lambda: _parameters(system.read_text(CMDLINE))
    yield f"files{MOUNTS}", lambda: _mounts(system.read_text(MOUNTS))
    for path in _records(system):
        yield f"files{path}", partial(_text, system, path)
    for name, argv in COMMANDS.items():
        yield f"commands/{name}", partial(system.run, *argv, timeout=COMMAND_LIMIT)
    for each in machines:
        yield from _machine_contents(each.name, system)


def _machine_contents(machine: str, system: System) -> Iterator[tuple[str, Callable[[], str]]]:
    for name, argv in MACHINE_COMMANDS.items():
        filled = [each.format(machine=machine, unit=machine_unit(machine)) for each in argv]
        yield f"machines/{machine}/{name}", partial(system.run, *filled, timeout=COMMAND_LIMIT)
    report = f"{report_directory(machine)}/{REPORT_NAME}"
    files = (
        nspawn_file(machine),
        unit_drop_in(machine),
        handoff_file(machine),
        granted_file(machine),
        live_file(machine),
    )
    for path in (*files, report):
        yield f"files{path}", partial(_text, system, path)


def _text(system: System, path: str) -> str:
    # Read the file as untrusted: it may be a machine's report, which processes in the machine can write.
    data, _ = system.read_untrusted(path)
    return data.decode(errors="replace")


def _records(system: System) -> Iterator[str]:
    try:
        names = system.entries(STATE)
    except OSError:
        return
    yield from (f"{STATE}/{name}" for name in names if name.endswith(RECORDS) and system.is_file(f"{STATE}/{name}"))


def _parameters(command_line: str) -> str:
    """Return the kernel's command line without the values of unknown parameters."""
    words = (word.partition("=") for word in command_line.split())
    known = (f"{name}={value if _is_known(name) else REMOVED}" if is_set else name for name, is_set, value in words)
    return f"{' '.join(known)}\n"


def _is_known(parameter: str) -> bool:
    module = parameter.partition(".")[0].replace("-", "_")
    return bool(PARAMETERS.fullmatch(parameter)) or any(fnmatch.fnmatchcase(module, each) for each in MODULES)


def _mounts(table: str) -> str:
    """Return the table of mounts without unknown options."""
    lines = (line.split(" ") for line in table.splitlines())
    return "".join(f"{' '.join(fields[:3])} {_options(fields[3])}\n" for fields in lines if len(fields) > 3)


def _options(options: str) -> str:
    found = options.split(",")
    known = [each for each in found if each in MOUNT_OPTIONS]
    return ",".join(known if len(known) == len(found) else [*known, REMOVED])
