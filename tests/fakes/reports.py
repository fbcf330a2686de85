"""Reports of machines."""

import time

from agent.host.reconcile import MachineOutcome
from agent.model.conditions import Condition, ConditionType, Reason, Status, true
from agent.model.handoff import Publication, Report, parse_handoff, render_report
from agent.model.paths import (
    REPORT_NAME,
    handoff_file,
    report_directory,
)
from tests.fakes.gpu_host import MACHINE
from tests.fakes.host import Host

IN_MACHINE = (
    ConditionType.LIBRARIES_LINKED,
    ConditionType.CDI_SPEC_CURRENT,
    ConditionType.RUNTIME_CONFIGURED,
    ConditionType.RUNTIME_ACTIVE,
    ConditionType.VALIDATION_MARKERS_SET,
    ConditionType.GPUS_ADVERTISED,
    ConditionType.NODE_CONDITION_SET,
)
"""Conditions that only the machine half reports. The host half reports the others; both report DevicesAllowed."""


def condition(machine: MachineOutcome, kind: ConditionType) -> tuple[Status, str]:
    found = next(each for each in machine.conditions if each.type is kind)
    return found.status, found.reason


def report(
    host: Host, devices: Condition, changed_files: tuple[str, ...] = (), answered: Publication | None = None
) -> None:
    """Let the machine report after a tick of the clock by which the kernel dates files."""
    time.sleep(0.02)
    generation = parse_handoff(host.read(handoff_file(MACHINE))).generation
    conditions = (devices, *(Condition(kind, Status.TRUE, "Fine", "simulated") for kind in IN_MACHINE))
    document = render_report(Report(generation, conditions, (), "", "0.1.0~test", {}, 1, changed_files, answered))
    host.write(f"{report_directory(MACHINE)}/{REPORT_NAME}", document)
    time.sleep(0.02)


OPENED = true(ConditionType.DEVICES_ALLOWED, Reason.OPENED, "simulated")
