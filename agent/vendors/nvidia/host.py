"""NVIDIA on the host, assembled from its parts; and what a machine gets of it."""

import re
from collections.abc import Sequence, Set
from contextlib import suppress

from agent.config.settings import MachineSettings
from agent.model.device import DeviceKind, as_in_sysfs
from agent.model.errors import AgentError, CommandError, ExitCodeError
from agent.model.facts import UNSTAGED, DeviceNode, Driver, Gpu, StagedRoot, UserSpace, VendorFacts
from agent.model.goal import DriverRoots, Grant
from agent.model.handoff import Variable
from agent.model.text import one_line
from agent.system.files import System
from agent.vendors.host_vendor import DriverForPods, DriverPackages, GpuReset, HostVendor, Refusal, Sources
from agent.vendors.nvidia.conditions import (
    SYMPTOMS,
    cluster_findings,
    judge,
    needs_nothing,
    nvidia_conditions,
    remedies,
)
from agent.vendors.nvidia.contract import DIRECTORIES, SHARED
from agent.vendors.nvidia.devices import (
    KERNEL_DRIVER,
    NODE_DIRECTORIES,
    NODE_NAMES,
    misbound_gpus,
    observe_devices,
    observe_gpus,
    parse_kernel_message,
)
from agent.vendors.nvidia.driver import (
    FABRIC_UNIT,
    MODULE_NAMES,
    PERSISTENCE_UNIT,
    SERVICES,
    fabric_cause,
    make_nodes,
    observe_driver,
    observe_module,
    observe_services,
)
from agent.vendors.nvidia.places import HOST_CACHE, LIBRARY_NAMES, PLACES, watched_directories
from agent.vendors.nvidia.user_space import driver_for_pods, observe_user_space


def observe_nvidia(sources: Sources) -> VendorFacts:
    """Return all facts about NVIDIA. What cannot be observed is Unseen; `problems` says what must not be used."""
    module = observe_module(sources.system)
    listed = observe_gpus(sources.system, sources.pci, sources.lost, sources.why_unbound, sources.detached)
    nodes, problems, incomplete = observe_devices(sources, listed)
    user_space = observe_user_space(sources, module if isinstance(module, str) else "")
    return VendorFacts(
        vendor="nvidia",
        gpus=listed.gpus,
        devices=nodes,
        driver=observe_driver(sources, module, user_space, nodes),
        services=observe_services(sources.system),
        node_problems=problems,
        other_problems=(*listed.problems, *user_space.problems),
        incomplete=incomplete,
    )


# What a machine gets.

PER_GPU = frozenset({DeviceKind.GPU, DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER, DeviceKind.CAPABILITY})
"""Kinds of nodes that belong to one GPU. Of the capabilities, only those of MIG instances belong to one."""
FABRIC = frozenset({DeviceKind.NVSWITCH, DeviceKind.NVLINK})
"""Kinds of nodes that reach all GPUs of the host. Only a machine with all GPUs gets them."""


def grant_nvidia(facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]) -> Grant:
    """Grant the wanted GPUs except detached ones, with the existing nodes and the driver root for the loaded module."""
    gpus = [gpu for gpu in wanted if not gpu.detached]
    nodes: tuple[DeviceNode, ...] = ()
    if isinstance(facts.devices, tuple) and gpus:
        addresses = {gpu.pci_address for gpu in gpus}
        # A detached GPU counts as one of the host's GPUs, because it is still on the fabric, and another machine may
        # get it later. So a machine has the whole host only if the detached GPUs are meant for this machine too.
        usable = {gpu.pci_address for gpu in facts.gpus if not gpu.excluded}
        whole_host = usable == {gpu.pci_address for gpu in wanted}
        nodes = tuple(sorted(node for node in facts.devices if _granted(node, addresses, settings, whole_host)))
    serving, waiting = _driver_roots(facts.driver, roots) if gpus else (None, None)
    variables = sorted(settings.pod_environment.get("nvidia", {}).items())
    return Grant(
        vendor=facts.vendor,
        gpus=tuple(sorted(gpu.pci_address for gpu in gpus)),
        nodes=nodes,
        driver_root=serving,
        waiting_root=waiting,
        detached=tuple(sorted(gpu.pci_address for gpu in wanted if gpu.detached)),
        services=tuple(name for name in DIRECTORIES if gpus and name in settings.sockets),
        directories=tuple(sorted(each for each in facts.services if gpus and each.service in settings.sockets)),
        cdi_modes=tuple(settings.cdi_modes),
        cdi_hooks=tuple(sorted(settings.cdi_hooks)) if gpus else (),
        environment=tuple(Variable(*item) for item in variables if gpus),
        fabric_cause=fabric_cause(facts.driver) if facts.driver and gpus else "",
    )


def _granted(node: DeviceNode, addresses: Set[str], settings: MachineSettings, whole_host: bool) -> bool:
    match node.kind:
        case DeviceKind.CAPABILITY if not node.pci_address:
            by_capability = {
                "mig/config": settings.mig_config,
                "mig/monitor": settings.mig_monitor,
                "fabric-imex-mgmt": settings.imex_channels,
            }
            return by_capability.get(node.capability, False)
        case kind if kind in PER_GPU:
            return node.pci_address in addresses
        case DeviceKind.IMEX_CHANNEL:
            return settings.imex_channels
        case kind if kind in FABRIC:
            return whole_host
        case kind:
            return kind in SHARED


def _stays_in_use(kept: StagedRoot, new: StagedRoot, user_space: UserSpace) -> bool:
    """Return whether the machine keeps the root `kept`, although the search has now found other files, `new`.

    The machine keeps it if the search found the same version in another place than before. For example, while an
    upgrade has removed the packages' files, the search falls back to the files of an old runfile installation.

    The machine gets `new` in each of these cases: the versions differ; the configuration or the host's loader cache
    names the files of `new`; both roots are from the same place; the place of `kept` is no longer trusted.
    """
    if kept.version != new.version or user_space.place_key or user_space.place_name in ("", HOST_CACHE):
        return False
    trusted = {place.name for place in PLACES}.difference(user_space.refused_places)
    return kept.place in trusted and kept.place != user_space.place_name


def _driver_roots(driver: Driver | None, roots: DriverRoots) -> tuple[StagedRoot | None, StagedRoot | None]:
    """Return the root to use now, and the root that waits until the module of its version is loaded. Each may be None.

    The waiting root has the host's current files.
    """
    if driver is None:
        return None, None
    staged = sorted(root for root in roots.staged if root.vendor == "nvidia")
    kept = [root for root in staged if root.index == roots.current]
    new: StagedRoot | None = None
    user_space = driver.user_space
    if isinstance(user_space.files, tuple) and isinstance(user_space.version, str):
        files, version = tuple(sorted(user_space.files)), user_space.version
        same = [root for root in staged if root.version == version and root.files == files]
        new = same[-1] if same else StagedRoot(UNSTAGED, "nvidia", version, files, user_space.place_name)
    serving: StagedRoot | None
    if new and driver.module_version == new.version:
        if stays := next((root for root in kept if _stays_in_use(root, new, user_space)), None):
            return stays, None
        serving = new
    elif isinstance(driver.module_version, str):
        fitting = [root for root in staged if root.version == driver.module_version]
        serving = next((root for root in (*kept, *reversed(fitting)) if root in fitting), None)
        # If no root has the module's version, the machine keeps its root until there is a root of that version.
        serving = serving or (kept[0] if kept else None)
    else:
        # The module's version is unknown: the module is not loaded (during a reload, just after boot), or could not be
        # observed.
        serving = next(iter((*kept, *reversed(staged))), new)
    return serving, new if new != serving else None


# Labels of Nodes with NVIDIA GPUs, as the GPU Operator and GPU Feature Discovery name them.

PRESENT = "nvidia.com/gpu.present"
"""Both the GPU Operator and the device plugin's Helm chart select Nodes by this label."""
DRIVER = "nvidia.com/cuda.driver-version"
CUDA = "nvidia.com/cuda.runtime-version"


def node_labels(driver: DriverForPods | None) -> dict[str, str]:
    """Return the labels. For a version that is unknown, there is no label."""
    labels = {PRESENT: "true"}
    versions = {DRIVER: driver.version, CUDA: driver.interfaces.get("CUDA", "")} if driver else {}
    for prefix, version in versions.items():
        if version:
            parts = zip(("major", "minor", "revision"), version.split("."), strict=False)
            labels |= {f"{prefix}.{part}": number for part, number in (*parts, ("full", version))}
    return labels


COMMAND_LENGTH = 15
"""Characters that the kernel keeps of a program's name: TASK_COMM_LEN without the null byte (proc_pid_comm(5))."""

# On nvidia-persistenced: `nvidia-smi drain` fails while persistence mode is on, so `-pm 0` comes first. The driver
# accepts no new clients for a drained GPU.
ADVICE = {
    "nvidia-persistenced": "`nvidia-smi -i {address} -pm 0`, then `nvidia-smi drain -p {address} -m 1`",
    "nv-hostengine": "`systemctl stop nvidia-dcgm`",
    "dcgm-exporter": "stop the exporter, which watches all GPUs that it finds at its start",
    "nv-fabricmanager": "`systemctl stop nvidia-fabricmanager`: no CUDA program on this host works without it",
    "nvidia-cuda-mps-server": "`echo quit | nvidia-cuda-mps-control`: ends all CUDA programs that use MPS",
    "nvidia-smi": "wait for it to end, or end it if it loops (-l)",
}
"""How to make a program that keeps GPUs open on the host release one, by program."""
IN_MACHINES = {
    "nvidia-device-plugin": (
        "restart the plugin once the node no longer offers the GPU; machines.NAME.restart_device_plugin = true "
        'and on_detach = "drain-wait" do that'
    ),
    "dcgm-exporter": (
        'set on_detach = "drain-wait", and delete the pod while `gpus detach` waits: the next pod does not get the GPU'
    ),
}
"""Advice by program, for programs in a pod."""


def release_advice(command: str, pci_address: str, *, in_machine: bool) -> str:
    """Return how to make one of NVIDIA's programs release a GPU; empty for any other program."""
    advice = {name[:COMMAND_LENGTH]: text for name, text in (IN_MACHINES if in_machine else ADVICE).items()}
    return advice.get(command, "").format(address=pci_address)


# Resets GPUs with nvidia-smi, as nvidia-smi(1) of 550.163 and a later one describe it. It may only be run for GPUs
# that no program has open. Persistence mode counts as a program, nvidia-fabricmanager does not: on Ampere's NVSwitch
# systems, a single GPU can only be reset while it runs.

SMI = "nvidia-smi"
TOGETHER = "must be reset together"
"""What nvidia-smi (550.163.01) prints before the further GPUs that must be named: their indexes."""
BUS_ID = re.compile(r"\b[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\b")
MODE_LIMIT, RESET_LIMIT = 60.0, 120.0
"""Seconds to set persistence mode, and for a reset, which takes 5 to 10. Both may hang with the GPU."""
PERSISTENCED = "/run/nvidia-persistenced/socket"
"""Exists while nvidia-persistenced runs, which keeps persistence mode on for all GPUs by default."""


def _query(system: System, fields: str, *which: str) -> list[list[str]]:
    """Return these fields of each GPU. Raises CommandError."""
    printed = system.run(SMI, *which, f"--query-gpu={fields}", "--format=csv,noheader")
    return [line.split(", ") for line in printed.splitlines()]


def _persistence_mode(system: System, address: str) -> bool:
    # A GPU that needs a reset may not answer this question.
    with suppress(CommandError):
        answer = _query(system, "persistence_mode", "-i", address)
        if answer in ([["Enabled"]], [["Disabled"]]):
            return answer == [["Enabled"]]
    return system.exists(PERSISTENCED)


def _set_persistence_mode(system: System, address: str, mode: str) -> None:
    system.run(SMI, "-i", address, "-pm", mode, timeout=MODE_LIMIT)


def _reset(system: System, addresses: Sequence[str]) -> Refusal | None:
    try:
        system.run(SMI, "--gpu-reset", "-i", ",".join(addresses), timeout=RESET_LIMIT)
    except ExitCodeError as error:
        # nvidia-smi prints its errors to standard output.
        printed = f"{error.stdout}\n{error.stderr}"
        return Refusal(one_line(printed) or error.ended, _further(system, printed, addresses))
    return None


def _further(system: System, printed: str, addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs that, as nvidia-smi has printed, must be reset together with these."""
    rest = printed.partition(TOGETHER)[2]
    named = {as_in_sysfs(each) for each in BUS_ID.findall(rest)}
    indexes = set(re.findall(r"\b\d+\b", rest))
    if not named and indexes:
        with suppress(CommandError):
            found = _query(system, "index,pci.bus_id")
            named = {as_in_sysfs(each[1]) for each in found if len(each) == 2 and each[0] in indexes}
    return tuple(sorted(named - {*addresses, ""}))


def _verify(system: System, addresses: Sequence[str]) -> None:
    for address in addresses:
        answer = _query(system, "pci.bus_id,name", "-i", address)
        if [as_in_sysfs(each[0]) for each in answer] != [address]:
            raise AgentError(f"{SMI} does not know {address}: it answers {one_line(str(answer))}")


GPU_RESET = GpuReset(
    program=SMI,
    released=frozenset({"nvidia-persiste"}),
    partners=frozenset({"nv-fabricmanage"}),
    describe=lambda addresses: (
        f"turn off persistence mode of {', '.join(addresses)} only, run `nvidia-smi --gpu-reset -i "
        f"{','.join(addresses)}`, ask the driver whether it works, and set persistence mode as it was"
    ),
    kept=_persistence_mode,
    release=lambda system, address: _set_persistence_mode(system, address, "0"),
    restore=lambda system, address: _set_persistence_mode(system, address, "1"),
    run=_reset,
    verify=_verify,
)


NVIDIA = HostVendor(
    name="nvidia",
    observe=observe_nvidia,
    grant=grant_nvidia,
    in_every_handoff=True,
    drivers=(KERNEL_DRIVER,),
    own_nodes=frozenset({DeviceKind.GPU}),
    services=SERVICES,
    module_names=MODULE_NAMES,
    node_names=NODE_NAMES,
    node_directories=NODE_DIRECTORIES,
    image="agent-ubuntu2404-nvidia",
    symptoms=SYMPTOMS,
    library_names=LIBRARY_NAMES,
    library_directories=watched_directories,
    misbound_gpus=misbound_gpus,
    conditions=nvidia_conditions,
    driver_for_pods=driver_for_pods,
    remedies=remedies,
    cluster_findings=cluster_findings,
    node_labels=node_labels,
    release_advice=release_advice,
    parse_kernel_message=parse_kernel_message,
    has_test=True,
    judge=judge,
    needs_nothing=needs_nothing,
    reset=GPU_RESET,
    packages=DriverPackages(
        module=KERNEL_DRIVER,
        daemons=(PERSISTENCE_UNIT, FABRIC_UNIT, "nvidia-imex.service", "nvidia-dcgm.service"),
        strict=(FABRIC_UNIT,),
        strict_packages=("nvidia-fabricmanager",),
        pins="nvidia-driver-pinning-",
        files=("libcuda.so.{}", "libnvidia-ml.so.{}"),
        loaded=observe_module,
        make_nodes=make_nodes,
    ),
    # In safe mode, it runs neither nvidia-smi nor nvidia-debugdump nor vulkaninfo (driver 535 and later).
    support_report=("nvidia-bug-report.sh", "--safe-mode"),
)
