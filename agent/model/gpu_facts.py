"""Facts about GPUs that their offer by Dynamic Resource Allocation depends on. The grant does not depend on them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A fatal error of a GPU, which the driver wrote into the kernel log."""

    reason: str
    """One word, such as `Xid79`."""
    meaning: str
    """What happened, what it means, and what to do."""
    since: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a GPU is in the host."""

    numa_node: int = -1
    """-1 if the platform does not say."""
    pcie_root: str = ""
    """The root complex, such as `pci0000:00`; empty if it is unknown."""


@dataclass(frozen=True, slots=True)
class Tainted:
    """A GPU that is being detached. No new pod is to get it."""

    evict: bool
    """Pods that have the GPU are to be evicted."""
    since: float
    """When that began, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What is known of GPUs, by PCI address."""

    faults: Mapping[str, GpuFault] = field(default_factory=dict)
    """Fatal errors. A GPU whose driver was bound again since is not in it."""
    tainted: Mapping[str, Tainted] = field(default_factory=dict)
    """GPUs that are being detached. At first machines still have them."""
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """Observed only if a machine's GPUs are offered with it."""
