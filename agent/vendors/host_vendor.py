"""The interface of a vendor to the host half.

All functions are pure, except a vendor's `observe` and `driver_for_pods`, which read but never write, and those of a
GpuReset, which run the vendor's tool.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from typing import Any, TypeAlias

from msgspec import Struct, field

from agent.config.settings import DriverSettings, MachineSettings
from agent.model.conditions import Condition, ConditionType, Reason, false, unknown
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import (
    Absent,
    Broken,
    CacheEntry,
    DrmDevice,
    Gpu,
    GpuFault,
    PciDevice,
    Seen,
    Unseen,
    VendorFacts,
    Verdict,
)
from agent.model.goal import DriverRoots, Grant
from agent.model.handoff import FabricAnswer, HealthAnswer
from agent.model.text import whole_number
from agent.system.files import System
from agent.system.trust import classify_error

PLAIN_IMAGE = "agent-ubuntu2404"
"""The image in containerfiles/ for machines that have no GPUs, or whose GPUs need no programs of their vendor."""


class Finding(Struct, frozen=True):
    """A fault with its cause, the evidence for it, and what fixes it."""

    cause: str
    """A sentence without a full stop."""
    evidence: str = ""
    """What was observed: a file with its content, or what a program printed."""
    fix: tuple[str, ...] = ()
    """Commands in the order in which to run them, some with a comment after `  #`; or sentences."""


KubernetesObject: TypeAlias = Mapping[str, Any]
"""An object of Kubernetes' API. Any key that is used here may be missing."""


class Cluster(Struct, frozen=True):
    """What `doctor --kubeconfig` reads: the objects that matter for the machines' nodes. What is unknown is empty."""

    nodes: Sequence[KubernetesObject] = ()
    pods: Sequence[KubernetesObject] = ()
    """Pods on these nodes, and pods that wait for a node."""
    daemon_sets: Sequence[KubernetesObject] = ()
    events: Sequence[KubernetesObject] = ()
    """Events of type Warning, without those of other nodes' kubelets."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """The ends of the logs of containers that failed, by `NAMESPACE/POD`."""
    unknown: tuple[str, ...] = ()
    """What could not be read, one sentence each."""
    now: float = 0.0
    """When the objects were read, in seconds since the epoch."""


def name(item: KubernetesObject) -> str:
    """Return `NAMESPACE/NAME`, or only the name of an object without a namespace."""
    metadata = item.get("metadata") or {}
    return "/".join(each for each in (metadata.get("namespace"), metadata.get("name")) if each)


def labels(item: KubernetesObject) -> Mapping[str, str]:
    """Return the object's labels."""
    return (item.get("metadata") or {}).get("labels") or {}


def pod_spec(item: KubernetesObject) -> KubernetesObject:
    """Return the spec of a pod, or of the pods that a DaemonSet makes."""
    spec = item.get("spec") or {}
    return (spec.get("template") or {}).get("spec") or {} if "template" in spec else spec


def containers(item: KubernetesObject) -> Iterator[KubernetesObject]:
    """Yield the containers of a pod or a DaemonSet, without its init containers."""
    yield from pod_spec(item).get("containers") or ()


def environment(container: KubernetesObject) -> Mapping[str, str]:
    """Return the container's environment variables that have a literal value, not one from a field or a Secret."""
    return {
        each["name"]: each["value"] for each in container.get("env") or () if each.get("name") and each.get("value")
    }


def limited_resources(item: KubernetesObject) -> set[str]:
    """Return the names of the resources for which any container of a pod or DaemonSet has a limit."""
    return {resource for each in containers(item) for resource in (each.get("resources") or {}).get("limits") or {}}


def statuses(pod: KubernetesObject, *, init: bool = False) -> Iterator[KubernetesObject]:
    """Yield the statuses of the pod's containers, or of its init containers."""
    yield from (pod.get("status") or {}).get("initContainerStatuses" if init else "containerStatuses") or ()


def kubelet_messages(pod: KubernetesObject) -> Iterator[str]:
    """Yield the kubelet's reasons and messages for the current and last states of the pod's containers."""
    for each in (*statuses(pod, init=True), *statuses(pod)):
        for key in ("state", "lastState"):
            for state in (each.get(key) or {}).values():
                yield from (text for text in ((state or {}).get("reason"), (state or {}).get("message")) if text)


def crashes(pod: KubernetesObject) -> bool:
    """Return whether a container of the pod keeps failing."""
    waiting = (((each.get("state") or {}).get("waiting") or {}) for each in (*statuses(pod), *statuses(pod, init=True)))
    return any(
        each.get("reason") in ("CrashLoopBackOff", "RunContainerError", "CreateContainerError") for each in waiting
    )


def seconds(time: object) -> float:
    """Return a time of Kubernetes' API in seconds since the epoch; 0 if it is missing or malformed."""
    try:
        return datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


class Sources(Struct, frozen=True):
    """What each pass reads once for all vendors. Each vendor selects what concerns its own GPUs."""

    system: System
    architecture: str
    pci: Seen[tuple[PciDevice, ...]]
    drm: Seen[tuple[DrmDevice, ...]]
    loader_cache: Callable[[str], Seen[tuple[CacheEntry, ...]]]
    """Returns the loader cache of a root file system: `/`, or a directory such as a driver container's root."""
    units: Mapping[str, Seen[str]]
    """ActiveState of the units in the vendors' `services`, by unit name; Absent for a unit that does not exist."""
    started: Callable[[str], Seen[int]] = lambda name: 0
    """Returns when one of these units last became active, in microseconds since the host booted; 0 if it has not."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """What the kernel log said about each GPU that stopped answering, by PCI address. sysfs still lists such a GPU."""
    faults: Mapping[str, GpuFault] = field(default_factory=dict)
    """The worst error of each GPU in the kernel log, by PCI address."""
    detached: frozenset[str] = frozenset()
    """PCI addresses of detached GPUs."""
    driver: DriverSettings = field(default_factory=DriverSettings)
    machines: Mapping[str, MachineSettings] = field(default_factory=dict)
    """Settings by machine name. Some things are observed only if a machine's settings request them."""

    def why_unbound(self, device: PciDevice) -> str:
        """Return why a GPU has no driver, if the kernel log says so; otherwise nothing."""
        fault = None if device.driver else self.faults.get(device.address)
        return fault.meaning if fault else ""


class FabricReport(Struct, frozen=True):
    """What a machine reported of its GPUs' registration with the NVLink fabric."""

    answers: tuple[FabricAnswer, ...] = ()
    silence: str = "the machine has not reported"
    """Why the GPUs that are not in `answers` have not answered."""
    remembered: tuple[FabricAnswer, ...] = ()
    """What the GPUs that are not in `answers` said last. To say nothing is not to say that all is well."""


class DriverForPods(Struct, frozen=True):
    """The driver whose user space machines on this host get."""

    vendor: str
    version: str
    interfaces: Mapping[str, str] = field(default_factory=dict)
    """Versions of the driver's interfaces, by interface, such as CUDA. Users choose images by these versions."""
    unknown: str = ""
    """Why the interfaces' versions are unknown; empty if they are known."""


class GpuError(Struct, frozen=True):
    """An error of one GPU that its driver wrote into the kernel log."""

    pci_address: str
    reason: str
    """One word for the error, such as `Xid79`: it becomes the value of a taint."""
    meaning: str
    """The driver's name for the error, what it means, and what to do if anything needs to be done."""
    verdict: Verdict
    """What the error says of the GPU's health; HEALTHY if it says nothing."""
    number: int | None = None
    """NVIDIA's number for the error, the Xid, which is below 1000. Such errors are counted."""
    from_application: bool = False
    """Whether a program caused the error."""
    lost: bool = False
    """Whether the error means that the GPU stopped answering."""
    own_word: bool = False
    """Whether the GPU or its driver itself asks for a reset, as in GpuFault."""
    recovered: bool = False
    """It is no error: the driver says that a GPU no longer needs a reset or a reboot."""
    until_answer: bool = False
    vendor: str = ""
    """Those two as in GpuFault."""
    refused: bool = False
    """Whether the error means that the driver did not take the GPU, so that no driver is bound to it."""


class KernelLine(Struct, frozen=True):
    """A line of the kernel log that says something of a GPU's health, or that a program has stopped a GPU."""

    pattern: str
    """Regular expression for the beginning of the line."""
    reason: str
    verdict: Verdict
    meaning: str
    """What has happened, and what to do. `{0}` stands for the GPU's address."""
    from_application: bool = False
    lost: bool = False
    recovered: bool = False
    until_answer: bool = False
    refused: bool = False
    """All but the first as in GpuError."""

    def error(self, address: str) -> GpuError:
        """Return the error that the line reports of this GPU."""
        return GpuError(
            *(address, self.reason, self.meaning.format(address), self.verdict),
            from_application=self.from_application,
            lost=self.lost,
            recovered=self.recovered,
            until_answer=self.until_answer,
            refused=self.refused,
        )


REBIND = (
    "end the programs that use it, run `echo {0} > /sys/bus/pci/devices/{0}/driver/unbind`, then "
    "`echo {0} > /sys/bus/pci/drivers_probe`"
)
REBOOT = "drain the node and reboot the host; if this recurs, see `dmesg`"
WEDGED: Mapping[str, tuple[Verdict, str]] = {
    "none": (Verdict.HEALTHY, "a program stopped the GPU, and the driver has reset it"),
    "rebind": (Verdict.NEEDS_RESET, f"the driver has given up the GPU; to bind it again, {REBIND}"),
    "bus-reset": (
        Verdict.NEEDS_RESET,
        "the driver has given up the GPU; to find it on its bus again, run `unbounded-agent gpus detach {0}`, "
        "`echo 1 > /sys/bus/pci/devices/{0}/remove`, then `echo 1 > /sys/bus/pci/rescan`",
    ),
    # xe asks for this when the GPU needs new firmware (xe_survivability_mode.c).
    "vendor-specific": (Verdict.BROKEN, "the GPU needs a procedure of its vendor, such as new firmware; see `dmesg`"),
    "cold-reset": (Verdict.NEEDS_REBOOT, "the driver has given up the GPU; drain the node, and power it off and on"),
    "unknown": (Verdict.NEEDS_REBOOT, f"the driver has given up the GPU, and knows no remedy; {REBOOT}"),
}
"""What a driver asks for in a uevent `WEDGED=` (Documentation/gpu/drm-uapi.rst in the kernel, since 6.15): the verdict,
and what to do. `{0}` stands for the GPU's address."""


def wedged(pci_address: str, methods: str) -> GpuError:
    """Return the error that a driver reports in a uevent with `WEDGED=methods`, of which the first is the mildest."""
    verdict, meaning = WEDGED.get(methods.partition(",")[0], WEDGED["unknown"])
    recovered = verdict is Verdict.HEALTHY
    return GpuError(pci_address, "Wedged", meaning.format(pci_address), verdict, from_application=recovered)


class OwnWord(Struct, frozen=True):
    """The worst of what a GPU says of its own health. If it says that nothing is wrong, only the verdict is set."""

    verdict: Verdict = Verdict.HEALTHY
    reason: str = ""
    """One word, such as `RowRemapFailure`: it becomes the value of a taint."""
    meaning: str = ""
    """What the GPU says, and what to do if anything needs to be done."""


class Refusal(Struct, frozen=True):
    """Why a vendor's tool did not reset GPUs."""

    why: str
    """What the tool printed."""
    together: tuple[str, ...] = ()
    """PCI addresses of further GPUs that, as the tool says, must be reset together with these."""


class GpuReset(Struct, frozen=True):
    """How a vendor's tool resets GPUs. Each function raises CommandError if the tool fails in any other way."""

    program: str
    """The tool."""
    released: frozenset[str]
    """Programs on the host, by their names in /proc/PID/comm, that `release` makes release the GPU."""
    partners: frozenset[str]
    """Programs on the host that may have the GPU open during the reset, because they take part in it."""
    describe: Callable[[Sequence[str]], str]
    """Returns what the tool will do, in words that follow `would`."""
    kept: Callable[[System, str], bool]
    """Returns whether the driver keeps the GPU initialised while no program uses it. Never fails."""
    release: Callable[[System, str], None]
    """Lets the driver no longer keep the GPU initialised. Other GPUs stay as they are."""
    restore: Callable[[System, str], None]
    """Undoes `release`."""
    run: Callable[[System, Sequence[str]], Refusal | None]
    """Resets the GPUs. Returns None if they were reset."""
    verify: Callable[[System, Sequence[str]], None]
    """Raises AgentError if one of the GPUs does not answer."""


class DriverPackages(Struct, frozen=True):
    """How a vendor's driver is replaced by packages of the host's distribution, for `driver upgrade`."""

    module: str
    """The kernel module that the driver's other ones use."""
    daemons: tuple[str, ...]
    """Units of the vendor's services that keep GPUs open, in the order in which they start."""
    strict: tuple[str, ...]
    """Those of the daemons that only work with a module of their own version."""
    strict_packages: tuple[str, ...]
    """Beginnings of the names of these daemons' packages."""
    pins: str
    """Beginning of the names of packages that keep apt to a branch or version, which follows."""
    files: tuple[str, ...]
    """Names of files that the packages must have, with `{}` for the version."""
    loaded: Callable[[System], Seen[str]]
    """Returns the loaded module's version."""
    make_nodes: Callable[[System, Callable[[], Seen[tuple[PciDevice, ...]]], Callable[[str], None]], None]
    """Makes the device nodes that are missing or have a stale number. Raises AgentError or OSError."""


class HostVendor(Struct, frozen=True, kw_only=True):
    """One vendor on the host. A vendor that lacks a feature keeps the default of that feature."""

    name: str
    observe: Callable[[Sources], VendorFacts]
    """Returns all facts about this vendor. What cannot be observed is Unseen, never an exception."""
    grant: Callable[[VendorFacts, MachineSettings, DriverRoots, tuple[Gpu, ...]], Grant]
    """Returns what a machine with these settings gets. The GPUs are the machine's, including detached ones."""
    in_every_handoff: bool = False
    """Whether handoffs include the vendor even if the host has none of its GPUs."""
    drivers: tuple[str, ...] = ()
    """Names of kernel drivers on the PCI bus. Machines can get GPUs that have one of these drivers, or no driver."""
    own_nodes: frozenset[DeviceKind] = frozenset()
    """Kinds of nodes that belong to one GPU each. Every process that uses a GPU has one of its own nodes open."""
    services: tuple[str, ...] = ()
    """Units whose state `observe` needs."""
    module_names: tuple[str, ...] = ()
    """Patterns (fnmatch) of the vendor's kernel modules, as /sys/module names them."""
    node_names: tuple[str, ...] = ()
    """Patterns (fnmatch) of names in /dev. When such an entry appears, disappears or changes, `observe` must run."""
    node_directories: tuple[str, ...] = ()
    """The same for all entries of these directories, some of which may be missing."""
    further_classes: tuple[int, ...] = ()
    """PCI classes (base class and subclass) of GPUs that are not display controllers."""
    image: str = PLAIN_IMAGE
    """The machine image in containerfiles/ with the programs that the machine half runs for this vendor."""
    symptoms: Mapping[tuple[ConditionType, str], str] = {}
    """Symptoms of a False condition, by condition and reason. An empty reason stands for all without an entry."""
    library_names: tuple[str, ...] = ()
    """Patterns (fnmatch) of the files in `library_directories` that show which user space is installed."""
    library_directories: Callable[[DriverSettings], tuple[str, ...]] = lambda driver: ()
    """Returns the directories, some perhaps missing, where files with `library_names` appear and disappear."""
    misbound_gpus: Callable[[tuple[Gpu, ...]], tuple[Gpu, ...]] = lambda gpus: ()
    """Returns the GPUs that, by a mistake in the host's setup, have a driver that is not in `drivers`."""
    conditions: Callable[[VendorFacts, Grant, FabricReport], tuple[Condition, ...]] = lambda *_: ()
    """Returns DriverLoaded, DevicesPresent, LibrariesPresent, FabricReady and PersistenceMode; nothing for non-GPU
    devices. The message of a False condition says what to do next."""
    driver_for_pods: Callable[[VendorFacts, System], DriverForPods | None] = lambda *_: None
    """Returns the driver whose user space pods get from the host; None if they get none, or if it is unknown."""
    remedies: Callable[[ConditionType, str, VendorFacts, Set[str]], tuple[str, ...]] = lambda *_: ()
    """Returns the commands, if any, that fix a condition's fault, given its type and reason, and the loaded modules."""
    cluster_findings: Callable[[Cluster], Iterable[Finding]] = lambda cluster: ()
    """Returns the faults of a cluster that keep its pods from the vendor's GPUs."""
    node_labels: Callable[[DriverForPods | None], Mapping[str, str]] = lambda driver: {}
    """Returns the labels for the Node of a machine that has the vendor's GPUs."""
    release_advice: Callable[..., str] = lambda command, pci_address, *, in_machine: ""
    """Returns how to make a program of the vendor, by its name in /proc/PID/comm, release a GPU; empty for others."""
    reset: GpuReset | None = None
    """How the vendor's tool resets GPUs; None if the agent cannot reset them."""
    packages: DriverPackages | None = None
    """How the driver's packages are replaced; None if the driver belongs to the kernel."""
    reset_by_hand: str = ""
    """If the agent cannot: the commands, in backquotes, with {address} for the GPU, that reset a detached GPU."""
    support_report: tuple[str, ...] = ()
    """The vendor's program, with options, that collects what its support asks for. It must use no GPU, because that may
    hang. It writes to what `--output-file` names, or to the same with `.gz`."""
    parse_kernel_message: Callable[[str], GpuError | None] = lambda text: None
    """Returns the GPU error that a line of the kernel log reports; None for any other line."""
    has_test: bool = False
    """Whether machines can test the vendor's GPUs."""
    judge: Callable[[HealthAnswer], OwnWord] = lambda answer: OwnWord()
    """Returns what follows from a GPU's answer. A machine may have invented it."""
    needs_nothing: Callable[[HealthAnswer], bool] = lambda answer: False
    """Returns whether the GPU says that it needs neither a reset nor a reboot. To say nothing is not to say that."""


# The faults that GPUs of every vendor can have, for the condition DevicesPresent.

KIND = ConditionType.DEVICES_PRESENT


def unusable(facts: VendorFacts, grant: Grant) -> Condition | None:
    """Return the fault in DevicesPresent if nothing is known of the nodes, or the settings ask for too much."""
    if isinstance(facts.devices, Unseen):
        return unknown(KIND, Reason.OBSERVATION_FAILED, facts.devices.why)
    if isinstance(facts.devices, Absent | Broken):
        return false(KIND, Reason.NODES_MISSING, facts.devices.why)
    if grant.problems:
        return false(KIND, Reason.GPU_NOT_FOUND, "; ".join(grant.problems))
    return None


def faulty_gpus(
    facts: VendorFacts,
    grant: Grant,
    kind: DeviceKind,
    node: str,
    advice: str,
    driver_advice: Callable[[tuple[str, ...]], str],
) -> tuple[Condition, ...]:
    """Return DevicesPresent with the status False for each kind of fault that granted GPUs have. Each names its GPUs.

    A GPU must have a driver, must answer, and must have a node of this `kind`, whose path has the form `node`. `advice`
    is for GPUs without a node, `driver_advice` for those without a driver.
    """
    drivers = {gpu.pci_address: gpu.driver for gpu in facts.gpus}
    unbound = tuple(address for address in grant.gpus if not drivers.get(address))
    lost = {gpu.pci_address: gpu.why_lost for gpu in facts.gpus if gpu.why_lost and gpu.pci_address in grant.gpus}
    with_node = {each.pci_address for each in grant.nodes if each.kind is kind}
    missing = [address for address in grant.gpus if address not in {*unbound, *lost, *with_node}]
    faults = []
    if unbound:
        why = {gpu.pci_address: gpu.why_unbound for gpu in facts.gpus if gpu.why_unbound and gpu.pci_address in unbound}
        sentences = [f"no driver is bound to {address}: {reason}" for address, reason in why.items()]
        # Where the kernel log says why, another attempt would fail the same way.
        if others := tuple(address for address in unbound if address not in why):
            sentences.append(f"no driver is bound to {', '.join(others)}; {driver_advice(others)}")
        faults.append(false(KIND, Reason.GPU_WITHOUT_DRIVER, "; ".join(sentences), unbound))
    if lost:
        sentences = [f"{address}: {why}" for address, why in lost.items()]
        faults.append(false(KIND, Reason.GPU_FALLEN_OFF_BUS, "; ".join(sentences), lost))
    if missing:
        problems = "".join(f"; {problem}" for problem in facts.problems)
        message = f"no usable {node} for {', '.join(missing)}; {advice}{problems}"
        faults.append(false(KIND, Reason.NODES_MISSING, message, missing))
    return tuple(faults)


# Checks the numbers of device nodes. A node stays when its driver is unloaded, so a driver's numbers count.


def usable_number(
    system: System,
    path: str,
    majors: Collection[int],
    minor: int | None,
    registered: str,
    problems: dict[str, str],
) -> DeviceNumber | None:
    """Return a node's number; None if the node is missing, or must not be used, which `problems` then says.

    `majors` are those of the driver now, and `registered` is where the kernel lists them; a `minor` of None stands for
    any. Raises OSError if the node cannot be observed.
    """
    try:
        number = system.device(path)
    except OSError as error:
        fact = classify_error(path, error)
        if isinstance(fact, Unseen):
            raise
        if isinstance(fact, Broken):
            problems[path] = fact.why
        return None
    if number is None:
        why = "not a character device"
    elif not majors:
        why = f"its driver is not loaded ({registered})"
    elif number.major in majors and minor in (None, number.minor):
        return number
    else:
        wanted = " or ".join(f"major {each}" if minor is None else f"{each}:{minor}" for each in sorted(majors))
        is_now = f"is {number.major}:{number.minor}"
        # The kernel itself makes the nodes of other drivers, when they are loaded.
        how = "create it again" if path.startswith("/dev/nvidia") else "load the driver again"
        why = f"{is_now}, but the driver uses {wanted}; remove the node and {how}"
    problems[path] = f"{path}: {why}"
    return None


# Parses /proc/devices (proc(5)) and /proc/misc: the device numbers that the kernel's drivers have registered.

PROC_DEVICES = "/proc/devices"


def parse_majors(text: str) -> dict[str, int]:
    """Return the majors of the character devices in /proc/devices, by name. If a name has several, the first counts."""
    return {name: major for major, name in reversed(_registered(text))}


def names_by_major(text: str) -> dict[int, set[str]]:
    """Return the names of the character devices by major. A major can have several names, and a name several majors."""
    names: dict[int, set[str]] = {}
    for major, name in _registered(text):
        names.setdefault(major, set()).add(name)
    return names


def _registered(text: str) -> list[tuple[int, str]]:
    section = text.partition("Character devices:\n")[2].partition("\nBlock devices:")[0]
    lines = (line.strip().partition(" ") for line in section.splitlines())
    return [(number, name) for digits, _, name in lines if name and (number := whole_number(digits)) is not None]


def parse_misc(text: str) -> dict[str, int]:
    """Return the minors of the miscellaneous devices in /proc/misc (drivers/char/misc.c), by name."""
    fields = (line.split(maxsplit=1) for line in text.splitlines())
    minors = {each[1].strip(): whole_number(each[0]) for each in fields if len(each) == 2}
    return {name: minor for name, minor in minors.items() if minor is not None}
