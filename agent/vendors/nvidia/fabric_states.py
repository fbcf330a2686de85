"""What the words mean in which a GPU describes its registration with the NVLink fabric. Pure.

NVML has four states (nvmlGpuFabricState_t in nvml.h): not supported, not started, in progress and completed. nvidia-smi
prints the first one as N/A. A status is valid only in the state `Completed`.
"""

from collections.abc import Iterable

from agent.model.handoff import FabricAnswer

NO_FABRIC = frozenset({"", "N/A", "[N/A]", "Not Supported", "[Not Supported]"})
REGISTERED = ("Completed", "Success")
WITH_FABRIC = frozenset({"Not Started", "In Progress", REGISTERED[0]})
NO_ANSWER = ("[", "ERR")
"""How words begin by which nvidia-smi says that it got no answer: [GPU is lost], [Unknown Error], ERR!."""


def is_answer(answer: FabricAnswer) -> bool:
    """Return whether the GPU answered, in words that are known."""
    if not has_fabric(answer):
        return True
    without_status = answer.state != REGISTERED[0] and answer.status in NO_FABRIC
    return answer.state in WITH_FABRIC and (without_status or not answer.status.startswith(NO_ANSWER))


def has_fabric(answer: FabricAnswer) -> bool:
    """Return whether the GPU has a fabric. GPUs before Hopper say that they have none, even with NVSwitch."""
    return answer.state not in NO_FABRIC


def is_registered(answer: FabricAnswer) -> bool:
    return (answer.state, answer.status) == REGISTERED


def has_failed(answer: FabricAnswer) -> bool:
    """Return whether the registration has ended without success. CUDA also waits for one that has not ended."""
    return answer.state == REGISTERED[0] and not is_registered(answer)


def is_settled(gpus: Iterable[str], answers: Iterable[FabricAnswer]) -> bool:
    """Return whether each of the GPUs has answered that it is registered, or that it has no fabric."""
    good = {each.gpu for each in answers if is_registered(each) or not has_fabric(each)}
    return good.issuperset(gpus)
