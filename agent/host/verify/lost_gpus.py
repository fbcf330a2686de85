"""Evaluates the condition GPUsComplete: whether a machine has lost a GPU that it was granted. Pure."""

from collections.abc import Collection, Sequence

from agent.model.conditions import Condition, ConditionType, Status, false, not_applicable, true, unknown
from agent.model.facts import Absent, Broken, Seen, Unseen
from agent.model.reasons import Reason
from agent.model.remembered import Remembered, RememberedGpu
from agent.model.text import rfc3339

KIND = ConditionType.GPUS_COMPLETE


def lost_gpus(machine: str, remembered: Seen[Remembered]) -> tuple[RememberedGpu, ...]:
    """Return the GPUs that the machine was granted and that are lost. Acknowledged losses are left out."""
    return tuple(gpu for gpu in _granted_gpus(machine, remembered) if gpu.lost)


def expected_gpus(wanted: str | list[str], had: Collection[str]) -> int:
    """Return how many GPUs a machine should have. `wanted` is its setting `gpus`; `had` are the GPUs it has or lost."""
    if wanted == "all":
        return len(had)
    return len(wanted) if isinstance(wanted, list) else int(wanted.removeprefix("count="))


def with_lost_gpus(
    conditions: Sequence[Condition], machine: str, remembered: Seen[Remembered]
) -> tuple[Condition, ...]:
    """Return the conditions with the current GPUsComplete, in the order of ConditionType.

    GPUsComplete makes Ready False only if the machine has no GPU left: one lost GPU does not make the others unusable.
    """
    complete = _complete(machine, remembered)
    remaining = [gpu for gpu in _granted_gpus(machine, remembered) if not gpu.lost]
    all_lost = complete.status is Status.FALSE and not remaining

    by_type = {each.type: each for each in conditions} | {KIND: complete}
    ready = by_type[ConditionType.READY]
    if all_lost and (ready.status is not Status.FALSE or ready.reason == Reason.NO_GPU):
        by_type[ConditionType.READY] = false(ConditionType.READY, Reason.GPU_LOST, f"{KIND}: {complete.message}")
    elif isinstance(remembered, Unseen) and (ready.status, ready.reason) == (Status.TRUE, Reason.NO_GPU):
        why = f"whether the machine has lost all its GPUs is unknown: {remembered.why}"
        by_type[ConditionType.READY] = unknown(ConditionType.READY, Reason.OBSERVATION_FAILED, why)
    return tuple(by_type[kind] for kind in ConditionType)


def _granted_gpus(machine: str, remembered: Seen[Remembered]) -> tuple[RememberedGpu, ...]:
    if not isinstance(remembered, Remembered):
        return ()
    return tuple(gpu for gpu in remembered.gpus if machine in gpu.machines)


def _complete(machine: str, remembered: Seen[Remembered]) -> Condition:
    if isinstance(remembered, Absent | Broken | Unseen):
        return unknown(KIND, Reason.OBSERVATION_FAILED, remembered.why)
    damage = (
        f"the record of granted GPUs was damaged, so GPUs lost before that are unknown ({remembered.damage}); check "
        "with `lspci` that no GPU is missing, then acknowledge the damage: `unbounded-agent gpus forget`"
    )
    if lost := lost_gpus(machine, remembered):
        gone = ", ".join(f"{gpu.describe()} since {rfc3339(gpu.lost)}" for gpu in lost)
        commands = ", ".join(f"`unbounded-agent gpus forget {gpu.pci_address}`" for gpu in lost)
        forget = f"{'if it' if len(lost) == 1 else 'for each GPU that'} was removed on purpose, run {commands}"
        message = (
            f"left the PCI bus without `unbounded-agent gpus detach`: {gone}; see `dmesg` and the server's hardware "
            f"log; {forget}"
        )
        return false(KIND, Reason.GPU_LOST, f"{message}; {damage}" if remembered.damage else message)
    if remembered.damage:
        return unknown(KIND, Reason.RECORD_DAMAGED, damage)
    if not _granted_gpus(machine, remembered):
        return not_applicable(KIND, "no GPU is granted")
    return true(KIND, Reason.COMPLETE, "every GPU that the machine was granted is on the PCI bus")
