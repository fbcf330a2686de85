"""The commands that fix faults of NVIDIA's driver on the host. Pure."""

from collections.abc import Collection, Mapping, Set

from agent.model.conditions import ConditionType
from agent.model.device import DeviceKind
from agent.model.facts import Broken, FabricService, Gpu, Unseen, VendorFacts
from agent.model.reasons import Reason
from agent.vendors.nvidia.fabric import FABRIC_MANAGER, RUNNING, has_unit
from agent.vendors.nvidia.grant import built_in, modules_to_blacklist

UNLOAD_ORDER = ("nvidia_fs", "nvidia_peermem", "nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia")
"""Each module comes before the modules that it uses (modinfo's `depends` of NVIDIA's open kernel modules)."""
DAEMONS = ("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-dcgm")
"""Services that keep GPUs open. If one is not installed, `systemctl stop` stops the others all the same."""
LOAD = "modprobe -a nvidia nvidia_uvm"
DRIVER_LOG = "dmesg | grep -iE 'nvidia|nvrm'"
FABRIC_LOG = "journalctl -b -u nvidia-fabricmanager --no-pager -n 50"
REINSTALL = "apt install --reinstall libcuda1 libnvidia-ml1 && ldconfig  # Ubuntu: libnvidia-compute-BRANCH"

RESET = (
    "dmesg | grep -iE 'nvrm|xid'  # names the GPU",
    "unbounded-agent stop {machine} --kubeconfig FILE  # moves its pods away",
    "unbounded-agent gpus holders PCI-ADDRESS  # stop what is still listed, such as nvidia-persistenced",
    "nvidia-smi --gpu-reset -i PCI-ADDRESS",
    "unbounded-agent gpus attach PCI-ADDRESS  # forgets a fatal error; running machines open the GPU again",
    "systemctl reboot  # only if the reset fails: ends all machines of the host: stop the others first too",
    "unbounded-agent start {machine} --kubeconfig FILE  # lets pods run there again",
)
"""The order of docs/runbooks.md: a drain leaves the device plugin, which has every GPU open."""

FIXED: Mapping[tuple[ConditionType, str], tuple[str, ...]] = {
    (ConditionType.DRIVER_LOADED, Reason.MODULE_NOT_LOADED): (
        LOAD,
        "dmesg | grep -iE 'nvidia|nvrm|key was rejected'  # if that fails",
        "mokutil --sb-state  # a rejected key: Secure Boot wants a signed module",
        "dkms autoinstall -k $(uname -r)  # if there is no module for this kernel: needs its linux-headers package",
    ),
    (ConditionType.DRIVER_LOADED, Reason.MODULE_BROKEN): (
        "apt install --reinstall nvidia-kernel-dkms  # Ubuntu: nvidia-dkms-BRANCH",
        "systemctl reboot  # drain the nodes of all machines first",
    ),
    (ConditionType.DEVICES_PRESENT, Reason.GPU_WITHOUT_DRIVER): (LOAD, DRIVER_LOG),
    (ConditionType.LIBRARIES_PRESENT, Reason.ONLY_STAGED): (REINSTALL,),
    (ConditionType.LIBRARIES_PRESENT, Reason.NOT_INSTALLED): (
        "apt install libcuda1 libnvidia-ml1 && ldconfig  # Ubuntu: libnvidia-compute-BRANCH",
        "or set driver.root or driver.library_directories: docs/drivers.md",
    ),
    (ConditionType.LIBRARIES_PRESENT, Reason.NOT_IN_CONFIGURED_PLACE): (
        "correct the key that is named above, then: systemctl reload unbounded-agent",
    ),
    (ConditionType.LIBRARIES_PRESENT, Reason.LIBRARIES_BROKEN): (REINSTALL,),
    (ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_STARTING): (FABRIC_LOG,),
    (ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_STUCK): (FABRIC_LOG, "systemctl restart nvidia-fabricmanager"),
    (ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_NOT_RUNNING): (
        "systemctl enable --now nvidia-fabricmanager",
        FABRIC_LOG,
    ),
    (ConditionType.DEVICES_ALLOWED, Reason.GPU_FAILED): RESET,
    (ConditionType.CDI_SPEC_CURRENT, Reason.PARTITION_MISSING): (
        "nvidia-smi -L  # is the instance that is named above listed? If not, destroy it and create it again",
    ),
    (ConditionType.PERSISTENCE_MODE, Reason.DAEMON_NOT_RUNNING): (
        "systemctl unmask nvidia-persistenced  # needed only if it is masked",
        "systemctl enable --now nvidia-persistenced",
        "nvidia-smi -pm 1  # instead, only until the next boot",
    ),
    (ConditionType.PERSISTENCE_MODE, Reason.PERSISTENCE_DISABLED): (
        "systemctl edit --full nvidia-persistenced  # remove --no-persistence-mode from ExecStart=",
        "systemctl restart nvidia-persistenced",
    ),
}


def remedies(kind: ConditionType, reason: str, facts: VendorFacts, modules: Set[str]) -> tuple[str, ...]:
    """Return the commands that fix the fault behind a condition; none if no commands are known for it.

    `kind` and `reason` are the condition's. `modules` are the loaded kernel modules.
    """
    version = facts.driver.module_version if facts.driver and isinstance(facts.driver.module_version, str) else ""
    match kind, reason:
        case ConditionType.LIBRARIES_PRESENT, Reason.VERSION_MISMATCH:
            return (_choose_alternative(version), *reload_driver(modules))
        case (_, Reason.RELOAD_NEEDED) | (ConditionType.DRIVER_ROOT_STAGED, Reason.NOTHING_FITS):
            return reload_driver(modules)
        case ConditionType.LIBRARIES_PRESENT, Reason.PARTLY_OTHER_VERSION:
            return (REINSTALL,)
        case ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_MISSING:
            return _install_fabric_manager(version)
        case ConditionType.FABRIC_READY, (
            Reason.FABRIC_REGISTERING | Reason.FABRIC_NOT_REGISTERED | Reason.FABRIC_FAILED
        ):
            return _register_gpus(facts.driver.fabric_service if facts.driver else FabricService(), version)
        case ConditionType.DRIVER_LOADED, Reason.WRONG_DRIVER:
            return _replace_driver(facts.gpus)
        case ConditionType.DEVICES_PRESENT, Reason.GPU_WITHOUT_DRIVER if "nvidia" in modules:
            # Not for all GPUs without a driver: some may be so on purpose. The condition names the granted ones.
            return (bind("PCI-ADDRESS"), DRIVER_LOG)
        case ConditionType.DEVICES_PRESENT, Reason.NODES_MISSING:
            # With -u, the number is the minor of /dev/nvidia-uvm, which must be 0.
            return (
                "nvidia-smi",
                *(f"{each}  # for {_node(each)}" for each in make_nodes(facts)),
                "nvidia-modprobe -c 255  # for /dev/nvidiactl",
                "nvidia-modprobe -u -c 0  # for /dev/nvidia-uvm",
            )
        case ConditionType.DEVICES_PRESENT, Reason.GPU_NOT_FOUND:
            return _initialise_gpus(facts)
        case _:
            return FIXED.get((kind, reason), ())


def bind(pci_address: str) -> str:
    """Return the command that binds the loaded driver to a GPU (sysfs-bus-pci of the kernel's documentation)."""
    return f"echo {pci_address} > /sys/bus/pci/drivers/nvidia/bind"


def make_nodes(facts: VendorFacts, addresses: Collection[str] = ()) -> tuple[str, ...]:
    """Return the commands that make the missing nodes of GPUs; with `addresses`, only of these GPUs."""
    nodes = facts.devices if isinstance(facts.devices, tuple) else ()
    present = {node.pci_address for node in nodes if node.kind is DeviceKind.GPU}
    missing = [
        gpu.minor
        for gpu in facts.gpus
        if gpu.driver and gpu.pci_address not in present and (not addresses or gpu.pci_address in addresses)
    ]
    commands = [f"nvidia-modprobe -c {minor}" for minor in missing if minor is not None]
    # The driver has not said which minor the GPU has.
    return (*commands, "nvidia-modprobe -c N") if None in missing or not commands else tuple(commands)


def _node(command: str) -> str:
    return f"/dev/nvidia{command.rpartition(' ')[2]}"


def reload_driver(modules: Set[str]) -> tuple[str, ...]:
    """Return how to load the installed driver's modules in place of the loaded ones."""
    loaded = [each for each in UNLOAD_ORDER if each in modules] or ["nvidia_uvm", "nvidia"]
    return (
        "unbounded-agent gpus holders  # stop or drain all users first: machines, containers, a display",
        f"systemctl stop {' '.join(DAEMONS)}",
        f"rmmod {' '.join(loaded)}  # in this order",
        f"modprobe -a {' '.join(reversed(loaded))}",
        f"systemctl start {' '.join(DAEMONS)}  # those that ran before",
        "systemctl reboot  # instead, if a module stays in use: drain the nodes of all machines first",
    )


def _choose_alternative(version: str) -> str:
    why = f"if driver {version or 'of the module'} is installed too, choose it: nothing else is needed"
    return f"update-alternatives --config nvidia && ldconfig  # Debian: {why}"


def _install_fabric_manager(version: str) -> tuple[str, ...]:
    branch = version.partition(".")[0] or "BRANCH"
    return (
        f"apt install nvidia-fabricmanager-{branch}  # exactly version {version or 'of the driver'}",
        "systemctl unmask nvidia-fabricmanager  # needed only if it is masked",
        "systemctl enable --now nvidia-fabricmanager",
    )


def _register_gpus(service: FabricService, version: str) -> tuple[str, ...]:
    modules = service.missing_modules
    load = (f"modprobe -a {' '.join(modules)}  # HGX B200 and B300: the Fabric Manager needs them",) if modules else ()
    return (
        *load,
        *_start(service, version),
        "nvidia-smi --query-gpu=pci.bus_id,fabric.state,fabric.status --format=csv",
    )


def _start(service: FabricService, version: str) -> tuple[str, ...]:
    """Return how to start the Fabric Manager, or start it again, where it is installed or may be."""
    if has_unit(service):
        return ("systemctl enable nvidia-fabricmanager", "systemctl restart nvidia-fabricmanager", FABRIC_LOG)
    if service.state == RUNNING:
        # Not by the name alone: the kernel keeps only its first 15 characters.
        return (f"pgrep -af {FABRIC_MANAGER}  # it has no unit: see its log, and restart the container that runs it",)
    if isinstance(service.state, Broken):
        return (*_install_fabric_manager(version), FABRIC_LOG)
    if isinstance(service.state, Unseen):
        return (FABRIC_LOG,)
    # A virtual machine, or a tray of a rack, has none: the fabric is managed elsewhere.
    only = "only if this host manages the fabric"
    branch = version.partition(".")[0] or "BRANCH"
    return (
        f"apt install nvidia-fabricmanager-{branch}  # {only}: exactly version {version or 'of the driver'}",
        f"systemctl enable --now nvidia-fabricmanager  # {only}",
    )


def _replace_driver(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Return how to give NVIDIA's driver the GPUs that another driver has."""
    lines: list[str] = []
    if modules := modules_to_blacklist(gpus):
        lines += [f"echo 'blacklist {each}' >> /etc/modprobe.d/blacklist-gpu.conf" for each in modules]
        lines += ["update-initramfs -u  # RPM-based hosts: dracut --force"]
        lines += ["systemctl reboot  # drain the nodes of all machines first"]
    for address in built_in(gpus):
        device = f"/sys/bus/pci/devices/{address}"
        lines += [f"echo nvidia > {device}/driver_override", f"echo {address} > {device}/driver/unbind"]
    return (*lines, LOAD) if built_in(gpus) else tuple(lines)


def _initialise_gpus(facts: VendorFacts) -> tuple[str, ...]:
    unknown = [gpu.pci_address for gpu in facts.gpus if gpu.driver and not gpu.uuid and not gpu.excluded]
    if not unknown:
        return ()
    return (f"nvidia-smi -L  # initialises {', '.join(unknown)}, whose UUID is not known yet",)
