"""What is wrong with host and machines, what that looks like to users, and what mends it. Pure but for the host."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from agent.conditions import NOT_NEEDED_FOR_READY, Condition, ConditionType, Status
from agent.facts import Absent, Broken, Facts, Unseen
from agent.observe.units import observe_units
from agent.reconcile import MachineOutcome
from agent.system.files import System
from agent.vendors.host import HOST_VENDORS, host_vendor
from agent.vendors.protocols import DriverForPods

SERVICE = "unbounded-agent.service"
PLAIN_IMAGE = "agent-ubuntu2404"
"""In containerfiles/: enough for a machine whose GPUs need no programs of their vendor's, or that has none."""
KERNEL_SETTINGS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
"""What the kubelet wants and cannot set in a machine, where /proc/sys is read-only (its setupKernelTunables)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, by the conditions that it shows in."""

    conditions: tuple[ConditionType, ...]
    status: Status
    reason: str
    message: str
    """With the command that mends it."""
    looks_like: str
    """What users see of it; empty where nothing is known to say."""

    @property
    def prevents_ready(self) -> bool:
        return any(each not in NOT_NEEDED_FOR_READY for each in self.conditions)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One machine's."""

    machine: str
    ready: Condition
    findings: tuple[Finding, ...]
    """In the order in which a machine becomes ready: the first one may be the cause of the others."""


@dataclass(frozen=True, slots=True)
class HostDiagnosis:
    """What no condition tells of."""

    findings: tuple[str, ...] = ()
    """The service, and settings without which no kubelet starts in a machine: a sentence each."""
    drivers: tuple[DriverForPods, ...] = ()
    """By which images for pods are chosen."""
    image: str = PLAIN_IMAGE
    """Which of the images in containerfiles/ machines of this host need."""


def diagnose(machine: MachineOutcome) -> Diagnosis:
    """From its conditions; those of which the same is to be said are one finding."""
    found: dict[tuple[Status, str, str], list[ConditionType]] = {}
    for each in machine.conditions:
        if each.status is not Status.TRUE and each.type is not ConditionType.READY:
            found.setdefault((each.status, each.reason, each.message), []).append(each.type)
    findings = tuple(
        # What is not known is not seen either.
        Finding(tuple(kinds), status, reason, message, _looks_like(kinds, reason) if status is Status.FALSE else "")
        for (status, reason, message), kinds in found.items()
    )
    return Diagnosis(machine.name, machine.conditions[-1], findings)


def diagnose_host(facts: Facts, system: System) -> HostDiagnosis:
    """The image by the GPUs that it has."""
    settings = (_setting(system, name, wanted) for name, wanted in KERNEL_SETTINGS.items())
    findings = tuple(filter(None, (_service(system), *settings)))
    drivers = (host_vendor(each.vendor).driver_for_pods(each, facts.staged, system) for each in facts.vendors)
    return HostDiagnosis(findings, tuple(filter(None, drivers)), _image(facts))


def _image(facts: Facts) -> str:
    needed = {host_vendor(each.vendor).image for each in facts.vendors if each.gpus} - {PLAIN_IMAGE}
    return " and ".join(sorted(needed)) or PLAIN_IMAGE


def _service(system: System) -> str:
    match observe_units([SERVICE], system)[SERVICE].state:
        case "active" | "activating" | "reloading":
            return ""
        case Unseen(why):
            return f"whether {SERVICE} runs is not known: {why}"
        case Absent(why) | Broken(why):
            fault = why
        case state:
            fault = f"{SERVICE} is {state}"
    return (
        f"{fault}: nothing follows what changes on the host, and no metrics are served; "
        f"run `systemctl enable --now {SERVICE.removesuffix('.service')}`"
    )


def _setting(system: System, name: str, wanted: str) -> str:
    path, key = f"/proc/sys/{name}", name.replace("/", ".")
    try:
        value = system.read(path).decode(errors="replace").strip()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if value == wanted:
        return ""
    return (
        f"{key} is {value}, and the kubelet of a machine does not start until it is {wanted}: write "
        f"`{key} = {wanted}` into /etc/sysctl.d/90-kubelet.conf and run `sysctl --system`"
    )


def sound(diagnoses: Iterable[Diagnosis], host: HostDiagnosis) -> bool:
    """Whether every machine is ready and the host is as it should be."""
    return not host.findings and all(each.ready.status is Status.TRUE for each in diagnoses)


def in_words(diagnoses: Iterable[Diagnosis], host: HostDiagnosis) -> list[str]:
    """Lines for a person."""
    lines = ["host:" if host.findings else "host: nothing found"]
    lines += [f"  - {each}" for each in host.findings]
    for diagnosis in diagnoses:
        state = {Status.TRUE: "ready", Status.FALSE: "not ready"}.get(diagnosis.ready.status, "not known to be ready")
        lines.append(f"{diagnosis.machine}: {state}: {diagnosis.ready.reason}")
        for finding in diagnosis.findings:
            aside = "" if finding.prevents_ready else " (not needed for Ready)"
            lines.append(f"  - {', '.join(finding.conditions)}: {finding.status}, {finding.reason}{aside}")
            lines.append(f"    {finding.message}")
            if finding.looks_like:
                lines.append(f"    seen as: {finding.looks_like}")
    lines += [f"driver for pods: {_driver_in_words(each)}" for each in host.drivers]
    return [*lines, f"image for machines of this host: containerfiles/{host.image}"]


def _driver_in_words(driver: DriverForPods) -> str:
    interfaces = "".join(f", {name} {version}" for name, version in driver.interfaces.items())
    unknown = f"; which interfaces is not known: {driver.unknown}" if driver.unknown else ""
    return f"{driver.vendor} {driver.version}{interfaces}{unknown}"


def as_json(diagnoses: Iterable[Diagnosis], host: HostDiagnosis) -> str:
    """For programs: an object of `host`, a list of sentences, `drivers`, `machines` by name, and `image`."""
    machines = {
        each.machine: {
            "ready": each.ready.status,
            "findings": [
                {
                    "conditions": finding.conditions,
                    "status": finding.status,
                    "reason": finding.reason,
                    "message": finding.message,
                    "looksLike": finding.looks_like,
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


def _looks_like(kinds: Iterable[ConditionType], reason: str) -> str:
    """By condition and reason, else by the condition alone; what vendors know of each."""
    said = [
        text
        for kind in kinds
        for vendor in HOST_VENDORS
        if (text := vendor.symptoms.get((kind, reason)) or vendor.symptoms.get((kind, "")))
    ]
    return "; ".join(dict.fromkeys(said))
