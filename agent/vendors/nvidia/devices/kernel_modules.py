"""Loads NVIDIA's kernel modules. modprobe(8) loads each one, so that the host's modprobe.d can forbid it."""

from collections.abc import Callable, Sequence, Set

from agent.model.errors import ApplyError, CommandError, ObservationError
from agent.model.facts import Gpu, PciDevice, Seen
from agent.system.files import System
from agent.vendors.nvidia.devices.gpus import KERNEL_DRIVER, observe_gpus
from agent.vendors.nvidia.devices.make_nodes import make_nodes

NEEDED = ("nvidia", "nvidia_uvm")
"""Modules without which no container can compute."""
WANTED = ("nvidia_modeset", "nvidia_drm")
"""Modules that graphics needs. Driver packages for servers may come without them."""
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

    Nothing is loaded if there is no GPU, or if all GPUs have other drivers, such as vfio-pci for virtual machines.
    Nothing is loaded while a GPU is detached: an administrator may be about to unload the driver, or to bind the GPU
    to another driver.
    """
    gpus = _gpus(system, list_pci)
    drivers = {gpu.pci_address: gpu.driver or gpu.override for gpu in gpus}
    for_nvidia = _for_nvidia(gpus)
    for address in sorted(drivers.keys() - for_nvidia.keys()):
        report(f"GPU {address} is left to its driver {drivers[address]}")
    detached_here = sorted(detached & {gpu.pci_address for gpu in gpus})
    if detached_here:
        names = ", ".join(detached_here)
        report(f"loading nothing while a GPU is detached ({names}); `unbounded-agent gpus attach` attaches it")
        return
    if not for_nvidia:
        report("this host has no GPU for NVIDIA's driver")
        return
    for module in NEEDED:
        _load(system, module, report)
    try:
        for module in WANTED:
            _load(system, module, report)
    except (ApplyError, CommandError) as error:
        # Do not try the modules after the one that failed: modprobe would load the failed module as their dependency,
        # even if the failed module is blacklisted.
        report(f"cannot load all of {', '.join(WANTED)}, which only graphics needs: {error}")
    # Repeat this until no GPU is new. If a GPU is plugged in during this run, udev starts the unit that runs this, but
    # systemd merges that start with the run in progress. So this run must make the new GPU's node.
    made: Set[str] | None = None
    while (present := _for_nvidia(_gpus(system, list_pci)).keys()) != made:
        make_nodes(system, lambda: [*_for_nvidia(_gpus(system, list_pci)).values()], report)
        made = present


def _for_nvidia(gpus: Sequence[Gpu]) -> dict[str, Gpu]:
    """Return the GPUs that have NVIDIA's driver or none, and are not reserved for another driver, by address."""
    return {gpu.pci_address: gpu for gpu in gpus if (gpu.driver or gpu.override) in ("", KERNEL_DRIVER)}


def _gpus(system: System, list_pci: Callable[[], Seen[tuple[PciDevice, ...]]]) -> tuple[Gpu, ...]:
    listed = observe_gpus(system, list_pci())
    if listed.unseen:
        # The GPUs' drivers are unknown: loading modules might interfere with them.
        raise ObservationError(listed.unseen)
    return listed.gpus


def _load(system: System, module: str, report: Callable[[str], None]) -> None:
    """Load one module, if it is not loaded. Raises CommandError if modprobe fails.

    Raises ApplyError in two more cases: because of a line in modprobe.d, modprobe succeeds without loading the module;
    or the version of the module differs from that of the loaded driver.
    """
    path = f"/sys/module/{module}"
    if system.exists(path):
        return
    _compare_versions(system, module)
    # With --use-blacklist, modprobe does not load a blacklisted module, and exits with 0.
    system.run("modprobe", "--use-blacklist", "--", module, timeout=MODPROBE_LIMIT)
    if not system.exists(path):
        hint = (
            f"see `modprobe --show-depends {module}` and /etc/modprobe.d/; remove that line, or load {module} by hand"
        )
        why = f"modprobe.d blacklists it, or has an alias or install line for {module}"
        raise ApplyError(f"kernel module {module} was not loaded: {why}", hint)
    report(f"loaded kernel module {module}")


def _compare_versions(system: System, module: str) -> None:
    """Raise ApplyError if the module on disk has another version than the loaded driver, and so cannot work with it."""
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
