"""Stand-in GPUs of Intel and AMD (a simulation), plugged into the running simulated host."""

from integration.bed.vm.kernel_modules import simulated_module
from integration.bed.vm.simulated_host import SimulatedHost
from integration.bed.waiting import wait

MODULE = "simulated_drm"
INTEL, AMD, ASPEED = 0x8086, 0x1002, 0x1A03
"""PCI vendor IDs; ASPEED makes management controllers of server boards."""
PARAMETER = f"/sys/module/{MODULE}/parameters/next_vendor"
MODULE_FILE = f"/root/{MODULE}.ko"
# The module makes a GPU only of a device that is added after the module was loaded. At boot, the device exists before
# that. So the drop-in removes the device, and scans the bus again.
FIRST = "/etc/systemd/system/simulated-driver.service.d/drm-first.conf"
LOAD_FIRST = f"""# Simulation
[Service]
ExecStartPre=modprobe drm
ExecStartPre=insmod {MODULE_FILE}
ExecStartPre=sh -c 'echo 1 > /sys/bus/pci/devices/{{address}}/remove && echo 1 > /sys/bus/pci/rescan'
"""


def load_drivers(host: SimulatedHost) -> None:
    """Load the stand-in drivers, which are not on a host by default."""
    host.guest.write(MODULE_FILE, simulated_module("drm").read_bytes())
    host.guest.run(["modprobe", "drm"])
    host.guest.run(["insmod", MODULE_FILE])


def load_before_nvidia(host: SimulatedHost, address: str) -> None:
    """Load the stand-in drivers before NVIDIA's, from the next boot on.

    The device at `address` then gets the DRM numbers that NVIDIA's first GPU has now.
    """
    host.guest.write(FIRST, LOAD_FIRST.format(address=address).encode())


def plug(host: SimulatedHost, port: int, vendor: int, seconds: float = 180) -> str:
    """Plug a GPU of `vendor` into an empty port; return its PCI address once udev has made its nodes."""
    before = _with_nodes(host)
    host.guest.run(["sh", "-c", f"echo {vendor} > {PARAMETER}"])
    host.qemu.plug(port, "pci-testdev")
    new = wait("udev has made its nodes", lambda: _with_nodes(host) - before, seconds,
               lambda: host.guest.run(["dmesg"]).stdout[-2000:])  # fmt: skip
    return new.pop()


def _with_nodes(host: SimulatedHost) -> set[str]:
    """Return the PCI addresses of devices that have a DRM node, by the links in /dev/dri/by-path."""
    found = host.guest.run(["sh", "-c", "ls /dev/dri/by-path 2>/dev/null"], check=False).stdout.split()
    return {name.removeprefix("pci-").rpartition("-")[0] for name in found}
