"""The last grant published to a machine, recorded where no machine can write.

Root in a machine can rewrite its handoff, so the host half never reads a handoff to decide anything.
"""

from collections.abc import Mapping

from msgspec import Struct


class Granted(Struct, frozen=True):
    """The grant in one generation of the handoff."""

    generation: str
    gpus: tuple[str, ...]
    """PCI addresses of the granted GPUs, and of detached GPUs that the machine's processes may use until they exit. The
    handoff does not have these detached GPUs."""
    driver_roots: Mapping[str, int]
    """Indices of the driver roots, by vendor."""
