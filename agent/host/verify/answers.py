"""Decides whether a machine's report answers its current handoff. Pure."""

from agent.model.conditions import ConditionType, Reason, Status
from agent.model.facts import Absent, Facts, Granted, MachineFacts, Seen, Unseen
from agent.model.goal import MachineGoal
from agent.model.handoff import Report
from agent.model.paths import STATE
from agent.model.text import restart_command

MACHINE_SAYS = "machine says: "
"""Precedes a message from the machine, because root in the machine can write anything there."""
REPORT_INTERVAL = 60.0
"""Seconds between two runs of the machine half by its timer."""
STALE_AFTER = 3 * REPORT_INTERVAL + 30.0
"""Seconds after which a report is stale. By then, three further reports should have arrived; the 30 s allow for a slow
run."""


def pending(machine: MachineFacts, goal: MachineGoal, report: Seen[Report]) -> bool:
    """Return whether the machine has not answered this handoff yet, or reports a condition of Ready as Unknown."""
    if not isinstance(report, Report) or not answers(report, machine, goal):
        return True
    return any(each.status is Status.UNKNOWN and each.needed_for_ready for each in report.conditions)


def answers(report: Report, machine: MachineFacts, goal: MachineGoal) -> bool:
    """Return whether the report answers the current handoff.

    After the host has bound missing nodes, it publishes the same handoff again. A report of missing nodes then answers
    the handoff only if the report is newer than the binding, and answers the new publication. The ages of the files
    show whether the report is newer than the binding. `names_handoff` compares the publication that the report answers
    with the new one. If one of the two is unknown, the report must also be newer than the new publication. This test
    can be wrong: the machine half may begin a report before the new publication, and write it afterwards.
    """
    if not names_handoff(report, machine, goal.generation):
        return False
    named = report.publication and machine.publication
    since_change = machine.live_age if named else min(machine.live_age, machine.granted_age)
    return machine.report_age <= since_change or not reports(Reason.WRONG_NODE, goal, report)


def names_handoff(report: Report, machine: MachineFacts, generation: str) -> bool:
    """Return whether the report names the handoff of this generation and, if known, its last publication.

    The generation alone is not enough: if a GPU goes and comes back, the third handoff has the same content and so the
    same generation as the first. If the handoff's file cannot be observed, only the generation counts.
    """
    if report.publication and machine.publication and report.publication != machine.publication:
        return False
    return report.generation == generation


def reports(reason: Reason, goal: MachineGoal, report: Seen[Report]) -> bool:
    """Return whether the machine reports, for this handoff, that DevicesAllowed has this reason."""
    if not isinstance(report, Report) or report.generation != goal.generation:
        return False
    return any((each.type, each.reason) == (ConditionType.DEVICES_ALLOWED, reason) for each in report.conditions)


def why_unanswered(machine: MachineFacts, goal: MachineGoal, facts: Facts) -> str:
    """Return the message for the conditions of a machine that has not answered its handoff."""
    report, file = machine.report, facts.files.get(goal.handoff_file.path)
    if isinstance(report, Report) and report.refused and report.publication == machine.publication:
        return f"the machine half cannot use the handoff: {MACHINE_SAYS}{report.refused}"
    # The handoff and the record of its grant must be on disk. One that cannot be read may be.
    found = ((machine.granted, goal.granted), (file.content if file else Absent(""), goal.handoff_file.content))
    if not any(isinstance(seen, Unseen) for seen, _ in found) and any(seen != wanted for seen, wanted in found):
        advice = "if that lasts, `unbounded-agent apply` writes it or says why it cannot"
        return f"the agent has not written the latest handoff yet; {advice}"
    if machine.granted_age <= STALE_AFTER:
        return "the machine has not answered the latest handoff yet"
    see = f"see `journalctl -M {machine.name} -u unbounded-agent-gpu`"
    replaced = f"if {STATE} was replaced while the machine ran: run {restart_command(machine.name)}"
    return f"the machine has not answered the latest handoff within {STALE_AFTER:.0f} s: {see}; {replaced}"


def released(machine: MachineFacts, goal: MachineGoal, report: Seen[Report], now: float) -> bool:
    """Return whether permissions for devices that are no longer granted can be removed now.

    They can be removed once the machine half has stopped using the devices, or has had enough time to do so. If there
    is no report, or it is malformed or stale, they can be removed at once. `now` is the time by CLOCK_MONOTONIC.
    """
    if isinstance(report, Report) and names_handoff(report, machine, goal.generation):
        return True
    if not isinstance(report, Report | Unseen) or machine.report_age > STALE_AFTER:
        return True
    # The report is on an earlier handoff, or could not be read: wait, but only for a limited time, because another
    # machine may already have these devices. The wait ends STALE_AFTER seconds after the handoff was published or after
    # permissions were first kept, whichever comes first. If only the publication counted, root in the machine could
    # keep the permissions longer by causing problems: a full disk of the host, on which no handoff can be published, or
    # a node that cannot be bound.
    published = isinstance(machine.granted, Granted) and machine.granted == goal.granted
    kept_since = machine.live.kept_since if machine.live else 0.0
    return (published and machine.granted_age > STALE_AFTER) or (kept_since > 0 and now - kept_since > STALE_AFTER)
