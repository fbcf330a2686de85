"""Which of the host's GPUs a machine's settings ask for, of whichever vendor they are. Pure."""

from dataclasses import dataclass

from agent.facts import Gpu, VendorFacts
from agent.goal import Share
from agent.vendors.host import host_vendor, rank


@dataclass(frozen=True, slots=True)
class Selection:
    """GPUs of all vendors."""

    gpus: tuple[Gpu, ...]
    """With detached ones; where a number is asked for, only while drained or as no other GPU can take their place."""
    problems: tuple[str, ...] = ()
    """What was asked for and is not there, one sentence each."""


def select(vendors: tuple[VendorFacts, ...], wanted: str | list[str], share: Share) -> Selection:
    """`wanted` as the setting `gpus` has it."""
    present = sorted(gpu for vendor in vendors for gpu in vendor.gpus)
    usable = [gpu for gpu in present if gpu.driver in ("", *host_vendor(gpu.vendor).drivers)]
    if wanted == "all":
        return Selection(tuple(usable))
    if isinstance(wanted, str):
        return _count(usable, int(wanted.removeprefix("count=")), share)
    chosen: list[Gpu] = []
    problems = []
    for name in wanted:
        found = [gpu for gpu in usable if name in (gpu.pci_address, gpu.uuid)]
        chosen += [gpu for gpu in found if gpu not in chosen]
        if not found:
            problems.append(_missing(name, present))
    return Selection(tuple(chosen), tuple(problems))


def _count(usable: list[Gpu], count: int, share: Share) -> Selection:
    free = [gpu for gpu in usable if gpu.pci_address not in share.taken]
    # A GPU that is plugged in at a lower address must not push out one that pods use.
    # Nor does one that is drained get a replacement before its users have ended: it may be given back.
    last = {gpu.pci_address for gpu in free if gpu.detached} - share.draining

    def order(gpu: Gpu) -> tuple[bool, bool, int, str]:
        # By vendor before the address: a processor's own GPU has a low one, and is rarely what is meant.
        return gpu.pci_address in last, gpu.pci_address not in share.has, rank(gpu.vendor), gpu.pci_address

    chosen = tuple(sorted(free, key=order)[:count])
    others = f", and {len(usable) - len(free)} for other machines" if len(free) < len(usable) else ""
    short = f"{count} GPUs are wanted and the host has {len(free)}{others}"
    return Selection(chosen, () if len(chosen) == count else (short,))


def _missing(name: str, present: list[Gpu]) -> str:
    for gpu in present:
        if name in (gpu.pci_address, gpu.uuid):
            return f"GPU {name} has kernel driver {gpu.driver}, not {' or '.join(host_vendor(gpu.vendor).drivers)}"
    return f"GPU {name} is not on this host"
