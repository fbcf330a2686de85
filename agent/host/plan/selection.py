"""Selects the GPUs, of any vendor, that a machine's settings request. Pure."""

from msgspec import Struct
from msgspec.structs import replace

from agent.host.vendors import host_vendor, rank
from agent.model.facts import Gpu, VendorFacts
from agent.model.goal import Share
from agent.model.pci_address import PCI_ADDRESS
from agent.model.text import counted


class Selection(Struct, frozen=True):
    """The selected GPUs of all vendors."""

    gpus: tuple[Gpu, ...]
    """The GPUs, including detached ones. With `count=N`, a detached GPU is included only while it is being drained, or
    if no other GPU can replace it."""
    problems: tuple[str, ...] = ()
    """Requests of the settings that the host cannot fulfil, one sentence each."""
    wrong_driver: tuple[Gpu, ...] = ()
    """GPUs that the settings request, but that are bound to a wrong driver."""


def select(vendors: tuple[VendorFacts, ...], wanted: str | list[str], share: Share) -> Selection:
    """Return the GPUs for one machine. `wanted` is its setting `gpus`."""
    present = sorted(gpu for vendor in vendors for gpu in vendor.gpus)
    # GPUs without a driver are included, because their driver may be loaded later. GPUs that driver_override reserves
    # for another driver are left out.
    fitting = [
        gpu
        for gpu in present
        if (gpu.driver or gpu.override) in ("", *host_vendor(gpu.vendor).drivers) and not gpu.excluded
    ]
    usable = [gpu for gpu in fitting if _is_eligible(gpu, vendors, share)]
    wrong = tuple(gpu for vendor in vendors for gpu in host_vendor(vendor.vendor).misbound_gpus(vendor.gpus))
    if wanted == "all":
        # If a GPU of another vendor is usable, a GPU with a wrong driver is not reported: it may be meant for the
        # host's display.
        missed = tuple(gpu for gpu in wrong if all(each.vendor == gpu.vendor for each in usable))
        why = _why_reserved(usable, share) if usable else _why_excluded(present)
        return Selection(_not_reserved(usable, share), why, wrong_driver=missed)
    if isinstance(wanted, str):
        selection = _select_count(usable, int(wanted.removeprefix("count=")), share)
        if not selection.problems:
            return selection
        why = (*_why_reserved(usable, share), *_why_excluded(present))
        return replace(selection, problems=selection.problems + why, wrong_driver=wrong)
    chosen: list[Gpu] = []
    problems: list[str] = []
    missed = tuple(gpu for gpu in wrong if gpu.pci_address in wanted or gpu.uuid in wanted)
    for name in wanted:
        named = [gpu for gpu in fitting if name in (gpu.pci_address, gpu.uuid)]
        chosen += [gpu for gpu in _not_reserved(named, share) if gpu not in chosen]
        problems += _why_reserved(named, share)
        if not named and all(name not in (gpu.pci_address, gpu.uuid) for gpu in missed):
            problems.append(_why_not_found(name, present))
    return Selection(tuple(chosen), tuple(problems), missed)


def _is_eligible(gpu: Gpu, vendors: tuple[VendorFacts, ...], share: Share) -> bool:
    """Return whether `all` and `count=N` may select the GPU.

    A GPU without a driver is selected only if a driver is expected, or if the machine already has the GPU. An
    integrated GPU, for example, may have no driver on purpose. A virtual function is a part of another GPU on this
    host, and meant for a virtual machine: it is selected only if it has a driver and the machine already has this
    function.
    """
    if gpu.virtual:
        # The machine may have got this virtual function by its address, and pods may use it.
        return bool(gpu.driver) and gpu.pci_address in share.current
    expected = any(vendor.driver_expected for vendor in vendors if vendor.vendor == gpu.vendor)
    return bool(gpu.driver) or expected or gpu.pci_address in share.current


def _select_count(usable: list[Gpu], count: int, share: Share) -> Selection:
    free = [gpu for gpu in _not_reserved(usable, share) if gpu.pci_address not in share.taken]
    # Detached GPUs come last, except the machine's draining GPUs: processes may still use these, and meanwhile an
    # administrator may attach them again. Of all GPUs that do not come last, the machine's current ones come first: a
    # new GPU with a lower address must not replace a GPU that pods use.
    last = {gpu.pci_address for gpu in free if gpu.detached} - share.draining

    def order(gpu: Gpu) -> tuple[bool, bool, bool, int, bool, str]:
        # An integrated GPU is rarely wanted, and has a low address. It comes after all others, and the driver comes
        # after that and after the vendor: the driver of a preferred GPU may load late, and a machine keeps the GPU that
        # it gets first.
        current = gpu.pci_address in share.current
        kind = gpu.integrated, rank(gpu.vendor), not gpu.driver
        return gpu.pci_address in last, not current, *kind, gpu.pci_address

    chosen = tuple(sorted(free, key=order)[:count])
    if len(chosen) == count:
        return Selection(chosen)
    found = f"the host has {counted(len(free), 'usable GPU')}"
    if len(free) < len(usable):
        others = len(usable) - len(free)
        found = f"other machines have {others} of the host's {len(usable)} usable GPUs"
    return Selection(chosen, (f"the configuration asks for {counted(count, 'GPU')}, but {found}",))


def _not_reserved(gpus: list[Gpu], share: Share) -> tuple[Gpu, ...]:
    return tuple(gpu for gpu in gpus if gpu.pci_address not in share.reserved)


def _why_reserved(gpus: list[Gpu], share: Share) -> tuple[str, ...]:
    """Return one sentence for each GPU that is reserved for another machine."""
    return tuple(
        f"GPU {gpu.pci_address} is {share.reserved[gpu.pci_address]}"
        for gpu in gpus
        if gpu.pci_address in share.reserved
    )


def _why_excluded(present: list[Gpu]) -> tuple[str, ...]:
    return tuple(_describe_excluded(gpu.pci_address) for gpu in present if gpu.excluded)


def _describe_excluded(name: str) -> str:
    return (
        f"GPU {name} is excluded by a parameter of its kernel module: see `modprobe -c | grep -iE 'exclu|gpublacklist'`"
    )


def _why_not_found(name: str, present: list[Gpu]) -> str:
    """Return the sentence about a requested GPU that no machine can get, or that was not found on the host."""
    for gpu in present:
        if name in (gpu.pci_address, gpu.uuid):
            return _describe_excluded(name) if gpu.excluded else describe_wrong_driver(gpu, name)
    unknown = [gpu.pci_address for gpu in present if not gpu.uuid and gpu.driver in host_vendor(gpu.vendor).drivers]
    if unknown and not PCI_ADDRESS.fullmatch(name):
        return (
            f"GPU {name} is not on this host, or is one of {', '.join(unknown)}, whose UUIDs are unknown; name the GPU "
            "by its PCI address, or run the command that initialises it, if `unbounded-agent doctor` shows one"
        )
    return f"GPU {name} is not on this host"


def describe_wrong_driver(gpu: Gpu, name: str) -> str:
    """Return the sentence about a GPU with a wrong driver. `name` is its address or UUID, as the settings have it."""
    found = f"kernel driver {gpu.driver}" if gpu.driver else f"driver_override {gpu.override}"
    return f"GPU {name} has {found}, not {' or '.join(host_vendor(gpu.vendor).drivers)}"
