"""The simulated host's GPUs, and the files of its driver."""

from pathlib import Path

from integration.faults_suite.host_services import ScenarioHost
from tests.fakes.gpu_host import MACHINE, VERSION, units

LIBRARIES = "/usr/lib/x86_64-linux-gnu"


class HostDevices:
    """Two GPUs and a small driver, in a tree."""

    def __init__(self, host: ScenarioHost, tree: Path) -> None:
        self.host, self.tree = host, tree

    def _set_up(self) -> None:
        host = self.host
        host.symlink("/sbin", "usr/sbin")
        self.install(VERSION)
        host.driver(VERSION, gpus=2)
        for bus in ("01", "02"):
            self.plug(f"0000:{bus}:00.0")
        host.file("/usr/lib/systemd/system/systemd-nspawn@.service", "[Service]\nDeviceAllow=char-pts rw\n")
        for directory in (f"/var/lib/machines/{MACHINE}", "/proc", "/etc/systemd/nspawn", "/etc/systemd/system"):
            host.make_directory(directory)
        host.bus.version("257.13-1~deb13u1")
        units(host, "inactive")
        host.bus.unit("systemd-nspawn@another.service", "inactive")

    def install(self, version: str) -> None:
        """Install a driver's files, with names as in Debian; the loaded module stays the same."""
        listing = []
        for name, number in (("cuda", "1"), ("nvidia-ml", "1"), ("nvidia-ptxjitcompiler", "1")):
            for path in self.tree.glob(f"{LIBRARIES[1:]}/lib{name}.so*"):
                path.unlink()
            self.host.file(f"{LIBRARIES}/lib{name}.so.{version}", f"\x7fELF {name} {version}\n" * 40)
            self.host.symlink(f"{LIBRARIES}/lib{name}.so.{number}", f"lib{name}.so.{version}")
            listing.append(f"\tlib{name}.so.{number} (libc6,x86-64) => {LIBRARIES}/lib{name}.so.{number}\n")
        self.host.file("/usr/bin/nvidia-smi", f"nvidia-smi {version}", executable=True)
        self.host.loader_cache(f"{len(listing)} libs found in cache `/etc/ld.so.cache'\n{''.join(listing)}")
        # The cache file changes, as after ldconfig: so the agent reads the listing again.
        (self.tree / "etc/ld.so.cache").write_text(version)

    def plug(self, address: str) -> None:
        """Add the sysfs device by which the agent notices that a detached GPU is back."""
        self.host.symlink(f"/sys/bus/pci/devices/{address}", f"../../../devices/pci0000:00/{address}")

    def add_gpu(self, address: str, minor: int) -> None:
        self.host.gpu(address, minor)
        self.plug(address)

    def remove_gpu(self, address: str, minor: int) -> None:
        host = self.host
        assert isinstance(host.pci, tuple)
        assert isinstance(host.drm, tuple)
        for path in (f"/dev/nvidia{minor}", f"/dev/dri/card{minor + 1}", f"/dev/dri/renderD{128 + minor}"):
            host.remove_file(path)
            del host.device_numbers[path]
        host.remove_file(f"/proc/driver/nvidia/gpus/{address}/information")
        (self.tree / f"sys/bus/pci/devices/{address}").unlink()
        host.pci = tuple(each for each in host.pci if each.address != address)
        host.drm = tuple(each for each in host.drm if each.pci_address != address)
