"""`unbounded-agent doctor`: lists the faults of host, machines and cluster, with evidence and commands to fix them."""

import argparse
import os
import time

from agent.cli.doctor.bundle import default_name, write_bundle
from agent.cli.doctor.cluster import read_cluster
from agent.cli.doctor.cluster_symptoms import findings
from agent.cli.doctor.host import diagnose_host, loaded_modules
from agent.cli.doctor.machines import diagnose, environment_of
from agent.cli.doctor.words import ClusterDiagnosis, Report, as_object, in_words
from agent.cli.documents import document
from agent.cli.output import style
from agent.cli.printing import say
from agent.cli.wiring import reconciler_for
from agent.host.observe.joined import observe_joined
from agent.host.reconcile import Reconciler
from agent.model.conditions import ConditionType
from agent.model.handoff import DRA
from agent.model.reasons import Reason


def run_doctor(options: argparse.Namespace) -> int:
    """Run `doctor` with these options."""
    reconciler = reconciler_for(options)
    return doctor(reconciler, for_programs=options.json, kubeconfig=options.kubeconfig, bundle=options.bundle)


def doctor(
    reconciler: Reconciler, *, for_programs: bool = False, kubeconfig: str = "", bundle: str | None = None
) -> int:
    """Print the diagnoses as text, or as JSON for programs. Return 0 if the report is sound, otherwise 1.

    If the configuration on disk is invalid, the report is about the last good one, and the exit code is 2. If `bundle`
    is not None, it is a path: write an archive there instead, and return 0. An empty path means a new file in the
    current directory.
    """
    report = examine(reconciler, kubeconfig)
    if bundle is not None:
        path = os.path.abspath(bundle or default_name(os.uname().nodename, time.time()))
        left_out = write_bundle(path, report, reconciler)
        aside = f"; what is missing ({len(left_out)}) is listed in left-out.txt in the archive" if left_out else ""
        say([f"{path} is written{aside}", "Secrets that were recognised are removed. Read it before you send it."])
        return 0
    say([document("doctor", time.time(), as_object(report))] if for_programs else in_words(report, style().width))
    if reconciler.rejected:
        return 2
    return 0 if report.sound else 1


def examine(reconciler: Reconciler, kubeconfig: str = "") -> Report:
    """Return the diagnoses of the host and its machines, and with a kubeconfig those of the cluster."""
    facts, planned, difference = reconciler.preview()
    system = reconciler.system
    machines = reconciler.evaluate(facts, planned, difference)
    nodes = {each.name: observe_joined(each.name, system) for each in machines}
    modules = loaded_modules(system)
    dra = {name for name, settings in reconciler.config.machines.items() if settings.allocation == DRA}
    as_root = os.geteuid() == 0
    of_up = {name for name, settings in reconciler.config.machines.items() if settings.node}
    diagnoses = tuple(
        diagnose(
            each,
            environment_of(
                facts,
                modules,
                nodes[each.name],
                offers_gpus=each.name in dra,
                as_root=as_root,
                made_by_up=each.name in of_up,
            ),
        )
        for each in machines
    )
    cluster = None
    if kubeconfig:
        read = read_cluster(system, kubeconfig, sorted(filter(None, nodes.values())))
        cluster = ClusterDiagnosis(findings(read), read.unknown)
    # A machine that has not reported may have a kubelet.
    kubelets = any(
        each.name in of_up or each.condition(ConditionType.GPUS_ADVERTISED).reason != Reason.NO_KUBELET
        for each in machines
    )
    host = diagnose_host(facts, reconciler.config, system, reconciler.rejected, kubelets=kubelets)
    return Report(diagnoses, host, cluster)
