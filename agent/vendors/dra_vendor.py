"""The interface of a vendor to agent.dra: what only the vendor's tools know of a device. Attributes are typed."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agent.model.allocatable import AllocatableDevice
from agent.system.files import System

NUMBERS = re.compile(r"v?([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:\.([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Version:
    """A version that claims can compare: three numbers without leading zeros (semver.org)."""

    text: str


Attribute: TypeAlias = str | int | bool | Version
"""The value of a device's attribute (DeviceAttribute of resource.k8s.io)."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a vendor knows of one device. What is unknown is left out, never guessed."""

    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    """By name, such as `uuid`, `productName`, `driverVersion`; for a partition also `profile` and `parentUUID`."""
    capacity: Mapping[str, int] = field(default_factory=dict)
    """By name, such as `memory` in bytes."""
    complete: bool = True
    """Whether the tool has said what it can; if not, it is run again later."""


class DraVendor(ABC):
    """One vendor whose GPUs are offered by Dynamic Resource Allocation."""

    name: str
    resource_prefix: str
    """Prefix of the extended resources that the vendor's device plugin offers, such as `vendor.com/`."""
    harmless_resources: tuple[str, ...] = ()
    """Patterns (fnmatch) of resources with that prefix that give no pod a GPU of its own."""

    @abstractmethod
    def read_facts(
        self, system: System, devices: Sequence[AllocatableDevice], driver_version: str
    ) -> Mapping[AllocatableDevice, DeviceFacts]:
        """Return what is known of the devices, within FACTS_LIMIT. Raises AgentError or OSError.

        Devices of which nothing is known may be missing. `driver_version` is the kernel driver's; it may be empty.
        """


FACTS_LIMIT = 5.0
"""Seconds for a vendor's tool. Meanwhile no other change of a GPU is published."""


def semantic_version(text: str) -> Version | None:
    """Return a version such as `550.163.01` or `12.4` as semver writes it; None for any other text."""
    match = NUMBERS.fullmatch(text.strip())
    return Version(".".join(str(int(each or 0)) for each in match.groups())) if match else None
