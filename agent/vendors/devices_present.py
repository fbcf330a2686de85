"""Finds the faults that GPUs of every vendor can have, for the condition DevicesPresent. Pure."""

from collections.abc import Callable

from agent.model.conditions import Condition, ConditionType, false, unknown
from agent.model.device import DeviceKind
from agent.model.facts import Absent, Broken, Unseen, VendorFacts
from agent.model.goal import Grant
from agent.model.reasons import Reason

KIND = ConditionType.DEVICES_PRESENT


def common_fault(facts: VendorFacts, grant: Grant, advice: Callable[[tuple[str, ...]], str]) -> Condition | None:
    """Return DevicesPresent as Unknown or False for a fault that GPUs of every vendor can have.

    Return None if there is no such fault.
    `advice` returns what to do about GPUs without a driver, given their PCI addresses.
    """
    if isinstance(facts.devices, Unseen):
        return unknown(KIND, Reason.OBSERVATION_FAILED, facts.devices.why)
    if isinstance(facts.devices, Absent | Broken):
        return false(KIND, Reason.NODES_MISSING, facts.devices.why)
    if grant.problems:
        return false(KIND, Reason.GPU_NOT_FOUND, "; ".join(grant.problems))
    drivers = {gpu.pci_address: gpu.driver for gpu in facts.gpus}
    unbound = tuple(address for address in grant.gpus if not drivers.get(address))
    if unbound:
        return false(KIND, Reason.GPU_WITHOUT_DRIVER, f"no driver is bound to {', '.join(unbound)}; {advice(unbound)}")
    return None


def nodes_missing(facts: VendorFacts, grant: Grant, kind: DeviceKind, node: str, advice: str) -> Condition | None:
    """Return DevicesPresent with the status False if a granted GPU has no node of this kind; otherwise None.

    Two arguments are only for the message: `node` is the form of the node's path, and `advice` says what to do next.
    """
    with_node = {each.pci_address for each in grant.nodes if each.kind is kind}
    missing = [address for address in grant.gpus if address not in with_node]
    if not missing:
        return None
    problems = "".join(f"; {problem}" for problem in facts.problems)
    return false(KIND, Reason.NODES_MISSING, f"no usable {node} for {', '.join(missing)}; {advice}{problems}")
