"""Evaluates the host's conditions for NVIDIA's GPUs and driver. Messages say what to do next. Pure."""

from collections.abc import Iterator, Sequence

from agent.model.conditions import Condition, ConditionType, Status, false, not_applicable, true, unknown, worst
from agent.model.device import DeviceKind
from agent.model.facts import Absent, Broken, Driver, FabricService, Gpu, Seen, Unseen, UserSpace, VendorFacts
from agent.model.goal import Grant
from agent.model.handoff import FabricAnswer
from agent.model.reasons import Reason
from agent.model.text import counted, printable
from agent.vendors.devices_present import faulty_gpus, unusable
from agent.vendors.host_vendor import FabricReport
from agent.vendors.nvidia.fabric import RUNNING, has_unit
from agent.vendors.nvidia.fabric_states import has_fabric, has_failed, is_answer, is_registered
from agent.vendors.nvidia.grant import built_in, misbound_gpus, modules_to_blacklist
from agent.vendors.nvidia.remedies import bind, make_nodes

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


def _binds(unbound: Sequence[str]) -> str:
    return " and ".join(f"`{bind(each)}`" for each in unbound)


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
        lambda unbound: f"run {_binds(unbound) if loaded else '`modprobe nvidia`'}, and see `dmesg`",
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
            wrong = [problem for problem in facts.problems if problem.startswith(f"{path}: ")]
            what = "; ".join(wrong) or f"{path} is missing"
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
    """Return LibrariesPresent for a host on which no usable libraries were found."""
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
    """Return text for the end of a message: where other drivers are or may be."""
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
    if any(map(has_failed, faulty)):
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
