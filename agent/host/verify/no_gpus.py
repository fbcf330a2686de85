"""Evaluates the conditions of a machine that gets no GPU. Pure."""

from agent.config.settings import MachineSettings
from agent.model.conditions import Condition, ConditionType, false, not_applicable, true
from agent.model.facts import Absent, Broken, Facts, MachineFacts, Unseen
from agent.model.paths import machine_unit
from agent.model.reasons import Reason


def without_gpus(settings: MachineSettings, facts: Facts, machine: MachineFacts) -> tuple[Condition, ...]:
    """Return the conditions of a machine that gets no GPU.

    Such a machine may be Ready even if it does not run, because the agent may have nothing to do for it. So, if it
    does not run, the message of Ready says that.
    """
    reason, message = Reason.NO_GPU, "this host has no GPU"
    if detached := sorted(gpu.pci_address for vendor in facts.vendors for gpu in vendor.gpus if gpu.detached):
        reason = Reason.GPU_DETACHED
        message = f"an administrator detached {', '.join(detached)}, and the machine has no other GPU"
    elif drivers := sorted({gpu.driver or "none" for vendor in facts.vendors for gpu in vendor.gpus}):
        reason = Reason.NO_GPU_GRANTED
        message = f"no GPU of this host has a driver that machines can use (drivers: {', '.join(drivers)})"
    conditions = [not_applicable(kind, message) for kind in ConditionType if kind is not ConditionType.READY]
    aside = _unless_it_runs(machine)
    if settings.require_gpus:
        ready = false(ConditionType.READY, reason, f"{message}, and require_gpus is set for this machine{aside}")
    else:
        ready = true(ConditionType.READY, reason, f"{message}: no GPU is set up{aside}")
    return (*conditions, ready)


def _unless_it_runs(machine: MachineFacts) -> str:
    """Return the end of a message: the machine starts, does not run, or was not observed; empty if it runs."""
    match machine.unit_state:
        case "active":
            return ""
        case "activating" | "reloading":
            return f"; machine {machine.name} is starting"
        case Unseen(why) | Broken(why) | Absent(why):
            return f"; whether machine {machine.name} runs is unknown: {why}"
        case _:
            return f"; machine {machine.name} does not run: see `systemctl status {machine_unit(machine.name)}`"
