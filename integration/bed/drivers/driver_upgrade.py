"""Another version of the host's driver: Debian's older branch, with stand-in modules and NVML of that version."""

from pathlib import Path

from integration.bed.drivers.foreign_trees import crowded_root
from integration.bed.drivers.host_roots import LIBRARIES
from integration.bed.drivers.nvml import library_name, nvml
from integration.bed.vm.guest import Guest
from integration.bed.vm.kernel_modules import IDENTITY_MODULE, kernel_modules
from integration.bed.vm.transfer import send_files

MODULES = "/root/modules"
UPGRADE = "/root/upgrade"
UNLOAD = "rmmod nvidia_drm nvidia_modeset nvidia_uvm nvidia"
LOAD = """
for module in nvidia nvidia-uvm nvidia-modeset nvidia-drm; do insmod {directory}/$module.ko; done
/usr/lib/simulated-gpu-host/make-nodes
"""
# Like a package upgrade: remove the old files, then let `ldconfig -n` make the soname links of the new ones.
REPLACE = """
find /{libraries} -name '*.so.{old}' -delete
cp --preserve=timestamps {new}/* /{split}/
ldconfig -n /{split}
ldconfig
"""


def older_version(root: Path) -> str:
    """Return the driver's version in the older branch, which `root` has next to the current branch."""
    (directory,) = (root / LIBRARIES / "nvidia").glob("tesla-*")
    return (directory / "libcuda.so.1").readlink().name.removeprefix("libcuda.so.")


def send_upgrade(guest: Guest) -> str:
    """Send the other driver's files and modules to /root in the guest, and return the driver's version."""
    version = older_version(crowded_root())
    directory = crowded_root() / LIBRARIES / "nvidia" / f"tesla-{version.split('.')[0]}"
    files: dict[str, Path | bytes] = {
        f"upgrade/{path.name}": path for path in directory.iterdir() if not path.is_symlink()
    }
    name = library_name(version)
    files[f"upgrade/{name}"] = nvml(directory / name, version)
    for module in kernel_modules(version).glob("*.ko"):
        if module.name != IDENTITY_MODULE:
            files[f"modules/{module.name}"] = module
    guest.run(["mkdir", "-p", UPGRADE, MODULES])
    send_files(guest, files, "/root")
    return version
