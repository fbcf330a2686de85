"""The last grant published to a machine, recorded where no machine can write.

Root in a machine can rewrite its handoff: so the host half publishes the handoff and never reads it to decide anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Granted:
    """The grant in one generation of the handoff."""

    generation: str
    gpus: tuple[str, ...]
    """PCI addresses, including detached GPUs that its processes may use until they end."""
    driver_roots: Mapping[str, int]
    """Indices by vendor."""
