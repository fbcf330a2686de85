"""The GPU states: what the host half tells agent.dra about the health and the place of the granted GPUs.

They are not part of the handoff, because a change of a GPU's health gives the machine half nothing to set up, and so
must not start a new generation. The host half writes this document only for machines that use Dynamic Resource
Allocation.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, NamedTuple

from agent.model.errors import DocumentError
from agent.model.json_document import HOST, TIME, Form, parse_document, render_document
from agent.model.paths import GPU_STATES_NAME
from agent.model.pci_address import PCI_ADDRESS
from agent.model.text import one_line

VERSION = 1
SIZE_LIMIT = 1 << 18
"""Bytes of the largest document that is read. A GPU takes up to 3 KiB, nearly all of it the message."""
REASON = re.compile(r"([A-Za-z][A-Za-z0-9]{0,62})?")
"""A reason becomes the value of a taint, which must have the form of a label's value."""
PCIE_ROOT = re.compile(r"(pci[0-9a-f]{4,8}:[0-9a-f]{2})?")
"""A root complex as sysfs names it (pci_create_root_bus in the kernel)."""
DRIVER = re.compile(r"[A-Za-z0-9_-]{0,63}")
MESSAGE_LIMIT = 500
"""Characters of a message: kubelet and API server cut or refuse longer ones in a pod's status."""

Address = Annotated[str, Form("a PCI address", PCI_ADDRESS.fullmatch)]


class GpuState(StrEnum):
    """Whether pods may be given a GPU."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    """The GPU failed or has no kernel driver, and is still on the bus."""
    DRAINING = "draining"
    """The GPU is detached or being detached."""
    LOST = "lost"
    """The GPU is gone from the bus, or no longer answers."""


class Effect(StrEnum):
    """What a GPU's state does to pods: the effect of a device taint (resource.k8s.io)."""

    NONE = ""
    NO_SCHEDULE = "NoSchedule"
    """No new pod gets the GPU."""
    NO_EXECUTE = "NoExecute"
    """No new pod gets the GPU, and pods that have it are evicted."""


class GpuStatus(NamedTuple):
    """One granted GPU."""

    pci_address: Address
    vendor: str
    state: GpuState
    reason: Annotated[str, Form("one word", REASON.fullmatch)] = ""
    """One word such as `Xid79` or `Detaching`; empty if the GPU is healthy."""
    message: str = ""
    """What happened and what it means, in a sentence; empty if the GPU is healthy."""
    effect: Effect = Effect.NONE
    since: Annotated[int, TIME] = 0
    """When the GPU got into this state; 0 if it is healthy or the time is unknown."""
    kernel_driver: Annotated[str, Form("a driver's name", DRIVER.fullmatch)] = ""
    """The name of the bound kernel driver; empty without one."""
    numa_node: int = -1
    """-1 if the platform does not say."""
    pcie_root: Annotated[str, Form("a root complex such as pci0000:00", PCIE_ROOT.fullmatch)] = ""
    """The root complex, such as `pci0000:00`; empty if unknown."""
    shared: bool = False
    """Whether several claims may share the GPU, each with a part of its memory."""


class _Document(NamedTuple):
    gpus: tuple[GpuStatus, ...]


def render_gpu_states(gpus: Iterable[GpuStatus]) -> bytes:
    """Return the document; the same states give the same bytes."""
    return render_document(VERSION, _Document(tuple(map(_short, sorted(gpus)))))


def parse_gpu_states(data: bytes) -> dict[str, GpuStatus]:
    """Return the states by PCI address. Raises DocumentError, which names the wrong key or the repeated GPU."""
    where = GPU_STATES_NAME
    states: dict[str, GpuStatus] = {}
    for gpu in parse_document(where, data, _Document, VERSION, HOST).gpus:
        if gpu.pci_address in states:
            raise DocumentError(f"{where}: GPU {gpu.pci_address} is listed twice")
        if gpu.effect and gpu.state is GpuState.HEALTHY:
            raise DocumentError(f"{where}: a healthy GPU cannot have the effect {gpu.effect}")
        states[gpu.pci_address] = _short(gpu)
    return states


def _short(gpu: GpuStatus) -> GpuStatus:
    return gpu._replace(message=one_line(gpu.message)[:MESSAGE_LIMIT])
