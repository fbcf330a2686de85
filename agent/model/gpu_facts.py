"""Facts that decide how GPUs are offered by Dynamic Resource Allocation. Grants do not depend on them."""

from collections.abc import Mapping

from msgspec import Struct, field


class GpuFault(Struct, frozen=True):
    """A fatal error of a GPU, which the driver wrote into the kernel log."""

    reason: str
    """One word, such as `Xid79`."""
    meaning: str
    """What happened, what it means, and what to do."""
    since: float
    """When the service read the error, in seconds since the epoch. The error is older if the service was down.

    The time in the log's record is not used: the kernel log's clock drifts, and stops during suspend. `since` is also
    `timeAdded` of the GPU's taint: if `since` were earlier than the taint, pods with `tolerationSeconds` would be
    evicted too early.
    """


class Placement(Struct, frozen=True):
    """Where in the host a GPU is attached."""

    numa_node: int = -1
    """-1 if the platform does not say."""
    pcie_root: str = ""
    """The root complex, such as `pci0000:00`; empty if it is unknown."""


class Tainted(Struct, frozen=True):
    """A GPU that is detached or being detached. New pods must not get it."""

    evict: bool
    """Whether pods that have the GPU are evicted."""
    since: float
    """When `gpus detach` tainted the GPU, in seconds since the epoch."""


class GpuFacts(Struct, frozen=True):
    """What is known about GPUs, by PCI address."""

    faults: Mapping[str, GpuFault] = field(default_factory=dict)
    """Fatal errors, until the GPU's driver is unbound or an administrator attaches the GPU."""
    tainted: Mapping[str, Tainted] = field(default_factory=dict)
    """GPUs that are detached or being detached. Machines still have the GPUs that are being detached."""
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """Observed only if a machine uses Dynamic Resource Allocation."""
