"""Which of the host's GPUs a machine's settings ask for, of whichever vendor they are. Pure."""

from dataclasses import dataclass, replace

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
    wrong_driver: tuple[Gpu, ...] = ()
    """What was asked for and is there, but that another driver took it first."""


def select(vendors: tuple[VendorFacts, ...], wanted: str | list[str], share: Share) -> Selection:
    """`wanted` as the setting `gpus` has it."""
    present = sorted(gpu for vendor in vendors for gpu in vendor.gpus)
    fitting = [gpu for gpu in present if gpu.driver in ("", *host_vendor(gpu.vendor).drivers)]
    usable = [gpu for gpu in fitting if _counts(gpu, vendors, share)]
    wrong = tuple(gpu for vendor in vendors for gpu in host_vendor(vendor.vendor).wrong_driver(vendor.gpus))
    if wanted == "all":
        # Beside GPUs of another vendor it may be meant for the host's own display.
        missed = tuple(gpu for gpu in wrong if all(each.vendor == gpu.vendor for each in usable))
        return Selection(tuple(usable), wrong_driver=missed)
    if isinstance(wanted, str):
        selection = _count(usable, int(wanted.removeprefix("count=")), share)
        return replace(selection, wrong_driver=wrong) if selection.problems else selection
    chosen: list[Gpu] = []
    problems = []
    missed = tuple(gpu for gpu in wrong if gpu.pci_address in wanted or gpu.uuid in wanted)
    for name in wanted:
        found = [gpu for gpu in fitting if name in (gpu.pci_address, gpu.uuid)]
        chosen += [gpu for gpu in found if gpu not in chosen]
        if not found and all(name not in (gpu.pci_address, gpu.uuid) for gpu in missed):
            problems.append(_missing(name, present))
    return Selection(tuple(chosen), tuple(problems), missed)


def _counts(gpu: Gpu, vendors: tuple[VendorFacts, ...], share: Share) -> bool:
    """Whether it is one of `all`, or of a number. A processor's own, say, may be meant to have no driver at all."""
    awaited = any(vendor.driver_awaited for vendor in vendors if vendor.vendor == gpu.vendor)
    return bool(gpu.driver) or awaited or gpu.pci_address in share.has


def _count(usable: list[Gpu], count: int, share: Share) -> Selection:
    free = [gpu for gpu in usable if gpu.pci_address not in share.taken]
    # A GPU that is plugged in at a lower address must not push out one that pods use.
    # Nor does one that is drained get a replacement before its users have ended: it may be given back.
    last = {gpu.pci_address for gpu in free if gpu.detached} - share.draining

    def order(gpu: Gpu) -> tuple[bool, bool, int, bool, str]:
        # By vendor before the address: a processor's own GPU has a low one, and is rarely what is meant. So also before
        # whether it has a driver, which may come late, and a machine keeps what it was given first.
        has = gpu.pci_address in share.has
        return gpu.pci_address in last, not has, rank(gpu.vendor), not gpu.driver, gpu.pci_address

    chosen = tuple(sorted(free, key=order)[:count])
    others = f", and {len(usable) - len(free)} for other machines" if len(free) < len(usable) else ""
    short = f"{count} GPUs are wanted and the host has {len(free)}{others}"
    return Selection(chosen, () if len(chosen) == count else (short,))


def _missing(name: str, present: list[Gpu]) -> str:
    found = (other_driver(gpu, name) for gpu in present if name in (gpu.pci_address, gpu.uuid))
    return next(found, f"GPU {name} is not on this host")


def other_driver(gpu: Gpu, name: str) -> str:
    """Why it cannot be given to a machine."""
    return f"GPU {name} has kernel driver {gpu.driver}, not {' or '.join(host_vendor(gpu.vendor).drivers)}"
