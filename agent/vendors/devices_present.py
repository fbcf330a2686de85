"""What keeps granted GPUs from use before any node of theirs is looked at, whichever vendor they are of. Pure."""

from collections.abc import Callable

from agent.conditions import Condition, ConditionType, false, unknown
from agent.facts import Absent, Broken, Unseen, VendorFacts
from agent.goal import Grant

KIND = ConditionType.DEVICES_PRESENT


def before_nodes(facts: VendorFacts, grant: Grant, advice: Callable[[tuple[str, ...]], str]) -> Condition | None:
    """DevicesPresent where it is not True for that; `advice` says what to do for GPUs without a driver."""
    if isinstance(facts.devices, Unseen):
        return unknown(KIND, "ObservationFailed", facts.devices.why)
    if isinstance(facts.devices, Absent | Broken):
        return false(KIND, "NodesMissing", facts.devices.why)
    if grant.problems:
        return false(KIND, "GPUNotFound", "; ".join(grant.problems))
    drivers = {gpu.pci_address: gpu.driver for gpu in facts.gpus}
    unbound = tuple(address for address in grant.gpus if not drivers.get(address))
    if unbound:
        return false(KIND, "GPUWithoutDriver", f"no driver is bound to {', '.join(unbound)}; {advice(unbound)}")
    return None
