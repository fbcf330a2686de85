"""Diagnoses machines from their conditions: symptoms, and the commands that fix each fault. Pure."""

from collections.abc import Iterable, Mapping, Set

from msgspec import Struct

from agent.cli.output import causes, prevents_ready
from agent.host.reconcile import MachineOutcome
from agent.host.vendors import HOST_VENDORS, host_vendor
from agent.model.conditions import Condition, ConditionType, Reason, Remark, Status
from agent.model.facts import VendorFacts

# The commands that fix faults of all vendors' GPUs. Each vendor adds those for its own drivers (HostVendor.remedies).

RESTART = "unbounded-agent restart {machine} --kubeconfig FILE  # moves its pods away first"
REBOOT = (
    "unbounded-agent stop {machine} --kubeconfig FILE  # moves its pods away",
    "systemctl reboot  # ends all machines of the host: stop the others first too",
    "unbounded-agent start {machine} --kubeconfig FILE  # lets pods run there again: after the boot",
)
START = "unbounded-agent start {machine}  # if its node was drained, with --kubeconfig FILE: lets pods run there again"
BY_HAND = (
    (" --kubeconfig FILE  # moves its pods away", "  # drain its node with kubectl"),
    (" --kubeconfig FILE  # lets pods run there again", "  # uncordon its node with kubectl"),
    ("drained, with --kubeconfig FILE: lets pods run there again", "drained, uncordon it with kubectl"),
    ("unbounded-agent up {machine}  # with a new bootstrap token", "let its kubelet join again"),
    ("unbounded-agent up {machine}  # or ", ""),
)
"""Parts of commands, and what replaces them if `up` did not make the node: `up` refuses its machine, `stop` and
`restart` refuse --kubeconfig, and `start` uncordons no node that they did not drain."""
REPORT = "journalctl -M {machine} -b -u unbounded-agent-gpu --no-pager -n 50"
SERVICE_LOG = "journalctl -u unbounded-agent -p warning --since -1h --no-pager"
KERNEL_LOG = "dmesg --level=emerg,alert,crit,err,warn | tail -n 50"
AS_ROOT = "sudo unbounded-agent doctor  # other users may not read everything"
"""This command is not shown to root."""
ADDRESS = "PCI-ADDRESS"
"""Stands in a command for the GPU that the condition names. The command is repeated for each such GPU."""
APPLY = "unbounded-agent apply"
LIST_GPUS = "lspci -D | grep -Ei 'vga|3d|display|processing accel'"
LIST_DRIVERS = "lspci -Dk | grep -A3 -Ei 'vga|3d|display|processing accel'"
SHELL = "machinectl shell {machine}  # then, in the machine:"
PLUGIN_PODS = "kubectl get pods -A -o wide --field-selector spec.nodeName={node}  # find the plugin's pod"
PLUGIN_RESTART = "kubectl -n NAMESPACE delete pod POD  # its DaemonSet makes it again"
KUBELET_LOG = "journalctl -M {machine} -b -u kubelet --no-pager -n 50"
DRA_LOG = (
    "systemctl -M {machine} status unbounded-agent-dra",
    "journalctl -M {machine} -b -u unbounded-agent-dra --no-pager -n 50",
)
SAME_RELEASE = "build the machine's image from the agent's release: docs/install.md"

REMEDIES: Mapping[str | tuple[ConditionType, str], tuple[str, ...]] = {
    Reason.OBSERVATION_FAILED: (AS_ROOT, SERVICE_LOG, KERNEL_LOG),
    Reason.INTERNAL_ERROR: (SERVICE_LOG, "report the traceback as a bug"),
    Reason.NO_REPORT: ("unbounded-agent status {machine} --wait=120  # while it boots", REPORT, SAME_RELEASE),
    **dict.fromkeys(
        (Reason.BAD_REPORT, Reason.NOT_REPORTED, Reason.UNKNOWN_VENDOR, Reason.NO_HANDLER, Reason.BAD_DOCUMENT),
        (SAME_RELEASE,),
    ),
    **dict.fromkeys((Reason.FAILED, Reason.GENERATION_FAILED, Reason.SPEC_REFUSED), (REPORT,)),
    **dict.fromkeys((Reason.GPU_MISSING, Reason.PARTITION_MISSING, Reason.OPEN_FAILED), (KERNEL_LOG,)),
    **dict.fromkeys((Reason.KUBELET_NOT_RUNNING, Reason.NODE_NOT_REGISTERED, Reason.API_UNREACHABLE), (KUBELET_LOG,)),
    Reason.SETTLING: (SERVICE_LOG,),
    Reason.HANDOFF_PENDING: (
        "unbounded-agent status {machine} --wait=120",
        REPORT,
        f"{SERVICE_LOG}  # if the agent has not written it",
    ),
    Reason.REPORT_STALE: (
        "systemctl -M {machine} restart unbounded-agent-gpu.timer unbounded-agent-gpu.service",
        f"{REPORT}  # if the reason stays",
        f"{RESTART}; if these commands hang",
    ),
    # The machine's root file system, unit and devices.
    Reason.NO_SUCH_MACHINE: (
        "ls -ld /var/lib/machines/{machine}",
        "unbounded-agent up {machine}  # if it has a table [machines.{machine}.node]; else unpack an image there",
    ),
    Reason.NODE_FILES_CHANGED: (
        "unbounded-agent stop {machine} --kubeconfig FILE  # moves its pods away",
        "unbounded-agent up --rebuild {machine}  # removes everything in it; needs a valid bootstrap token",
        "unbounded-agent start {machine} --kubeconfig FILE  # lets pods run there again",
    ),
    Reason.MACHINE_NOT_RUNNING: (START,),
    Reason.STARTING: ("systemctl status unbounded-agent-prepare@{machine} systemd-nspawn@{machine}",),
    Reason.STOPPED: ("systemctl unmask systemd-nspawn@{machine}  # if it is masked", START),
    Reason.NOT_STARTED: ("systemctl status unbounded-agent-prepare@{machine}  # waits for a late driver", START),
    Reason.NOT_RUNNING: (
        "journalctl -b -u systemd-nspawn@{machine} -u unbounded-agent-prepare@{machine} --no-pager -n 50",
        "systemctl reset-failed systemd-nspawn@{machine}",
        START,
    ),
    Reason.MACHINE_RESTART_NEEDED: (RESTART,),
    Reason.NOT_GIVEN: (SERVICE_LOG, RESTART),
    Reason.NOT_WITHDRAWN: ("unbounded-agent gpus holders", REPORT),
    Reason.WRONG_NODE: (APPLY, SERVICE_LOG),
    Reason.NOT_PERMITTED: (
        APPLY,
        "systemctl show -p DeviceAllow systemd-nspawn@{machine}  # if that does not help, and the message says EPERM",
        "ls -l NODE  # the path above, if the message says EACCES",
        f"{RESTART}; if nothing else helps",
    ),
    Reason.DRIVER_HIDDEN: (f"{RESTART}; if CDISpecCurrent says that the operating system blocks the GPUs",),
    # Drivers and GPUs.
    Reason.MODULE_NOT_LOADED: (
        "modprobe DRIVER, as named above",
        KERNEL_LOG,
        "apt install linux-headers-$(uname -r) && dkms autoinstall -k $(uname -r)  # if this kernel has no module",
    ),
    Reason.MODULE_BROKEN: ("reinstall the driver's packages, then:", *REBOOT),
    Reason.WRONG_DRIVER: (LIST_DRIVERS,),
    Reason.GPU_WITHOUT_DRIVER: (LIST_DRIVERS, KERNEL_LOG),
    Reason.NO_DRIVER: (KERNEL_LOG, "load the GPUs' kernel module on the host"),
    Reason.NODES_MISSING: ("udevadm settle", KERNEL_LOG),
    Reason.GPU_NOT_FOUND: (
        "unbounded-agent gpus  # those that the host has, and those that it lost",
        "correct machines.{machine}.gpus, then: systemctl reload unbounded-agent",
    ),
    Reason.GPU_FAILED: (KERNEL_LOG, "unbounded-agent gpus holders", *REBOOT),
    Reason.OPEN_TIMED_OUT: (KERNEL_LOG, *REBOOT),
    Reason.GPU_NEEDS_RESET: (
        REBOOT[0],
        "unbounded-agent gpus holders PCI-ADDRESS  # stop what is still listed",
        "do what the evidence says; if it names no command: systemctl reboot",
        "unbounded-agent gpus attach PCI-ADDRESS  # forgets the error; running machines open the GPU again",
        REBOOT[-1],
    ),
    Reason.GPU_NEEDS_REBOOT: REBOOT,
    Reason.GPU_BROKEN: (
        "unbounded-agent gpus detach PCI-ADDRESS",
        "do what the evidence says, such as replace the GPU",
    ),
    Reason.TOO_FEW_HEALTHY_GPUS: (
        "unbounded-agent gpus  # which GPUs need what",
        "or lower machines.{machine}.min_healthy_gpus, then: systemctl reload unbounded-agent",
    ),
    Reason.TEST_FAILED: (
        "unbounded-agent gpus reset PCI-ADDRESS  # then its test follows",
        "unbounded-agent gpus detach PCI-ADDRESS  # if it fails again",
    ),
    **dict.fromkeys(
        (Reason.NOT_TESTED, Reason.TESTING),
        ("journalctl -u unbounded-agent-gpus --no-pager -n 50", "unbounded-agent gpus holders"),
    ),
    Reason.GPU_FALLEN_OFF_BUS: (*REBOOT, "# if it happens again: check power, seating and firmware"),
    Reason.GPU_DETACHED: ("unbounded-agent gpus", "unbounded-agent gpus attach PCI-ADDRESS"),
    Reason.GPU_LOST: (
        LIST_GPUS,
        KERNEL_LOG,
        REBOOT[0],
        "systemctl poweroff  # ends all machines of the host: stop the others first too; then power the host on again",
        REBOOT[-1],
        "unbounded-agent gpus forget PCI-ADDRESS  # only if it is gone for good",
    ),
    Reason.RECORD_DAMAGED: (f"{LIST_GPUS}  # is one missing?", "unbounded-agent gpus forget"),
    Reason.NO_GPU: (
        LIST_GPUS,
        "if it needs no GPU: set machines.{machine}.require_gpus = false, then: systemctl reload unbounded-agent",
    ),
    Reason.NO_GPU_GRANTED: ("unbounded-agent gpus  # shows which driver each one has",),
    # Files of host and machine.
    Reason.NOT_STAGED: (APPLY, "df -h /var/lib/unbounded-agent  # if that fails"),
    Reason.NOT_MOUNTED: ("systemctl --failed --type=mount", "modprobe overlay", APPLY),
    Reason.FOREIGN_FILE: ("move away the file that is named above, then:", APPLY),
    Reason.CONFLICT: (SHELL, "dpkg -S FILE  # the file named above; remove its package"),
    Reason.NOT_IN_LOADER_CACHE: (SHELL, "echo DIRECTORY > /etc/ld.so.conf.d/unbounded-agent.conf && ldconfig"),
    (ConditionType.LIBRARIES_LINKED, Reason.SHADOWED): (SHELL, "rm FILE && ldconfig  # the file named above"),
    **dict.fromkeys(
        (Reason.SHADOWED, Reason.NAMES_COLLIDE, Reason.RUNTIME_BLOCKED),
        (SHELL, "rm FILE  # the file named above; first stop what writes it"),
    ),
    # containerd.
    Reason.NO_CONTAINERD: (SAME_RELEASE, "or install containerd in the image"),
    Reason.UNSUPPORTED_DISTRIBUTION: ("unbounded-agent up {machine}  # or make the node with kubeadm",),
    Reason.READ_BACK_FAILED: (SHELL, "containerd config dump > /dev/null", REPORT),
    Reason.OTHER_CONFIGURATION: (
        SHELL,
        "systemctl cat containerd  # which file passes --config? Remove the argument there, then:",
        "systemctl daemon-reload && systemctl restart containerd",
    ),
    (ConditionType.RUNTIME_ACTIVE, Reason.FAILED): ("journalctl -M {machine} -b -u containerd --no-pager -n 50",),
    Reason.CRI_FAILED: (
        SHELL,
        "journalctl -b -u containerd -g 'failed to load plugin'",
        "systemctl restart containerd  # after you have corrected what the message names in /etc/containerd",
    ),
    Reason.NO_ANSWER: (SHELL, "ctr plugins ls  # does containerd answer?", "journalctl -b -u containerd -n 50"),
    **dict.fromkeys(
        ((ConditionType.RUNTIME_ACTIVE, Reason.STOPPED), (ConditionType.RUNTIME_ACTIVE, Reason.NOT_STARTED)),
        (SHELL, "systemctl unmask containerd  # if it is masked", "systemctl start containerd"),
    ),
    # The kubelet, and what offers its GPUs.
    Reason.NO_KUBELET: ("unbounded-agent up {machine}  # or install the kubelet yourself",),
    Reason.KUBELET_DOWN: (
        KUBELET_LOG,
        "unbounded-agent up {machine}  # with a new bootstrap token, if the log says that its certificate is expired",
    ),
    Reason.NO_DEVICE_PLUGIN: ("unbounded-agent kube manifests runtime-class device-plugin | kubectl apply -f -",),
    Reason.BAD_CHECKPOINT: (KUBELET_LOG, PLUGIN_PODS, PLUGIN_RESTART),
    Reason.UNKNOWN_IDS: ("kubectl describe node {node}  # see Allocatable",),
    Reason.DEVICE_PLUGIN_DOWN: (PLUGIN_PODS, "kubectl -n NAMESPACE logs POD --previous"),
    Reason.NOT_REGISTERED: (PLUGIN_PODS, "kubectl -n NAMESPACE logs POD", KUBELET_LOG),
    Reason.GPUS_MISSING: (
        PLUGIN_PODS,
        "kubectl -n NAMESPACE logs POD  # why it considers the GPUs unhealthy",
        KERNEL_LOG,
        "kubectl -n NAMESPACE delete pod POD  # only once the GPUs work: the new pod offers them at once",
    ),
    **dict.fromkeys(
        (Reason.DEVICE_PLUGIN_RESTART_NEEDED, Reason.PLUGIN_SPEC_OUTDATED, Reason.STALE_GPUS),
        (
            PLUGIN_PODS,
            PLUGIN_RESTART,
            "machines.{machine}.restart_device_plugin = true lets the agent do that from now on",
        ),
    ),
    Reason.DRA_DRIVER_DOWN: DRA_LOG,
    Reason.DEVICE_PLUGIN_ACTIVE: ("unbounded-agent kube allocation dra {machine} --kubeconfig FILE",),
    Reason.NOT_TRIED: (SHELL, "systemctl status unbounded-agent-node-condition.timer"),
    Reason.NO_KUBECTL: ("install kubectl in the image",),
    Reason.NO_KUBECONFIG: ("give the kubelet --kubeconfig with an absolute path",),
    Reason.BAD_NODE_NAME: (
        SHELL,
        "hostnamectl hostname NAME && systemctl restart kubelet  # or correct its --hostname-override",
    ),
    Reason.NODE_DELETED: ("systemctl -M {machine} restart kubelet", KUBELET_LOG),
    Reason.REFUSED: (
        "kubectl auth can-i patch nodes/{node} --subresource=status --as=system:node:{node} --as-group=system:nodes",
    ),
    Reason.AGENT_SILENT: ("systemctl enable --now unbounded-agent",),
}
"""The commands by reason, or by condition and reason where a condition has its own. A reason without commands passes by
itself, or its message names the condition to see."""

OFFERED: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    (
        *(Reason.NOT_REGISTERED, Reason.GPUS_MISSING, Reason.STALE_GPUS, Reason.REFUSED, Reason.API_UNREACHABLE),
        Reason.FAILED,
    ),
    (*DRA_LOG, KUBELET_LOG),
)
"""By reason of GPUsAdvertised, for a machine that offers its GPUs itself: for these reasons, REMEDIES has commands for
device plugins or for another condition."""

REMARKS: Mapping[str, str] = {
    Remark.PODS_OUTDATED: "kubectl -n NAMESPACE delete pod POD  # for each pod above; its controller makes it again",
    Remark.MODE_NOT_SERVED: REPORT,
    Remark.EDITS_LEFT_OUT: (
        "build the machine's image from a newer release of the agent; if there is none, report this line as a bug"
    ),
}
"""By a remark of CDISpecCurrent, whatever the condition's status (docs/conditions.md)."""


def remedy(kind: ConditionType, reason: str, *, offers_gpus: bool = False) -> tuple[str, ...]:
    """Return the commands, with the placeholders `{machine}` and `{node}`; empty if there are none.

    `offers_gpus` says whether the machine offers its GPUs itself, without a device plugin.
    """
    if offers_gpus and kind is ConditionType.GPUS_ADVERTISED and reason in OFFERED:
        return OFFERED[reason]
    return REMEDIES.get((kind, reason)) or REMEDIES.get(reason, ())


NOTABLE = {
    *(Reason.RELOAD_NEEDED, Reason.ONLY_STAGED, Reason.PARTLY_OTHER_VERSION, Reason.PLAIN_COPY),
    *(Reason.LAST_GOOD_SETTINGS, Reason.NODE_FILES_CHANGED, Reason.GPU_DETACHED, Reason.DRIVER_HIDDEN),
    Reason.GPU_DEGRADED,
}
"""Reasons of True conditions that still call for an action. They are listed, but are not faults."""
REPLACED: Set[str] = {
    *(ConditionType.DRIVER_LOADED, ConditionType.LIBRARIES_PRESENT, ConditionType.DRIVER_ROOT_STAGED),
    *(Reason.GPU_FAILED, Reason.GPU_NEEDS_RESET),
}
"""Conditions about drivers, and a reason, for which a vendor's own commands replace the general ones. For others, the
vendor's commands come first, and the general ones follow."""


class MachineFinding(Struct, frozen=True, rename={"symptoms": "looksLike", "prevents_ready": "preventsReady"}):
    """One fault of a machine, with the conditions that show it; or True conditions that still call for an action.

    As JSON, it is a finding of `doctor --json` (docs/json.md).
    """

    conditions: tuple[ConditionType, ...]
    status: Status
    reason: str
    message: str
    """The message of the conditions, which is the evidence."""
    symptoms: str = ""
    """The symptoms that users see; empty if unknown."""
    fix: tuple[str, ...] = ()
    """Commands that fix the fault, or sentences; empty if there is nothing to do but wait."""
    prevents_ready: bool = False


class Diagnosis(Struct, frozen=True):
    """The findings of one machine."""

    machine: str
    ready: Condition
    findings: tuple[MachineFinding, ...]
    """In the order in which a machine becomes ready, because the first may be the cause of the others."""


class Environment(Struct, frozen=True):
    """The facts on which the symptoms and commands for a machine's faults depend."""

    vendors: tuple[VendorFacts, ...] = ()
    """Those that have a GPU on this host."""
    modules: Set[str] = frozenset()
    """Names of the kernel's loaded modules."""
    node: str = "NODE"
    """The name of the machine's Node object."""
    offers_gpus: bool = False
    """Whether the machine offers its GPUs itself (`allocation = "dra"`)."""
    as_root: bool = False
    """Whether root observed the host."""
    made_by_up: bool = True
    """Whether `up` makes the machine's node. `stop` and `restart` can drain no other node."""


NO_ENVIRONMENT = Environment()


def diagnose(machine: MachineOutcome, environment: Environment = NO_ENVIRONMENT) -> Diagnosis:
    """Return the findings in the machine's conditions. Conditions with the same cause are one finding."""
    notable = (
        each for each in machine.conditions if each.status is Status.TRUE and (each.reason in NOTABLE or _remarks(each))
    )
    groups, order = [*causes(machine.conditions), *((each,) for each in notable)], list(ConditionType)
    findings = []
    for group in sorted(groups, key=lambda group: order.index(group[0].type)):
        first, kinds = group[0], tuple(each.type for each in group)
        # An Unknown condition has no known symptoms.
        symptoms = _symptoms(kinds, first.reason, environment) if first.status is Status.FALSE else ""
        prevents = first.status is not Status.TRUE and prevents_ready(group)
        fix = _fix(first, machine, environment)
        findings.append(MachineFinding(kinds, first.status, first.reason, first.message, symptoms, fix, prevents))
    return Diagnosis(machine.name, machine.ready, tuple(findings))


def _remarks(condition: Condition) -> list[str]:
    """Return the commands for a condition's remarks."""
    return [command for word, command in REMARKS.items() if word in condition.remarks]


def _symptoms(kinds: Iterable[ConditionType], reason: str, environment: Environment) -> str:
    """Return the symptoms that the vendors of the host's GPUs list for these conditions.

    For each condition, these are the symptoms that a vendor lists for this reason. If the vendor lists none, they are
    the ones that it lists for all other reasons. If the host has no GPUs, take the symptoms of all vendors.
    """
    vendors = [host_vendor(each.vendor) for each in environment.vendors] or HOST_VENDORS
    listed = (each.symptoms.get((kind, reason)) or each.symptoms.get((kind, "")) for kind in kinds for each in vendors)
    return "; ".join(dict.fromkeys(filter(None, listed)))


def _fix(condition: Condition, machine: MachineOutcome, environment: Environment) -> tuple[str, ...]:
    """Return the commands, or sentences, that fix what the condition shows."""
    kind, reason = condition.type, condition.reason
    vendors = [each for each in environment.vendors if each.vendor in condition.vendors] or environment.vendors
    special = [host_vendor(each.vendor).remedies(kind, reason, each, environment.modules) for each in vendors]
    # General commands are still needed if one of the vendors has none of its own.
    replaced = special and all(special) and (kind in REPLACED or reason in REPLACED)
    general = () if replaced else remedy(kind, reason, offers_gpus=environment.offers_gpus)
    fix = [*(line for lines in special for line in lines), *general, *_remarks(condition)]
    for end, other in () if environment.made_by_up else BY_HAND:
        fix = [each.replace(end, other) for each in fix]
    # The GPUs that the condition is about. The machine may have reported any text, so only known ones count.
    gpus = [gpu for vendor in environment.vendors for gpu in vendor.gpus]
    addresses = [gpu.pci_address for gpu in gpus if gpu.pci_address in condition.gpus]
    if kind is ConditionType.GPUS_HEALTHY and len(addresses) > 1:
        # Each GPU may need something else: the reason is that of the worst.
        addresses, fix = [], ["unbounded-agent gpus  # what each GPU needs", *fix]
    if reason in (Reason.GPU_LOST, Reason.GPU_DETACHED):
        detached = [gpu.pci_address for gpu in gpus if gpu.detached]
        addresses = [*machine.lost] if reason == Reason.GPU_LOST else detached
    return tuple(
        line.replace("{machine}", machine.name).replace("{node}", environment.node)
        for each in dict.fromkeys(fix)
        if each != AS_ROOT or not environment.as_root
        for line in ([each.replace(ADDRESS, gpu) for gpu in addresses] if ADDRESS in each and addresses else [each])
    )
