"""The GPU states: what the host half tells agent.dra about the health and the place of the granted GPUs.

They are not part of the handoff, because a change of a GPU's health gives the machine half nothing to set up, and so
must not start a new generation. The host half writes this document only for machines that use Dynamic Resource
Allocation.
"""

import json
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from agent.model.errors import DocumentError
from agent.model.json_document import accept_version, get, objects, parse_object
from agent.model.paths import GPU_STATES_NAME
from agent.model.pci_address import PCI_ADDRESS
from agent.model.text import one_line

VERSION = 1
SIZE_LIMIT = 1 << 18
"""Bytes of the largest document that is read. A GPU takes up to 3 KiB, nearly all of it the message."""
REASON = re.compile(r"([A-Za-z][A-Za-z0-9]{0,62})?")
"""A reason is one word, because it becomes the value of a taint, which must have the form of a label's value."""
PCIE_ROOT = re.compile(r"(pci[0-9a-f]{4,8}:[0-9a-f]{2})?")
"""A root complex as sysfs names it, `pci0000:00` (pci_create_root_bus in the kernel)."""
DRIVER = re.compile(r"[A-Za-z0-9_-]{0,63}")
MESSAGE_LIMIT = 500
"""Characters of a message: kubelet and API server cut or refuse longer ones in a pod's status."""


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

    pci_address: str
    vendor: str
    state: GpuState
    reason: str = ""
    """One word such as `Xid79` or `Detaching`; empty if the GPU is healthy."""
    message: str = ""
    """What happened and what it means, in a sentence; empty if the GPU is healthy."""
    effect: Effect = Effect.NONE
    since: int = 0
    """When the GPU got into this state, in seconds since the epoch; 0 if it is healthy or the time is unknown."""
    kernel_driver: str = ""
    """The name of the bound kernel driver; empty without one."""
    numa_node: int = -1
    """-1 if the platform does not say."""
    pcie_root: str = ""
    """The root complex, such as `pci0000:00`; empty if unknown."""
    shared: bool = False
    """Whether several claims may share the GPU, each with a part of its memory."""


def render_gpu_states(gpus: Iterable[GpuStatus]) -> bytes:
    """Return the document; the same states give the same bytes."""
    items = [{**each._asdict(), "message": one_line(each.message)[:MESSAGE_LIMIT]} for each in sorted(gpus)]
    return json.dumps({"version": VERSION, "gpus": items}, indent=1).encode() + b"\n"


def parse_gpu_states(data: bytes) -> dict[str, GpuStatus]:
    """Return the states by PCI address. Raises DocumentError, which names the wrong key or the repeated GPU."""
    where = GPU_STATES_NAME
    document = parse_object(where, data)
    accept_version(where, document, (VERSION,))
    states: dict[str, GpuStatus] = {}
    for gpu in objects(where, document, "gpus", _gpu):
        if gpu.pci_address in states:
            raise DocumentError(f"{where}: GPU {gpu.pci_address} is listed twice")
        states[gpu.pci_address] = gpu
    return states


def _gpu(where: str, item: dict[str, Any]) -> GpuStatus:
    effect = get(where, item, "effect", str)
    gpu = GpuStatus(
        pci_address=_matching(where, item, "pci_address", PCI_ADDRESS),
        vendor=get(where, item, "vendor", str),
        state=_state(get(where, item, "state", str), effect),
        reason=_matching(where, item, "reason", REASON),
        message=one_line(get(where, item, "message", str))[:MESSAGE_LIMIT],
        effect=_effect(effect),
        since=get(where, item, "since", int),
        kernel_driver=_matching(where, item, "kernel_driver", DRIVER),
        numa_node=get(where, item, "numa_node", int),
        pcie_root=_matching(where, item, "pcie_root", PCIE_ROOT),
        # An older host half does not write this key.
        shared="shared" in item and get(where, item, "shared", bool),
    )
    if not 0 <= gpu.since < 1 << 36:
        raise DocumentError(f"{where}: key since must be a time in seconds, not {gpu.since}")
    if gpu.effect and gpu.state is GpuState.HEALTHY:
        raise DocumentError(f"{where}: a healthy GPU cannot have the effect {gpu.effect}")
    return gpu


def _matching(where: str, item: dict[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    value = get(where, item, key, str)
    if not pattern.fullmatch(value):
        raise DocumentError(f"{where}: key {key} has an unexpected form: {value[:80]!a}")
    return value


def _state(text: str, effect: str) -> GpuState:
    """Return the state of this name. A newer host half's state is taken for UNHEALTHY: pods should not get the GPU.

    So is a healthy GPU's state if only a newer host half knows the GPU's effect. If the document were refused instead,
    the failures of all other GPUs would go unnoticed.
    """
    known = text in set(GpuState) and (effect in set(Effect) or text != GpuState.HEALTHY)
    return GpuState(text) if known else GpuState.UNHEALTHY


def _effect(text: str) -> Effect:
    """Return the effect of this name. A newer host half's effect is taken for NO_SCHEDULE, which evicts no pod."""
    return Effect(text) if text in set(Effect) else Effect.NO_SCHEDULE
