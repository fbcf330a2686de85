"""Lists PCI and DRM devices from sysfs (sysfs(5), Documentation/ABI/testing/sysfs-bus-pci in the kernel).

libudev could list them too. But it opens every directory above each device, which took more than half of a pass
on an emulated host. It shows no DRM node if udevd has never run. And it reads `uevent` files, which may wait for a
driver; none of the files read here can block.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from agent.model.device import PCI_ADDRESS
from agent.model.facts import ACCELERATOR, BRIDGE_OTHER, DISPLAY, ENCRYPTION, DrmDevice, PciDevice, Seen, Unseen
from agent.model.paths import PCI_DEVICES
from agent.model.text import whole_number
from agent.system import opening
from agent.system.files import NOT_FOUND, System

# Receives udevd's events. The only module that imports pyudev.

CONTROL = "/run/udev/control"
"""udevd's socket. If it is missing, libudev silently makes a monitor that never gets an event."""
DATABASE = "/run/udev/data"
"""What udevd knows of each device that it has processed: the file of a character device is `cMAJOR:MINOR`."""
SUBSYSTEMS = ("pci", "drivers", "module", "drm")
"""Subsystems whose events a monitor receives."""
BUFFER = 16 << 20
"""Bytes for events that have not been read yet: thousands may come during a pass. libudev's default is too small."""


class Event(Protocol):
    """What a monitor received: the part of pyudev.Device that is used for events."""

    subsystem: str
    action: str
    device_path: str
    properties: Mapping[str, str]


class Monitor(Protocol):
    """The part of pyudev.Monitor that is used here."""

    def fileno(self) -> int: ...

    def poll(self, timeout: float) -> Event | None: ...


def udev_monitor() -> Monitor:
    """Return a started monitor of SUBSYSTEMS. Raises OSError, or ImportError without libudev."""
    # Imported here, because this loads libudev: a host without libudev loses only one source of events.
    import pyudev

    monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="udev")
    for subsystem in SUBSYSTEMS:
        monitor.filter_by(subsystem)
    # Without CAP_NET_ADMIN, the kernel refuses more than net.core.rmem_max (EPERM). The buffer then overflows sooner,
    # which does no harm: a pass lists all devices.
    with contextlib.suppress(OSError):
        monitor.set_receive_buffer_size(BUFFER)
    monitor.start()
    found: Monitor = monitor
    return found


CLASSES = "/sys/class"
"""A directory that every kernel has in sysfs."""
DRM = "/sys/class/drm"
DRI = "/dev/dri"
"""The directory of all nodes of DRM minors (drm_devnode of drivers/gpu/drm/drm_sysfs.c)."""
DRM_MINOR = re.compile(r"card[0-9]+|renderD[0-9]+")
"""Names of DRM nodes. Connectors, such as card0-DP-1, are devices of the same class."""


class DeviceSource(Protocol):
    """Lists devices of the kernel in sorted order; Unseen if that fails.

    Includes only the PCI devices that `listed` accepts.
    """

    def pci_devices(self) -> Seen[tuple[PciDevice, ...]]: ...

    def drm_devices(self) -> Seen[tuple[DrmDevice, ...]]: ...


def listed(class_id: int) -> bool:
    """Return whether PCI devices of a class (24 bits) are listed. A large host has hundreds of others."""
    return class_id >> 16 in (DISPLAY, ACCELERATOR) or class_id >> 8 == BRIDGE_OTHER


class Sysfs:
    """The DeviceSource of a real host."""

    def __init__(self, system: System) -> None:
        self._system = system

    def pci_devices(self) -> Seen[tuple[PciDevice, ...]]:
        try:
            names = self._names(PCI_DEVICES)
            found = [self._pci_device(name, names) for name in names]
        except OSError as error:
            return Unseen(f"{error.filename or PCI_DEVICES}: {error.strerror or error}")
        return tuple(sorted(each for each in found if each))

    def drm_devices(self) -> Seen[tuple[DrmDevice, ...]]:
        try:
            processed = self._system.exists(CONTROL)
            names = [name for name in self._names(DRM) if DRM_MINOR.fullmatch(name)]
            found = [self._drm_device(name, processed=processed) for name in names]
        except OSError as error:
            return Unseen(f"{error.filename or DRM}: {error.strerror or error}")
        return tuple(sorted(each for each in found if each))

    def _names(self, directory: str) -> tuple[str, ...]:
        try:
            return self._system.entries(directory)
        except FileNotFoundError:
            if not self._system.exists(CLASSES):
                # An empty list would withdraw every GPU.
                raise OSError(errno.ENOENT, "sysfs is not mounted", CLASSES) from None
            # The kernel has no PCI bus, or no DRM driver is loaded.
            return ()

    def _pci_device(self, address: str, names: tuple[str, ...]) -> PciDevice | None:
        place = f"{PCI_DEVICES}/{address}"
        try:
            kind = self._number(f"{place}/class")
            if not listed(kind):
                return None
            # The vendor is read last. If the device is removed meanwhile, the missing vendor shows that. A missing
            # driver would not show it, because a device may have no driver.
            driver = os.path.basename(self._system.read_link(f"{place}/driver") or "")
            override = ""
            if not driver:
                with contextlib.suppress(FileNotFoundError):
                    override = self._system.read_text(f"{place}/driver_override").strip().replace("(null)", "")
            virtual = self._system.exists(f"{place}/physfn")
            integrated = self._is_integrated(address, names)
            vendor = self._number(f"{place}/vendor")
        except OSError as error:
            if error.errno in NOT_FOUND:
                return None
            raise
        return PciDevice(address, vendor, kind, driver, override, virtual, integrated)

    def _is_integrated(self, address: str, names: tuple[str, ...]) -> bool:
        """Return PciDevice.integrated. `names` are the addresses of all PCI devices."""
        slot = f"{address.rpartition('.')[0]}."
        for each in names:
            # An error, as of a function that was removed meanwhile, says nothing about the GPU in its slot.
            with contextlib.suppress(OSError):
                in_slot = each.startswith(slot) and each != address
                if in_slot and self._number(f"{PCI_DEVICES}/{each}/class") >> 8 == ENCRYPTION:
                    return True
        return False

    def _drm_device(self, name: str, *, processed: bool) -> DrmDevice | None:
        """Return the node with its PCI device; None if it was removed meanwhile or must be `processed` and is not.

        Drivers of GPUs register their nodes with the PCI device itself. A node of any other device is returned without
        a PCI address. An example is the node of the firmware's framebuffer: the kernel places the framebuffer below the
        GPU that the firmware uses.
        """
        if processed:
            # As soon as udevd has set mode and owner of the node, it sends an event, which causes a pass.
            try:
                number = self._system.read_text(f"{DRM}/{name}/dev").strip()
            except OSError as error:
                if error.errno in NOT_FOUND:
                    return None
                raise
            if not self._system.exists(f"{DATABASE}/c{number}"):
                return None
        target = self._system.read_link(f"{DRM}/{name}")
        if target is None:
            return None
        device = os.path.basename(target.removesuffix(f"/drm/{name}"))
        return DrmDevice(f"{DRI}/{name}", device if PCI_ADDRESS.fullmatch(device) else "")

    def _number(self, path: str) -> int:
        text = self._system.read_text(path).strip()
        try:
            return int(text, 16)
        except ValueError:
            raise OSError(errno.EINVAL, f"{text[:80]!r} is not a hexadecimal number", path) from None


# Reads the kernel's own messages from the kernel log, /dev/kmsg (Documentation/ABI/testing/dev-kmsg).

PATH = "/dev/kmsg"
RECORD_LIMIT = 8192
"""Bytes to read at a time: a read fails if the record is longer (EINVAL). The kernel's PRINTKRB_RECORD_MAX is 1024."""
BURST = 5000
"""The largest number of records that one `read` takes, so that it returns even if the kernel never stops writing."""
KERNEL = 0
"""The facility of the kernel's own records. Programs cannot write records with this facility."""


class KernelLog:
    """The kernel's own messages. Each `read` returns those since the previous one."""

    def __init__(self, descriptor: int, read: Callable[[int, int], bytes] = os.read, after: int | None = None) -> None:
        """Read from `descriptor`, which must return one record per read(2) and not block. This object closes it.

        Of the records that the log already has, only those after the sequence number `after` are returned; all of them
        if `after` is None.
        """
        self.overruns = 0
        """How often records were overwritten before they were read."""
        self.sequence = after
        """Sequence number of the last record that was read; at first `after`. It grows until the host reboots."""
        self.behind = True
        """Whether records that the log already had at the start are still unread."""
        self._descriptor, self._read = descriptor, read

    def fileno(self) -> int:
        """Return the descriptor for poll(2). It is readable when there is a record."""
        return self._descriptor

    def read(self) -> tuple[str, ...]:
        """Return the first line of each of the kernel's records since the previous call.

        Raises OSError if the log can no longer be read.
        """
        texts: list[str] = []
        for _ in range(BURST):
            try:
                record = self._read(self._descriptor, RECORD_LIMIT)
            except BlockingIOError:
                record = b""
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                # Records were overwritten; the next read returns the oldest remaining one.
                self.overruns += 1
                continue
            if not record:
                self.behind = False
                break
            number, text = parse_record(record)
            # Records are skipped by their number only while `behind`. Otherwise, an `after` that is too high by mistake
            # would silence the log forever.
            if number is None or (self.behind and self.sequence is not None and number <= self.sequence):
                continue
            self.sequence = number
            if text is not None:
                texts.append(text)
        return tuple(texts)

    def close(self) -> None:
        # The descriptor may be bad (EBADF): that can be the reason for closing it.
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def open_kernel_log(path: str = PATH, after: int | None = None) -> KernelLog:
    """Open the log at the oldest remaining record. Raises OSError.

    This needs CAP_SYSLOG if kernel.dmesg_restrict is set.
    """
    # Do not begin at the end (SEEK_END): the current sequence number is known only after a record was read, and the
    # next record may come much later.
    return KernelLog(opening.stream(path), after=after)


def parse_record(record: bytes) -> tuple[int | None, str | None]:
    """Return sequence number and first line of a record `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,...];TEXT`.

    The line is None for a record of user space; both are None for malformed data. The line cannot contain a line break:
    the kernel writes control characters as \\xNN.
    """
    prefix, separator, rest = record.partition(b";")
    fields = prefix.decode(errors="replace").split(",")
    priority, number = map(whole_number, fields[:2]) if len(fields) > 1 else (None, None)
    if not separator or priority is None or number is None:
        return None, None
    if priority >> 3 != KERNEL:
        return number, None
    return number, rest.split(b"\n", 1)[0].decode(errors="replace")


# Finds running programs by their names in /proc.

NAME_LIMIT = 15
"""Characters of a program's name that the kernel keeps (TASK_COMM_LEN)."""
ENDED = ("Z", "X")
"""States of processes that have ended but are still listed (proc_pid_stat(5))."""


def program_runs(system: System, name: str) -> bool:
    """Return whether a process of this PID namespace, or of one inside it, has the program's name.

    The result is False if /proc cannot be read. Reading the names of a thousand processes takes tens of milliseconds.
    Any process may give itself any name.
    """
    try:
        pids = [each for each in system.entries("/proc") if each.isdecimal()]
    except OSError:
        return False
    for pid in pids:
        # A process may have ended since /proc was listed.
        with contextlib.suppress(OSError):
            has_name = system.read_text(f"/proc/{pid}/comm").rstrip("\n") == name[:NAME_LIMIT]
            # The state follows the name, which is in parentheses, and may itself have spaces and parentheses.
            if has_name and not system.read_text(f"/proc/{pid}/stat").rpartition(") ")[2].startswith(ENDED):
                return True
    return False
