"""Loads NVIDIA's kernel modules. modprobe(8) loads each one, so that the host's modprobe.d can forbid it."""

from collections.abc import Callable, Set

from agent.model.errors import ApplyError, CommandError, ObservationError
from agent.model.facts import Gpu, PciDevice, Seen
from agent.system.files import System
from agent.vendors.nvidia.devices.gpus import KERNEL_DRIVER, observe_gpus
from agent.vendors.nvidia.devices.make_nodes import make_nodes

NEEDED = ("nvidia", "nvidia_uvm")
"""Modules without which no container can compute."""
WANTED = ("nvidia_modeset", "nvidia_drm")
"""Modules that graphics needs. Drivers' packages for servers may not have them."""
VERSION = "/sys/module/nvidia/version"
MODPROBE_LIMIT = 120.0
"""Seconds to load a module. A host with 16 GPUs probes them one after another."""
MODINFO_LIMIT = 10.0


def load(
    system: System,
    list_pci: Callable[[], Seen[tuple[PciDevice, ...]]],
    detached: Set[str],
    report: Callable[[str], None],
) -> None:
    """Load missing modules and make the device nodes. Raises AgentError or OSError.

    Nothing is loaded if all GPUs have other drivers, such as vfio-pci for virtual machines. Nor is anything while a
    GPU is detached: an administrator may be about to unload the driver, or to bind the GPU to another one.
    """
    gpus = _gpus(system, list_pci)
    drivers = {gpu.pci_address: gpu.driver or _reserved(system, gpu.pci_address) for gpu in gpus}
    ours = {address for address, driver in drivers.items() if driver in ("", KERNEL_DRIVER)}
    for address in sorted(drivers.keys() - ours):
        report(f"GPU {address} is left to its driver {drivers[address]}")
    held = sorted(detached & {gpu.pci_address for gpu in gpus})
    if held:
        report(f"loading nothing while GPU {', '.join(held)} is detached: `unbounded-agent gpus attach` ends that")
        return
    if not ours:
        report("this host has no GPU for NVIDIA's driver")
        return
    for module in NEEDED:
        _load(system, module, report)
    try:
        for module in WANTED:
            _load(system, module, report)
    except (ApplyError, CommandError) as error:
        # Do not try the next one: it would load this one as its dependency, even if this one is blacklisted.
        report(f"cannot load all of {', '.join(WANTED)}, which only graphics needs: {error}")
    make_nodes(system, lambda: [gpu for gpu in _gpus(system, list_pci) if gpu.pci_address in ours], report)


def _gpus(system: System, list_pci: Callable[[], Seen[tuple[PciDevice, ...]]]) -> tuple[Gpu, ...]:
    listed = observe_gpus(system, list_pci())
    if listed.unseen:
        # The GPUs' drivers are unknown: loading modules might interfere with them.
        raise ObservationError(listed.unseen)
    return listed.gpus


def _reserved(system: System, address: str) -> str:
    """Return the driver that an administrator reserved a GPU for; empty if none (Documentation/ABI, sysfs-bus-pci)."""
    path = f"/sys/bus/pci/devices/{address}/driver_override"
    text = system.read_text(path).strip() if system.exists(path) else ""
    return "" if text == "(null)" else text


def _load(system: System, module: str, report: Callable[[str], None]) -> None:
    """Load one module. Raises ApplyError if modprobe.d forbids it, CommandError if it fails."""
    place = f"/sys/module/{module}"
    if system.exists(place):
        return
    _compare_versions(system, module)
    # With --use-blacklist, modprobe does not load a blacklisted module, and exits with 0.
    system.run("modprobe", "--use-blacklist", module, timeout=MODPROBE_LIMIT)
    if not system.exists(place):
        hint = f"see `modprobe --show-depends {module}` and /etc/modprobe.d/; remove the line, or load it by hand"
        raise ApplyError(f"kernel module {module} was not loaded: modprobe.d blacklists or renames it", hint)
    report(f"loaded kernel module {module}")


def _compare_versions(system: System, module: str) -> None:
    """Raise ApplyError if the module on disk and the loaded ones differ in version: they could not work together."""
    if not system.exists(VERSION):
        return
    loaded = system.read_text(VERSION).strip()
    try:
        on_disk = system.run("modinfo", "--field=version", module, timeout=MODINFO_LIMIT).strip()
    except CommandError:
        # modprobe will report a missing module.
        return
    if on_disk and on_disk != loaded:
        raise ApplyError(
            f"kernel module nvidia {loaded} is loaded, but {module} on disk has version {on_disk}",
            "the driver was upgraded: reload its modules, or reboot the host",
        )
