"""The simulated GPU host: a virtual machine with NVIDIA's user space and a stand-in driver for QEMU devices."""

import errno
import json
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from integration.bed.cache import step
from integration.bed.lifetime import Lifetime
from integration.bed.process import run
from integration.bed.run_directory import run_directory
from integration.bed.vm.emulator import qemu_img
from integration.bed.vm.guest import Guest, GuestError
from integration.bed.vm.host_image import host_image
from integration.bed.vm.qemu import Qemu

# An emulated machine is slow, and slower still next to a build on the same two cores.
BOOT_SECONDS = 300.0
REBOOT = ("systemctl", "--no-block", "reboot")
SNAPSHOTS = "snapshots.json"
"""A file of a saved host. It has, for each snapshot, the hot-plug ports that hold a GPU."""


class SimulatedHost(Lifetime):
    """A virtual machine whose disks are overlays on two images.

    `host` is a raw host image, and `machines` a raw or qcow2 image labelled "machines". The overlays take all changes,
    and are removed with this host; the images stay as they are. If `saved` is given, it is a directory that `save` has
    filled: the host then continues from the last snapshot there, and the images are ignored. `one_processor` is for
    runs of hours, in which QEMU loses the timer of an emulated second processor.
    """

    def __init__(
        self, host: Path | None = None, machines: Path | None = None, *,
        gpus: Iterable[int] = range(8), memory_mib: int = 4096, saved: Path | None = None,
        one_processor: bool = False,
    ) -> None:  # fmt: skip
        self.directory = run_directory("simulated-host")
        self._memory_mib = memory_mib
        self._one_processor = one_processor
        self._snapshots: dict[str, frozenset[int]] = {}
        try:
            if saved is not None:
                self.qemu = self._continue(saved)
            else:
                host = host or host_image()
                _copy_kernel(host.parent, self.directory)
                self._disks = [self._overlay("host", host)]
                if machines is not None:
                    self._disks.append(self._overlay("machines", machines))
                self.qemu = self._start(gpus)
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        self.guest = Guest(self.qemu)

    def start(self) -> None:
        """Wait until the virtual machine answers. It has been running since this object was constructed."""
        if self._snapshots:
            self.guest.wait(60)
            return
        with step("boot the simulated GPU host (its processor is emulated)"):
            self.wait()

    def close(self) -> None:
        """Stop the virtual machine and remove its overlays."""
        self.guest.close()
        self.qemu.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def gpus(self) -> list[int]:
        """Return the hot-plug ports that hold a simulated GPU."""
        return sorted(self.qemu.plugged)

    def wait(self, timeout: float = BOOT_SECONDS, may_fail: str = "") -> None:
        """Wait until systemd has started everything. Raises GuestError, which names the units that failed.

        Units whose names begin with `may_fail` may fail: a test has broken them.
        """
        deadline = time.monotonic() + timeout
        self.guest.wait(timeout)
        left = max(1.0, deadline - time.monotonic())
        state = self.guest.run(["systemctl", "is-system-running", "--wait"], timeout=left, check=False).stdout.strip()
        if state == "running":
            return
        failed = self.guest.run(["systemctl", "list-units", "--failed", "--plain", "--no-legend"], check=False).stdout
        units = [line.split()[0] for line in failed.splitlines() if line]
        if may_fail and state == "degraded" and all(unit.startswith(may_fail) for unit in units):
            return
        journal = self.guest.run(["journalctl", "-b", "--no-pager", "-n", "30", *(f"-u{unit}" for unit in units)])
        raise GuestError(f"the simulated host is {state!r}; failed units: {units}\n{journal.stdout}")

    def reboot(self, timeout: float = BOOT_SECONDS, may_fail: str = "", command: Sequence[str] = REBOOT) -> None:
        """Restart the guest through its own systemd, and wait until it is up again, as `wait` does."""
        before = self._boot_id()
        # Not run(): its query of the command's status could reach the guest agent of the next boot, which would not
        # know the command.
        self.guest.start(list(command))
        self._wait_for_next_boot(before, timeout, may_fail)

    def cut_power(self) -> None:
        """Cut the guest's power, and wait until it is up again: what it has not written to a disk is lost."""
        before = self._boot_id()
        self.qemu.execute("system_reset")
        self.guest.close()
        self._wait_for_next_boot(before, BOOT_SECONDS)

    def _wait_for_next_boot(self, before: bytes, timeout: float, may_fail: str = "") -> None:
        deadline = time.monotonic() + timeout
        while True:
            time.sleep(1)
            try:
                self.guest.wait(max(1.0, deadline - time.monotonic()))
                if self._boot_id() != before:
                    break
            except GuestError:
                # QEMU's guest agent may exit in the middle of an answer while the guest shuts down.
                if time.monotonic() > deadline:
                    raise
        self.wait(max(1.0, deadline - time.monotonic()), may_fail)

    def snapshot(self, name: str) -> None:
        """Save the running guest (memory, devices and disks), and note which GPUs are plugged."""
        self.qemu.savevm(name)
        self._snapshots[name] = frozenset(self.qemu.plugged)

    def save(self, directory: Path) -> None:
        """Keep the disks with their snapshots in `directory`, and close the host."""
        self.guest.close()
        self.qemu.close()
        for disk in self._disks:
            shutil.move(disk, directory)
            _link(directory, disk.stem, self.directory / f"{disk.stem}.image")
        _copy_kernel(self.directory, directory)
        ports = {name: sorted(each) for name, each in self._snapshots.items()}
        (directory / SNAPSHOTS).write_text(json.dumps(ports))
        shutil.rmtree(self.directory, ignore_errors=True)

    def pause(self) -> None:
        """Stop the guest's processors until the next `restore`: other emulated machines need the time."""
        self.qemu.execute("stop")

    def restore(self, name: str) -> None:
        """Return to a snapshot of this host, and to its time. Starts a new QEMU if the set of plugged GPUs differs."""
        ports = self._snapshots[name]
        self.guest.close()
        if ports == self.qemu.plugged:
            self.qemu.loadvm(name)
            self.qemu.execute("cont")
        else:
            self.qemu.close()
            self.qemu = self._start(ports, snapshot=name)
            self.guest = Guest(self.qemu)
        self.guest.wait(60)

    def _boot_id(self) -> bytes:
        return self.guest.read("/proc/sys/kernel/random/boot_id")

    def _start(self, ports: Iterable[int], snapshot: str | None = None) -> Qemu:
        return Qemu(
            self.directory, self._disks, ports,
            memory_mib=self._memory_mib, snapshot=snapshot, one_processor=self._one_processor,
        )  # fmt: skip

    def _continue(self, saved: Path) -> Qemu:
        self._snapshots = {name: frozenset(each) for name, each in json.loads((saved / SNAPSHOTS).read_text()).items()}
        _copy_kernel(saved, self.directory)
        self._disks = []
        for disk in (saved / "host.qcow2", saved / "machines.qcow2"):
            copy = self.directory / disk.name
            run(["cp", "--reflink=auto", "--sparse=always", disk, copy])
            base = _link(self.directory, disk.stem, saved / f"{disk.stem}.image")
            # -u: change only the name of the backing file, which is a link in this host's directory now.
            run([*qemu_img(), "rebase", "-u", "-F", _kind(base), "-b", base, copy])
            self._disks.append(copy)
        newest = list(self._snapshots)[-1]
        return self._start(self._snapshots[newest], snapshot=newest)

    def _overlay(self, name: str, image: Path) -> Path:
        overlay = self.directory / f"{name}.qcow2"
        base = _link(self.directory, name, image)
        run([*qemu_img(), "create", "-q", "-f", "qcow2", "-b", base, "-F", _kind(base), overlay])
        return overlay


def _copy_kernel(source: Path, target: Path) -> None:
    """Copy what the virtual machine boots: a restored host starts QEMU again, when the cache may have been emptied."""
    for name in ("vmlinuz", "initrd"):
        shutil.copy(source / name, target)


def _link(directory: Path, name: str, image: Path) -> Path:
    """Make in `directory` a hard link to the image, and return it; across file systems, return the image itself.

    The cache may remove the image while a host still runs; with the link, the host keeps it.
    """
    link = directory / f"{name}.image"
    try:
        link.hardlink_to(image.resolve())
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return image.resolve()
    return link


def _kind(image: Path) -> str:
    with image.open("rb") as file:
        return "qcow2" if file.read(4) == b"QFI\xfb" else "raw"
