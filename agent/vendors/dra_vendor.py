"""The interface of a vendor to agent.dra: the facts about devices that only the vendor's tools or driver know."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agent.model.contract import AllocatableDevice
from agent.system.files import System

NUMBERS = re.compile(r"v?([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:\.([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Version:
    """A version that claims can compare: three numbers without leading zeros (semver.org), as text."""

    text: str


Attribute: TypeAlias = str | int | bool | Version
"""The value of a device's attribute (DeviceAttribute of resource.k8s.io)."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a vendor knows about one device. Unknown facts are left out, never guessed."""

    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    """Attributes by name, such as `uuid` and `driverVersion`; for a partition also `profile` and `parentUUID`."""
    capacity: Mapping[str, int] = field(default_factory=dict)
    """Capacities by name, such as `memory` in bytes."""
    complete: bool = True
    """Whether these are all the facts that the vendor's tool can give. If not, the tool is run again later."""


@dataclass(frozen=True, slots=True)
class DraVendor:
    """One vendor whose GPUs are offered by Dynamic Resource Allocation."""

    name: str
    read_facts: Callable[[System, Sequence[AllocatableDevice], str], Mapping[AllocatableDevice, DeviceFacts]]
    """Returns what is known about the devices, within FACTS_LIMIT. Devices about which nothing is known may be missing.
    The text is the kernel driver's version, empty if unknown. Raises AgentError or OSError."""
    resource_prefix: str
    """Prefix of the extended resources that the vendor's device plugin offers, such as `vendor.com/`."""
    harmless_resources: tuple[str, ...] = ()
    """Patterns (fnmatch) of resources that have `resource_prefix`, but give no pod a GPU of its own."""


FACTS_LIMIT = 5.0
"""Seconds that a vendor's tools may take. While they run, no other change to a GPU is published."""


def semantic_version(text: str) -> Version | None:
    """Return a version as semver writes it, such as 550.163.1 for `550.163.01`; None for text that is no version."""
    match = NUMBERS.fullmatch(text.strip())
    return Version(".".join(str(int(each or 0)) for each in match.groups())) if match else None
