"""Evaluates the host's conditions for NVIDIA's GPUs and driver. Messages say what to do next. Pure."""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from agent.model.conditions import Condition, ConditionType, Reason, Status, false, not_applicable, true, unknown, worst
from agent.model.device import DeviceKind
from agent.model.facts import Absent, Broken, Driver, FabricService, Gpu, Seen, Unseen, UserSpace, VendorFacts
from agent.model.goal import Grant
from agent.model.handoff import FabricAnswer
from agent.model.text import counted, printable
from agent.vendors.host_vendor import (
    Cluster,
    FabricReport,
    Finding,
    KubernetesObject,
    containers,
    crashes,
    environment,
    faulty_gpus,
    kubelet_messages,
    labels,
    limited_resources,
    name,
    pod_spec,
    seconds,
    statuses,
    unusable,
)
from agent.vendors.nvidia.contract import REGISTERED, has_fabric, is_answer, is_registered
from agent.vendors.nvidia.driver import FABRIC_MANAGER, RUNNING, has_unit
from agent.vendors.nvidia.grant import built_in, misbound_gpus, modules_to_blacklist

UNLOAD_ORDER = ("nvidia_fs", "nvidia_peermem", "nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia")
"""Each module comes before the modules that it uses (modinfo's `depends` of NVIDIA's open kernel modules)."""
DAEMONS = ("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-dcgm")
"""Services that keep GPUs open. If one is not installed, `systemctl stop` stops the others all the same."""
LOAD = "modprobe -a nvidia nvidia_uvm"
DRIVER_LOG = "dmesg | grep -iE 'nvidia|nvrm'"
SHOW_FABRIC_LOG = "journalctl -b -u nvidia-fabricmanager --no-pager -n 50"
REINSTALL_LIBRARIES = "apt install --reinstall libcuda1 libnvidia-ml1 && ldconfig  # Ubuntu: libnvidia-compute-BRANCH"

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
    (ConditionType.LIBRARIES_PRESENT, Reason.ONLY_STAGED): (REINSTALL_LIBRARIES,),
    (ConditionType.LIBRARIES_PRESENT, Reason.NOT_INSTALLED): (
        "apt install libcuda1 libnvidia-ml1 && ldconfig  # Ubuntu: libnvidia-compute-BRANCH",
        "or set driver.root or driver.library_directories: docs/drivers.md",
    ),
    (ConditionType.LIBRARIES_PRESENT, Reason.NOT_IN_CONFIGURED_PLACE): (
        "correct the key that is named above, then: systemctl reload unbounded-agent",
    ),
    (ConditionType.LIBRARIES_PRESENT, Reason.LIBRARIES_BROKEN): (REINSTALL_LIBRARIES,),
    (ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_STARTING): (SHOW_FABRIC_LOG,),
    (ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_STUCK): (
        SHOW_FABRIC_LOG,
        "systemctl restart nvidia-fabricmanager",
    ),
    (ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_NOT_RUNNING): (
        "systemctl enable --now nvidia-fabricmanager",
        SHOW_FABRIC_LOG,
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
            return (REINSTALL_LIBRARIES,)
        case ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_MISSING:
            return _install_fabric_manager(version)
        case ConditionType.FABRIC_READY, (
            Reason.FABRIC_REGISTERING | Reason.FABRIC_NOT_REGISTERED | Reason.FABRIC_FAILED
        ):
            return _register_gpus(facts.driver.fabric_service if facts.driver else FabricService(), version)
        case ConditionType.DRIVER_LOADED, Reason.WRONG_DRIVER:
            return _unbind_other_drivers(facts.gpus)
        case ConditionType.DEVICES_PRESENT, Reason.GPU_WITHOUT_DRIVER if "nvidia" in modules:
            # Not for all GPUs without a driver: some may be so on purpose. The condition names the granted ones.
            return (bind("PCI-ADDRESS"), DRIVER_LOG)
        case ConditionType.DEVICES_PRESENT, Reason.NODES_MISSING:
            # With -u, the number is the minor of /dev/nvidia-uvm, which must be 0.
            return (
                "nvidia-smi",
                *(f"{each}  # for /dev/nvidia{each.rpartition(' ')[2]}" for each in make_nodes(facts)),
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
        return ("systemctl enable nvidia-fabricmanager", "systemctl restart nvidia-fabricmanager", SHOW_FABRIC_LOG)
    if service.state == RUNNING:
        # Not by the name alone: the kernel keeps only its first 15 characters.
        return (f"pgrep -af {FABRIC_MANAGER}  # it has no unit: see its log, and restart the container that runs it",)
    if isinstance(service.state, Broken):
        return (*_install_fabric_manager(version), SHOW_FABRIC_LOG)
    if isinstance(service.state, Unseen):
        return (SHOW_FABRIC_LOG,)
    # A virtual machine, or a tray of a rack, has none: the fabric is managed elsewhere.
    only = "only if this host manages the fabric"
    branch = version.partition(".")[0] or "BRANCH"
    return (
        f"apt install nvidia-fabricmanager-{branch}  # {only}: exactly version {version or 'of the driver'}",
        f"systemctl enable --now nvidia-fabricmanager  # {only}",
    )


def _unbind_other_drivers(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
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


NEEDED_BY_ALL = {
    DeviceKind.CONTROL: ("/dev/nvidiactl", "nvidia-modprobe -c 255"),
    DeviceKind.UVM: ("/dev/nvidia-uvm", "nvidia-modprobe -u -c 0"),
}
NOT_REPORTED = FabricReport()
FABRIC_LOG = "see `journalctl -b -u nvidia-fabricmanager`"
REINSTALL = "install the driver's user-space packages again and run ldconfig"


def nvidia_conditions(facts: VendorFacts, grant: Grant, fabric: FabricReport = NOT_REPORTED) -> tuple[Condition, ...]:
    """Return DriverLoaded, DevicesPresent, LibrariesPresent, FabricReady and PersistenceMode, in this order."""
    none = Absent("no driver")
    driver = facts.driver or Driver(none, UserSpace(none, none))
    return (
        _driver_loaded(facts, driver),
        _devices_present(facts, driver, grant),
        _libraries_present(driver, grant),
        _fabric_ready(driver, grant, fabric),
        _persistence_mode(driver.persistence, grant, fabric),
    )


def _driver_loaded(facts: VendorFacts, driver: Driver) -> Condition:
    kind = ConditionType.DRIVER_LOADED
    match driver.module_version:
        case Unseen(why):
            return unknown(kind, Reason.OBSERVATION_FAILED, why)
        case Broken(why):
            return false(kind, Reason.MODULE_BROKEN, f"{why}; reinstall the driver's kernel module, then reboot")
        case Absent() if misbound_gpus(facts.gpus):
            others = sorted({gpu.driver for gpu in misbound_gpus(facts.gpus)})
            found = f"the GPUs have kernel driver {', '.join(others)}"
            return false(kind, Reason.WRONG_DRIVER, "; ".join((found, *_replace_driver(facts.gpus))))
        case Absent():
            installed = isinstance(driver.user_space.version, str)
            state = f"libraries {driver.user_space.version} are installed, but the" if installed else "the"
            return false(
                kind,
                Reason.MODULE_NOT_LOADED,
                f"{state} kernel module nvidia is not loaded; run `modprobe -a nvidia nvidia_uvm`, or set "
                "driver.load_modules = true (`journalctl -u unbounded-agent-modules` shows the result); if that fails, "
                "see `dmesg`, install the driver's kernel module for this kernel, or reboot",
            )
        case version:
            return true(
                kind, Reason.LOADED, f"kernel module nvidia {version} is loaded for {counted(len(facts.gpus), 'GPU')}"
            )


def _replace_driver(gpus: tuple[Gpu, ...]) -> Iterator[str]:
    if modules := modules_to_blacklist(gpus):
        lines = " and, on a line of its own, ".join(f"`blacklist {each}`" for each in modules)
        yield (
            f"write {lines} into /etc/modprobe.d/blacklist-gpu.conf, rebuild the initramfs (Debian: update-initramfs "
            "-u) and reboot"
        )
    if addresses := built_in(gpus):
        yield (
            f"the driver of {', '.join(addresses)} is built into the kernel and cannot be blacklisted: set "
            "driver_override, as `unbounded-agent doctor` shows"
        )


def _devices_present(facts: VendorFacts, driver: Driver, grant: Grant) -> Condition:
    kind = ConditionType.DEVICES_PRESENT
    loaded = isinstance(driver.module_version, str)
    # If the module is loaded already, modprobe does nothing, so the advice is to bind the driver to the GPUs.
    if fault := unusable(facts, grant):
        return fault
    faults = faulty_gpus(
        facts,
        grant,
        DeviceKind.GPU,
        "/dev/nvidiaN",
        f"run `nvidia-smi` or {' and '.join(f'`{each}`' for each in make_nodes(facts, grant.gpus))}",
        lambda unbound: (
            f"run {' and '.join(f'`{bind(each)}`' for each in unbound) if loaded else '`modprobe nvidia`'}, and see "
            "`dmesg`"
        ),
    )
    # If no GPU works, that may be why the nodes that all need are missing.
    if {gpu for each in faults for gpu in each.gpus} != set(grant.gpus):
        faults = (*_shared_nodes_missing(facts, grant), *faults)
    if faults:
        return worst(faults)
    incomplete = "".join(f"; {each.why}" for each in facts.incomplete if each.pci_address in grant.gpus)
    present = f"{counted(len(grant.nodes), 'node')} for {counted(len(grant.gpus), 'GPU')}{incomplete}"
    if grant.detached:
        return true(kind, Reason.GPU_DETACHED, f"{present}; detached by an administrator: {', '.join(grant.detached)}")
    return true(kind, Reason.PRESENT, present)


def _shared_nodes_missing(facts: VendorFacts, grant: Grant) -> Iterator[Condition]:
    present_kinds = {node.kind for node in grant.nodes}
    for needed, (path, command) in NEEDED_BY_ALL.items():
        if needed not in present_kinds:
            # The node may exist and yet be unusable: it may have the number from a module that was loaded before.
            what = facts.node_problems.get(path, f"{path} is missing")
            yield false(ConditionType.DEVICES_PRESENT, Reason.NODES_MISSING, f"{what}; run `{command}`")


def _libraries_present(driver: Driver, grant: Grant) -> Condition:
    kind = ConditionType.LIBRARIES_PRESENT
    module, user_space = driver.module_version, driver.user_space
    library = user_space.version
    if isinstance(library, Unseen):
        return unknown(kind, Reason.OBSERVATION_FAILED, library.why)
    serving = grant.driver_root.version if grant.driver_root else ""
    if isinstance(library, Absent | Broken):
        return _unless_staged(_libraries_fault(user_space, library, module), serving, module)
    if isinstance(module, str) and module != library:
        if serving == module:
            return true(
                kind,
                Reason.RELOAD_NEEDED,
                f"libraries {library} take effect when their kernel module replaces {module}, or the host reboots; "
                f"until then the machine keeps those of {module}; DriverRootStaged says whether those of {library} are "
                "staged",
            )
        return false(
            kind,
            Reason.VERSION_MISMATCH,
            f"kernel module {module} and libraries {library} differ; reload the module or reboot the host, or, if the "
            f"libraries {module} are installed too, choose those as `doctor` says{_other_drivers(user_space)}",
        )
    if isinstance(user_space.files, Absent | Broken | Unseen):
        fault = false(kind, Reason.LIBRARIES_BROKEN, f"{user_space.files.why}; {REINSTALL}")
        return _unless_staged(fault, serving, module)
    where = f" from {user_space.place}" if user_space.place else ""
    parts = [f"{len(user_space.files)} files of driver {library}{where}{_not_used(user_space)}"]
    if user_space.not_installed:
        parts.append(f"not installed on this host: {', '.join(user_space.not_installed)}")
    if user_space.other_version:
        left_out = ", ".join(user_space.other_version)
        parts.append(f"left out, because their version differs: {left_out}; {REINSTALL}")
        return true(kind, Reason.PARTLY_OTHER_VERSION, "; ".join(parts))
    return true(kind, Reason.PRESENT, "; ".join(parts))


def _libraries_fault(user_space: UserSpace, library: Absent | Broken, module: Seen[str]) -> Condition:
    kind = ConditionType.LIBRARIES_PRESENT
    if user_space.place_key:
        return false(
            kind,
            Reason.NOT_IN_CONFIGURED_PLACE,
            f"the configured {user_space.place} holds no usable driver: {library.why}; correct the key "
            f"{user_space.place_key}, or remove it to let the agent search",
        )
    if isinstance(library, Absent):
        wanted = f" {module}" if isinstance(module, str) else ""
        return false(
            kind,
            Reason.NOT_INSTALLED,
            f"`ldconfig -p` lists no libcuda or libnvidia-ml of this architecture, and no other known place has them; "
            f"install the driver's user-space libraries{wanted} (Debian: libcuda1 libnvidia-ml1; Ubuntu: "
            "libnvidia-compute) and run ldconfig, or name their place in driver.root or driver.library_directories"
            f"{_other_drivers(user_space)}",
        )
    where = f"{user_space.place}: " if user_space.place else ""
    return false(kind, Reason.LIBRARIES_BROKEN, f"{where}{library.why}; {REINSTALL}{_other_drivers(user_space)}")


def _unless_staged(fault: Condition, serving: str, module: Seen[str]) -> Condition:
    """Return the fault, or OnlyStaged if the driver root that the machine uses is in the kernel module's version."""
    if not serving or serving != module:
        return fault
    staged = f"machines use the staged copy of driver {serving}, because the host's own files are unusable"
    return true(fault.type, Reason.ONLY_STAGED, f"{staged}: {fault.message}")


def _other_drivers(user_space: UserSpace) -> str:
    return _not_used(user_space) + "".join(f"; not searched: {each}" for each in user_space.skipped_directories)


def _not_used(user_space: UserSpace) -> str:
    return f"; not used: {', '.join(user_space.other_places)}" if user_space.other_places else ""


def _fabric_ready(driver: Driver, grant: Grant, report: FabricReport) -> Condition:
    """Return what the GPUs say of their fabric or, as long as they say nothing, what the host shows of it.

    A GPU that is silent now, but was not registered when it answered last, counts as not registered.
    """
    kind, inferred = ConditionType.FABRIC_READY, _inferred_fabric(driver.fabric)
    answers = [each for each in report.answers if each.gpu in grant.gpus and is_answer(each)]
    silent = sorted(set(grant.gpus).difference(each.gpu for each in answers))
    unanswered = f"no answer from {', '.join(silent)}: {report.silence}" if silent else ""
    with_fabric = [each for each in answers if has_fabric(each)]
    last = [each for each in report.remembered if each.gpu in silent]
    faulty = [each for each in (*answers, *last) if has_fabric(each) and not is_registered(each)]
    if inferred.status is Status.FALSE:
        # Without the Fabric Manager, programs that start now fail on all GPUs, even if they are still registered.
        return inferred._replace(message=printable("; ".join((inferred.message, *_words(faulty)))))
    if faulty:
        return _not_registered(faulty, unanswered, driver.fabric_service)
    if with_fabric:
        said = f"{counted(len(with_fabric), 'GPU')} registered with the NVLink fabric (fabric.state Completed)"
        return true(kind, Reason.FABRIC_REGISTERED, "; ".join(filter(None, (said, unanswered))))
    if inferred.status is not Status.TRUE:
        return inferred
    if not silent and all(each.state for each in answers) and inferred.reason == Reason.NOT_APPLICABLE:
        return not_applicable(kind, "the GPUs have no NVLink fabric (fabric.state N/A)")
    unknown_to = "" if all(each.state for each in answers) else "the driver is too old to be asked for fabric.state"
    why = unanswered or unknown_to or "these GPUs do not say whether they are registered (fabric.state N/A)"
    return inferred._replace(message=printable(f"{inferred.message}; inferred: {why}"))


def _not_registered(faulty: Sequence[FabricAnswer], unanswered: str, service: FabricService) -> Condition:
    kind, concerned = ConditionType.FABRIC_READY, tuple(each.gpu for each in faulty)
    message = (
        "GPUs are not registered with the NVLink fabric, so CUDA fails with error 802 (SYSTEM_NOT_READY): "
        f"{'; '.join(filter(None, (*_words(faulty), unanswered, _fabric_advice(service))))}"
    )
    # A registration that has ended without success. CUDA also waits for one that has not ended.
    if any(each.state == REGISTERED[0] for each in faulty):
        return false(kind, Reason.FABRIC_FAILED, message, concerned)
    if isinstance(service.state, Broken) or service.state in ("inactive", "failed", "deactivating"):
        return false(kind, Reason.FABRIC_NOT_REGISTERED, message, concerned)
    return unknown(kind, Reason.FABRIC_REGISTERING, message)._replace(gpus=concerned)


def _words(answers: Sequence[FabricAnswer]) -> Iterator[str]:
    """Return what GPUs said, in their own words; GPUs that said the same are named together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in answers:
        groups.setdefault((each.state, each.status), []).append(each.gpu)
    for (state, status), gpus in groups.items():
        yield f"{', '.join(gpus)}: fabric.state {state}, fabric.status {status}"


def _fabric_advice(service: FabricService) -> str:
    """Return where to look, and what to do, if GPUs are not registered."""
    modules, state = service.missing_modules, _service_advice(service)
    if not modules:
        return state
    restart = " and `systemctl restart nvidia-fabricmanager`" if has_unit(service) else ""
    return (
        f"not loaded: {', '.join(modules)}, which the Fabric Manager of HGX B200 and B300 needs: run `modprobe -a "
        f"{' '.join(modules)}`{restart}; {state}"
    )


def _service_advice(service: FabricService) -> str:
    if service.state == RUNNING:
        return (
            "the Fabric Manager runs, but not as this host's service: see its log, and restart the container that runs "
            "it"
        )
    match service.state:
        case Absent():
            return (
                "nvidia-fabricmanager.service is not installed: if this host manages the fabric, install the Fabric "
                "Manager in the driver's version; otherwise (a virtual machine, a rack), look where it is managed"
            )
        case Broken(why) | Unseen(why):
            return why
        case "active" | "activating" | "reloading" as state:
            return f"nvidia-fabricmanager.service is {state}: {FABRIC_LOG}"
        case state:
            return (
                f"nvidia-fabricmanager.service is {state}: run `systemctl enable --now nvidia-fabricmanager`, and "
                f"{FABRIC_LOG}"
            )


def _inferred_fabric(fabric: Seen[str]) -> Condition:
    kind = ConditionType.FABRIC_READY
    match fabric:
        case Absent(why):
            return not_applicable(kind, why)
        case Unseen(why):
            return unknown(kind, Reason.OBSERVATION_FAILED, why)
        case Broken(why):
            return false(
                kind,
                Reason.FABRIC_MANAGER_MISSING,
                f"{why}; then run `systemctl enable --now nvidia-fabricmanager`",
            )
        case "active":
            return true(kind, Reason.FABRIC_MANAGER_ACTIVE, "nvidia-fabricmanager.service is active")
        case "running":
            return true(kind, Reason.FABRIC_MANAGER_ACTIVE, "nv-fabricmanager runs, but not as this host's service")
        case "activating" | "reloading":
            return unknown(kind, Reason.FABRIC_MANAGER_STARTING, "nvidia-fabricmanager.service is starting")
        case state:
            return false(
                kind,
                Reason.FABRIC_MANAGER_NOT_RUNNING,
                f"this host has NVSwitch and nvidia-fabricmanager.service is {state}; CUDA will fail with error 802 "
                "(SYSTEM_NOT_READY); run `systemctl enable --now nvidia-fabricmanager`",
            )


def _persistence_mode(daemon: Seen[str], grant: Grant, report: FabricReport) -> Condition:
    """Return what the GPUs say of persistence mode or, if some do not, what the persistence daemon's unit shows."""
    kind, inferred = ConditionType.PERSISTENCE_MODE, _inferred_persistence(daemon)
    said = {each.gpu: each.persistence for each in report.answers if each.persistence in ("Enabled", "Disabled")}
    off = [gpu for gpu in grant.gpus if said.get(gpu) == "Disabled"]
    if off and inferred.status is not Status.FALSE:
        return false(
            kind,
            Reason.PERSISTENCE_DISABLED,
            f"{inferred.message}, but {', '.join(off)} {'is' if len(off) == 1 else 'are'} not in persistence mode: the "
            "driver shuts down idle GPUs; remove --no-persistence-mode from ExecStart= of nvidia-persistenced.service "
            "(`systemctl edit --full nvidia-persistenced`), then run `systemctl restart nvidia-persistenced`",
        )
    if off or not grant.gpus:
        return inferred
    if silent := ", ".join(sorted(set(grant.gpus) - said.keys())):
        return inferred._replace(message=printable(f"{inferred.message}; inferred: no answer from {silent}"))
    return true(kind, Reason.PERSISTENCE_ENABLED, f"{counted(len(grant.gpus), 'GPU')} in persistence mode")


def _inferred_persistence(daemon: Seen[str]) -> Condition:
    kind = ConditionType.PERSISTENCE_MODE
    match daemon:
        case "active":
            return true(kind, Reason.DAEMON_ACTIVE, "nvidia-persistenced.service is active")
        case "running":
            return true(kind, Reason.DAEMON_ACTIVE, "nvidia-persistenced runs, but not as this host's service")
        case Unseen(why):
            return unknown(kind, Reason.OBSERVATION_FAILED, why)
        case state:
            first = f"{state.why}; then " if isinstance(state, Broken) else ""
            return false(
                kind,
                Reason.DAEMON_NOT_RUNNING,
                "nvidia-persistenced.service is not running: unless somebody ran `nvidia-smi -pm 1`, the driver shuts "
                f"down idle GPUs, and initialises them again for the next user; {first}run `systemctl enable --now "
                "nvidia-persistenced`",
            )


# Symptoms: messages of NVIDIA's programs, CUDA and container runtimes.

NOT_LOADED = "`nvidia-smi`: couldn't communicate with the NVIDIA driver; CUDA error 100 (NO_DEVICE)"
NO_LIBRARY = "nvidia-ctk: ERROR_LIBRARY_NOT_FOUND; the device plugin: could not load NVML library"
# The numbers are from cuda.h. Many descriptions of 802 and 803 mistake one for the other.
NO_FABRIC = (
    "CUDA error 802 (SYSTEM_NOT_READY), not to be confused with 803 (SYSTEM_DRIVER_MISMATCH); in a confidential "
    "virtual machine, GPUs that nobody has set ready cause it too: `nvidia-smi conf-compute -srs 1`"
)
MISMATCH = "`nvidia-smi`: Driver/library version mismatch; CUDA error 803 (SYSTEM_DRIVER_MISMATCH)"
EPERM = "a GPU opens on the host, but not in the machine: EPERM"
NO_DEVICES = "a CDI specification without devices; `nvidia-smi` in pods: No devices were found"
UNRESOLVABLE = "pods end with `unresolvable CDI devices`, or have no GPU"
NO_RUNTIME = "pods stay in ContainerCreating: no runtime for the handler of their RuntimeClass is configured"

SYMPTOMS: Mapping[tuple[ConditionType, str], str] = {
    (ConditionType.DRIVER_LOADED, Reason.MODULE_NOT_LOADED): NOT_LOADED,
    (ConditionType.DRIVER_LOADED, Reason.WRONG_DRIVER): NOT_LOADED,
    (ConditionType.DEVICES_PRESENT, ""): NO_DEVICES,
    (ConditionType.DEVICES_PRESENT, Reason.GPU_FALLEN_OFF_BUS): "`nvidia-smi`: GPU is lost; Xid 79 in `dmesg`",
    (ConditionType.LIBRARIES_PRESENT, Reason.NOT_INSTALLED): NO_LIBRARY,
    (ConditionType.LIBRARIES_PRESENT, Reason.LIBRARIES_BROKEN): NO_LIBRARY,
    (ConditionType.LIBRARIES_PRESENT, Reason.VERSION_MISMATCH): MISMATCH,
    (ConditionType.FABRIC_READY, ""): NO_FABRIC,
    (ConditionType.PERSISTENCE_MODE, Reason.DAEMON_NOT_RUNNING): "the first use of a GPU after a pause takes seconds",
    (ConditionType.PERSISTENCE_MODE, Reason.PERSISTENCE_DISABLED): "the first use of a GPU after a pause takes seconds",
    (ConditionType.DEVICES_ALLOWED, Reason.NOT_GIVEN): EPERM,
    (ConditionType.DEVICES_ALLOWED, Reason.NOT_PERMITTED): EPERM,
    (ConditionType.LIBRARIES_LINKED, ""): NO_LIBRARY,
    (ConditionType.CDI_SPEC_CURRENT, ""): UNRESOLVABLE,
    (ConditionType.RUNTIME_CONFIGURED, ""): NO_RUNTIME,
    (ConditionType.RUNTIME_ACTIVE, ""): NO_RUNTIME,
}


# Faults of a cluster that keep pods from NVIDIA's GPUs.

RESOURCE = "nvidia.com/gpu"
PRESENT = "nvidia.com/gpu.present"
DEPLOY = "nvidia.com/gpu.deploy."
RUNTIME_CLASS = "nvidia"
HELM = "helm upgrade --namespace gpu-operator gpu-operator nvidia/gpu-operator --version VERSION --reuse-values --set"
"""The beginning of a command that changes a setting of the GPU Operator. Without --version, the command would also
upgrade the Operator."""
INSTALLED = "# VERSION is the installed one: helm list -n gpu-operator"
PLUGIN = "device-plugin"
STRATEGY = "DEVICE_LIST_STRATEGY"
VALIDATION = "-validation"
"""Suffix of the names of the GPU Operator's init containers that wait for its validator's files."""
LATE = 300.0
"""Seconds after which an init container is assumed to wait in vain."""
RECENT = 600.0
"""Seconds for which the change of a label counts as recent."""
SETTLED = 3600.0
"""Age of a Node, in seconds, at which it should have all its labels."""
MANAGER = re.compile(r"gpu-?operator", re.IGNORECASE)
"""Pattern of the names under which the GPU Operator owns fields of objects (metadata.managedFields)."""

PLUGIN_LOGS = (
    (
        re.compile(r"(libcuda|libnvidia-ml)\.so[.\d]*: cannot open|could not load NVML|ERROR_LIBRARY_NOT_FOUND", re.I),
        "the device plugin does not find the driver's libraries",
        (
            "unbounded-agent kube manifests runtime-class device-plugin | kubectl apply -f -  # the settings that work",
            "or set runtimeClassName: nvidia and NVIDIA_DRIVER_ROOT=/ in its values: docs/kubernetes.md",
            "unbounded-agent status --wide  # on the host: LibrariesLinked",
        ),
    ),
    (
        re.compile(r"invalid (device.list.)?strategy:? *\S*", re.I),
        "the device plugin's DEVICE_LIST_STRATEGY has a value that does not exist",
        ("kubectl -n {namespace} set env {owner} DEVICE_LIST_STRATEGY=envvar  # or cdi-cri",),
    ),
)
"""Patterns of messages in the device plugin's log, each with the cause and the fix."""
TOO_NEW = re.compile(
    r"unsatisfied condition: cuda *[<>=]+ *[\d.]+|CUDA driver version is insufficient for CUDA runtime version|"
    r"(?:system has unsupported|forward compatibility was attempted on non supported) .{0,40}"
)
"""Messages of nvidia-container-cli and cudaGetErrorString() if a container's CUDA needs a newer driver."""


def cluster_findings(cluster: Cluster) -> Iterator[Finding]:
    """Yield the faults of the cluster that keep pods from NVIDIA's GPUs."""
    plugins = [each for each in cluster.pods if _is_plugin(each)]
    for pod in plugins:
        yield from _failing_plugin(pod, cluster)
    for pod in cluster.pods:
        yield from _waits_for_markers(pod, cluster.now)
        yield from _needs_newer_driver(pod, cluster)
    yield from _without_runtime_class(cluster, plugins)
    for node in cluster.nodes:
        yield from _unlabelled(node, cluster)
        yield from _reverted(node, cluster.now)
        yield from _installs_own_parts(node, cluster)


def _is_plugin(pod: KubernetesObject) -> bool:
    return any(
        PLUGIN in str(each.get("image", "")) and "nvidia" in str(each.get("image", "")) for each in containers(pod)
    )


def _owner(pod: KubernetesObject) -> str:
    """Return the pod's owner as `kind/name`; the pod itself if it has no owner.

    The text is quoted for a command, because whoever makes the pod can name any owner.
    """
    owner = ((pod.get("metadata") or {}).get("ownerReferences") or [{}])[0]
    name = owner.get("name", (pod.get("metadata") or {}).get("name", ""))
    return shlex.quote(f"{str(owner.get('kind', 'pod')).lower()}/{name}")


def _failing_plugin(pod: KubernetesObject, cluster: Cluster) -> Iterator[Finding]:
    if not crashes(pod):
        return
    text = "\n".join((*kubelet_messages(pod), cluster.logs.get(name(pod), "")))
    namespace = str((pod.get("metadata") or {}).get("namespace", ""))
    for pattern, cause, fix in PLUGIN_LOGS:
        if found := pattern.search(text):
            commands = tuple(each.format(namespace=namespace, owner=_owner(pod)) for each in fix)
            yield Finding(cause, f"pod {name(pod)}: {_line(text, found)}", commands)
            return
    logs = f"kubectl -n {namespace} logs {name(pod).rpartition('/')[2]} --previous"
    yield Finding("the device plugin keeps failing", f"pod {name(pod)}: CrashLoopBackOff", (logs,))


def _line(text: str, found: re.Match[str]) -> str:
    """Return the line that contains a match; of a longer line, only the last 300 characters."""
    start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    return text[start : end if end >= 0 else len(text)].strip()[-300:]


def _waits_for_markers(pod: KubernetesObject, now: float) -> Iterator[Finding]:
    for each in statuses(pod, init=True):
        running = (each.get("state") or {}).get("running")
        late = running is not None and now - seconds(running.get("startedAt")) > LATE
        if late and str(each.get("name", "")).endswith(VALIDATION) and "nvidia-operator-validator" not in name(pod):
            yield Finding(
                "a component of the GPU Operator waits for files of the Operator's validator",
                f"pod {name(pod)}: init container {each['name']} is still running",
                (
                    "set machines.NAME.validation_markers = true, then: systemctl reload unbounded-agent",
                    "unbounded-agent status --wide  # ValidationMarkersSet says which file is missing and why",
                ),
            )


def _needs_newer_driver(pod: KubernetesObject, cluster: Cluster) -> Iterator[Finding]:
    text = "\n".join((*kubelet_messages(pod), cluster.logs.get(name(pod), "")))
    if found := TOO_NEW.search(text):
        yield Finding(
            "a pod's CUDA is newer than the driver supports",
            f"pod {name(pod)}: {_line(text, found)}",
            (
                "unbounded-agent doctor | grep 'driver for pods'  # on the host: the newest CUDA that works",
                "use an image with that CUDA version or an older one, or install a newer driver on the host",
            ),
        )


def _without_runtime_class(cluster: Cluster, plugins: list[KubernetesObject]) -> Iterator[Finding]:
    strategies = {
        environment(each).get(STRATEGY, "envvar")
        for pod in plugins
        for each in containers(pod)
        if PLUGIN in str(each.get("image", ""))
    }
    if strategies != {"envvar"}:
        # With a CDI strategy, the kubelet requests the CDI devices, so pods need no runtime class. If there is no
        # plugin, or if plugins have different strategies, the strategy that counts for a pod is unknown.
        return
    for pod in cluster.pods:
        running = (pod.get("status") or {}).get("phase") == "Running"
        if running and RESOURCE in limited_resources(pod) and not pod_spec(pod).get("runtimeClassName"):
            yield Finding(
                "a pod has a GPU allocated, but no runtime class that gives it the GPU",
                f"pod {name(pod)} has a limit {RESOURCE} and no runtimeClassName; the plugin's strategy is envvar",
                (
                    f"set runtimeClassName: {RUNTIME_CLASS} in the pod",
                    "or DEVICE_LIST_STRATEGY=cdi-cri for the plugin, or machines.NAME.default_runtime = true",
                ),
            )


def _unlabelled(node: KubernetesObject, cluster: Cluster) -> Iterator[Finding]:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    if RESOURCE not in allocatable or labels(node).get(PRESENT) == "true":
        return
    selecting = [
        each for each in (*cluster.pods, *cluster.daemon_sets) if PRESENT in (pod_spec(each).get("nodeSelector") or {})
    ]
    if selecting:
        yield Finding(
            f"node {name(node)} has GPUs, but not the label {PRESENT}=true, which pods select",
            f"{RESOURCE} is allocatable there; {name(selecting[0])} has the nodeSelector {PRESENT}",
            (
                f"kubectl label node {name(node)} {PRESENT}=true",
                "or set gpu_labels in machines.NAME.node.kubelet before `up`; the GPU Operator sets the label itself",
            ),
        )


def _reverted(node: KubernetesObject, now: float) -> Iterator[Finding]:
    metadata = node.get("metadata") or {}
    if now - seconds(metadata.get("creationTimestamp")) < SETTLED:
        return
    for entry in metadata.get("managedFields") or ():
        owned = (((entry.get("fieldsV1") or {}).get("f:metadata") or {}).get("f:labels") or {}).keys()
        deploy_labels = [each.removeprefix("f:") for each in owned if each.startswith(f"f:{DEPLOY}")]
        recent = now - seconds(entry.get("time")) < RECENT
        if deploy_labels and recent and MANAGER.search(str(entry.get("manager", ""))):
            yield Finding(
                f"the GPU Operator keeps setting labels of node {name(node)} that something else changes",
                f"{', '.join(sorted(deploy_labels)[:3])}: set by {entry['manager']} at {entry['time']}",
                (
                    "leave these labels as the Operator sets them: no pods of its driver and toolkit are needed here",
                    f"{HELM} driver.enabled=false,toolkit.enabled=false  {INSTALLED}",
                ),
            )


def _installs_own_parts(node: KubernetesObject, cluster: Cluster) -> Iterator[Finding]:
    for part, setting in (("driver", "driver.enabled"), ("container-toolkit", "toolkit.enabled")):
        label = f"{DEPLOY}{part}"
        active_sets = [
            each
            for each in cluster.daemon_sets
            if label in (pod_spec(each).get("nodeSelector") or {})
            and (each.get("status") or {}).get("desiredNumberScheduled", 0)
        ]
        if labels(node).get(label) == "true" and active_sets:
            yield Finding(
                f"the GPU Operator installs its own {part} into node {name(node)}, which already has it",
                f"label {label}=true; DaemonSet {name(active_sets[0])} runs pods on such nodes",
                (f"{HELM} {setting}=false  {INSTALLED}",),
            )
