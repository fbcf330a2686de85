"""A host without any fault, and a machine on it that reports none, for tests that seed one."""

from agent.cli.doctor.host import SERVICE
from agent.host.provision.host_settings import KUBELET_SYSCTLS, sysctl_path
from agent.host.reconcile import Reconciler
from agent.model.conditions import Condition, ConditionType, Reason, Status, true
from agent.model.facts import render_live
from agent.model.handoff import FabricAnswer, HealthAnswer, Report, parse_handoff, render_report
from agent.model.paths import REPORT_NAME, handoff_file, live_file, report_directory
from tests.fakes.gpu_host import MACHINE, units
from tests.fakes.host import Host
from tests.fakes.libcuda import answer_of_libcuda
from tests.fakes.reports import IN_MACHINE

ALL_OPEN = true(ConditionType.DEVICES_ALLOWED, Reason.OPENED, "simulated")


def make_sound(host: Host) -> None:
    """Add what `doctor` expects of a host: the service, settings of the kernel, and a libcuda that answers."""
    host.bus.unit(SERVICE)
    answer_of_libcuda(host)
    for name, value in KUBELET_SYSCTLS.items():
        host.file(sysctl_path(name), f"{value}\n")


def start(host: Host, agent: Reconciler) -> None:
    """Let the machine run with its settings, and report that everything is as it should be."""
    (machine,) = agent.reconcile().machines
    assert machine.start_settings
    host.write(live_file(MACHINE), render_live(machine.start_settings))
    units(host, "active")
    report(host, ALL_OPEN)
    agent.reconcile()


def report(
    host: Host,
    *found: Condition,
    fabric: tuple[FabricAnswer, ...] = (),
    health: tuple[HealthAnswer, ...] = (),
    cordon: str = "",
) -> None:
    """Let the machine report these conditions; the others are True."""
    generation = parse_handoff(host.read(handoff_file(MACHINE))).generation
    given = {each.type for each in found}
    fine = (Condition(kind, Status.TRUE, "Fine", "simulated") for kind in IN_MACHINE if kind not in given)
    path = f"{report_directory(MACHINE)}/{REPORT_NAME}"
    known = Report(generation, (*found, *fine), (), "", "0.1.0", {}, 2, fabric=fabric, health=health, cordon=cordon)
    host.write(path, render_report(known))
