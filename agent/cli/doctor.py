"""Lists what is wrong with host and machines, with symptoms and fixes. Pure except for `diagnose_host` and `doctor`."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from agent.cli.printing import say
from agent.host.observe.driver_roots import LINKED
from agent.host.observe.units import observe_units
from agent.host.outcome import NO_MACHINES, MachineOutcome
from agent.host.reconcile import Reconciler
from agent.host.vendors import HOST_VENDORS, host_vendor
from agent.model.conditions import NOT_NEEDED_FOR_READY, Condition, ConditionType, Status
from agent.model.facts import Absent, Broken, Facts, Unseen
from agent.model.paths import HOST_NVIDIA, mount_unit
from agent.system.files import System
from agent.vendors.host_vendor import DriverForPods

SERVICE = "unbounded-agent.service"
PLAIN_IMAGE = "agent-ubuntu2404"
"""An image in containerfiles/ for machines without GPUs, or whose GPUs need no programs of their vendor."""
KERNEL_SETTINGS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
"""Values that the kubelet requires (setupKernelTunables) and cannot set in a machine, where /proc/sys is read-only."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, with the conditions that show it."""

    conditions: tuple[ConditionType, ...]
    status: Status
    reason: str
    message: str
    """The conditions' message: what is wrong, and usually how to fix it."""
    symptoms: str
    """The symptoms that users see; empty if unknown."""

    @property
    def prevents_ready(self) -> bool:
        return any(each not in NOT_NEEDED_FOR_READY for each in self.conditions)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of one machine."""

    machine: str
    ready: Condition
    findings: tuple[Finding, ...]
    """In the order in which a machine becomes ready: the first may be the cause of the others."""


@dataclass(frozen=True, slots=True)
class HostDiagnosis:
    """What `doctor` says about the host itself."""

    findings: tuple[str, ...] = ()
    """Faults that no condition shows, one sentence each: what keeps machines, kubelets or the service from running."""
    drivers: tuple[DriverForPods, ...] = ()
    """The drivers that pods get. Users choose pods' images by the drivers' versions."""
    image: str = PLAIN_IMAGE
    """The image in containerfiles/ that machines of this host need."""


def doctor(reconciler: Reconciler, *, for_programs: bool) -> int:
    """Print the diagnoses in words, or as JSON for programs. Return 1 if there is a fault or a machine is not ready."""
    facts, planned, difference = reconciler.preview()
    diagnoses = [diagnose(machine) for machine in reconciler.evaluate(facts, planned, difference)]
    host = diagnose_host(facts, reconciler.system)
    say([as_json(diagnoses, host)] if for_programs else in_words(diagnoses, host))
    return 0 if sound(diagnoses, host) else 1


def diagnose(machine: MachineOutcome) -> Diagnosis:
    """Return the findings in the machine's conditions. Those that share status, reason and message are one finding."""
    found: dict[tuple[Status, str, str], list[ConditionType]] = {}
    for each in machine.conditions:
        if each.status is not Status.TRUE and each.type is not ConditionType.READY:
            found.setdefault((each.status, each.reason, each.message), []).append(each.type)
    findings = tuple(
        # An Unknown condition has no known symptoms.
        Finding(tuple(kinds), status, reason, message, _symptoms(kinds, reason) if status is Status.FALSE else "")
        for (status, reason, message), kinds in found.items()
    )
    return Diagnosis(machine.name, machine.ready, findings)


def diagnose_host(facts: Facts, system: System) -> HostDiagnosis:
    """Return the host's findings, the drivers for pods, and the machine image that its GPUs need."""
    settings = (_setting(system, name, wanted) for name, wanted in KERNEL_SETTINGS.items())
    findings = tuple(filter(None, (_template(facts), _service(system), _plain_roots(facts), *settings)))
    drivers = (host_vendor(each.vendor).driver_for_pods(each, system) for each in facts.vendors)
    return HostDiagnosis(findings, tuple(filter(None, drivers)), _image(facts))


def _image(facts: Facts) -> str:
    needed = {host_vendor(each.vendor).image for each in facts.vendors if each.gpus} - {PLAIN_IMAGE}
    return " and ".join(sorted(needed)) or PLAIN_IMAGE


def _template(facts: Facts) -> str:
    template = facts.template_device_allow
    return "" if isinstance(template, tuple) else f"no machine can start: {template.why}"


def _service(system: System) -> str:
    match observe_units([SERVICE], system)[SERVICE].state:
        case "active" | "activating" | "reloading":
            return ""
        case Unseen(why):
            return f"cannot tell whether {SERVICE} runs: {why}"
        case Absent(why) | Broken(why):
            fault = why
        case state:
            fault = f"{SERVICE} is {state}"
    return (
        f"{fault}: nothing follows changes on the host, and no metrics are served; "
        f"run `systemctl enable --now {SERVICE.removesuffix('.service')}`"
    )


def _plain_roots(facts: Facts) -> str:
    if not facts.plain_roots:
        return ""
    fault = "driver roots are plain directories, so root in one machine can change them for all others"
    if LINKED in facts.staged_problems:
        return f"{fault}: {LINKED}; do that while no machine is running"
    command = f"modprobe overlay && systemctl reset-failed '{mount_unit(HOST_NVIDIA)}'"
    return f"{fault}: run `{command}`, then stop all machines and start them again"


def _setting(system: System, name: str, wanted: str) -> str:
    path, key = f"/proc/sys/{name}", name.replace("/", ".")
    try:
        value = system.read(path).decode(errors="replace").strip()
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    if value == wanted:
        return ""
    return (
        f"{key} is {value}, but kubelets in machines start only if it is {wanted}: write "
        f"`{key} = {wanted}` into /etc/sysctl.d/90-kubelet.conf and run `sysctl --system`"
    )


def sound(diagnoses: Iterable[Diagnosis], host: HostDiagnosis) -> bool:
    """Return whether every machine is ready and the host has no finding."""
    return not host.findings and all(each.ready.status is Status.TRUE for each in diagnoses)


def in_words(diagnoses: Iterable[Diagnosis], host: HostDiagnosis) -> list[str]:
    """Return the diagnoses as lines for people."""
    lines = ["host:" if host.findings else "host: no fault found"]
    lines += [f"  - {each}" for each in host.findings]
    diagnoses = tuple(diagnoses)
    lines += [] if diagnoses else [NO_MACHINES]
    for diagnosis in diagnoses:
        state = {Status.TRUE: "ready", Status.FALSE: "not ready"}.get(diagnosis.ready.status, "readiness unknown")
        lines.append(f"{diagnosis.machine}: {state}: {diagnosis.ready.reason}")
        for finding in diagnosis.findings:
            aside = "" if finding.prevents_ready else " (not needed for Ready)"
            lines.append(f"  - {', '.join(finding.conditions)}: {finding.status}, {finding.reason}{aside}")
            lines.append(f"    {finding.message}")
            if finding.symptoms:
                lines.append(f"    symptoms: {finding.symptoms}")
    lines += [f"driver for pods: {_driver_in_words(each)}" for each in host.drivers]
    return [*lines, f"image for machines of this host: containerfiles/{host.image}"]


def _driver_in_words(driver: DriverForPods) -> str:
    interfaces = "".join(f", {name} {version}" for name, version in driver.interfaces.items())
    unknown = f"; API version unknown: {driver.unknown}" if driver.unknown else ""
    return f"{driver.vendor} {driver.version}{interfaces}{unknown}"


def as_json(diagnoses: Iterable[Diagnosis], host: HostDiagnosis) -> str:
    """Return the diagnoses as a JSON object for programs.

    Its keys are `host` (a list of sentences), `drivers`, `machines` (by name) and `image`.
    """
    machines = {
        each.machine: {
            "ready": each.ready.status,
            "findings": [
                {
                    "conditions": finding.conditions,
                    "status": finding.status,
                    "reason": finding.reason,
                    "message": finding.message,
                    "looksLike": finding.symptoms,
                    "preventsReady": finding.prevents_ready,
                }
                for finding in each.findings
            ],
        }
        for each in diagnoses
    }
    drivers = [asdict(each) for each in host.drivers]
    document = {"host": host.findings, "drivers": drivers, "machines": machines, "image": host.image}
    return json.dumps(document, indent=2)


def _symptoms(kinds: Iterable[ConditionType], reason: str) -> str:
    """Return the symptoms that vendors list for these conditions with this reason, or with any reason."""
    reported = [
        text
        for kind in kinds
        for vendor in HOST_VENDORS
        if (text := vendor.symptoms.get((kind, reason)) or vendor.symptoms.get((kind, "")))
    ]
    return "; ".join(dict.fromkeys(reported))
