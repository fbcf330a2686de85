"""Renders diagnoses for people and for programs. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct, to_builtins

from agent.cli.doctor.host import HostDiagnosis
from agent.cli.doctor.machines import Diagnosis, MachineFinding
from agent.cli.output import paragraph
from agent.cli.printing import WIDTH
from agent.host.reconcile import NO_MACHINES
from agent.model.conditions import Reason, Status
from agent.model.text import printable
from agent.vendors.host_vendor import DriverForPods, Finding

STATES = {Status.TRUE: "ready", Status.FALSE: "not ready"}


class ClusterDiagnosis(Struct, frozen=True):
    """The findings of a cluster."""

    findings: tuple[Finding, ...] = ()
    unknown: tuple[str, ...] = ()
    """Sentences on what could not be read, for example because the kubeconfig's user may not read it."""


class Report(Struct, frozen=True):
    """Everything that `doctor` found."""

    machines: tuple[Diagnosis, ...]
    host: HostDiagnosis
    cluster: ClusterDiagnosis | None = None
    """None if the command had no kubeconfig."""

    @property
    def sound(self) -> bool:
        """Whether every machine is ready, host and cluster have no finding, and all of the cluster could be read."""
        cluster = self.cluster or ClusterDiagnosis()
        ready = all(each.ready.status is Status.TRUE for each in self.machines)
        return ready and not (self.host.findings or cluster.findings or cluster.unknown)


def in_words(report: Report, width: int = WIDTH) -> Iterator[str]:
    """Yield the report as lines for people."""
    host, cluster = report.host, report.cluster
    yield "host:" if host.findings else "host: no fault found"
    yield from _findings(host.findings, width)
    if not report.machines:
        yield NO_MACHINES
    for diagnosis in report.machines:
        state = STATES.get(diagnosis.ready.status, "readiness unknown")
        yield f"{diagnosis.machine}: {state}: {diagnosis.ready.reason}"
        if diagnosis.ready.status is Status.TRUE and diagnosis.ready.reason != Reason.ALL_CONDITIONS_TRUE:
            # A machine without a GPU may be Ready even if it does not run. In that case, only the message says so.
            yield from paragraph("    ", diagnosis.ready.message, width)
        for finding in diagnosis.findings:
            yield from _machine_finding(finding, width)
    if cluster is not None:
        yield "cluster:" if cluster.findings or cluster.unknown else "cluster: no fault found"
        yield from _findings(cluster.findings, width)
        for each in cluster.unknown:
            yield from paragraph("  - unknown: ", each, width)
    for each in host.remarks:
        yield from paragraph("note: ", each, width)
    for driver in host.drivers:
        yield f"driver for pods: {_driver(driver)}"
    yield f"image for machines of this host: containerfiles/{host.image}"


def _findings(findings: Iterable[Finding], width: int) -> Iterator[str]:
    for each in findings:
        yield from paragraph("  - ", each.cause, width)
        if each.evidence:
            yield from paragraph("    evidence: ", each.evidence, width)
        yield from _fix(each.fix)


def _machine_finding(finding: MachineFinding, width: int) -> Iterator[str]:
    aside = "" if finding.prevents_ready or finding.status is Status.TRUE else " (not needed for Ready)"
    yield from paragraph("  - ", f"{', '.join(finding.conditions)}: {finding.status}, {finding.reason}{aside}", width)
    yield from paragraph("    evidence: ", finding.message, width)
    if finding.symptoms:
        yield from paragraph("    symptoms: ", finding.symptoms, width)
    yield from _fix(finding.fix)


def _fix(commands: Sequence[str]) -> Iterator[str]:
    """Yield each command on a line of its own, however long it is, so that users can copy it."""
    for heading, command in zip(("    fix:      ", *[" " * 14] * len(commands)), commands, strict=False):
        yield f"{heading}{printable(command)}"


def _driver(driver: DriverForPods) -> str:
    interfaces = "".join(f", {name} {version}" for name, version in driver.interfaces.items())
    unknown = f"; API version unknown: {driver.unknown}" if driver.unknown else ""
    return f"{driver.vendor} {driver.version}{interfaces}{unknown}"


def as_object(report: Report) -> dict[str, object]:
    """Return the report for programs (docs/json.md)."""
    return {
        "sound": report.sound,
        "host": [to_builtins(each) for each in report.host.findings],
        "notes": report.host.remarks,
        "drivers": [to_builtins(each) for each in report.host.drivers],
        "image": report.host.image,
        "machines": {
            each.machine: {
                "ready": each.ready.status,
                "reason": each.ready.reason,
                "message": each.ready.message,
                "findings": [to_builtins(finding) for finding in each.findings],
            }
            for each in report.machines
        },
        "cluster": to_builtins(report.cluster),
    }
