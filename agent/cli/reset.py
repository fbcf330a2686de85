"""`unbounded-agent reset`: removes a node from the host and, after the last node, restores the host."""

import argparse
import re

from msgspec.structs import replace

from agent.cli.host import load, this_host
from agent.cli.printing import progress, report, report_failures, say
from agent.cli.up import BUSY
from agent.cli.wiring import make_reconciler
from agent.config.load import Loaded
from agent.config.settings import MACHINE_NAME, Config
from agent.host.provision.observe import made_nodes, observe_found, observe_node
from agent.host.provision.reset import Ending, Reset
from agent.host.reconcile import Reconciler
from agent.host.state.locks import COMMAND_WAIT, locked, machine_locks
from agent.model.errors import ConfigError, NoMachinesError
from agent.model.facts import Absent
from agent.model.paths import MACHINES_STATE, PROVISION_LOCK, nspawn_file, unit_drop_in
from agent.system.network import HostNetwork, NetworkSource


def run_reset(options: argparse.Namespace) -> int:
    """Remove the node in the machine that `options` names, even if it is no longer configured. Return the exit code."""
    system = this_host()
    try:
        loaded = load(options, system)
    except NoMachinesError:
        # The configuration file may have been removed together with its last machine.
        loaded = Loaded(Config(machines={}), in_force=False)
    return reset_machine(options.machine, make_reconciler(loaded, system), HostNetwork())


def reset_machine(machine: str, reconciler: Reconciler, network: NetworkSource) -> int:
    """Remove the node, and print what is left to do.

    Return 1 if this was the last node and the host still differs from how it was found, otherwise 0. Raises AgentError.
    """
    if not re.fullmatch(MACHINE_NAME, machine):
        raise ConfigError(f"{machine!a} is no machine's name", "use the name in its table [machines.NAME]")
    _check_known(machine, reconciler)
    others = {name: each for name, each in reconciler.config.machines.items() if name != machine}
    without_machine = Reconciler(
        replace(reconciler.config, machines=others),
        reconciler.system,
        reconciler.devices,
        reconciler.progress,
        memory=reconciler.memory,
        in_force=reconciler.in_force,
    )

    kept = set(others)

    def remove_files() -> tuple[str, ...]:
        # The machine's root file system is removed by now. So a pass without the machine in the configuration removes
        # the files that the agent wrote for the machine.
        outcome = without_machine.reconcile()
        # Machines that are no longer configured, but run or start at boot, keep their settings.
        kept.update(each.name for each in outcome.facts.machines)
        return outcome.failures_of((machine,))

    system = reconciler.system
    with locked(system, PROVISION_LOCK, COMMAND_WAIT, BUSY), machine_locks(system, (machine,), "reset"):
        ending = Reset(machine, system, network, remove_files, lambda: not kept, progress).run()
    for remark in ending.remarks:
        report(f"note: {remark}")
    say(_advice(machine, ending, configured=machine in reconciler.config.machines))
    return report_failures(ending.differences)


def _check_known(machine: str, reconciler: Reconciler) -> None:
    """Raise ConfigError for a machine that is not configured, and of which nothing is left."""
    system, configured = reconciler.system, reconciler.config.machines
    facts, made = observe_node(machine, system), made_nodes(system)
    files = (nspawn_file(machine), unit_drop_in(machine), f"{MACHINES_STATE}/{machine}")
    if machine in configured or machine in made or facts.staged or any(map(system.exists, files)):
        return
    if not isinstance(facts.root, Absent) or not (made or isinstance(observe_found(system), Absent)):
        # The second: `up` has changed the host and was interrupted before it made its first node.
        return
    names = ", ".join(sorted({*configured, *made}))
    raise ConfigError(
        f"there is no machine {machine}: it is not configured, and nothing is left of it",
        f"the machines are {names}" if names else "no machine is configured, and `up` has made none",
    )


def _advice(machine: str, ending: Ending, *, configured: bool) -> list[str]:
    if not ending.done:
        return [f"machine {machine}: nothing to do"]
    host = f"keeps its settings for {', '.join(ending.others)}" if ending.others else "is as it was found"
    lines = [f"machine {machine} is removed" + ("" if ending.differences else f"; the host {host}")]
    if ending.node:
        lines.append(f"its Node object stays: run `kubectl delete node {ending.node}` where you have the right to")
    if configured:
        lines.append(f"it is still configured: `unbounded-agent up {machine}` would make it again")
    return lines
