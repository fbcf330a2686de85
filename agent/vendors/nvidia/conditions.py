"""Evaluates the host's conditions for NVIDIA's GPUs and driver. Messages say what to do next. Pure."""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from agent.model.conditions import Condition, ConditionType, Reason, Status, false, not_applicable, true, unknown, worst
from agent.model.device import DeviceKind
from agent.model.facts import Absent, Broken, Driver, FabricService, Seen, Unseen, UserSpace, VendorFacts, Verdict
from agent.model.goal import Grant
from agent.model.handoff import FabricAnswer, HealthAnswer
from agent.model.text import counted, printable, whole_number
from agent.vendors.host_vendor import (
    Cluster,
    FabricReport,
    Finding,
    KubernetesObject,
    OwnWord,
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
from agent.vendors.nvidia.contract import (
    DRAIN_AND_RESET,
    FABRIC_HEALTH,
    LINK_ERRORS,
    PAGES_PENDING,
    POWER_BRAKE,
    RECOVERY_ACTION,
    REGISTERED,
    REQUIRES_RESET,
    RESET_REQUIRED,
    ROWS_FAILED,
    ROWS_PENDING,
    UNCORRECTED,
    has_fabric,
    is_answer,
    is_registered,
)
from agent.vendors.nvidia.devices import ACTIONS, built_in, misbound_gpus, modules_to_blacklist
from agent.vendors.nvidia.driver import FABRIC_MANAGER, RUNNING, has_unit

UNLOAD_ORDER = ("nvidia_fs", "nvidia_peermem", "nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia")
"""Each module comes before the modules that it uses (modinfo's `depends` of NVIDIA's open kernel modules)."""
DAEMONS = "nvidia-persistenced nvidia-fabricmanager nvidia-dcgm"
"""Services that keep GPUs open. If one is not installed, `systemctl stop` stops the others all the same."""
LOAD = "modprobe -a nvidia nvidia_uvm"
DRIVER_LOG = "dmesg | grep -iE 'nvidia|nvrm'"
ENABLE_FABRIC_MANAGER = "systemctl enable --now nvidia-fabricmanager"
ENABLE_PERSISTENCE = "systemctl enable --now nvidia-persistenced"
INSTALL_PERSISTENCE = "apt install nvidia-persistenced  # Ubuntu: nvidia-compute-utils-BRANCH"
SHOW_FABRIC_LOG = "journalctl -b -u nvidia-fabricmanager --no-pager -n 50"
REINSTALL_LIBRARIES = "apt install --reinstall libcuda1 libnvidia-ml1 && ldconfig  # Ubuntu: libnvidia-compute-BRANCH"

RESET = (
    "dmesg | grep -iE 'nvrm|xid'  # names the GPU",
    "unbounded-agent stop {machine} --kubeconfig FILE  # moves its pods away; with DRA, not needed",
    "unbounded-agent gpus reset PCI-ADDRESS  # names what still has the GPU open",
    "systemctl reboot  # only if the reset fails: ends all machines of the host: stop the others first too",
    "unbounded-agent start {machine} --kubeconfig FILE  # lets pods run there again",
)
"""The order of docs/runbooks.md: a drain leaves the device plugin, which has every GPU open."""

FIXED: Mapping[tuple[ConditionType, str], tuple[str, ...]] = {
    (ConditionType.DRIVER_LOADED, Reason.MODULE_NOT_LOADED): (
        f"{LOAD}  # at each boot: driver.load_modules = true",
        "dmesg | grep -iE 'nvidia|nvrm|key was rejected'  # if that fails",
        "mokutil --sb-state  # a rejected key: Secure Boot wants a signed module",
        "apt install linux-headers-$(uname -r) && dkms autoinstall -k $(uname -r)  # if this kernel has no module",
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
    (ConditionType.LIBRARIES_PRESENT, Reason.PARTLY_OTHER_VERSION): (REINSTALL_LIBRARIES,),
    (ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_STARTING): (SHOW_FABRIC_LOG,),
    (ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_STUCK): (
        SHOW_FABRIC_LOG,
        "systemctl restart nvidia-fabricmanager",
    ),
    (ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_NOT_RUNNING): (
        ENABLE_FABRIC_MANAGER,
        SHOW_FABRIC_LOG,
    ),
    (ConditionType.GPUS_HEALTHY, Reason.GPU_NEEDS_RESET): RESET,
    (ConditionType.DEVICES_ALLOWED, Reason.GPU_FAILED): RESET,
    (ConditionType.CDI_SPEC_CURRENT, Reason.PARTITION_MISSING): (
        "nvidia-smi -L  # is the instance that is named above listed? If not, destroy it and create it again",
    ),
    (ConditionType.PERSISTENCE_MODE, Reason.DAEMON_NOT_RUNNING): (
        "systemctl unmask nvidia-persistenced  # needed only if it is masked",
        ENABLE_PERSISTENCE,
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
    driver = facts.driver
    version = driver.module_version if driver and isinstance(driver.module_version, str) else ""
    match kind, reason:
        case ConditionType.LIBRARIES_PRESENT, Reason.VERSION_MISMATCH:
            why = f"if driver {version or 'of the module'} is installed too, choose it: nothing else is needed"
            return (f"update-alternatives --config nvidia && ldconfig  # Debian: {why}", *_reload_driver(modules))
        case (_, Reason.RELOAD_NEEDED) | (ConditionType.DRIVER_ROOT_STAGED, Reason.NOTHING_FITS):
            return _reload_driver(modules)
        case ConditionType.FABRIC_READY, (
            Reason.FABRIC_MANAGER_MISSING
            | Reason.FABRIC_REGISTERING
            | Reason.FABRIC_NOT_REGISTERED
            | Reason.FABRIC_FAILED
        ):
            return _start_fabric_manager(reason, driver.fabric_service if driver else FabricService(), version)
        case ConditionType.PERSISTENCE_MODE, Reason.DAEMON_NOT_RUNNING if driver and isinstance(
            driver.persistence, Absent
        ):
            return (INSTALL_PERSISTENCE, *FIXED[kind, reason][1:])
        case ConditionType.DRIVER_LOADED, Reason.WRONG_DRIVER:
            return _unbind_other_drivers(facts)
        case ConditionType.DEVICES_PRESENT, Reason.GPU_WITHOUT_DRIVER if any(gpu.why_unbound for gpu in facts.gpus):
            return (DRIVER_LOG,)
        case ConditionType.DEVICES_PRESENT, Reason.GPU_WITHOUT_DRIVER if "nvidia" in modules:
            # Not for all GPUs without a driver: some may be so on purpose. The condition names the granted ones.
            return (_bind("PCI-ADDRESS"), DRIVER_LOG)
        case ConditionType.DEVICES_PRESENT, Reason.NODES_MISSING:
            return (
                "nvidia-smi",
                *(f"{each}  # for /dev/nvidia{each.rpartition(' ')[2]}" for each in _make_nodes(facts)),
                *(f"{command}  # for {path}" for path, command in NEEDED_BY_ALL.values()),
            )
        case ConditionType.DEVICES_PRESENT, Reason.GPU_NOT_FOUND:
            without = [gpu.pci_address for gpu in facts.gpus if gpu.driver and not gpu.uuid and not gpu.excluded]
            return (f"nvidia-smi -L  # initialises {', '.join(without)}, whose UUID is not known yet",) * bool(without)
        case _:
            return FIXED.get((kind, reason), ())


def _bind(pci_address: str) -> str:
    """Return the command that binds the loaded driver to a GPU (sysfs-bus-pci of the kernel's documentation)."""
    return f"echo {pci_address} > /sys/bus/pci/drivers/nvidia/bind"


def _make_nodes(facts: VendorFacts, addresses: Collection[str] = ()) -> tuple[str, ...]:
    """Return the commands that make the missing nodes of GPUs; with `addresses`, only of these GPUs."""
    nodes = facts.devices if isinstance(facts.devices, tuple) else ()
    present = {node.pci_address for node in nodes if node.kind is DeviceKind.GPU}
    missing = [
        gpu.minor
        for gpu in facts.gpus
        if gpu.driver and gpu.pci_address not in present and (not addresses or gpu.pci_address in addresses)
    ]
    commands = tuple(f"nvidia-modprobe -c {minor}" for minor in missing if minor is not None)
    # The driver has not said which minor the GPU has.
    return (*commands, "nvidia-modprobe -c N") if None in missing or not commands else commands


def _reload_driver(modules: Set[str]) -> tuple[str, ...]:
    loaded = [each for each in UNLOAD_ORDER if each in modules] or ["nvidia_uvm", "nvidia"]
    return (
        "unbounded-agent gpus holders  # stop or drain all users first: machines, containers, a display",
        f"systemctl stop {DAEMONS}",
        f"rmmod {' '.join(loaded)}  # in this order",
        f"modprobe -a {' '.join(reversed(loaded))}",
        f"systemctl start {DAEMONS}  # those that ran before",
        "systemctl reboot  # instead, if a module stays in use: drain the nodes of all machines first",
    )


def _start_fabric_manager(reason: str, service: FabricService, version: str) -> tuple[str, ...]:
    install = f"apt install nvidia-fabricmanager-{version.partition('.')[0] or 'BRANCH'}"
    exactly = f"exactly version {version or 'of the driver'}"
    unmask = "systemctl unmask nvidia-fabricmanager  # needed only if it is masked"
    from_scratch = (f"{install}  # {exactly}", unmask, ENABLE_FABRIC_MANAGER)
    if reason == Reason.FABRIC_MANAGER_MISSING:
        return from_scratch
    start: tuple[str, ...]
    if has_unit(service):
        start = ("systemctl enable nvidia-fabricmanager", "systemctl restart nvidia-fabricmanager", SHOW_FABRIC_LOG)
    elif service.state == RUNNING:
        # Not by the name alone: the kernel keeps only its first 15 characters.
        start = (f"pgrep -af {FABRIC_MANAGER}  # it has no unit: see its log, and restart the container that runs it",)
    elif isinstance(service.state, Broken):
        start = (*from_scratch, SHOW_FABRIC_LOG)
    elif isinstance(service.state, Unseen):
        start = (SHOW_FABRIC_LOG,)
    else:
        # A virtual machine, or a tray of a rack, has none: the fabric is managed elsewhere.
        only = "only if this host manages the fabric"
        start = (f"{install}  # {only}: {exactly}", f"{ENABLE_FABRIC_MANAGER}  # {only}")
    modules = service.missing_modules
    load = f"modprobe -a {' '.join(modules)}  # HGX B200 and B300: the Fabric Manager needs them"
    query = "nvidia-smi --query-gpu=pci.bus_id,fabric.state,fabric.status --format=csv"
    return (*((load,) if modules else ()), *start, query)


def _unbind_other_drivers(facts: VendorFacts) -> tuple[str, ...]:
    lines: list[str] = []
    if modules := modules_to_blacklist(facts.gpus):
        lines += [f"echo 'blacklist {each}' >> /etc/modprobe.d/blacklist-gpu.conf" for each in modules]
        lines += ["update-initramfs -u  # RPM-based hosts: dracut --force"]
        lines += ["systemctl reboot  # drain the nodes of all machines first"]
    for address in built_in(facts.gpus):
        device = f"/sys/bus/pci/devices/{address}"
        lines += [f"echo nvidia > {device}/driver_override", f"echo {address} > {device}/driver/unbind"]
    return (*lines, LOAD) if built_in(facts.gpus) else tuple(lines)


NEEDED_BY_ALL = {
    DeviceKind.CONTROL: ("/dev/nvidiactl", "nvidia-modprobe -c 255"),
    # With -u, the number is the minor of /dev/nvidia-uvm, which must be 0.
    DeviceKind.UVM: ("/dev/nvidia-uvm", "nvidia-modprobe -u -c 0"),
}
NOT_REPORTED = FabricReport()
DOCTOR_KNOWS = "`unbounded-agent doctor` on the host has the commands"
OWN_FABRIC_MANAGER = "nv-fabricmanager runs, but not as this host's service"
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
        case str(version):
            what = f"kernel module nvidia {version} is loaded for {counted(len(facts.gpus), 'GPU')}"
            return true(kind, Reason.LOADED, what)
        case Absent():
            pass
    if wrong := misbound_gpus(facts.gpus):
        names = ", ".join(sorted({gpu.driver for gpu in wrong}))
        return false(kind, Reason.WRONG_DRIVER, f"the GPUs have kernel driver {names}; {DOCTOR_KNOWS}")
    library = driver.user_space.version
    state = f"libraries {library} are installed, but the" if isinstance(library, str) else "the"
    what = f"{state} kernel module nvidia is not loaded"
    if why := "; ".join(f"{gpu.pci_address}: {gpu.why_unbound}" for gpu in facts.gpus if gpu.why_unbound):
        # The module does not stay loaded if it can take no GPU.
        return false(kind, Reason.MODULE_NOT_LOADED, f"{what}; {why}; then run `{LOAD}`")
    return false(kind, Reason.MODULE_NOT_LOADED, f"{what}; run `{LOAD}`; if that fails, {DOCTOR_KNOWS}")


def _devices_present(facts: VendorFacts, driver: Driver, grant: Grant) -> Condition:
    kind = ConditionType.DEVICES_PRESENT
    if fault := unusable(facts, grant):
        return fault

    def advice_on_driver(unbound: tuple[str, ...]) -> str:
        # If the module is loaded already, modprobe does nothing, so the advice is to bind the driver to the GPUs.
        loaded = isinstance(driver.module_version, str)
        commands = [_bind(each) for each in unbound] if loaded else [LOAD]
        return f"run {' and '.join(f'`{each}`' for each in commands)}, and see `dmesg`"

    advice = f"run `nvidia-smi` or {' and '.join(f'`{each}`' for each in _make_nodes(facts, grant.gpus))}"
    faults = list(faulty_gpus(facts, grant, DeviceKind.GPU, "/dev/nvidiaN", advice, advice_on_driver))
    # If no GPU works, that may be why the nodes that all need are missing.
    if {gpu for each in faults for gpu in each.gpus} != set(grant.gpus):
        present_kinds = {node.kind for node in grant.nodes}
        # A node may exist and yet be unusable: it may have the number from a module that was loaded before.
        faults[:0] = [
            false(kind, Reason.NODES_MISSING, f"{facts.node_problems.get(path, f'{path} is missing')}; run `{command}`")
            for needed, (path, command) in NEEDED_BY_ALL.items()
            if needed not in present_kinds
        ]
    if faults:
        return worst(faults)
    incomplete = "".join(f"; {each.why}" for each in facts.incomplete if each.pci_address in grant.gpus)
    present = f"{counted(len(grant.nodes), 'node')} for {counted(len(grant.gpus), 'GPU')}{incomplete}"
    if grant.detached:
        return true(kind, Reason.GPU_DETACHED, f"{present}; detached or being reset: {', '.join(grant.detached)}")
    return true(kind, Reason.PRESENT, present)


def _libraries_present(driver: Driver, grant: Grant) -> Condition:
    kind, module, user_space = ConditionType.LIBRARIES_PRESENT, driver.module_version, driver.user_space
    library, serving = user_space.version, grant.driver_root.version if grant.driver_root else ""
    if isinstance(library, Unseen):
        return unknown(kind, Reason.OBSERVATION_FAILED, library.why)
    not_used = f"; not used: {', '.join(user_space.other_places)}" if user_space.other_places else ""
    if isinstance(library, str) and isinstance(module, str) and module != library:
        if serving == module:
            what = f"the machine keeps libraries {module} until the kernel module of {library}, as installed, is loaded"
            return true(kind, Reason.RELOAD_NEEDED, f"{what}: reload it, or reboot the host")
        what = f"kernel module {module} and libraries {library} differ; {DOCTOR_KNOWS}, or reboot the host"
        return false(kind, Reason.VERSION_MISMATCH, f"{what}{_other_drivers(user_space)}")
    if not isinstance(library, str) or not isinstance(user_space.files, tuple):
        fault = _libraries_fault(user_space, module)
        if not serving or serving != module:
            return fault
        staged = f"machines use the staged copy of driver {serving}, because the host's own files are unusable"
        return true(kind, Reason.ONLY_STAGED, f"{staged}: {fault.message}")
    where = f" from {user_space.place}" if user_space.place else ""
    parts = [f"{len(user_space.files)} files of driver {library}{where}{not_used}"]
    if user_space.not_installed:
        parts.append(f"not installed on this host: {', '.join(user_space.not_installed)}")
    if user_space.other_version:
        left_out = ", ".join(user_space.other_version)
        parts.append(f"left out, because their version differs: {left_out}; {REINSTALL}")
    reason = Reason.PARTLY_OTHER_VERSION if user_space.other_version else Reason.PRESENT
    return true(kind, reason, "; ".join(parts))


def _libraries_fault(user_space: UserSpace, module: Seen[str]) -> Condition:
    kind, library, files = ConditionType.LIBRARIES_PRESENT, user_space.version, user_space.files
    if not isinstance(files, tuple) and isinstance(library, str):
        return false(kind, Reason.LIBRARIES_BROKEN, f"{files.why}; {REINSTALL}")
    why = "" if isinstance(library, str) else library.why
    if user_space.place_key:
        return false(
            kind,
            Reason.NOT_IN_CONFIGURED_PLACE,
            f"the configured {user_space.place} holds no usable driver: {why}; correct the key {user_space.place_key}, "
            "or remove it to let the agent search",
        )
    if isinstance(library, Broken):
        where = f"{user_space.place}: " if user_space.place else ""
        return false(kind, Reason.LIBRARIES_BROKEN, f"{where}{why}; {REINSTALL}{_other_drivers(user_space)}")
    wanted = f" {module}" if isinstance(module, str) else ""
    return false(
        kind,
        Reason.NOT_INSTALLED,
        "neither `ldconfig -p` nor another known place has libcuda and libnvidia-ml; install the driver's user-space "
        f"libraries{wanted} and run ldconfig, or name their place in driver.root or driver.library_directories"
        f"{_other_drivers(user_space)}",
    )


def _other_drivers(user_space: UserSpace) -> str:
    not_used = f"; not used: {', '.join(user_space.other_places)}" if user_space.other_places else ""
    return not_used + "".join(f"; not searched: {each}" for each in user_space.skipped_directories)


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
    all_asked = all(each.state for each in answers)
    if not silent and all_asked and inferred.reason == Reason.NOT_APPLICABLE:
        return not_applicable(kind, "the GPUs have no NVLink fabric (fabric.state N/A)")
    unknown_to = "" if all_asked else "the driver is too old to be asked for fabric.state"
    why = unanswered or unknown_to or "these GPUs do not say whether they are registered (fabric.state N/A)"
    return inferred._replace(message=printable(f"{inferred.message}; inferred: {why}"))


def _not_registered(faulty: Sequence[FabricAnswer], unanswered: str, service: FabricService) -> Condition:
    kind, concerned = ConditionType.FABRIC_READY, tuple(each.gpu for each in faulty)
    said = "; ".join(filter(None, (*_words(faulty), unanswered, *_fabric_advice(service))))
    message = f"GPUs are not registered with the NVLink fabric, so CUDA fails with error 802 (SYSTEM_NOT_READY): {said}"
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


def _fabric_advice(service: FabricService) -> Iterator[str]:
    if names := service.missing_modules:
        yield f"not loaded: {', '.join(names)}, which the Fabric Manager of HGX B200 and B300 needs"
    match service.state:
        case "running":
            yield OWN_FABRIC_MANAGER
        case Absent():
            yield "nvidia-fabricmanager.service is not installed"
        case Broken(why) | Unseen(why):
            yield why
        case state:
            yield f"nvidia-fabricmanager.service is {state}"
    yield DOCTOR_KNOWS


def _inferred_fabric(fabric: Seen[str]) -> Condition:
    kind = ConditionType.FABRIC_READY
    match fabric:
        case Absent(why):
            return not_applicable(kind, why)
        case Unseen(why):
            return unknown(kind, Reason.OBSERVATION_FAILED, why)
        case Broken(why):
            return false(kind, Reason.FABRIC_MANAGER_MISSING, f"{why}; then run `{ENABLE_FABRIC_MANAGER}`")
        case "active":
            return true(kind, Reason.FABRIC_MANAGER_ACTIVE, "nvidia-fabricmanager.service is active")
        case "running":
            return true(kind, Reason.FABRIC_MANAGER_ACTIVE, OWN_FABRIC_MANAGER)
        case "activating" | "reloading":
            return unknown(kind, Reason.FABRIC_MANAGER_STARTING, "nvidia-fabricmanager.service is starting")
        case state:
            what = f"nvidia-fabricmanager.service is {state}, so CUDA fails with error 802 (SYSTEM_NOT_READY)"
            return false(kind, Reason.FABRIC_MANAGER_NOT_RUNNING, f"{what}; run `{ENABLE_FABRIC_MANAGER}`")


def _persistence_mode(daemon: Seen[str], grant: Grant, report: FabricReport) -> Condition:
    """Return what the GPUs say of persistence mode or, if some do not, what the persistence daemon's unit shows."""
    kind = ConditionType.PERSISTENCE_MODE
    match daemon:
        case "active":
            inferred = true(kind, Reason.DAEMON_ACTIVE, "nvidia-persistenced.service is active")
        case "running":
            inferred = true(kind, Reason.DAEMON_ACTIVE, "nvidia-persistenced runs, but not as this host's service")
        case Unseen(why):
            inferred = unknown(kind, Reason.OBSERVATION_FAILED, why)
        case state:
            why, first = "nvidia-persistenced.service is not running", ""
            if isinstance(state, Broken):
                first = f"{state.why}; then "
            elif isinstance(state, Absent):
                why, first = state.why, "install nvidia-persistenced (Ubuntu: nvidia-compute-utils-BRANCH), then "
            what = f"{why}: unless somebody ran `nvidia-smi -pm 1`, the driver shuts down GPUs that nobody uses; "
            what += f"{first}run `{ENABLE_PERSISTENCE}`"
            inferred = false(kind, Reason.DAEMON_NOT_RUNNING, what)
    said = {each.gpu: each.persistence for each in report.answers if each.persistence in ("Enabled", "Disabled")}
    off = [gpu for gpu in grant.gpus if said.get(gpu) == "Disabled"]
    if off and inferred.status is not Status.FALSE:
        what = f"{inferred.message}, but not in persistence mode: {', '.join(off)}; {DOCTOR_KNOWS}"
        return false(kind, Reason.PERSISTENCE_DISABLED, what)
    if off or not grant.gpus:
        return inferred
    if silent := ", ".join(sorted(set(grant.gpus) - said.keys())):
        return inferred._replace(message=printable(f"{inferred.message}; inferred: no answer from {silent}"))
    return true(kind, Reason.PERSISTENCE_ENABLED, f"{counted(len(grant.gpus), 'GPU')} in persistence mode")


# What follows from what a GPU says of its own health. A newcomer adds a row, and a field to contract.HEALTH_FIELDS.

YES, ACTIVE = "Yes", "Active"
NOTHING = "None"
ACTION_WORDS = ("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset", "Recover IMEX Domain")
"""What nvidia-smi 580 and later print for the recovery actions 0 to 5 (nvmlDeviceGpuRecoveryAction_t of NVML R610)."""
ASKED_FOR = {
    word: OwnWord(verdict, f"RecoveryAction{word.title().replace(' ', '')}", meaning) if number else OwnWord()
    for number, word in enumerate(ACTION_WORDS)
    for verdict, meaning in (ACTIONS[number],)
}
OWN_WORDS: Mapping[tuple[str, str], OwnWord] = {
    **{(RECOVERY_ACTION, word): found for word, found in ASKED_FOR.items()},
    (RESET_REQUIRED, YES): ASKED_FOR["Reset"],
    (DRAIN_AND_RESET, YES): ASKED_FOR["Drain and Reset"],
    (ROWS_FAILED, YES): OwnWord(
        Verdict.BROKEN, "RowRemapFailure", "a bad row of its memory could not be remapped; replace the GPU"
    ),
    (ROWS_PENDING, YES): OwnWord(
        Verdict.DEGRADED, "RowRemapPending", "a bad row of its memory is remapped at the next reset; plan one"
    ),
    (PAGES_PENDING, YES): OwnWord(
        Verdict.DEGRADED,
        "PageRetirementPending",
        "a bad page of its memory is retired when the driver is loaded again; plan that, or a reboot",
    ),
    (POWER_BRAKE, ACTIVE): OwnWord(
        Verdict.DEGRADED,
        "PowerBrake",
        "the server makes it run at half its clocks or less (hardware power brake); check the power supplies",
    ),
    (FABRIC_HEALTH, "Unhealthy"): OwnWord(
        Verdict.DEGRADED, "FabricUnhealthy", f"its NVLink fabric is not healthy; see `{SHOW_FABRIC_LOG}`"
    ),
    (FABRIC_HEALTH, "Limited Capacity"): OwnWord(
        Verdict.DEGRADED, "FabricLimited", f"its NVLink fabric has less bandwidth; see `{SHOW_FABRIC_LOG}`"
    ),
    **{
        (LINK_ERRORS, kind): OwnWord(
            Verdict.DEGRADED, f"NVLink{kind}Errors", f"its NVLinks count new {kind} errors; see `nvidia-smi nvlink -e`"
        )
        for kind in ("Recovery", "Replay", "CRC")
    },
}
"""What each word means, by field. Words without a row mean nothing, except recovery actions."""
ONLY_A_RESET = OwnWord(
    Verdict.NEEDS_RESET, "RequiresReset", "NVML refuses to query it until it is reset; drain the node and reset the GPU"
)


def judge(answer: HealthAnswer) -> OwnWord:
    """Return the worst that the GPU says. What it does not say is no fault."""
    said, action = answer.said, answer.said.get(RECOVERY_ACTION, NOTHING)
    found = [ONLY_A_RESET] if REQUIRES_RESET in said.values() else []
    found += [row for (field, word), row in OWN_WORDS.items() if said.get(field) == word]
    if errors := whole_number(said.get(UNCORRECTED, "")):
        what = f"{counted(errors, 'uncorrected ECC error')} since the driver initialised it; reset it when it is free"
        found.append(OwnWord(Verdict.DEGRADED, "UncorrectedECC", what))
    if (RECOVERY_ACTION, action) not in OWN_WORDS and action != REQUIRES_RESET:
        what = "the GPU asks for a recovery that this release does not know; see `nvidia-smi -q`"
        found.append(OwnWord(Verdict.DEGRADED, "RecoveryActionUnknown", what))
    return max(found, key=lambda each: each.verdict.severity, default=OwnWord())


def needs_nothing(answer: HealthAnswer) -> bool:
    return answer.said.get(RECOVERY_ACTION) == NOTHING and not judge(answer).verdict.fenced


# Symptoms: messages of NVIDIA's programs, CUDA and container runtimes.

NOT_LOADED = "`nvidia-smi`: couldn't communicate with the NVIDIA driver; CUDA error 100 (NO_DEVICE)"
NO_LIBRARY = "nvidia-ctk: ERROR_LIBRARY_NOT_FOUND; the device plugin: could not load NVML library"
SLOW_START = "the first use of a GPU after a pause takes seconds"
EPERM = "a GPU opens on the host, but not in the machine: EPERM"
NO_RUNTIME = "pods stay in ContainerCreating: no runtime for the handler of their RuntimeClass is configured"

SYMPTOMS: Mapping[tuple[ConditionType, str], str] = {
    (ConditionType.DRIVER_LOADED, Reason.MODULE_NOT_LOADED): NOT_LOADED,
    (ConditionType.DRIVER_LOADED, Reason.WRONG_DRIVER): NOT_LOADED,
    (ConditionType.DEVICES_PRESENT, ""): (
        "a CDI specification without devices; `nvidia-smi` in pods: No devices were found"
    ),
    (ConditionType.DEVICES_PRESENT, Reason.GPU_FALLEN_OFF_BUS): "`nvidia-smi`: GPU is lost; Xid 79 in `dmesg`",
    (ConditionType.LIBRARIES_PRESENT, Reason.NOT_INSTALLED): NO_LIBRARY,
    (ConditionType.LIBRARIES_PRESENT, Reason.LIBRARIES_BROKEN): NO_LIBRARY,
    # The numbers of CUDA's errors are from cuda.h. Many descriptions of 802 and 803 mistake one for the other.
    (ConditionType.LIBRARIES_PRESENT, Reason.VERSION_MISMATCH): (
        "`nvidia-smi`: Driver/library version mismatch; CUDA error 803 (SYSTEM_DRIVER_MISMATCH)"
    ),
    (ConditionType.FABRIC_READY, ""): (
        "CUDA error 802 (SYSTEM_NOT_READY), not to be confused with 803 (SYSTEM_DRIVER_MISMATCH); in a confidential "
        "virtual machine, GPUs that nobody has set ready cause it too: `nvidia-smi conf-compute -srs 1`"
    ),
    (ConditionType.PERSISTENCE_MODE, Reason.DAEMON_NOT_RUNNING): SLOW_START,
    (ConditionType.PERSISTENCE_MODE, Reason.PERSISTENCE_DISABLED): SLOW_START,
    (ConditionType.DEVICES_ALLOWED, Reason.NOT_GIVEN): EPERM,
    (ConditionType.DEVICES_ALLOWED, Reason.NOT_PERMITTED): EPERM,
    (ConditionType.LIBRARIES_LINKED, ""): NO_LIBRARY,
    (ConditionType.CDI_SPEC_CURRENT, ""): "pods end with `unresolvable CDI devices`, or have no GPU",
    (ConditionType.RUNTIME_CONFIGURED, ""): NO_RUNTIME,
    (ConditionType.RUNTIME_ACTIVE, ""): NO_RUNTIME,
}


# Faults of a cluster that keep pods from NVIDIA's GPUs.

RESOURCE = "nvidia.com/gpu"
PRESENT = "nvidia.com/gpu.present"
DEPLOY = "nvidia.com/gpu.deploy."
HELM = "helm upgrade --namespace gpu-operator gpu-operator nvidia/gpu-operator --version VERSION --reuse-values --set"
"""The beginning of a command that changes a setting of the GPU Operator. Without --version, the command would also
upgrade the Operator."""
INSTALLED = "# VERSION is the installed one: helm list -n gpu-operator"
PLUGIN = "device-plugin"
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
    plugins = [
        each
        for pod in cluster.pods
        for each in containers(pod)
        if PLUGIN in str(each.get("image", "")) and "nvidia" in str(each.get("image", ""))
    ]
    for pod in cluster.pods:
        text = "\n".join((*kubelet_messages(pod), cluster.logs.get(name(pod), "")))
        if crashes(pod) and any(each in plugins for each in containers(pod)):
            yield _failing_plugin(pod, text)
        yield from _waits_for_markers(pod, cluster.now)
        if found := TOO_NEW.search(text):
            yield Finding(
                "a pod's CUDA is newer than the driver supports",
                f"pod {name(pod)}: {_line(text, found)}",
                (
                    "unbounded-agent doctor | grep 'driver for pods'  # on the host: the newest CUDA that works",
                    "use an image with that CUDA version or an older one, or install a newer driver on the host",
                ),
            )
    # With a CDI strategy, the kubelet requests the CDI devices, so pods need no runtime class. If there is no plugin,
    # or if plugins have different strategies, the strategy that counts for a pod is unknown.
    if {environment(each).get("DEVICE_LIST_STRATEGY", "envvar") for each in plugins} == {"envvar"}:
        yield from _without_runtime_class(cluster)
    for node in cluster.nodes:
        yield from _unlabelled(node, cluster)
        yield from _reverted(node, cluster.now)
        yield from _installs_own_parts(node, cluster)


def _failing_plugin(pod: KubernetesObject, text: str) -> Finding:
    metadata = pod.get("metadata") or {}
    namespace = str(metadata.get("namespace", ""))
    # Quoted for a command, because whoever makes the pod can name any owner.
    owner = (metadata.get("ownerReferences") or [{"name": metadata.get("name", "")}])[0]
    quoted = shlex.quote(f"{str(owner.get('kind', 'pod')).lower()}/{owner.get('name', metadata.get('name', ''))}")
    for pattern, cause, fix in PLUGIN_LOGS:
        if found := pattern.search(text):
            commands = tuple(each.format(namespace=namespace, owner=quoted) for each in fix)
            return Finding(cause, f"pod {name(pod)}: {_line(text, found)}", commands)
    logs = f"kubectl -n {namespace} logs {name(pod).rpartition('/')[2]} --previous"
    return Finding("the device plugin keeps failing", f"pod {name(pod)}: CrashLoopBackOff", (logs,))


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


def _without_runtime_class(cluster: Cluster) -> Iterator[Finding]:
    for pod in cluster.pods:
        running = (pod.get("status") or {}).get("phase") == "Running"
        if running and RESOURCE in limited_resources(pod) and not pod_spec(pod).get("runtimeClassName"):
            yield Finding(
                "a pod has a GPU allocated, but no runtime class that gives it the GPU",
                f"pod {name(pod)} has a limit {RESOURCE} and no runtimeClassName; the plugin's strategy is envvar",
                (
                    "set runtimeClassName: nvidia in the pod",
                    "or DEVICE_LIST_STRATEGY=cdi-cri for the plugin, or machines.NAME.default_runtime = true",
                ),
            )


def _selecting(label: str, items: Sequence[KubernetesObject]) -> list[KubernetesObject]:
    return [each for each in items if label in (pod_spec(each).get("nodeSelector") or {})]


def _unlabelled(node: KubernetesObject, cluster: Cluster) -> Iterator[Finding]:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    selecting = _selecting(PRESENT, (*cluster.pods, *cluster.daemon_sets))
    if RESOURCE in allocatable and labels(node).get(PRESENT) != "true" and selecting:
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
    active = [each for each in cluster.daemon_sets if (each.get("status") or {}).get("desiredNumberScheduled", 0)]
    for part, setting in (("driver", "driver.enabled"), ("container-toolkit", "toolkit.enabled")):
        selecting = _selecting(f"{DEPLOY}{part}", active)
        if labels(node).get(f"{DEPLOY}{part}") == "true" and selecting:
            yield Finding(
                f"the GPU Operator installs its own {part} into node {name(node)}, which already has it",
                f"label {DEPLOY}{part}=true; DaemonSet {name(selecting[0])} runs pods on such nodes",
                (f"{HELM} {setting}=false  {INSTALLED}",),
            )
