"""Finds the faults that GPUs of every vendor can have, for the condition DevicesPresent. Pure."""

from collections.abc import Callable

from agent.model.conditions import Condition, ConditionType, false, unknown
from agent.model.device import DeviceKind
from agent.model.facts import Absent, Broken, Unseen, VendorFacts
from agent.model.goal import Grant
from agent.model.reasons import Reason

KIND = ConditionType.DEVICES_PRESENT


def unusable(facts: VendorFacts, grant: Grant) -> Condition | None:
    """Return DevicesPresent as Unknown or False if nothing is known of the nodes, or the settings ask for too much.

    Return None if there is no such fault.
    """
    if isinstance(facts.devices, Unseen):
        return unknown(KIND, Reason.OBSERVATION_FAILED, facts.devices.why)
    if isinstance(facts.devices, Absent | Broken):
        return false(KIND, Reason.NODES_MISSING, facts.devices.why)
    if grant.problems:
        return false(KIND, Reason.GPU_NOT_FOUND, "; ".join(grant.problems))
    return None


def faulty_gpus(
    facts: VendorFacts,
    grant: Grant,
    kind: DeviceKind,
    node: str,
    advice: str,
    driver_advice: Callable[[tuple[str, ...]], str],
) -> tuple[Condition, ...]:
    """Return DevicesPresent with the status False for each kind of fault that granted GPUs have. Each names its GPUs.

    A GPU must have a driver, must answer, and must have a node of this `kind`. The other arguments are only for the
    messages: `node` is the form of the node's path, and `advice` and `driver_advice` say what to do about GPUs without
    a node and, given their PCI addresses, about GPUs without a driver.
    """
    drivers = {gpu.pci_address: gpu.driver for gpu in facts.gpus}
    unbound = tuple(address for address in grant.gpus if not drivers.get(address))
    lost = {gpu.pci_address: gpu.why_lost for gpu in facts.gpus if gpu.why_lost and gpu.pci_address in grant.gpus}
    with_node = {each.pci_address for each in grant.nodes if each.kind is kind}
    missing = [address for address in grant.gpus if address not in {*unbound, *lost, *with_node}]
    faults = []
    if unbound:
        message = f"no driver is bound to {', '.join(unbound)}; {driver_advice(unbound)}"
        faults.append(false(KIND, Reason.GPU_WITHOUT_DRIVER, message, unbound))
    if lost:
        sentences = [f"{address}: {why}" for address, why in lost.items()]
        faults.append(false(KIND, Reason.GPU_FALLEN_OFF_BUS, "; ".join(sentences), lost))
    if missing:
        problems = "".join(f"; {problem}" for problem in facts.problems)
        message = f"no usable {node} for {', '.join(missing)}; {advice}{problems}"
        faults.append(false(KIND, Reason.NODES_MISSING, message, missing))
    return tuple(faults)
