"""Parses the capabilities of MIG instances, and finds out which instances are complete. Pure.

A MIG device is a compute instance in a GPU instance. Each of the two instances has a capability. Users of the MIG
device need the nodes of both capabilities, and the GPU's node (MIG User Guide, device nodes and capabilities). The
driver makes the two capabilities' entries in procfs one after the other, and user space makes the nodes later. Until
both nodes exist, the MIG device is incomplete.
"""

import re
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

CAPABILITY = re.compile(r"gpu([0-9]{1,9})/mig/gi([0-9]{1,9})(?:/ci([0-9]{1,9}))?/access")


class Instance(NamedTuple):
    """A GPU instance, or a compute instance in it."""

    gpu: int
    """The GPU's device minor."""
    gi: int
    """The GPU instance's number."""
    ci: int | None = None
    """The compute instance's number; None for a GPU instance."""

    @property
    def gpu_instance(self) -> "Instance":
        return self._replace(ci=None)

    def __str__(self) -> str:
        return f"gi{self.gi}" if self.ci is None else f"gi{self.gi}/ci{self.ci}"


def parse_instance(capability: str) -> Instance | None:
    """Return the instance that a path below /proc/driver/nvidia/capabilities names; None for any other path."""
    match = CAPABILITY.fullmatch(capability)
    return Instance(int(match[1]), int(match[2]), int(match[3]) if match[3] else None) if match else None


def complete(usable: Iterable[Instance]) -> frozenset[Instance]:
    """Return the complete instances. `usable` has the instances that have a node.

    A compute instance is complete if both it and its GPU instance have a node. The GPU instance is then complete too.
    """
    with_node = frozenset(usable)
    whole = frozenset(each for each in with_node if each.ci is not None and each.gpu_instance in with_node)
    return whole | {each.gpu_instance for each in whole}


def incomplete_instances(
    existing: Set[Instance], usable: Set[Instance]
) -> Iterator[tuple[Instance, tuple[Instance, ...]]]:
    """Yield the `existing` instances that are incomplete, each with the instances whose nodes are missing.

    A GPU instance without a compute instance is incomplete too; it comes with an empty tuple. `usable` is as in
    `complete`.
    """
    in_use = {each.gpu_instance for each in existing if each.ci is not None}
    for each in sorted(existing, key=lambda each: (each[:2], str(each))):
        if each.ci is not None:
            missing = tuple(part for part in (each.gpu_instance, each) if part not in usable)
            if missing:
                yield each, missing
        elif each not in in_use:
            yield each, ()
