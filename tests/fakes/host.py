"""Simulated hosts: a tree below a temporary directory, scripted programs, listed device nodes and devices.

`tests/data/hosts/<name>` has what was recorded from real packages (record.py says how). Everything that a test adds,
above all GPUs, is synthetic: written after the driver's sources, not seen on silicon.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from agent.model.device import DeviceNumber
from agent.model.errors import BusAnswerError, BusError
from agent.model.facts import DrmDevice, PciDevice, Seen
from agent.model.paths import DRIVER_ROOTS_TARGET, LOADER_CACHE
from agent.system.devices import listed
from agent.system.files import MOUNTS, System
from agent.system.process import Bus, Completed, Runner
from agent.system.systemd import GET, MACHINED_MANAGER, SYSTEMD, SYSTEMD_MANAGER, SYSTEMD_OBJECT

HOSTS = Path(__file__).parents[1] / "data" / "hosts"
STAFF = 50


class UnexpectedError(BaseException):
    """The agent did what no test expects. No `except Exception` catches this."""


def expect(expected: bool, what: str) -> None:
    """Fail the test with these words if the agent did what nobody expected."""
    if not expected:
        raise UnexpectedError(f"nobody expected {what}")


class ScriptedRunner:
    """Answers the commands that a test lists; any other command fails the test."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, ...], Completed] = {}
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        self.calls.append(argv)
        expect(argv in self.answers, " ".join(argv))
        return self.answers[argv]


CHANGES = (f"{SYSTEMD_MANAGER}.SetUnitProperties", f"{MACHINED_MANAGER}.BindMountMachine")


JOB_VERBS = (f"{SYSTEMD_MANAGER}.StartUnit", f"{SYSTEMD_MANAGER}.StopUnit")
JOBS = f"{SYSTEMD_OBJECT}/job/"


class Mounts:
    """PID 1's units of mounts, and the kernel's table; what a mount shows is simulated by a link to it."""

    def __init__(self) -> None:
        self.tree = Path("/nowhere")
        self.mounted: dict[str, str] = {}
        """Where, by unit."""
        self.failed: set[str] = set()
        self.jobs: list[tuple[str, str]] = []
        self.no_overlay = False
        """The kernel has no such file system."""
        self.broken: set[str] = set()
        """Units whose mount(8) fails."""
        self.busy: set[str] = set()
        """Units whose mount a process uses."""

    def state(self, unit: str) -> str:
        return "failed" if unit in self.failed else "active" if unit in self.mounted else "inactive"

    def lines(self) -> Iterator[bytes]:
        yield b"22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/root rw"
        for number, where in enumerate(self.mounted.values()):
            yield f"{number + 50} 22 0:{number + 40} / {where} ro shared:9 - overlay overlay ro,lowerdir=a:b".encode()

    def job(self, verb: str, unit: str) -> str:
        expect(unit.endswith(".mount"), f"{verb} of {unit}")
        self.jobs.append((verb, unit))
        if verb == "StopUnit":
            if unit in self.mounted and unit not in self.busy:
                place = self.tree / self.mounted.pop(unit).lstrip("/")
                if place.is_symlink():
                    place.unlink()
        else:
            self._start(unit)
        return f"{JOBS}{len(self.jobs)}"

    def boot(self) -> None:
        """Nothing is mounted; then what the target wants."""
        for unit in reversed([*self.mounted]):
            self.job("StopUnit", unit)
        self.failed.clear()
        for link in sorted((self.tree / "etc/systemd/system" / f"{DRIVER_ROOTS_TARGET}.wants").glob("*")):
            self._start(link.name)

    def _start(self, unit: str) -> bool:
        if unit in self.mounted:
            return True
        file = self.tree / "etc/systemd/system" / unit
        if not file.exists():
            raise BusAnswerError(f"Unit {unit} not found.")
        settings = dict(line.split("=", 1) for line in file.read_text().splitlines() if "=" in line and line[0] != "#")
        if "Requires" in settings and not self._start(settings["Requires"]):
            return False
        (lower,) = (word for word in settings["Options"].split(",") if word.startswith("lowerdir="))
        layers = [self.tree / each.lstrip("/") for each in lower.removeprefix("lowerdir=").split(":")]
        if self.no_overlay or unit in self.broken or not all(each.is_dir() for each in layers):
            self.failed.add(unit)
            return False
        self.failed.discard(unit)
        self.mounted[unit] = settings["Where"]
        if "Requires" in settings:
            place = self.tree / settings["Where"].lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(os.path.relpath(layers[0], place.parent))
        return True


class ScriptedBus:
    """PID 1 and machined on the system bus, with the units that a test lists; an unexpected question fails the test."""

    def __init__(self) -> None:
        self.properties: dict[tuple[str, str, str], tuple[str, object]] = {}
        """Signature and value by object path, interface and name."""
        self.units: dict[str, str] = {}
        """Object paths by name: an alias has that of another."""
        self.jobs: dict[str, str] = {}
        """Types of the jobs of units."""
        self.sub_states: dict[str, str] = {}
        """SubState by the unit's name, where it matters."""
        self.failing: BusError | None = None
        self.changes: list[tuple[object, ...]] = []
        """The method's name and its arguments, in their order, also of changes that fail."""
        self.refused: dict[str, BusError] = {}
        """Of changes, by one of their arguments."""
        self.mounts = Mounts()
        self.started: list[str] = []
        """Services that were started; a test sets what becomes of them."""

    def __call__(
        self, service: str, path: str, method: str, signature: str, arguments: tuple[object, ...], timeout: float
    ) -> tuple[object, ...]:
        if method in CHANGES:
            self.changes.append((method.rpartition(".")[2], *arguments))
        if self.failing:
            raise self.failing
        if method in CHANGES:
            for argument in arguments:
                if isinstance(argument, str) and argument in self.refused:
                    raise self.refused[argument]
            return ()
        expect(service == SYSTEMD, f"{method} of {service}")
        if method in JOB_VERBS:
            unit, mode = map(str, arguments)
            expect(mode == "fail", f"{method} of {unit} with the mode {mode}")
            if unit in self.units and method.endswith("StartUnit"):
                self.started.append(unit)
                return (f"{JOBS}{unit}",)
            return (self.mounts.job(method.rpartition(".")[2], unit),)
        if path.startswith(JOBS):
            raise BusAnswerError(f"Unknown object '{path}'.")
        if method == f"{SYSTEMD_MANAGER}.ListUnitsByNames":
            (names,) = arguments
            assert isinstance(names, list)
            return ([self._listed(name) for name in names],)
        expect(method == GET, f"{method} of {path}")
        interface, name = map(str, arguments)
        expect((path, interface, name) in self.properties, f"{method} of {name} of {path}")
        return (self.properties[path, interface, name],)

    def _listed(self, unit: str) -> tuple[object, ...]:
        if unit.endswith(".mount"):
            return (unit, "A mount", "loaded", self.mounts.state(unit), "simulated", "", "/unit", 0, "", "/")
        expect(unit in self.units, f"a question about {unit}")
        path = self.units[unit]
        load, active = (self.properties[path, f"{SYSTEMD}.Unit", name][1] for name in ("LoadState", "ActiveState"))
        job = (4711, self.jobs[unit], "/job/4711") if unit in self.jobs else (0, "", "/")
        sub_state = self.sub_states.get(unit, "simulated")
        return ("canonical.service", "A unit", load, active, sub_state, "", path, *job)

    def unit(
        self,
        name: str,
        active: str = "active",
        load: str = "loaded",
        reload: bool = False,
        stopped_at: int = 0,
        started_at: int = 0,
        device_allow: list[tuple[str, str]] | None = None,
    ) -> None:
        """One unit, with the types that systemd's introspection data gives."""
        path = self.units.setdefault(name, f"{SYSTEMD_OBJECT}/unit/_{len(self.units)}")
        unit, service = f"{SYSTEMD}.Unit", f"{SYSTEMD}.Service"
        self.properties |= {
            (path, unit, "LoadState"): ("s", load),
            (path, unit, "ActiveState"): ("s", active),
            (path, unit, "NeedDaemonReload"): ("b", reload),
            (path, unit, "InactiveEnterTimestampMonotonic"): ("t", stopped_at),
            (path, unit, "ActiveEnterTimestampMonotonic"): ("t", started_at),
            (path, service, "DeviceAllow"): ("a(ss)", device_allow or []),
        }

    def version(self, text: str) -> None:
        self.properties[SYSTEMD_OBJECT, SYSTEMD_MANAGER, "Version"] = ("s", text)


class Host(System):
    """A System below `tree` that is also a DeviceSource; the methods after the line `----` set it up."""

    def __init__(self, tree: Path, architecture: str = "x86_64", runner: ScriptedRunner | None = None) -> None:
        self.runner = runner or ScriptedRunner()
        self.bus = ScriptedBus()
        self.program_runner: Runner = self.runner
        """What runs programs now; a test may put something else between."""
        self.bus_caller: Bus = self.bus
        """The same for calls of the system bus."""
        super().__init__(
            lambda argv, timeout: self.program_runner(argv, timeout), str(tree), lambda *call: self.bus_caller(*call)
        )
        self.bus.mounts.tree = tree
        self.pci: Seen[tuple[PciDevice, ...]] = ()
        self.drm: Seen[tuple[DrmDevice, ...]] = ()
        self.failing: dict[str, Exception] = {}
        self.refusing: dict[str, OSError] = {}
        """How the kernel refuses a value for a file of its own, by path."""
        self.full: list[str] = []
        """Prefixes of paths on a full disk."""
        self.owners: dict[str, tuple[int, int] | tuple[int, int, int]] = {}
        """Permission bits, user and group ID by path. Everything else belongs to root, and others cannot write it.

        This holds whoever runs the tests. Without a group, it is Debian's staff.
        """
        self.free: int | None = None
        """Free bytes of all file systems; None for those of this test's file system."""
        self.free_of: dict[str, int] = {}
        """Free bytes for some paths."""
        self.acls: set[str] = set()
        """Paths that have an access control list."""
        self._architecture = architecture
        self.device_numbers: dict[str, DeviceNumber] = {}
        self._tree = tree

    def architecture(self) -> str:
        return self._architecture

    def pci_devices(self) -> Seen[tuple[PciDevice, ...]]:
        if not isinstance(self.pci, tuple):
            return self.pci
        return tuple(each for each in self.pci if listed(each.class_id))

    def drm_devices(self) -> Seen[tuple[DrmDevice, ...]]:
        return self.drm

    def device(self, path: str) -> DeviceNumber | None:
        # mknod(2) needs root: a listed node is an empty file in the tree.
        return self.device_numbers.get(path) or super().device(path)

    def device_behind(self, link: str) -> tuple[int, int] | None:
        self._fail(link)
        node = self.device_numbers.get(self._resolve(link))
        return (node.major, node.minor) if node else super().device_behind(link)

    def read(self, path: str, limit: int = 4 << 20) -> bytes:
        self._fail(path)
        return super().read(path, limit)

    def read_untrusted(self, path: str, limit: int = 4 << 20) -> tuple[bytes, float]:
        self._fail(path)
        return super().read_untrusted(path, limit)

    def stream(
        self,
        path: str,
        chunks: Iterable[bytes],
        mode: int = 0o644,
        *,
        durable: bool = True,
        until: ExitStack | None = None,
    ) -> None:
        if path.startswith(tuple(self.full)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        super().stream(path, chunks, mode, durable=durable, until=until)

    def make_directory(self, path: str) -> None:
        if path.startswith(tuple(self.full)) and not self.exists(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        super().make_directory(path)

    def free_bytes(self, path: str) -> int:
        free = self.free_of.get(path, self.free)
        return super().free_bytes(path) if free is None else free

    def lines(self, path: str) -> Iterator[bytes]:
        self._fail(path)
        if path == MOUNTS:
            return self.bus.mounts.lines()
        return super().lines(path)

    def entries(self, path: str) -> tuple[str, ...]:
        self._fail(path)
        return super().entries(path)

    def real_path(self, path: str) -> str:
        self._fail(path)
        return super().real_path(path)

    def owner(self, path: str) -> tuple[int, int, int]:
        self._fail(path)
        mode, *_ = super().owner(path)
        permissions, uid, *group = self.owners.get(self._in_tree(path), (stat.S_IMODE(mode) & ~0o022, 0))
        return stat.S_IFMT(mode) | permissions, uid, next(iter(group), STAFF)

    def write_kernel(self, path: str, value: str) -> None:
        if path in self.refusing:
            raise self.refusing[path]
        super().write_kernel(path, value)

    def has_acl(self, path: str) -> bool:
        return self._in_tree(path) in self.acls

    def _in_tree(self, path: str) -> str:
        """Return the path in the whole tree, also from below an inner root."""
        return f"{self.root.removeprefix(str(self._tree))}{path}".rstrip("/") or "/"

    def _fail(self, path: str) -> None:
        """Raise the error of a failing path: permission bits would not stop tests that run as root."""
        if path in self.failing:
            raise self.failing[path]

    # ---- setting up

    def file(self, path: str, content: str | bytes = b"", *, size: int = 0, executable: bool = False) -> None:
        """Write a file; with `size`, a sparse one."""
        place = self._tree / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
        place.chmod(0o755 if executable else 0o644)
        if size:
            os.truncate(place, size)
        os.utime(place, (1_700_000_000, 1_700_000_000))

    def symlink(self, path: str, target: str) -> None:
        place = self._tree / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def node(self, path: str, major: int, minor: int, mode: int = 0o666) -> None:
        """Add a character device."""
        self.file(path)
        self.device_numbers[path] = DeviceNumber(major, minor, mode)

    def remove_file(self, path: str) -> None:
        (self._tree / path.lstrip("/")).unlink()

    def command(self, *argv: str, stdout: str = "", stderr: str = "", status: int = 0) -> None:
        """Define what a program prints."""
        self.runner.answers[argv] = Completed(status, stdout.encode(errors="surrogateescape"), stderr.encode())

    def load(self, name: str) -> None:
        """Add the recorded driver packages of a distribution."""
        for line in (HOSTS / name / "files.tsv").read_text().splitlines():
            kind, path, rest = line.split("\t")
            if kind == "link":
                self.symlink(path, rest)
            else:
                content = "#!/bin/sh\n" if kind == "script" else ""
                self.file(path, content, size=int(rest), executable=kind != "file")
        self.loader_cache((HOSTS / name / "ldconfig.txt").read_text())

    def loader_cache(self, listing: str) -> None:
        """Define what `ldconfig -p` prints."""
        self.file(LOADER_CACHE, "not read by us")
        self.file("/usr/sbin/ldconfig", executable=True)
        self.command("/sbin/ldconfig" if self.exists("/sbin/ldconfig") else "ldconfig", "-p", stdout=listing)

    def driver(self, version: str, gpus: int = 0) -> None:
        """Add a synthetic loaded module, as kernel-open 545 and newer show it, with GPUs on buses 1 and up."""
        self.file("/proc/devices", PROC_DEVICES)
        self.file("/sys/module/nvidia/version", f"{version}\n")
        self.node("/dev/nvidiactl", 195, 255)
        self.node("/dev/nvidia-modeset", 195, 254)
        self.node("/dev/nvidia-uvm", 511, 0)
        self.node("/dev/nvidia-uvm-tools", 511, 1)
        for index in range(gpus):
            self.gpu(f"0000:{index + 1:02x}:00.0", index)

    def gpu(self, address: str, minor: int) -> None:
        """Add a synthetic GPU with its node and its two DRM nodes."""
        information = INFORMATION.format(minor=minor, address=address)
        self.file(f"/proc/driver/nvidia/gpus/{address}/information", information)
        self.node(f"/dev/nvidia{minor}", 195, minor)
        self.node(f"/dev/dri/card{minor + 1}", 226, minor + 1, 0o660)
        self.node(f"/dev/dri/renderD{128 + minor}", 226, 128 + minor)
        assert isinstance(self.pci, tuple)
        assert isinstance(self.drm, tuple)
        self.pci = (*self.pci, PciDevice(address, 0x10DE, 0x030200, "nvidia"))
        self.drm = (
            *self.drm,
            DrmDevice(f"/dev/dri/card{minor + 1}", address),
            DrmDevice(f"/dev/dri/renderD{128 + minor}", address),
        )

    def unplug(self, address: str) -> None:
        """Remove a GPU that `gpu` added from the bus, with all that its driver had made for it."""
        assert isinstance(self.pci, tuple)
        assert isinstance(self.drm, tuple)
        self.pci = tuple(each for each in self.pci if each.address != address)
        self.drm, gone = (
            tuple(each for each in self.drm if (each.pci_address == address) is its_own) for its_own in (False, True)
        )
        directory = f"/proc/driver/nvidia/gpus/{address}"
        (line,) = (line for line in self.read(f"{directory}/information").splitlines() if b"Device Minor" in line)
        minor = int(line.partition(b":")[2])
        self.remove_file(f"{directory}/information")
        (self._tree / directory.lstrip("/")).rmdir()
        for path in (f"/dev/nvidia{minor}", *(each.path for each in gone)):
            self.remove_file(path)
            del self.device_numbers[path]

    def rebind(self, address: str, driver: str) -> None:
        """Bind a PCI device to another kernel driver."""
        assert isinstance(self.pci, tuple)
        self.pci = tuple(replace(each, driver=driver) if each.address == address else each for each in self.pci)

    def capability(self, path: str, minor: int, mode: int = 0o444) -> None:
        """Add one of the driver's capabilities, synthetic, with its node."""
        text = f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"
        self.file(f"/proc/driver/nvidia/capabilities/{path}", text)
        self.node(f"/dev/nvidia-caps/nvidia-cap{minor}", 508, minor, mode)


PROC_DEVICES = """\
Character devices:
  1 mem
  5 /dev/tty
195 nvidia
195 nvidia-modeset
195 nvidiactl
226 drm
508 nvidia-caps
509 nvidia-caps-imex-channels
510 nvidia-nvswitch
511 nvidia-uvm
512 nvidia-nvlink

Block devices:
  8 sd
259 blkext
"""
INFORMATION = """\
Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 18
GPU UUID: \t GPU-00000000-0000-4000-8000-00000000000{minor}
Video BIOS: \t 96.00.74.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Firmware: \t 550.163.01
GPU Excluded:\t No
"""
