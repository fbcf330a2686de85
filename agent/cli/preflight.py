"""`unbounded-agent preflight`: checks what would keep the nodes of the configuration from being made."""

import argparse
import time

from agent.cli.documents import document
from agent.cli.printing import report, say
from agent.cli.up import as_object, chosen, in_words
from agent.cli.wiring import reconciler_for
from agent.host.provision.up import Provisioner
from agent.host.reconcile import Reconciler
from agent.system.network import HostNetwork
from agent.system.tool_runner import tool_runner


def run_preflight(options: argparse.Namespace) -> int:
    """Run `preflight` with these options."""
    return preflight(reconciler_for(options, tool_runner), for_programs=options.json)


def preflight(reconciler: Reconciler, *, for_programs: bool) -> int:
    """Print all checks. Return 1 if one failed that must pass before a node can be made, otherwise 0."""
    names = chosen(reconciler, "")
    facts = reconciler.preview()[0]
    work = Provisioner(reconciler.config, reconciler.system, HostNetwork(), reconciler.progress).work(names, facts)
    if for_programs:
        checks = [as_object(check) for check in work.checks]
        say([document("preflight", time.time(), {"ok": not work.failed, "checks": checks})])
    else:
        say(in_words(check) for check in work.checks)
    for remark in work.remarks:
        report(f"note: {remark}")
    return 1 if work.failed else 0
