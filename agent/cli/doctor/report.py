"""Renders diagnoses for people and for programs. Pure."""

from collections.abc import Iterable, Iterator

from msgspec import Struct, to_builtins

from agent.cli.doctor.host import HostDiagnosis
from agent.cli.doctor.machines import Diagnosis, MachineFinding
from agent.cli.output import paragraph
from agent.cli.printing import WIDTH
from agent.host.reconcile import NO_MACHINES
from agent.model.conditions import Reason, Status
from agent.model.text import printable
from agent.vendors.host_vendor import Finding

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
        yield from _findings(diagnosis.findings, width)
    if cluster is not None:
        yield "cluster:" if cluster.findings or cluster.unknown else "cluster: no fault found"
        yield from _findings(cluster.findings, width)
        for each in cluster.unknown:
            yield from paragraph("  - unknown: ", each, width)
    for each in host.remarks:
        yield from paragraph("note: ", each, width)
    for driver in host.drivers:
        interfaces = "".join(f", {name} {version}" for name, version in driver.interfaces.items())
        unknown = f"; API version unknown: {driver.unknown}" if driver.unknown else ""
        yield f"driver for pods: {driver.vendor} {driver.version}{interfaces}{unknown}"
    yield f"image for machines of this host: containerfiles/{host.image}"


def _findings(findings: Iterable[Finding | MachineFinding], width: int) -> Iterator[str]:
    for each in findings:
        if isinstance(each, MachineFinding):
            aside = "" if each.prevents_ready or each.status is Status.TRUE else " (not needed for Ready)"
            cause = f"{', '.join(each.conditions)}: {each.status}, {each.reason}{aside}"
            evidence, symptoms = each.message, each.symptoms
        else:
            cause, evidence, symptoms = each.cause, each.evidence, ""
        yield from paragraph("  - ", cause, width)
        for heading, text in (("evidence", evidence), ("symptoms", symptoms)):
            yield from paragraph(f"    {heading}: ", text, width) if text else ()
        # Each command is on a line of its own, however long it is, so that users can copy it.
        for index, command in enumerate(each.fix):
            yield f"{' ' * 14 if index else '    fix:      '}{printable(command)}"


def as_object(report: Report) -> dict[str, object]:
    """Return the report for programs (docs/json.md)."""
    return {
        "sound": report.sound,
        "host": to_builtins(report.host.findings),
        "notes": report.host.remarks,
        "drivers": to_builtins(report.host.drivers),
        "image": report.host.image,
        "machines": {
            each.machine: {
                "ready": each.ready.status,
                "reason": each.ready.reason,
                "message": each.ready.message,
                "findings": to_builtins(each.findings),
            }
            for each in report.machines
        },
        "cluster": to_builtins(report.cluster),
    }
